//! The wake-up contract under stress: several threads hand over messages, bottom halves, wake-ups of tasks,
//! timers and handlers at once. Nothing is lost, nothing comes twice, and each producer's messages keep their order.

use crate::common;

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use common::*;
use event_loop::{
    BottomHalf, EventLoop, HandlerId, IoThread, IoThreadConfig, LoopConfig, LoopHandle, PollParams,
    Progress, RingChoice, Trigger, oneshot,
};

const PRODUCERS: u32 = 4;
/// Rounds per producer, each of them one of everything.
const ROUNDS: u32 = 2000;

/// What one producer has brought about.
#[derive(Default)]
struct Seen {
    messages: AtomicU32,
    tasks: AtomicU32,
    timers: AtomicU32,
    handlers: AtomicU32,
    /// Written before each scheduling of the bottom half, and what that has seen last.
    written: AtomicU32,
    read: AtomicU32,
}

impl Seen {
    fn counts(&self) -> [u32; 5] {
        let counts = [&self.messages, &self.tasks, &self.timers, &self.handlers, &self.read];
        counts.map(|count| count.load(Relaxed))
    }
}

fn bottom_half(handle: &LoopHandle, seen: &Arc<Seen>) -> BottomHalf {
    let (give, take) = std::sync::mpsc::channel();
    let seen = seen.clone();
    let make = move |on_loop: &EventLoop| {
        let look = move || seen.read.store(seen.written.load(Relaxed), Relaxed);
        give.send(on_loop.bottom_half(look)).unwrap();
    };
    handle.spawn(make).unwrap();
    take.recv_timeout(LOST).unwrap()
}

fn produce(handle: &LoopHandle, seen: &Arc<Seen>) {
    let bottom_half = bottom_half(handle, seen);
    for n in 0..ROUNDS {
        let here = seen.clone();
        let message = move |_: &EventLoop| {
            assert_eq!(here.messages.fetch_add(1, Relaxed), n, "lost, doubled or out of order");
        };
        handle.spawn(message).unwrap();

        seen.written.fetch_add(1, Relaxed);
        bottom_half.schedule();

        let ((sender, receiver), here) = (oneshot::channel(), seen.clone());
        let task = async move {
            assert_eq!(receiver.await, Ok(n));
            here.tasks.fetch_add(1, Relaxed);
        };
        handle.spawn(move |on_loop: &EventLoop| drop(on_loop.spawn(task))).unwrap();
        sender.send(n);

        let here = seen.clone();
        let timer = move |on_loop: &EventLoop| {
            let deadline = on_loop.now_ns() + u64::from(n % 7) * 1000;
            let on_time = on_loop.clone();
            on_loop.add_timer(deadline, move || {
                assert!(on_time.now_ns() >= deadline, "early");
                here.timers.fetch_add(1, Relaxed);
            });
        };
        handle.spawn(timer).unwrap();

        // A handler that is there for one event; this thread signals it before it is added, or after.
        let (fd, here) = (eventfd(), seen.clone());
        let watched = fd.clone();
        let watch = move |on_loop: &EventLoop| {
            let (handler, id) = (Count::new(), Rc::new(Cell::new(None::<HandlerId>)));
            let (own, again) = (id.clone(), on_loop.clone());
            handler.then(move || {
                again.remove_handler(own.take().expect("called once"));
                here.handlers.fetch_add(1, Relaxed);
                Progress::Done
            });
            id.set(Some(on_loop.add_handler(watched, 1, Trigger::Edge, handler)));
        };
        if n.is_multiple_of(2) {
            signal(&fd);
            handle.spawn(watch).unwrap();
        } else {
            handle.spawn(watch).unwrap();
            signal(&fd);
        }
        if n.is_multiple_of(64) {
            // Now and then the loop may go to sleep.
            spin_until("the bottom half", || seen.read.load(Relaxed) > n);
        }
    }
}

#[test]
fn wake_up_producers_of_everything_lose_nothing_and_double_nothing() {
    let best = RingChoice::default();
    for (ring, poll) in
        [(best, NO_POLLING), (best, PollParams::default()), (RingChoice::Epoll, NO_POLLING)]
    {
        let event_loop = LoopConfig { ring, poll, ..LoopConfig::default() };
        let config = IoThreadConfig { event_loop, ..IoThreadConfig::default() };
        let thread = IoThread::spawn(config).unwrap();
        let seen: Vec<Arc<Seen>> = (0..PRODUCERS).map(|_| Arc::default()).collect();
        std::thread::scope(|scope| {
            for seen in &seen {
                let handle = thread.handle().clone();
                scope.spawn(move || produce(&handle, seen));
            }
        });
        let all = || seen.iter().all(|seen| seen.counts() == [ROUNDS; 5]);
        spin_until("everything that was handed over", all);
        stop_and_count_wakes(thread);
        assert!(all(), "and nothing twice");
    }
}
