//! Carrying out a simulated operation, for real.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::os::fd::{BorrowedFd, RawFd};

use super::{Pending, Verdict};
use crate::ring::RingOp;

/// What memory holds that the kernel might still write to.
const GARBAGE: u8 = 0xa5;

/// A read's or write's segments; none of all others.
pub(super) fn segments(op: &RingOp) -> Vec<libc::iovec> {
    match *op {
        RingOp::Rw { segment, .. } => vec![segment],
        RingOp::RwVectored { segments, count, .. } if count > 0 => {
            // SAFETY: `Ring::push`'s caller keeps the description valid until the completion.
            unsafe { std::slice::from_raw_parts(segments, count as usize) }.to_vec()
        }
        _ => Vec::new(),
    }
}

impl Pending {
    /// Writes garbage where the operation is to read into.
    pub(super) fn scribble(&self) {
        if let RingOp::Rw { write: false, .. } | RingOp::RwVectored { write: false, .. } = self.op {
            for v in segments(&self.op) {
                // SAFETY: `Ring::push`'s caller lets us write there until the completion.
                unsafe { std::ptr::write_bytes(v.iov_base.cast::<u8>(), GARBAGE, v.iov_len) };
            }
        }
    }

    /// Does it, as far as the verdict lets. A count, or a negated errno.
    pub(super) fn carry_out(&self, durable: &mut HashMap<RawFd, Vec<u8>>) -> i32 {
        if let Verdict::Fail(errno) = self.verdict {
            return -errno;
        }
        let result = match self.op {
            RingOp::Rw { write, offset, rw_flags, .. }
            | RingOp::RwVectored { write, offset, rw_flags, .. } => {
                self.transfer(write, offset, rw_flags)
            }
            // SAFETY: no memory is involved; the descriptor is open, by `Ring::push`'s contract.
            RingOp::Fsync { .. } => errno_or(unsafe { libc::fsync(self.fd) } as isize),
            RingOp::Fallocate { mode, offset, len, .. } => self.fallocate(mode, offset, len),
            _ => -libc::EINVAL,
        };
        if result >= 0
            && let Some(durable) = durable.get_mut(&self.fd)
        {
            self.make_durable(result as usize, durable);
        }
        result
    }

    fn transfer(&self, write: bool, offset: u64, rw_flags: i32) -> i32 {
        let mut left = match self.verdict {
            Verdict::Short(len) => usize::try_from(len).unwrap_or(usize::MAX),
            _ => usize::MAX,
        };
        let mut segments = segments(&self.op);
        for v in &mut segments {
            v.iov_len = v.iov_len.min(left);
            left -= v.iov_len;
        }
        let (base, count) = (segments.as_ptr(), segments.len() as i32);
        let offset = offset.cast_signed();
        // SAFETY: the segments are those of `Ring::push`'s caller, or parts of them, valid until the
        // completion.
        errno_or(unsafe {
            if write {
                libc::pwritev2(self.fd, base, count, offset, rw_flags)
            } else {
                libc::preadv2(self.fd, base, count, offset, rw_flags)
            }
        })
    }

    fn fallocate(&self, mode: i32, offset: u64, len: u64) -> i32 {
        let (offset, len) = (offset.cast_signed(), len.cast_signed());
        // Memory files cannot zero a range, but punching and allocating it comes to the same.
        let zeroing = mode & libc::FALLOC_FL_ZERO_RANGE != 0;
        let keep_size = mode & libc::FALLOC_FL_KEEP_SIZE;
        let steps: &[i32] = if zeroing {
            &[libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, keep_size]
        } else {
            &[mode]
        };
        for mode in steps {
            // SAFETY: no memory is involved; the descriptor is open, as above.
            let result = errno_or(unsafe { libc::fallocate(self.fd, *mode, offset, len) } as isize);
            if result < 0 {
                return result;
            }
        }
        0
    }

    /// Keeps what a power cut would leave. A write with `RWF_DSYNC` makes its own bytes durable, an
    /// fsync all.
    fn make_durable(&self, done: usize, durable: &mut Vec<u8>) {
        let (offset, len) = match self.op {
            RingOp::Fsync { .. } => (0, self.file_size()),
            RingOp::Rw { write: true, offset, rw_flags, .. }
            | RingOp::RwVectored { write: true, offset, rw_flags, .. }
                if rw_flags & libc::RWF_DSYNC != 0 =>
            {
                (offset as usize, done)
            }
            _ => return,
        };
        if matches!(self.op, RingOp::Fsync { .. }) {
            durable.clear();
        }
        if durable.len() < offset + len {
            durable.resize(offset + len, 0);
        }
        let bytes = &mut durable[offset..offset + len];
        // SAFETY: `bytes` is ours alone and as long as we say.
        unsafe {
            libc::pread(self.fd, bytes.as_mut_ptr().cast(), bytes.len(), offset as i64);
        }
    }

    fn file_size(&self) -> usize {
        // SAFETY: open until the completion, by `Ring::push`'s contract.
        let fd = unsafe { BorrowedFd::borrow_raw(self.fd) };
        nix::sys::stat::fstat(fd).map_or(0, |stat| stat.st_size as usize)
    }
}

fn errno_or(result: isize) -> i32 {
    match result {
        -1 => -std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
        n => i32::try_from(n).unwrap_or(i32::MAX),
    }
}
