//! `--stop-timeout`: the time that a daemon has to end.

use std::time::Duration;

use crate::table::{Field, Row, put};

/// The longest time limit, seconds: a day.
const MAX_S: i64 = 86_400;

/// `--stop-timeout`: the time from SIGTERM or `quit` to the end of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StopTimeout {
    seconds: u64,
}

impl Default for StopTimeout {
    fn default() -> Self {
        StopTimeout { seconds: 10 }
    }
}

impl StopTimeout {
    /// Returns the time limit. `None`: the daemon waits as long as it takes.
    pub fn limit(self) -> Option<Duration> {
        (self.seconds > 0).then(|| Duration::from_secs(self.seconds))
    }
}

/// A draft of options with `--stop-timeout`.
pub(crate) trait StopDraft: Sized + 'static {
    fn stop_timeout(&mut self) -> &mut StopTimeout;

    const STOP_TIMEOUT: Field<Self> = Row::default(
        "stop-timeout",
        "10",
        "seconds from SIGTERM or quit to the end of the process, at most 86400; images that still wait for an answer then \
         are left as after a kill, and the exit code is 124; 0 waits without a limit",
    )
    .int(0..=MAX_S, |draft, seconds| {
        put(draft.stop_timeout(), StopTimeout { seconds: seconds.unsigned_abs() })
    });
}
