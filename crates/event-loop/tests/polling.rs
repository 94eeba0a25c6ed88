//! Adaptive polling by the loop, in virtual time. The policies themselves are tested in their files and in
//! `properties.rs`.

use crate::common;

use std::cell::{Cell, RefCell};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use common::{Watchdog, eventfd, signal};
use event_loop::ring::sim::{Faults, Sim, Verdict};
use event_loop::{
    AlignedBuf, Engine, EventLoop, Handler, IoOp, LoopConfig, PollParams, PollPolicy, Progress,
    Trigger,
};

type Race = Box<dyn Fn(&Queue)>;

/// A virtqueue as a polled source: it signals unless it is polled.
struct Queue {
    fd: Arc<OwnedFd>,
    available: Cell<u32>,
    served: Cell<u32>,
    /// How often it was served after an event of its descriptor.
    by_fd: Cell<u32>,
    polls: Cell<u32>,
    polled: Cell<bool>,
    begun: Cell<u32>,
    ended: Cell<u32>,
    /// Runs within `poll_end`, as a guest that races.
    race: RefCell<Option<Race>>,
}

impl Queue {
    /// Adds a request as the guest does.
    fn add(&self) {
        self.available.set(self.available.get() + 1);
        if !self.polled.get() {
            signal(&self.fd);
        }
    }
}

impl Handler for Queue {
    fn ready(&self, events: u32) -> Progress {
        self.by_fd.set(self.by_fd.get() + u32::from(events != 0));
        self.served.set(self.served.get() + self.available.take());
        Progress::Done
    }
    fn can_poll(&self) -> bool {
        true
    }
    fn poll(&self) -> bool {
        self.polls.set(self.polls.get() + 1);
        self.available.get() > 0
    }
    fn poll_begin(&self) {
        assert!(!self.polled.replace(true), "begun twice");
        self.begun.set(self.begun.get() + 1);
    }
    fn poll_end(&self) {
        if let Some(race) = &*self.race.borrow() {
            race(self);
        }
        assert!(self.polled.replace(false), "ended twice");
        self.ended.set(self.ended.get() + 1);
    }
}

fn queue(event_loop: &EventLoop) -> Rc<Queue> {
    let fd = eventfd();
    let queue = Rc::new(Queue {
        fd: fd.clone(),
        available: Cell::new(0),
        served: Cell::new(0),
        by_fd: Cell::new(0),
        polls: Cell::new(0),
        polled: Cell::new(false),
        begun: Cell::new(0),
        ended: Cell::new(0),
        race: RefCell::default(),
    });
    event_loop.add_handler(fd, 1, Trigger::Edge, queue.clone());
    queue
}

fn rig() -> (Sim, EventLoop, Watchdog) {
    let sim = Sim::new(1, Faults::default());
    let event_loop = sim
        .event_loop(LoopConfig {
            poll: PollParams::of(PollPolicy::Weighted),
            ..LoopConfig::default()
        })
        .unwrap();
    event_loop.run_once(false).unwrap();
    (sim, event_loop, Watchdog::new("polling"))
}

/// Adds a request `after` ns from now, and runs until it is served.
fn request(sim: &Sim, event_loop: &EventLoop, queue: &Rc<Queue>, after: u64) {
    let served = queue.served.get();
    let adder = queue.clone();
    event_loop.add_timer(sim.now_ns() + after, move || adder.add());
    while queue.served.get() == served {
        event_loop.run_once(true).unwrap();
    }
}

/// Adds requests at this pace until the queue is polled.
fn warm_up(sim: &Sim, event_loop: &EventLoop, queue: &Rc<Queue>) {
    for _ in 0..50 {
        request(sim, event_loop, queue, 3_000);
    }
    assert!(queue.polled.get() && event_loop.stats().poll_window_ns.get() > 0);
}

/// Completes ring operations at this pace, one after the other.
fn pace(sim: &Sim, event_loop: &EventLoop, ns: u64) {
    sim.script(move |_| Verdict::Delay(ns));
    let file = event_loop.register_file(sim.file(&[1; 512]).unwrap());
    for _ in 0..200 {
        let bufs = AlignedBuf::io_bufs(512, 512).unwrap();
        let read = event_loop.operate(&file, IoOp::Read { offset: 0 }, Engine::Uring, bufs);
        assert_eq!(event_loop.block_on(read).unwrap().0.unwrap(), 512);
    }
}

/// Lets the loop sleep until `ns` have passed.
fn idle(sim: &Sim, event_loop: &EventLoop, ns: u64) {
    let woken = Rc::new(Cell::new(false));
    let flag = woken.clone();
    event_loop.add_timer(sim.now_ns() + ns, move || flag.set(true));
    while !woken.get() {
        event_loop.run_once(true).unwrap();
    }
}

#[test]
fn a_polled_source_is_served_without_its_descriptor() {
    let (sim, event_loop, _watchdog) = rig();
    let queue = queue(&event_loop);
    warm_up(&sim, &event_loop, &queue);
    let (by_fd, hits) = (queue.by_fd.get(), event_loop.stats().poll_hits.get());
    for n in 1..=20 {
        let before = queue.served.get();
        // The queue is polled, so this request comes without a signal.
        assert!(queue.polled.get());
        queue.add();
        event_loop.run_once(true).unwrap();
        assert_eq!((queue.served.get(), queue.by_fd.get()), (before + 1, by_fd), "request {n}");
    }
    assert!(event_loop.stats().poll_hits.get() + 20 >= hits);
}

#[test]
fn leaving_polling_mode_tells_the_source_and_looks_once_more() {
    let (sim, event_loop, _watchdog) = rig();
    let queue = queue(&event_loop);
    warm_up(&sim, &event_loop, &queue);
    // Without requests, the loop stops polling and sleeps.
    idle(&sim, &event_loop, 1_000_000);
    assert!(!queue.polled.get() && queue.ended.get() > 0);
    assert!(event_loop.stats().poll_misses.get() > 0 && event_loop.stats().sleeps.get() > 0);
    let by_fd = queue.by_fd.get();
    queue.add();
    while queue.available.get() > 0 {
        event_loop.run_once(true).unwrap();
    }
    assert_eq!(queue.by_fd.get(), by_fd + 1, "asleep, it is the descriptor that brings it");

    // The guest adds a request just before it sees that it has to signal again. Only the check after
    // `poll_end` finds the request.
    warm_up(&sim, &event_loop, &queue);
    *queue.race.borrow_mut() = Some(Box::new(|queue| queue.available.set(1)));
    let (served, sleeps) = (queue.served.get(), event_loop.stats().sleeps.get());
    while queue.served.get() == served {
        event_loop.run_once(true).unwrap();
    }
    assert_eq!(event_loop.stats().sleeps.get(), sleeps, "it slept on the request");
    queue.race.take();
}

/// Hundreds of rarely used queues are not polled along with a busy one.
#[test]
fn in_a_crowd_a_source_leaves_the_set_soon() {
    let (sim, event_loop, _watchdog) = rig();
    let busy = queue(&event_loop);
    let others: Vec<_> = (0..100).map(|_| queue(&event_loop)).collect();
    let polled = || others.iter().filter(|other| other.polled.get()).count();
    warm_up(&sim, &event_loop, &busy);
    others.iter().for_each(|other| other.add());
    request(&sim, &event_loop, &busy, 3_000);
    warm_up(&sim, &event_loop, &busy);
    assert_eq!(polled(), others.len(), "they have only just had an event");
    let until = sim.now_ns() + 11_000_000;
    while sim.now_ns() < until {
        request(&sim, &event_loop, &busy, 3_000);
    }
    assert!(busy.polled.get());
    assert_eq!(polled(), 0);
    // The rarely used queues are served as before; a few may stay in the set.
    let few = &others[..10];
    few.iter().for_each(|other| other.add());
    for _ in 0..1_000 {
        request(&sim, &event_loop, &busy, 3_000);
    }
    assert_eq!(few.iter().map(|other| other.served.get()).sum::<u32>(), 20);
    assert_eq!(polled(), few.len());
}

#[test]
fn a_source_leaves_the_set_after_seven_seconds_without_an_event() {
    let (sim, event_loop, _watchdog) = rig();
    let (busy, quiet) = (queue(&event_loop), queue(&event_loop));
    quiet.add();
    warm_up(&sim, &event_loop, &busy);
    let began = sim.now_ns();
    assert!(quiet.polls.get() > 0 && quiet.polled.get());
    let mut polls = quiet.polls.get();
    // The busy queue keeps the loop polling.
    while sim.now_ns() < began + 6_800_000_000 {
        idle(&sim, &event_loop, 100_000_000);
        warm_up(&sim, &event_loop, &busy);
    }
    assert!(quiet.polls.get() > polls, "it is still polled");
    while sim.now_ns() < began + 7_200_000_000 {
        idle(&sim, &event_loop, 100_000_000);
        warm_up(&sim, &event_loop, &busy);
    }
    polls = quiet.polls.get();
    warm_up(&sim, &event_loop, &busy);
    assert_eq!((quiet.polls.get(), quiet.polled.get()), (polls, false), "it has left");
    // An event of its descriptor is served, and brings the source back into the set.
    let served = quiet.served.get();
    quiet.add();
    while quiet.served.get() == served {
        event_loop.run_once(true).unwrap();
    }
    warm_up(&sim, &event_loop, &busy);
    assert!(quiet.polls.get() > polls && quiet.polled.get());
    assert_eq!(quiet.begun.get(), quiet.ended.get() + 1);
}

#[test]
fn poll_max_ns_0_reads_no_clock() {
    let sim = Sim::new(1, Faults::default());
    let config = LoopConfig { poll: common::NO_POLLING, ..LoopConfig::default() };
    let event_loop = sim.event_loop(config).unwrap();
    let queue = queue(&event_loop);
    let file = event_loop.register_file(sim.file(&[1; 512]).unwrap());
    for _ in 0..100 {
        queue.add();
        let bufs = AlignedBuf::io_bufs(512, 512).unwrap();
        let read = event_loop.operate(&file, IoOp::Read { offset: 0 }, Engine::Uring, bufs);
        event_loop.block_on(read).unwrap().0.unwrap();
        while queue.available.get() > 0 {
            event_loop.run_once(true).unwrap();
        }
    }
    assert!(event_loop.stats().sleeps.get() > 0);
    assert_eq!((sim.clock_reads(), queue.polls.get(), queue.begun.get()), (0, 0, 0));
}

#[test]
fn parameters_change_while_the_loop_runs() {
    let (sim, event_loop, _watchdog) = rig();
    let queue = queue(&event_loop);
    warm_up(&sim, &event_loop, &queue);
    let window = || event_loop.stats().poll_window_ns.get();
    // Polling off: the source is informed before the next sleep, and the clock is not read any more.
    event_loop.set_poll_params(PollParams { max_ns: 0, ..PollParams::of(PollPolicy::Weighted) });
    assert_eq!(window(), 0);
    queue.add();
    event_loop.run_once(true).unwrap();
    let reads = sim.clock_reads();
    for _ in 0..10 {
        let served = queue.served.get();
        queue.available.set(1);
        signal(&queue.fd);
        while queue.served.get() == served {
            event_loop.run_once(true).unwrap();
        }
    }
    // The first of these may be found by the last poll.
    signal(&queue.fd);
    event_loop.run_once(true).unwrap();
    assert_eq!((sim.clock_reads(), queue.polled.get()), (reads, false));
    // A smaller maximum takes effect at once; a larger one lets the window grow again.
    event_loop.set_poll_params(PollParams::of(PollPolicy::Weighted));
    warm_up(&sim, &event_loop, &queue);
    event_loop
        .set_poll_params(PollParams { max_ns: 1_000, ..PollParams::of(PollPolicy::Weighted) });
    assert!(window() <= 1_000, "{}", window());
    event_loop
        .set_poll_params(PollParams { max_ns: 1_000_000, ..PollParams::of(PollPolicy::Weighted) });
    pace(&sim, &event_loop, 300_000);
    assert!(window() > 100_000, "{}", window());
}

#[test]
fn the_window_follows_the_pace_of_the_events() {
    let (sim, event_loop, _watchdog) = rig();
    event_loop.set_poll_params(PollParams::of(PollPolicy::Weighted));
    let window = || event_loop.stats().poll_window_ns.get();
    let pace = |ns| pace(&sim, &event_loop, ns);
    pace(20_000);
    assert!((10_000..=32_768).contains(&window()), "{}", window());
    pace(500);
    assert!((1..5_000).contains(&window()), "fast events: {}", window());
    let misses = event_loop.stats().poll_misses.get();
    pace(500);
    assert_eq!(event_loop.stats().poll_misses.get(), misses, "each found within the window");
    // Too slow to be polled for: the loop sleeps.
    let sleeps = event_loop.stats().sleeps.get();
    pace(50_000_000);
    assert!(event_loop.stats().sleeps.get() >= sleeps + 200);
}

#[test]
fn a_deadline_ends_the_polling_for_it() {
    let (sim, event_loop, _watchdog) = rig();
    let queue = queue(&event_loop);
    warm_up(&sim, &event_loop, &queue);
    for _ in 0..100 {
        let deadline = sim.now_ns() + 700;
        let at = Rc::new(Cell::new(0));
        let (fired, clock) = (at.clone(), sim.clone());
        event_loop.add_timer(deadline, move || fired.set(clock.now_ns()));
        while at.get() == 0 {
            event_loop.run_once(true).unwrap();
        }
        assert!(at.get() >= deadline && at.get() < deadline + 500, "{} late", at.get() - deadline);
    }
}
