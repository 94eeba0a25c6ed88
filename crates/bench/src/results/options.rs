//! What `bench results` is asked for.

use std::fmt;

use crate::options::RunOptions;

/// One of the results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    /// A queued request never waits for an unrelated wake-up.
    WakeUps,
    /// Ring set-up flags.
    RingFlags,
    /// Batched used-buffer notifications.
    BatchedSignals,
    /// Adaptive polling.
    Polling,
}

impl Which {
    /// All of them.
    pub(crate) const ALL: [Which; 4] =
        [Which::WakeUps, Which::RingFlags, Which::BatchedSignals, Which::Polling];
}

impl fmt::Display for Which {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Which::WakeUps => "wake-ups",
            Which::RingFlags => "ring-flags",
            Which::BatchedSignals => "batched-signals",
            Which::Polling => "polling",
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
