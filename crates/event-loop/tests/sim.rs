//! The simulated ring itself: what it promises to the tests of the crates above.

mod common;

use std::cell::RefCell;
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
    event_loop.block_on(event_loop.operate(&file, op, Engine::Uring, bufs)).unwrap().0
}

/// The order in which the completions of twenty writes come, and what they leave in the file.
fn course(seed: u64) -> (Vec<(u32, i32)>, Vec<u8>, u64) {
    let faults = Faults { short: 30, fail: 10, late: 10, ..Faults::rough() };
    let (sim, event_loop) = simulated(seed, faults);
    let fd = sim.file(&[0; 4096]).unwrap();
    let file = event_loop.register_file(fd.clone());
    let (results, target) = Results::new();
    for n in 0..20 {
        let write = IoOp::Write { offset: u64::from(n) * 100, dsync: false };
        event_loop.submit(&file, write, Engine::Uring, filled(n as u8 + 1, 512), &target, n);
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
    assert!(results().any(|result| (1..512).contains(&result)), "some are short");
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
    assert_eq!((n, &out), (10, &[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0xa5, 0xa5]));
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
    // From another thread, which wakes the loop for real.
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
