//! Writes that a filter handles twice: on their way to the node below, and when they are answered.

use std::cell::RefCell;
use std::rc::Rc;

use crate::request::{CompletionGuard, Request, RequestOwner};
use event_loop::Slab;

/// The watched writes in flight, by tag.
#[derive(Default)]
pub(crate) struct WatchedWrites(RefCell<Slab<WatchedWrite>>);

/// A write that answers the filter first.
pub(crate) struct WatchedWrite {
    /// The original answer.
    pub(crate) owed: CompletionGuard,
    /// First byte.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) len: u64,
}

impl WatchedWrites {
    /// Directs the answer of a request to `filter`, which calls [`end`](Self::end).
    pub(crate) fn begin(&self, request: &mut Request, filter: Rc<dyn RequestOwner>) {
        let mut writes = self.0.borrow_mut();
        let (offset, len) = (request.offset, request.len);
        let owed = request.intercept(&filter, writes.next_tag());
        writes.insert(WatchedWrite { owed, offset, len });
    }

    /// Removes and returns the write with this tag.
    pub(crate) fn end(&self, tag: u32) -> Option<WatchedWrite> {
        self.0.borrow_mut().remove(tag)
    }
}
