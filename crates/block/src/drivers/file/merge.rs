//! Requests that continue each other become one operation.
//!
//! A guest that reads or writes a disk from front to back sends its requests one behind the other, and
//! what an operation costs (its way through the file system, the block layer and the device) is nearly
//! the same for 4 KiB and for 256. Those of one section are gathered here: each continues the one
//! before it, where it can. Nobody waits: the section's end submits what there is.

use event_loop::{IoBufs, IoOp};

/// Bytes of an operation that more is added to, at most.
///
/// All requests of an operation are answered when the last of its bytes is there, and a device works
/// on several operations at a time only if there are several: so not without limit.
const MAX_BYTES: u64 = 256 * 1024;
/// `UIO_MAXIOV`: segments that a system call takes at once.
const MAX_SEGMENTS: usize = 1024;

/// Requests, in slots, that are one operation: a list, linked by `merged_with`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Run {
    pub(crate) op: IoOp,
    pub(crate) first: u32,
    pub(crate) last: u32,
    /// Bytes of all.
    pub(crate) len: u64,
    segments: usize,
}

impl Run {
    /// A request alone.
    pub(crate) fn new(op: IoOp, token: u32, len: u64, segments: usize) -> Self {
        Run { op, first: token, last: token, len, segments }
    }

    /// Whether a request continues the last one. (Whether their memory has one owner is for the caller
    /// to see.)
    #[inline]
    pub(crate) fn is_continued_by(&self, op: IoOp, bufs: &IoBufs) -> bool {
        let adjacent = match (self.op, op) {
            (IoOp::Read { offset }, IoOp::Read { offset: next }) => next == offset + self.len,
            (IoOp::Write { offset, dsync: a }, IoOp::Write { offset: next, dsync: b }) => {
                next == offset + self.len && a == b
            }
            _ => false,
        };
        adjacent
            && self.len + bufs.len() as u64 <= MAX_BYTES
            && self.segments + bufs.iovecs().len() <= MAX_SEGMENTS
    }

    /// Adds a request that continues the last one.
    pub(crate) fn add(&mut self, token: u32, len: u64, segments: usize) {
        self.last = token;
        self.len += len;
        self.segments += segments;
    }
}
