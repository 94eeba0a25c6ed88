//! Operations carried out with blocking system calls, on pool threads.

#![allow(unsafe_code)]

use std::os::fd::RawFd;

use crate::op::IoOp;
use crate::slots::InFlight;

/// `_IO(0x12, 119)` and `_IO(0x12, 127)` of linux/fs.h: both take a pair of first byte and length.
const BLKDISCARD: libc::Ioctl = 0x1277;
const BLKZEROOUT: libc::Ioctl = 0x127f;

/// Bytes of a record of [`IoOp::Extents`].
const RECORD: usize = 16;

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
            let result = match self.call() {
                -1 => -std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
                n => i32::try_from(n).unwrap_or(i32::MAX),
            };
            if result != -libc::EINTR {
                return result;
            }
        }
    }

    /// See [`IoOp::Extents`].
    fn extents(&self, offset: u64, len: u64) -> isize {
        if self.count < 1 {
            return 0;
        }
        // SAFETY: there is a segment, and its description is valid, see `new`.
        let segment = unsafe { *self.segments };
        let records = segment.iov_len / RECORD;
        // SAFETY: the descriptor is open, see `new`; lseek(2) takes any numbers.
        let seek = |at: u64, whence| unsafe { libc::lseek(self.fd, at.cast_signed(), whence) };
        let end = offset.saturating_add(len);
        let (mut at, mut done) = (offset, 0);
        while at < end && done < records {
            // ENXIO: beyond the end of the file, or no more data.
            let next = match seek(at, libc::SEEK_DATA) {
                -1 if std::io::Error::last_os_error().raw_os_error() == Some(libc::ENXIO) => end,
                -1 => at,
                data => data.cast_unsigned(),
            };
            let (until, hole) = if next > at {
                (next.min(end), 1)
            } else {
                match seek(at, libc::SEEK_HOLE) {
                    hole if hole.cast_unsigned() > at && hole != -1 => {
                        (hole.cast_unsigned().min(end), 0)
                    }
                    _ => (end, 0),
                }
            };
            let record: [u64; 2] = [until - at, hole];
            // SAFETY: record `done` lies inside the segment, which is writable, see `new`. It may be unaligned,
            // hence the copy of bytes.
            unsafe {
                let place = segment.iov_base.cast::<u8>().add(done * RECORD);
                std::ptr::copy_nonoverlapping(record.as_ptr().cast::<u8>(), place, RECORD);
            }
            at = until;
            done += 1;
        }
        (done * RECORD) as isize
    }

    fn call(&self) -> isize {
        let off = u64::cast_signed;
        if let IoOp::Extents { offset, len } = self.op {
            return self.extents(offset, len);
        }
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
                // Handled above.
                IoOp::Extents { .. } => 0,
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
