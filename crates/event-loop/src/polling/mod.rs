//! Busy polling before sleep: the polling set, and the [policy] applied to it.

pub mod measured;
pub mod policy;
pub mod price;
pub mod stepped;
pub mod weighted;

use std::cell::{Cell, RefCell};
use std::cmp::Ordering;
use std::io;
use std::rc::Rc;

use nix::sys::prctl::get_timerslack;

use crate::event_loop::EventLoop;
use crate::handlers::{Entry, Source};
use crate::polling::policy::{Policy, PollParams, PollPolicy, SourceKind};
use crate::polling::price::{Gauge, Meter};
use crate::probes;
use crate::ring::{self, Ready};
use crate::slots::SlotId;
use trace::trace;

/// A source that has had no event for this long leaves the polling set.
const IDLE_NS: u64 = 7_000_000_000;

/// A polling set with more sources is crowded: a check of hundreds takes longer than a sleep, and one busy
/// disk would pay for the idle ones.
const CROWD: usize = 16;

/// [`IDLE_NS`] in a crowded set. A source that comes back costs one wake-up by its descriptor, at most a
/// hundred times per second.
const IDLE_IN_CROWD_NS: u64 = 10_000_000;

/// A loop's polling state.
pub(crate) struct Poller {
    params: Cell<PollParams>,
    policy: RefCell<Policy>,
    /// Measures the cost of a sleep.
    meter: Meter,
    /// Completed operations at the last update of the policy.
    completed: Cell<u64>,
    /// When the wait for the next events began. Kept over iterations without events.
    wait_began: Cell<Option<u64>>,
    /// Polling mode: `poll_begin` was called for the sources in the set.
    polling: Cell<bool>,
    /// The last poll found nothing: sleep next.
    gave_up: Cell<bool>,
    /// The completion ring and the inbox, as sources.
    pub(crate) ring: Source,
    pub(crate) inbox: Source,
    /// On epoll, sources stay in the set: outside of it, polled ones would starve them.
    keep_sources: bool,
    /// The loop uses the machine's clock.
    can_measure: bool,
}

impl Poller {
    pub(crate) fn new(params: PollParams, keep_sources: bool, can_measure: bool) -> Self {
        Poller {
            params: Cell::new(params),
            policy: RefCell::default(),
            meter: Meter::default(),
            completed: Cell::default(),
            wait_began: Cell::new(None),
            polling: Cell::new(false),
            gave_up: Cell::new(false),
            ring: Source::default(),
            inbox: Source::default(),
            keep_sources,
            can_measure,
        }
    }

    /// Sets the parameters. Returns the new window, nanoseconds.
    pub(crate) fn set_params(&self, params: PollParams) -> u64 {
        let before = self.params.replace(params);
        if params.max_ns == 0 {
            self.wait_began.set(None);
        }
        let mut policy = self.policy.borrow_mut();
        policy.change(&before, &params);
        policy.window_ns()
    }

    pub(crate) fn is_polling(&self) -> bool {
        self.polling.get()
    }

    /// Whether this iteration's events update the policy.
    pub(crate) fn has_begun(&self) -> bool {
        self.wait_began.get().is_some()
    }

    fn is_on(&self) -> bool {
        self.params.get().max_ns > 0
    }

    /// Whether sleeps are measured.
    fn measures(&self) -> bool {
        let params = self.params.get();
        self.can_measure && params.max_ns > 0 && params.policy == PollPolicy::Measured
    }

    /// Whether to poll next rather than sleep.
    pub(crate) fn wants_to_poll(&self) -> bool {
        self.is_on() && self.policy.borrow().window_ns() > 0 && !self.gave_up.get()
    }
}

impl EventLoop {
    /// Begins the wait for the next events.
    pub(crate) fn poll_wait_begins(&self) {
        let poller = &self.0.poller;
        if poller.is_on() && poller.wait_began.get().is_none() {
            poller.wait_began.set(Some(self.fresh_now_ns()));
        }
    }

    /// Busy-polls for the window, at most until `deadline`. Returns `true` if an event was found. The event is
    /// in the ready list, the ring or the inbox.
    pub(crate) fn poll_for_window(&self, deadline: Option<u64>) -> bool {
        let poller = &self.0.poller;
        let sources = self.polled_entries();
        if !poller.polling.replace(true) {
            let in_set = |(_, entry): &&(_, Rc<Entry>)| entry.source.in_set.get();
            sources.iter().filter(in_set).for_each(|(_, entry)| entry.handler.poll_begin());
        }
        let timeout = |now| deadline.map_or(-1, |deadline| deadline.saturating_sub(now) as i64);
        let window = poller.policy.borrow().window_ns();
        trace!(probes::run_poll_handlers_begin(self.trace_ctx(), window, timeout(self.now_ns())));
        let begin = self.now_ns();
        let end = begin.saturating_add(window);
        let end = deadline.map_or(end, |deadline| end.min(deadline));
        let found = loop {
            let mut found = self.ask(&sources);
            // The check itself may make handlers ready.
            found |= !self.0.handlers.borrow().ready.is_empty();
            found |= self.0.tasks.has_ready();
            found |= self.0.ring.borrow_mut().ready() != Ready::Nothing;
            found |= self.0.shared.inbox.has_messages();
            if found {
                break true;
            }
            let now = self.fresh_now_ns();
            if now >= end {
                // A due timer ends the poll as well.
                break deadline.is_some_and(|deadline| now >= deadline);
            }
            std::hint::spin_loop();
        };
        trace!(probes::run_poll_handlers_end(self.trace_ctx(), found, timeout(self.now_ns())));
        self.recycle(sources);
        let stats = self.stats();
        stats.polled_ns.add(self.now_ns().saturating_sub(begin));
        if found {
            stats.poll_hits.add(1);
        } else {
            stats.poll_misses.add(1);
            poller.gave_up.set(true);
        }
        found
    }

    /// In polling mode, checks each source once. Returns `true` if an event was found.
    pub(crate) fn poll_once(&self) -> bool {
        if !self.0.poller.polling.get() {
            return false;
        }
        let sources = self.polled_entries();
        let found = self.ask(&sources);
        self.recycle(sources);
        found
    }

    /// Sleeps, and sometimes measures the cost.
    pub(crate) fn enter_asleep(&self, wait: ring::Wait) -> io::Result<()> {
        let poller = &self.0.poller;
        if !poller.measures() {
            return self.enter(wait);
        }
        let for_ns = match wait {
            ring::Wait::No => Some(0),
            ring::Wait::For(ns) => Some(ns),
            ring::Wait::Forever => None,
        };
        let submits = self.0.ring.borrow_mut().queued() > 0;
        match poller.meter.next_sleep(submits, for_ns) {
            Gauge::None => return self.enter(wait),
            Gauge::Lateness(ns) => {
                let end = self.fresh_now_ns() + ns;
                self.enter(ring::Wait::For(ns))?;
                let late = self.fresh_now_ns().checked_sub(end);
                let nothing = self.0.ring.borrow_mut().ready() == Ready::Nothing;
                if let Some(late) = late.filter(|_| nothing) {
                    // The kernel may delay a timeout by this long.
                    let slack = get_timerslack().map_or(0, |ns| u64::try_from(ns).unwrap_or(0));
                    poller.meter.was_late(late.saturating_sub(slack));
                }
            }
            Gauge::Cpu => {
                let before = self.0.clock.cpu_ns();
                self.enter(wait)?;
                if let (Some(before), Some(after)) = (before, self.0.clock.cpu_ns()) {
                    poller.meter.took_cpu(after.saturating_sub(before));
                }
            }
        }
        self.show_price();
        Ok(())
    }

    /// Measures from time to time how many threads compete for this CPU.
    fn measure_share(&self) {
        let poller = &self.0.poller;
        let is_due = poller.measures() && poller.meter.is_share_due();
        if let Some(share) = is_due.then(|| self.0.clock.cpu_share()).flatten() {
            poller.meter.shared(share);
        }
    }

    fn show_price(&self) {
        let price = self.0.poller.meter.price();
        self.stats().sleep_late_ns.set(price.late_ns);
        self.stats().sleep_cpu_ns.set(price.cpu_ns);
    }

    /// Leaves polling mode before a sleep: informs each source and checks it once more. Returns `true` if an
    /// event raced, in which case the loop must not sleep.
    pub(crate) fn poll_end(&self) -> bool {
        if !self.0.poller.polling.replace(false) {
            return false;
        }
        let sources = self.polled_entries();
        let in_set = |(_, entry): &&(_, Rc<Entry>)| entry.source.in_set.get();
        sources.iter().filter(in_set).for_each(|(_, entry)| entry.handler.poll_end());
        let raced = self.ask(&sources);
        self.recycle(sources);
        raced
    }

    /// Checks each source, and lists those with an event as ready.
    fn ask(&self, sources: &[(SlotId, Rc<Entry>)]) -> bool {
        let mut found = false;
        for (id, entry) in sources {
            // A callback of another source may have removed this one (removal contract).
            if entry.source.in_set.get() && entry.handler.poll() {
                self.0.handlers.borrow_mut().list_ready(*id);
                found = true;
            }
        }
        found
    }

    /// A copy of the polling set, which callbacks may change.
    fn polled_entries(&self) -> Vec<(SlotId, Rc<Entry>)> {
        let mut list = self.0.polled.take();
        let handlers = self.0.handlers.borrow();
        list.extend(
            handlers.polling.iter().filter_map(|id| Some((*id, handlers.get(*id)?.clone()))),
        );
        list
    }

    fn recycle(&self, mut list: Vec<(SlotId, Rc<Entry>)>) {
        list.clear();
        self.0.polled.replace(list);
    }

    /// Notes that a source had an event.
    pub(crate) fn poll_note(&self, source: &Source) {
        source.had_event.set(self.0.poller.is_on());
    }

    /// Notes that a handler had an event, and adds it to the polling set if it can be polled. Returns `false`
    /// if its callbacks have removed it.
    pub(crate) fn poll_join(&self, id: SlotId, entry: &Entry) -> bool {
        self.poll_note(&entry.source);
        let poller = &self.0.poller;
        if !poller.is_on() || entry.source.in_set.get() || !entry.handler.can_poll() {
            return true;
        }
        trace!(probes::poll_add(
            self.trace_ctx(),
            entry.trace_node(),
            entry.raw_fd(),
            entry.fired.get(),
        ));
        entry.source.in_set.set(true);
        let mut handlers = self.0.handlers.borrow_mut();
        handlers.polling.push(id);
        // Reserve now, as the list must not allocate when polling begins.
        self.0.polled.borrow_mut().reserve(handlers.polling.len());
        drop(handlers);
        if poller.polling.get() {
            entry.handler.poll_begin();
        }
        entry.source.in_set.get()
    }

    /// Ends an iteration that began with `poll_wait_begins` and adapts the window. Iterations without events
    /// extend the wait.
    pub(crate) fn poll_adapt(&self, events_at: u64, had_events: bool) {
        let poller = &self.0.poller;
        let Some(began) = poller.wait_began.get() else { return };
        if !had_events {
            return;
        }
        poller.wait_began.set(None);
        poller.gave_up.set(false);
        let params = poller.params.get();
        let interval = events_at.saturating_sub(began);
        self.measure_share();
        let mut policy = poller.policy.borrow_mut();
        policy.begin(interval);
        let is_crowd = self.0.handlers.borrow().polling.len() > CROWD;
        let idle_ns = if is_crowd { IDLE_IN_CROWD_NS } else { IDLE_NS };
        let mut account = |source: &Source, kind| {
            let had_event = source.had_event.replace(false);
            let mut state = source.state.get();
            policy.account(&params, &mut state, kind, had_event);
            source.state.set(state);
            if had_event {
                source.last_event_ns.set(events_at);
            }
            events_at.saturating_sub(source.last_event_ns.get()) >= idle_ns
        };
        account(&poller.ring, SourceKind::Ring);
        account(&poller.inbox, SourceKind::Inbox);
        let mut handlers = self.0.handlers.borrow_mut();
        let mut left = Vec::new();
        let mut set = std::mem::take(&mut handlers.polling);
        set.retain(|id| {
            let Some(entry) = handlers.get(*id) else { return false };
            let idle = account(&entry.source, SourceKind::Handler) && !poller.keep_sources;
            if idle {
                trace!(probes::poll_remove(self.trace_ctx(), entry.trace_node(), entry.raw_fd()));
                entry.source.in_set.set(false);
                left.push((*id, entry.clone()));
            }
            !idle
        });
        handlers.polling = set;
        drop(handlers);
        let in_flight = self.0.slots.borrow().in_flight();
        let old = policy.window_ns();
        let completed = self.stats().completed.get();
        let answered = completed.wrapping_sub(poller.completed.replace(completed));
        policy.end(&params, poller.meter.price(), in_flight, answered);
        let new = policy.window_ns();
        match new.cmp(&old) {
            Ordering::Greater => trace!(probes::poll_grow(self.trace_ctx(), old, new)),
            Ordering::Less => trace!(probes::poll_shrink(self.trace_ctx(), old, new)),
            Ordering::Equal => {}
        }
        self.stats().poll_window_ns.set(new);
        drop(policy);
        if poller.polling.get() {
            // Sources that leave are signalled by their descriptor again. Check each once more for a raced
            // event. Without an event, do not call it: it would join the set again.
            for (id, entry) in left {
                // A callback of another source may have removed it (removal contract).
                let is_there = || self.0.handlers.borrow().get(id).is_some();
                if !is_there() {
                    continue;
                }
                entry.handler.poll_end();
                if is_there() && entry.handler.poll() {
                    self.0.handlers.borrow_mut().list_ready(id);
                }
            }
        }
    }
}
