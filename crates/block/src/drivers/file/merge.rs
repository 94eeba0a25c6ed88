//! Requests that continue each other become one operation.
//!
//! A guest that reads or writes a disk from front to back sends its requests one behind the other, and
//! what an operation costs (its way through the file system, the block layer and the device) is nearly
//! the same for 4 KiB and for 256. Those of one section are gathered here: each continues the one
//! before it, where it can. Nobody waits: the section's end submits what there is.

use event_loop::{IoBufs, IoOp};

use super::plan::MAX_SEGMENTS;

/// Bytes of an operation that more is added to, at most.
///
/// All requests of an operation are answered when the last of its bytes is there, and a device works
/// on several operations at a time only if there are several: so not without limit.
const MAX_BYTES: u64 = 256 * 1024;

/// Requests that are one operation. One alone is a simple request; several are in slots, a list linked by
/// `merged_with`.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) op: IoOp,
    pub(crate) first: u32,
    pub(crate) last: u32,
    /// The memory of all.
    pub(crate) bufs: IoBufs,
}

impl Run {
    /// A request alone.
    #[inline]
    pub(crate) fn new(op: IoOp, token: u32, bufs: IoBufs) -> Self {
        Run { op, first: token, last: token, bufs }
    }

    /// Whether a request continues the last one.
    #[inline]
    pub(crate) fn is_continued_by(&self, op: IoOp, bufs: &IoBufs) -> bool {
        let len = self.bufs.len() as u64;
        let adjacent = match (self.op, op) {
            (IoOp::Read { offset }, IoOp::Read { offset: next }) => next == offset + len,
            (IoOp::Write { offset, dsync: a }, IoOp::Write { offset: next, dsync: b }) => {
                next == offset + len && a == b
            }
            _ => false,
        };
        adjacent
            && len + bufs.len() as u64 <= MAX_BYTES
            && self.bufs.iovecs().len() + bufs.iovecs().len() <= MAX_SEGMENTS
            && self.bufs.has_owner_of(bufs)
    }
}
