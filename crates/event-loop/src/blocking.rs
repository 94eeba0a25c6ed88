//! Operations carried out by blocking system calls, on pool threads.

#![allow(unsafe_code)]

use std::os::fd::RawFd;

use crate::op::IoOp;
use crate::slots::InFlight;

/// `_IO(0x12, 119)` and `_IO(0x12, 127)` of linux/fs.h: both take a pair of first byte and length.
const BLKDISCARD: libc::Ioctl = 0x1277;
const BLKZEROOUT: libc::Ioctl = 0x127f;

/// An operation for another thread: the slot on the loop keeps file and memory.
pub(crate) struct BlockingOp {
    fd: RawFd,
    op: IoOp,
    segments: *const libc::iovec,
    count: i32,
}

// SAFETY: the pointers lead to memory that the loop's slot owns until the operation's completion,
// which comes after `run`; nobody else touches the segments' description meanwhile.
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

    /// An operation that fails and does no harm.
    #[cfg(test)]
    pub(crate) fn nothing() -> Self {
        let op = IoOp::Fsync { data_only: true };
        BlockingOp { fd: -1, op, segments: std::ptr::null(), count: 0 }
    }

    /// Does it. A count, or a negated errno.
    pub(crate) fn run(&self) -> i32 {
        loop {
            let result = match self.call() {
                -1 => -std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
                n => i32::try_from(n).unwrap_or(i32::MAX),
            };
            if result != -libc::EINTR {
                return result;
            }
        }
    }

    fn call(&self) -> isize {
        let off = u64::cast_signed;
        // SAFETY: the descriptor and the memory of the segments stay valid, see `new`; each call
        // gets what its manual page asks for.
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
                IoOp::BlkDiscard { offset, len } => {
                    libc::ioctl(self.fd, BLKDISCARD, &[offset, len]) as isize
                }
                IoOp::BlkZeroOut { offset, len } => {
                    libc::ioctl(self.fd, BLKZEROOUT, &[offset, len]) as isize
                }
            }
        }
    }
}
