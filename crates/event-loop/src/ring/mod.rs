//! The narrow trait between the loop and whatever carries out its operations.
//!
//! `uring` is the real thing, `epoll` what is left where there is no io_uring, `sim` (a feature) a ring
//! of memory files with virtual time and seeded faults. The loop above is the same for all three.

#![allow(unsafe_code)]

mod buffers;
pub(crate) mod epoll;
mod messages;
mod restrict;
pub mod setup;
#[cfg(any(test, feature = "sim"))]
pub mod sim;
mod socket;
pub(crate) mod uring;
mod workers;

use std::io;
use std::os::fd::RawFd;

pub(crate) use socket::send_now;

/// An operation as a ring takes it: raw descriptors and pointers, which the loop's slots keep alive.
#[derive(Debug, Clone, Copy)]
pub enum RingOp {
    /// One segment read or written at an offset.
    Rw {
        /// The file.
        file: RingFile,
        /// Memory to memory, or memory to file.
        write: bool,
        /// The file is a socket: offset and flags mean nothing.
        socket: bool,
        /// The segment.
        segment: libc::iovec,
        /// First byte in the file.
        offset: u64,
        /// `RWF_*`.
        rw_flags: i32,
        /// The place of the registered buffer that the segment lies in: a hint.
        buffer: Option<u16>,
    },
    /// Several segments read or written at an offset.
    RwVectored {
        /// The file.
        file: RingFile,
        /// Memory to memory, or memory to file.
        write: bool,
        /// The file is a socket: offset and flags mean nothing.
        socket: bool,
        /// The first segment's description.
        segments: *const libc::iovec,
        /// Number of segments, at most 1024 (`UIO_MAXIOV`).
        count: u32,
        /// First byte in the file.
        offset: u64,
        /// `RWF_*`.
        rw_flags: i32,
        /// The place of the registered buffer that all segments lie in, for rings with
        /// [`has_vectored_fixed`](Ring::has_vectored_fixed): a hint.
        buffer: Option<u16>,
    },
    /// fsync(2) or fdatasync(2).
    Fsync {
        /// The file.
        file: RingFile,
        /// fdatasync.
        data_only: bool,
    },
    /// fallocate(2).
    Fallocate {
        /// The file.
        file: RingFile,
        /// `FALLOC_FL_*`.
        mode: i32,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Tell when `fd` becomes ready: once, or (multishot) each time it becomes ready anew.
    PollAdd {
        /// The descriptor.
        fd: RawFd,
        /// `POLL*` bits wanted.
        events: u32,
        /// Stay armed.
        multishot: bool,
    },
    /// Stop a poll: it completes with `-ECANCELED`.
    PollRemove {
        /// The poll's.
        user_data: u64,
    },
    /// Try to cancel an operation: it completes with `-ECANCELED` if that came in time.
    Cancel {
        /// The operation's.
        user_data: u64,
    },
}

/// A file as the ring knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RingFile {
    /// By descriptor.
    Fd(RawFd),
    /// By index in the ring's table of registered files.
    Fixed(u32),
}

/// A completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// As given with the operation.
    pub user_data: u64,
    /// A count or mask, or a negated errno.
    pub result: i32,
    /// More completions of the same (multishot) operation follow.
    pub more: bool,
}

/// How long a call of [`Ring::enter`] may wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Submit, collect what is there, do not wait.
    No,
    /// Wait for a completion, at most this many nanoseconds.
    For(u64),
    /// Wait for a completion.
    Forever,
}

/// What carries out a loop's operations. Not `Send`: one thread enters a ring (contract E3).
pub trait Ring {
    /// Queues an operation for the next [`enter`](Ring::enter). `false` when there is no room: enter
    /// and try again.
    ///
    /// # Safety
    ///
    /// Descriptors and memory that `op` names (the segments' descriptions included) stay valid until
    /// its last completion was taken by [`reap`](Ring::reap), and no Rust reference to memory that
    /// is written to exists meanwhile.
    unsafe fn push(&mut self, op: &RingOp, user_data: u64) -> bool;

    /// Operations queued and not yet taken over by [`enter`](Ring::enter).
    fn queued(&mut self) -> u32;

    /// Submits what is queued and, in the same system call, waits. Interrupted waits and full
    /// completion queues are no errors: the loop comes again.
    fn enter(&mut self, wait: Wait) -> io::Result<()>;

    /// Whether there are completions to [`reap`](Ring::reap), or an [`enter`](Ring::enter) without
    /// waiting would bring some: flagged task work, an overflown completion queue. No system call.
    fn ready(&mut self) -> Ready;

    /// Appends completions to `into`, oldest first, as far as its capacity goes.
    fn reap(&mut self, into: &mut Vec<Completion>);

    /// A descriptor that polls as readable when there are completions, or [`Ready::NeedsEnter`] has
    /// become true, if there is one. It stays open as long as the ring.
    fn pollable_fd(&self) -> Option<RawFd>;

    /// Whether this ring does file I/O; where not, the thread pool does. Reads and writes of
    /// sockets are any ring's.
    fn does_file_io(&self) -> bool;

    /// Registers a file, where the ring has room in its table.
    fn register_file(&mut self, fd: RawFd) -> Option<u32>;

    /// Gives a registered file's place back. Operations in flight keep the file.
    fn unregister_file(&mut self, index: u32);

    /// Takes `count` places in a row in the table of registered buffers; returns the first.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](io::ErrorKind::Unsupported): this ring registers none. `ENOSPC`: not so many
    /// are free. Others: those of io_uring_register(2), there is no table.
    fn reserve_buffers(&mut self, _count: u32) -> io::Result<u32> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Registers memory, at most 1 GiB, at a place that was taken.
    ///
    /// # Errors
    ///
    /// Those of io_uring_register(2); the place is still taken.
    fn register_buffer(&mut self, _index: u32, _memory: libc::iovec) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Gives a place back, and unregisters what is registered there.
    fn release_buffer(&mut self, _index: u32) {}

    /// Whether operations on several segments in one registered buffer are any different here.
    fn has_vectored_fixed(&self) -> bool {
        false
    }
}

/// Whether an operation that failed with this errno may be tried again as it is.
pub(crate) fn is_transient(errno: i32) -> bool {
    matches!(errno, libc::EINTR | libc::EAGAIN | libc::ENOMEM | libc::ECANCELED)
}

/// See [`Ring::ready`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ready {
    /// Nothing to be had without waiting.
    Nothing,
    /// Completions are in the queue.
    Completions,
    /// Something comes with the next [`Ring::enter`], without waiting.
    NeedsEnter,
}
