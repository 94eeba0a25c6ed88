//! Wake-up contract: work from other threads takes effect at once, at the least cost. One-thread contract:
//! only the loop's thread enters the ring.

use crate::common;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, mpsc};

use common::*;
use event_loop::ring::Ring;
use event_loop::{
    Ablation, AlignedBuf, Engine, EventLoop, IoBufs, IoOp, IoTarget, IoThread, IoThreadConfig,
    LoopConfig, LoopFile, Progress, RingChoice, Trigger,
};

fn threads() -> impl Iterator<Item = (&'static str, IoThread)> {
    rings().into_iter().map(|(name, ring)| {
        let config = IoThreadConfig { event_loop: config(ring), ..IoThreadConfig::default() };
        (name, IoThread::spawn(config).unwrap())
    })
}

/// Waits until the loop has slept more than `before` times.
fn wait_for_sleep(thread: &IoThread, before: u64) {
    spin_until("sleep", || thread.handle().stats().sleeps.get() > before);
}

#[test]
fn wake_up_waking_a_sleeping_loop_costs_one_call_each_time() {
    for (name, thread) in threads() {
        let stats = thread.handle().stats();
        wait_for_sleep(&thread, 0);
        let (done, is_done) = mpsc::channel();
        for n in 1..=200 {
            let (sleeps, wakes) = (stats.sleeps.get(), stats.wakes.get());
            let done = done.clone();
            thread.handle().spawn(move |_| done.send(n).unwrap()).unwrap();
            assert_eq!(is_done.recv_timeout(LOST), Ok(n), "{name}: the loop was not woken");
            wait_for_sleep(&thread, sleeps);
            assert_eq!(stats.wakes.get(), wakes + 1, "{name}");
        }
    }
}

#[test]
fn wake_up_a_loop_that_is_awake_is_not_woken() {
    for (name, thread) in threads() {
        let stats = thread.handle().stats();
        let (go, is_in) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (go_there, in_there) = (go.clone(), is_in.clone());
        let stay = move |_: &EventLoop| {
            in_there.store(true, Ordering::Release);
            spin_until("go", || go_there.load(Ordering::Acquire));
        };
        thread.handle().spawn(stay).unwrap();
        spin_until("the loop's entry", || is_in.load(Ordering::Acquire));
        let wakes = stats.wakes.get();
        let run = Arc::new(AtomicU32::new(0));
        for _ in 0..1000 {
            let run = run.clone();
            thread.handle().spawn(move |_| _ = run.fetch_add(1, Ordering::Relaxed)).unwrap();
        }
        assert_eq!(stats.wakes.get(), wakes, "{name}: it was awake all the time");
        go.store(true, Ordering::Release);
        spin_until("all messages", || run.load(Ordering::Relaxed) == 1000);
    }
}

#[test]
fn wake_up_requests_timers_handlers_and_tasks_take_effect_on_a_sleeping_loop() {
    struct Tell(mpsc::Sender<&'static str>);
    impl IoTarget for Tell {
        fn complete(&self, _token: u32, result: i32, _bufs: IoBufs) {
            assert_eq!(result, 5);
            self.0.send("request").unwrap();
        }
    }
    for (name, thread) in threads() {
        let stats = thread.handle().stats();
        let (done, is_done) = mpsc::channel();
        let expect = |what| {
            assert_eq!(is_done.recv_timeout(LOST), Ok(what), "{name}");
        };
        let asleep = || wait_for_sleep(&thread, stats.sleeps.get().saturating_sub(1));

        asleep();
        let tell = done.clone();
        let file = tempfile(b"hello");
        thread
            .handle()
            .spawn(move |on_loop| {
                let file: LoopFile = on_loop.register_file(file);
                let bufs = AlignedBuf::io_bufs(5, 1).unwrap();
                let target: std::rc::Rc<dyn IoTarget> = std::rc::Rc::new(Tell(tell));
                let read = IoOp::Read { offset: 0 };
                on_loop.submit(&file, read, Engine::Uring, bufs, &target, 0);
            })
            .unwrap();
        expect("request");

        asleep();
        let tell = done.clone();
        thread
            .handle()
            .spawn(move |on_loop| {
                let at = on_loop.now_ns() + 1000;
                on_loop.add_timer(at, move || tell.send("timer").unwrap());
            })
            .unwrap();
        expect("timer");

        asleep();
        let tell = done.clone();
        let fd = eventfd();
        signal(&fd);
        thread
            .handle()
            .spawn(move |on_loop| {
                let count = Count::new();
                count.then(move || {
                    tell.send("handler").unwrap();
                    event_loop::Progress::Done
                });
                on_loop.add_handler(fd, 1, Trigger::Edge, count);
            })
            .unwrap();
        expect("handler");

        asleep();
        let tell = done.clone();
        let task = move |on_loop: &EventLoop| {
            on_loop.spawn(async move { tell.send("task").unwrap() });
        };
        thread.handle().spawn(task).unwrap();
        expect("task");

        // A bottom half, made on the loop and scheduled here.
        let (tell, (give, take)) = (done.clone(), mpsc::channel());
        let make = move |on_loop: &EventLoop| {
            give.send(on_loop.bottom_half(move || tell.send("bottom half").unwrap())).unwrap();
        };
        thread.handle().spawn(make).unwrap();
        let bottom_half = take.recv_timeout(LOST).unwrap();
        for _ in 0..100 {
            asleep();
            bottom_half.schedule();
            expect("bottom half");
        }
    }
}

#[test]
fn wake_up_many_producers_lose_nothing_double_nothing_and_keep_their_order() {
    const PRODUCERS: usize = 4;
    const EACH: u32 = 20_000;
    for (name, thread) in threads() {
        let got: Arc<[AtomicU32; PRODUCERS]> = Arc::default();
        std::thread::scope(|scope| {
            for producer in 0..PRODUCERS {
                let (handle, got) = (thread.handle().clone(), got.clone());
                scope.spawn(move || {
                    for n in 0..EACH {
                        let got = got.clone();
                        let check = move |_: &EventLoop| {
                            let before = got[producer].fetch_add(1, Ordering::Relaxed);
                            assert_eq!(before, n, "lost, doubled or out of order");
                        };
                        handle.spawn(check).unwrap();
                    }
                });
            }
        });
        let all = || got.iter().all(|got| got.load(Ordering::Relaxed) == EACH);
        spin_until(name, all);
        stop_and_count_wakes(thread);
        assert!(all(), "{name}");
    }
}

/// Without the wake-up, a message waits for the loop's next event.
#[test]
fn wake_up_without_the_wake_up_messages_wait_for_another_event() {
    for (name, ring) in rings() {
        let ablation = Ablation { no_wake: true, ..Ablation::default() };
        let config = LoopConfig { ablation, ..config(ring) };
        let (told, is_told) = mpsc::channel();
        let (born, birth) = mpsc::channel();
        let (fd, tell) = (eventfd(), told.clone());
        let watched = fd.clone();
        let thread = std::thread::spawn(move || {
            let event_loop = EventLoop::new(config).unwrap();
            let count = Count::new();
            count.then(move || {
                tell.send("event").unwrap();
                Progress::Done
            });
            event_loop.add_handler(watched, 1, Trigger::Edge, count);
            born.send(event_loop.handle()).unwrap();
            event_loop.run().unwrap();
        });
        let handle = birth.recv_timeout(LOST).unwrap();
        spin_until("sleep", || handle.stats().sleeps.get() > 0);
        handle.spawn(move |_| told.send("message").unwrap()).unwrap();
        assert_eq!((handle.stats().wakes.get(), is_told.try_recv().ok()), (0, None), "{name}");
        signal(&fd);
        let order = [(); 2].map(|()| is_told.recv_timeout(LOST).unwrap());
        assert_eq!(order, ["event", "message"], "{name}");
        // A stop wakes the loop nonetheless.
        spin_until("sleep", || handle.stats().sleeps.get() > 1);
        let _watchdog = Watchdog::new(name);
        handle.stop();
        thread.join().unwrap();
    }
}

/// So does a result of the loop's thread pool.
#[test]
fn wake_up_left_out_the_thread_pool_still_wakes_its_loop() {
    let ablation = Ablation { no_wake: true, ..Ablation::default() };
    let event_loop = EventLoop::new(LoopConfig { ablation, ..config(RingChoice::Epoll) }).unwrap();
    let file = event_loop.register_file(tempfile(b"hello"));
    let _watchdog = Watchdog::new("a pool thread's result");
    for _ in 0..100 {
        let bufs = AlignedBuf::io_bufs(5, 1).unwrap();
        let read = event_loop.operate(&file, IoOp::Read { offset: 0 }, Engine::Threads, bufs);
        assert_eq!(event_loop.block_on(read).unwrap().0.unwrap(), 5);
    }
}

/// A bottom half scheduled while it is about to run must see all earlier writes, or run again. Each schedule
/// is preceded by a count.
#[test]
fn wake_up_a_bottom_half_is_never_scheduled_in_vain() {
    for (name, thread) in threads() {
        let (written, seen) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        let (give, take) = mpsc::channel();
        let (written_there, seen_there) = (written.clone(), seen.clone());
        let look =
            move || seen_there.store(written_there.load(Ordering::Relaxed), Ordering::Relaxed);
        let make = move |on_loop: &EventLoop| give.send(on_loop.bottom_half(look)).unwrap();
        thread.handle().spawn(make).unwrap();
        let bottom_half = take.recv_timeout(LOST).unwrap();
        for n in 1..=50_000 {
            written.store(n, Ordering::Relaxed);
            bottom_half.schedule();
            if n % 16 == 0 {
                spin_until(name, || seen.load(Ordering::Relaxed) == n);
            }
        }
    }
}

macro_rules! assert_not_send {
    ($type:ty) => {
        const _: fn() = || {
            trait AmbiguousIfSend<A> {
                fn item() {}
            }
            impl<T: ?Sized> AmbiguousIfSend<()> for T {}
            impl<T: ?Sized + Send> AmbiguousIfSend<u8> for T {}
            // Fails to compile, as ambiguous, if the type is `Send`.
            let _ = <$type as AmbiguousIfSend<_>>::item;
        };
    };
}

#[test]
fn one_thread_neither_loop_nor_ring_can_leave_its_thread() {
    assert_not_send!(EventLoop);
    assert_not_send!(Box<dyn Ring>);
    assert_not_send!(LoopFile);
    assert_not_send!(IoBufs);
    // The handle can be sent.
    fn is_send<T: Send + Sync>() {}
    is_send::<event_loop::LoopHandle>();
    is_send::<event_loop::BottomHalf>();
}
