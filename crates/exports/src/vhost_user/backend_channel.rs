//! The socket for messages from the back end to the front end (VHOST_USER_SET_BACKEND_REQ_FD).

#![forbid(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, send};

use super::handover::Saved;
use super::wire::{BackendRequest, Request};

/// The socket, for as long as the front end is served.
pub(crate) struct BackendChannel(OwnedFd);

impl BackendChannel {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        BackendChannel(socket)
    }

    /// The SET_BACKEND_REQ_FD message, for a handover.
    ///
    /// # Errors
    ///
    /// As of fcntl(2).
    pub(crate) fn save(&self) -> io::Result<Saved> {
        Ok(Saved::fields(Request::SetBackendReqFd, &[], vec![self.0.try_clone()?]))
    }

    /// Tells the front end to read the configuration space again.
    ///
    /// # Errors
    ///
    /// As of send(2). A full socket is no error: the same message is in it, unread.
    pub(crate) fn config_changed(&self) -> Result<(), Errno> {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        loop {
            return match send(self.0.as_raw_fd(), &BackendRequest::ConfigChange.encode(), flags) {
                Ok(_) | Err(Errno::EAGAIN) => Ok(()),
                Err(Errno::EINTR) => continue,
                Err(errno) => Err(errno),
            };
        }
    }
}
