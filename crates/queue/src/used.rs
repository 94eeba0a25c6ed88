//! The used half of a queue: what the device gives back, and whether the driver wants a signal.

use std::cell::Cell;
use std::sync::atomic::{Ordering, fence};

use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;

use crate::ring::Rings;

/// Where the device is in the used ring.
#[derive(Debug)]
pub(crate) struct UsedHalf {
    /// The entry to write next.
    next: Cell<u16>,
    /// The used index that the driver sees.
    published: Cell<u16>,
    /// The used index when the driver was last considered for a signal.
    considered: Cell<u16>,
    /// It never was: it gets a signal in any case.
    first: Cell<bool>,
    event_idx: bool,
}

impl UsedHalf {
    pub(crate) fn new(next: u16, event_idx: bool) -> Self {
        UsedHalf {
            next: Cell::new(next),
            published: Cell::new(next),
            considered: Cell::new(next),
            first: Cell::new(true),
            event_idx,
        }
    }

    pub(crate) fn published(&self) -> u16 {
        self.published.get()
    }

    #[inline]
    pub(crate) fn add(&self, rings: &Rings, head: u16, written: u32) {
        let next = self.next.get();
        rings.set_used_entry(next, head, written);
        self.next.set(next.wrapping_add(1));
    }

    /// Shows what was added.
    #[inline]
    pub(crate) fn show(&self, rings: &Rings) {
        let new = self.next.get();
        if new != self.published.replace(new) {
            rings.set_used_idx(new);
        }
    }

    #[inline]
    pub(crate) fn publish(&self, rings: &Rings) -> bool {
        self.show(rings);
        let new = self.next.get();
        let old = self.considered.replace(new);
        if new == old {
            return false;
        }
        // The driver says where it wants a signal, then looks at the used index; we write the
        // index, then look where. With a full fence on both sides at least one sees the other.
        fence(Ordering::SeqCst);
        if !self.event_idx {
            return u32::from(rings.avail_flags()) & VRING_AVAIL_F_NO_INTERRUPT == 0;
        }
        self.first.replace(false) || event_passed(rings.used_event(), new, old)
    }
}

/// Whether an index that went from `old` to `new` passed entry `event` (2.7.7.1 and 2.7.10).
#[inline]
pub(crate) fn event_passed(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}
