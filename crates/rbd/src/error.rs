//! Why a call of the libraries failed.

use std::ffi::c_int;
use std::fmt;

use nix::errno::Errno;

/// A call failed: on what, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    /// What failed, on what.
    pub what: String,
    /// Why.
    pub errno: Errno,
    /// Whether `what` says why.
    pub says_why: bool,
}

impl Error {
    /// Returns an error of a step that `what` names.
    pub(crate) fn new(what: impl Into<String>, errno: Errno) -> Error {
        Error { what: what.into(), errno, says_why: false }
    }

    /// Checks the result of a call: negative numbers are errnos.
    pub(crate) fn check(result: c_int, what: impl FnOnce() -> String) -> Result<(), Error> {
        match result {
            0.. => Ok(()),
            negative => Err(Error::new(what(), Errno::from_raw(negative.wrapping_neg()))),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.says_why {
            true => f.write_str(&self.what),
            false => write!(f, "{}: {}", self.what, self.errno.desc()),
        }
    }
}

impl std::error::Error for Error {}
