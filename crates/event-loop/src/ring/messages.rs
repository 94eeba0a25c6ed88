//! The headers of vectored sends.

#![allow(unsafe_code)]

/// A header for each entry of the submission queue. The kernel reads it when the entry is submitted
/// and not later (`IORING_FEAT_SUBMIT_STABLE`, Linux 5.5).
pub(super) struct MessageHeaders {
    headers: Box<[libc::msghdr]>,
    next: usize,
}

impl MessageHeaders {
    /// For a queue of so many `entries`, at least one.
    pub(super) fn new(entries: usize) -> Self {
        // SAFETY: all zeroes is a message header without address, segments and control data.
        let headers = (0..entries).map(|_| unsafe { std::mem::zeroed() }).collect();
        MessageHeaders { headers, next: 0 }
    }

    /// The header of `count` segments, for the entry that is pushed next. Its place is taken again once
    /// as many have been asked for as the queue has entries: that one has been submitted by then.
    pub(super) fn of(&mut self, segments: *const libc::iovec, count: u32) -> *const libc::msghdr {
        let entries = self.headers.len();
        let header = &mut self.headers[self.next];
        self.next = (self.next + 1) % entries;
        header.msg_iov = segments.cast_mut();
        header.msg_iovlen = count as usize;
        header
    }
}
