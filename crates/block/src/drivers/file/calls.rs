//! System calls of images for which rings have no operation.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use event_loop::{BlockingCall, CallMemory};
use nix::errno::Errno;
use nix::unistd::{Whence, lseek};

use crate::status::{EXTENT_LEN, Extent, ExtentState};

/// Finds data and holes of a range. Fills the buffers with [extents](crate::status), contiguous from the
/// range's start on, up to its end or as far as there is room. The last one reaches as far as its data does, which
/// may be beyond the range. The result counts bytes of extents. A file system without holes reports only data.
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

/// Whether a block device refuses writes, although it can be opened for writing (`BLKROGET`). Not so if that cannot be found
/// out.
pub(super) fn is_read_only(device: impl AsFd) -> bool {
    let mut is_read_only = 0;
    // SAFETY: the number is valid for the call, which writes it.
    let asked = unsafe { ioctl::get_read_only(device.as_fd().as_raw_fd(), &raw mut is_read_only) };
    asked.is_ok() && is_read_only != 0
}

/// Of linux/fs.h. The first two take a pair of first byte and length.
#[allow(missing_docs)]
mod ioctl {
    use super::Attributes;

    nix::ioctl_write_ptr_bad!(discard, 0x1277, [u64; 2]);
    nix::ioctl_write_ptr_bad!(zero_out, 0x127f, [u64; 2]);
    nix::ioctl_read_bad!(get_read_only, 0x125e, i32);
    nix::ioctl_read!(get_attributes, b'X', 31, Attributes);
    nix::ioctl_write_ptr!(set_attributes, b'X', 32, Attributes);
}

/// `struct fsxattr` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    flags: u32,
    extent_size: u32,
    extents: u32,
    project: u32,
    copied_extent_size: u32,
    padding: [u8; 8],
}

/// `FS_XFLAG_EXTSIZE`: the file has a hint of its own.
const HAS_EXTENT_SIZE: u32 = 0x800;

/// Has the file system allocate space of an empty file in that many bytes at a time.
pub(super) fn set_extent_size(file: impl AsFd, size: u32) -> nix::Result<()> {
    let fd = file.as_fd().as_raw_fd();
    let mut attributes = Attributes::default();
    // SAFETY: the attributes are valid for the call, which writes them.
    unsafe { ioctl::get_attributes(fd, &raw mut attributes) }?;
    attributes.flags |= HAS_EXTENT_SIZE;
    attributes.extent_size = size;
    // SAFETY: the attributes are valid for the call, which only reads them.
    unsafe { ioctl::set_attributes(fd, &raw const attributes) }.map(drop)
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
                Ok(hole) if hole > at => (hole, ExtentState::Data),
                _ => (end, ExtentState::Data),
            },
        };
        memory.put(done, &Extent::own(until - at, state).record());
        at = until;
        done += EXTENT_LEN;
    }
    Ok(done)
}
