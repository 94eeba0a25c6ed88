//! Passes file descriptors over a socket (SCM_RIGHTS): all the `unsafe` of this module.

#![allow(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use rustix::cmsg_space;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};

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
    /// Other descriptors were sent, and this process has no number for them.
    pub(crate) fds_are_missing: bool,
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

/// Receives available data without waiting, from a peer whose descriptors can be closed here.
///
/// # Errors
///
/// `EAGAIN` without data; `EMFILE` if this process has no number for some of the descriptors; others as of recvmsg(2).
pub fn receive(socket: BorrowedFd<'_>, buf: &mut [u8]) -> Result<Received, Errno> {
    let received = receive_from_stranger(socket, buf)?;
    if received.fds_are_missing { Err(Errno::EMFILE) } else { Ok(received) }
}

/// Receives available data without waiting.
///
/// # Errors
///
/// `EAGAIN` without data; others as of recvmsg(2).
pub(crate) fn receive_from_stranger(
    socket: BorrowedFd<'_>,
    buf: &mut [u8],
) -> Result<Received, Errno> {
    // Space for everything that can come: the kernel truncates only for want of numbers.
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(SCM_MAX_FD)) + OTHER_CONTROL];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let message = recvmsg(socket, &mut [IoSliceMut::new(buf)], &mut control, flags)
        .map_err(|errno| Errno::from_raw(errno.raw_os_error()))?;
    let mut fds = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            fds.extend(rights);
        }
    }
    let fds_are_missing = message.flags.contains(ReturnFlags::CTRUNC);
    Ok(Received { len: message.bytes, fds, fds_are_missing })
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
