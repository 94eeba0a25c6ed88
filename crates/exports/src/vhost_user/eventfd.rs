//! Eventfds as a front end hands them over, for kicks, calls and errors.

#![forbid(unsafe_code)]

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use nix::sys::stat::{SFlag, fstat};

/// An eventfd of the front end's. Cheap to clone; closed with the last clone.
#[derive(Debug, Clone)]
pub struct EventFd(Arc<OwnedFd>);

/// A descriptor that is no eventfd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotEventfd;

impl fmt::Display for NotEventfd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the file descriptor is no eventfd")
    }
}

impl EventFd {
    /// Takes a descriptor that may be anything.
    ///
    /// A pipe, socket or file is refused: a write to one of these can block, or cannot be watched.
    ///
    /// # Errors
    ///
    /// [`NotEventfd`].
    pub fn new(fd: OwnedFd) -> Result<Self, NotEventfd> {
        // Eventfds and their kin (anonymous inodes) are the only files without a type. On the kin
        // that are no eventfds, a write fails.
        let stat = fstat(&fd).map_err(|_| NotEventfd)?;
        match SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT {
            kind if kind.is_empty() => Ok(EventFd(Arc::new(fd))),
            _ => Err(NotEventfd),
        }
    }

    /// The descriptor.
    pub fn fd(&self) -> &Arc<OwnedFd> {
        &self.0
    }
}
