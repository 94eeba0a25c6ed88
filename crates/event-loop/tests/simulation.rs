//! The whole loop on a simulated ring, with virtual time and seeded faults. A seed runs a million ring
//! operations, along with timers, handlers, tasks, bottom halves, messages and wake-ups from outside.
//! Nothing is lost, duplicated or early: the contracts wake-up, and one-call to fairness.
//!
//! A failure prints its seed. `EVENT_LOOP_SEED=n cargo test -p ringmill-event-loop --test simulation` repeats the
//! run. `EVENT_LOOP_OPERATIONS=n` changes its length.

use crate::common;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use common::*;
use event_loop::ring::sim::{Faults, Random, Sim};
use event_loop::{
    AlignedBuf, BottomHalf, DeferredCall, Engine, EventLoop, Handler, HandlerId, IoBufs, IoOp,
    IoTarget, LoopConfig, LoopFile, PollParams, Progress, TimerId, Trigger, oneshot,
};
use nix::libc;

/// Bytes in the file, which always has its [`pattern`].
const FILE: u64 = 1 << 14;
/// Maximum length of a read or write.
const LONGEST: u64 = 2048;
/// Maximum file operations in flight.
const DEPTH: usize = 64;
/// Errnos of failing operations.
const ERRNOS: [i32; 5] = [libc::EINTR, libc::EAGAIN, libc::EBUSY, libc::EIO, libc::ENOSPC];
/// Maximum delay of a timer, virtual time: the duration of one or two iterations.
const LATEST_NS: u64 = 100_000;

/// Maximum delay of a message, virtual time: it runs in the iteration in which it came, or the next.
const PROMPT_NS: u64 = 10_000;

/// Differs from the garbage that the simulation writes.
fn pattern(offset: u64) -> u8 {
    (offset % 151) as u8
}

/// Four worlds: rough; with failures; with polling; with small queues.
fn world(seed: u64) -> (Faults, LoopConfig) {
    let rough = Faults {
        latency_ns: (0, 1_000),
        late: 1,
        clock_step_ns: 100,
        entries: 8,
        completions: 12,
        spurious_poll: 5,
        poll_fails: 1,
        ..Faults::rough()
    };
    let failing = Faults { fail: 10, errnos: ERRNOS.to_vec(), ..rough.clone() };
    let tiny = Faults { entries: 2, completions: 3, ..failing.clone() };
    let roomy = Faults { entries: 64, completions: 256, full: 1, ..failing.clone() };
    let faults = [rough, failing, roomy, tiny][seed as usize % 4].clone();
    let poll = if seed.is_multiple_of(2) { PollParams::default() } else { NO_POLLING };
    (faults, LoopConfig { poll, ..LoopConfig::default() })
}

/// The load on the loop, and its expected results.
struct Load {
    /// Name for the watchdog.
    name: String,
    event_loop: EventLoop,
    sim: Sim,
    file: LoopFile,
    random: Random,
    me: Weak<Load>,
    /// File operations in flight, by token.
    operations: RefCell<Vec<Option<(IoOp, usize)>>>,
    in_flight: Cell<usize>,
    completed: Cell<u64>,
    /// By deadline, then age: the number of the iteration in which the timer was added, and its id.
    timers: RefCell<BTreeMap<(u64, u32), (u64, TimerId)>>,
    next_timer: Cell<u32>,
    timer_target: RefCell<Option<Rc<dyn IoTarget>>>,
    iteration: Cell<u64>,
    handlers: RefCell<Vec<(HandlerId, Rc<Watch>)>>,
    batch: RefCell<Option<Rc<Batch>>>,
    tasks: Cell<u32>,
    bottom_half: RefCell<Option<BottomHalf>>,
    /// Incremented before the bottom half is scheduled, and the value that it saw last.
    asked: Arc<AtomicU64>,
    seen: Arc<AtomicU64>,
    /// Number of messages sent and, in the same order, run.
    sent: Arc<AtomicU64>,
    got: Arc<AtomicU64>,
    /// Outside events still to happen.
    outside: Rc<Cell<u32>>,
}

impl Load {
    fn new(seed: u64) -> Rc<Self> {
        let (faults, config) = world(seed);
        let sim = Sim::new(seed, faults);
        let event_loop = sim.event_loop(config).unwrap();
        let content: Vec<u8> = (0..FILE).map(pattern).collect();
        let file = event_loop.register_file(sim.file(&content).unwrap());
        let load = Rc::new_cyclic(|me: &Weak<Load>| Load {
            name: format!("an event of the simulation; to run it again: EVENT_LOOP_SEED={seed}"),
            event_loop,
            sim,
            file,
            random: Random::new(seed),
            me: me.clone(),
            operations: RefCell::new(vec![None; DEPTH]),
            in_flight: Cell::new(0),
            completed: Cell::new(0),
            timers: RefCell::default(),
            next_timer: Cell::new(0),
            timer_target: RefCell::new(None),
            iteration: Cell::new(0),
            handlers: RefCell::default(),
            batch: RefCell::new(None),
            tasks: Cell::new(0),
            bottom_half: RefCell::new(None),
            asked: Arc::default(),
            seen: Arc::default(),
            sent: Arc::default(),
            got: Arc::default(),
            outside: Rc::default(),
        });
        *load.timer_target.borrow_mut() = Some(Rc::new(Timers(load.me.clone())));
        let batch = Batch { load: load.me.clone(), queued: Cell::new(false), owed: Cell::new(0) };
        *load.batch.borrow_mut() = Some(Rc::new(batch));
        let (asked, seen) = (load.asked.clone(), load.seen.clone());
        let look = move || seen.store(asked.load(Relaxed), Relaxed);
        *load.bottom_half.borrow_mut() = Some(load.event_loop.bottom_half(look));
        (0..6).for_each(|_| load.watch());
        load
    }

    fn roll(&self, sides: u64) -> u64 {
        self.random.below(sides)
    }

    // ---- file operations -----------------------------------------------------------------------

    fn pick_operation(&self) -> (IoOp, IoBufs) {
        let len = 1 + self.roll(LONGEST);
        let offset = self.roll(FILE - len);
        let mut bufs = AlignedBuf::io_bufs(len as usize, 1).unwrap();
        match self.roll(16) {
            0 => (IoOp::Fsync { data_only: true }, IoBufs::new()),
            1 => (IoOp::Fallocate { mode: 0, offset, len }, IoBufs::new()),
            2..=5 => {
                let bytes: Vec<u8> = (offset..offset + len).map(pattern).collect();
                bufs.copy_in(0, &bytes);
                (IoOp::Write { offset, dsync: false }, bufs)
            }
            n => {
                let bufs = if n < 9 { in_pieces(len as usize) } else { bufs };
                (IoOp::Read { offset }, bufs)
            }
        }
    }

    fn submit(&self) {
        let free = self.operations.borrow().iter().position(Option::is_none);
        let (Some(token), Some(me)) = (free, self.me.upgrade()) else { return };
        let (op, bufs) = self.pick_operation();
        self.operations.borrow_mut()[token] = Some((op, bufs.len()));
        self.in_flight.set(self.in_flight.get() + 1);
        let target: Rc<dyn IoTarget> = me;
        self.event_loop.submit(&self.file, op, Engine::Uring, bufs, &target, token as u32);
    }

    fn check(&self, op: IoOp, len: usize, result: i32, bufs: &IoBufs) {
        if result < 0 {
            assert!(ERRNOS.contains(&-result), "{op:?}: {result}");
            return;
        }
        assert_eq!(bufs.len(), len, "{op:?}: the memory comes back");
        match op {
            IoOp::Read { offset } => {
                let mut bytes = vec![0; len];
                bufs.copy_out(0, &mut bytes);
                assert!((1..=len).contains(&(result as usize)), "{op:?}: {result}");
                let right = |(n, byte): (usize, &u8)| *byte == pattern(offset + n as u64);
                let read = &bytes[..result as usize];
                assert!(read.iter().enumerate().all(right), "{op:?} read something else");
            }
            IoOp::Write { .. } => {
                assert!((1..=len).contains(&(result as usize)), "{op:?}: {result}")
            }
            _ => assert_eq!(result, 0, "{op:?}"),
        }
    }

    // ---- timers, tasks, and what comes from outside --------------------------------------------

    fn add_timer(&self) {
        let now = self.event_loop.now_ns();
        let deadline = (now + self.roll(300_000)).saturating_sub(10_000);
        let token = self.next_timer.replace(self.next_timer.get() + 1);
        let target = self.timer_target.borrow().clone().unwrap();
        let id = self.event_loop.submit_timer(deadline, &target, token);
        self.timers.borrow_mut().insert((deadline, token), (self.iteration.get(), id));
    }

    fn cancel_timer(&self) {
        let mut timers = self.timers.borrow_mut();
        let first = self.roll(2) == 0;
        let timer = if first { timers.pop_first() } else { timers.pop_last() };
        if let Some((_, (_, id))) = timer {
            assert!(self.event_loop.cancel_timer(id), "it has not run");
            assert!(!self.event_loop.cancel_timer(id), "it is cancelled");
        }
    }

    /// Spawns a task that reads, sleeps, and waits for an outside event, or is dropped half-way.
    fn spawn(&self) {
        let Some(me) = self.me.upgrade() else { return };
        let (op, bufs) = self.pick_operation();
        let (len, gives_up) = (bufs.len(), self.roll(4) == 0);
        let (sender, receiver) = oneshot::channel();
        self.outside(self.roll(200_000), move || sender.send(7));
        self.tasks.set(self.tasks.get() + 1);
        self.event_loop.spawn(async move {
            let operation = me.event_loop.operate(&me.file, op, Engine::Uring, bufs);
            if gives_up {
                drop(operation);
            } else {
                let (result, bufs) = operation.await;
                me.check(op, len, raw(result), &bufs);
                let until = me.event_loop.now_ns() + 5_000;
                me.event_loop.sleep_until(until).await;
                assert!(me.event_loop.now_ns() >= until, "woken early");
            }
            assert_eq!(receiver.await, Ok(7));
            me.tasks.set(me.tasks.get() - 1);
        });
    }

    /// Schedules an outside event.
    fn outside(&self, in_ns: u64, call: impl FnOnce() + 'static) {
        self.outside.set(self.outside.get() + 1);
        let left = self.outside.clone();
        self.sim.at(self.sim.now_ns() + in_ns, move || {
            left.set(left.get() - 1);
            call();
        });
    }

    fn send_message(&self) {
        let (sent, got, handle) = (self.sent.clone(), self.got.clone(), self.event_loop.handle());
        let in_ns = self.roll(100_000);
        let due = self.sim.now_ns() + in_ns;
        self.outside(in_ns, move || {
            let n = sent.fetch_add(1, Relaxed);
            let check = move |on_loop: &EventLoop| {
                assert_eq!(got.fetch_add(1, Relaxed), n, "in order");
                let late = on_loop.now_ns().saturating_sub(due);
                assert!(late < PROMPT_NS, "slept on for {late} ns");
            };
            handle.spawn(check).unwrap();
        });
    }

    fn schedule_bottom_half(&self) {
        let (asked, bottom_half) = (self.asked.clone(), self.bottom_half.borrow().clone().unwrap());
        let schedule = move || {
            asked.fetch_add(1, Relaxed);
            bottom_half.schedule();
        };
        if self.roll(2) == 0 { schedule() } else { self.outside(self.roll(100_000), schedule) }
    }

    // ---- handlers ------------------------------------------------------------------------------

    fn watch(&self) {
        let trigger = if self.roll(2) == 0 { Trigger::Edge } else { Trigger::Level };
        let watch = Rc::new(Watch {
            load: self.me.clone(),
            fd: eventfd(),
            trigger,
            can_poll: self.roll(2) == 0,
            signalled: Rc::default(),
            polled: Cell::new(false),
            removed: Cell::new(false),
        });
        let id = self.event_loop.add_handler(watch.fd.clone(), 1, trigger, watch.clone());
        self.handlers.borrow_mut().push((id, watch));
    }

    fn signal(&self) {
        let at = self.roll(6) as usize;
        let (fd, signalled) = {
            let handlers = self.handlers.borrow();
            let Some((_, watch)) = handlers.get(at) else { return };
            (watch.fd.clone(), watch.signalled.clone())
        };
        self.outside(self.roll(50_000), move || {
            signalled.set(true);
            signal(&fd);
        });
    }

    /// Removes one handler and adds another.
    fn exchange_handler(&self) {
        let at = self.roll(6) as usize;
        let (id, watch) = self.handlers.borrow_mut().swap_remove(at);
        watch.removed.set(true);
        self.event_loop.remove_handler(id);
        self.watch();
    }

    // ---- the course ----------------------------------------------------------------------------

    fn act(&self) {
        match self.roll(64) {
            0..=3 => self.add_timer(),
            4..=5 => self.cancel_timer(),
            6 => self.spawn(),
            7..=8 => self.send_message(),
            9..=10 => self.schedule_bottom_half(),
            11..=14 => self.signal(),
            15 => self.exchange_handler(),
            _ => self.submit(),
        }
    }

    fn turn(&self, may_wait: bool) {
        self.iteration.set(self.iteration.get() + 1);
        let before = self.event_loop.stats().enters.get();
        self.event_loop.run_once(may_wait).unwrap();
        assert!(self.event_loop.stats().enters.get() <= before + 1, "one call per iteration");
        let batch = self.batch.borrow().clone().unwrap();
        assert_eq!(batch.owed.get(), 0, "deferred calls are made by the end of the iteration");
        let (loops, ours) = (self.event_loop.in_flight(), self.in_flight.get() as u64);
        assert!(loops >= ours, "submitted = completed + in flight: {loops}, but {ours}");
    }

    fn is_quiet(&self) -> bool {
        self.in_flight.get() == 0
            && self.tasks.get() == 0
            && self.outside.get() == 0
            && self.timers.borrow().is_empty()
            && self.asked.load(Relaxed) == self.seen.load(Relaxed)
            && self.sent.load(Relaxed) == self.got.load(Relaxed)
            && self.handlers.borrow().iter().all(|(_, watch)| !watch.signalled.get())
    }

    fn run(&self, operations: u64) {
        let submitted = || self.event_loop.stats().submitted.get();
        while submitted() < operations {
            let chunk = submitted() + 20_000;
            let _watchdog = Watchdog::new(&self.name);
            while submitted() < chunk.min(operations) {
                // Mostly busy, and sometimes so idle that the loop sleeps.
                let busy = self.iteration.get() % 2048 < 1024;
                let acts = if busy { self.roll(24) } else { self.roll(2) };
                (0..acts).for_each(|_| self.act());
                if self.outside.get() == 0 {
                    self.send_message();
                }
                self.turn(self.roll(16) > 0);
            }
        }
        let _watchdog = Watchdog::new(&self.name);
        while !self.is_quiet() {
            self.turn(true);
        }
        // Only the polls stay in flight.
        self.sim.set_faults(Faults { completions: 1024, ..Faults::default() });
        let polls = self.handlers.borrow().len() as u64 + 1;
        while self.event_loop.in_flight() != polls || self.sim.in_flight() > 0 {
            self.sim.advance(1_000_000);
            self.turn(false);
        }
        let handlers = self.handlers.take();
        handlers.iter().for_each(|(_, watch)| watch.removed.set(true));
        self.event_loop.handle().stop();
        self.event_loop.run().unwrap();
        assert_eq!((self.event_loop.in_flight(), self.sim.in_flight()), (0, 0));
        assert!(handlers.iter().all(|(_, watch)| Rc::strong_count(watch) == 1), "freed");
    }
}

impl IoTarget for Load {
    fn complete(&self, token: u32, result: i32, bufs: IoBufs) {
        let operation = self.operations.borrow_mut()[token as usize].take();
        let (op, len) = operation.expect("it was submitted and has not completed before");
        self.in_flight.set(self.in_flight.get() - 1);
        self.completed.set(self.completed.get() + 1);
        self.check(op, len, result, &bufs);
        let batch = self.batch.borrow().clone().unwrap();
        batch.owed.set(batch.owed.get() + 1);
        let batch: Rc<dyn DeferredCall> = batch;
        self.event_loop.defer(&batch);
        if self.roll(2) == 0 {
            self.act();
        }
    }
}

struct Timers(Weak<Load>);

impl IoTarget for Timers {
    fn complete(&self, token: u32, result: i32, _bufs: IoBufs) {
        let Some(load) = self.0.upgrade() else { return };
        assert_eq!(result, 0);
        let (now, this) = (load.event_loop.now_ns(), load.iteration.get());
        let mut timers = load.timers.borrow_mut();
        let of_token = timers.iter().find(|((_, other), _)| *other == token);
        let key = *of_token.expect("it has not run and was not cancelled").0;
        assert!(key.0 <= now, "early by {} ns", key.0 - now);
        // Timers added in this very iteration may wait for the next.
        let earlier = timers.range(..key).find(|(_, (added, _))| *added < this);
        assert_eq!(earlier, None, "before {key:?}");
        let (added, _) = timers.remove(&key).unwrap();
        assert!(added == this || now - key.0 < LATEST_NS, "late by {} ns", now - key.0);
        drop(timers);
        if load.roll(8) == 0 {
            load.act();
        }
    }
}

struct Batch {
    load: Weak<Load>,
    queued: Cell<bool>,
    owed: Cell<u32>,
}

impl DeferredCall for Batch {
    fn run(&self) {
        self.owed.set(0);
        if let Some(load) = self.load.upgrade()
            && load.roll(64) == 0
        {
            load.act();
        }
    }

    fn queued(&self) -> &Cell<bool> {
        &self.queued
    }
}

struct Watch {
    load: Weak<Load>,
    fd: Arc<OwnedFd>,
    trigger: Trigger,
    can_poll: bool,
    /// Signalled and not called since.
    signalled: Rc<Cell<bool>>,
    polled: Cell<bool>,
    removed: Cell<bool>,
}

impl Handler for Watch {
    fn ready(&self, events: u32) -> Progress {
        assert!(!self.removed.get(), "called after it was removed");
        assert!(events == 0 || events == libc::POLLIN as u32, "{events:#x}");
        self.signalled.set(false);
        if self.trigger == Trigger::Level {
            let _ = nix::unistd::read(&self.fd, &mut [0; 8]);
        }
        let Some(load) = self.load.upgrade() else { return Progress::Done };
        match load.roll(16) {
            0 => load.act(),
            // May exchange this handler itself.
            1 => load.exchange_handler(),
            2 if !self.removed.get() => {
                self.signalled.set(true);
                return Progress::More;
            }
            _ => {}
        }
        Progress::Done
    }

    fn can_poll(&self) -> bool {
        self.can_poll
    }

    fn poll(&self) -> bool {
        self.signalled.get()
    }

    fn poll_begin(&self) {
        assert!(!self.polled.replace(true), "poll_begin was called twice");
    }

    fn poll_end(&self) {
        assert!(self.polled.replace(false), "poll_end was called twice");
    }
}

/// Memory in two segments, with a gap between them.
#[allow(unsafe_code)]
fn in_pieces(len: usize) -> IoBufs {
    let whole = AlignedBuf::io_bufs(len + 1, 1).unwrap();
    let base = whole.iovecs()[0].iov_base.cast::<u8>();
    let (half, mut pieces) = (len / 2, IoBufs::new());
    pieces.set_owner(whole.owner().unwrap().clone());
    // SAFETY: both are parts of `whole`, whose owner is kept.
    unsafe {
        pieces.push(base, half);
        pieces.push(base.add(half + 1), len - half);
    }
    pieces
}

/// Prints how to repeat the run, if it fails.
struct Replay(u64);

impl Drop for Replay {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("simulation: seed {}; to run it again: EVENT_LOOP_SEED={0}", self.0);
        }
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect(variable))
}

#[test]
fn a_million_operations_per_seed_lose_nothing_and_double_nothing() {
    let operations = number("EVENT_LOOP_OPERATIONS").unwrap_or(1_000_000);
    let seeds = number("EVENT_LOOP_SEED").map_or((1..=2).collect(), |seed| vec![seed]);
    let run = |seed| {
        let _replay = Replay(seed);
        let load = Load::new(seed);
        load.run(operations);
        let stats = load.event_loop.stats();
        println!(
            "seed {seed}: {} operations on files, {} in all, in {} iterations, {} sleeps, {} wakes, {} us of virtual time",
            load.completed.get(),
            stats.submitted.get(),
            stats.iterations.get(),
            stats.sleeps.get(),
            stats.wakes.get(),
            load.sim.now_ns() / 1000,
        );
    };
    std::thread::scope(|scope| {
        seeds.into_iter().for_each(|seed| _ = scope.spawn(move || run(seed)))
    });
}

/// A seed determines the run, as a failure could not be repeated otherwise.
#[test]
fn a_seed_gives_the_same_course_each_time() {
    let course = |seed| {
        let load = Load::new(seed);
        load.run(3_000);
        let stats = load.event_loop.stats();
        let counts = [&stats.iterations, &stats.enters, &stats.sleeps, &stats.wakes];
        (load.sim.now_ns(), counts.map(|counter| counter.get()))
    };
    for seed in 1..=4 {
        assert_eq!(course(seed), course(seed));
    }
    assert_ne!(course(1), course(5));
}
