//! The available half of a queue: chains from the driver, and whether the driver has to kick.

use std::cell::Cell;
use std::sync::atomic::{Ordering, fence};

use virtio_bindings::virtio_ring::VRING_USED_F_NO_NOTIFY;

use crate::error::QueueError;
use crate::pause::pause;
use crate::ring::Rings;

/// The device's position in the available ring.
#[derive(Debug)]
pub(crate) struct AvailHalf {
    /// The entry to pop next.
    next: Cell<u16>,
    /// The available index when last read: entries before it are known to be filled.
    seen: Cell<u16>,
    /// The entry at which the driver is asked to kick; `None` while kicks are suppressed.
    armed: Cell<Option<u16>>,
    event_idx: bool,
}

impl AvailHalf {
    pub(crate) fn new(next: u16, event_idx: bool) -> Self {
        AvailHalf {
            next: Cell::new(next),
            seen: Cell::new(next),
            armed: Cell::new(None),
            event_idx,
        }
    }

    #[inline]
    pub(crate) fn next(&self) -> u16 {
        self.next.get()
    }

    #[inline]
    pub(crate) fn has_work(&self, rings: &Rings) -> bool {
        rings.avail_idx() != self.next.get()
    }

    /// Number of entries that the driver offers.
    pub(crate) fn offered(&self, rings: &Rings) -> u16 {
        rings.avail_idx().wrapping_sub(self.next.get())
    }

    /// Entries before this one are known to be filled.
    #[inline]
    pub(crate) fn seen(&self) -> u16 {
        self.seen.get()
    }

    /// Returns the head of the next chain, if there is one.
    #[inline]
    pub(crate) fn pop(&self, rings: &Rings) -> Result<Option<u16>, QueueError> {
        let next = self.next.get();
        if next == self.seen.get() {
            let index = rings.avail_idx();
            if index == next {
                return Ok(None);
            }
            if index.wrapping_sub(next) > rings.size() {
                return Err(QueueError::AvailJump { index, next });
            }
            self.seen.set(index);
        }
        self.next.set(next.wrapping_add(1));
        Ok(Some(rings.avail_entry(next)))
    }

    pub(crate) fn suppress_kicks(&self, rings: &Rings) {
        if self.armed.take().is_none() {
            return;
        }
        if self.event_idx {
            // The driver kicks when it makes the entry at the event available. The entry before the next one comes
            // again only after a whole turn of the index, with one kick too many.
            rings.set_avail_event(self.next.get().wrapping_sub(1));
        } else {
            rings.set_used_flags(VRING_USED_F_NO_NOTIFY as u16);
        }
    }

    pub(crate) fn enable_kicks(&self, rings: &Rings) -> bool {
        let next = self.next.get();
        pause();
        if self.event_idx {
            if self.armed.get() != Some(next) {
                rings.set_avail_event(next);
            }
        } else if self.armed.get().is_none() {
            rings.set_used_flags(0);
        }
        self.armed.set(Some(next));
        pause();
        // The driver writes its index, then checks whether to kick. The device requests kicks, then reads the index.
        // With a full fence on both sides at least one sees the other (2.7.10).
        fence(Ordering::SeqCst);
        self.has_work(rings)
    }
}
