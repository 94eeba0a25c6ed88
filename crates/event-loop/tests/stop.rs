//! Stop contract: stop from any thread, with anything in flight; nothing is left behind.

use crate::common;

use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use common::*;
use event_loop::ring::sim::{Faults, Verdict};
use event_loop::sync::lock;
use event_loop::{
    AlignedBuf, Engine, EventLoop, IoBufs, IoOp, IoTarget, IoThread, IoThreadConfig, LoopConfig,
    LoopFile, LoopGone, Readiness, Trigger, oneshot,
};

/// The tests count descriptors and threads, so they run one at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn entries(of: &str) -> usize {
    std::fs::read_dir(of).unwrap().count()
}

/// Gives the loop work of every kind.
fn occupy(event_loop: &EventLoop, completions: &Arc<AtomicU32>, native: bool) {
    struct Counter(Arc<AtomicU32>);
    impl IoTarget for Counter {
        fn complete(&self, _token: u32, _result: i32, _bufs: IoBufs) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let target: Rc<dyn IoTarget> = Rc::new(Counter(completions.clone()));
    let bufs = || AlignedBuf::io_bufs(4096, 4096).unwrap();
    // Reads that never complete, as the write end stays open.
    let (reader, writer) = pipe();
    let reader = event_loop.register_file(reader);
    let read = IoOp::Read { offset: 0 };
    if event_loop.has_io_uring() {
        for token in 0..4 {
            event_loop.submit(&reader, read, Engine::Uring, bufs(), &target, token);
        }
    }
    let file = event_loop.register_file(tempfile(&[1; 4096]));
    for token in 0..4 {
        event_loop.submit(&file, read, Engine::Threads, bufs(), &target, token);
        event_loop.submit(&file, read, Engine::Uring, bufs(), &target, token);
        if native {
            event_loop.submit(&file, read, Engine::Native, bufs(), &target, token);
        }
    }
    event_loop.submit_timer(u64::MAX, &target, 9);
    event_loop.add_timer(u64::MAX, || panic!("it was stopped first"));
    for trigger in [Trigger::Edge, Trigger::Level] {
        let fd = eventfd();
        signal(&fd);
        event_loop.add_handler(fd, 1, trigger, Count::new());
    }
    // Tasks and callbacks that hold the loop and the pipe's other end.
    let on_loop = event_loop.clone();
    event_loop.spawn(async move {
        let _ = on_loop.operate(&reader, read, Engine::Threads, IoBufs::new()).await;
        on_loop.sleep_until(u64::MAX).await;
        drop(writer);
    });
    let on_loop = event_loop.clone();
    event_loop.bottom_half(move || drop(on_loop.clone())).schedule();
}

#[test]
fn stop_two_hundred_stops_leave_nothing_behind() {
    let _alone = lock(&ALONE);
    for (name, ring) in rings() {
        let _watchdog = Watchdog::new(name);
        let mut counts = None;
        for round in 0..200 {
            let config = IoThreadConfig { event_loop: config(ring), ..IoThreadConfig::default() };
            let thread = IoThread::spawn(config).unwrap();
            let completions = Arc::new(AtomicU32::new(0));
            let (occupied, is_occupied) = mpsc::channel();
            let there = completions.clone();
            // Only sometimes, as io_destroy is slow.
            let native = round % 8 == 0;
            let work = move |event_loop: &EventLoop| {
                occupy(event_loop, &there, native);
                occupied.send(()).unwrap();
            };
            thread.handle().spawn(work).unwrap();
            is_occupied.recv_timeout(LOST).unwrap();
            match round % 3 {
                // Stop it here, from a third thread, or by dropping it.
                0 => thread.stop().unwrap(),
                1 => {
                    let handle = thread.handle().clone();
                    std::thread::spawn(move || handle.stop()).join().unwrap();
                    thread.stop().unwrap();
                }
                _ => drop(thread),
            }
            let uring = if name == "epoll" { 0 } else { 4 };
            let expected = 9 + uring + if native { 4 } else { 0 };
            assert_eq!(completions.load(Ordering::Relaxed), expected, "{name}: each once");
            if round < 5 {
                // Warm up until all permanent threads are started.
                continue;
            }
            let now = || (entries("/proc/self/fd"), entries("/proc/self/task"));
            let counts = *counts.get_or_insert_with(now);
            // A joined thread leaves the list with a delay.
            spin_until("fds and threads back to where they were", || now() <= counts);
        }
    }
}

#[test]
fn stop_waits_for_a_stopped_loop_end() {
    let _alone = lock(&ALONE);
    for (name, ring) in rings() {
        let config = IoThreadConfig { event_loop: config(ring), ..IoThreadConfig::default() };
        let thread = IoThread::spawn(config).unwrap();
        let handle = thread.handle().clone();
        let (sender, receiver) = oneshot::channel::<()>();
        // Scheduled after the loop's end: its message is dropped.
        let never = move |event_loop: &EventLoop| {
            event_loop.handle().stop();
            let on_loop = event_loop.clone();
            event_loop.spawn(async move {
                on_loop.sleep_until(u64::MAX).await;
                sender.send(());
            });
        };
        handle.spawn(never).unwrap();
        let here = EventLoop::new(common::config(ring)).unwrap();
        let _watchdog = Watchdog::new(name);
        assert_eq!(here.block_on(receiver).unwrap(), Err(LoopGone), "{name}");
        thread.stop().unwrap();
        assert_eq!(handle.spawn(|_| {}), Err(LoopGone), "{name}");
        handle.stop();
    }
}

#[test]
fn stop_a_dropped_loop_takes_its_messages_along() {
    let _alone = lock(&ALONE);
    for (name, event_loop) in loops() {
        let handle = event_loop.handle();
        let watched = Arc::new(());
        let inside = watched.clone();
        handle.spawn(move |_| drop(inside)).unwrap();
        drop(event_loop);
        assert_eq!(Arc::strong_count(&watched), 1, "{name}");
        assert_eq!(handle.spawn(|_| {}), Err(LoopGone), "{name}");
    }
}

#[test]
fn stop_endless_targets_do_not_prevent_a_stop() {
    let _alone = lock(&ALONE);
    struct Again {
        event_loop: EventLoop,
        file: LoopFile,
        me: std::rc::Weak<Again>,
        cancelled: Cell<u32>,
    }
    impl IoTarget for Again {
        fn complete(&self, _token: u32, result: i32, bufs: IoBufs) {
            self.event_loop.add_handler(eventfd(), 1, Trigger::Edge, Count::new());
            let on_loop = self.event_loop.clone();
            self.event_loop.spawn(async move { on_loop.sleep_until(u64::MAX).await });
            if result == -nix::libc::ECANCELED {
                return self.cancelled.set(self.cancelled.get() + 1);
            }
            let Some(me) = self.me.upgrade() else { return };
            let me: Rc<dyn IoTarget> = me;
            let read = IoOp::Read { offset: 0 };
            self.event_loop.submit(&self.file, read, Engine::Uring, bufs, &me, 0);
        }
    }
    for (name, event_loop) in loops() {
        let _watchdog = Watchdog::new(name);
        let file = event_loop.register_file(tempfile(&[1; 512]));
        let again = Rc::new_cyclic(|me| Again {
            event_loop: event_loop.clone(),
            file,
            me: me.clone(),
            cancelled: Cell::new(0),
        });
        for _ in 0..8 {
            again.complete(0, 0, AlignedBuf::io_bufs(512, 512).unwrap());
        }
        for _ in 0..20 {
            event_loop.run_once(false).unwrap();
        }
        event_loop.handle().stop();
        event_loop.run().unwrap();
        assert_eq!((again.cancelled.get(), event_loop.in_flight()), (8, 0), "{name}");
        assert_eq!(Rc::strong_count(&again), 1, "{name}");
    }
}

#[test]
fn stop_cancellations_that_come_too_late_are_waited_for() {
    for seed in 0..50 {
        let faults = Faults { late_cancel: 100, early_return: 30, ..Faults::default() };
        let (sim, event_loop) = simulated(seed, faults);
        sim.script(|_| Verdict::Hold);
        let file = event_loop.register_file(sim.file(&[1; 512]).unwrap());
        let (results, target) = Results::new();
        for token in 0..8 {
            let bufs = AlignedBuf::io_bufs(512, 512).unwrap();
            event_loop.submit(&file, IoOp::Read { offset: 0 }, Engine::Uring, bufs, &target, token);
        }
        event_loop.run_once(false).unwrap();
        event_loop.handle().stop();
        event_loop.run().unwrap();
        assert_eq!((results.len(), sim.in_flight()), (8, 0));
    }
}

#[test]
fn stop_ends_block_on() {
    for (name, event_loop) in loops() {
        event_loop.handle().stop();
        let _watchdog = Watchdog::new(name);
        assert!(event_loop.block_on(std::future::pending::<()>()).is_err(), "{name}");
        event_loop.shut_down().unwrap();
    }
}

/// The last owner of a thread may be on that thread.
#[test]
fn stop_a_thread_dropped_by_its_own_loop_ends() {
    let _alone = lock(&ALONE);
    let thread = IoThread::spawn(IoThreadConfig::default()).unwrap();
    let handle = thread.handle().clone();
    let own = Arc::new(Mutex::new(Some(thread)));
    handle.spawn(move |_| drop(lock(&own).take())).unwrap();
    spin_until("its end", || handle.spawn(|_| {}) == Err(LoopGone));
}

/// Another task holds the loop, so nothing but the loop itself ends what another thread waits for.
#[test]
fn stop_a_panic_in_a_task_ends_what_other_threads_wait_for() {
    let _alone = lock(&ALONE);
    for (name, ring) in rings() {
        let _watchdog = Watchdog::new(name);
        let config = IoThreadConfig { event_loop: config(ring), ..IoThreadConfig::default() };
        let thread = IoThread::spawn(config).unwrap();
        let (sender, receiver) = oneshot::channel();
        let work = move |event_loop: &EventLoop| {
            let on_loop = event_loop.clone();
            event_loop.spawn(async move {
                on_loop.sleep_until(u64::MAX).await;
                sender.send(());
            });
            event_loop.spawn(async { panic!("a test's") });
        };
        thread.handle().spawn(work).unwrap();
        let waiter = EventLoop::new(LoopConfig::default()).unwrap();
        assert_eq!(waiter.block_on(receiver).unwrap(), Err(LoopGone), "{name}");
        assert_eq!(thread.handle().spawn(|_| {}), Err(LoopGone), "{name}");
        assert_eq!(thread.stop().unwrap_err().to_string(), "the I/O thread panicked", "{name}");
    }
}

#[test]
fn stop_a_loop_that_is_dropped_with_waiting_tasks_leaves_no_descriptor() {
    let _alone = lock(&ALONE);
    for (name, ring) in rings() {
        let before = open_descriptors();
        let event_loop = EventLoop::new(config(ring)).unwrap();
        event_loop.spawn(event_loop.sleep_until(u64::MAX));
        let (reader, writer) = pipe();
        let [waits, is_released] =
            [(); 2].map(|()| Readiness::new(&event_loop, reader.clone(), libc::POLLIN as u32));
        event_loop.spawn(async move { waits.wait().await });
        event_loop.spawn(is_released.release());
        drop(reader);
        event_loop.run_once(false).unwrap();
        drop((event_loop, writer));
        assert_eq!(open_descriptors(), before, "{name}");
    }
}
