//! Requests that continue each other become one operation.
//!
//! A guest that reads or writes a disk sequentially sends adjacent requests. The cost of an operation
//! (file system, block layer, device) is nearly the same for 4 KiB and for 256 KiB. So adjacent requests
//! of one section become one operation. No request waits for others: the end of the section submits
//! what has been gathered.

use event_loop::{IoBufs, IoOp};

use super::plan::MAX_SEGMENTS;

/// Largest merged operation in bytes.
///
/// All its requests are answered when its last byte has arrived, and a device works in parallel only on
/// several operations, so merging has a limit.
const MAX_BYTES: u64 = 256 * 1024;

/// Requests that are one operation. A single one is a simple request; several are slots in a list linked
/// by `merged_with`.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) op: IoOp,
    pub(crate) first: u32,
    pub(crate) last: u32,
    /// The memory of all requests.
    pub(crate) bufs: IoBufs,
}

impl Run {
    /// A run of one request.
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
