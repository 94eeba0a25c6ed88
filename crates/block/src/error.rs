//! Why a node cannot be opened, in words an operator can act on.

use std::fmt;
use std::io;
use std::time::Duration;

use nix::errno::Errno;

use crate::drivers::qcow2::DirtyImage;

/// A node could not be opened, found or removed.
///
/// `Display` is one line in QEMU's words where QEMU has the same error; [`hint`](Self::hint) says
/// what to do about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenError {
    message: String,
    errno: Option<Errno>,
    hint: Option<String>,
    /// Whether QMP's description has the hint, too.
    hint_everywhere: bool,
    locked_by: Option<LockedBy>,
    dirty: Option<DirtyImage>,
}

/// How long the image of a killed process stays locked at most.
///
/// The kernel finishes the last requests meanwhile.
pub const LEFT_LOCKED: Duration = Duration::from_secs(3);

/// Who holds the lock on an image that no process is found to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LockedBy {
    /// No process: all were looked into.
    Nobody,
    /// There are processes that may not be looked into.
    Unknown,
}

impl OpenError {
    /// Returns an error that no system call reported.
    pub fn new(message: impl Into<String>) -> Self {
        OpenError {
            message: message.into(),
            errno: None,
            hint: None,
            hint_everywhere: false,
            locked_by: None,
            dirty: None,
        }
    }

    /// Returns the error of a failed system call.
    ///
    /// `message` names the call and its object.
    pub fn os(message: impl Into<String>, errno: Errno) -> Self {
        OpenError { errno: Some(errno), ..OpenError::new(message) }
    }

    /// Returns the error of a function of the standard library.
    ///
    /// Such an error may have no errno.
    pub fn io(message: impl fmt::Display, error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(errno) => OpenError::os(message.to_string(), Errno::from_raw(errno)),
            None => OpenError::new(format!("{message}: {error}")),
        }
    }

    /// Returns the error as one of opening a child. Only backing files get a prefix, as in QEMU.
    pub(crate) fn of_child(mut self, role: &str) -> Self {
        if role == "backing" {
            self.message = format!("Could not open backing file: {}", self.message);
        }
        self
    }

    /// Returns the error as one of a step that `what` names.
    pub(crate) fn of_step(mut self, what: &str) -> Self {
        self.message = format!("{what}: {}", self.message);
        self
    }

    /// Adds a hint: what to do about the error.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Has monitors show the hint, too. Programs compare most descriptions with QSD's, which have none.
    #[must_use]
    pub fn with_hint_everywhere(self) -> Self {
        OpenError { hint_everywhere: true, ..self }
    }

    /// The same error: the image is locked, and no process is found that would hold the lock.
    pub(crate) fn locked_by(self, by: LockedBy) -> Self {
        OpenError { locked_by: Some(by), ..self }
    }

    /// Returns whether the image is locked although no process holds the lock.
    ///
    /// A killed process may have left requests that the kernel finishes before it closes the file. Opening
    /// the image again soon may succeed.
    pub fn is_left_locked(&self) -> bool {
        self.locked_by == Some(LockedBy::Nobody)
    }

    /// Returns whether the image may be locked although no process holds the lock.
    ///
    /// Like [`is_left_locked`](Self::is_left_locked), and also if a process may hold the lock that this one
    /// may not inspect.
    pub fn may_be_left_locked(&self) -> bool {
        self.locked_by.is_some()
    }

    /// Returns the error of an image that has to be repaired first.
    pub(crate) fn dirty(image: DirtyImage) -> Self {
        let message = "The image was not closed cleanly: it must be repaired";
        OpenError { dirty: Some(image), ..OpenError::new(message) }
    }

    /// Splits off the image that has to be repaired before it can be opened.
    pub(crate) fn without_dirty_image(mut self) -> (Self, Option<DirtyImage>) {
        let image = self.dirty.take();
        (self, image)
    }

    /// Returns the errno, if a system call failed.
    pub fn errno(&self) -> Option<Errno> {
        self.errno
    }

    /// Returns what to do about the error, without a newline at the end.
    ///
    /// The hint has one or more lines.
    pub fn hint(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    /// Returns whether monitors show the hint.
    pub fn has_hint_everywhere(&self) -> bool {
        self.hint_everywhere
    }
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.errno {
            Some(errno) => write!(f, "{}: {}", self.message, errno.desc()),
            None => f.write_str(&self.message),
        }
    }
}

impl std::error::Error for OpenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.errno.as_ref().map(|errno| errno as _)
    }
}
