//! A hostile front end before a whole vhost-user-blk export: a socket, messages with descriptors of any
//! kind, memory that shrinks, rings and requests in it, a record of what is in flight as it likes.
//!
//! The export, its queue and a null node share one loop. Whatever came before, the next front end is
//! served, a request of its on a queue included, and no descriptor and no mapping stays behind.

use std::cell::RefCell;
use std::fs::File;
use std::io::{IoSlice, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use block::NodeRegistry;
use block::options::{
    BlockdevOptions, Cache, DetectZeroes, Discard, Driver as NodeDriver, NullOptions,
};
use event_loop::{EventLoop, LoopConfig, PollParams};
use exports::vhost_user::{Listen, VhostUserConfig, VhostUserExport, fd_passing};
use nix::fcntl::{FcntlArg, OFlag, SealFlag, fcntl, open};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::MsgFlags;
use nix::sys::stat::Mode;

use crate::input::Input;

/// Guest memory: rings of two queues, then headers, data and indirect tables; each file has as much.
const MEMORY: u64 = 0x10000;
const USER: u64 = 0x7000_0000;
const DESC: u64 = 0;
const AVAIL: u64 = 0x800;
const USED: u64 = 0x1000;
const QUEUE: u64 = 0x2000;
const ENTRIES: u64 = 64;
const DATA: u64 = 0x4000;
const RECORD: u64 = 0x1000;
/// Requests of the protocol.
const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const GET_VRING_BASE: u32 = 11;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_VRING_ENABLE: u32 = 18;
const SET_INFLIGHT_FD: u32 = 32;
/// How long may be waited for what happens at once on an idle machine.
const PATIENCE: Duration = Duration::from_secs(20);
/// Messages and other steps of an input.
const STEPS: usize = 200;

struct World {
    event_loop: EventLoop,
    export: VhostUserExport,
    path: PathBuf,
    /// Descriptors when nobody is connected.
    files: usize,
    devices: Devices,
}

/// What is always the same, duplicated when it is sent.
struct Devices {
    folder: OwnedFd,
    null: OwnedFd,
    zero: OwnedFd,
    pipe: (OwnedFd, OwnedFd),
    socket: UnixStream,
    path_only: OwnedFd,
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("it is there").count()
}

impl World {
    fn new() -> Self {
        let poll = PollParams { max_ns: 0, ..PollParams::default() };
        let config = LoopConfig { poll, ..LoopConfig::default() };
        let event_loop = EventLoop::new(config).expect("a loop");
        let thread = std::thread::current().id();
        let name = format!("ringmill-fuzz-{}-{thread:?}.sock", std::process::id());
        let path = std::env::temp_dir().join(name);
        let options = BlockdevOptions {
            node_name: Some("null".into()),
            read_only: false,
            auto_read_only: false,
            discard: Discard::Unmap,
            detect_zeroes: DetectZeroes::Off,
            active: true,
            cache: Cache::default(),
            driver: NodeDriver::NullCo(NullOptions {
                size: 1 << 20,
                latency_ns: 0,
                read_zeroes: true,
            }),
        };
        let node = NodeRegistry::new().open(&options).expect("a null node");
        let config = VhostUserConfig {
            id: "fuzz".into(),
            listen: Listen::Path(path.clone()),
            io_threads: vec![event_loop.handle()],
            num_queues: 2,
            writable: true,
            writethrough: false,
            logical_block_size: 512,
            pin_memory: false,
            taken_over: None,
        };
        let started = Rc::<RefCell<Option<_>>>::default();
        let (out, control) = (started.clone(), event_loop.clone());
        event_loop.spawn(async move {
            let export = VhostUserExport::blk(control, config, node, "fuzz".into()).await;
            out.replace(Some(export));
        });
        while started.borrow().is_none() {
            event_loop.run_once(true).expect("it turns");
        }
        let export = started.take().expect("just seen").expect("an export");
        let flags = OFlag::O_CLOEXEC;
        let open = |path, more| open(path, flags | more, Mode::empty()).expect("it is there");
        let devices = Devices {
            folder: open("/", OFlag::O_DIRECTORY),
            null: open("/dev/null", OFlag::O_RDWR),
            zero: open("/dev/zero", OFlag::O_RDWR),
            pipe: nix::unistd::pipe().expect("a pipe"),
            socket: UnixStream::pair().expect("a pair").0,
            path_only: open("/", OFlag::O_PATH),
        };
        let mut world = World { event_loop, export, path, files: 0, devices };
        // What the first connection makes for good is there afterwards.
        world.serve_another();
        world.turn(1000);
        world.files = open_files();
        world
    }

    fn turn(&self, times: u32) {
        for _ in 0..times {
            self.event_loop.run_once(false).expect("it turns");
        }
    }

    /// Turns until that is so.
    fn until(&self, what: &str, mut so: impl FnMut() -> bool) {
        // The kernel's threads, too, have to get their turn on a busy machine.
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            if so() {
                return;
            }
            self.turn(4);
        }
        let files = std::fs::read_dir("/proc/self/fd").expect("it is there");
        let open: Vec<_> =
            files.flatten().flat_map(|file| std::fs::read_link(file.path())).collect();
        panic!("{what}: it does not happen; {} are open: {open:?}", open.len());
    }

    /// The next front end, which keeps to the rules, is served.
    fn serve_another(&self) {
        let mut front_end = FrontEnd::connect(self);
        front_end.set_up();
        front_end.request(0, [1, 0, 0, 0], 0, 512);
        front_end.kick(0);
        let mut used = [0; 2];
        self.until("a request of the next front end is answered", || {
            front_end.replies();
            front_end.memory.read_at(&mut used, USED + 2).expect("it is our file");
            used == [1, 0]
        });
        let mut status = [0xff];
        front_end.memory.read_at(&mut status, DATA + 0x800).expect("it is our file");
        assert_eq!(status, [0], "and well");
        self.leave(front_end);
    }

    fn leave(&self, front_end: FrontEnd<'_>) {
        drop(front_end);
        self.until("the connection ends", || !self.export.is_connected());
        if self.files > 0 {
            self.until("all descriptors are closed", || open_files() <= self.files);
        }
        self.until("all memory is unmapped", || {
            let maps = std::fs::read_to_string("/proc/self/maps").expect("it is there");
            !maps.contains("memfd:stranger")
        });
    }
}

struct FrontEnd<'a> {
    world: &'a World,
    socket: UnixStream,
    memory: File,
    kicks: [EventFd; 2],
    call: EventFd,
    record: File,
    offered: [u16; 2],
}

fn memfd(size: u64, seals: SealFlag) -> File {
    let memory = memfd_create(c"stranger", MFdFlags::MFD_ALLOW_SEALING).expect("a memfd");
    let file = File::from(memory);
    file.set_len(size).expect("it is new");
    fcntl(file.as_fd(), FcntlArg::F_ADD_SEALS(seals)).expect("it may be sealed");
    file
}

impl<'a> FrontEnd<'a> {
    fn connect(world: &'a World) -> Self {
        let socket = UnixStream::connect(&world.path).expect("the export listens");
        socket.set_nonblocking(true).expect("a socket");
        let event = || EventFd::from_flags(EfdFlags::EFD_NONBLOCK).expect("an eventfd");
        FrontEnd {
            world,
            socket,
            memory: memfd(MEMORY, SealFlag::empty()),
            kicks: [event(), event()],
            call: event(),
            record: memfd(RECORD, SealFlag::F_SEAL_SHRINK),
            offered: [0; 2],
        }
    }

    /// Sends a message as it is; what does not fit into the socket is not sent.
    fn send(&mut self, bytes: &[u8], fds: &[RawFd]) {
        let iov = [IoSlice::new(bytes)];
        let _ = fd_passing::send(self.socket.as_fd(), &iov, fds, MsgFlags::MSG_DONTWAIT);
    }

    fn message(&mut self, code: u32, payload: &[u64], fds: &[RawFd]) {
        let mut bytes = header(code, 1, payload.len() as u32 * 8);
        bytes.extend(payload.iter().flat_map(|word| word.to_ne_bytes()));
        self.send(&bytes, fds);
        self.world.turn(2);
    }

    fn replies(&mut self) {
        let mut bytes = [0; 4096];
        while self.socket.read(&mut bytes).is_ok_and(|n| n > 0) {}
    }

    /// All that it takes for queue 0 and 1 to run.
    fn set_up(&mut self) {
        self.message(GET_FEATURES, &[], &[]);
        // VERSION_1, PROTOCOL_FEATURES, EVENT_IDX, INDIRECT_DESC and the device's own.
        self.message(SET_FEATURES, &[1 << 32 | 1 << 30 | 1 << 28 | 0x7240], &[]);
        // MQ, REPLY_ACK, BACKEND_REQ, CONFIG, INFLIGHT_SHMFD, RESET_DEVICE, CONFIGURE_MEM_SLOTS, STATUS.
        self.message(SET_PROTOCOL_FEATURES, &[0b1_1011_0010_0010_1001], &[]);
        let memory = self.memory.as_raw_fd();
        self.message(SET_MEM_TABLE, &[1, 0, MEMORY, USER, 0], &[memory]);
        for queue in 0..2 {
            self.start(queue);
        }
        self.replies();
    }

    fn start(&mut self, queue: u64) {
        let base = USER + queue * QUEUE;
        let (kick, call) = (self.kicks[queue as usize].as_fd().as_raw_fd(), self.call.as_fd());
        let call = call.as_raw_fd();
        self.message(SET_VRING_NUM, &[queue | ENTRIES << 32], &[]);
        self.message(SET_VRING_BASE, &[queue], &[]);
        self.message(SET_VRING_ADDR, &[queue, base + DESC, base + USED, base + AVAIL, 0], &[]);
        self.message(SET_VRING_CALL, &[queue], &[call]);
        self.message(SET_VRING_KICK, &[queue], &[kick]);
        self.message(SET_VRING_ENABLE, &[queue | 1 << 32], &[]);
    }

    fn poke(&self, addr: u64, bytes: &[u8]) {
        // A file that was shrunk is not grown again: what is beyond its end stays lost.
        let len = self.memory.metadata().map_or(0, |metadata| metadata.len());
        if addr.saturating_add(bytes.len() as u64) <= len {
            let _ = self.memory.write_at(bytes, addr);
        }
    }

    /// Offers a request in the slot `at`: a header, data, a status.
    fn request(&mut self, queue: usize, kind: [u8; 4], slot: u64, len: u32) {
        let base = queue as u64 * QUEUE;
        let at = DATA + slot % 8 * 0x1000;
        let mut head = [0; 16];
        head[0] = kind[0] & 15;
        head[0] ^= 1;
        head[8] = kind[1];
        self.poke(at, &head);
        let reads = head[0] & 1 == 0;
        let first = slot % 21 * 3;
        let descriptor = |addr: u64, len: u32, flags: u16, next: u64| {
            let (addr, len) = (addr.to_le_bytes(), len.to_le_bytes());
            [&addr[..], &len, &flags.to_le_bytes(), &(next as u16).to_le_bytes()].concat()
        };
        let data = descriptor(at + 0x100, len, if reads { 3 } else { 1 }, first + 2);
        self.poke(base + DESC + first * 16, &descriptor(at, 16, 1, first + 1));
        self.poke(base + DESC + (first + 1) * 16, &data);
        self.poke(base + DESC + (first + 2) * 16, &descriptor(at + 0x800, 1, 2, 0));
        self.offer(queue, first as u16);
    }

    fn offer(&mut self, queue: usize, head: u16) {
        let base = queue as u64 * QUEUE;
        let index = self.offered[queue];
        self.poke(base + AVAIL + 4 + u64::from(index) % ENTRIES * 2, &head.to_le_bytes());
        self.offered[queue] = index.wrapping_add(1);
        self.poke(base + AVAIL + 2, &self.offered[queue].to_le_bytes());
    }

    fn kick(&self, queue: usize) {
        let _ = self.kicks[queue].write(1);
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let kind = input.u8();
        let queue = usize::from(kind >> 7);
        match kind & 15 {
            0 => self.set_up(),
            1 => self.start(queue as u64),
            2..=4 => {
                let len = u32::from(input.u16());
                self.request(queue, input.array(), input.u8().into(), len);
            }
            5 => self.kick(queue),
            6 => {
                let addr = u64::from(input.u16());
                self.poke(addr, &input.array::<8>());
            }
            7 => {
                let head = u16::from(input.u8());
                self.offer(queue, head);
            }
            8 => {
                let base = queue as u64 * QUEUE;
                let at = base + DESC + u64::from(input.u8() % 64) * 16;
                let addr = match input.u8() {
                    0 => input.u64(),
                    byte => u64::from(byte) << 8,
                };
                let (len, flags) = (input.u16(), input.u8() & 7);
                self.poke(at, &addr.to_le_bytes());
                self.poke(at + 8, &u32::from(len).to_le_bytes());
                self.poke(at + 12, &[flags, 0, input.u8(), 0]);
            }
            9 => {
                let size = u64::from(input.u16());
                let _ = self.memory.set_len(size.min(MEMORY));
            }
            10 => self.record(input),
            11 => self.message(GET_VRING_BASE, &[queue as u64], &[]),
            12 => self.call(input, queue as u64),
            13 => self.world.turn(u32::from(input.u8() & 7)),
            _ => self.any(input),
        }
        self.replies();
    }

    /// A call eventfd, blocking or not, full or not, or none.
    fn call(&mut self, input: &mut Input<'_>, queue: u64) {
        let how = input.u8();
        let flags = if how & 1 == 0 { EfdFlags::empty() } else { EfdFlags::EFD_NONBLOCK };
        let call = EventFd::from_flags(flags).expect("an eventfd");
        if how & 2 != 0 {
            let _ = call.write(u64::MAX - 1);
        }
        match how & 4 {
            0 => self.message(SET_VRING_CALL, &[queue], &[call.as_fd().as_raw_fd()]),
            _ => self.message(SET_VRING_CALL, &[queue | 1 << 8], &[]),
        }
    }

    /// A record of what is in flight, with any contents.
    fn record(&mut self, input: &mut Input<'_>) {
        let how = input.u8();
        let mut bytes = [0; 64];
        bytes[8] = 1;
        bytes[10..12].copy_from_slice(&(ENTRIES as u16).to_le_bytes());
        bytes[12..16].copy_from_slice(&input.array::<4>());
        let _ = self.record.write_at(&bytes, 0);
        for _ in 0..how & 15 {
            let (head, place) = (u64::from(input.u8()), u64::from(input.u8() & 15));
            let at = (16 + head * 16 + place) % RECORD;
            let _ = self.record.write_at(&input.array::<1>(), at);
        }
        let (queues, size, len) = match how >> 4 {
            0 => (u64::from(input.u16()), u64::from(input.u16()), u64::from(input.u16())),
            _ => (1, ENTRIES, RECORD),
        };
        let fd = match how >> 4 {
            1 => self.memory.as_raw_fd(),
            2 => self.world.devices.zero.as_raw_fd(),
            _ => self.record.as_raw_fd(),
        };
        // Two words, then two of 16 bits and their padding.
        self.message(SET_INFLIGHT_FD, &[len, 0, queues | size << 16], &[fd]);
    }

    /// A message with any descriptors, maybe cut, maybe with more behind it.
    fn any(&mut self, input: &mut Input<'_>) {
        let (code, flags) = (u32::from(input.u8() % 48), u32::from(input.u8()));
        let words = usize::from(input.u8() & 15);
        let count = match input.u8() {
            how if how & 0xc0 == 0xc0 => usize::from(how & 15),
            how => usize::from(how & 1),
        };
        let mut owned = Vec::new();
        for _ in 0..count {
            owned.push(self.descriptor(input.u8()));
        }
        let fds: Vec<RawFd> = owned.iter().map(AsRawFd::as_raw_fd).collect();
        let len = match flags & 0xc0 {
            0xc0 => u32::from(input.u16()),
            _ => words as u32 * 8,
        };
        let mut bytes = header(code, (flags & 0x3c) | 1, len);
        for _ in 0..words {
            let word = match input.u8() {
                255 => input.u64(),
                254 => USER + u64::from(input.u16()),
                253 => u64::from(input.u16()) << 8,
                252 => u64::from(input.u8()) << 32 | u64::from(input.u8()),
                small => small.into(),
            };
            bytes.extend(word.to_ne_bytes());
        }
        if flags & 0x80 != 0 && flags & 0x40 == 0 {
            bytes.truncate(usize::from(input.u8()));
        }
        self.send(&bytes, &fds);
        self.world.turn(2);
    }

    fn descriptor(&self, which: u8) -> OwnedFd {
        let devices = &self.world.devices;
        let copy = |fd: &dyn AsFd| fd.as_fd().try_clone_to_owned().expect("a descriptor");
        let sealed = |seals| OwnedFd::from(memfd(MEMORY, seals));
        match which % 17 {
            0 => copy(&self.kicks[0]),
            1 => EventFd::new().expect("an eventfd").into(),
            2 => EventFd::from_flags(EfdFlags::EFD_SEMAPHORE).expect("an eventfd").into(),
            3 => copy(&self.memory),
            4 => sealed(SealFlag::F_SEAL_SHRINK),
            5 => sealed(SealFlag::F_SEAL_WRITE),
            6 => sealed(SealFlag::F_SEAL_SEAL),
            7 => memfd(u64::from(which), SealFlag::empty()).into(),
            8 => copy(&devices.folder),
            9 => copy(&devices.null),
            10 => copy(&devices.zero),
            11 => copy(&devices.pipe.0),
            12 => copy(&devices.pipe.1),
            13 => copy(&devices.socket),
            14 => copy(&devices.path_only),
            15 => {
                let path = format!("/proc/self/fd/{}", self.memory.as_raw_fd());
                File::open(path).expect("for reading alone").into()
            }
            _ => copy(&self.record),
        }
    }
}

fn header(code: u32, flags: u32, len: u32) -> Vec<u8> {
    [code, flags, len].into_iter().flat_map(u32::to_ne_bytes).collect()
}

thread_local! {
    static WORLD: World = World::new();
}

/// Plays the front end, then one that keeps to the rules.
pub fn run(data: &[u8]) {
    WORLD.with(|world| {
        let mut input = Input::new(data);
        let mut front_end = FrontEnd::connect(world);
        if input.u8() & 1 == 0 {
            front_end.set_up();
        }
        for _ in 0..STEPS {
            if input.is_empty() {
                break;
            }
            front_end.step(&mut input);
        }
        world.turn(4);
        world.leave(front_end);
        world.serve_another();
    });
}
