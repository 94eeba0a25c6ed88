//! Errors of a command line.

use std::fmt;

pub use options::error::OptionError;

/// A refused command line.
///
/// The program prints it on standard error and exits with 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageError {
    /// The name before the message: `ringmill`, or `qemu-storage-daemon` if called so.
    pub program: &'static str,
    /// The error.
    pub error: OptionError,
}

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.program, self.error)
    }
}

impl std::error::Error for UsageError {}
