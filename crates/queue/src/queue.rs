//! A split virtqueue: the two halves, the rings and the memory they work on.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use guest_memory::MemoryView;

use crate::avail::AvailHalf;
use crate::chain::Chain;
use crate::error::QueueError;
use crate::inflight::Inflight;
use crate::lookahead::Lookahead;
use crate::pause::pause;
use crate::ring::{Rings, used_ring_len};
use crate::used::UsedHalf;

/// How a queue is set up. The addresses are the front end's, as SET_VRING_ADDR gives them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueConfig {
    /// Entries: a power of two from 1 to 32768.
    pub size: u16,
    /// Address of the descriptor table, a multiple of 16.
    pub desc: u64,
    /// Address of the available ring, a multiple of 2.
    pub avail: u64,
    /// Address of the used ring, a multiple of 4.
    pub used: u64,
    /// VIRTIO_F_EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// VIRTIO_F_INDIRECT_DESC was negotiated.
    pub indirect: bool,
    /// The entry of the available ring to begin with (SET_VRING_BASE), where no record of what is in
    /// flight [knows better](Queue::with_inflight).
    pub next_avail: u16,
    /// Its number in the device, for trace points.
    pub index: u16,
}

/// A split virtqueue, the device's side. See the [crate's description](crate).
///
/// At no time are there more chains popped and not yet given back than the queue has entries:
/// [`pop`](Self::pop) refuses them. A device may so preallocate [`size`](Self::size) requests.
///
/// Processing, in a loop that sleeps until the driver kicks:
///
/// ```
/// # use queue::{Chain, Queue, QueueError};
/// # fn process(queue: &Queue, chain: &mut Chain) -> Result<(), QueueError> {
/// queue.suppress_kicks();
/// loop {
///     while queue.pop(chain)? { /* ... */ }
///     if !queue.enable_kicks() {
///         break Ok(());
///     }
///     queue.suppress_kicks();
/// }
/// # }
/// ```
#[derive(Debug)]
pub struct Queue {
    config: QueueConfig,
    state: RefCell<Mapped>,
    avail: AvailHalf,
    used: UsedHalf,
    lookahead: Lookahead,
    inflight: Option<Inflight>,
    /// Guest address under which writes to the used ring are logged, if they are to be.
    used_log: Cell<Option<u64>>,
    in_flight: Cell<u16>,
    broken: Cell<bool>,
}

/// What changes when the guest's memory does.
#[derive(Debug)]
struct Mapped {
    memory: Rc<MemoryView>,
    rings: Rings,
}

impl Mapped {
    fn new(memory: Rc<MemoryView>, config: &QueueConfig) -> Result<Self, QueueError> {
        let rings = Rings::new(config, memory.memory())?;
        Ok(Mapped { memory, rings })
    }
}

impl Queue {
    /// Sets the queue up, kicks enabled. It goes on in the used ring where that ring's index is,
    /// so that a queue that served before can be resumed. There may be work already.
    ///
    /// # Errors
    ///
    /// [`QueueError::Size`], or [`QueueError::Ring`] when a ring is misaligned or not in memory.
    pub fn new(memory: Rc<MemoryView>, config: QueueConfig) -> Result<Self, QueueError> {
        Self::with_inflight(memory, config, None)
    }

    /// The same with a record of what is in flight, `inflight`. Chains that are in it are popped again,
    /// in their order, before others. If a queue had the record before, `config.next_avail` counts for
    /// nothing: the next entry of the available ring is the one behind those and all that are used. A
    /// front end that reconnects may take the driver's available index for it (Cloud Hypervisor does),
    /// which is behind what was offered while nobody served the queue.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new); [`QueueError::Size`] also when the record has room for fewer entries than
    /// the queue has.
    pub fn with_inflight(
        memory: Rc<MemoryView>,
        mut config: QueueConfig,
        mut inflight: Option<Inflight>,
    ) -> Result<Self, QueueError> {
        let mapped = Mapped::new(memory, &config)?;
        let rings = &mapped.rings;
        let used_idx = rings.used_idx();
        if let Some(inflight) = &mut inflight {
            if inflight.size() < config.size {
                return Err(QueueError::Size(config.size));
            }
            if let Some(next_avail) = inflight.recover(used_idx) {
                config.next_avail = next_avail;
            }
        }
        // A device that served before may have left its kicks suppressed.
        rings.set_used_flags(0);
        let avail = AvailHalf::new(config.next_avail, config.event_idx);
        avail.enable_kicks(rings);
        let used = UsedHalf::new(used_idx, config.event_idx);
        Ok(Queue {
            config,
            state: RefCell::new(mapped),
            avail,
            used,
            lookahead: Lookahead::default(),
            inflight,
            used_log: Cell::new(None),
            in_flight: Cell::new(0),
            broken: Cell::new(false),
        })
    }

    /// Goes on with the rings and buffers found in `memory` (memory was plugged or unplugged).
    /// Chains popped before keep the memory that they were translated with.
    ///
    /// # Errors
    ///
    /// [`QueueError::Ring`] when a ring is not in `memory`; the queue then is broken, and still has
    /// its old memory.
    pub fn replace_memory(&self, memory: Rc<MemoryView>) -> Result<(), QueueError> {
        match Mapped::new(memory, &self.config) {
            Ok(mapped) => {
                *self.state.borrow_mut() = mapped;
                Ok(())
            }
            Err(error) => {
                self.mark_broken();
                Err(error)
            }
        }
    }

    /// Has writes to the used ring logged, by a view that [logs](guest_memory::Logging), as if it began
    /// at guest address `addr` (VHOST_VRING_F_LOG); or not. What was written before is marked as well.
    pub fn set_used_log(&self, addr: Option<u64>) {
        self.used_log.set(addr);
        self.mark_used();
    }

    /// Marks the used ring, all of it: it has a page or two.
    #[inline]
    fn mark_used(&self) {
        if let Some(addr) = self.used_log.get() {
            let len = used_ring_len(self.config.size);
            self.state.borrow().memory.logging().mark(addr, len);
        }
    }

    /// The end of a batch: see [`Logging::tell`](guest_memory::Logging::tell).
    #[inline]
    pub fn tell_of_marks(&self) {
        self.state.borrow().memory.logging().tell();
    }

    /// The memory that the buffers of chains popped now are in.
    pub fn memory(&self) -> Rc<MemoryView> {
        Rc::clone(&self.state.borrow().memory)
    }

    /// How the queue was set up.
    pub fn config(&self) -> &QueueConfig {
        &self.config
    }

    /// How many entries it has.
    pub fn size(&self) -> u16 {
        self.config.size
    }

    /// Whether there is a chain to pop: one look at the available index, for a busy-polling loop.
    /// A broken queue has none.
    #[inline]
    pub fn has_work(&self) -> bool {
        !self.broken.get()
            && (self.avail.has_work(&self.state.borrow().rings) || self.has_more_to_redo())
    }

    /// How many chains there are to pop. A driver that breaks the rules has more than the queue has
    /// entries, which [`pop`](Self::pop) finds out.
    pub fn offered(&self) -> u32 {
        let to_redo = self.inflight.as_ref().map_or(0, Inflight::more_to_redo);
        to_redo + u32::from(self.avail.offered(&self.state.borrow().rings))
    }

    /// Takes the next chain; `false` when the driver offers none. Allocates nothing.
    ///
    /// # Errors
    ///
    /// When the driver breaks the rules: the error says which. The queue then is broken: it pops no
    /// more, but gives back what was popped before.
    #[inline]
    pub fn pop(&self, chain: &mut Chain) -> Result<bool, QueueError> {
        if self.broken.get() {
            return Err(QueueError::Broken);
        }
        let popped = self.try_pop(chain);
        if popped.is_err() {
            self.mark_broken();
        }
        popped
    }

    #[inline]
    fn try_pop(&self, chain: &mut Chain) -> Result<bool, QueueError> {
        pause();
        let mapped = self.state.borrow();
        let redone = self.inflight.as_ref().and_then(Inflight::next_to_redo);
        let head = match redone {
            Some(head) => head,
            None => {
                let Some(head) = self.avail.pop(&mapped.rings)? else { return Ok(false) };
                self.lookahead.prefetch(&self.avail, &mapped.rings, &mapped.memory);
                head
            }
        };
        let in_flight = self.in_flight.get();
        if in_flight >= self.config.size {
            return Err(QueueError::TooManyInFlight);
        }
        pause();
        chain.read(&mapped.rings, &mapped.memory, self.config.indirect, head)?;
        self.in_flight.set(in_flight + 1);
        if let Some(inflight) = &self.inflight
            && redone.is_none()
        {
            inflight.begin(head);
        }
        Ok(true)
    }

    fn has_more_to_redo(&self) -> bool {
        self.inflight.as_ref().is_some_and(Inflight::has_more_to_redo)
    }

    /// Gives back the chain popped as `head`, of which the device wrote `written` bytes. The driver
    /// sees it when it is [published](Self::publish) at the latest; long batches are shown to it as
    /// they grow.
    #[inline]
    pub fn add_used(&self, head: u16, written: u32) {
        debug_assert!(self.in_flight.get() > 0, "a chain is given back once");
        self.in_flight.set(self.in_flight.get().saturating_sub(1));
        self.used.add(&self.state.borrow().rings, self.inflight.as_ref(), head, written);
    }

    /// Leaves the chain popped as `head` as it is: in the record of what is in flight, from which the
    /// next that serves the queue does it again. For a queue that pops no more. `false`: it has to be
    /// given back, as there is no record.
    pub fn leave(&self, head: u16) -> bool {
        debug_assert!(head < self.config.size && self.in_flight.get() > 0);
        if self.inflight.is_none() {
            return false;
        }
        self.in_flight.set(self.in_flight.get().saturating_sub(1));
        true
    }

    /// Shows the driver all chains given back so far; `true` when it wants a signal for those since
    /// the last time. Once per batch.
    #[inline]
    #[must_use = "the driver waits for the signal"]
    pub fn publish(&self) -> bool {
        let wanted = self.used.publish(&self.state.borrow().rings, self.inflight.as_ref());
        self.mark_used();
        wanted
    }

    /// Asks the driver not to kick, as long as the queue is polled. It may still do so.
    #[inline]
    pub fn suppress_kicks(&self) {
        self.avail.suppress_kicks(&self.state.borrow().rings);
        self.mark_used();
    }

    /// Asks the driver to kick when it offers the next chain: to be called each time before waiting
    /// for a kick, since with EVENT_IDX the request is for one kick. `true` when chains were offered
    /// before the driver could see it, for which no kick may come: pop them, then call this again.
    #[inline]
    #[must_use = "no kick may come for what is there already"]
    pub fn enable_kicks(&self) -> bool {
        let more = self.avail.enable_kicks(&self.state.borrow().rings);
        self.mark_used();
        (more || self.has_more_to_redo()) && !self.broken.get()
    }

    /// The entry of the available ring to pop next (GET_VRING_BASE). What is in flight, and will be
    /// done again by whoever comes next, lies before it.
    pub fn next_avail(&self) -> u16 {
        self.avail.next()
    }

    /// The used index that the driver sees.
    pub fn used_idx(&self) -> u16 {
        self.used.published()
    }

    /// How many chains were popped and not given back yet; at most [`size`](Self::size).
    pub fn in_flight(&self) -> u16 {
        self.in_flight.get()
    }

    /// Whether the queue pops no more, because its driver broke the rules.
    pub fn is_broken(&self) -> bool {
        self.broken.get()
    }

    /// Breaks the queue: a device does so when a request is malformed in a way that leaves no room
    /// for a status.
    pub fn mark_broken(&self) {
        self.broken.set(true);
    }
}
