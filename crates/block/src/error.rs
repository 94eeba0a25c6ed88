//! Why a node cannot be opened, in words an operator can act on.

use std::fmt;

use nix::errno::Errno;

/// A node could not be opened, found or removed.
///
/// `Display` is one line in QEMU's words where QEMU has the same error; [`hint`](Self::hint) says
/// what to do about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenError {
    message: String,
    errno: Option<Errno>,
    hint: Option<String>,
    left_locked: bool,
}

impl OpenError {
    /// An error that no system call reported.
    pub(crate) fn new(message: impl Into<String>) -> Self {
        OpenError { message: message.into(), errno: None, hint: None, left_locked: false }
    }

    /// A system call failed: `message` says which and on what, the errno why.
    pub(crate) fn os(message: impl Into<String>, errno: Errno) -> Self {
        OpenError { errno: Some(errno), ..OpenError::new(message) }
    }

    /// The same error, with what to do about it.
    pub(crate) fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The same error: the image is locked, and no process is found that would hold the lock.
    pub(crate) fn left_locked(self) -> Self {
        OpenError { left_locked: true, ..self }
    }

    /// Whether the image is locked and no process is found that holds the lock. It may be the last
    /// requests of one that was killed, which the kernel finishes before it lets go of the file: so
    /// opening it again soon may do.
    pub fn is_left_locked(&self) -> bool {
        self.left_locked
    }

    /// The system's reason, where it was a system call that failed.
    pub fn errno(&self) -> Option<Errno> {
        self.errno
    }

    /// What to do about it: one or more lines without a newline at the end.
    pub fn hint(&self) -> Option<&str> {
        self.hint.as_deref()
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
