//! Waiting for what another process does and sends no event about.

use std::thread;
use std::time::{Duration, Instant};

/// How long a test waits for something that a working daemon does at once, before it fails. Generous,
/// since the machine may be busy.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Looks at `condition` until it gives a value.
///
/// # Panics
///
/// When it gave none within [`PATIENCE`]; the message then says `what` was waited for.
pub fn eventually<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited {PATIENCE:?} in vain for: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}
