//! What a sleep costs on this machine, measured by the loop as it runs.
//!
//! Two numbers, taken from the quicker sleeps: how late the thread is when it is woken, and how much of its CPU time the sleep takes. Both
//! differ by a factor of ten between machines (a virtual CPU that halts is woken by its host), so neither
//! is a constant.
//!
//! - **Lateness**: the loop's first [`FIRST_SAMPLES`] sleeps, and later one in [`TIMED_EVERY`], end by a
//!   timeout of [`TIMED_SLEEP_NS`]. The time between the timeout and the thread running again is the
//!   lateness. An interrupt that wakes the thread for a kick or a completion takes the same way. A
//!   loop that has nothing to do sleeps without such a timeout after its first samples.
//! - **CPU time**: the thread's CPU clock is read around one sleep in [`CPU_EVERY`] that submits nothing.

use std::cell::Cell;

/// What one sleep costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Price {
    /// From the event to the thread running, nanoseconds.
    pub late_ns: u64,
    /// CPU time of the thread for going to sleep and waking up, nanoseconds.
    pub cpu_ns: u64,
}

impl Default for Price {
    /// Between a processor core and a virtual one: for loops that cannot measure, and until they have.
    fn default() -> Self {
        Price { late_ns: 16_000, cpu_ns: 6_000 }
    }
}

/// Samples that are taken at once, before any sleep is left alone.
const FIRST_SAMPLES: u32 = 8;

/// The sleeps from one that the meter ends by a timeout to the next.
const TIMED_EVERY: u32 = 1024;

/// Long enough for an idle CPU to halt, nanoseconds.
const TIMED_SLEEP_NS: u64 = 20_000;

/// The sleeps from one reading of the CPU time to the next.
const CPU_EVERY: u32 = 64;

/// The most that a sample counts for: an I/O thread that lost its CPU to another thread was not asleep
/// for so long.
const MAX_SAMPLE_NS: u64 = 200_000;

/// How the next sleep is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gauge {
    /// Not at all.
    None,
    /// By a timeout this long, nanoseconds, unless something comes before.
    Lateness(u64),
    /// By the thread's CPU clock.
    Cpu,
}

/// Keeps the price up to date.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    price: Cell<Price>,
    sleeps: Cell<u32>,
    late_samples: Cell<u32>,
    cpu_samples: Cell<u32>,
}

impl Meter {
    pub(crate) fn price(&self) -> Price {
        self.price.get()
    }

    /// How to measure the sleep that begins now. `submits`: the system call that sleeps does other work
    /// too. `for_ns`: how long the sleep may take.
    pub(crate) fn next_sleep(&self, submits: bool, for_ns: Option<u64>) -> Gauge {
        let sleeps = self.sleeps.get().wrapping_add(1);
        self.sleeps.set(sleeps);
        let is_long = for_ns.is_none_or(|ns| ns > 2 * TIMED_SLEEP_NS);
        let late = self.late_samples.get() < FIRST_SAMPLES || sleeps.is_multiple_of(TIMED_EVERY);
        let cpu = self.cpu_samples.get() < FIRST_SAMPLES || sleeps.is_multiple_of(CPU_EVERY);
        match (submits, late && is_long, cpu) {
            (false, true, _) => Gauge::Lateness(TIMED_SLEEP_NS),
            (false, false, true) => Gauge::Cpu,
            (true, ..) | (false, false, false) => Gauge::None,
        }
    }

    /// A timeout was noticed so late, nanoseconds.
    pub(crate) fn was_late(&self, ns: u64) {
        let price = self.price.get();
        let late_ns = follow(price.late_ns, ns, &self.late_samples);
        self.price.set(Price { late_ns, ..price });
    }

    /// A sleep took so much CPU time, nanoseconds.
    pub(crate) fn took_cpu(&self, ns: u64) {
        let price = self.price.get();
        let cpu_ns = follow(price.cpu_ns, ns, &self.cpu_samples);
        self.price.set(Price { cpu_ns, ..price });
    }
}

/// The price with a new sample: the first is taken as it is, later ones count for a quarter if they are below
/// the price, and for a sixteenth if they are above it. A thread that waited for its CPU behind another one was
/// not late because it slept, and polling for longer would make the other one wait.
fn follow(price: u64, sample: u64, samples: &Cell<u32>) -> u64 {
    let sample = sample.min(MAX_SAMPLE_NS);
    let count = samples.get().saturating_add(1);
    samples.set(count);
    match (count, sample < price) {
        (1, _) => sample,
        (_, true) => price - price / 4 + sample / 4,
        (_, false) => price - price / 16 + sample.min(price.saturating_mul(4)) / 16,
    }
    .max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_sleeps_are_timed_and_then_few() {
        let meter = Meter::default();
        for _ in 0..FIRST_SAMPLES {
            assert_eq!(meter.next_sleep(false, None), Gauge::Lateness(TIMED_SLEEP_NS));
            meter.was_late(30_000);
        }
        let mut gauges = [0; 3];
        for _ in 0..10 * TIMED_EVERY {
            match meter.next_sleep(false, None) {
                Gauge::None => gauges[0] += 1,
                Gauge::Lateness(_) => gauges[1] += 1,
                Gauge::Cpu => {
                    gauges[2] += 1;
                    meter.took_cpu(9_000);
                }
            }
        }
        assert_eq!(meter.price(), Price { late_ns: 30_000, cpu_ns: 9_000 });
        assert_eq!(gauges[1], 10);
        assert!((100..200).contains(&gauges[2]), "{gauges:?}");
    }

    #[test]
    fn a_sleep_that_submits_or_is_short_is_not_timed() {
        let meter = Meter::default();
        assert_eq!(meter.next_sleep(true, None), Gauge::None);
        assert_eq!(meter.next_sleep(false, Some(TIMED_SLEEP_NS)), Gauge::Cpu);
    }

    #[test]
    fn the_price_follows_the_machine_and_not_one_lost_turn() {
        let meter = Meter::default();
        for _ in 0..100 {
            meter.was_late(3_000);
        }
        meter.was_late(50_000_000);
        assert!(meter.price().late_ns < 5_000, "{:?}", meter.price());
        for _ in 0..200 {
            meter.was_late(40_000);
        }
        assert!(meter.price().late_ns > 39_000, "{:?}", meter.price());
        for _ in 0..20 {
            meter.was_late(10_000);
        }
        assert!(meter.price().late_ns < 11_000, "{:?}", meter.price());
    }
}
