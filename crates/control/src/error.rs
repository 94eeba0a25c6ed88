//! Errors of a whole command line.

use std::fmt;

pub use options::error::OptionError;

/// A command line that cannot be carried out. The program prints it on standard error and exits
/// with 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageError {
    /// The name in front of the message: `ringmill`, or `qemu-storage-daemon` when called so.
    pub program: &'static str,
    /// What is wrong.
    pub error: OptionError,
}

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.program, self.error)
    }
}

impl std::error::Error for UsageError {}
