//! Passing file descriptors over a socket (SCM_RIGHTS): all the `unsafe` of this crate.

#![allow(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

/// The most descriptors that the kernel passes at once (SCM_MAX_FD).
const SCM_MAX_FD: usize = 253;

/// Room for what a listening socket that was handed to us may be set to add (SO_PASSCRED,
/// SO_PASSSEC), bytes.
const OTHER_CONTROL: usize = 1024;

/// What one recvmsg(2) brought.
pub struct Received {
    /// How many bytes; 0 at the end of the stream.
    pub len: usize,
    /// The descriptors that came with them, close-on-exec.
    pub fds: Vec<OwnedFd>,
}

/// Sends bytes, and descriptors with the first of them. How many bytes have gone; nobody is told by a
/// signal that the other side is gone.
///
/// # Errors
///
/// As of sendmsg(2); `EAGAIN` when there is no room now and `flags` has MSG_DONTWAIT.
pub fn send(
    socket: BorrowedFd<'_>,
    bytes: &[IoSlice<'_>],
    fds: &[RawFd],
    flags: MsgFlags,
) -> Result<usize, Errno> {
    let rights = [ControlMessage::ScmRights(fds)];
    let control = if fds.is_empty() { &[][..] } else { &rights[..] };
    let flags = flags | MsgFlags::MSG_NOSIGNAL;
    sendmsg::<()>(socket.as_raw_fd(), bytes, control, flags, None)
}

/// Receives what is there, without waiting.
///
/// # Errors
///
/// `EAGAIN` when nothing is there; others as of recvmsg(2).
pub fn receive(socket: BorrowedFd<'_>, buf: &mut [u8]) -> Result<Received, Errno> {
    // Room for all that can come: descriptors in a control message that was cut short would be open
    // and not be told of.
    let mut control = nix::cmsg_space!([RawFd; SCM_MAX_FD], [u8; OTHER_CONTROL]);
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    let mut iov = [IoSliceMut::new(buf)];
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut iov, Some(&mut control), flags)?;
    let mut fds = Vec::new();
    for part in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = part {
            // SAFETY: the kernel has just opened these descriptors for this process, and nobody
            // else has seen their numbers.
            fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    Ok(Received { len: message.bytes, fds })
}

/// Owns a descriptor that accept4(2) has just returned, which nix gives as a number.
pub(crate) fn accepted(fd: RawFd) -> OwnedFd {
    // SAFETY: open, and nobody else's: only the caller knows its number.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Takes a descriptor that the process was started with, by its number; a copy of it, so that the
/// number may be taken again.
///
/// # Errors
///
/// `EBADF` when no such descriptor is open.
pub(crate) fn inherited(fd: RawFd) -> std::io::Result<OwnedFd> {
    if fd < 0 {
        return Err(Errno::EBADF.into());
    }
    // SAFETY: only for the length of fcntl(2), which says so if there is none; it is not -1.
    unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()
}
