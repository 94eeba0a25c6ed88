//! What a sleep costs on this machine, measured by the loop as it runs.
//!
//! Two numbers, taken from the quicker sleeps: how late the thread is when it is woken, and how much of its
//! CPU time the sleep takes. Both differ by a factor of ten between machines (a virtual CPU that halts is
//! woken by its host), so neither is a constant. A third one tells how much a thread that polls takes from
//! others.
//!
//! - **Lateness**: the loop's first 8 sleeps, and later one in 1024, end by a timeout of 20 us. The time between the timeout and the thread running again is the
//!   lateness. An interrupt that wakes the thread for a kick or a completion takes the same way. A
//!   loop that has nothing to do sleeps without such a timeout after its first samples.
//! - **CPU time**: the thread's CPU clock is read around one sleep in 64 that submits nothing.
//! - **Share of the CPU**: one wait in 256 asks the kernel how long the thread has run, and how
//!   long it has waited for another thread to leave the CPU.

use std::cell::Cell;

use crate::clock::CpuShare;
use crate::stats::LoopStats;

/// What one sleep costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Price {
    /// From the event to the thread running, nanoseconds, at most [`MAX_NS`].
    pub(super) late_ns: u64,
    /// CPU time of the thread for going to sleep and waking up, nanoseconds, at most [`MAX_NS`].
    pub(super) cpu_ns: u64,
    /// Of the time in which the thread could run, the part in which it did, in 1/[`WHOLE`].
    pub(super) share: u64,
}

/// The most that a sleep is taken to cost: a second. No sum of such prices overflows.
const MAX_NS: u64 = 1_000_000_000;

/// The [share](Price::share) of a thread that never waits for another one.
pub(super) const WHOLE: u64 = 1024;

impl Default for Price {
    /// Between a processor core and a virtual one: for loops that cannot measure, and until they have.
    fn default() -> Self {
        Price::new(16_000, 6_000)
    }
}

impl Price {
    /// Returns the price for a thread that has its CPU for itself.
    ///
    /// A sleep is `late_ns` nanoseconds late and takes `cpu_ns` nanoseconds of CPU time. Values above a
    /// second count as a second.
    pub fn new(late_ns: u64, cpu_ns: u64) -> Self {
        Price { late_ns: late_ns.min(MAX_NS), cpu_ns: cpu_ns.min(MAX_NS), share: WHOLE }
    }

    /// Returns the price for a thread that shares its CPU.
    ///
    /// `percent`: the part of the time in which the thread could run that it has the CPU, from 0 to 100;
    /// larger values count as 100.
    #[must_use]
    pub fn with_share(self, percent: u64) -> Self {
        Price { share: percent.min(100) * WHOLE / 100, ..self }
    }

    /// What the loop of `stats` has measured, for a thread that has its CPU for itself.
    pub(super) fn of(stats: &LoopStats) -> Self {
        let or = |ns, default| if ns == 0 { default } else { ns };
        let Price { late_ns, cpu_ns, .. } = Price::default();
        Price::new(or(stats.sleep_late_ns.get(), late_ns), or(stats.sleep_cpu_ns.get(), cpu_ns))
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

/// The waits from one reading of the share of the CPU to the next.
const SHARE_EVERY: u32 = 256;

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
    waits: Cell<u32>,
    last_share: Cell<Option<CpuShare>>,
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

impl Meter {
    /// Whether this wait is one that asks how the CPU was shared.
    pub(crate) fn is_share_due(&self) -> bool {
        let waits = self.waits.get().wrapping_add(1);
        self.waits.set(waits);
        waits.is_multiple_of(SHARE_EVERY)
    }

    /// The thread has shared its CPU like this since it began. Each reading counts for half.
    pub(crate) fn shared(&self, now: CpuShare) {
        let Some(before) = self.last_share.replace(Some(now)) else { return };
        let ran = now.ran_ns.saturating_sub(before.ran_ns);
        let waited = now.waited_ns.saturating_sub(before.waited_ns);
        let Some(share) = ran.saturating_mul(WHOLE).checked_div(ran.saturating_add(waited)) else {
            return;
        };
        let price = self.price.get();
        self.price.set(Price { share: (price.share + share) / 2, ..price });
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
        assert_eq!(meter.price(), Price::new(30_000, 9_000));
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
    fn the_share_is_that_of_late() {
        let meter = Meter::default();
        meter.shared(CpuShare { ran_ns: 1_000, waited_ns: 1_000_000 });
        assert_eq!(meter.price().share, WHOLE, "what was before the loop does not count");
        for i in 1..20 {
            meter.shared(CpuShare {
                ran_ns: 1_000 + i * 100_000,
                waited_ns: 1_000_000 + i * 300_000,
            });
        }
        assert!(meter.price().share.abs_diff(WHOLE / 4) < 4, "{:?}", meter.price());
        meter.shared(CpuShare { ran_ns: 1_901_000, waited_ns: 6_700_000 });
        assert!(meter.price().share.abs_diff(WHOLE / 4) < 4, "no time has passed");
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
