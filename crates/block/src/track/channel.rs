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
use crate::request::{Completion, Op, Reply, Request};

pub(super) struct TrackedChannel {
    me: Weak<TrackedChannel>,
    node: Rc<dyn Channel>,
    tracking: Arc<Tracking>,
    /// As of this generation of the list.
    generation: Cell<u64>,
    bitmaps: RefCell<Bitmaps>,
    writes: RefCell<Writes>,
    /// Discards reach the node.
    discards: bool,
}

/// Writes under way, by tag.
#[derive(Default)]
struct Writes {
    slots: Vec<Option<Write>>,
    free: Vec<u32>,
}

struct Write {
    owed: Reply,
    offset: u64,
    len: u64,
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
            writes: RefCell::default(),
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

    fn watch(&self, request: &mut Request) {
        let Some(me) = self.me.upgrade() else { return };
        let (offset, len) = (request.offset, request.len);
        let mut writes = self.writes.borrow_mut();
        let tag = match writes.free.pop() {
            Some(tag) => tag,
            None => {
                writes.slots.push(None);
                writes.slots.len() as u32 - 1
            }
        };
        let owed = request.redirect(&(me as Rc<dyn Completion>), tag);
        if let Some(slot) = writes.slots.get_mut(tag as usize) {
            *slot = Some(Write { owed, offset, len });
        }
    }
}

impl Channel for TrackedChannel {
    fn submit(&self, mut request: Request) {
        if !request.op.only_reads() {
            self.tracking.threshold.check(request.offset.saturating_add(request.len));
            if self.has_bitmaps() && (self.discards || request.op != Op::Discard) {
                self.watch(&mut request);
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
        let mut writes = self.writes.borrow_mut();
        let Some(mut write) = writes.slots.get_mut(tag as usize).and_then(Option::take) else {
            return;
        };
        writes.free.push(tag);
        drop(writes);
        // Not earlier: what is copied between the mark and the write would be the old data.
        note(&self.bitmaps.borrow(), write.offset, write.len);
        write.owed.send(result, bufs);
    }
}
