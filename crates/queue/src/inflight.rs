//! What a queue has in flight, in memory that outlives the process: the record from which the next
//! back end does again what this one had not answered (vhost-user, "Inflight I/O tracking", the layout
//! for split virtqueues).
//!
//! The memory is shared with the front end alone, not with the guest. What is read from it after a
//! restart is bounds-checked all the same. While the queue is served, it is only written.
//!
//! A process may be killed between any two stores. Those before it are seen by whoever comes next,
//! so their order is all that matters; the atomics' `Release` keeps it.

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
/// Bytes of an entry, of which there is one for each descriptor of the table,
const ENTRY: usize = 16;
/// and offsets in it: whether the chain that begins there is in flight, the next of its batch, and its
/// place in the order of all.
const INFLIGHT: usize = 0;
const NEXT: usize = 6;
const COUNTER: usize = 8;
/// What a queue's region is rounded up to: no two queues share a cache line.
const ALIGN: usize = 64;

/// A queue's record of what is in flight.
#[derive(Debug)]
pub struct Inflight {
    area: RingArea,
    /// Entries.
    size: u16,
    /// The order of the next chain.
    counter: Cell<u64>,
    /// Chains given back that the driver has not been shown.
    batch: [Cell<u16>; SHOWN_AT_ONCE as usize],
    batch_len: Cell<usize>,
    last_batch_head: Cell<u16>,
    /// Chains that a back end before this one had in flight, in their order,
    redo: Box<[u16]>,
    /// and how many of them have been taken.
    redone: Cell<usize>,
    /// Where the queue that had it was stopped is known to whoever starts it again.
    was_stopped: bool,
}

impl Inflight {
    /// Bytes that the record of a queue with `size` entries takes: a multiple of 64.
    pub const fn region_len(size: u16) -> usize {
        (ENTRIES_AT + size as usize * ENTRY).next_multiple_of(ALIGN)
    }

    /// The record at user address `addr`, a multiple of 64, of `memory`; zeroed when it was never used.
    /// `size`: the entries that there is room for.
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
            was_stopped: false,
        })
    }

    /// Of a queue that is started again with the entry that it was at when it was stopped. That is believed: it is
    /// right also of a queue that began, with a new record, behind entries that were never popped.
    pub fn of_a_stopped_queue(self) -> Self {
        Inflight { was_stopped: true, ..self }
    }

    /// The entries that there is room for.
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

    /// Goes on where the back end before has left off: `used_idx` is what the driver sees. Finds out
    /// what is to be done again. Returns the entry of the available ring that comes behind it; `None`:
    /// whoever starts the queue knows better, as the record is new, or as it knows where the queue was stopped.
    pub(crate) fn recover(&mut self, used_idx: u16) -> Option<u16> {
        if self.u16_at(VERSION_AT).load(Ordering::Acquire) != VERSION {
            // New memory.
            self.u16_at(DESC_NUM_AT).store(self.size, Ordering::Relaxed);
            self.u16_at(USED_IDX_AT).store(used_idx, Ordering::Relaxed);
            self.u16_at(VERSION_AT).store(VERSION, Ordering::Release);
            return None;
        }
        let shown = used_idx.wrapping_sub(self.u16_at(USED_IDX_AT).load(Ordering::Acquire));
        if shown > self.size {
            // More than can have been in flight: the driver has begun anew, with other rings, and the
            // front end has kept the record. What that has in flight, nobody waits for.
            (0..self.size).for_each(|head| self.inflight(head).store(0, Ordering::Release));
        } else {
            // It was killed after the driver was shown a batch, and before that was written down.
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
        (!self.was_stopped).then(|| used_idx.wrapping_add(self.redo.len() as u16))
    }

    /// Whether some of them have not been taken yet.
    #[inline]
    pub(crate) fn has_more_to_redo(&self) -> bool {
        self.redone.get() < self.redo.len()
    }

    /// How many of them.
    pub(crate) fn more_to_redo(&self) -> u32 {
        self.redo.len().saturating_sub(self.redone.get()) as u32
    }

    /// The next chain to be done again. It is in flight already.
    #[inline]
    pub(crate) fn next_to_redo(&self) -> Option<u16> {
        let head = *self.redo.get(self.redone.get())?;
        self.redone.update(|redone| redone + 1);
        Some(head)
    }

    /// The chain at `head` is in flight from now on.
    #[inline]
    pub(crate) fn begin(&self, head: u16) {
        let counter = self.counter.get();
        self.counter.set(counter.wrapping_add(1));
        self.counter_of(head).store(counter, Ordering::Relaxed);
        pause();
        self.inflight(head).store(1, Ordering::Release);
    }

    /// The chain at `head` is in the used ring, and not shown yet.
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

    /// The driver was shown the used ring up to `used_idx`.
    #[inline]
    pub(crate) fn shown(&self, used_idx: u16) {
        for head in self.batch.iter().take(self.batch_len.take()) {
            self.inflight(head.get()).store(0, Ordering::Release);
            pause();
        }
        self.u16_at(USED_IDX_AT).store(used_idx, Ordering::Release);
    }
}
