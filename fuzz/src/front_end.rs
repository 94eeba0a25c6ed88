//! A hostile front end of a whole vhost-user-blk export: a socket, messages with descriptors of any
//! kind, memory that shrinks, comes and goes, arbitrary rings and requests in it, an arbitrary in-flight record,
//! and a log of written pages.
//!
//! The export, its queue and a null node share one loop. After each input, a correct front end has to be
//! served, including a request, and no descriptor and no mapping may be left over.

use std::fs::File;
use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use event_loop::EventLoop;
use exports::vhost_user::session::protocol_features::OFFERED;
use exports::vhost_user::session::{
    VHOST_F_LOG_ALL, VHOST_USER_F_PROTOCOL_FEATURES, VIRTIO_F_RING_EVENT_IDX,
    VIRTIO_F_RING_INDIRECT_DESC, VIRTIO_F_VERSION_1,
};
use exports::vhost_user::wire::Request::{self, *};
use exports::vhost_user::{Listen, VhostUserConfig, VhostUserExport, fd_passing};
use nix::fcntl::{FcntlArg, OFlag, SealFlag, fcntl, open};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::MsgFlags;
use nix::sys::stat::Mode;

use crate::input::Input;
use crate::world;

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
/// Bytes of a log with a bit for each page of the memory, and as much again.
const LOG: u64 = MEMORY >> 12 >> 2;
/// VERSION_1, PROTOCOL_FEATURES, INDIRECT_DESC and the device's own.
const FEATURES: u64 =
    VIRTIO_F_VERSION_1 | VHOST_USER_F_PROTOCOL_FEATURES | VIRTIO_F_RING_INDIRECT_DESC | 0x7240;
/// In the header: the protocol's version; an acknowledgement is waited for.
const VERSION: u32 = 1;
const NEED_REPLY: u32 = 1 << 3;
/// Messages and other steps of an input.
const STEPS: usize = 200;

pub(crate) struct World {
    pub(crate) event_loop: EventLoop,
    pub(crate) export: VhostUserExport,
    path: PathBuf,
    /// Number of descriptors without a connection.
    files: usize,
    devices: Devices,
}

/// Fixed descriptors, duplicated when they are sent.
struct Devices {
    folder: OwnedFd,
    null: OwnedFd,
    zero: OwnedFd,
    pipe: (OwnedFd, OwnedFd),
    socket: UnixStream,
    path_only: OwnedFd,
}

/// An export of two queues on one loop.
pub(crate) fn config(event_loop: &EventLoop, listen: Listen) -> VhostUserConfig {
    VhostUserConfig {
        num_queues: Some(2),
        writable: true,
        ..VhostUserConfig::new("fuzz", listen, vec![event_loop.handle()])
    }
}

/// Whether nothing is left of a front end's memory.
pub(crate) fn is_unmapped() -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("it is there");
    !maps.contains("memfd:stranger") && !maps.contains("memfd:ringmill-inflight")
}

impl World {
    pub(crate) fn new() -> Self {
        let event_loop = world::quiet_loop();
        let path = world::own_path("front-end");
        let config = config(&event_loop, Listen::Path(path.clone()));
        let (control, node) = (event_loop.clone(), world::null_node(1 << 20));
        let export = async { VhostUserExport::blk(control, config, node, "fuzz".into()).await };
        let export = event_loop.block_on(export).expect("it turns").expect("an export");
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
        world.files = world::open_files();
        world
    }

    fn turn(&self, times: u32) {
        world::turn(&self.event_loop, times);
    }

    fn until(&self, what: &str, so: impl FnMut() -> bool) {
        world::until(&self.event_loop, what, so);
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
            self.until("all descriptors are closed", || world::open_files() <= self.files);
        }
        self.until("all memory is unmapped", is_unmapped);
    }
}

pub(crate) struct FrontEnd<'a> {
    world: &'a World,
    socket: UnixStream,
    memory: File,
    kicks: [EventFd; 2],
    call: EventFd,
    record: File,
    /// What the export last sent: its own record of what is in flight.
    given: Option<File>,
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
    pub(crate) fn connect(world: &'a World) -> Self {
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
            given: None,
            offered: [0; 2],
        }
    }

    /// Sends a message as it is; what does not fit into the socket is not sent.
    fn send(&mut self, bytes: &[u8], fds: &[RawFd]) {
        let iov = [IoSlice::new(bytes)];
        let _ = fd_passing::send(self.socket.as_fd(), &iov, fds, MsgFlags::MSG_DONTWAIT);
    }

    fn message(&mut self, request: Request, payload: &[u64], fds: &[RawFd]) {
        let payload: Vec<u8> = payload.iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.message_of(request, VERSION, &payload, fds);
    }

    fn message_of(&mut self, request: Request, flags: u32, payload: &[u8], fds: &[RawFd]) {
        let mut bytes = header(request as u32, flags, payload.len() as u32);
        bytes.extend(payload);
        self.send(&bytes, fds);
        self.world.turn(2);
    }

    fn replies(&mut self) {
        let mut bytes = [0; 4096];
        while let Ok(received) = fd_passing::receive(self.socket.as_fd(), &mut bytes)
            && received.len > 0
        {
            self.given = received.fds.into_iter().map(File::from).next_back().or(self.given.take());
        }
    }

    /// All that it takes for queue 0 and 1 to run.
    pub(crate) fn set_up(&mut self) {
        self.message(GetFeatures, &[], &[]);
        self.message(SetFeatures, &[FEATURES], &[]);
        self.message(SetProtocolFeatures, &[OFFERED], &[]);
        let memory = self.memory.as_raw_fd();
        self.message(SetMemTable, &[1, 0, MEMORY, USER, 0], &[memory]);
        for queue in 0..2 {
            self.start(queue);
        }
        self.replies();
    }

    fn start(&mut self, queue: u64) {
        let base = USER + queue * QUEUE;
        let (kick, call) = (self.kicks[queue as usize].as_fd().as_raw_fd(), self.call.as_fd());
        let call = call.as_raw_fd();
        self.message(SetVringNum, &[queue | ENTRIES << 32], &[]);
        self.message(SetVringBase, &[queue], &[]);
        self.message(SetVringAddr, &[queue, base + DESC, base + USED, base + AVAIL, 0], &[]);
        self.message(SetVringCall, &[queue], &[call]);
        self.message(SetVringKick, &[queue], &[kick]);
        self.message(SetVringEnable, &[queue | 1 << 32], &[]);
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
            11 => self.message(GetVringBase, &[queue as u64], &[]),
            12 => self.call(input, queue as u64),
            13 => self.world.turn(u32::from(input.u8() & 7)),
            14 => self.known(input, queue as u64),
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
            0 => self.message(SetVringCall, &[queue], &[call.as_fd().as_raw_fd()]),
            _ => self.message(SetVringCall, &[queue | 1 << 8], &[]),
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
        // That of the write cache mode is behind the ring's.
        if how >= 0xc0 {
            let at = (16 + ENTRIES * 16).next_multiple_of(64);
            let _ = self.record.write_at(b"ringwce1", at);
        }
        for _ in 0..how & 15 {
            let (head, place) = (u64::from(input.u8()), u64::from(input.u8() & 15));
            let at = (16 + head * 16 + place) % RECORD;
            let _ = self.record.write_at(&input.array::<1>(), at);
        }
        let (queues, size, len) = match how >> 4 {
            0 => (u64::from(input.u16()), u64::from(input.u16()), u64::from(input.u16())),
            _ => (1, ENTRIES, RECORD),
        };
        let fd = match (how >> 4, &self.given) {
            (1, _) => self.memory.as_raw_fd(),
            (2, _) => self.world.devices.zero.as_raw_fd(),
            (3, Some(given)) => given.as_raw_fd(),
            _ => self.record.as_raw_fd(),
        };
        // Two words, then two of 16 bits and their padding.
        self.message(SetInflightFd, &[len, 0, queues | size << 16], &[fd]);
    }

    /// A message of the right length, about what a front end has; nearly right, mostly.
    fn known(&mut self, input: &mut Input<'_>, queue: u64) {
        let (which, how) = (input.u8(), input.u8());
        // The descriptor that it should be, or another one.
        let fd = |front_end: &Self, right: RawFd, input: &mut Input<'_>| match how & 0x30 {
            0x30 => Ok(front_end.descriptor(input.u8())),
            _ => Err(right),
        };
        let raw = |fd: &Result<OwnedFd, RawFd>| match fd {
            Ok(fd) => fd.as_raw_fd(),
            Err(fd) => *fd,
        };
        let (memory, record) = (self.memory.as_raw_fd(), self.record.as_raw_fd());
        let kick = self.kicks[0].as_fd().as_raw_fd();
        let flags = VERSION | if how & 0x40 == 0 { 0 } else { NEED_REPLY };
        let mut words = Vec::new();
        let (request, fd) = match which % 16 {
            0..=2 => {
                let (size, offset) = match how & 7 {
                    0 => (input.u64(), input.u64()),
                    1 => (u64::from(input.u8()), u64::from(input.u16())),
                    2 => (LOG, u64::from(input.u8()) << 8),
                    _ => (LOG, 0),
                };
                words.extend([size, offset]);
                let right = if how & 8 == 0 { record } else { memory };
                (SetLogBase, Some(fd(self, right, input)))
            }
            3 => (SetLogFd, Some(fd(self, kick, input))),
            4 | 5 => {
                let more = [VHOST_F_LOG_ALL, 0, VIRTIO_F_RING_EVENT_IDX, input.u64()];
                words.push(FEATURES | more[usize::from(how & 3)]);
                (SetFeatures, None)
            }
            6 => {
                let base = USER + queue * QUEUE;
                let log = match how & 2 {
                    0 => USED + queue * QUEUE,
                    _ => input.u64(),
                };
                let logged = u64::from(how & 1) << 32;
                words.extend([queue | logged, base + DESC, base + USED, base + AVAIL, log]);
                (SetVringAddr, None)
            }
            7 => {
                words.extend([0, 0, u64::from(input.u8() & 3) | ENTRIES << 16]);
                (GetInflightFd, None)
            }
            8 | 9 => {
                let (at, len) = (u64::from(input.u8()), u64::from(input.u8() & 15));
                words.extend([at | len << 32, u64::from(how & 1)]);
                (if which % 16 == 8 { SetConfig } else { GetConfig }, None)
            }
            10..=12 => {
                // Beside or over existing memory; the file stays as long as it is.
                let (at, size) = (u64::from(input.u8()) << 12, u64::from(input.u8() & 15) << 12);
                let offset = if how & 1 == 0 { 0 } else { u64::from(input.u16()) };
                words.extend([0, at, size, USER + at, offset]);
                match which % 16 {
                    12 => (RemMemReg, None),
                    _ => (AddMemReg, Some(fd(self, memory, input))),
                }
            }
            13 => {
                words.push(queue);
                (SetVringErr, Some(fd(self, kick, input)))
            }
            14 => (SetBackendReqFd, Some(fd(self, self.world.devices.socket.as_raw_fd(), input))),
            _ => match how & 3 {
                0 => (ResetDevice, None),
                1 => (ResetOwner, None),
                _ => {
                    words.push(input.u8().into());
                    (SetStatus, None)
                }
            },
        };
        let mut payload: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        if matches!(request, SetConfig | GetConfig) {
            // Three words of 32 bits, then so many bytes.
            payload.truncate(12);
            let len = usize::from(payload[4]);
            payload.extend((0..len).map(|_| input.u8()));
        }
        let fds: Vec<RawFd> = fd.iter().map(raw).collect();
        self.message_of(request, flags, &payload, &fds);
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
            15 => File::open(world::path_of(&self.memory)).expect("for reading alone").into(),
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
