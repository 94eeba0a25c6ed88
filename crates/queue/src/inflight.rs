//! Records which requests of a queue are in flight, in memory that outlives the process.
//!
//! The next back end repeats the recorded requests (vhost-user, "Inflight I/O tracking", the layout for split
//! virtqueues). The memory is shared with the front end, not with the guest. Values read after a restart are
//! bounds-checked all the same. While the queue is served, the record is only written.
//!
//! The process may be killed between any two stores. The next process sees all earlier stores, so only their
//! order matters; `Release` keeps it.

#![allow(unsafe_code)]

use std::cell::Cell;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};

use guest_memory::{GuestMemory, RingArea};

use crate::error::QueueError;
use crate::pause::pause;
use crate::used::SHOWN_AT_ONCE;

/// The version of the layout.
const VERSION: u16 = 1;
/// Offsets in a queue's region.
const VERSION_AT: usize = 8;
const DESC_NUM_AT: usize = 10;
const LAST_BATCH_HEAD_AT: usize = 12;
const USED_IDX_AT: usize = 14;
const ENTRIES_AT: usize = 16;
/// Bytes of an entry. Each descriptor of the table has one entry.
const ENTRY: usize = 16;
/// Offsets in an entry: the in-flight flag of the chain that begins there, the next entry of its batch, and its
/// sequence number.
const INFLIGHT: usize = 0;
const NEXT: usize = 6;
const COUNTER: usize = 8;
/// The alignment of a queue's region, bytes: queues do not share a cache line.
const ALIGN: usize = 64;

/// The record of a queue's requests in flight, in memory of the front end.
///
/// Layout and rules are in the vhost-user specification, "Inflight I/O tracking".
#[derive(Debug)]
pub struct Inflight {
    area: RingArea,
    /// The number of entries.
    size: u16,
    /// The sequence number of the next chain.
    counter: Cell<u64>,
    /// Chains in the used ring that are not published yet.
    batch: [Cell<u16>; SHOWN_AT_ONCE as usize],
    batch_len: Cell<usize>,
    last_batch_head: Cell<u16>,
    /// Chains that the previous back end had in flight, in their order.
    redo: Box<[u16]>,
    /// How many of `redo` have been popped.
    redone: Cell<usize>,
    origin: Origin,
}

/// The queue's life before it starts with a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// The record tells.
    Unknown,
    /// The front end knows the ring position at which the queue was stopped.
    Stopped,
    /// The driver was reset after the record was written.
    Reset,
}

impl Inflight {
    /// Returns the bytes of the record of a queue with `size` entries.
    ///
    /// The number is a multiple of 64.
    pub const fn region_len(size: u16) -> usize {
        (ENTRIES_AT + size as usize * ENTRY).next_multiple_of(ALIGN)
    }

    /// Returns the record at user address `addr` of `memory`, a multiple of 64.
    ///
    /// A new record is zeroed. `size` is the number of entries.
    ///
    /// # Errors
    ///
    /// [`QueueError::Size`], [`QueueError::Ring`] when it is not all in that memory.
    pub fn new(memory: &GuestMemory, addr: u64, size: u16) -> Result<Self, QueueError> {
        if !size.is_power_of_two() {
            return Err(QueueError::Size(size));
        }
        let len = Self::region_len(size) as u64;
        let area = memory.ring_area(addr, len, ALIGN as u64).map_err(QueueError::Ring)?;
        Ok(Inflight {
            area,
            size,
            counter: Cell::new(0),
            batch: Default::default(),
            batch_len: Cell::new(0),
            last_batch_head: Cell::new(0),
            redo: Box::default(),
            redone: Cell::new(0),
            origin: Origin::Unknown,
        })
    }

    /// Marks the queue as restarted at the ring position where it was stopped.
    ///
    /// The position is trusted over the record: a queue may have begun, with a new record, behind entries that were
    /// never popped.
    pub fn of_a_stopped_queue(self) -> Self {
        Inflight { origin: Origin::Stopped, ..self }
    }

    /// Marks the queue as that of another driver than the recorded one: recorded requests are obsolete.
    pub fn of_a_new_driver(self) -> Self {
        Inflight { origin: Origin::Reset, ..self }
    }

    /// Returns the number of entries.
    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    fn u16_at(&self, offset: usize) -> &AtomicU16 {
        debug_assert!(offset.is_multiple_of(2) && offset + 2 <= self.area.len());
        // SAFETY: the offsets used in this file are even and, for entries below `size`, inside
        // `region_len`, which is the area's length; the area is aligned to 64 bytes and mapped while it
        // is borrowed; all our accesses are atomic.
        unsafe { AtomicU16::from_ptr(self.area.as_ptr().add(offset).cast()) }
    }

    /// Field of entry `head`, which is taken modulo the size: `ENTRY * (size - 1) + 15` is inside.
    fn entry_at(&self, head: u16, field: usize) -> usize {
        ENTRIES_AT + usize::from(head & (self.size - 1)) * ENTRY + field
    }

    fn inflight(&self, head: u16) -> &AtomicU8 {
        // SAFETY: in bounds, by `entry_at`; mapped and accessed as above; a byte needs no alignment.
        unsafe { AtomicU8::from_ptr(self.area.as_ptr().add(self.entry_at(head, INFLIGHT))) }
    }

    fn counter_of(&self, head: u16) -> &AtomicU64 {
        // SAFETY: in bounds, by `entry_at`; a multiple of 8, in an area aligned to 64; mapped and
        // accessed as above.
        unsafe { AtomicU64::from_ptr(self.area.as_ptr().add(self.entry_at(head, COUNTER)).cast()) }
    }

    /// Recovers from the previous back end: finds the requests to repeat. `used_idx` is the published index.
    ///
    /// Returns the position in the available ring behind these requests. `None`: the caller's position holds, since
    /// the record is new or the queue was stopped in order.
    pub(crate) fn recover(&mut self, used_idx: u16) -> Option<u16> {
        if self.u16_at(VERSION_AT).load(Ordering::Acquire) != VERSION {
            // New memory.
            self.u16_at(DESC_NUM_AT).store(self.size, Ordering::Relaxed);
            self.u16_at(USED_IDX_AT).store(used_idx, Ordering::Relaxed);
            self.u16_at(VERSION_AT).store(VERSION, Ordering::Release);
            return None;
        }
        let shown = used_idx.wrapping_sub(self.u16_at(USED_IDX_AT).load(Ordering::Acquire));
        if shown > self.size || self.origin == Origin::Reset {
            // Obsolete: the driver was reset with other rings, and the front end kept the record. Without a reset in
            // this session, an index beyond what can have been in flight shows that.
            (0..self.size).for_each(|head| self.inflight(head).store(0, Ordering::Release));
        } else {
            // The process was killed between publishing a batch and recording that.
            let mut head = self.u16_at(LAST_BATCH_HEAD_AT).load(Ordering::Acquire);
            for _ in 0..shown {
                self.inflight(head).store(0, Ordering::Release);
                head = self.u16_at(self.entry_at(head, NEXT)).load(Ordering::Acquire);
            }
        }
        self.u16_at(USED_IDX_AT).store(used_idx, Ordering::Release);
        let mut redo: Vec<(u64, u16)> = (0..self.size)
            .filter(|&head| self.inflight(head).load(Ordering::Acquire) != 0)
            .map(|head| (self.counter_of(head).load(Ordering::Acquire), head))
            .collect();
        redo.sort_unstable();
        self.counter.set(redo.last().map_or(0, |(counter, _)| counter.wrapping_add(1)));
        self.redo = redo.into_iter().map(|(_, head)| head).collect();
        // At most the size: as many entries as can be in flight.
        (self.origin == Origin::Unknown).then(|| used_idx.wrapping_add(self.redo.len() as u16))
    }

    /// Returns whether requests to repeat are left.
    #[inline]
    pub(crate) fn has_more_to_redo(&self) -> bool {
        self.redone.get() < self.redo.len()
    }

    /// Returns the number of requests to repeat that are left.
    pub(crate) fn more_to_redo(&self) -> u32 {
        self.redo.len().saturating_sub(self.redone.get()) as u32
    }

    /// Returns the next chain to repeat. The record has it in flight already.
    #[inline]
    pub(crate) fn next_to_redo(&self) -> Option<u16> {
        let head = *self.redo.get(self.redone.get())?;
        self.redone.update(|redone| redone + 1);
        Some(head)
    }

    /// Records the chain at `head` as in flight.
    #[inline]
    pub(crate) fn begin(&self, head: u16) {
        let counter = self.counter.get();
        self.counter.set(counter.wrapping_add(1));
        self.counter_of(head).store(counter, Ordering::Relaxed);
        pause();
        self.inflight(head).store(1, Ordering::Release);
    }

    /// Records the chain at `head` as in the used ring, unpublished.
    #[inline]
    pub(crate) fn end(&self, head: u16) {
        let next = self.entry_at(head, NEXT);
        self.u16_at(next).store(self.last_batch_head.get(), Ordering::Relaxed);
        pause();
        self.u16_at(LAST_BATCH_HEAD_AT).store(head, Ordering::Release);
        self.last_batch_head.set(head);
        let len = self.batch_len.get();
        if let Some(place) = self.batch.get(len) {
            place.set(head);
            self.batch_len.set(len + 1);
        }
    }

    /// Records that the used ring is published up to `used_idx`.
    #[inline]
    pub(crate) fn shown(&self, used_idx: u16) {
        for head in self.batch.iter().take(self.batch_len.take()) {
            self.inflight(head.get()).store(0, Ordering::Release);
            pause();
        }
        self.u16_at(USED_IDX_AT).store(used_idx, Ordering::Release);
    }
}
