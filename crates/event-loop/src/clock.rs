//! Time, behind a trait narrow enough for a simulation to stand in.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};

/// A monotonic clock, nanoseconds since an arbitrary start.
pub trait Clock {
    /// Now.
    fn now_ns(&self) -> u64;

    /// The CPU time of the calling thread, nanoseconds. `None`: the system has no such clock, or the time is
    /// simulated.
    fn cpu_ns(&self) -> Option<u64>;
}

/// `CLOCK_MONOTONIC`, by the vDSO: no system call.
pub struct MonotonicClock {
    start: Instant,
}

impl MonotonicClock {
    /// A clock. All of a process give the same time, which began with the first of them.
    pub fn new() -> Self {
        static START: OnceLock<Instant> = OnceLock::new();
        MonotonicClock { start: *START.get_or_init(Instant::now) }
    }
}

impl Default for MonotonicClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for MonotonicClock {
    fn now_ns(&self) -> u64 {
        // 584 years fit.
        self.start.elapsed().as_nanos() as u64
    }

    fn cpu_ns(&self) -> Option<u64> {
        let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).ok()?;
        Duration::from(time).as_nanos().try_into().ok()
    }
}
