//! Operations carried out with blocking system calls, on pool threads.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{BorrowedFd, RawFd};

use crate::op::IoOp;
use crate::slots::InFlight;

/// A copy of the first segment of a call's buffers, for the call's result.
///
/// The loop copies it back before the operation completes, so that only the loop's thread accesses the segment. See
/// [`BlockingCall`](crate::BlockingCall).
#[derive(Debug)]
pub struct CallMemory<'a>(&'a mut [u8]);

impl CallMemory<'_> {
    /// Returns the segment's length in bytes: 0 for an operation without buffers.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Writes `bytes` from byte `at` of the segment on, as many as there is room for.
    pub fn put(&mut self, at: usize, bytes: &[u8]) {
        let room = self.0.get_mut(at..).unwrap_or_default();
        room.iter_mut().zip(bytes).for_each(|(place, byte)| *place = *byte);
    }
}

/// An operation for a pool thread. The slot on the loop keeps file and memory alive.
pub(crate) struct BlockingOp {
    fd: RawFd,
    op: IoOp,
    segments: *const libc::iovec,
    count: i32,
    /// Of an [`IoOp::Call`]: see [`CallMemory`].
    answer: Answer,
}

/// What a call has put into its copy of the first segment; `None`: there is none.
pub(crate) type Answer = Option<Box<Vec<u8>>>;

// SAFETY: the pointers lead to memory that the loop's slot owns until the operation's completion, which
// comes after `run`. Nothing else accesses the description of the segments meanwhile.
unsafe impl Send for BlockingOp {}

impl BlockingOp {
    /// The caller keeps `in_flight` in its slot until `run`'s result has come back.
    pub(crate) fn new(in_flight: &InFlight) -> Self {
        let segments = in_flight.bufs.iovecs();
        let answer = match (in_flight.op, segments.first()) {
            (IoOp::Call { .. }, Some(first)) => {
                let mut bytes = vec![0; first.iov_len];
                in_flight.bufs.copy_out(0, &mut bytes);
                Some(Box::new(bytes))
            }
            _ => None,
        };
        BlockingOp {
            fd: in_flight.file.raw_fd(),
            op: in_flight.op,
            segments: segments.as_ptr(),
            count: i32::try_from(segments.len()).unwrap_or(i32::MAX),
            answer,
        }
    }

    /// An operation that fails without an effect.
    #[cfg(test)]
    pub(crate) fn nothing() -> Self {
        let op = IoOp::Fsync { data_only: true };
        BlockingOp { fd: -1, op, segments: std::ptr::null(), count: 0, answer: None }
    }

    /// Carries out the operation. Returns a count, or a negated errno, and a call's answer.
    pub(crate) fn run(mut self) -> (i32, Answer) {
        loop {
            let result = match self.op {
                IoOp::Call { call, offset, len } => {
                    // SAFETY: the descriptor is open, see `new`.
                    let file = unsafe { BorrowedFd::borrow_raw(self.fd) };
                    let memory = self.answer.as_deref_mut().map_or(&mut [][..], Vec::as_mut_slice);
                    (call.run)(file, offset, len, &mut CallMemory(memory))
                }
                // Not reached: these need a ring.
                IoOp::Command { .. } | IoOp::Poll { .. } => {
                    Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
                }
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
                return (result, self.answer);
            }
        }
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
                IoOp::Call { .. } | IoOp::Command { .. } | IoOp::Poll { .. } => 0,
            }
        }
    }
}
