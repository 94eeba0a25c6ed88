//! Passes file descriptors over a socket (SCM_RIGHTS): all the `unsafe` of this module.

#![allow(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

/// Most descriptors that the kernel passes at once (SCM_MAX_FD).
const SCM_MAX_FD: usize = 253;

/// Bytes for control messages that an inherited listening socket may add (SO_PASSCRED,
/// SO_PASSSEC).
const OTHER_CONTROL: usize = 1024;

/// The result of one recvmsg(2).
pub struct Received {
    /// Number of bytes; 0 at the end of the stream.
    pub len: usize,
    /// The received descriptors, close-on-exec.
    pub fds: Vec<OwnedFd>,
}

/// Sends bytes, with descriptors attached to the first of them.
///
/// Returns the number of bytes. Raises no SIGPIPE when the other side is gone.
///
/// # Errors
///
/// As of sendmsg(2); `EAGAIN` if the socket is full and `flags` has MSG_DONTWAIT.
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

/// Receives available data without waiting.
///
/// # Errors
///
/// `EAGAIN` without data; others as of recvmsg(2).
pub fn receive(socket: BorrowedFd<'_>, buf: &mut [u8]) -> Result<Received, Errno> {
    // Space for everything that can come: a truncated control message would leak its open
    // descriptors.
    let mut control = nix::cmsg_space!([RawFd; SCM_MAX_FD], [u8; OTHER_CONTROL]);
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    let mut iov = [IoSliceMut::new(buf)];
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut iov, Some(&mut control), flags)?;
    let mut fds = Vec::new();
    for part in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = part {
            // SAFETY: the kernel has just opened these descriptors for this process, and their numbers
            // are known only here.
            fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    Ok(Received { len: message.bytes, fds })
}

/// Owns a descriptor that accept4(2) has just returned. nix returns a plain number.
pub(crate) fn accepted(fd: RawFd) -> OwnedFd {
    // SAFETY: open, and its number is known only to the caller.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Duplicates a descriptor that the process was started with, by its number. The original stays open, so
/// the number can be used again.
///
/// # Errors
///
/// `EBADF` when no such descriptor is open, or this process has opened it: those are close-on-exec.
pub(crate) fn inherited(fd: RawFd) -> std::io::Result<OwnedFd> {
    if fd < 0 {
        return Err(Errno::EBADF.into());
    }
    // SAFETY: used only for fcntl(2), which fails if it is not open; it is not -1.
    let inherited = unsafe { BorrowedFd::borrow_raw(fd) };
    if FdFlag::from_bits_retain(fcntl(inherited, FcntlArg::F_GETFD)?).contains(FdFlag::FD_CLOEXEC) {
        return Err(Errno::EBADF.into());
    }
    inherited.try_clone_to_owned()
}
