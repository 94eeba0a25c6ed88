//! A loop's channel to a node whose writes are watched.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use event_loop::IoBufs;
use nix::errno::Errno;

use super::Tracking;
use super::bitmap::{Bitmaps, note};
use crate::node::Channel;
use crate::request::{Completion, Op, Request};
use crate::watched::WatchedWrites;

pub(super) struct TrackedChannel {
    me: Weak<TrackedChannel>,
    node: Rc<dyn Channel>,
    tracking: Arc<Tracking>,
    /// As of this generation of the list.
    generation: Cell<u64>,
    bitmaps: RefCell<Bitmaps>,
    writes: WatchedWrites,
    /// Discards reach the node.
    discards: bool,
}

impl TrackedChannel {
    pub(super) fn new(
        node: Rc<dyn Channel>,
        tracking: Arc<Tracking>,
        discards: bool,
    ) -> Rc<TrackedChannel> {
        Rc::new_cyclic(|me| TrackedChannel {
            me: me.clone(),
            node,
            generation: Cell::new(tracking.generation.load(Ordering::Acquire)),
            bitmaps: RefCell::new(tracking.list()),
            tracking,
            writes: WatchedWrites::default(),
            discards,
        })
    }

    /// Whether there are bitmaps. Only a change of the list takes a lock.
    #[inline]
    fn has_bitmaps(&self) -> bool {
        if self.tracking.generation.load(Ordering::Acquire) != self.generation.get() {
            self.read_list();
        }
        !self.bitmaps.borrow().is_empty()
    }

    #[cold]
    fn read_list(&self) {
        self.generation.set(self.tracking.generation.load(Ordering::Acquire));
        let before = self.bitmaps.replace(self.tracking.list());
        drop(before);
    }
}

impl Channel for TrackedChannel {
    fn submit(&self, mut request: Request) {
        if !request.op.only_reads() {
            self.tracking.threshold.check(request.offset.saturating_add(request.len));
            if self.has_bitmaps()
                && (self.discards || request.op != Op::Discard)
                && let Some(me) = self.me.upgrade()
            {
                self.writes.begin(&mut request, me);
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

impl Completion for TrackedChannel {
    fn complete(&self, tag: u32, result: Result<(), Errno>, bufs: IoBufs) {
        let Some(mut write) = self.writes.end(tag) else { return };
        // Not earlier: what is copied between the mark and the write would be the old data.
        note(&self.bitmaps.borrow(), write.offset, write.len);
        write.owed.send(result, bufs);
    }
}
