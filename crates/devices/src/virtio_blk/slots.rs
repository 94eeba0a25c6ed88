//! A queue's requests in flight, in a preallocated slot per queue entry. Slots never used are never written, so
//! they occupy no memory.

use std::rc::Rc;

use event_loop::{IoBufs, Slab};
use guest_memory::MemoryView;

use super::wire::Status;
use stats::Kind;

/// A request in flight.
pub(crate) struct BlkSlot {
    /// Head of the chain.
    pub(crate) head: u16,
    /// Length of the chain's writable part, bytes.
    pub(crate) written: u32,
    /// Guest address of the status byte, in the slot's memory.
    pub(crate) status_addr: u64,
    pub(crate) memory: Rc<MemoryView>,
    /// Unanswered block requests: one, or one per range.
    pub(crate) pending: u8,
    /// The worst answer so far.
    pub(crate) status: Status,
    /// A part of it was given up: the next process has to repeat the request.
    pub(crate) given_up: bool,
    /// Kind, for statistics and the search of slow requests.
    pub(crate) kind: Kind,
    pub(crate) offset: u64,
    /// Sectors of 512 bytes read, written, discarded or zeroed.
    pub(crate) sectors: u32,
    pub(crate) started_ns: u64,
}

/// The table of slots. It keeps lists of segments for their capacity.
pub(crate) struct SlotTable {
    slots: Slab<BlkSlot>,
    spare_bufs: Vec<IoBufs>,
}

impl SlotTable {
    pub(crate) fn new(size: u16) -> Self {
        let size = usize::from(size);
        SlotTable { slots: Slab::with_capacity(size), spare_bufs: Vec::with_capacity(size) }
    }

    /// Takes a slot. One is free, as the queue pops no more chains than it has entries.
    pub(crate) fn insert(&mut self, slot: BlkSlot) -> Option<u32> {
        self.slots.has_room().then(|| self.slots.insert(slot))
    }

    /// Counts an answer for `tag`. Returns the request if it was the last one.
    pub(crate) fn answer(&mut self, tag: u32, status: Status) -> Option<BlkSlot> {
        let slot = self.slots.get_mut(tag)?;
        if status != Status::Ok {
            slot.status = status;
        }
        slot.pending = slot.pending.saturating_sub(1);
        if slot.pending > 0 {
            return None;
        }
        self.slots.remove(tag)
    }

    /// Returns the request with that `tag`.
    pub(crate) fn get(&self, tag: u32) -> Option<&BlkSlot> {
        self.slots.get(tag)
    }

    /// Marks the request `tag` as given up in part.
    #[cold]
    pub(crate) fn give_up(&mut self, tag: u32) {
        if let Some(slot) = self.slots.get_mut(tag) {
            slot.given_up = true;
        }
    }

    /// The requests in flight.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &BlkSlot> {
        self.slots.values()
    }

    /// Returns an empty list of segments.
    pub(crate) fn take_bufs(&mut self) -> IoBufs {
        self.spare_bufs.pop().unwrap_or_default()
    }

    /// Keeps a list for reuse.
    pub(crate) fn keep_bufs(&mut self, mut bufs: IoBufs) {
        bufs.clear();
        if self.spare_bufs.len() < self.spare_bufs.capacity() {
            self.spare_bufs.push(bufs);
        }
    }
}
