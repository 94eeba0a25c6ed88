//! Messages in the order of real front ends, `recordings/`, with a driver on the rings: after each start of the rings, data is
//! written and read back, and at each stop the ring's index must be the driver's.
//!
//! `vhost_user_recorder.py` in `tests/clients` made the recordings, and describes their lines. From there come the messages and
//! their order. Features, memory, addresses, eventfds and bases are those of this test. A base of a recording says whether the
//! front end continues the ring or begins a new one.

#![allow(clippy::disallowed_methods, reason = "the locks of tests are not counted")]

use crate::common;

use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use common::{
    Dir, Guest, MEMORY, NEED_REPLY, PATIENCE, RamDisk, SECTOR, connect, io_thread, is_signalled,
    raw_message, run_on, send_with,
};
use event_loop::{IoThread, RingChoice};
use exports::vhost_user::wire::HEADER_LEN;
use exports::vhost_user::{Listen, VhostUserConfig, VhostUserExport, fd_passing};
use guest_memory::test_util::USER_BASE;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::ftruncate;
use queue::Segment;
use queue::driver::Driver;

/// `struct virtio_scsi_cmd_req` and `_resp`, with a CDB and sense data of the sizes that drivers have by default.
const SCSI_REQUEST: u32 = 51;
const SCSI_RESPONSE: u32 = 108;
const UNIT_ATTENTION: u8 = 6;
/// virtio-scsi has a control queue and an event queue before its request queues.
const FIRST_SCSI_QUEUE: usize = 2;

const VHOST_F_LOG_ALL: u64 = 1 << 26;

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Blk,
    Scsi,
}

/// The back end: a disk in memory behind an export.
struct BackEnd {
    kind: Kind,
    num_queues: u16,
    disk: std::sync::Arc<RamDisk>,
    control: IoThread,
    io_thread: IoThread,
    dir: Dir,
    export: Option<VhostUserExport>,
}

impl BackEnd {
    fn start(&mut self) {
        let listen = Listen::Path(self.dir.socket());
        let config = VhostUserConfig {
            num_queues: Some(self.num_queues),
            writable: true,
            ..VhostUserConfig::new("e0", listen, vec![self.io_thread.handle().clone()])
        };
        let (kind, disk) = (self.kind, self.disk.clone());
        let export = run_on(&self.control, move |event_loop| async move {
            match kind {
                Kind::Blk => VhostUserExport::blk(event_loop, config, disk, "serial".into()).await,
                Kind::Scsi => VhostUserExport::scsi(event_loop, config, vec![disk]).await,
            }
        });
        self.export = Some(export.unwrap());
    }

    fn stop(&mut self) {
        let export = self.export.take().unwrap();
        run_on(&self.control, move |_| export.stop()).unwrap();
    }
}

/// A ring, as the front end and the driver know it.
#[derive(Default)]
struct Ring {
    /// The driver has been made by SET_VRING_NUM.
    is_set_up: bool,
    is_running: bool,
    /// Bases of the last stop, in the recording and here. `None`: the back end has not told.
    stopped_at: Option<(u16, u16)>,
}

struct Replay<'a> {
    lines: Vec<&'a str>,
    at: usize,
    back_end: BackEnd,
    guest: Guest,
    rings: Vec<Ring>,
    stream: Option<UnixStream>,
    /// Names of the regions that have rings. They are the guest's memory.
    with_rings: Vec<&'a str>,
    /// The others, as they come.
    others: Vec<(&'a str, OwnedFd)>,
    offered: u64,
    inflight: Option<(Vec<u8>, OwnedFd)>,
    /// Memory of the migration's log.
    log: Option<OwnedFd>,
    /// Number of the next sector that is written.
    written: u64,
}

/// Offset of the requests in the guest's memory, and their sizes.
const REQUESTS: u64 = 0x18_0000;
const RING: u64 = 0x8000;

impl<'a> Replay<'a> {
    fn new(recording: &'a str, kind: Kind) -> Self {
        let lines: Vec<&str> =
            recording.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).collect();
        let all_words = lines.iter().map(|line| line.split(' ').collect::<Vec<_>>());
        let with_rings = all_words
            .filter(|words| words.starts_with(&[">", "SET_VRING_ADDR"]))
            .map(|words| words[3])
            .collect();
        let queues = lines.iter().find_map(|line| line.strip_prefix("< GET_QUEUE_NUM "));
        let queues: u16 = queues.expect("GET_QUEUE_NUM").parse().expect("a number");
        let requests = match kind {
            Kind::Blk => queues,
            Kind::Scsi => queues - FIRST_SCSI_QUEUE as u16,
        };
        let mut back_end = BackEnd {
            kind,
            num_queues: requests,
            disk: RamDisk::new(2048),
            control: io_thread("control", RingChoice::default()),
            io_thread: io_thread("io", RingChoice::default()),
            dir: Dir::new(),
            export: None,
        };
        back_end.start();
        Replay {
            lines,
            at: 0,
            back_end,
            guest: Guest::new(queues, 16),
            rings: (0..queues).map(|_| Ring::default()).collect(),
            stream: None,
            with_rings,
            others: Vec::new(),
            offered: 0,
            inflight: None,
            log: None,
            written: 0,
        }
    }

    fn run(mut self) {
        let mut ios = 0;
        while let Some(&line) = self.lines.get(self.at) {
            self.at += 1;
            let words: Vec<&'a str> = line.split(' ').collect();
            match words[..] {
                ["connect"] => self.stream = Some(connect(&self.back_end.dir.socket())),
                ["closed", "by", "back", "end"] => self.stream = None,
                ["closed", "by", "front", "end"] => {
                    self.stream = None;
                    self.rings.iter_mut().for_each(|ring| ring.is_running = false);
                }
                ["==", "io"] => {
                    self.io();
                    ios += 1;
                }
                ["==", "kill", ..] => {
                    self.back_end.stop();
                    self.back_end.start();
                    for ring in &mut self.rings {
                        (ring.is_running, ring.stopped_at) = (false, None);
                    }
                }
                ["==", ..] => {}
                [">", name, ref arguments @ ..] => self.request(name, arguments),
                _ => panic!("line {}: {line}", self.at),
            }
        }
        assert!(ios >= 3, "a recording has I/O");
        self.back_end.stop();
    }

    /// Sends a message. If a reply follows in the recording, waits for one and checks it.
    fn request(&mut self, name: &str, arguments: &[&'a str]) {
        let (arguments, flags) = match arguments {
            [rest @ .., "ack"] => (rest, NEED_REPLY),
            all => (all, 0),
        };
        let number = |at: usize| parse(arguments[at]);
        let short = |at: usize| number(at) as u16;
        let index = || number(0) as usize;
        let state = |num: u16| [number(0) as u32, num.into()].map(u32::to_ne_bytes).concat();
        let words =
            |words: &[u64]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>();
        let mut fds = Vec::new();
        let mut set_up = None;
        let (code, payload) = match name {
            "GET_FEATURES" => (1, vec![]),
            // Features of the disk, such as discard, are other ones here.
            "SET_FEATURES" => (2, words(&[number(0) & (self.offered | VHOST_F_LOG_ALL)])),
            "SET_OWNER" => (3, vec![]),
            "RESET_OWNER" => (4, vec![]),
            "SET_MEM_TABLE" => {
                let regions: Vec<_> = arguments.iter().map(|name| self.region(name)).collect();
                let mut payload = (regions.len() as u64).to_ne_bytes().to_vec();
                for (region, fd) in regions {
                    payload.extend(words(&region));
                    fds.push(fd);
                }
                (5, payload)
            }
            "SET_LOG_BASE" => {
                let (fd, size) = memory("log", number(0));
                fds.push(fd.as_raw_fd());
                self.log = Some(fd);
                (6, words(&[size, 0]))
            }
            "SET_VRING_NUM" => {
                let ring = &mut self.rings[index()];
                let size = short(1);
                if !ring.is_set_up || self.guest.queues[index()].driver.config().size != size {
                    ring.is_set_up = true;
                    self.begin_ring(index(), size);
                }
                (8, state(size))
            }
            "SET_VRING_ADDR" => {
                let config = self.guest.queues[index()].driver.config();
                let logs = arguments.get(2) == Some(&"log");
                let first = number(0) | u64::from(logs) << 32;
                let log = if logs { config.used - USER_BASE } else { 0 };
                (9, words(&[first, config.desc, config.used, config.avail, log]))
            }
            "SET_VRING_BASE" => {
                let base = self.base(index(), short(1));
                (10, state(base))
            }
            "GET_VRING_BASE" => (11, state(0)),
            "SET_VRING_KICK" | "SET_VRING_CALL" | "SET_VRING_ERR" => {
                let queue = &self.guest.queues[index()];
                let (code, fd) = match name {
                    "SET_VRING_KICK" => (12, &queue.kick),
                    "SET_VRING_CALL" => (13, &queue.call),
                    _ => (14, &queue.call),
                };
                let no_fd = match arguments.get(1) {
                    None => {
                        fds.push(fd.as_raw_fd());
                        0
                    }
                    Some(_) => 0x100,
                };
                if code == 12 {
                    self.rings[index()].is_running = true;
                }
                (code, words(&[number(0) | no_fd]))
            }
            "GET_PROTOCOL_FEATURES" => (15, vec![]),
            "SET_PROTOCOL_FEATURES" => (16, words(&[number(0)])),
            "GET_QUEUE_NUM" => (17, vec![]),
            "SET_VRING_ENABLE" => (18, state(short(1))),
            "SET_BACKEND_REQ_FD" => {
                let (ours, theirs) = UnixStream::pair().unwrap();
                fds.push(theirs.as_raw_fd());
                set_up = Some((ours, theirs));
                (21, vec![])
            }
            "GET_CONFIG" => {
                let size = number(1) as usize;
                let head = [number(0) as u32, size as u32, 0].map(u32::to_ne_bytes).concat();
                (24, [head, vec![0; size]].concat())
            }
            "GET_INFLIGHT_FD" | "SET_INFLIGHT_FD" => {
                let queues = [short(0), short(1)].map(u16::to_ne_bytes).concat();
                match name {
                    "GET_INFLIGHT_FD" => (31, [words(&[0, 0]), queues, vec![0; 4]].concat()),
                    _ => {
                        let (reply, fd) = self.inflight.as_ref().expect("GET_INFLIGHT_FD");
                        fds.push(fd.as_raw_fd());
                        (32, [&reply[..16], &queues, &[0; 4]].concat())
                    }
                }
            }
            "RESET_DEVICE" => (34, vec![]),
            "GET_MAX_MEM_SLOTS" => (36, vec![]),
            "ADD_MEM_REG" | "REM_MEM_REG" => {
                let (region, fd) = self.region(arguments[0]);
                let adds = name == "ADD_MEM_REG";
                if adds {
                    fds.push(fd);
                }
                (if adds { 37 } else { 38 }, [words(&[0]), words(&region)].concat())
            }
            "SET_STATUS" => (39, words(&[number(0)])),
            "GET_STATUS" => (40, vec![]),
            other => panic!("line {}: {other} is unknown", self.at),
        };
        let stream = self.stream.as_ref().expect("a connection");
        send_with(stream, &raw_message(code, flags, &payload), &fds);
        drop(set_up);
        if self.lines.get(self.at).is_some_and(|next| next.starts_with('<')) {
            let recorded = self.lines[self.at];
            self.at += 1;
            let (got, payload, fd) = self.receive();
            assert_eq!(got, code, "line {}: the reply", self.at);
            let word = payload.first_chunk().map(|bytes| u64::from_ne_bytes(*bytes));
            match name {
                "GET_FEATURES" => self.offered = word.expect("a number"),
                "GET_INFLIGHT_FD" => self.inflight = Some((payload, fd.expect("a descriptor"))),
                "GET_VRING_BASE" => {
                    let index = index();
                    let base = u32::from_ne_bytes(payload[4..8].try_into().unwrap()) as u16;
                    let ring = &mut self.rings[index];
                    let driver = &self.guest.queues[index].driver;
                    let what = "what the driver has made available";
                    assert_eq!(base, driver.available(), "line {}: ring {index}: {what}", self.at);
                    let recorded = recorded.rsplit(' ').next().expect("a number");
                    ring.stopped_at = Some((parse(recorded) as u16, base));
                    ring.is_running = false;
                }
                "GET_QUEUE_NUM" => assert_eq!(word, Some(self.rings.len() as u64)),
                // The reply of these is what was asked for, also where an acknowledgement was.
                _ if name.starts_with("GET_") => {}
                _ if flags != 0 => assert_eq!(word, Some(0), "line {}: refused", self.at),
                _ => {}
            }
        }
    }

    /// Receives a reply: its request, payload and descriptor.
    fn receive(&mut self) -> (u32, Vec<u8>, Option<OwnedFd>) {
        let stream = self.stream.as_ref().expect("a connection");
        assert!(is_signalled(stream, PATIENCE), "line {}: no reply", self.at);
        let mut bytes = vec![0; 1024];
        let received = fd_passing::receive(stream.as_fd(), &mut bytes).unwrap();
        assert!(received.len >= HEADER_LEN, "line {}: the connection was closed", self.at);
        let field = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!(field(8) as usize, received.len - HEADER_LEN, "one reply, in one piece");
        let payload = bytes[HEADER_LEN..received.len].to_vec();
        (field(0), payload, received.fds.into_iter().next())
    }

    /// A region by its name in the recording: guest address, size, front end's address, offset, and its file.
    fn region(&mut self, name: &'a str) -> ([u64; 4], i32) {
        if self.with_rings.contains(&name) {
            return ([0, MEMORY, USER_BASE, 0], self.guest.files[0].as_raw_fd());
        }
        let known = self.others.iter().position(|(other, _)| *other == name);
        let number = known.unwrap_or_else(|| {
            self.others.push((name, memory("other", 0x1000).0));
            self.others.len() - 1
        });
        let behind = 2 * MEMORY + number as u64 * 0x1000;
        ([behind, 0x1000, USER_BASE + behind, 0], self.others[number].1.as_raw_fd())
    }

    /// The driver begins a ring anew.
    fn begin_ring(&mut self, index: usize, size: u16) {
        let at = index as u64 * RING;
        self.guest.queues[index].driver = Driver::new(&self.guest.view, at, size, true).unwrap();
    }

    /// The base from which a front end starts a ring, if the recording has `recorded`.
    fn base(&mut self, index: usize, recorded: u16) -> u16 {
        let driver = &self.guest.queues[index].driver;
        match self.rings[index].stopped_at {
            Some((there, here)) if there == recorded => here,
            // The back end has vanished. The front end continues behind what it has seen used. At 0, it is another one.
            None if recorded != 0 && driver.available() != 0 => driver.device_used(),
            _ => {
                assert_eq!(recorded, 0, "line {}: neither continued nor begun", self.at);
                let size = driver.config().size;
                self.begin_ring(index, size);
                0
            }
        }
    }

    /// Writes and reads back on each running ring.
    fn io(&mut self) {
        let first = match self.back_end.kind {
            Kind::Blk => 0,
            Kind::Scsi => FIRST_SCSI_QUEUE,
        };
        let running: Vec<_> =
            (first..self.rings.len()).filter(|&i| self.rings[i].is_running).collect();
        assert!(!running.is_empty(), "line {}: rings run", self.at);
        for index in running {
            // More than once around the smallest ring.
            for _ in 0..24 {
                self.written += 1;
                let sector = self.written % 2048;
                let data = [self.written.to_ne_bytes(); SECTOR / 8].concat();
                self.carry_out(index, true, sector, &data);
                assert_eq!(self.carry_out(index, false, sector, &[0xee; SECTOR]), data);
                let at = sector as usize * SECTOR;
                assert_eq!(self.back_end.disk.data.lock().unwrap()[at..at + SECTOR], data);
            }
        }
    }

    /// Carries out a read or a write. Returns the buffer.
    fn carry_out(&mut self, index: usize, write: bool, sector: u64, data: &[u8]) -> Vec<u8> {
        let at = REQUESTS;
        let (buffer, answer) = (at + 0x1000, at + 0x800);
        let view = self.guest.view.clone();
        let is_scsi = self.back_end.kind == Kind::Scsi;
        let (header, answer_len) = match is_scsi {
            false => {
                let mut header = vec![0; 16];
                header[0] = write.into();
                header[8..].copy_from_slice(&sector.to_le_bytes());
                (header, 1)
            }
            true => {
                let mut header = vec![0; SCSI_REQUEST as usize];
                header[0] = 1;
                // READ (10) and WRITE (10) of a block.
                header[19] = if write { 0x2a } else { 0x28 };
                header[21..25].copy_from_slice(&(sector as u32).to_be_bytes());
                header[27] = 1;
                (header, SCSI_RESPONSE)
            }
        };
        let segment = |addr: u64, len: u32| Segment { addr, len };
        // A new driver hears of a reset first.
        for _ in 0..2 {
            view.write_bytes(at, &header).unwrap();
            view.write_bytes(buffer, data).unwrap();
            view.write_bytes(answer, &[0xff; SCSI_RESPONSE as usize]).unwrap();
            let head = segment(at, header.len() as u32);
            let (answer_at, body) =
                (segment(answer, answer_len), segment(buffer, data.len() as u32));
            let queue = &mut self.guest.queues[index];
            match (write, is_scsi) {
                (true, _) => queue.driver.add(&[head, body], &[answer_at]),
                (false, false) => queue.driver.add(&[head], &[body, answer_at]),
                (false, true) => queue.driver.add(&[head], &[answer_at, body]),
            }
            .expect("free descriptors");
            if queue.driver.publish() {
                queue.kick.write(1).unwrap();
            }
            loop {
                let _ = queue.call.read();
                if queue.driver.enable_signals() && queue.driver.reap().is_some() {
                    break;
                }
                let line = self.at;
                assert!(is_signalled(&queue.call, PATIENCE), "line {line}: ring {index} hangs");
            }
            let mut response = vec![0; answer_len as usize];
            view.read_bytes(answer, &mut response).unwrap();
            if is_scsi && response[10] == 2 {
                assert_eq!(response[12 + 2] & 0xf, UNIT_ATTENTION, "{response:?}");
                continue;
            }
            let is_good = match is_scsi {
                false => response[0] == 0,
                true => response[10..12] == [0, 0],
            };
            assert!(is_good, "line {}: {response:?}", self.at);
            let mut data = vec![0; data.len()];
            view.read_bytes(buffer, &mut data).unwrap();
            return data;
        }
        panic!("line {}: unit attention again", self.at);
    }
}

fn parse(text: &str) -> u64 {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    }
    .unwrap_or_else(|_| panic!("{text}: a number"))
}

fn memory(name: &str, size: u64) -> (OwnedFd, u64) {
    let fd = memfd_create(name, MFdFlags::MFD_CLOEXEC).unwrap();
    ftruncate(&fd, size as i64).unwrap();
    (fd, size)
}

/// Replays all recordings whose names begin and end so.
fn replay(begins: &str, ends: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recordings");
    let mut count = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.starts_with(begins) && name.ends_with(ends) {
            println!("{name}");
            let kind = if ends.contains("scsi") { Kind::Scsi } else { Kind::Blk };
            Replay::new(&fs::read_to_string(&path).unwrap(), kind).run();
            count += 1;
        }
    }
    assert_ne!(count, 0, "no recording");
}

#[test]
fn disks_of_each_qemu_work() {
    replay("qemu-", "-blk.txt");
}

/// All but libblkio's are from their sources.
#[test]
fn disks_of_other_front_ends_work() {
    for name in ["cloud-hypervisor", "crosvm", "libblkio", "spdk"] {
        replay(name, "-blk.txt");
    }
}

#[test]
fn scsi_disks_of_each_qemu_work() {
    replay("qemu-", "-scsi.txt");
}
