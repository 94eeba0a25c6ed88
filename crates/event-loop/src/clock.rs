//! Time, behind a trait narrow enough for a simulation to stand in.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};

/// A monotonic clock, nanoseconds since an arbitrary start.
pub trait Clock {
    /// Returns the present time, in nanoseconds since the clock's start.
    fn now_ns(&self) -> u64;

    /// Returns the CPU time of the calling thread, in nanoseconds.
    ///
    /// `None`: the system has no such clock, or the time is simulated.
    fn cpu_ns(&self) -> Option<u64>;

    /// Returns how the calling thread has shared its CPU.
    ///
    /// `None`: the system does not tell, or the time is simulated.
    fn cpu_share(&self) -> Option<CpuShare>;
}

/// How a thread has shared its CPU with others, since it began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuShare {
    /// Time on a CPU, nanoseconds.
    pub ran_ns: u64,
    /// Time that the thread could have run while another one had the CPU, nanoseconds.
    pub waited_ns: u64,
}

/// `CLOCK_MONOTONIC`, by the vDSO: no system call.
#[derive(Debug)]
pub struct MonotonicClock {
    start: Instant,
    /// proc(5), `schedstat`. Opened early: a confined thread opens nothing.
    schedstat: Option<File>,
}

impl MonotonicClock {
    /// Returns a clock for the calling thread.
    ///
    /// All clocks of a process return the same time, which began with the first clock.
    pub fn new() -> Self {
        static START: OnceLock<Instant> = OnceLock::new();
        MonotonicClock {
            start: *START.get_or_init(Instant::now),
            schedstat: File::open("/proc/thread-self/schedstat").ok(),
        }
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

    fn cpu_share(&self) -> Option<CpuShare> {
        let mut buffer = [0; 64];
        let read = self.schedstat.as_ref()?.read_at(&mut buffer, 0).ok()?;
        let mut numbers = str::from_utf8(buffer.get(..read)?).ok()?.split_ascii_whitespace();
        let mut next = || numbers.next()?.parse().ok();
        Some(CpuShare { ran_ns: next()?, waited_ns: next()? })
    }
}
