//! System calls of images for which rings have no operation.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use event_loop::{BlockingCall, CallMemory};
use nix::errno::Errno;
use nix::unistd::{Whence, lseek};

use crate::status::{EXTENT_LEN, Extent, ExtentState};

/// Finds data and holes of a range. Fills the buffers with [extents](crate::status), contiguous from the
/// range's start on, up to its end or as far as there is room. The result counts bytes of extents. A file
/// system without holes reports only data.
pub(super) static EXTENTS: BlockingCall = BlockingCall { name: c"lseek", run: extents };

/// Discards a range of a block device.
pub(super) static DISCARD: BlockingCall = BlockingCall {
    name: c"BLKDISCARD",
    // SAFETY: the pair is valid for the call, which only reads it.
    run: |fd, offset, len, _| count(unsafe { ioctl::discard(fd.as_raw_fd(), &[offset, len]) }),
};

/// Zeroes a range of a block device.
pub(super) static ZERO_OUT: BlockingCall = BlockingCall {
    name: c"BLKZEROOUT",
    // SAFETY: the pair is valid for the call, which only reads it.
    run: |fd, offset, len, _| count(unsafe { ioctl::zero_out(fd.as_raw_fd(), &[offset, len]) }),
};

/// Both of linux/fs.h take a pair of first byte and length.
#[allow(missing_docs)]
mod ioctl {
    nix::ioctl_write_ptr_bad!(discard, 0x1277, [u64; 2]);
    nix::ioctl_write_ptr_bad!(zero_out, 0x127f, [u64; 2]);
}

fn count(result: nix::Result<i32>) -> io::Result<usize> {
    Ok(result?.unsigned_abs() as usize)
}

fn extents(
    file: BorrowedFd<'_>,
    offset: u64,
    len: u64,
    memory: &mut CallMemory<'_>,
) -> io::Result<usize> {
    let seek = |at: u64, whence| lseek(file, at.cast_signed(), whence).map(i64::cast_unsigned);
    let room = memory.len() - memory.len() % EXTENT_LEN;
    let end = offset.saturating_add(len);
    let (mut at, mut done) = (offset, 0);
    while at < end && done < room {
        let next = match seek(at, Whence::SeekData) {
            // Beyond the end of the file, or no more data.
            Err(Errno::ENXIO) => end,
            Err(_) => at,
            Ok(data) => data,
        };
        let (until, state) = match next > at {
            true => (next.min(end), ExtentState::Hole),
            false => match seek(at, Whence::SeekHole) {
                Ok(hole) if hole > at => (hole.min(end), ExtentState::Data),
                _ => (end, ExtentState::Data),
            },
        };
        memory.put(done, &Extent::own(until - at, state).record());
        at = until;
        done += EXTENT_LEN;
    }
    Ok(done)
}
