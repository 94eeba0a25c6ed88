//! Counting per second, after a warm-up.

use std::cell::Cell;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use vcpu::clock::thread_cpu;

/// Counts on one thread, for a while.
#[derive(Debug)]
pub(crate) struct Meter {
    run_time: Duration,
    clock: fn() -> Duration,
    /// When counting began; first the warm-up, then what counts.
    since: Cell<Duration>,
    warm: Cell<bool>,
    count: Cell<u64>,
    /// The clock is read at this count.
    check_at: Cell<u64>,
    rate: Cell<Option<f64>>,
}

/// Counts between two looks at the clock.
const CHECK_EVERY: u64 = 64;

impl Meter {
    /// Counting starts now; what counts, after a fifth of `run_time`.
    pub(crate) fn new(run_time: Duration) -> Self {
        Self::with_clock(run_time, wall_clock)
    }

    /// As [`new`](Self::new), by this thread's CPU time: where what is counted waits in between.
    pub(crate) fn of_cpu_time(run_time: Duration) -> Self {
        Self::with_clock(run_time, thread_cpu)
    }

    fn with_clock(run_time: Duration, clock: fn() -> Duration) -> Self {
        Meter {
            run_time,
            clock,
            since: Cell::new(clock()),
            warm: Cell::new(false),
            count: Cell::new(0),
            check_at: Cell::new(CHECK_EVERY),
            rate: Cell::new(None),
        }
    }

    /// So many more are done. `false`: the time is over.
    pub(crate) fn add(&self, n: u64) -> bool {
        self.count.set(self.count.get() + n);
        self.count.get() < self.check_at.get() || self.check()
    }

    /// As [`add`](Self::add), of what is so slow that the clock is read each time.
    pub(crate) fn add_slow(&self, n: u64) -> bool {
        self.count.set(self.count.get() + n);
        self.check()
    }

    #[cold]
    fn check(&self) -> bool {
        let now = (self.clock)();
        let passed = now - self.since.get();
        if !self.warm.get() && passed >= self.run_time / 5 {
            self.warm.set(true);
            self.since.set(now);
            self.count.set(0);
        } else if self.warm.get() && passed >= self.run_time && self.rate.get().is_none() {
            self.rate.set(Some(self.count.get() as f64 / passed.as_secs_f64()));
        }
        self.check_at.set(self.count.get() + CHECK_EVERY);
        self.rate.get().is_none()
    }

    /// Thousands per second.
    pub(crate) fn thousands(&self) -> f64 {
        self.rate.get().unwrap_or(f64::NAN) / 1e3
    }
}

fn wall_clock() -> Duration {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed()
}

/// The median of times, in microseconds.
pub(crate) fn median_us(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times.get(times.len() / 2).map_or(f64::NAN, |time| time.as_secs_f64() * 1e6)
}
