//! One thread that runs everything: actors, each with its own stack, in virtual time.
//!
//! An actor is a loop of the daemon, which runs [`EventLoop::run`](event_loop::EventLoop::run) as in
//! production, or a part of a guest. An actor runs until it waits. The seed then picks one of the actors that
//! are ready. When none is ready, time advances to the earliest deadline. An actor that waits without a
//! deadline and is never woken reveals a lost wake-up.

#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};
use event_loop::ring::sim::elsewhere;

use crate::random::Random;

/// The deadline of an actor that waits for a wake-up only.
pub(crate) const FOREVER: u64 = u64::MAX;

/// Length of an actor's stack, bytes. Untouched pages need no memory.
const STACK: usize = 1 << 20;

type Routine = Coroutine<(), u64, (), DefaultStack>;

thread_local! {
    /// The machine of this thread, for code without a reference to it.
    static PAUSING: Cell<Option<(Machine, u64)>> = const { Cell::new(None) };
}

/// The machine. Clones are handles to the same machine.
#[derive(Clone)]
pub(crate) struct Machine(Rc<Inner>);

struct Inner {
    now_ns: Cell<u64>,
    random: Random,
    actors: RefCell<Vec<Option<Actor>>>,
    /// The index of the running actor.
    current: Cell<Option<usize>>,
    /// Indices of ready actors; reused between steps.
    ready: RefCell<Vec<usize>>,
    /// Number of actors so far.
    spawned: Cell<u64>,
    steps: Cell<u64>,
    trace: Cell<u64>,
    verbose: bool,
}

struct Actor {
    name: String,
    number: u64,
    /// `None` while the actor runs.
    routine: Option<Routine>,
    /// A pointer into the actor's stack; null before its first step.
    yielder: Rc<Cell<*const Yielder<(), u64>>>,
    until: u64,
    /// The step in which the actor last ran.
    ran: u64,
}

/// Identifies an actor, also after its end: its place may have another actor by then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ActorId {
    index: usize,
    /// The number of actors before it.
    number: u64,
}

/// The result of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// This actor ran.
    Ran(ActorId),
    /// No actor is ready before this time; [`FOREVER`]: every actor waits for a wake-up.
    Idle(u64),
}

impl Machine {
    pub(crate) fn new(seed: u64, verbose: bool) -> Self {
        Machine(Rc::new(Inner {
            now_ns: Cell::new(0),
            random: Random::new(seed),
            actors: RefCell::default(),
            current: Cell::new(None),
            ready: RefCell::default(),
            spawned: Cell::new(0),
            steps: Cell::new(0),
            trace: Cell::new(seed),
            verbose,
        }))
    }

    /// Virtual time, nanoseconds.
    pub(crate) fn now_ns(&self) -> u64 {
        self.0.now_ns.get()
    }

    pub(crate) fn advance_to(&self, ns: u64) {
        self.0.now_ns.set(self.now_ns().max(ns));
    }

    pub(crate) fn random(&self) -> &Random {
        &self.0.random
    }

    /// Number of steps so far.
    pub(crate) fn steps(&self) -> u64 {
        self.0.steps.get()
    }

    /// A hash of everything that has happened so far.
    pub(crate) fn trace(&self) -> u64 {
        self.0.trace.get()
    }

    /// Adds `what` to the hash of [`trace`](Self::trace).
    pub(crate) fn note(&self, what: u64) {
        let mixed = (self.0.trace.get() ^ what).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0.trace.set(mixed ^ (mixed >> 29));
    }

    /// Prints what happens, in verbose runs.
    pub(crate) fn say(&self, what: impl FnOnce() -> String) {
        if self.0.verbose {
            println!("{:>12} ns, step {}: {}", self.now_ns(), self.steps(), what());
        }
    }

    /// Adds an actor, which is ready at once.
    pub(crate) fn spawn(&self, name: String, body: impl FnOnce() + 'static) -> ActorId {
        let yielder = Rc::new(Cell::new(std::ptr::null()));
        let place = yielder.clone();
        let stack = DefaultStack::new(STACK).expect("memory for a stack");
        let routine = Routine::with_stack(stack, move |of_actor, ()| {
            place.set(std::ptr::from_ref(of_actor));
            body();
        });
        let number = self.0.spawned.replace(self.0.spawned.get() + 1);
        let actor = Actor { name, number, routine: Some(routine), yielder, until: 0, ran: 0 };
        let mut actors = self.0.actors.borrow_mut();
        let free = actors.iter().position(Option::is_none);
        let index = free.unwrap_or(actors.len());
        match free {
            Some(index) => actors[index] = Some(actor),
            None => actors.push(Some(actor)),
        }
        ActorId { index, number }
    }

    /// Calls `body` with an actor, if it has not ended.
    fn with_actor<T>(&self, id: ActorId, body: impl FnOnce(&mut Option<Actor>) -> T) -> Option<T> {
        let mut actors = self.0.actors.borrow_mut();
        let place = actors.get_mut(id.index)?;
        place.as_ref().is_some_and(|actor| actor.number == id.number).then(|| body(place))
    }

    /// The step in which an actor last ran; 0 if it has not run or has ended.
    pub(crate) fn last_step(&self, id: ActorId) -> u64 {
        let ran = |actor: &mut Option<Actor>| actor.as_ref().map_or(0, |actor| actor.ran);
        self.with_actor(id, ran).unwrap_or(0)
    }

    /// Whether an actor has not ended.
    pub(crate) fn is_there(&self, id: ActorId) -> bool {
        self.with_actor(id, |_| ()).is_some()
    }

    /// Whether an actor waits for a wake-up only.
    pub(crate) fn is_asleep(&self, id: ActorId) -> bool {
        let waits =
            |actor: &mut Option<Actor>| actor.as_ref().is_some_and(|it| it.until == FOREVER);
        self.with_actor(id, waits).unwrap_or(false)
    }

    /// Whether an actor is ready, whatever the time.
    pub(crate) fn is_ready(&self, id: ActorId) -> bool {
        let is_ready = |actor: &mut Option<Actor>| actor.as_ref().is_some_and(|it| it.until == 0);
        self.with_actor(id, is_ready).unwrap_or(false)
    }

    /// Ends an actor wherever it is. Nothing on its stack is dropped, as with a killed process.
    pub(crate) fn kill(&self, id: ActorId) {
        let actor = self.with_actor(id, Option::take).flatten();
        if let Some(mut routine) = actor.and_then(|actor| actor.routine) {
            // SAFETY: nothing outside this stack refers to it any more: the other actors of the same daemon are
            // killed along with it, and guests never have references into a daemon.
            unsafe { routine.force_reset() };
        }
    }

    /// Wakes an actor.
    pub(crate) fn wake(&self, id: ActorId) {
        self.wake_at(id, 0);
    }

    /// Wakes an actor at `ns` at the latest.
    pub(crate) fn wake_at(&self, id: ActorId, ns: u64) {
        self.with_actor(id, |actor| {
            if let Some(actor) = actor {
                actor.until = actor.until.min(ns);
            }
        });
    }

    /// Suspends the calling actor until `ns`, or until it is woken.
    pub(crate) fn wait_until(&self, ns: u64) {
        let current = self.0.current.get().expect("only actors wait");
        let yielder = {
            let actors = self.0.actors.borrow();
            actors[current].as_ref().expect("it runs").yielder.get()
        };
        // SAFETY: the yielder is on the current stack, since its actor is the one that runs.
        elsewhere(|| unsafe { (*yielder).suspend(ns) });
    }

    /// Suspends the calling actor for `ns`, or until it is woken.
    pub(crate) fn sleep(&self, ns: u64) {
        self.wait_until(self.now_ns() + ns);
    }

    /// Lets other actors run before the caller, once in `n` times.
    pub(crate) fn preempt(&self, n: u64) {
        if self.0.current.get().is_some() && self.0.random.one_in(n) {
            self.wait_until(0);
        }
    }

    /// As [`preempt`](Self::preempt), but perhaps for a while, in which sleeping actors may wake: a guest can act between
    /// any two steps of a hand-shake only if it is not asleep throughout.
    fn stall(&self, n: u64) {
        if self.0.current.get().is_some() && self.0.random.one_in(n) {
            self.sleep(self.0.random.pick(&[0, 0, 1_000, 20_000]));
        }
    }

    /// Makes [`queue::pause`] points switch to other actors, once in `n` times.
    pub(crate) fn pause_in_queues(&self, n: u64) {
        PAUSING.set(Some((self.clone(), n)));
        queue::pause::on_pause(|| {
            let pausing = PAUSING.take();
            PAUSING.set(pausing.clone());
            if let Some((machine, n)) = pausing {
                machine.stall(n);
            }
        });
    }

    /// Runs one of the ready actors. Calls `before` with that actor.
    pub(crate) fn step(&self, before: impl FnOnce(ActorId)) -> Step {
        let now = self.now_ns();
        let (index, number, mut routine) = {
            let mut actors = self.0.actors.borrow_mut();
            let mut ready = self.0.ready.borrow_mut();
            ready.clear();
            let mut next = FOREVER;
            for (index, actor) in actors.iter().enumerate() {
                if let Some(actor) = actor {
                    if actor.until <= now {
                        ready.push(index);
                    }
                    next = next.min(actor.until);
                }
            }
            if ready.is_empty() {
                return Step::Idle(next);
            }
            let index = self.0.random.pick(&ready);
            let actor = actors[index].as_mut().expect("it was there");
            (index, actor.number, actor.routine.take().expect("it does not run"))
        };
        self.0.steps.set(self.steps() + 1);
        self.note(now ^ (index as u64) << 56);
        before(ActorId { index, number });
        self.0.current.set(Some(index));
        let result = routine.resume(());
        self.0.current.set(None);
        let mut actors = self.0.actors.borrow_mut();
        match (result, &mut actors[index]) {
            (CoroutineResult::Yield(until), Some(actor)) => {
                actor.until = until;
                actor.ran = self.steps();
                actor.routine = Some(routine);
            }
            (CoroutineResult::Return(()), _) => {
                let ended = actors[index].take();
                drop(actors);
                drop(ended);
            }
            (CoroutineResult::Yield(_), None) => unreachable!("an actor does not kill itself"),
        }
        Step::Ran(ActorId { index, number })
    }

    /// Describes all actors and what they wait for, for a report.
    pub(crate) fn actors(&self) -> String {
        let actors = self.0.actors.borrow();
        let of = |actor: &Actor| match actor.until {
            FOREVER => format!("  {} waits to be woken", actor.name),
            until => format!("  {} waits until {until} ns", actor.name),
        };
        actors.iter().flatten().map(of).collect::<Vec<_>>().join("\n")
    }
}
