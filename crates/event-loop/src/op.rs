//! I/O operations as the layers above name them.

use std::cell::Cell;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;

use crate::buf::IoBufs;

/// An operation on a [`LoopFile`].
///
/// Sockets are read and written as by recv(2) and send(2), whatever their offset: a read completes
/// with the first bytes that come, however long that takes and even if the socket is non-blocking,
/// and with 0 at the end. No [`Engine`] makes a difference to that, nor is a thread waiting.
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
    /// Tell data from holes in a range, by lseek(2) with `SEEK_DATA` and `SEEK_HOLE`: fills the one
    /// segment of the buffers with records of 16 bytes, each two integers of 64 bits in the machine's
    /// order: how many bytes, and 0 for data or 1 for a hole. They follow each other from `offset`
    /// on, up to the range's end or as far as there is room. The result counts bytes of records.
    /// A file system that knows of no holes has data only. Always by a pool thread.
    Extents {
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
    pub(crate) is_socket: bool,
    /// Linux AIO has refused to sync it, as it does on every file before Linux 4.18.
    pub(crate) no_aio_fsync: Cell<bool>,
}

impl LoopFile {
    pub(crate) fn raw_fd(&self) -> RawFd {
        self.0.fd.as_raw_fd()
    }

    /// Whether both are clones of one.
    pub(crate) fn is_same(&self, other: &LoopFile) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }

    /// Sends to a socket what it takes now; bytes. Nothing is in flight afterwards, and no completion
    /// comes: for what a socket nearly always takes, such as replies. The rest is an
    /// [`IoOp::Write`], which waits for room.
    ///
    /// # Errors
    ///
    /// sendmsg(2) with `MSG_DONTWAIT`: `EAGAIN` when it takes nothing now, `ENOTSOCK` for other files.
    pub fn send_now(&self, bufs: &IoBufs) -> io::Result<usize> {
        crate::ring::send_now(self.0.fd.as_fd(), bufs)
    }

    /// Whether `op` reads or writes a socket, which is any ring's: a thread that does it could not
    /// be stopped.
    #[inline]
    pub(crate) fn is_socket_for(&self, op: IoOp) -> bool {
        self.0.is_socket && matches!(op, IoOp::Read { .. } | IoOp::Write { .. })
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

/// Returns the result of an [`IoTarget`]'s operation as a count, of bytes for those that transfer some.
///
/// # Errors
///
/// The operation's errno: `result` is negative.
///
/// ```
/// assert_eq!(event_loop::count(512)?, 512);
/// assert_eq!(event_loop::count(-libc::ENOSPC).unwrap_err().raw_os_error(), Some(libc::ENOSPC));
/// # Ok::<(), std::io::Error>(())
/// ```
#[inline]
pub fn count(result: i32) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(result.wrapping_neg()))
}

/// Who gets the completions of its operations and timers.
///
/// Nothing is allocated per operation: a target that serves many keeps them in slots of its own, and
/// the token says which.
///
/// ```
/// use std::cell::RefCell;
/// use std::rc::Rc;
/// use std::sync::Arc;
///
/// use event_loop::{AlignedBuf, Engine, EventLoop, IoBufs, IoOp, IoTarget, LoopConfig};
///
/// #[derive(Default)]
/// struct Slots(RefCell<[Option<(i32, IoBufs)>; 4]>);
///
/// impl IoTarget for Slots {
///     fn complete(&self, token: u32, result: i32, bufs: IoBufs) {
///         self.0.borrow_mut()[token as usize] = Some((result, bufs));
///     }
/// }
///
/// let event_loop = EventLoop::new(LoopConfig::default())?;
/// let file = event_loop.register_file(Arc::new(std::fs::File::open("/proc/self/exe")?.into()));
/// let slots = Rc::new(Slots::default());
/// let target: Rc<dyn IoTarget> = slots.clone();
/// for token in 0..4 {
///     let bufs = AlignedBuf::io_bufs(512, 512).expect("memory");
///     let read = IoOp::Read { offset: u64::from(token) * 512 };
///     event_loop.submit(&file, read, Engine::Uring, bufs, &target, token);
/// }
/// while slots.0.borrow().iter().any(Option::is_none) {
///     event_loop.run_once(true)?;
/// }
/// assert!(slots.0.borrow().iter().flatten().all(|(result, _)| *result == 512));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Called on the loop's thread, once per operation, never from within the call that submitted it,
/// with no borrow of the loop held: an implementor may submit, add and remove as it likes.
pub trait IoTarget {
    /// The operation submitted under `token` is done: `result` is what the system call of the same
    /// name would return, a count or a negated errno: see [`count`]. The memory comes back in `bufs`.
    fn complete(&self, token: u32, result: i32, bufs: IoBufs);
}
