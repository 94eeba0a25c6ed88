//! I/O operations and their targets.

use std::cell::Cell;
use std::ffi::CStr;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::rc::{Rc, Weak};
use std::sync::Arc;

pub use crate::blocking::CallMemory;
use crate::buf::IoBufs;
use crate::event_loop::Inner;
pub use crate::ring::DeviceCommand;

/// An operation on a [`LoopFile`].
///
/// On a socket, reads and writes are recv(2) and send(2). On a socket or a pipe, offsets are ignored, a read completes
/// with the first bytes that arrive, and with 0 at the end of the stream. The [`Engine`] makes no difference, and no
/// thread waits. A non-blocking socket waits, too; a non-blocking pipe may complete with `EAGAIN`.
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
    /// Wait until the file is ready, poll(2). The result is the mask of `POLL*` bits with which the file is.
    ///
    /// The [`Engine`] makes no difference.
    Poll {
        /// `POLL*` bits to wait for.
        events: u32,
    },
    /// A command that the loop does not know, to the file's driver. Carried out by io_uring only.
    ///
    /// It may stay in flight for any time. [`EventLoop::cancel`](crate::EventLoop::cancel) does not end it, and the
    /// loop's end waits for it: its driver has to complete it.
    Command {
        /// The command.
        command: DeviceCommand,
        /// The first 8 bytes of the command, in native byte order. The address of the first segment follows.
        head: u64,
    },
    /// A call that the loop does not know, on a range of the file. Always carried out by a pool thread.
    Call {
        /// The call.
        call: &'static BlockingCall,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
}

/// A blocking call of the layer above, such as an ioctl(2).
///
/// Two calls are equal if they are one static.
///
/// ```
/// use std::sync::Arc;
/// use event_loop::{BlockingCall, Engine, EventLoop, IoBufs, IoOp, LoopConfig};
///
/// static SUM: BlockingCall = BlockingCall { name: c"sum", run: |_, a, b, _| Ok((a + b) as usize) };
///
/// let event_loop = EventLoop::new(LoopConfig::default())?;
/// let file = event_loop.register_file(Arc::new(std::fs::File::open("/dev/null")?.into()));
/// let sum = IoOp::Call { call: &SUM, offset: 2, len: 3 };
/// let done = event_loop.operate(&file, sum, Engine::Uring, IoBufs::new());
/// assert_eq!(event_loop.block_on(done)?.0?, 5);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct BlockingCall {
    /// The name, for trace points.
    pub name: &'static CStr,
    /// Carries out the call on `offset` and `len` of the file, in bytes. Called on a pool thread. The memory
    /// is a copy of the first segment of the operation's buffers. Returns a count; an error is the operation's result.
    /// `EINTR` repeats the call.
    pub run: fn(BorrowedFd<'_>, u64, u64, &mut CallMemory<'_>) -> io::Result<usize>,
}

impl PartialEq for BlockingCall {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for BlockingCall {}

impl fmt::Debug for BlockingCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.name)
    }
}

/// The mechanism that carries out an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// The loop's ring.
    Uring,
    /// Linux AIO, for files opened with `O_DIRECT`. With other files the loop blocks at submission.
    /// Operations without a Linux AIO command use the thread pool.
    Native,
    /// The loop's thread pool, with blocking system calls.
    Threads,
}

/// An open file as one loop uses it.
///
/// Cheap to clone; operations in flight keep it open.
#[derive(Clone)]
pub struct LoopFile(pub(crate) Rc<FileInner>);

pub(crate) struct FileInner {
    /// The loop that the file is registered with.
    pub(crate) inner: Weak<Inner>,
    pub(crate) fd: Arc<OwnedFd>,
    /// The file's entry in the ring's table, released when dropped.
    pub(crate) index: Option<u32>,
    pub(crate) is_socket: bool,
    /// Reads and writes wait in the ring, without offsets: a socket or a pipe.
    pub(crate) is_stream: bool,
    /// Linux AIO has refused to sync this file, as it does for all files before Linux 4.18.
    pub(crate) no_aio_fsync: Cell<bool>,
}

impl Drop for FileInner {
    fn drop(&mut self) {
        if let Some(index) = self.index
            && let Some(inner) = self.inner.upgrade()
            && let Ok(mut ring) = inner.ring.try_borrow_mut()
        {
            ring.unregister_file(index);
        }
    }
}

impl LoopFile {
    /// Whether the file is registered with this loop.
    #[inline]
    pub(crate) fn is_of(&self, inner: &Rc<Inner>) -> bool {
        std::ptr::eq(self.0.inner.as_ptr(), Rc::as_ptr(inner))
    }

    pub(crate) fn raw_fd(&self) -> RawFd {
        self.0.fd.as_raw_fd()
    }

    /// Returns whether both are clones of one file.
    pub(crate) fn is_same(&self, other: &LoopFile) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }

    /// Sends to a socket at once and returns the number of bytes taken.
    ///
    /// Nothing is in flight afterwards, and no completion comes. For messages that a socket nearly always
    /// takes, such as replies. Send the rest by an [`IoOp::Write`], which waits for room.
    ///
    /// # Errors
    ///
    /// sendmsg(2) with `MSG_DONTWAIT`: `EAGAIN` if the socket takes nothing now, `ENOTSOCK` for other files.
    pub fn send_now(&self, bufs: &IoBufs) -> io::Result<usize> {
        crate::ring::send_now(self.0.fd.as_fd(), bufs)
    }

    /// Whether `op` waits for another program. Any ring carries that out, as a blocked pool thread could not
    /// be stopped.
    #[inline]
    pub(crate) fn waits_for(&self, op: IoOp) -> bool {
        match op {
            IoOp::Read { .. } | IoOp::Write { .. } => self.0.is_stream,
            IoOp::Poll { .. } => true,
            _ => false,
        }
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
            if self.0.index.is_some() { ", fixed" } else { "" }
        )
    }
}

/// Returns the result of an [`IoTarget`]'s operation as a count.
///
/// For operations that transfer bytes, the count is theirs.
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

/// Receives the completions of its operations and timers.
///
/// Nothing is allocated per operation: a target with many operations keeps them in its own slots, and the
/// token identifies the slot.
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
/// Called on the loop's thread, once per operation, with no borrow of the loop held, and never within the
/// call that submitted the operation. An implementor may submit, add and remove freely.
pub trait IoTarget {
    /// Takes the completion of the operation that was submitted under `token`.
    ///
    /// `result` is the system call's return value, a count or a negated errno: see [`count`]. The memory is
    /// returned in `bufs`.
    fn complete(&self, token: u32, result: i32, bufs: IoBufs);
}
