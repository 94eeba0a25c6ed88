//! The simulated ring's promises to tests of the crates above.

use crate::common;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use common::*;
use event_loop::ring::sim::{Faults, Sim, SimOp, Verdict};
use event_loop::{AlignedBuf, Engine, EventLoop, IoBufs, IoOp, LoopConfig, Trigger};

fn contents(fd: &OwnedFd) -> Vec<u8> {
    let mut bytes = vec![0; 1 << 20];
    let n = nix::sys::uio::pread(fd, &mut bytes, 0).unwrap();
    bytes.truncate(n);
    bytes
}

fn filled(byte: u8, len: usize) -> IoBufs {
    let mut bufs = AlignedBuf::io_bufs(len, 512).unwrap();
    bufs.copy_in(0, &vec![byte; len]);
    bufs
}

fn run(event_loop: &EventLoop, fd: &Arc<OwnedFd>, op: IoOp, bufs: IoBufs) -> i32 {
    let file = event_loop.register_file(fd.clone());
    raw(event_loop.block_on(event_loop.operate(&file, op, Engine::Uring, bufs)).unwrap().0)
}

/// The order of completions of twenty writes, and the contents that they leave.
fn course(seed: u64) -> (Vec<(u32, i32)>, Vec<u8>, u64) {
    let faults = Faults { short: 30, fail: 10, late: 10, ..Faults::rough() };
    let (sim, event_loop) = simulated(seed, faults);
    let fd = sim.file(&[0; 4096]).unwrap();
    let file = event_loop.register_file(fd.clone());
    let (results, target) = Results::new();
    for n in 0..20 {
        let write = IoOp::Write { offset: u64::from(n) * 100, dsync: false };
        event_loop.submit(&file, write, Engine::Uring, filled(n as u8 + 1, 1024), &target, n);
    }
    turn_until(&event_loop, "the writes", || results.len() == 20);
    (results.0.take(), contents(&fd), sim.now_ns())
}

#[test]
fn the_same_seed_takes_the_same_course_and_others_do_not() {
    assert_eq!(course(7), course(7));
    let orders: Vec<_> = (0..10).map(|seed| course(seed).0).collect();
    assert!(orders.windows(2).any(|two| two[0] != two[1]));
    let in_order = |order: &Vec<(u32, i32)>| order.is_sorted_by_key(|(token, _)| *token);
    assert!(!orders.iter().all(in_order), "completions are reordered");
    let results = || orders.iter().flatten().map(|(_, result)| *result);
    assert!(results().any(|result| result == -nix::libc::EIO), "some fail");
    assert!(results().any(|result| result == 512), "some are short, by whole sectors");
}

#[test]
fn a_script_decides_and_sees_what_is_submitted() {
    let (sim, event_loop) = simulated(1, Faults::default());
    let fd = sim.file(&[1; 4096]).unwrap();
    let seen = Rc::new(RefCell::new(Vec::new()));
    let log = seen.clone();
    sim.script(move |op| {
        log.borrow_mut().push(*op);
        match op {
            SimOp::Read { offset: 0, .. } => Verdict::Short(100),
            SimOp::Write { .. } => Verdict::Fail(nix::libc::ENOSPC),
            SimOp::Fsync => Verdict::Delay(5_000_000_000),
            _ => Verdict::Good,
        }
    });
    let bufs = || filled(9, 512);
    assert_eq!(run(&event_loop, &fd, IoOp::Read { offset: 0 }, bufs()), 100);
    assert_eq!(run(&event_loop, &fd, IoOp::Read { offset: 3584 }, bufs()), 512);
    let write = IoOp::Write { offset: 0, dsync: true };
    assert_eq!(run(&event_loop, &fd, write, bufs()), -nix::libc::ENOSPC);
    assert_eq!(contents(&fd), [1; 4096], "a failed write has no effect");
    let before = sim.now_ns();
    assert_eq!(run(&event_loop, &fd, IoOp::Fsync { data_only: true }, IoBufs::new()), 0);
    assert!(sim.now_ns() >= before + 5_000_000_000);
    let zero = nix::libc::FALLOC_FL_ZERO_RANGE | nix::libc::FALLOC_FL_KEEP_SIZE;
    let zero = IoOp::Fallocate { mode: zero, offset: 512, len: 1024 };
    assert_eq!(run(&event_loop, &fd, zero, IoBufs::new()), 0);
    assert_eq!(contents(&fd)[500..1600], [vec![1; 12], vec![0; 1024], vec![1; 64]].concat());
    assert_eq!(seen.borrow()[2], SimOp::Write { offset: 0, len: 512, dsync: true });
    assert_eq!(seen.borrow().len(), 5);
}

#[test]
fn only_what_was_synced_survives_a_power_cut() {
    let (sim, event_loop) = simulated(1, Faults::default());
    let fd = sim.file(&[1; 2048]).unwrap();
    let write = |offset, dsync, byte| {
        let op = IoOp::Write { offset, dsync };
        assert_eq!(run(&event_loop, &fd, op, filled(byte, 512)), 512);
    };
    write(0, false, 2);
    assert_eq!(sim.durable(&fd).unwrap(), [1; 2048]);
    write(512, true, 3);
    assert_eq!(sim.durable(&fd).unwrap(), [vec![1; 512], vec![3; 512], vec![1; 1024]].concat());
    write(2048, false, 4);
    assert_eq!(run(&event_loop, &fd, IoOp::Fsync { data_only: true }, IoBufs::new()), 0);
    assert_eq!(sim.durable(&fd).unwrap(), contents(&fd));
    assert_eq!(contents(&fd).len(), 2560);
}

/// The results of a hundred power cuts as the first byte of each sector, without duplicates.
fn cuts(cut: impl Fn(u64) -> Vec<u8>) -> BTreeSet<Vec<u8>> {
    let firsts = |left: Vec<u8>| left.chunks(512).map(|sector| sector[0]).collect();
    (0..300).map(|seed| firsts(cut(seed))).collect()
}

#[test]
fn a_power_cut_keeps_drops_or_tears_what_is_not_flushed_in_any_order() {
    let (sim, event_loop) = simulated(1, Faults::default());
    let fd = sim.file(&[1; 1024]).unwrap();
    let write = |offset, len, byte| {
        let op = IoOp::Write { offset, dsync: false };
        assert_eq!(run(&event_loop, &fd, op, filled(byte, len)), len as i32);
    };
    write(0, 1024, 2);
    write(512, 512, 3);
    let left = cuts(|seed| sim.cut(&fd, seed).unwrap());
    let expected = [[1, 1], [2, 1], [1, 2], [2, 2], [1, 3], [2, 3]];
    assert_eq!(left, expected.map(Vec::from).into(), "torn, and the later without the earlier");
    assert_eq!(sim.cut(&fd, 7), sim.cut(&fd, 7));
    assert_eq!(run(&event_loop, &fd, IoOp::Fsync { data_only: true }, IoBufs::new()), 0);
    assert_eq!(cuts(|seed| sim.cut(&fd, seed).unwrap()), [vec![2, 3]].into());
    let punch = nix::libc::FALLOC_FL_PUNCH_HOLE | nix::libc::FALLOC_FL_KEEP_SIZE;
    let punch = IoOp::Fallocate { mode: punch, offset: 0, len: 1 << 40 };
    assert_eq!(run(&event_loop, &fd, punch, IoBufs::new()), 0);
    let left = cuts(|seed| sim.cut(&fd, seed).unwrap());
    assert_eq!(left, [[0, 0], [0, 3], [2, 0], [2, 3]].map(Vec::from).into(), "old or zeroes");
    // A sector never goes back to before a write through the cache.
    write(0, 512, 4);
    let dsync = IoOp::Write { offset: 0, dsync: true };
    assert_eq!(run(&event_loop, &fd, dsync, filled(5, 512)), 512);
    let left = cuts(|seed| sim.cut(&fd, seed).unwrap());
    assert_eq!(left, [[5, 0], [5, 3]].map(Vec::from).into());
}

#[test]
fn a_flush_covers_what_had_completed_when_it_was_submitted() {
    let (sim, event_loop) = simulated(1, Faults::default());
    let fd = sim.file(&[1; 1024]).unwrap();
    let file = event_loop.register_file(fd.clone());
    let (results, target) = Results::new();
    let write = |offset, byte| {
        let op = IoOp::Write { offset, dsync: false };
        event_loop.submit(&file, op, Engine::Uring, filled(byte, 512), &target, byte.into());
    };
    write(0, 2);
    turn_until(&event_loop, "a write", || results.len() == 1);
    sim.script(|op| match op {
        SimOp::Fsync => Verdict::Hold,
        _ => Verdict::Good,
    });
    let flush = IoOp::Fsync { data_only: true };
    event_loop.submit(&file, flush, Engine::Uring, IoBufs::new(), &target, 0);
    write(512, 3);
    event_loop.run_once(false).unwrap();
    let left = cuts(|seed| sim.cut(&fd, seed).unwrap());
    assert_eq!(left, [[1, 1], [1, 3], [2, 1], [2, 3]].map(Vec::from).into(), "one is in flight");
    turn_until(&event_loop, "a write", || results.len() == 2);
    sim.release();
    turn_until(&event_loop, "the flush", || results.len() == 3);
    let left = cuts(|seed| sim.cut(&fd, seed).unwrap());
    assert_eq!(left, [[2, 1], [2, 3]].map(Vec::from).into());
}

#[test]
fn later_flushes_do_not_cover_a_failed_one() {
    let (sim, event_loop) = simulated(1, Faults::default());
    let fd = sim.file(&[1; 512]).unwrap();
    let write = |byte| {
        let op = IoOp::Write { offset: 0, dsync: false };
        assert_eq!(run(&event_loop, &fd, op, filled(byte, 512)), 512);
    };
    let flush = || run(&event_loop, &fd, IoOp::Fsync { data_only: true }, IoBufs::new());
    write(2);
    sim.script(|_| Verdict::Fail(nix::libc::EIO));
    assert_eq!(flush(), -nix::libc::EIO);
    sim.script(|_| Verdict::Good);
    assert_eq!(flush(), 0);
    assert_eq!(cuts(|seed| sim.cut(&fd, seed).unwrap()), [vec![1], vec![2]].into());
    write(3);
    assert_eq!(flush(), 0);
    assert_eq!(cuts(|seed| sim.cut(&fd, seed).unwrap()), [vec![3]].into());
}

#[test]
fn a_power_cut_takes_changes_of_size_back_too() {
    let (sim, event_loop) = simulated(1, Faults::default());
    let fd = sim.file(&[1; 1024]).unwrap();
    nix::unistd::ftruncate(&fd, 512).unwrap();
    // The change is noticed with the next operation or query.
    assert_eq!(sim.durable(&fd).unwrap(), [1; 1024]);
    nix::unistd::ftruncate(&fd, 1536).unwrap();
    let write = IoOp::Write { offset: 1536, dsync: false };
    assert_eq!(run(&event_loop, &fd, write, filled(2, 512)), 512);
    let left = cuts(|seed| sim.cut(&fd, seed).unwrap());
    let expected: [&[u8]; 6] =
        [&[1], &[1, 0], &[1, 1], &[1, 0, 0, 0], &[1, 1, 0, 2], &[1, 0, 0, 2]];
    for expected in expected {
        assert!(left.contains(expected), "{expected:?} in {left:?}");
    }
    // A write through the cache makes the file's size stable too.
    let dsync = IoOp::Write { offset: 512, dsync: true };
    assert_eq!(run(&event_loop, &fd, dsync, filled(3, 512)), 512);
    let left = cuts(|seed| sim.cut(&fd, seed).unwrap());
    assert!(left.iter().all(|left| left[1] == 3), "{left:?}");
}

/// Several worlds, and descriptors opened elsewhere.
#[test]
fn worlds_share_a_storage() {
    let sim = Sim::new(1, Faults::default());
    let fd = sim.file(&[1; 512]).unwrap();
    let again = std::fs::File::options()
        .read(true)
        .write(true)
        .open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd)));
    let again: Arc<OwnedFd> = Arc::new(again.unwrap().into());
    let other = Sim::with_storage(2, Faults::default(), sim.storage());
    let event_loop = other.event_loop(LoopConfig::default()).unwrap();
    let write = IoOp::Write { offset: 0, dsync: false };
    assert_eq!(run(&event_loop, &again, write, filled(2, 512)), 512);
    assert_eq!(cuts(|seed| sim.cut(&fd, seed).unwrap()), [vec![1], vec![2]].into());
    assert_eq!(run(&event_loop, &again, IoOp::Fsync { data_only: true }, IoBufs::new()), 0);
    assert_eq!(sim.durable(&fd).unwrap(), [2; 512]);
}

#[test]
fn memory_to_be_read_into_is_scribbled_over() {
    let (sim, event_loop) = simulated(1, Faults::default());
    let fd = sim.file(&[1; 512]).unwrap();
    sim.script(|_| Verdict::Short(10));
    let file = event_loop.register_file(fd);
    let read = event_loop.operate(&file, IoOp::Read { offset: 0 }, Engine::Uring, filled(0, 512));
    let (n, bufs) = event_loop.block_on(read).unwrap();
    let mut out = [0; 12];
    bufs.copy_out(0, &mut out);
    assert_eq!((n.unwrap(), &out), (10, &[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0xa5, 0xa5]));
}

#[test]
fn descriptors_fire_for_real_and_for_nothing_and_polls_end_and_are_armed_again() {
    let faults = Faults { spurious_poll: 50, multishot_ends: 50, ..Faults::default() };
    let sim = Sim::new(5, faults);
    let event_loop = sim.event_loop(LoopConfig::default()).unwrap();
    let (fd, count) = (eventfd(), Count::new());
    event_loop.add_handler(fd.clone(), 1, Trigger::Edge, count.clone());
    for _ in 0..100 {
        let before = count.calls.get();
        signal(&fd);
        turn_until(&event_loop, "an event", || count.calls.get() > before);
    }
    let before = count.calls.get();
    for _ in 0..100 {
        event_loop.run_once(false).unwrap();
    }
    assert!(count.calls.get() > before, "without a signal");
    // A message from another thread wakes the loop for real.
    sim.set_faults(Faults::default());
    while event_loop.stats().sleeps.get() == 0 {
        event_loop.add_timer(sim.now_ns() + 1_000_000, || {});
        event_loop.run_once(true).unwrap();
    }
    let before = count.calls.get();
    std::thread::scope(|scope| {
        scope.spawn(|| signal(&fd));
        turn_until(&event_loop, "an event", || count.calls.get() > before);
    });
}
