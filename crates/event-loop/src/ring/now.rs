//! Reading and writing a non-blocking file at once, past the ring.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::buf::IoBufs;

/// The most segments of a call (`UIO_MAXIOV`).
const MAX_SEGMENTS: usize = 1024;

/// Reads a non-blocking file at once, past the loop's ring. Returns the bytes read.
///
/// For a message of a device, or a pipe. Nothing is in flight afterwards, and no completion comes. For a
/// [`Handler`](crate::Handler) whose descriptor is ready: a read by the ring would poll the file twice more.
///
/// Waits if the file is not non-blocking.
///
/// # Errors
///
/// readv(2); `EAGAIN`: there is nothing to read now.
pub fn read_now(file: BorrowedFd<'_>, bufs: &IoBufs) -> io::Result<usize> {
    let segments = bufs.iovecs();
    let count = segments.len().min(MAX_SEGMENTS) as libc::c_int;
    // SAFETY: the segments are of memory that `bufs` owns, and no references to it exist. The kernel is done with
    // them when the call returns.
    let result = unsafe { libc::readv(file.as_raw_fd(), segments.as_ptr(), count) };
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Writes to a non-blocking file at once, past the loop's ring.
///
/// Returns the number of bytes taken. Nothing is in flight afterwards, and no completion comes.
///
/// Waits if the file is not non-blocking.
///
/// # Errors
///
/// writev(2); `EAGAIN`: the file takes nothing now.
pub fn write_now(file: BorrowedFd<'_>, bufs: &IoBufs) -> io::Result<usize> {
    let segments = bufs.iovecs();
    let count = segments.len().min(MAX_SEGMENTS) as libc::c_int;
    // SAFETY: as above; the kernel only reads the segments.
    let result = unsafe { libc::writev(file.as_raw_fd(), segments.as_ptr(), count) };
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use nix::fcntl::OFlag;

    use super::*;
    use crate::buf::AlignedBuf;

    #[test]
    fn a_pipe_is_read_and_written_without_waiting() {
        let (read, write) = nix::unistd::pipe2(OFlag::O_NONBLOCK | OFlag::O_CLOEXEC).unwrap();
        let mut whole = AlignedBuf::io_bufs(16, 16).unwrap();
        let again = |result: io::Result<usize>| result.unwrap_err().raw_os_error();
        assert_eq!(again(read_now(read.as_fd(), &whole)), Some(libc::EAGAIN));
        whole.copy_in(0, b"0123456789abcdef");
        let mut parts = IoBufs::with_capacity(2);
        parts.append_part(&whole, 8, 8);
        parts.append_part(&whole, 0, 8);
        assert_eq!(write_now(write.as_fd(), &parts).unwrap(), 16);
        assert_eq!(read_now(read.as_fd(), &whole).unwrap(), 16);
        let mut bytes = [0; 16];
        whole.copy_out(0, &mut bytes);
        assert_eq!(&bytes, b"89abcdef01234567");
        while write_now(write.as_fd(), &whole).is_ok() {}
        assert_eq!(again(write_now(write.as_fd(), &whole)), Some(libc::EAGAIN));
    }
}
