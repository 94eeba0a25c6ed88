//! Reads and writes of sockets on every ring, with every engine, without pool threads.

#![allow(unsafe_code)]

use crate::common;

use std::cell::Cell;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::*;
use event_loop::ring::sim::Faults;
use event_loop::{AlignedBuf, Engine, EventLoop, IoBufs, IoOp, IoTarget, LoopConfig};
use nix::sys::signal::{SigHandler, Signal, signal};

const ENGINES: [Engine; 3] = [Engine::Uring, Engine::Native, Engine::Threads];
const READ: IoOp = IoOp::Read { offset: 0 };
const WRITE: IoOp = IoOp::Write { offset: 0, dsync: false };

/// Each ring and the simulated one, with each engine.
fn each(mut test: impl FnMut(&str, &EventLoop, Engine)) {
    for engine in ENGINES {
        for (name, event_loop) in loops() {
            test(name, &event_loop, engine);
        }
        for seed in 0..20 {
            let (_sim, event_loop) = simulated(seed, Faults::rough());
            test("simulated", &event_loop, engine);
        }
    }
}

fn pair(non_blocking: bool) -> (UnixStream, Arc<OwnedFd>) {
    let (theirs, ours) = UnixStream::pair().unwrap();
    ours.set_nonblocking(non_blocking).unwrap();
    (theirs, Arc::new(ours.into()))
}

fn filled(byte: u8, len: usize) -> IoBufs {
    let mut bufs = AlignedBuf::io_bufs(len, 512).unwrap();
    bufs.copy_in(0, &vec![byte; len]);
    bufs
}

/// Two segments of four bytes.
fn two_segments() -> IoBufs {
    let memory = Rc::new([const { Cell::new(0u8) }; 64]);
    let base = memory.as_ptr().cast::<u8>().cast_mut();
    let mut bufs = IoBufs::with_capacity(2);
    bufs.set_owner(memory);
    // SAFETY: both are in `memory`, which the list owns, and no other reference to it exists.
    unsafe {
        bufs.push(base, 4);
        bufs.push(base.add(32), 4);
    }
    assert_eq!(bufs.iovecs().len(), 2);
    bufs
}

fn run(event_loop: &EventLoop, fd: &Arc<OwnedFd>, op: IoOp, engine: Engine, bufs: IoBufs) -> i32 {
    let file = event_loop.register_file(fd.clone());
    raw(event_loop.block_on(event_loop.operate(&file, op, engine, bufs)).unwrap().0)
}

fn submit(
    event_loop: &EventLoop,
    fd: &Arc<OwnedFd>,
    (op, engine): (IoOp, Engine),
    bufs: IoBufs,
    target: &Rc<dyn IoTarget>,
    token: u32,
) {
    let file = event_loop.register_file(fd.clone());
    event_loop.submit(&file, op, engine, bufs, target, token);
}

#[test]
fn bytes_go_both_ways_until_the_end() {
    let _watchdog = Watchdog::new("bytes");
    each(|name, event_loop, engine| {
        let (mut theirs, ours) = pair(false);
        theirs.write_all(b"there").unwrap();
        let file = event_loop.register_file(ours.clone());
        let bufs = AlignedBuf::io_bufs(4096, 512).unwrap();
        let read = event_loop.operate(&file, READ, engine, bufs);
        let (result, bufs) = event_loop.block_on(read).unwrap();
        assert_eq!(result.unwrap(), 5, "{name}, {engine:?}: what is there, no more");
        let mut bytes = [0; 5];
        bufs.copy_out(0, &mut bytes);
        assert_eq!(&bytes, b"there", "{name}, {engine:?}");
        assert_eq!(run(event_loop, &ours, WRITE, engine, filled(b'x', 3)), 3, "{name}");
        let mut bytes = [0; 3];
        theirs.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"xxx", "{name}, {engine:?}");
        assert_eq!(run(event_loop, &ours, READ, engine, IoBufs::new()), 0, "{name}: nothing");
        drop(theirs);
        assert_eq!(run(event_loop, &ours, READ, engine, filled(0, 8)), 0, "{name}: the end");
        let result = run(event_loop, &ours, WRITE, engine, filled(0, 8));
        assert_eq!(result, -libc::EPIPE, "{name}, {engine:?}: the reader is closed");
    });
}

#[test]
fn several_segments_are_read_and_written_as_one() {
    let _watchdog = Watchdog::new("segments");
    each(|name, event_loop, engine| {
        let (mut theirs, ours) = pair(true);
        let file = event_loop.register_file(ours.clone());
        let read = event_loop.operate(&file, READ, engine, two_segments());
        event_loop.run_once(false).unwrap();
        theirs.write_all(b"segments").unwrap();
        let (result, bufs) = event_loop.block_on(read).unwrap();
        assert_eq!(result.unwrap(), 8, "{name}, {engine:?}");
        assert_eq!(run(event_loop, &ours, WRITE, engine, bufs), 8, "{name}, {engine:?}");
        let mut bytes = [0; 8];
        theirs.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"segments", "{name}, {engine:?}");
    });
}

/// Also for a non-blocking socket; and a read and a write of the same socket at once.
#[test]
fn an_operation_waits_until_the_socket_is_ready() {
    let _watchdog = Watchdog::new("an operation that waits");
    each(|name, event_loop, engine| {
        for non_blocking in [false, true] {
            let (mut theirs, ours) = pair(non_blocking);
            // Fill the socket's buffer.
            theirs.set_nonblocking(true).unwrap();
            let full = filled(1, 1 << 20);
            let (results, target) = Results::new();
            submit(event_loop, &ours, (READ, engine), filled(0, 16), &target, 0);
            assert!(run(event_loop, &ours, WRITE, engine, full) > 0, "{name}");
            submit(event_loop, &ours, (WRITE, engine), filled(2, 1), &target, 1);
            for _ in 0..20 {
                event_loop.run_once(false).unwrap();
            }
            assert_eq!(results.len(), 0, "{name}, {engine:?}: neither can be done yet");
            theirs.write_all(b"now").unwrap();
            turn_until(event_loop, "the read", || results.len() == 1);
            assert_eq!(results.0.borrow()[0], (0, 3), "{name}, {engine:?}");
            let (mut last, mut bytes) = (0, vec![0; 1 << 20]);
            let mut take_all = || {
                while let Ok(n) = theirs.read(&mut bytes) {
                    last = bytes[n - 1];
                }
                last
            };
            // The kernel may complete it as soon as there is room.
            take_all();
            turn_until(event_loop, "the write", || results.len() == 2);
            assert_eq!(results.0.borrow()[1], (1, 1), "{name}, {engine:?}");
            assert_eq!(take_all(), 2, "{name}, {engine:?}: what was written last");
        }
    });
}

#[test]
fn stop_socket_waits_end_with_the_loop() {
    let _watchdog = Watchdog::new("the end");
    each(|name, event_loop, engine| {
        let (_theirs, ours) = pair(false);
        let (results, target) = Results::new();
        for token in 0..3 {
            submit(event_loop, &ours, (READ, engine), filled(0, 16), &target, token);
        }
        event_loop.run_once(false).unwrap();
        event_loop.shut_down().unwrap();
        let mut results = results.0.take();
        results.sort_unstable();
        let cancelled = (0..3).map(|token| (token, -libc::ECANCELED));
        assert_eq!(results, cancelled.collect::<Vec<_>>(), "{name}, {engine:?}");
    });
}

#[test]
fn socket_waits_can_be_cancelled_without_loss() {
    let _watchdog = Watchdog::new("what was called back");
    each(|name, event_loop, engine| {
        let (mut theirs, ours) = pair(false);
        let (_theirs_too, other) = pair(false);
        let (results, target) = Results::new();
        let [ours, other] = [ours, other].map(|fd| event_loop.register_file(fd));
        let read = |file, token| {
            let op = IoOp::Read { offset: 0 };
            event_loop.submit(file, op, engine, filled(0, 16), &target, token);
        };
        read(&ours, 0);
        read(&other, 1);
        event_loop.run_once(false).unwrap();
        event_loop.cancel(&ours);
        turn_until(event_loop, "the end of the read", || results.len() == 1);
        assert_eq!(results.0.take(), [(0, -libc::ECANCELED)], "{name}, {engine:?}");
        theirs.write_all(b"still there").unwrap();
        // Nothing is in flight.
        event_loop.cancel(&ours);
        read(&ours, 2);
        turn_until(event_loop, "a read", || results.len() == 1);
        assert_eq!(results.0.take(), [(2, 11)], "{name}, {engine:?}");
    });
}

#[test]
fn send_now_takes_data_at_once_or_refuses() {
    let event_loop = EventLoop::new(LoopConfig::default()).unwrap();
    let (mut theirs, ours) = pair(false);
    let ours = event_loop.register_file(ours);
    for _ in 0..3 {
        assert_eq!(ours.send_now(&two_segments()).unwrap(), 8);
        assert_eq!(ours.send_now(&filled(b'x', 5)).unwrap(), 5);
        let mut bytes = [0; 13];
        theirs.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes[8..], b"xxxxx");
    }
    // Until the socket is full: nothing blocks.
    let refused =
        std::iter::repeat_with(|| ours.send_now(&filled(1, 1 << 16))).find_map(Result::err);
    assert_eq!(refused.unwrap().raw_os_error(), Some(libc::EAGAIN));
    drop(theirs);
    let gone = ours.send_now(&filled(0, 8)).unwrap_err();
    assert_eq!(gone.raw_os_error(), Some(libc::EPIPE));
    let file: Arc<OwnedFd> = Arc::new(std::fs::File::open("/dev/null").unwrap().into());
    let no_socket = event_loop.register_file(file).send_now(&filled(0, 8)).unwrap_err();
    assert_eq!(no_socket.raw_os_error(), Some(libc::ENOTSOCK));
}

/// The embedding program may not ignore SIGPIPE, as Rust programs do.
#[test]
fn a_send_without_a_reader_is_an_error_and_no_signal() {
    static RAISED: AtomicBool = AtomicBool::new(false);
    extern "C" fn raised(_: i32) {
        RAISED.store(true, Ordering::Relaxed);
    }
    let _watchdog = Watchdog::new("nobody");
    // SAFETY: the handler only stores to an atomic.
    let before = unsafe { signal(Signal::SIGPIPE, SigHandler::Handler(raised)) }.unwrap();
    each(|name, event_loop, engine| {
        for bufs in [two_segments(), filled(1, 64)] {
            let (theirs, ours) = pair(false);
            drop(theirs);
            let result = run(event_loop, &ours, WRITE, engine, bufs);
            assert_eq!(result, -libc::EPIPE, "{name}, {engine:?}");
            assert!(!RAISED.load(Ordering::Relaxed), "{name}, {engine:?}");
        }
    });
    // SAFETY: what was there before.
    unsafe { signal(Signal::SIGPIPE, before) }.unwrap();
}
