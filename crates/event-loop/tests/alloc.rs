//! Counted, not timed: in steady state the loop allocates nothing, and makes at most one call per
//! iteration.

use crate::common;

use std::cell::Cell;
use std::rc::{Rc, Weak};

use common::{Count, Watchdog, eventfd, rings, signal, tempfile};
use event_loop::counting::allocations;
use event_loop::{
    AlignedBuf, Engine, EventLoop, IoBufs, IoOp, IoTarget, LoopConfig, LoopFile, PollParams,
    Trigger,
};

/// Keeps `DEPTH` reads going and sets a timer now and then.
struct Device {
    event_loop: EventLoop,
    file: LoopFile,
    engine: Engine,
    me: Weak<Device>,
    completed: Cell<u32>,
    running: Cell<bool>,
}

const DEPTH: u32 = 32;
const ENTRIES: u32 = 16;

impl Device {
    fn submit(&self, token: u32, bufs: IoBufs) {
        let Some(me) = self.me.upgrade() else { return };
        let target: Rc<dyn IoTarget> = me;
        let read = IoOp::Read { offset: u64::from(token) * 4096 };
        self.event_loop.submit(&self.file, read, self.engine, bufs, &target, token);
    }
}

impl IoTarget for Device {
    fn complete(&self, token: u32, result: i32, bufs: IoBufs) {
        if token == u32::MAX {
            return;
        }
        assert_eq!(result, 4096);
        self.completed.set(self.completed.get() + 1);
        if self.running.get() {
            if token == 0 {
                let me: Rc<dyn IoTarget> = self.me.upgrade().unwrap();
                self.event_loop.submit_timer(self.event_loop.now_ns() + 10_000, &me, u32::MAX);
                let far = self.event_loop.submit_timer(u64::MAX, &me, u32::MAX);
                self.event_loop.cancel_timer(far);
            }
            self.submit(token, bufs);
        }
    }
}

#[test]
fn steady_state_allocates_nothing_and_enters_at_most_once_per_iteration() {
    let polling = [PollParams::default(), common::NO_POLLING];
    for ((name, ring), poll) in
        rings().into_iter().flat_map(|ring| polling.map(|poll| (ring, poll)))
    {
        for engine in [Engine::Uring, Engine::Native, Engine::Threads] {
            let event_loop = EventLoop::new(LoopConfig {
                ring,
                poll,
                entries: ENTRIES,
                ..LoopConfig::default()
            })
            .unwrap();
            let _watchdog = Watchdog::new(name);
            let file = event_loop.register_file(tempfile(&[1; 4096 * DEPTH as usize]));
            let device = Rc::new_cyclic(|me| Device {
                event_loop: event_loop.clone(),
                file,
                engine,
                me: me.clone(),
                completed: Cell::new(0),
                running: Cell::new(true),
            });
            for token in 0..DEPTH {
                device.submit(token, AlignedBuf::io_bufs(4096, 4096).unwrap());
            }
            let (edge, level, fd, level_fd) = (Count::new(), Count::new(), eventfd(), eventfd());
            event_loop.add_handler(fd.clone(), 1, Trigger::Edge, edge.clone());
            event_loop.add_handler(level_fd.clone(), 1, Trigger::Level, level.clone());
            let run = |reads: u32| {
                let until = device.completed.get() + reads;
                while device.completed.get() < until {
                    signal(&fd);
                    signal(&level_fd);
                    event_loop.run_once(true).unwrap();
                }
            };
            run(4000);
            let stats = event_loop.stats();
            let before = (stats.iterations.get(), stats.enters.get(), edge.calls.get());
            let aio_before = stats.aio_submits.get();
            let allocated_before = allocations();
            run(4000);
            let allocated = allocations() - allocated_before;
            let (iterations, enters) =
                (stats.iterations.get() - before.0, stats.enters.get() - before.1);
            assert!(edge.calls.get() > before.2 && level.calls.get() > 0);
            assert!(enters <= iterations, "{name}: {enters} calls in {iterations} iterations");
            let aio = stats.aio_submits.get() - aio_before;
            let most = iterations * u64::from(DEPTH / ENTRIES);
            assert!(
                aio <= most && (aio > 0) == (engine == Engine::Native),
                "{name}: {aio} submits"
            );
            // A pool may start another thread at any time, which takes memory.
            let pool = engine == Engine::Threads || (name == "epoll" && engine == Engine::Uring);
            let most = if pool { 4 * 64 } else { 0 };
            assert!(allocated <= most, "{name}, {engine:?}: {allocated} allocations");
            device.running.set(false);
            event_loop.shut_down().unwrap();
        }
    }
}
