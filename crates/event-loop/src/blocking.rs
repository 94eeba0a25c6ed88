//! Operations carried out with blocking system calls, on pool threads.

#![allow(unsafe_code)]

use std::io;
use std::marker::PhantomData;
use std::os::fd::{BorrowedFd, RawFd};

use crate::op::IoOp;
use crate::slots::InFlight;

/// The first segment of a call's buffers, for the call's result.
///
/// See [`BlockingCall`](crate::BlockingCall).
pub struct CallMemory<'a> {
    base: *mut u8,
    len: usize,
    _operation: PhantomData<&'a BlockingOp>,
}

impl CallMemory<'_> {
    /// Returns the segment's length in bytes: 0 for an operation without buffers.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Writes `bytes` from byte `at` of the segment on, as many as there is room for.
    pub fn put(&mut self, at: usize, bytes: &[u8]) {
        let len = bytes.len().min(self.len.saturating_sub(at));
        if len > 0 {
            // SAFETY: inside the segment, which is writable, see `BlockingOp::new`.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.add(at), len) };
        }
    }
}

/// An operation for a pool thread. The slot on the loop keeps file and memory alive.
pub(crate) struct BlockingOp {
    fd: RawFd,
    op: IoOp,
    segments: *const libc::iovec,
    count: i32,
}

// SAFETY: the pointers lead to memory that the loop's slot owns until the operation's completion, which
// comes after `run`. Nothing else accesses the description of the segments meanwhile.
unsafe impl Send for BlockingOp {}

impl BlockingOp {
    /// The caller keeps `in_flight` in its slot until `run`'s result has come back.
    pub(crate) fn new(in_flight: &InFlight) -> Self {
        let segments = in_flight.bufs.iovecs();
        BlockingOp {
            fd: in_flight.file.raw_fd(),
            op: in_flight.op,
            segments: segments.as_ptr(),
            count: i32::try_from(segments.len()).unwrap_or(i32::MAX),
        }
    }

    /// An operation that fails without an effect.
    #[cfg(test)]
    pub(crate) fn nothing() -> Self {
        let op = IoOp::Fsync { data_only: true };
        BlockingOp { fd: -1, op, segments: std::ptr::null(), count: 0 }
    }

    /// Carries out the operation. Returns a count, or a negated errno.
    pub(crate) fn run(&self) -> i32 {
        loop {
            let result = match self.op {
                IoOp::Call { call, offset, len } => {
                    // SAFETY: the descriptor is open, see `new`.
                    let file = unsafe { BorrowedFd::borrow_raw(self.fd) };
                    (call.run)(file, offset, len, &mut self.memory())
                }
                // Not reached: commands need a ring.
                IoOp::Command { .. } => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
                IoOp::Read { .. }
                | IoOp::Write { .. }
                | IoOp::Fsync { .. }
                | IoOp::Fallocate { .. } => match self.call() {
                    -1 => Err(io::Error::last_os_error()),
                    n => Ok(n.unsigned_abs()),
                },
            };
            let result = match result {
                Ok(n) => i32::try_from(n).unwrap_or(i32::MAX),
                Err(error) => -error.raw_os_error().unwrap_or(libc::EIO),
            };
            if result != -libc::EINTR {
                return result;
            }
        }
    }

    fn memory(&self) -> CallMemory<'_> {
        let (mut base, mut len) = (std::ptr::null_mut(), 0);
        if self.count > 0 {
            // SAFETY: there is a segment, and its description is valid, see `new`.
            let segment = unsafe { *self.segments };
            (base, len) = (segment.iov_base.cast(), segment.iov_len);
        }
        CallMemory { base, len, _operation: PhantomData }
    }

    fn call(&self) -> isize {
        let off = u64::cast_signed;
        // SAFETY: the descriptor and the memory of the segments stay valid, see `new`. Each call gets the
        // arguments that its manual page requires.
        unsafe {
            match self.op {
                IoOp::Read { offset } => {
                    libc::preadv(self.fd, self.segments, self.count, off(offset))
                }
                IoOp::Write { offset, dsync } => {
                    let flags = if dsync { libc::RWF_DSYNC } else { 0 };
                    libc::pwritev2(self.fd, self.segments, self.count, off(offset), flags)
                }
                IoOp::Fsync { data_only: true } => libc::fdatasync(self.fd) as isize,
                IoOp::Fsync { data_only: false } => libc::fsync(self.fd) as isize,
                IoOp::Fallocate { mode, offset, len } => {
                    libc::fallocate(self.fd, mode, off(offset), off(len)) as isize
                }
                // Handled by `run`.
                IoOp::Call { .. } | IoOp::Command { .. } => 0,
            }
        }
    }
}
