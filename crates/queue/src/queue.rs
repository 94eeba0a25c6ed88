//! A split virtqueue: both halves, the rings and their memory.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use guest_memory::MemoryView;

use crate::avail::AvailHalf;
use crate::chain::Chain;
use crate::error::QueueError;
use crate::inflight::Inflight;
use crate::lookahead::Lookahead;
use crate::pause::pause;
use crate::quirks::{Quirk, Quirks};
use crate::ring::{Rings, used_ring_len};
use crate::used::UsedHalf;

/// Configuration of a queue.
///
/// Addresses are in the front end's address space, as in SET_VRING_ADDR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueConfig {
    /// Entries: a power of two from 1 to 32768.
    pub size: u16,
    /// Address of the descriptor table, a multiple of 8. Drivers owe a multiple of 16.
    pub desc: u64,
    /// Address of the available ring, a multiple of 2.
    pub avail: u64,
    /// Address of the used ring, a multiple of 4.
    pub used: u64,
    /// VIRTIO_F_EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// VIRTIO_F_INDIRECT_DESC was negotiated. Indirect tables are served without it, as a [`Quirk`].
    pub indirect: bool,
    /// The initial position in the available ring (SET_VRING_BASE), unless a [record](Queue::with_inflight) of requests
    /// in flight has the position.
    pub next_avail: u16,
    /// The queue's number in the device, for trace points.
    pub index: u16,
}

/// The device side of a split virtqueue. See the [crate's description](crate).
///
/// At most as many chains are in flight as the queue has entries: [`pop`](Self::pop) refuses more. So a device may
/// preallocate [`size`](Self::size) requests.
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
    /// Guest address at which writes to the used ring are logged, if they are.
    used_log: Cell<Option<u64>>,
    in_flight: Cell<u16>,
    broken: Cell<bool>,
    quirks: Quirks,
}

/// State that depends on the guest's memory.
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
    /// Sets the queue up with kicks enabled.
    ///
    /// The used ring continues at its own index, so a queue that was served before can be resumed. Chains may be
    /// available already.
    ///
    /// # Errors
    ///
    /// [`QueueError::Size`], or [`QueueError::Ring`] when a ring is misaligned or not in memory.
    pub fn new(memory: Rc<MemoryView>, config: QueueConfig) -> Result<Self, QueueError> {
        Self::with_inflight(memory, config, None)
    }

    /// Sets the queue up with a record of requests in flight.
    ///
    /// Chains in `inflight` are popped again, in their order, before others. If the record was used before,
    /// `config.next_avail` is ignored: the next available entry follows the recorded and the used chains. A
    /// reconnecting front end may send the driver's available index as the position (Cloud Hypervisor does), which
    /// would skip chains offered while no back end was connected.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new); [`QueueError::Record`] if the record has fewer entries than the queue.
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
                let (entries, size) = (inflight.size(), config.size);
                return Err(QueueError::Record { entries, size });
            }
            if let Some(next_avail) = inflight.recover(used_idx) {
                config.next_avail = next_avail;
            }
        }
        // A previous device may have left kicks suppressed.
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
            quirks: Quirks::new(config.indirect),
        })
    }

    /// Sets the function that receives deviations of the driver that are served, each kind once.
    ///
    /// Only the first call takes effect. [`pop`](Self::pop) calls the function, which must not use the queue.
    pub fn on_quirk(&self, report: Rc<dyn Fn(Quirk)>) {
        self.quirks.report_to(report);
    }

    /// Continues in `memory` after memory was plugged or unplugged.
    ///
    /// Chains popped before keep the memory that they were translated with.
    ///
    /// # Errors
    ///
    /// [`QueueError::Ring`] if a ring is not in `memory`; the queue is then broken and keeps its old memory.
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

    /// Starts or stops logging writes to the used ring (VHOST_VRING_F_LOG).
    ///
    /// The queue's view [logs](guest_memory::Logging) them as if the ring began at guest address `addr`. Earlier writes
    /// are marked as well.
    pub fn set_used_log(&self, addr: Option<u64>) {
        self.used_log.set(addr);
        self.mark_used();
    }

    /// Marks the whole used ring, which has a page or two.
    #[inline]
    fn mark_used(&self) {
        if let Some(addr) = self.used_log.get() {
            let len = used_ring_len(self.config.size);
            self.state.borrow().memory.logging().mark(addr, len);
        }
    }

    /// Ends a batch of log entries: see [`Logging::tell`](guest_memory::Logging::tell).
    #[inline]
    pub fn tell_of_marks(&self) {
        self.state.borrow().memory.logging().tell();
    }

    /// Returns the memory in which buffers are now looked up.
    pub fn memory(&self) -> Rc<MemoryView> {
        Rc::clone(&self.state.borrow().memory)
    }

    /// Returns the queue's configuration.
    pub fn config(&self) -> &QueueConfig {
        &self.config
    }

    /// Returns the number of entries: a power of two from 1 to 32768.
    pub fn size(&self) -> u16 {
        self.config.size
    }

    /// Returns whether a chain is available, for a busy-polling loop.
    ///
    /// One read of the available index. Always `false` for a broken queue.
    #[inline]
    pub fn has_work(&self) -> bool {
        !self.broken.get()
            && (self.avail.has_work(&self.state.borrow().rings) || self.has_more_to_redo())
    }

    /// Returns the number of available chains.
    ///
    /// If the driver breaks the rules, the number may exceed the queue's size, which [`pop`](Self::pop) detects.
    pub fn offered(&self) -> u32 {
        let to_redo = self.inflight.as_ref().map_or(0, Inflight::more_to_redo);
        to_redo + u32::from(self.avail.offered(&self.state.borrow().rings))
    }

    /// Takes the next chain (virtio 1.3, 2.7.6). Allocates nothing.
    ///
    /// Returns `false` if none is available.
    ///
    /// # Errors
    ///
    /// The driver has broken the rules. The queue is then broken: it pops no more chains, but accepts those in flight
    /// in [`add_used`](Self::add_used).
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
        chain.read(&mapped.rings, &mapped.memory, &self.quirks, head)?;
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

    /// Puts the chain popped as `head` into the used ring (virtio 1.3, 2.7.8).
    ///
    /// The device has written `written` bytes. The driver sees the chain at the latest with [`publish`](Self::publish).
    /// Long batches are published in parts.
    #[inline]
    pub fn add_used(&self, head: u16, written: u32) {
        debug_assert!(self.in_flight.get() > 0, "a chain is given back once");
        self.in_flight.set(self.in_flight.get().saturating_sub(1));
        self.used.add(&self.state.borrow().rings, self.inflight.as_ref(), head, written);
    }

    /// Leaves the chain popped as `head` in the record of requests in flight.
    ///
    /// The next back end repeats the chain from there. For a queue that pops no more chains. Returns `false` without a
    /// record: the chain must then be added to the used ring.
    pub fn leave(&self, head: u16) -> bool {
        debug_assert!(head < self.config.size && self.in_flight.get() > 0);
        if self.inflight.is_none() {
            return false;
        }
        self.in_flight.set(self.in_flight.get().saturating_sub(1));
        true
    }

    /// Publishes the used ring. Returns `true` if the driver requests a signal.
    ///
    /// Call this once per batch. The request is that of virtio 1.3, 2.7.7.
    #[inline]
    #[must_use = "the driver waits for the signal"]
    pub fn publish(&self) -> bool {
        let wanted = self.used.publish(&self.state.borrow().rings, self.inflight.as_ref());
        self.mark_used();
        wanted
    }

    /// Asks the driver not to kick while the queue is polled.
    ///
    /// Kicks may still come (virtio 1.3, 2.7.10).
    #[inline]
    pub fn suppress_kicks(&self) {
        self.avail.suppress_kicks(&self.state.borrow().rings);
        self.mark_used();
    }

    /// Asks the driver to kick for the next chain (virtio 1.3, 2.7.10).
    ///
    /// Call this each time before waiting, since with EVENT_IDX the request is for one kick. Returns `true` if chains
    /// were added before the driver could see the request, for which no kick may come: pop them, then call this again.
    #[inline]
    #[must_use = "no kick may come for what is there already"]
    pub fn enable_kicks(&self) -> bool {
        let more = self.avail.enable_kicks(&self.state.borrow().rings);
        self.mark_used();
        (more || self.has_more_to_redo()) && !self.broken.get()
    }

    /// Returns the index of the next available entry to pop (GET_VRING_BASE).
    ///
    /// The index counts entries modulo 2^16. Chains in flight, which the next back end repeats, come before it.
    pub fn next_avail(&self) -> u16 {
        self.avail.next()
    }

    /// Returns the published used index, which counts chains modulo 2^16.
    pub fn used_idx(&self) -> u16 {
        self.used.published()
    }

    /// Returns the number of chains in flight; at most [`size`](Self::size).
    pub fn in_flight(&self) -> u16 {
        self.in_flight.get()
    }

    /// Returns whether the queue is broken, as its driver has broken the rules.
    pub fn is_broken(&self) -> bool {
        self.broken.get()
    }

    /// Breaks the queue.
    ///
    /// A device does so for a malformed request without room for a status.
    pub fn mark_broken(&self) {
        self.broken.set(true);
    }
}
