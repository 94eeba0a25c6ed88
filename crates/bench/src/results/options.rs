//! What `bench results` is asked for.

use std::fmt;

use crate::options::RunOptions;

/// One of the results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    /// A queued request never waits for an unrelated wake-up.
    F1,
    /// Ring set-up flags.
    F2,
    /// Batched used-buffer notifications.
    F3,
    /// Adaptive polling.
    F4,
}

impl Which {
    /// All of them.
    pub(crate) const ALL: [Which; 4] = [Which::F1, Which::F2, Which::F3, Which::F4];
}

impl fmt::Display for Which {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Which::F1 => "f1",
            Which::F2 => "f2",
            Which::F3 => "f3",
            Which::F4 => "f4",
        })
    }
}

/// The command line.
#[derive(Debug)]
pub(crate) struct Options {
    /// How.
    pub(crate) run: RunOptions,
    /// Which results.
    pub(crate) which: Vec<Which>,
}
