//! Reading and writing a socket or pipe without io_uring, and without waiting.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use crate::buf::IoBufs;
use crate::ring::RingOp;

#[cfg(any(test, feature = "sim"))]
thread_local! {
    static TRANSFERS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Returns how often loops on this thread have read or written a socket.
///
/// Attempts count. A simulation checks the other end only after such a transfer.
#[cfg(any(test, feature = "sim"))]
pub fn socket_transfers() -> u64 {
    TRANSFERS.get()
}

/// Sends these segments: what the socket takes now.
///
/// # Errors
///
/// sendmsg(2) with `MSG_DONTWAIT`; `EAGAIN`: it takes nothing now.
pub(crate) fn send_now(socket: BorrowedFd<'_>, bufs: &IoBufs) -> io::Result<usize> {
    #[cfg(any(test, feature = "sim"))]
    TRANSFERS.set(TRANSFERS.get() + 1);
    // SAFETY: all zeroes is a message header without address, segments and control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = bufs.iovecs().as_ptr().cast_mut();
    message.msg_iovlen = bufs.iovecs().len();
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the header is ours, and leads to segments of memory that `bufs` owns; the kernel only
    // reads them, and is done with them when this returns.
    let result = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, flags) };
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Reads or writes the socket or pipe `fd`, as `op` says. Returns a count, or a negated errno; `-EAGAIN` if the call
/// would have to wait.
///
/// # Safety
///
/// Descriptor and memory are valid, as for [`Ring::push`](super::Ring::push).
pub(super) unsafe fn transfer(fd: RawFd, op: &RingOp) -> i32 {
    #[cfg(any(test, feature = "sim"))]
    TRANSFERS.set(TRANSFERS.get() + 1);
    let (write, socket, segments, count) = match op {
        RingOp::Rw { write, socket, segment, .. } => {
            (*write, *socket, std::ptr::from_ref(segment), 1)
        }
        RingOp::RwVectored { write, socket, segments, count, .. } => {
            (*write, *socket, *segments, *count as usize)
        }
        _ => return -libc::EINVAL,
    };
    // SAFETY: `count` segments' descriptions are there, by this function's contract; of none the
    // pointer may be anything.
    let empty = (0..count).all(|n| unsafe { (*segments.add(n)).iov_len } == 0);
    if empty {
        // As read(2) and the ring have it; recvmsg(2) waits for a byte.
        return 0;
    }
    if !socket {
        // SAFETY: the segments of above.
        return unsafe { transfer_of_pipe(fd, write, segments, count) };
    }
    // SAFETY: all zeroes is a message header without address, segments and control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = segments.cast_mut();
    message.msg_iovlen = count;
    loop {
        // SAFETY: the header is ours, and leads to the segments alone, which are valid by this
        // function's contract.
        let result = unsafe {
            if write {
                libc::sendmsg(fd, &message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
            } else {
                libc::recvmsg(fd, &mut message, libc::MSG_DONTWAIT)
            }
        };
        if result >= 0 {
            return i32::try_from(result).unwrap_or(i32::MAX);
        }
        match io::Error::last_os_error().raw_os_error() {
            Some(libc::EINTR) => {}
            errno => return -errno.unwrap_or(libc::EIO),
        }
    }
}

/// The same for a pipe or another file without an offset. The file may be in blocking mode.
///
/// # Safety
///
/// That of [`transfer`]; there is a byte to transfer.
unsafe fn transfer_of_pipe(
    fd: RawFd,
    write: bool,
    segments: *const libc::iovec,
    count: usize,
) -> i32 {
    let events = if write { libc::POLLOUT } else { libc::POLLIN };
    let mut poll = libc::pollfd { fd, events, revents: 0 };
    // SAFETY: one `pollfd`, which lives across the call.
    match unsafe { libc::poll(&mut poll, 1, 0) } {
        0 => return -libc::EAGAIN,
        // As from an interrupted wait.
        -1 => return -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EAGAIN),
        _ => {}
    }
    // SAFETY: `count` segments' descriptions are there.
    let mut segment = unsafe { *segments };
    let mut at = 0;
    while segment.iov_len == 0 && at + 1 < count {
        at += 1;
        // SAFETY: as above.
        segment = unsafe { *segments.add(at) };
    }
    let result = if write {
        // A pipe that is ready takes so many bytes without waiting.
        let len = segment.iov_len.min(libc::PIPE_BUF);
        // SAFETY: the segment is valid by this function's contract.
        unsafe { libc::write(fd, segment.iov_base, len) }
    } else {
        // SAFETY: the segments are valid by this function's contract.
        unsafe { libc::readv(fd, segments, count as libc::c_int) }
    };
    match i32::try_from(result) {
        Ok(count @ 0..) => count,
        Ok(_) => -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
        Err(_) => i32::MAX,
    }
}
