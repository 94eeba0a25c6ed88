//! Foreign-loop contract, here with poll(2): no completion waits for a descriptor event that will not come.

use crate::common;

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use common::*;
use event_loop::{AlignedBuf, Engine, EventLoop, IoOp, RingChoice, RingFlags, Trigger};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// One iteration of a foreign loop. Returns whether it slept.
fn turn(event_loop: &EventLoop) -> bool {
    let wait = event_loop.prepare().unwrap();
    let fd = event_loop.pollable_fd();
    let mut fds = fd.iter().map(|fd| PollFd::new(*fd, PollFlags::POLLIN)).collect::<Vec<_>>();
    // Without a pollable descriptor (DEFER_TASKRUN), the foreign loop has other traffic.
    let longest = if fds.is_empty() { 1 } else { LOST.as_millis() as u64 };
    // A deadline has poll(2)'s resolution of a millisecond, rounded up.
    let timeout = wait.map_or(longest, |ns| ns.div_ceil(1_000_000).min(longest));
    let fired = poll(&mut fds, PollTimeout::try_from(timeout).unwrap()).unwrap();
    assert!(fired > 0 || wait.is_some() || fds.is_empty(), "slept on something that had come");
    if event_loop.check() {
        event_loop.dispatch().unwrap();
    }
    wait != Some(0)
}

fn turn_until(event_loop: &EventLoop, mut done: impl FnMut() -> bool) -> u32 {
    let _watchdog = Watchdog::new("the foreign loop");
    let mut sleeps = 0;
    while !done() {
        sleeps += u32::from(turn(event_loop));
    }
    sleeps
}

#[test]
fn foreign_loop_file_reads_are_seen_though_they_complete_during_prepare() {
    for (name, event_loop) in loops() {
        for direct in [false, true] {
            let file = event_loop.register_file(big_file(direct));
            let (results, target) = Results::new();
            for batch in 0..20 {
                for n in 0..16 {
                    let bufs = AlignedBuf::io_bufs(65536, 4096).unwrap();
                    let read = IoOp::Read { offset: n * 65536 };
                    event_loop.submit(&file, read, Engine::Uring, bufs, &target, n as u32);
                }
                turn_until(&event_loop, || results.len() == (batch + 1) * 16);
            }
            let all_read = results.0.borrow().iter().all(|(_, result)| *result == 65536);
            assert!(all_read, "{name}, direct: {direct}: {:?}", results.0.borrow());
        }
    }
}

/// Only `check` can find what arrives after `prepare` and before the descriptor is polled.
#[test]
fn foreign_loop_check_sees_events_after_prepare_without_the_descriptor() {
    for (name, event_loop) in loops() {
        let (fd, count) = (eventfd(), Count::new());
        event_loop.add_handler(fd.clone(), 1, Trigger::Edge, count.clone());
        for n in 1..=10 {
            while event_loop.prepare().unwrap() == Some(0) {
                event_loop.check();
                event_loop.dispatch().unwrap();
            }
            signal(&fd);
            assert!(event_loop.check(), "{name}");
            event_loop.dispatch().unwrap();
            assert_eq!(count.calls.get(), n, "{name}");
        }
    }
}

#[test]
fn foreign_loop_descriptors_timers_tasks_and_messages_end_the_foreign_wait() {
    for (name, event_loop) in loops() {
        let (fd, count) = (eventfd(), Count::new());
        event_loop.add_handler(fd.clone(), 1, Trigger::Edge, count.clone());
        for n in 1..=50 {
            // Sent from this thread before the wait, or from another thread during it.
            if n % 2 == 0 {
                signal(&fd);
                turn_until(&event_loop, || count.calls.get() == n);
            } else {
                std::thread::scope(|scope| {
                    scope.spawn(|| signal(&fd));
                    turn_until(&event_loop, || count.calls.get() == n);
                });
            }
        }
        let fired = Rc::new(std::cell::Cell::new(false));
        let flag = fired.clone();
        let at = event_loop.now_ns() + 3_000_000;
        event_loop.add_timer(at, move || flag.set(true));
        turn_until(&event_loop, || fired.get());
        assert!(event_loop.now_ns() >= at, "{name}: a timer came early");

        let run = Arc::new(AtomicU32::new(0));
        for n in 1..=50 {
            std::thread::scope(|scope| {
                let (handle, run) = (event_loop.handle(), run.clone());
                let there = run.clone();
                scope.spawn(move || {
                    handle.spawn(move |_| _ = there.fetch_add(1, Ordering::Relaxed)).unwrap();
                });
                turn_until(&event_loop, || run.load(Ordering::Relaxed) == n);
            });
        }
        let done = Rc::new(std::cell::Cell::new(false));
        let flag = done.clone();
        event_loop.spawn(async move { flag.set(true) });
        turn_until(&event_loop, || done.get());
    }
}

#[test]
fn foreign_loop_a_loop_without_a_descriptor_has_none() {
    let shown = |flags| {
        let event_loop = EventLoop::new(config(RingChoice::Exactly(flags))).unwrap();
        event_loop.pollable_fd().is_some()
    };
    assert!(shown(RingFlags::BEST) && !shown(RingFlags::DEFERRING));
}

/// The foreign loop must be able to sleep.
#[test]
fn foreign_loop_with_nothing_to_do_the_foreign_loop_sleeps() {
    for (name, event_loop) in embeddable_loops() {
        let count = Count::new();
        let fd = eventfd();
        event_loop.add_handler(fd.clone(), 1, Trigger::Edge, count.clone());
        // Once armed, a later event costs one sleep, not many short ones.
        event_loop.prepare().unwrap();
        event_loop.check();
        event_loop.dispatch().unwrap();
        let before = event_loop.stats().iterations.get();
        let me = nix::unistd::gettid();
        let sleeps = std::thread::scope(|scope| {
            scope.spawn(|| {
                spin_until("the foreign sleep", || sleeps_in_poll(me));
                signal(&fd);
            });
            turn_until(&event_loop, || count.calls.get() == 1)
        });
        let turns = event_loop.stats().iterations.get() - before;
        assert!(sleeps >= 1 && turns < 10, "{name}: {turns} turns, {sleeps} of which slept");
    }
}
