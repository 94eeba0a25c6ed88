//! A FUSE export whose kernel is played by the test: a socket that keeps messages apart, in the place of
//! `/dev/fuse`.

use std::cell::Cell;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::Arc;

use crate::common::once::Once;
use block::NodeRegistry;
use block::node::BlockNode;
use block::options::{BlockdevOptions, Driver, NullOptions};
use event_loop::counting::{allocations, locks_taken};
use event_loop::{EventLoop, LoopConfig, PollParams};
use exports::fuse::{FileAttributes, FuseConfig, FuseExport};
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

const SIZE: u64 = 1 << 20;

const SETATTR: u32 = 4;
const READ: u32 = 15;
const WRITE: u32 = 16;
const FSYNC: u32 = 20;
const INIT: u32 = 26;
const INTERRUPT: u32 = 36;

/// An export and its kernel, which run alternately on one thread.
struct Rig {
    event_loop: EventLoop,
    kernel: UnixStream,
    export: Option<FuseExport>,
    unique: u64,
}

fn null(latency_ns: u64) -> Arc<dyn BlockNode> {
    let null = NullOptions { size: SIZE, latency_ns, read_zeroes: true };
    let options = BlockdevOptions::new(Some("n"), Driver::null_co(null));
    NodeRegistry::new().open(&options).unwrap()
}

impl Rig {
    fn new(writable: bool) -> Rig {
        Rig::with_latency(writable, 0)
    }

    /// The node takes `latency_ns` for each request.
    fn with_latency(writable: bool, latency_ns: u64) -> Rig {
        let config = LoopConfig { poll: PollParams::OFF, ..LoopConfig::default() };
        let event_loop = EventLoop::new(config).unwrap();
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let (kernel, device) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).unwrap();
        let config = FuseConfig {
            id: "e".into(),
            node: null(latency_ns),
            io_threads: vec![event_loop.handle()],
            devices: vec![device],
            file: FileAttributes::new(SIZE, 4096, writable, true, true),
            writethrough: false,
            resize: Rc::new(|resize| resize.answer.send(Err(Errno::ENOTSUP))),
        };
        let on = event_loop.clone();
        let start = async move { FuseExport::start(&on, config).await };
        let export = event_loop.block_on(start).unwrap().unwrap();
        export.resume();
        let kernel = UnixStream::from(kernel);
        Rig { event_loop, kernel, export: Some(export), unique: 0 }
    }

    fn send(&mut self, opcode: u32, node: u64, arguments: &[u8], data: &[u8]) -> u64 {
        self.unique += 2;
        let mut bytes = [0; 8192];
        let len = 40 + arguments.len() + data.len();
        bytes[..4].copy_from_slice(&(len as u32).to_ne_bytes());
        bytes[4..8].copy_from_slice(&opcode.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.unique.to_ne_bytes());
        bytes[16..24].copy_from_slice(&node.to_ne_bytes());
        bytes[40..40 + arguments.len()].copy_from_slice(arguments);
        bytes[40 + arguments.len()..len].copy_from_slice(data);
        self.kernel.write_all(&bytes[..len]).unwrap();
        self.unique
    }

    /// The next answer: its number, its error, and how many bytes follow.
    fn answer(&mut self) -> (u64, i32, usize) {
        let mut bytes = [0; 8192];
        loop {
            match self.kernel.read(&mut bytes) {
                Ok(len) => {
                    let said = u32::from_ne_bytes(bytes[..4].try_into().unwrap());
                    assert_eq!(said as usize, len);
                    let error = i32::from_ne_bytes(bytes[4..8].try_into().unwrap());
                    let unique = u64::from_ne_bytes(bytes[8..16].try_into().unwrap());
                    return (unique, error, len - 16);
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    self.event_loop.run_once(true).unwrap();
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn ask(&mut self, opcode: u32, arguments: &[u8], data: &[u8]) -> (i32, usize) {
        let sent = self.send(opcode, 1, arguments, data);
        let (unique, error, len) = self.answer();
        assert_eq!(unique, sent);
        (error, len)
    }
}

/// Arguments of a read or write.
fn range(offset: u64, len: u32) -> [u8; 40] {
    let mut arguments = [0; 40];
    arguments[8..16].copy_from_slice(&offset.to_ne_bytes());
    arguments[16..20].copy_from_slice(&len.to_ne_bytes());
    arguments
}

#[test]
fn requests_take_neither_allocations_nor_locks() {
    let mut rig = Rig::new(true);
    let mut kernel = [0; 64];
    kernel[..8].copy_from_slice(&[7, 0, 0, 0, 45, 0, 0, 0]);
    assert_eq!(rig.ask(INIT, &kernel, &[]), (0, 64));
    let round = |rig: &mut Rig| {
        // Several at once, and of each kind.
        for n in 0..8 {
            rig.send(READ, 1, &range(n * 4096, 4096), &[]);
            rig.send(WRITE, 1, &range(n * 4096, 512), &[7; 512]);
            rig.send(FSYNC, 1, &[0; 16], &[]);
        }
        (0..24).for_each(|_| assert_eq!(rig.answer().1, 0));
    };
    (0..50).for_each(|_| round(&mut rig));
    let before = (allocations(), locks_taken());
    (0..50).for_each(|_| round(&mut rig));
    assert_eq!((allocations(), locks_taken()), before);
}

#[test]
fn messages_take_no_operations_of_the_ring() {
    let mut rig = Rig::new(true);
    let round = |rig: &mut Rig| {
        for n in 0..8 {
            rig.send(READ, 1, &range(n * 4096, 4096), &[]);
        }
        (0..8).for_each(|_| assert_eq!(rig.answer().1, 0));
    };
    // The poll is armed.
    round(&mut rig);
    let submitted = |rig: &Rig| rig.event_loop.stats().submitted.get();
    let before = submitted(&rig);
    (0..50).for_each(|_| round(&mut rig));
    assert_eq!(submitted(&rig), before);
}

#[test]
fn more_requests_than_slots_are_all_answered() {
    const REQUESTS: u64 = 100;
    let mut rig = Rig::with_latency(true, 100_000);
    let sent: Vec<u64> =
        (0..REQUESTS).map(|n| rig.send(READ, 1, &range(n * 512, 512), &[])).collect();
    let mut answered: Vec<u64> = (0..REQUESTS).map(|_| rig.answer().0).collect();
    answered.sort_unstable();
    assert_eq!(answered, sent);
}

#[test]
fn invalid_requests_are_answered_with_an_error_and_malformed_ones_are_not() {
    let mut rig = Rig::new(true);
    let errno = |errno: Errno| -(errno as i32);
    // Of another inode, longer than the data, cut short, unknown.
    let sent = rig.send(READ, 2, &range(0, 4096), &[]);
    assert_eq!(rig.answer(), (sent, errno(Errno::ENOENT), 0));
    assert_eq!(rig.ask(WRITE, &range(0, 1000), &[1; 999]), (errno(Errno::EINVAL), 0));
    assert_eq!(rig.ask(READ, &[0; 8], &[]), (errno(Errno::EINVAL), 0));
    assert_eq!(rig.ask(READ, &range(0, u32::MAX), &[]), (errno(Errno::EINVAL), 0));
    assert_eq!(rig.ask(INTERRUPT, &[0; 8], &[]), (errno(Errno::ENOSYS), 0));
    assert_eq!(rig.ask(4711, &[], &[]), (errno(Errno::ENOSYS), 0));
    // No request: the next is served all the same.
    rig.kernel.write_all(&[1; 7]).unwrap();
    rig.kernel.write_all(&[0xff; 100]).unwrap();
    assert_eq!(rig.ask(READ, &range(SIZE - 10, 4096), &[]), (0, 10));
    // A node that cannot grow.
    assert_eq!(rig.ask(WRITE, &range(SIZE, 512), &[1; 512]), (errno(Errno::ENOTSUP), 0));
    let mut size = [0; 88];
    size[..4].copy_from_slice(&8u32.to_ne_bytes());
    assert_eq!(rig.ask(SETATTR, &size, &[]), (errno(Errno::ENOTSUP), 0));
}

#[test]
fn a_kernel_from_before_the_protocol_is_refused() {
    let mut rig = Rig::new(false);
    let mut kernel = [0; 64];
    kernel[..8].copy_from_slice(&[7, 0, 0, 0, 27, 0, 0, 0]);
    assert_eq!(rig.ask(INIT, &kernel, &[]), (-(Errno::EPROTO as i32), 0));
}

#[test]
fn a_stop_finishes_requests_in_flight_and_closes_the_device() {
    let mut rig = Rig::new(true);
    let sent = rig.send(READ, 1, &range(0, 4096), &[]);
    let export = rig.export.take().unwrap();
    let quiet = Rc::new(Cell::new(false));
    let is_quiet = quiet.clone();
    let stopped = export.stop_telling(move || is_quiet.set(true));
    rig.event_loop.block_on(stopped).unwrap().unwrap();
    assert!(quiet.get());
    let mut bytes = [0; 8192];
    match rig.kernel.read(&mut bytes) {
        // Taken before the stop,
        Ok(len) if len > 0 => assert_eq!((len, &bytes[8..16]), (4112, &sent.to_ne_bytes()[..])),
        // or never: the device is closed.
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
    }
}

/// The caller closes the node next, and its image's lock has to be gone then.
#[test]
fn an_export_that_a_later_thread_cannot_serve_has_dropped_the_node() {
    let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
    let (device, other) = UnixStream::pair().unwrap();
    let node = Once::over(null(0));
    let config = FuseConfig {
        id: "e".into(),
        node: node.clone(),
        // On one thread, so that the first worker has not run when a start that does not wait returns.
        io_threads: vec![event_loop.handle(), event_loop.handle()],
        devices: vec![device.into(), other.into()],
        file: FileAttributes::new(SIZE, 4096, false, true, true),
        writethrough: false,
        resize: Rc::new(|resize| resize.answer.send(Err(Errno::ENOTSUP))),
    };
    let on = event_loop.clone();
    let start = async move {
        let error = FuseExport::start(&on, config).await.err();
        (error, Arc::strong_count(&node))
    };
    let (error, owners) = event_loop.block_on(start).unwrap();
    let error = error.expect("the second thread fails").to_string();
    assert!(error.ends_with(": not twice"), "{error}");
    assert_eq!(owners, 1, "a worker still has the node");
}
