//! What files of the daemon's, which targets include, name of it.

use std::fmt;

/// Why something could not be done, in words.
#[derive(Debug)]
pub(crate) struct DaemonError(String);

impl DaemonError {
    pub(crate) fn new(error: impl fmt::Display) -> Self {
        DaemonError(error.to_string())
    }

    pub(crate) fn with_hint(self, hint: &str) -> Self {
        DaemonError(format!("{self}\n{hint}"))
    }
}

impl fmt::Display for DaemonError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
