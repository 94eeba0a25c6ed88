//! Why something could not be done to an image.

use std::fmt;
use std::io;

use block::OpenError;
use nix::errno::Errno;
use options::OptionError;

/// An error in the words that `qemu-img` has for it, where it has any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    message: String,
    hint: Option<String>,
}

impl Error {
    /// Returns an error of one line.
    pub fn new(message: impl fmt::Display) -> Error {
        Error { message: message.to_string(), hint: None }
    }

    /// Returns the error of a failed call: `what` names the call and its object.
    pub fn os(what: impl fmt::Display, errno: Errno) -> Error {
        Error::new(format!("{what}: {}", errno.desc()))
    }

    /// Returns the error of a function of the standard library.
    pub fn io(what: impl fmt::Display, error: &io::Error) -> Error {
        Error::new(OpenError::io(what, error))
    }

    /// Adds what to do about it, on further lines.
    #[must_use]
    pub fn with_hint(self, hint: impl Into<String>) -> Error {
        Error { hint: Some(hint.into()), ..self }
    }

    /// Puts the object of the failure in front of the message.
    #[must_use]
    pub fn of(self, what: impl fmt::Display) -> Error {
        Error { message: format!("{what}: {}", self.message), ..self }
    }

    /// Returns the message without the hint.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns what to do about it.
    pub fn hint(&self) -> Option<&str> {
        self.hint.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.hint {
            Some(hint) => write!(f, "\n{hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {}

impl From<OpenError> for Error {
    fn from(error: OpenError) -> Error {
        Error { message: error.to_string(), hint: error.hint().map(str::to_owned) }
    }
}

impl From<OptionError> for Error {
    fn from(error: OptionError) -> Error {
        Error { message: error.message, hint: error.hint }
    }
}
