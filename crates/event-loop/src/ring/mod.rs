//! The trait between the loop and what carries out its operations.
//!
//! `uring` is io_uring, `epoll` its replacement where it is missing, and `sim` (a feature) a ring of memory
//! files with virtual time and seeded faults. The loop above is the same for all three.

#![allow(unsafe_code)]

mod buffers;
mod command;
pub(crate) mod epoll;
mod messages;
mod now;
mod restrict;
pub mod setup;
#[cfg(any(test, feature = "sim"))]
pub mod sim;
mod socket;
pub(crate) mod uring;
mod workers;

use std::io;
use std::os::fd::RawFd;

pub use command::{DeviceCommand, command_and_wait};
pub use now::{read_now, write_now};
pub(crate) use socket::send_now;

/// An operation in a ring's terms: raw descriptors and pointers.
///
/// The loop's slots keep both valid.
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
        /// Table index of the registered buffer that contains the segment: a hint.
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
        /// Table index of the registered buffer that contains all segments, for rings with
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
    /// A command to a file's driver: `IORING_OP_URING_CMD`, with 16 bytes for the driver.
    Command {
        /// The file.
        file: RingFile,
        /// The driver's number of the command.
        code: u32,
        /// The first 8 bytes, in native byte order.
        head: u64,
        /// The other 8 bytes: an address.
        address: *mut libc::c_void,
    },
    /// Completes when `fd` becomes ready: once, or (multishot) each time it becomes ready.
    PollAdd {
        /// The descriptor.
        fd: RawFd,
        /// `POLL*` bits wanted.
        events: u32,
        /// Stay armed.
        multishot: bool,
    },
    /// Stops a poll, which then completes with `-ECANCELED`.
    PollRemove {
        /// The `user_data` of the poll.
        user_data: u64,
    },
    /// Tries to cancel an operation, which then completes with `-ECANCELED`.
    Cancel {
        /// The `user_data` of the operation.
        user_data: u64,
    },
}

/// A file in a ring's terms.
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
    /// The number that was given with the operation.
    pub user_data: u64,
    /// A count or mask, or a negated errno.
    pub result: i32,
    /// More completions of the same (multishot) operation follow.
    pub more: bool,
}

/// How long a call of [`Ring::enter`] may wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Submit and collect available completions without waiting.
    No,
    /// Wait for a completion, at most this many nanoseconds.
    For(u64),
    /// Wait for a completion.
    Forever,
}

/// Carries out a loop's operations.
///
/// Not `Send`: one thread enters a ring (one-thread contract).
pub trait Ring {
    /// Queues an operation for the next [`enter`](Ring::enter).
    ///
    /// Completions of the operation have `user_data`. Returns `false` if the queue is full: enter and try
    /// again.
    ///
    /// # Safety
    ///
    /// Descriptors and memory that `op` names (the segments' descriptions included) stay valid until
    /// its last completion was taken by [`reap`](Ring::reap), and no Rust reference to memory that
    /// is written to exists meanwhile.
    unsafe fn push(&mut self, op: &RingOp, user_data: u64) -> bool;

    /// Returns the number of operations queued and not yet submitted.
    fn queued(&mut self) -> u32;

    /// Submits queued operations and waits, in one system call.
    ///
    /// Interrupted waits and full completion queues are no errors: the loop calls again.
    ///
    /// # Errors
    ///
    /// Permanent errors of the system call, such as those of io_uring_enter(2). The loop then ends.
    fn enter(&mut self, wait: Wait) -> io::Result<()>;

    /// Returns whether there is something to [`reap`](Ring::reap). No system call.
    ///
    /// It may take an [`enter`](Ring::enter) without waiting to bring completions, as with flagged task work
    /// or an overflown completion queue.
    fn ready(&mut self) -> Ready;

    /// Appends completions to `into`, oldest first, up to its capacity.
    fn reap(&mut self, into: &mut Vec<Completion>);

    /// Returns a descriptor that polls as readable, if the ring has one.
    ///
    /// The descriptor is readable once there are completions, or [`ready`](Ring::ready) is
    /// [`Ready::NeedsEnter`]. It stays open as long as the ring.
    fn pollable_fd(&self) -> Option<RawFd>;

    /// Returns whether this ring does file I/O; otherwise the thread pool does.
    ///
    /// Every ring reads and writes sockets.
    fn does_file_io(&self) -> bool;

    /// Registers a file, if the ring's table has room. Returns the file's index.
    fn register_file(&mut self, fd: RawFd) -> Option<u32>;

    /// Releases a registered file's index. Operations in flight keep the file.
    fn unregister_file(&mut self, index: u32);

    /// Reserves `count` consecutive indices in the table of registered buffers.
    ///
    /// Returns the first.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](io::ErrorKind::Unsupported): this ring cannot register buffers. `ENOSPC`: not enough
    /// indices are free. Others are those of io_uring_register(2), when the table cannot be created.
    fn reserve_buffers(&mut self, _count: u32) -> io::Result<u32> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Registers memory, at most 1 GiB (2^30 bytes), at a reserved index.
    ///
    /// # Errors
    ///
    /// Those of io_uring_register(2); the index stays reserved.
    fn register_buffer(&mut self, _index: u32, _memory: libc::iovec) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Releases an index, and unregisters the buffer there.
    fn release_buffer(&mut self, _index: u32) {}

    /// Returns whether vectored operations benefit from a registered buffer.
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
    /// Nothing without waiting.
    Nothing,
    /// Completions are in the queue.
    Completions,
    /// The next [`Ring::enter`] brings completions without waiting.
    NeedsEnter,
}
