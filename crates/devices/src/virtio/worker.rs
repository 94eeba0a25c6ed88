//! A running queue: when it takes chains, when it notifies the driver, how it stops. The device's [`VirtioBackend`]
//! handles the chains.

use std::cell::{Cell, RefCell, RefMut};
use std::ffi::CStr;
use std::fmt;
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use event_loop::{DeferredCall, EventLoop, Handler, HandlerId, Progress, Signal, Trigger};
use guest_memory::{AccessError, MemoryView};
use nix::errno::Errno;
use queue::{Chain, Queue, QueueError, SegmentsError};

use super::probes;
use super::{Held, InFlight, Report, Virtqueue};
use trace::trace;

/// Maximum bytes moved by the requests of one turn; the last request may exceed it. The kernel copies page cache
/// data within the loop's iteration, and all other sources of the thread wait meanwhile. A ring of 256 requests
/// of 4 KiB fits, with headers and statuses.
const TURN_BYTES: u32 = 256 * ((4 << 10) + 32);
/// Minimum cost of a buffer in a turn, bytes, as each descriptor has to be read, checked and translated. Header,
/// status and 4 KiB of data cost no more than their length.
const SEGMENT_BYTES: u32 = 1 << 10;
/// Cost of a block request without data in the chain, bytes, such as each range of a discard: that of a request
/// of 4 KiB.
pub(crate) const RANGE_BYTES: u32 = 4 << 10;

/// What a device does with the chains of a queue.
pub(crate) trait VirtioBackend: Sized + 'static {
    /// The queue's name in the log.
    const NAME: &'static str;

    /// The device's name in trace points.
    fn trace_name(&self) -> &CStr;

    /// Takes a chain, which [`VirtQueueWorker::add_used`] gives back now or later. Returns the chain's cost in its turn, in
    /// bytes, beyond that of its buffers: see [`RANGE_BYTES`].
    ///
    /// # Errors
    ///
    /// The chain has no room for an answer, or is not in memory. The chain is given back unanswered, and the queue
    /// breaks.
    fn process(worker: &Rc<VirtQueueWorker<Self>>, chain: RefMut<'_, Chain>)
    -> Result<u32, Broken>;

    /// Whether chains are taken as soon as they are available. The event queue leaves them in the ring until an
    /// event occurs.
    fn wants_chains(&self) -> bool {
        true
    }

    /// Called at the end of a turn, with the number of chains taken.
    fn took(&self, _chains: u16) {}

    /// The requests in flight, for the search of slow requests.
    fn in_flight(&self) -> Vec<InFlight> {
        Vec::new()
    }

    /// Called when the queue stops: requests delayed by a limit must proceed. See
    /// [`Channel::drain_begin`](block::node::Channel::drain_begin).
    fn drain_begin(&self) {}

    /// Called when the queue has stopped.
    fn drain_end(&self) {}

    /// Called at the end of a section. `signalled`: whether the driver was signalled about the published batch;
    /// `None` without a batch.
    fn batch_ended(_runner: &VirtQueueWorker<Self>, _signalled: Option<bool>) {}
}

/// The life of a queue. It begins disabled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Takes no chains.
    Disabled,
    Enabled,
    /// Takes no chains, and ends once none is in flight.
    Stopping(Held),
    Stopped,
}

/// A running queue. Lives on its I/O thread.
///
/// It takes requests after a kick, or when the polling loop sees new ones, and answers them in any order. A guest
/// that breaks the queue's rules breaks only this queue.
pub(crate) struct VirtQueueWorker<S> {
    pub(crate) event_loop: EventLoop,
    pub(crate) queue: Queue,
    pub(crate) service: S,
    me: Weak<VirtQueueWorker<S>>,
    /// The current chain, kept for its capacity.
    chain: RefCell<Chain>,
    /// The call eventfd; `None` if the driver polls.
    call: RefCell<Option<Signal>>,
    /// The eventfd that reports a broken queue.
    err: RefCell<Option<Signal>>,
    /// Receives texts for the log; without it they are dropped.
    report: RefCell<Option<Report>>,
    kick: Cell<Option<HandlerId>>,
    phase: Cell<Phase>,
    /// The loop polls, so the driver need not kick.
    polled: Cell<bool>,
    /// Kicks have to be enabled at the end of the section.
    wants_kick: Cell<bool>,
    /// [`guest_memory::losses`] when all of the queue's memory was last found present.
    losses: Cell<usize>,
    /// Answered chains are not published yet.
    unpublished: Cell<bool>,
    /// The callback of `stop`, while the queue is stopping.
    on_stop: Cell<Option<StopCall>>,
    /// Chains were left to the next process that serves the queue.
    has_left: Cell<bool>,
    queued: Cell<bool>,
}

/// Receives the next available index (GET_VRING_BASE).
type StopCall = Box<dyn FnOnce(u16)>;

impl<S: VirtioBackend> VirtQueueWorker<S> {
    /// Starts a queue on this loop, disabled: it takes no chain before it is [enabled](Virtqueue::set_enabled).
    ///
    /// `kick` becomes readable when the driver has added requests. Without it, the queue is checked only while the
    /// loop polls, or runs for other reasons.
    pub(crate) fn start(
        event_loop: &EventLoop,
        queue: Queue,
        kick: Option<Arc<OwnedFd>>,
        call: Option<Signal>,
        service: S,
    ) -> Rc<Self> {
        let worker = Rc::new_cyclic(|me| VirtQueueWorker {
            event_loop: event_loop.clone(),
            queue,
            service,
            me: me.clone(),
            chain: RefCell::new(Chain::new()),
            call: RefCell::new(call),
            err: RefCell::new(None),
            report: RefCell::new(None),
            kick: Cell::new(None),
            phase: Cell::new(Phase::Disabled),
            polled: Cell::new(false),
            wants_kick: Cell::new(false),
            // Makes the first turn check for losses of memory.
            losses: Cell::new(guest_memory::losses().wrapping_sub(1)),
            unpublished: Cell::new(false),
            on_stop: Cell::new(None),
            has_left: Cell::new(false),
            queued: Cell::new(false),
        });
        if let Some(kick) = kick {
            let events = nix::poll::PollFlags::POLLIN.bits().cast_unsigned();
            let id = event_loop.add_handler(kick, events.into(), Trigger::Edge, worker.clone());
            worker.kick.set(Some(id));
        }
        worker
    }

    /// A counted reference to the worker, for its completions.
    pub(crate) fn me(&self) -> Option<Rc<Self>> {
        self.me.upgrade()
    }

    /// Takes all available requests, up to a bounded number and cost, as other sources wait (fairness contract).
    /// The rest is taken in the next iteration.
    pub(crate) fn process_batch(&self) {
        // A broken queue was reported when it broke.
        if !self.is_taking() {
            return;
        }
        let Some(me) = self.me.upgrade() else { return };
        if self.losses.get() != guest_memory::losses() && self.has_lost_memory() {
            return;
        }
        if !self.polled.get() {
            self.queue.suppress_kicks();
        }
        let (mut taken, mut bytes) = (0, 0u32);
        while taken < self.queue.size() && bytes < TURN_BYTES {
            if !self.service.wants_chains() {
                break;
            }
            // Also take chains that arrive meanwhile: that saves a kick and a submission.
            match me.take_one() {
                Ok(Some(counts)) => {
                    taken += 1;
                    bytes = bytes.saturating_add(counts);
                }
                Ok(None) => break,
                Err(reason) => {
                    self.break_queue(&reason);
                    break;
                }
            }
        }
        self.service.took(taken);
        if self.queue.is_broken() {
            return;
        }
        // Unless the loop polls, enable kicks at the end of the section, after the signal. Chains that the
        // driver adds until then are found without a kick.
        if !self.polled.get() {
            self.wants_kick.set(true);
            self.finish_later();
        }
    }

    /// Checks whether a front end has taken away memory of this queue, and breaks the queue if so.
    #[cold]
    fn has_lost_memory(&self) -> bool {
        // Stored before the check, so that a loss during the check is found next time.
        self.losses.set(guest_memory::losses());
        let Some(what) = self.queue.memory().lost() else { return false };
        self.break_queue(&what);
        true
    }

    /// Takes one request. Returns its cost in bytes, or `None` if none is available.
    fn take_one(self: &Rc<Self>) -> Result<Option<u32>, Broken> {
        let mut chain = self.chain.borrow_mut();
        if !self.queue.pop(&mut chain).map_err(Broken::Queue)? {
            return Ok(None);
        }
        let head = chain.head();
        let bytes = chain.total_len().max(chain.buffers() * SEGMENT_BYTES);
        let beyond = S::process(self, chain).inspect_err(|_| self.add_used(head, 0))?;
        Ok(Some(bytes.saturating_add(beyond)))
    }

    /// Answers the chain `head`, of which `written` bytes were written. The driver sees it at the end of the section.
    pub(crate) fn add_used(&self, head: u16, written: u32) {
        self.queue.add_used(head, written);
        self.unpublished.set(true);
        self.finish_later();
    }

    /// Whether a request with this error is left to the next process that serves the queue: its loop has ended
    /// without beginning the request, as after a failure of the ring.
    #[cold]
    pub(crate) fn is_not_begun(&self, errno: Errno) -> bool {
        errno == Errno::ECANCELED && self.event_loop.is_shut_down()
    }

    /// Leaves the chain `head` to the next process, which finds it in the record of requests in flight. Returns
    /// `false` without a record, or if held requests are to [fail](Held::Failed).
    #[cold]
    pub(crate) fn leave(&self, head: u16) -> bool {
        let is_left = self.phase.get() != Phase::Stopping(Held::Failed) && self.queue.leave(head);
        if is_left {
            self.has_left.set(true);
            // Completes a stop that waited for this chain.
            self.finish_later();
        }
        is_left
    }

    /// Whether the queue takes chains, now or later.
    pub(crate) fn is_taking(&self) -> bool {
        self.is_enabled() && !self.queue.is_broken()
    }

    fn is_enabled(&self) -> bool {
        self.phase.get() == Phase::Enabled
    }

    /// Whether answered chains are not published yet.
    pub(crate) fn is_unpublished(&self) -> bool {
        self.unpublished.get()
    }

    /// Defers the end of the batch to the end of the section (deferral contract). Only the first call per section
    /// has an effect.
    pub(crate) fn finish_later(&self) {
        if !self.queued.get()
            && let Some(me) = self.me.upgrade()
        {
            self.event_loop.defer(&(me as Rc<dyn DeferredCall>));
        }
    }

    /// At the end of a section: enables kicks, and checks the queue once more.
    fn enable_kicks(&self) {
        if self.wants_kick.replace(false)
            && self.is_enabled()
            && !self.polled.get()
            && self.queue.enable_kicks()
            && self.service.wants_chains()
            && let Some(kick) = self.kick.get()
        {
            self.event_loop.call_again(kick);
        }
    }

    /// Ends a stop once all chains are answered and published.
    fn finish_stop(&self) {
        if self.queue.in_flight() == 0
            && !self.unpublished.get()
            && let Some(done) = self.on_stop.take()
        {
            self.phase.set(Phase::Stopped);
            if let Some(kick) = self.kick.take() {
                self.event_loop.remove_handler(kick);
            }
            self.service.drain_end();
            done(self.queue.next_avail());
        }
    }

    /// Breaks the queue, as its driver has broken the rules: the queue takes no more chains. Reported once.
    pub(crate) fn break_queue(&self, reason: &dyn fmt::Display) {
        if let Some(report) = &*self.report.borrow() {
            let index = self.queue.config().index;
            report(format!("{} {index} stops, its driver broke the rules: {reason}", S::NAME));
        }
        self.queue.mark_broken();
        if let Some(err) = &*self.err.borrow() {
            err.send();
        }
        // Ends waits for chains that will not be taken.
        self.finish_later();
    }
}

impl<S: VirtioBackend> Virtqueue for VirtQueueWorker<S> {
    fn set_enabled(&self, enabled: bool) {
        match (self.phase.get(), enabled) {
            (Phase::Disabled | Phase::Enabled, true) => {
                self.phase.set(Phase::Enabled);
                self.event_loop.section(|| self.process_batch());
            }
            (Phase::Disabled | Phase::Enabled, false) => self.phase.set(Phase::Disabled),
            // Until it is called back.
            (Phase::Stopping(_) | Phase::Stopped, _) => {}
        }
    }

    fn set_call(&self, call: Option<Signal>) {
        if let Some(call) = &call {
            call.send();
        }
        *self.call.borrow_mut() = call;
    }

    fn set_err(&self, err: Option<Signal>) {
        *self.err.borrow_mut() = err;
    }

    fn set_report(&self, report: Report) {
        *self.report.borrow_mut() = Some(report.clone());
        let index = self.queue.config().index;
        self.queue.on_quirk(Rc::new(move |quirk| {
            report(format!("the driver of {} {index} {quirk}; served all the same", S::NAME));
        }));
    }

    fn replace_memory(&self, memory: Rc<MemoryView>) -> Result<(), QueueError> {
        self.queue.replace_memory(memory).inspect_err(|_| self.finish_later())
    }

    fn set_used_log(&self, addr: Option<u64>) {
        self.queue.set_used_log(addr);
    }

    fn in_flight(&self) -> Vec<InFlight> {
        self.service.in_flight()
    }

    fn stop(&self, held: Held, done: Box<dyn FnOnce(u16)>) {
        if self.phase.get() == Phase::Stopped {
            return done(self.queue.next_avail());
        }
        self.phase.set(Phase::Stopping(held));
        let earlier = self.on_stop.take();
        let is_first = earlier.is_none();
        self.on_stop.set(Some(Box::new(move |base| {
            if let Some(earlier) = earlier {
                earlier(base);
            }
            done(base);
        })));
        if is_first {
            self.event_loop.section(|| self.service.drain_begin());
        }
        self.finish_later();
    }

    fn call_back(&self) -> bool {
        if self.phase.get() == Phase::Stopped || self.has_left.get() {
            return false;
        }
        if self.on_stop.take().is_some() {
            self.phase.set(Phase::Disabled);
            self.service.drain_end();
        }
        true
    }
}

impl<S: VirtioBackend> DeferredCall for VirtQueueWorker<S> {
    fn run(&self) {
        let mut signalled = None;
        if self.unpublished.replace(false) {
            let wanted = self.queue.publish();
            if wanted {
                trace!(probes::virtio_notify(self.service.trace_name(), self.queue.config().index));
                if let Some(call) = &*self.call.borrow() {
                    call.send();
                }
            }
            signalled = Some(wanted);
        }
        S::batch_ended(self, signalled);
        self.enable_kicks();
        self.queue.tell_of_marks();
        self.finish_stop();
    }

    fn queued(&self) -> &Cell<bool> {
        &self.queued
    }
}

impl<S: VirtioBackend> Handler for VirtQueueWorker<S> {
    fn ready(&self, events: u32) -> Progress {
        let (name, index) = (self.service.trace_name(), self.queue.config().index);
        trace!(probes::virtio_queue_notify(name, index, events == 0));
        self.process_batch();
        Progress::Done
    }

    fn can_poll(&self) -> bool {
        true
    }

    fn poll(&self) -> bool {
        self.is_enabled() && self.service.wants_chains() && self.queue.has_work()
    }

    fn poll_begin(&self) {
        self.polled.set(true);
        self.queue.suppress_kicks();
    }

    fn poll_end(&self) {
        self.polled.set(false);
        // The loop calls `poll` next, which finds a chain added meanwhile.
        let _ = self.queue.enable_kicks();
    }
}

impl<S> fmt::Debug for VirtQueueWorker<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VirtQueueWorker")
            .field("queue", &self.queue)
            .field("phase", &self.phase)
            .field("in_flight", &self.queue.in_flight())
            .finish_non_exhaustive()
    }
}

/// Why a queue breaks.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    /// Its rings or descriptors are wrong.
    #[error("{}", .0.in_full())]
    Queue(QueueError),
    /// The named part of a request is too short, or not in memory.
    #[error("{0}: {1}")]
    Part(&'static str, SegmentsError),
    /// A buffer is not in memory.
    #[error("a request's buffer: {0}")]
    Buffer(AccessError),
}
