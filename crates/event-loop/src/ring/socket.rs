//! Reading and writing a socket without io_uring, and without waiting; messages for io_uring.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::RawFd;

use crate::ring::RingOp;

/// Headers of messages that are queued for a ring, each in one place until it was submitted.
pub(super) struct MessageHeaders(Vec<libc::msghdr>);

impl MessageHeaders {
    /// None; room for so many.
    pub(super) fn new(capacity: usize) -> Self {
        MessageHeaders(Vec::with_capacity(capacity))
    }

    /// Adds that of a message of so many segments. `None`: there is no room.
    pub(super) fn add(
        &mut self,
        segments: *const libc::iovec,
        count: u32,
    ) -> Option<*const libc::msghdr> {
        // Growing would move those that are there.
        if self.0.len() == self.0.capacity() {
            return None;
        }
        self.0.push(header(segments, count as usize));
        self.0.last().map(std::ptr::from_ref)
    }

    /// All were submitted.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

fn header(segments: *const libc::iovec, count: usize) -> libc::msghdr {
    // SAFETY: all zeroes is a message header without address, segments and control data.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = segments.cast_mut();
    header.msg_iovlen = count;
    header
}

/// Does what `op`, a read or write of the socket `fd`, asks for, by recvmsg(2) or sendmsg(2): a
/// count, or a negated errno, `-EAGAIN` if that would have to wait.
///
/// # Safety
///
/// Descriptor and memory are valid, as for [`Ring::push`](super::Ring::push).
pub(super) unsafe fn transfer(fd: RawFd, op: &RingOp) -> i32 {
    let (write, segments, count) = match op {
        RingOp::Rw { write, segment, .. } => (*write, std::ptr::from_ref(segment), 1),
        RingOp::RwVectored { write, segments, count, .. } => (*write, *segments, *count as usize),
        _ => return -libc::EINVAL,
    };
    // SAFETY: `count` segments' descriptions are there, by this function's contract; of none the
    // pointer may be anything.
    let empty = (0..count).all(|n| unsafe { (*segments.add(n)).iov_len } == 0);
    if empty {
        // As read(2) and the ring have it; recvmsg(2) waits for a byte.
        return 0;
    }
    let mut message = header(segments, count);
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
