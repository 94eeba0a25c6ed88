//! Carries out simulated operations on real files.

#![allow(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};

use nix::fcntl::{FcntlArg, OFlag, fcntl};

use super::storage::{InFlight, Storage};
use super::{Pending, Verdict};
use crate::ring::RingOp;

/// Contents of memory that the kernel might still write to.
const GARBAGE: u8 = 0xa5;

/// The segments of a read or write; empty for other operations.
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
    /// Writes garbage to the memory that the operation reads into.
    pub(super) fn scribble(&self) {
        if let RingOp::Rw { write: false, .. } | RingOp::RwVectored { write: false, .. } = self.op {
            for v in segments(&self.op) {
                // SAFETY: `Ring::push`'s caller lets us write there until the completion.
                unsafe { std::ptr::write_bytes(v.iov_base.cast::<u8>(), GARBAGE, v.iov_len) };
            }
        }
    }

    /// Carries out the operation, as far as the verdict permits. Returns a count, or a negated errno.
    pub(super) fn carry_out(&self, storage: &Storage) -> i32 {
        // SAFETY: open until the completion, by `Ring::push`'s contract.
        let fd = unsafe { BorrowedFd::borrow_raw(self.fd) };
        if let Verdict::Fail(errno) | Verdict::FailLate(_, errno) = self.verdict {
            // A transient error precedes the flush itself.
            let tried = !matches!(errno, libc::EAGAIN | libc::EINTR);
            if tried && matches!(self.op, RingOp::Fsync { .. }) && !is_direct(fd) {
                storage.flush_failed(fd, self.flushes);
            }
            return -errno;
        }
        match self.op {
            RingOp::Rw { write, offset, rw_flags, .. }
            | RingOp::RwVectored { write, offset, rw_flags, .. } => {
                let result = self.transfer(write, offset, rw_flags);
                if write && result > 0 {
                    let dsync = rw_flags & libc::RWF_DSYNC != 0;
                    storage.changed(fd, offset, result as u64, dsync);
                }
                result
            }
            RingOp::Fsync { .. } => {
                // SAFETY: no memory is involved; the descriptor is open, by `Ring::push`'s contract.
                let result = errno_or(unsafe { libc::fsync(self.fd) } as isize);
                if result == 0 {
                    storage.flushed(fd, self.flushes);
                }
                result
            }
            RingOp::Fallocate { mode, offset, len, .. } => {
                let result = self.fallocate(mode, offset, len);
                if result == 0 && zeroes(mode) {
                    storage.changed(fd, offset, len, false);
                }
                result
            }
            _ => -libc::EINVAL,
        }
    }

    /// The change that the operation will make to a file, if any.
    pub(super) fn in_flight(&self, file: &OwnedFd) -> Option<InFlight> {
        // SAFETY: open until the completion, by `Ring::push`'s contract.
        let fd = unsafe { BorrowedFd::borrow_raw(self.fd) };
        if super::storage::id_of(fd) != super::storage::id_of(file.as_fd()) {
            return None;
        }
        match self.op {
            RingOp::Rw { write: true, offset, .. }
            | RingOp::RwVectored { write: true, offset, .. } => {
                let mut bytes = Vec::new();
                for v in segments(&self.op) {
                    let base = v.iov_base.cast::<u8>();
                    // SAFETY: `Ring::push`'s caller keeps it readable until the completion.
                    bytes.extend(unsafe { std::slice::from_raw_parts(base, v.iov_len) });
                }
                Some((offset, Ok(bytes)))
            }
            RingOp::Fallocate { mode, offset, len, .. } if zeroes(mode) => Some((offset, Err(len))),
            _ => None,
        }
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
        if cfg!(miri) {
            return self.transfer_one_by_one(write, offset, &segments);
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

    /// The same with calls that Miri supports.
    fn transfer_one_by_one(&self, write: bool, mut offset: u64, segments: &[libc::iovec]) -> i32 {
        let mut done = 0;
        for &libc::iovec { iov_base: base, iov_len: len } in segments {
            // SAFETY: as in `transfer`.
            let result = errno_or(unsafe {
                if write {
                    libc::pwrite64(self.fd, base, len, offset.cast_signed())
                } else {
                    libc::pread64(self.fd, base, len, offset.cast_signed())
                }
            });
            if result < 0 {
                return if done > 0 { done } else { result };
            }
            done += result;
            offset += result as u64;
            if (result as usize) < len {
                break;
            }
        }
        done
    }

    fn fallocate(&self, mode: i32, offset: u64, len: u64) -> i32 {
        if cfg!(miri) {
            return self.write_zeroes(mode, offset, len);
        }
        let (offset, len) = (offset.cast_signed(), len.cast_signed());
        // Memory files cannot zero a range, but punching and allocating it has the same effect.
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

    /// The same with a call that Miri supports, up to the file's end.
    fn write_zeroes(&self, mode: i32, offset: u64, len: u64) -> i32 {
        // SAFETY: open until the completion, by `Ring::push`'s contract.
        let fd = unsafe { BorrowedFd::borrow_raw(self.fd) };
        let size = nix::sys::stat::fstat(fd).map_or(0, |stat| stat.st_size.cast_unsigned());
        let end = offset.saturating_add(len).min(size);
        if zeroes(mode) && offset < end {
            let zeroes = vec![0; (end - offset) as usize];
            return match nix::sys::uio::pwrite(fd, &zeroes, offset.cast_signed()) {
                Ok(_) => 0,
                Err(errno) => -(errno as i32),
            };
        }
        0
    }
}

/// The changes that a flush submitted now will make stable.
pub(super) fn begin_flush(storage: &Storage, fd: RawFd) -> u64 {
    // SAFETY: open until the completion, by `Ring::push`'s contract.
    storage.begin_flush(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Whether fallocate(2) in this mode changes contents.
fn zeroes(mode: i32) -> bool {
    mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) != 0
}

fn is_direct(fd: BorrowedFd<'_>) -> bool {
    if cfg!(miri) {
        return false;
    }
    let flags = fcntl(fd, FcntlArg::F_GETFL);
    flags.is_ok_and(|flags| OFlag::from_bits_retain(flags).contains(OFlag::O_DIRECT))
}

fn errno_or(result: isize) -> i32 {
    match result {
        -1 => -std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
        n => i32::try_from(n).unwrap_or(i32::MAX),
    }
}
