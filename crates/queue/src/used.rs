//! The used half of a queue: chains to the driver, and whether the driver requests a signal.

use std::cell::Cell;
use std::sync::atomic::{Ordering, fence};

use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;

use crate::inflight::Inflight;
use crate::pause::pause;
use crate::ring::Rings;

/// Number of entries after which an ongoing batch is published. A driver that is awake then works on the first chains
/// while the device works on the last.
pub(crate) const SHOWN_AT_ONCE: u16 = 4;

/// The device's position in the used ring.
#[derive(Debug)]
pub(crate) struct UsedHalf {
    /// The entry to write next.
    next: Cell<u16>,
    /// The published used index.
    published: Cell<u16>,
    /// Entries were published since the need for a signal was last checked.
    fresh: Cell<bool>,
    /// Those entries passed the one at which the driver requested a signal. Initially true: the first batch is signalled.
    passed: Cell<bool>,
    event_idx: bool,
}

impl UsedHalf {
    pub(crate) fn new(next: u16, event_idx: bool) -> Self {
        UsedHalf {
            next: Cell::new(next),
            published: Cell::new(next),
            fresh: Cell::new(false),
            passed: Cell::new(true),
            event_idx,
        }
    }

    pub(crate) fn published(&self) -> u16 {
        self.published.get()
    }

    #[inline]
    pub(crate) fn add(&self, rings: &Rings, inflight: Option<&Inflight>, head: u16, written: u32) {
        let next = self.next.get();
        pause();
        rings.set_used_entry(next, head, written);
        pause();
        if let Some(inflight) = inflight {
            inflight.end(head);
        }
        let next = next.wrapping_add(1);
        self.next.set(next);
        if next.wrapping_sub(self.published.get()) >= SHOWN_AT_ONCE {
            self.show(rings, inflight);
        }
    }

    /// Publishes the added entries, and checks whether they pass the driver's event. A driver that is awake moves the
    /// event during a batch, so a check of the whole batch would be wrong.
    #[inline]
    fn show(&self, rings: &Rings, inflight: Option<&Inflight>) {
        let new = self.next.get();
        let old = self.published.replace(new);
        if new == old {
            return;
        }
        pause();
        rings.set_used_idx(new);
        pause();
        if let Some(inflight) = inflight {
            inflight.shown(new);
        }
        pause();
        self.fresh.set(true);
        if self.event_idx {
            // The driver writes its event, then reads the used index. The device writes the index, then reads the event. With
            // a full fence on both sides at least one sees the other.
            fence(Ordering::SeqCst);
            if event_passed(rings.used_event(), new, old) {
                self.passed.set(true);
            }
        }
    }

    #[inline]
    pub(crate) fn publish(&self, rings: &Rings, inflight: Option<&Inflight>) -> bool {
        self.show(rings, inflight);
        if !self.fresh.replace(false) {
            return false;
        }
        if self.event_idx {
            return self.passed.replace(false);
        }
        // As above, with a flag in place of the event.
        fence(Ordering::SeqCst);
        u32::from(rings.avail_flags()) & VRING_AVAIL_F_NO_INTERRUPT == 0
    }
}

/// Whether an index that went from `old` to `new` passed entry `event` (2.7.7.1 and 2.7.10).
#[inline]
pub(crate) fn event_passed(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}
