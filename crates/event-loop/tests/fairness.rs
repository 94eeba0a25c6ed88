//! Deferral contract: deferred calls run at the end of the section, before any sleep. Fairness contract: no
//! source starves another. No-panic contract: hostile values cause errors.

use crate::common;

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;

use common::*;
use event_loop::ring::sim::{Faults, Sim};
use event_loop::{
    AlignedBuf, BUDGET, BlockingCall, DeferredCall, Engine, EventLoop, Handler, IoBufs, IoOp,
    IoTarget, IoThread, IoThreadConfig, LoopConfig, PollGoal, PollParams, PollPolicy, Progress,
    RingChoice, RingFlags, ThreadPoolConfig, Trigger,
};

/// A deferred call that records after how many sleeps it ran.
struct Signal {
    event_loop: EventLoop,
    queued: Cell<bool>,
    ran: RefCell<Vec<u64>>,
}

impl DeferredCall for Signal {
    fn run(&self) {
        self.ran.borrow_mut().push(self.event_loop.stats().sleeps.get());
    }
    fn queued(&self) -> &Cell<bool> {
        &self.queued
    }
}

fn signal_of(event_loop: &EventLoop) -> (Rc<Signal>, Rc<dyn DeferredCall>) {
    let signal = Rc::new(Signal {
        event_loop: event_loop.clone(),
        queued: Cell::new(false),
        ran: RefCell::default(),
    });
    (signal.clone(), signal)
}

#[test]
fn deferral_a_batch_of_completions_signals_once_and_before_the_loop_sleeps() {
    struct Device {
        event_loop: EventLoop,
        call: Rc<dyn DeferredCall>,
        completed: Cell<u32>,
    }
    impl IoTarget for Device {
        fn complete(&self, _token: u32, _result: i32, _bufs: IoBufs) {
            self.completed.set(self.completed.get() + 1);
            self.event_loop.section(|| self.event_loop.defer(&self.call));
            self.event_loop.defer(&self.call);
        }
    }
    for (name, event_loop) in loops() {
        let (signal, call) = signal_of(&event_loop);
        let device = Rc::new(Device {
            event_loop: event_loop.clone(),
            call: call.clone(),
            completed: Cell::new(0),
        });
        let target: Rc<dyn IoTarget> = device.clone();
        let file = event_loop.register_file(tempfile(&[1; 512]));
        for round in 1..=10 {
            for token in 0..32 {
                let bufs = AlignedBuf::io_bufs(512, 512).unwrap();
                let read = IoOp::Read { offset: 0 };
                event_loop.submit(&file, read, Engine::Uring, bufs, &target, token);
            }
            let _watchdog = Watchdog::new(name);
            while device.completed.get() < round * 32 {
                let (completed, ran) = (device.completed.get(), signal.ran.borrow().len());
                event_loop.run_once(true).unwrap();
                let any = usize::from(device.completed.get() > completed);
                let ran = signal.ran.borrow()[ran..].to_vec();
                assert_eq!(ran.len(), any, "{name}: once per batch, and within the iteration");
                assert!(ran.iter().all(|sleeps| *sleeps == event_loop.stats().sleeps.get()));
            }
        }
    }
}

#[test]
fn deferral_every_callback_runs_in_a_section_that_ends_with_its_iteration() {
    for (name, event_loop) in loops() {
        let (signal, call) = signal_of(&event_loop);
        let ran = || signal.ran.borrow().len();
        let twice = || {
            let (on_loop, call, signal) = (event_loop.clone(), call.clone(), signal.clone());
            move || {
                let before = signal.ran.borrow().len();
                on_loop.defer(&call);
                on_loop.defer(&call);
                assert_eq!(signal.ran.borrow().len(), before, "not yet");
            }
        };
        let (fd, handler, from_handler) = (eventfd(), Count::new(), twice());
        handler.then(move || {
            from_handler();
            Progress::Done
        });
        event_loop.add_handler(fd.clone(), 1, Trigger::Edge, handler.clone());
        common::signal(&fd);
        turn_until(&event_loop, name, || handler.calls.get() == 1);
        assert_eq!(ran(), 1, "{name}: handlers");
        event_loop.add_timer(0, twice());
        event_loop.run_once(true).unwrap();
        assert_eq!(ran(), 2, "{name}: timers");
        let task = twice();
        event_loop.spawn(async move { task() });
        event_loop.run_once(true).unwrap();
        assert_eq!(ran(), 3, "{name}: tasks");
        event_loop.bottom_half(twice()).schedule();
        event_loop.run_once(true).unwrap();
        assert_eq!(ran(), 4, "{name}: messages");
        // Outside of a section it runs at once.
        event_loop.defer(&call);
        assert_eq!(ran(), 5, "{name}");
        // Handler and loop hold each other.
        event_loop.shut_down().unwrap();
    }
}

#[test]
fn deferral_a_loop_does_not_turn_within_a_section_or_a_callback() {
    for (_, event_loop) in loops() {
        let refused = event_loop.section(|| event_loop.run_once(true));
        assert_eq!(refused.unwrap_err().kind(), std::io::ErrorKind::Deadlock);
        let (on_loop, seen) = (event_loop.clone(), Rc::new(RefCell::new(Vec::new())));
        let kinds = seen.clone();
        event_loop.spawn(async move {
            let kind = |result: std::io::Result<()>| result.unwrap_err().kind();
            kinds.borrow_mut().push(kind(on_loop.run_once(true)));
            kinds.borrow_mut().push(kind(on_loop.block_on(async {})));
            kinds.borrow_mut().push(kind(on_loop.prepare().map(drop)));
            kinds.borrow_mut().push(kind(on_loop.dispatch()));
            kinds.borrow_mut().push(kind(on_loop.run()));
        });
        event_loop.run_once(true).unwrap();
        assert_eq!(*seen.borrow(), [std::io::ErrorKind::Deadlock; 5]);
    }
}

// ---- fairness ---------------------------------------------------------------------------------------

/// Checks that all other sources are served within some iterations of a loop that one source floods.
fn others_get_on(event_loop: &EventLoop, what: &str) {
    let (fd, count) = (eventfd(), Count::new());
    event_loop.add_handler(fd.clone(), 1, Trigger::Edge, count.clone());
    let file = event_loop.register_file(tempfile(&[1; 512]));
    for round in 1..=5 {
        signal(&fd);
        let done: Rc<Cell<u32>> = Rc::default();
        let finish = |done: &Rc<Cell<u32>>| {
            let done = done.clone();
            move || done.set(done.get() + 1)
        };
        event_loop.add_timer(event_loop.now_ns(), finish(&done));
        let message = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let there = message.clone();
        let set = move |_: &EventLoop| there.store(true, std::sync::atomic::Ordering::Relaxed);
        event_loop.handle().spawn(set).unwrap();
        let (on_loop, file, done_read) = (event_loop.clone(), file.clone(), finish(&done));
        event_loop.spawn(async move {
            let bufs = AlignedBuf::io_bufs(512, 512).unwrap();
            let read = IoOp::Read { offset: 0 };
            assert_eq!(on_loop.operate(&file, read, Engine::Uring, bufs).await.0.unwrap(), 512);
            done_read();
        });
        turn_until(event_loop, what, || {
            done.get() == 2
                && count.calls.get() >= round
                && message.load(std::sync::atomic::Ordering::Relaxed)
        });
    }
}

#[test]
fn fairness_no_flood_starves_other_sources() {
    for (name, event_loop) in loops() {
        // A handler that always has more work.
        let busy = Count::new();
        busy.then(|| Progress::More);
        let fd = eventfd();
        signal(&fd);
        let id = event_loop.add_handler(fd, 1, Trigger::Edge, busy.clone());
        others_get_on(&event_loop, name);
        assert!(busy.calls.get() > 1);
        event_loop.remove_handler(id);
    }
    for (name, event_loop) in loops() {
        // Level-triggered and never read.
        let (busy, fd) = (Count::new(), eventfd());
        signal(&fd);
        event_loop.add_handler(fd, 1, Trigger::Level, busy.clone());
        others_get_on(&event_loop, name);
        assert!(busy.calls.get() > 1);
    }
    for (name, event_loop) in loops() {
        // A timer that adds itself again and is always the first due.
        fn again(event_loop: &EventLoop) {
            let on_loop = event_loop.clone();
            event_loop.add_timer(0, move || again(&on_loop));
        }
        again(&event_loop);
        others_get_on(&event_loop, name);
        event_loop.shut_down().unwrap();
    }
    for (name, event_loop) in loops() {
        // A hundred messages that send themselves again.
        fn again(event_loop: &EventLoop) {
            event_loop.handle().spawn(again).unwrap();
        }
        (0..100).for_each(|_| again(&event_loop));
        others_get_on(&event_loop, name);
        event_loop.shut_down().unwrap();
    }
    for (name, event_loop) in loops() {
        // A task that yields for ever.
        event_loop.spawn(std::future::poll_fn(|cx| {
            cx.waker().wake_by_ref();
            std::task::Poll::<()>::Pending
        }));
        others_get_on(&event_loop, name);
        event_loop.shut_down().unwrap();
    }
}

#[test]
fn fairness_a_heap_of_messages_is_taken_in_portions() {
    for (name, event_loop) in loops() {
        let run = std::sync::Arc::new(std::sync::atomic::AtomicU32::new(0));
        for _ in 0..10_000 {
            let run = run.clone();
            let count =
                move |_: &EventLoop| _ = run.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            event_loop.handle().spawn(count).unwrap();
        }
        let mut before = 0;
        while before < 10_000 {
            event_loop.run_once(true).unwrap();
            let now = run.load(std::sync::atomic::Ordering::Relaxed);
            assert!(now > before && now - before <= 1024, "{name}: {} at once", now - before);
            before = now;
        }
    }
}

/// Metered work of an iteration stays within the budget, and tenants have turns.
#[test]
fn fairness_metered_work_is_spread_over_iterations() {
    const STEP: u64 = 7;
    for (name, event_loop) in loops() {
        let spent: Rc<Cell<u64>> = Rc::default();
        let (greedy, modest) = (event_loop.meter(), event_loop.meter());
        let ended: Rc<Cell<u32>> = Rc::default();
        for _ in 0..100 {
            let (meter, spent, ended) = (greedy.clone(), spent.clone(), ended.clone());
            event_loop.spawn(async move {
                for _ in 0..200 {
                    meter.turn().await;
                    meter.charge(STEP);
                    spent.set(spent.get() + STEP);
                }
                ended.set(ended.get() + 1);
            });
        }
        event_loop.run_once(false).unwrap();
        let done: Rc<Cell<bool>> = Rc::default();
        let is_done = done.clone();
        let dropped = event_loop.spawn({
            let meter = modest.clone();
            async move { event_loop::until(meter.turn(), async {}).await.is_err() }
        });
        event_loop.spawn(async move {
            modest.turn().await;
            is_done.set(true);
        });
        let before = event_loop.stats().iterations.get();
        turn_until(&event_loop, name, || done.get());
        let waited = event_loop.stats().iterations.get() - before;
        assert!(waited <= 3, "{name}: another tenant waited for {waited} iterations");
        let mut before = spent.get();
        while spent.get() < 100 * 200 * STEP {
            event_loop.run_once(true).unwrap();
            let step = spent.get() - before;
            assert!((BUDGET..BUDGET + STEP).contains(&step) || spent.get() == 100 * 200 * STEP);
            before = spent.get();
        }
        assert!(greedy.most() < BUDGET + STEP, "{name}: {}", greedy.most());
        event_loop.run_once(false).unwrap();
        assert_eq!(ended.get(), 100, "{name}");
        assert!(event_loop.block_on(dropped).unwrap().unwrap(), "{name}: it had its turn");
    }
}

/// In polling mode a source does not signal, so a busy loop must still check it.
#[test]
fn fairness_a_polled_source_is_asked_however_busy_the_loop_is() {
    struct Queue {
        available: Cell<u32>,
        served: Cell<u32>,
        polling: Cell<bool>,
    }
    impl Handler for Queue {
        fn ready(&self, _events: u32) -> Progress {
            self.served.set(self.served.get() + self.available.take());
            Progress::Done
        }
        fn can_poll(&self) -> bool {
            true
        }
        fn poll(&self) -> bool {
            self.available.get() > 0
        }
        fn poll_begin(&self) {
            self.polling.set(true);
        }
        fn poll_end(&self) {
            self.polling.set(false);
        }
    }
    let sim = Sim::new(1, Faults::default());
    let event_loop = sim.event_loop(LoopConfig::default()).unwrap();
    let queue =
        Rc::new(Queue { available: Cell::new(0), served: Cell::new(0), polling: Cell::new(false) });
    let fd = eventfd();
    event_loop.add_handler(fd.clone(), 1, Trigger::Edge, queue.clone());
    // Run until the source is polled.
    for _ in 0..100 {
        if queue.polling.get() {
            break;
        }
        queue.available.set(1);
        signal(&fd);
        event_loop.run_once(true).unwrap();
        event_loop.add_timer(sim.now_ns() + 2_000, || {});
        event_loop.run_once(true).unwrap();
    }
    assert!(queue.polling.get(), "it was never polled");
    // From here on a task always has work.
    event_loop.spawn(std::future::poll_fn(|cx| {
        cx.waker().wake_by_ref();
        std::task::Poll::<()>::Pending
    }));
    event_loop.run_once(true).unwrap();
    let before = queue.served.get();
    queue.available.set(7);
    for _ in 0..5 {
        event_loop.run_once(true).unwrap();
    }
    assert!(queue.polling.get(), "or it would have been signalled");
    assert_eq!(queue.served.get(), before + 7);
    event_loop.shut_down().unwrap();
}

// ---- no-panic ---------------------------------------------------------------------------------------

#[test]
fn no_panic_nonsensical_configurations() {
    for entries in [0, 1, 5, u32::MAX] {
        for (_, ring) in rings() {
            let thread_pool = ThreadPoolConfig { min: usize::MAX, max: 0 };
            let config = LoopConfig { entries, ring, thread_pool, ..LoopConfig::default() };
            let event_loop = EventLoop::new(config).unwrap();
            let file = event_loop.register_file(tempfile(b"x"));
            for engine in [Engine::Uring, Engine::Threads] {
                let bufs = AlignedBuf::io_bufs(1, 1).unwrap();
                let read = event_loop.operate(&file, IoOp::Read { offset: 0 }, engine, bufs);
                assert_eq!(event_loop.block_on(read).unwrap().0.unwrap(), 1);
            }
        }
    }
    for name in ["", "a\0b", "überlänge-überlänge-überlänge", "\n%s"] {
        let event_loop = LoopConfig { name: name.into(), ..LoopConfig::default() };
        let thread =
            IoThread::spawn(IoThreadConfig { event_loop, ..IoThreadConfig::default() }).unwrap();
        thread.stop().unwrap();
    }
    for max_ns in [1, u64::MAX] {
        for (grow, shrink, weight) in [(1, 1, 1), (u32::MAX, u32::MAX, u32::MAX), (0, 0, 0)] {
            for (_, policy, _) in PollPolicy::ALL {
                // The clock has room for one policy.
                let faults = Faults { clock_step_ns: u64::MAX / 256, ..Faults::default() };
                let event_loop = Sim::new(1, faults).event_loop(LoopConfig::default()).unwrap();
                event_loop.set_poll_params(PollParams {
                    policy,
                    goal: PollGoal::Balanced,
                    max_ns,
                    grow,
                    shrink,
                    weight,
                });
                for _ in 0..30 {
                    event_loop.spawn(async {});
                    event_loop.handle().spawn(|_| {}).unwrap();
                    event_loop.run_once(true).unwrap();
                }
            }
        }
    }
}

#[test]
fn no_panic_nonsensical_operations() {
    for (name, event_loop) in loops() {
        let fd = tempfile(b"content");
        let file = event_loop.register_file(fd.clone());
        let run = |op, engine, bufs| {
            raw(event_loop.block_on(event_loop.operate(&file, op, engine, bufs)).unwrap().0)
        };
        let far = [u64::MAX, i64::MAX as u64 + 1, i64::MAX as u64];
        for engine in [Engine::Uring, Engine::Threads] {
            for offset in far {
                let four = || AlignedBuf::io_bufs(4, 4).unwrap();
                let result = run(IoOp::Write { offset, dsync: false }, engine, four());
                assert!(result < 0, "{name}: wrote at {offset}");
                assert!(run(IoOp::Write { offset, dsync: true }, engine, four()) < 0);
                assert!(run(IoOp::Read { offset }, engine, four()) <= 0, "{name}");
                for len in [0, 1, u64::MAX] {
                    let op = IoOp::Fallocate { mode: -1, offset, len };
                    assert!(run(op, engine, IoBufs::new()) < 0, "{name}");
                }
            }
            static TOO_MUCH: BlockingCall = BlockingCall {
                name: c"too much",
                run: |_, offset, len, memory| {
                    memory.put(usize::MAX, b"x");
                    memory.put(2, b"xyz");
                    assert_eq!((memory.len(), offset, len), (4, u64::MAX, 7));
                    Err(io::ErrorKind::Other.into())
                },
            };
            let op = IoOp::Call { call: &TOO_MUCH, offset: u64::MAX, len: 7 };
            let four = AlignedBuf::io_bufs(4, 4).unwrap();
            let (result, bufs) =
                event_loop.block_on(event_loop.operate(&file, op, engine, four)).unwrap();
            assert_eq!(raw(result), -nix::libc::EIO, "{name}");
            let mut out = [0; 4];
            bufs.copy_out(0, &mut out);
            assert_eq!(&out, b"\0\0xy", "{name}: past the end");
            assert_eq!(run(IoOp::Read { offset: 0 }, engine, IoBufs::new()), 0, "{name}: nothing");
            // More segments than the kernel's limit.
            let whole = AlignedBuf::io_bufs(4096, 4096).unwrap();
            let mut bufs = IoBufs::new();
            bufs.set_owner(Rc::new([0u8; 0]));
            let base = whole.iovecs()[0].iov_base.cast::<u8>();
            for n in (0..4000).step_by(2) {
                // SAFETY: inside `whole`, which outlives the operation.
                #[allow(unsafe_code)]
                unsafe {
                    bufs.push(base.wrapping_add(n), 1);
                }
            }
            let result = run(IoOp::Write { offset: 0, dsync: false }, engine, bufs);
            assert_eq!(result, -nix::libc::EINVAL, "{name}");
        }
        let mut content = [0; 16];
        let n = nix::sys::uio::pread(&*fd, &mut content, 0).unwrap();
        assert_eq!(&content[..n], b"content", "{name}: untouched");
    }
}

/// Index 0 in one loop's table is another file than index 0 in another's.
#[test]
fn no_panic_a_file_registered_elsewhere_is_still_the_same_file() {
    for flags in [RingFlags::BEST, RingFlags::PLAIN] {
        let [here, there] =
            [(); 2].map(|()| EventLoop::new(config(RingChoice::Exactly(flags))).unwrap());
        let _wrong = here.register_file(tempfile(b"wrong"));
        let right = there.register_file(tempfile(b"right"));
        let bufs = AlignedBuf::io_bufs(5, 1).unwrap();
        let read = here.operate(&right, IoOp::Read { offset: 0 }, Engine::Uring, bufs);
        let (n, bufs) = here.block_on(read).unwrap();
        let mut out = [0; 5];
        bufs.copy_out(0, &mut out);
        assert_eq!((n.unwrap(), &out), (5, b"right"));
    }
}

#[test]
fn no_panic_nonsensical_timers_and_handlers() {
    for (name, event_loop) in loops() {
        let fired = Rc::new(Cell::new(0));
        let count = || {
            let fired = fired.clone();
            move || fired.set(fired.get() + 1)
        };
        let far = event_loop.add_timer(u64::MAX, count());
        let id = event_loop.add_timer(0, count());
        turn_until(&event_loop, name, || fired.get() == 1);
        assert!(!event_loop.cancel_timer(id) && event_loop.cancel_timer(far), "{name}");
        assert!(!event_loop.cancel_timer(far), "{name}");
        // A regular file cannot be polled: epoll fails, io_uring reports it ready.
        let handler = Count::new();
        let id = event_loop.add_handler(tempfile(b"x"), 1, Trigger::Edge, handler.clone());
        turn_until(&event_loop, name, || handler.calls.get() > 0);
        event_loop.remove_handler(id);
        event_loop.remove_handler(id);
        // Two handlers of one descriptor for different events both work.
        let (reader, writer) = nix::unistd::pipe().unwrap();
        let writer = std::sync::Arc::new(writer);
        let handlers = [Count::new(), Count::new()];
        for handler in &handlers {
            let events = nix::libc::POLLOUT as u32;
            event_loop.add_handler(writer.clone(), events, Trigger::Edge, handler.clone());
        }
        turn_until(&event_loop, name, || handlers.iter().all(|handler| handler.calls.get() > 0));
        for handler in &handlers {
            assert_eq!(handler.events.get() & nix::libc::POLLERR as u32, 0, "{name}");
        }
        drop(reader);
    }
}
