//! The used half of a queue: what the device gives back, and whether the driver wants a signal.

use std::cell::Cell;
use std::sync::atomic::{Ordering, fence};

use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;

use crate::inflight::Inflight;
use crate::pause::pause;
use crate::ring::Rings;

/// Entries added after which the driver is shown them, in a batch that goes on: if it is awake, it works
/// on the first chains while the device works on the last.
pub(crate) const SHOWN_AT_ONCE: u16 = 4;

/// Where the device is in the used ring.
#[derive(Debug)]
pub(crate) struct UsedHalf {
    /// The entry to write next.
    next: Cell<u16>,
    /// The used index that the driver sees.
    published: Cell<u16>,
    /// Something was shown since the driver was last considered for a signal,
    fresh: Cell<bool>,
    /// and passed the entry at which it asked for one. At first it gets one in any case.
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

    /// Shows what was added, and looks whether that passes the driver's event. A driver that is awake
    /// moves the event while a batch goes on: whether the whole batch passes it says nothing.
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
            // The driver says where it wants a signal, then looks at the used index; we write the
            // index, then look where. With a full fence on both sides at least one sees the other.
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
