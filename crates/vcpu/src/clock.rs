//! The clock that all threads and both ends of a request are timed by.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// CLOCK_MONOTONIC, nanoseconds.
pub fn now_ns() -> u64 {
    // It cannot fail for a clock that always is.
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from);
    now.unwrap_or_default().as_nanos() as u64
}

/// CPU time of the calling thread so far, user and system.
pub fn thread_cpu() -> Duration {
    // It cannot fail for a thread that runs.
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}
