//! A loop's channel to a node whose writes are watched.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Tracking;
use super::bitmap::{Bitmaps, note};
use crate::node::Channel;
use crate::request::{Op, Request};

pub(super) struct TrackedChannel {
    node: Rc<dyn Channel>,
    tracking: Arc<Tracking>,
    /// As of this generation of the list.
    generation: Cell<u64>,
    bitmaps: RefCell<Bitmaps>,
    /// Discards reach the node.
    discards: bool,
}

impl TrackedChannel {
    pub(super) fn new(
        node: Rc<dyn Channel>,
        tracking: Arc<Tracking>,
        discards: bool,
    ) -> TrackedChannel {
        TrackedChannel {
            node,
            generation: Cell::new(tracking.generation.load(Ordering::Acquire)),
            bitmaps: RefCell::new(tracking.list()),
            tracking,
            discards,
        }
    }

    /// Sets the bits of a write. Only a change of the list takes a lock.
    ///
    /// Before the write: of one that is cut off by a kill, a part may have been done. Bits are taken from a
    /// bitmap only while no write is under way.
    #[inline]
    fn note(&self, offset: u64, len: u64) {
        if self.tracking.generation.load(Ordering::Acquire) != self.generation.get() {
            self.read_list();
        }
        note(&self.bitmaps.borrow(), offset, len);
    }

    #[cold]
    fn read_list(&self) {
        self.generation.set(self.tracking.generation.load(Ordering::Acquire));
        let before = self.bitmaps.replace(self.tracking.list());
        drop(before);
    }
}

impl Channel for TrackedChannel {
    fn submit(&self, request: Request) {
        if !request.op.only_reads() {
            let Request { op, offset, len, .. } = request;
            self.tracking.threshold.check(offset.saturating_add(len));
            if self.discards || op != Op::Discard {
                self.note(offset, len);
            }
        }
        self.node.submit(request);
    }

    fn in_flight(&self) -> usize {
        self.node.in_flight()
    }

    fn drain_begin(&self) {
        self.node.drain_begin();
    }

    fn drain_end(&self) {
        self.node.drain_end();
    }
}
