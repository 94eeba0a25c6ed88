//! One-call contract: one system call per iteration, deadlines to the nanosecond. Accounting contract: full
//! queues lose nothing.

use crate::common;

use std::cell::Cell;
use std::rc::Rc;

use common::*;
use event_loop::ring::sim::{Faults, Sim};
use event_loop::{
    AlignedBuf, Engine, EventLoop, IoBufs, IoOp, IoTarget, LoopConfig, LoopFile, Progress, Trigger,
};

/// Files, timers, descriptors of both triggers and messages at once, until each was served often enough.
fn mixed_load(event_loop: &EventLoop, what: &str) {
    struct Again {
        event_loop: EventLoop,
        file: LoopFile,
        me: std::rc::Weak<Again>,
        left: Cell<u32>,
    }
    impl IoTarget for Again {
        fn complete(&self, token: u32, result: i32, bufs: IoBufs) {
            assert_eq!(result, 4096);
            if self.left.get() > 0 {
                self.left.set(self.left.get() - 1);
                let me: Rc<dyn IoTarget> = self.me.upgrade().unwrap();
                let read = IoOp::Read { offset: u64::from(token) * 4096 };
                self.event_loop.submit(&self.file, read, Engine::Uring, bufs, &me, token);
            }
        }
    }
    let file = event_loop.register_file(tempfile(&[3; 65536]));
    let reads = Rc::new_cyclic(|me| Again {
        event_loop: event_loop.clone(),
        file,
        me: me.clone(),
        left: Cell::new(500),
    });
    for token in 0..16 {
        reads.complete(token, 4096, AlignedBuf::io_bufs(4096, 4096).unwrap());
    }
    let (edge, level) = (Count::new(), Count::new());
    let (edge_fd, level_fd) = (eventfd(), eventfd());
    event_loop.add_handler(edge_fd.clone(), 1, Trigger::Edge, edge.clone());
    event_loop.add_handler(level_fd.clone(), 1, Trigger::Level, level.clone());
    let (fd, calls) = (level_fd.clone(), level.clone());
    level.then(move || {
        // Read every second time only, so that it stays ready in between.
        if calls.calls.get() % 2 == 0 {
            nix::unistd::read(&*fd, &mut [0; 8]).unwrap();
        }
        Progress::Done
    });
    let timers = Rc::new(Cell::new(0));
    for n in 0..100 {
        let timers = timers.clone();
        let at = event_loop.now_ns() + n * 20_000;
        event_loop.add_timer(at, move || timers.set(timers.get() + 1));
    }
    let before = (event_loop.stats().iterations.get(), event_loop.stats().enters.get());
    let mut signalled = 0;
    turn_until(event_loop, what, || {
        if signalled == edge.calls.get() && signalled < 50 {
            signalled += 1;
            signal(&edge_fd);
            signal(&level_fd);
        }
        reads.left.get() == 0
            && timers.get() == 100
            && edge.calls.get() >= 50
            && level.calls.get() > 2
    });
    let stats = event_loop.stats();
    let iterations = stats.iterations.get() - before.0;
    let enters = stats.enters.get() - before.1;
    assert!(enters <= iterations, "{what}: {enters} calls in {iterations} iterations");
    assert!(stats.sleeps.get() <= stats.enters.get());
    // Callbacks and loop hold each other.
    event_loop.shut_down().unwrap();
    level.then(|| Progress::Done);
}

#[test]
fn one_call_an_iteration_makes_at_most_one_call() {
    for (name, event_loop) in loops() {
        mixed_load(&event_loop, name);
    }
    for (name, ring) in rings() {
        let polling = LoopConfig { ring, ..LoopConfig::default() };
        mixed_load(&EventLoop::new(polling).unwrap(), name);
    }
}

#[test]
fn one_call_the_waiting_call_submits_all_queued_operations() {
    for (name, event_loop) in loops().filter(|(name, _)| *name != "epoll") {
        let file = event_loop.register_file(tempfile(&[3; 65536]));
        let (results, target) = Results::new();
        event_loop.run_once(false).unwrap();
        let stats = event_loop.stats();
        let (enters, sleeps) = (stats.enters.get(), stats.sleeps.get());
        for token in 0..16 {
            let bufs = AlignedBuf::io_bufs(4096, 4096).unwrap();
            let read = IoOp::Read { offset: 0 };
            event_loop.submit(&file, read, Engine::Uring, bufs, &target, token);
        }
        let handler = Count::new();
        let fd = eventfd();
        signal(&fd);
        event_loop.add_handler(fd, 1, Trigger::Level, handler.clone());
        event_loop.run_once(true).unwrap();
        assert!(results.len() + handler.calls.get() as usize > 0, "{name}: nothing came");
        assert_eq!((stats.enters.get(), stats.sleeps.get()), (enters + 1, sleeps + 1), "{name}");
    }
}

#[test]
fn one_call_deadlines_are_kept_to_the_nanosecond() {
    let (sim, event_loop) = simulated(1, Faults { clock_step_ns: 1, ..Faults::default() });
    for deadline in [1_000_001, 1_000_777, 5_000_000_003, 3_600_000_000_000_123] {
        event_loop.block_on(event_loop.sleep_until(deadline)).unwrap();
        let late = sim.now_ns() - deadline;
        assert!(late < 100, "{late} ns late, readings of the clock included");
    }
    // On real rings: the best of several tries is nearer than a timeout in milliseconds could be.
    for (name, event_loop) in loops() {
        let best = (0..20)
            .map(|_| {
                let deadline = event_loop.now_ns() + 150_000;
                event_loop.block_on(event_loop.sleep_until(deadline)).unwrap();
                // The time of the iteration in which it fired.
                event_loop.now_ns() - deadline
            })
            .min();
        assert!(best.unwrap() < 700_000, "{name}: {best:?} ns late at best");
    }
}

/// Submits `ops` reads at once and checks the counters as they complete. `polls`: polls that stay armed.
fn flood(event_loop: &EventLoop, what: &str, ops: u32, seed: u64) {
    let content: Vec<u8> = (0..65536u32).map(|n| (n / 512) as u8 ^ seed as u8).collect();
    let file = event_loop.register_file(tempfile(&content));
    event_loop.run_once(false).unwrap();
    let polls = event_loop.in_flight();
    struct Check {
        got: Cell<u32>,
        content: Vec<u8>,
    }
    impl IoTarget for Check {
        fn complete(&self, token: u32, result: i32, bufs: IoBufs) {
            self.got.set(self.got.get() + 1);
            let n = usize::try_from(result).expect("no read fails");
            let mut out = vec![0; n];
            bufs.copy_out(0, &mut out);
            let offset = token as usize % 128 * 512;
            assert!(n > 0 && out == self.content[offset..offset + n], "wrong data");
        }
    }
    let check = Rc::new(Check { got: Cell::new(0), content });
    let target: Rc<dyn IoTarget> = check.clone();
    for token in 0..ops {
        let bufs = AlignedBuf::io_bufs(512, 512).unwrap();
        let read = IoOp::Read { offset: u64::from(token % 128) * 512 };
        event_loop.submit(&file, read, Engine::Uring, bufs, &target, token);
    }
    let stats = event_loop.stats();
    let _watchdog = Watchdog::new(what);
    while check.got.get() < ops {
        let outstanding = u64::from(ops - check.got.get());
        assert_eq!(event_loop.in_flight(), outstanding + polls, "{what}");
        assert_eq!(stats.submitted.get(), stats.completed.get() + outstanding + polls, "{what}");
        event_loop.run_once(true).unwrap();
    }
    for _ in 0..5 {
        event_loop.run_once(false).unwrap();
    }
    assert_eq!((check.got.get(), event_loop.in_flight()), (ops, polls), "{what}: each once");
}

#[test]
fn accounting_a_tiny_ring_takes_any_number_of_operations() {
    for (name, ring) in rings() {
        for entries in [1, 2, 3, 8] {
            let config = LoopConfig { entries, ..config(ring) };
            flood(&EventLoop::new(config).unwrap(), name, 700, entries.into());
        }
    }
}

#[test]
fn accounting_simulated_rings_of_all_kinds_of_trouble_lose_nothing() {
    for seed in 0..100 {
        let (sim, event_loop) = simulated(seed, Faults::rough());
        flood(&event_loop, "simulation", 200, seed);
        assert!(sim.max_in_flight() > 1, "they are under way together");
    }
    for seed in 0..20 {
        // And with polling.
        let sim = Sim::new(seed, Faults::rough());
        let event_loop = sim.event_loop(LoopConfig::default()).unwrap();
        flood(&event_loop, "simulation, polled", 200, seed);
    }
}

#[test]
fn accounting_more_events_at_once_than_the_completion_queue_holds() {
    const HANDLERS: usize = 1500;
    for (name, ring) in rings() {
        let small = LoopConfig { entries: 64, completions: 64, ..config(ring) };
        let event_loop = EventLoop::new(small).unwrap();
        let fd = eventfd();
        let handlers: Vec<_> = (0..HANDLERS).map(|_| Count::new()).collect();
        for handler in &handlers {
            event_loop.add_handler(fd.clone(), 1, Trigger::Edge, handler.clone());
        }
        while event_loop.in_flight() < HANDLERS as u64 + 1 {
            event_loop.run_once(false).unwrap();
        }
        for round in 1..=3 {
            // One write fires all of them: the queue has room for 64.
            signal(&fd);
            let all = || handlers.iter().all(|handler| handler.calls.get() >= round);
            turn_until(&event_loop, name, all);
        }
        // Polls that ended for lack of room were armed again, and nothing else is left.
        for _ in 0..200 {
            event_loop.run_once(false).unwrap();
        }
        assert_eq!(event_loop.in_flight(), HANDLERS as u64 + 1, "{name}");
        // The loop becomes idle.
        let calls = || handlers.iter().map(|handler| handler.calls.get()).sum::<u32>();
        let before = calls();
        for _ in 0..10 {
            event_loop.run_once(false).unwrap();
        }
        assert_eq!(calls(), before, "{name}");
    }
}

#[test]
fn accounting_signals_do_not_disturb() {
    use nix::sys::pthread::{pthread_kill, pthread_self};
    use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    static CAUGHT: AtomicU32 = AtomicU32::new(0);
    extern "C" fn catch(_: i32) {
        CAUGHT.fetch_add(1, Ordering::Relaxed);
    }
    let action = SigAction::new(SigHandler::Handler(catch), SaFlags::empty(), SigSet::empty());
    // SAFETY: the handler only counts.
    #[allow(unsafe_code)]
    unsafe {
        sigaction(Signal::SIGUSR1, &action).unwrap();
    }
    for (name, event_loop) in loops() {
        let stop = AtomicBool::new(false);
        let me = pthread_self();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    pthread_kill(me, Signal::SIGUSR1).unwrap();
                    std::thread::yield_now();
                }
            });
            let before = CAUGHT.load(Ordering::Relaxed);
            flood(&event_loop, name, 500, 1);
            // The loop sleeps: a deadline is neither missed nor early.
            while CAUGHT.load(Ordering::Relaxed) < before + 100 {
                let at = event_loop.now_ns() + 200_000;
                event_loop.block_on(event_loop.sleep_until(at)).unwrap();
                assert!(event_loop.now_ns() >= at, "{name}");
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
