//! A queue at work: when it is looked at, when the driver is told, how it is stopped. What is done
//! with a chain is the device's [`Service`].

use std::cell::{Cell, RefCell, RefMut};
use std::ffi::CStr;
use std::fmt;
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use block::policy::GIVEN_UP;
use event_loop::{DeferredCall, EventLoop, Handler, HandlerId, Progress, Signal, Trigger, trace};
use guest_memory::{AccessError, MemoryView};
use nix::errno::Errno;
use queue::{Chain, Queue, QueueError, SegmentsError};

use super::{Held, InFlight, Virtqueue};

/// Bytes that the requests taken in one turn move, but for the last of them. What the kernel copies from
/// the page cache is copied within the loop's iteration, and all else on the thread waits for that.
/// A ring of 256 requests of 4 KiB fits, with their headers and statuses.
const TURN_BYTES: u32 = 256 * ((4 << 10) + 32);
/// What a buffer counts for at least, however short: each is a descriptor to be read, checked and
/// translated. The header, the status and 4 KiB of data count for no more than their bytes.
const SEGMENT_BYTES: u32 = 1 << 10;
/// What a request of the block layer counts for that no bytes of its chain stand for, as one of the many
/// ranges that a chain may name: as much as a request of 4 KiB.
pub(crate) const RANGE_BYTES: u32 = 4 << 10;

/// What a device does on one of its queues.
pub(crate) trait Service: Sized + 'static {
    /// What the queue is called in the log.
    const NAME: &'static str;

    /// The device's name in trace points.
    fn trace_name(&self) -> &CStr;

    /// Takes a chain. It goes back by [`Runner::add_used`], now or later. Returns what it counts for in
    /// its turn, in bytes, beyond those of its buffers: see [`RANGE_BYTES`].
    ///
    /// # Errors
    ///
    /// The chain leaves no room for an answer, or is not memory. It goes back unanswered, and the
    /// queue breaks.
    fn take(runner: &Rc<Runner<Self>>, chain: RefMut<'_, Chain>) -> Result<u32, Broken>;

    /// Whether chains are taken as soon as they are there. A queue that gives chains back only when
    /// the device has something to say leaves them in the ring until then.
    fn wants_chains(&self) -> bool {
        true
    }

    /// The end of a turn that took so many chains.
    fn took(&self, _chains: u16) {}

    /// The requests in flight, for those that look for one that takes long.
    fn in_flight(&self) -> Vec<InFlight> {
        Vec::new()
    }

    /// The queue stops: requests that are held back for the sake of a limit are to go on. See
    /// [`Channel::drain_begin`](block::node::Channel::drain_begin).
    fn drain_begin(&self) {}

    /// The queue has stopped.
    fn drain_end(&self) {}

    /// The end of a section: a batch was shown to the driver, who was signalled or not, or (`None`)
    /// there was nothing to show.
    fn batch_ended(_runner: &Runner<Self>, _signalled: Option<bool>) {}
}

/// A started queue. Lives on its I/O thread.
///
/// It takes requests when the guest kicks, or when the loop, polling, sees new ones, and answers
/// them in any order. A guest that breaks the rules of the queue breaks this queue only.
pub(crate) struct Runner<S> {
    pub(crate) event_loop: EventLoop,
    pub(crate) queue: Queue,
    pub(crate) service: S,
    me: Weak<Runner<S>>,
    /// The chain being taken apart, kept for its capacity.
    chain: RefCell<Chain>,
    /// The way out for signals; without one the driver polls.
    call: RefCell<Option<Signal>>,
    /// Where a broken queue is reported.
    err: RefCell<Option<Signal>>,
    kick: Cell<Option<HandlerId>>,
    enabled: Cell<bool>,
    /// The loop polls: the driver need not kick.
    polled: Cell<bool>,
    /// The driver is to be asked for a kick.
    wants_kick: Cell<bool>,
    /// [`guest_memory::losses`] when the queue was last found to have all its memory.
    losses: Cell<usize>,
    /// Chains were given back that the driver does not see yet.
    unpublished: Cell<bool>,
    /// The answer to `stop`, once nothing is in flight.
    stopping: Cell<Option<StopCall>>,
    stopped: Cell<bool>,
    /// What a stop does with requests that are held.
    held: Cell<Held>,
    /// Chains were left to whoever serves the queue next.
    has_left: Cell<bool>,
    queued: Cell<bool>,
}

/// Gets the next available index (GET_VRING_BASE).
type StopCall = Box<dyn FnOnce(u16)>;

impl<S: Service> Runner<S> {
    /// Starts a queue on this loop, disabled: it takes nothing before it is
    /// [enabled](Virtqueue::set_enabled).
    ///
    /// `kick` fires when the driver has put requests in; without one the queue is looked at only
    /// while the loop polls, or turns for other reasons.
    pub(crate) fn start(
        event_loop: &EventLoop,
        queue: Queue,
        kick: Option<Arc<OwnedFd>>,
        call: Option<Signal>,
        service: S,
    ) -> Rc<Self> {
        let runner = Rc::new_cyclic(|me| Runner {
            event_loop: event_loop.clone(),
            queue,
            service,
            me: me.clone(),
            chain: RefCell::new(Chain::new()),
            call: RefCell::new(call),
            err: RefCell::new(None),
            kick: Cell::new(None),
            enabled: Cell::new(false),
            polled: Cell::new(false),
            wants_kick: Cell::new(false),
            // The first turn looks, whatever was lost before.
            losses: Cell::new(guest_memory::losses().wrapping_sub(1)),
            unpublished: Cell::new(false),
            stopping: Cell::new(None),
            stopped: Cell::new(false),
            held: Cell::new(Held::Left),
            has_left: Cell::new(false),
            queued: Cell::new(false),
        });
        if let Some(kick) = kick {
            let events = nix::poll::PollFlags::POLLIN.bits().cast_unsigned();
            let id = event_loop.add_handler(kick, events.into(), Trigger::Edge, runner.clone());
            runner.kick.set(Some(id));
        }
        runner
    }

    /// Itself, for those that it gives a way back to.
    pub(crate) fn me(&self) -> Option<Rc<Self>> {
        self.me.upgrade()
    }

    /// Takes requests until there are none: a bounded number, that do a bounded amount, for the sake of other
    /// sources (contract E11). The rest is taken in the next iteration.
    pub(crate) fn take_turn(&self) {
        // A broken queue was reported when it broke, not with each kick from then on.
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
            // What comes in meanwhile is taken too: it costs less now than with a submission, and a
            // kick, of its own.
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
        // The turn is over: unless the loop looks by itself, the driver has to kick. It is told at
        // the end of the section, after the signal: what it puts in until then, woken or not, is
        // found without a kick.
        if !self.polled.get() {
            self.wants_kick.set(true);
            self.finish_later();
        }
    }

    /// Somebody's front end has taken away memory. If it is this queue's, the queue breaks.
    #[cold]
    fn has_lost_memory(&self) -> bool {
        // First, so that what is lost meanwhile is found the next time.
        self.losses.set(guest_memory::losses());
        let Some(what) = self.queue.memory().lost() else { return false };
        self.break_queue(&what);
        true
    }

    /// Takes one request. Returns what it counts for, in bytes; `None`: there is none.
    fn take_one(self: &Rc<Self>) -> Result<Option<u32>, Broken> {
        let mut chain = self.chain.borrow_mut();
        if !self.queue.pop(&mut chain).map_err(Broken::Queue)? {
            return Ok(None);
        }
        let head = chain.head();
        let bytes = chain.total_len().max(chain.segments() * SEGMENT_BYTES);
        let beyond = S::take(self, chain).inspect_err(|_| self.add_used(head, 0))?;
        Ok(Some(bytes.saturating_add(beyond)))
    }

    /// Gives the chain `head` back, of which `written` bytes were written. The driver sees it at the
    /// end of the section.
    pub(crate) fn add_used(&self, head: u16, written: u32) {
        self.queue.add_used(head, written);
        self.unpublished.set(true);
        self.finish_later();
    }

    /// Whether a request that has failed in this way is for whoever serves the queue next: it was held
    /// and given up, or its loop ends without having begun it, as one does whose ring fails.
    #[cold]
    pub(crate) fn is_given_up(&self, errno: Errno) -> bool {
        errno == GIVEN_UP || errno == Errno::ECANCELED && self.event_loop.is_shut_down()
    }

    /// Leaves the chain `head` to whoever serves the queue next, who finds it in the record of what is
    /// in flight. `false`: there is no such record, or what is held is to [fail](Held::Failed).
    #[cold]
    pub(crate) fn leave(&self, head: u16) -> bool {
        let is_left = self.held.get() == Held::Left && self.queue.leave(head);
        if is_left {
            self.has_left.set(true);
            // A stop may wait for it.
            self.finish_later();
        }
        is_left
    }

    /// Whether chains are taken, now or later.
    pub(crate) fn is_taking(&self) -> bool {
        self.enabled.get() && !self.queue.is_broken()
    }

    /// Whether there is something that the driver does not see yet.
    pub(crate) fn is_unpublished(&self) -> bool {
        self.unpublished.get()
    }

    /// Has what ends a batch done once, at the end of the section (contract E10): the first who asks
    /// defers it, the others find it done.
    pub(crate) fn finish_later(&self) {
        if !self.queued.get()
            && let Some(me) = self.me.upgrade()
        {
            self.event_loop.defer(&(me as Rc<dyn DeferredCall>));
        }
    }

    /// The end of the section: tells the driver to kick, and looks once more.
    fn enable_kicks(&self) {
        if self.wants_kick.replace(false)
            && self.enabled.get()
            && !self.polled.get()
            && self.queue.enable_kicks()
            && self.service.wants_chains()
            && let Some(kick) = self.kick.get()
        {
            self.event_loop.call_again(kick);
        }
    }

    /// Ends a stop once everything is answered and published.
    fn finish_stop(&self) {
        if self.queue.in_flight() == 0
            && !self.unpublished.get()
            && let Some(done) = self.stopping.take()
        {
            self.stopped.set(true);
            if let Some(kick) = self.kick.take() {
                self.event_loop.remove_handler(kick);
            }
            self.service.drain_end();
            done(self.queue.next_avail());
        }
    }

    /// The driver broke the rules: this queue takes no more, and says so once.
    pub(crate) fn break_queue(&self, reason: &dyn fmt::Display) {
        log::warn!("{} stops, its driver broke the rules: {reason}", S::NAME);
        self.queue.mark_broken();
        if let Some(err) = &*self.err.borrow() {
            err.send();
        }
        // Who waits for chains to be taken waits in vain.
        self.finish_later();
    }
}

impl<S: Service> Virtqueue for Runner<S> {
    fn set_enabled(&self, enabled: bool) {
        self.enabled.set(enabled);
        if enabled {
            self.event_loop.section(|| self.take_turn());
        } else {
            self.finish_later();
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
        if self.stopped.get() {
            return done(self.queue.next_avail());
        }
        self.held.set(held);
        let earlier = self.stopping.take();
        let is_first = earlier.is_none();
        self.stopping.set(Some(Box::new(move |base| {
            if let Some(earlier) = earlier {
                earlier(base);
            }
            done(base);
        })));
        self.enabled.set(false);
        if is_first {
            self.event_loop.section(|| self.service.drain_begin());
        }
        self.finish_later();
    }

    fn call_back(&self) -> bool {
        if self.stopped.get() || self.has_left.get() {
            return false;
        }
        if self.stopping.take().is_some() {
            self.service.drain_end();
        }
        true
    }
}

impl<S: Service> DeferredCall for Runner<S> {
    fn run(&self) {
        let mut signalled = None;
        if self.unpublished.replace(false) {
            let wanted = self.queue.publish();
            if wanted {
                trace!(virtio_notify(self.service.trace_name(), self.queue.config().index));
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

impl<S: Service> Handler for Runner<S> {
    fn ready(&self, events: u32) -> Progress {
        let (name, index) = (self.service.trace_name(), self.queue.config().index);
        trace!(virtio_queue_notify(name, index, events == 0));
        self.take_turn();
        Progress::Done
    }

    fn can_poll(&self) -> bool {
        true
    }

    fn poll(&self) -> bool {
        self.enabled.get() && self.service.wants_chains() && self.queue.has_work()
    }

    fn poll_begin(&self) {
        self.polled.set(true);
        self.queue.suppress_kicks();
    }

    fn poll_end(&self) {
        self.polled.set(false);
        // The loop asks `poll` next, so what raced is found.
        let _ = self.queue.enable_kicks();
    }
}

impl<S> fmt::Debug for Runner<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Runner")
            .field("queue", &self.queue)
            .field("enabled", &self.enabled)
            .field("in_flight", &self.queue.in_flight())
            .finish_non_exhaustive()
    }
}

/// Why a queue stops.
#[derive(Debug)]
pub(crate) enum Broken {
    /// Its rings or descriptors are wrong.
    Queue(QueueError),
    /// A request is too short in a part that is named here, or that part is not in memory.
    Part(&'static str, SegmentsError),
    /// A buffer is not in memory.
    Buffer(AccessError),
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Broken::Queue(error) => match std::error::Error::source(error) {
                Some(source) => write!(f, "{error}: {source}"),
                None => error.fmt(f),
            },
            Broken::Part(part, error) => write!(f, "{part}: {error}"),
            Broken::Buffer(error) => write!(f, "a request's buffer: {error}"),
        }
    }
}
