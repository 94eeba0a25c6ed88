//! I/O operations as the layers above name them.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;

use crate::buf::IoBufs;

/// An operation on a [`LoopFile`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoOp {
    /// Fill the buffers from byte `offset` on, preadv(2). The result counts bytes; it may be short.
    Read {
        /// First byte.
        offset: u64,
    },
    /// Write the buffers from byte `offset` on, pwritev2(2). The result counts bytes.
    Write {
        /// First byte.
        offset: u64,
        /// `RWF_DSYNC`: on stable storage before the completion.
        dsync: bool,
    },
    /// fsync(2), or fdatasync(2).
    Fsync {
        /// Skip metadata that reading the data back does not need.
        data_only: bool,
    },
    /// fallocate(2).
    Fallocate {
        /// `FALLOC_FL_*`.
        mode: i32,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// The `BLKDISCARD` ioctl of block devices. Always by a pool thread: it blocks.
    BlkDiscard {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// The `BLKZEROOUT` ioctl of block devices. Always by a pool thread: it blocks.
    BlkZeroOut {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
}

/// Who carries out an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// The loop's ring.
    Uring,
    /// Linux AIO, for files opened with `O_DIRECT`: on others the loop waits for the disk as it
    /// submits. What there is no command for goes to the thread pool.
    Native,
    /// The loop's thread pool, with blocking system calls.
    Threads,
}

/// An open file as one loop uses it. Cheap to clone; operations in flight keep it open.
#[derive(Clone)]
pub struct LoopFile(pub(crate) Rc<FileInner>);

pub(crate) struct FileInner {
    pub(crate) fd: Arc<OwnedFd>,
    /// Index in the ring's table of registered files, and who gives it back.
    pub(crate) fixed: Option<crate::event_loop::FixedFile>,
}

impl LoopFile {
    pub(crate) fn raw_fd(&self) -> RawFd {
        self.0.fd.as_raw_fd()
    }
}

impl AsFd for LoopFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}

impl fmt::Debug for LoopFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "LoopFile({}{})",
            self.raw_fd(),
            if self.0.fixed.is_some() { ", fixed" } else { "" }
        )
    }
}

/// Who gets the completions of its operations and timers.
///
/// Called on the loop's thread, once per operation, never from within the call that submitted it,
/// with no borrow of the loop held: an implementor may submit, add and remove as it likes.
pub trait IoTarget {
    /// The operation submitted under `token` is done: `result` is what the system call of the same
    /// name would return, a count or a negated errno. The memory comes back in `bufs`.
    fn complete(&self, token: u32, result: i32, bufs: IoBufs);
}
