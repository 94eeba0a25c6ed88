//! Eventfds received from a front end, for kicks, calls and errors.

#![forbid(unsafe_code)]

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::descriptors::is_eventfd;

/// An eventfd of a front end. Cheap to clone; closed with the last clone.
#[derive(Debug, Clone)]
pub struct EventFd(Arc<OwnedFd>);

/// A descriptor that is no eventfd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the file descriptor is no eventfd")]
pub struct NotEventfd;

impl EventFd {
    /// Checks a descriptor of unknown kind.
    ///
    /// Only eventfds are accepted: a write to other files can block, and polling them may too.
    ///
    /// # Errors
    ///
    /// [`NotEventfd`].
    pub fn new(fd: OwnedFd) -> Result<Self, NotEventfd> {
        if is_eventfd(&fd) { Ok(EventFd(Arc::new(fd))) } else { Err(NotEventfd) }
    }

    /// Returns the descriptor.
    pub fn fd(&self) -> &Arc<OwnedFd> {
        &self.0
    }
}
