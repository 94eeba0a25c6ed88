//! The default policy: poll for as long as polling has lately been worth it.
//!
//! A wait is a ski rental: each nanosecond polled is rent, a sleep is the purchase, and whoever rents
//! until the price is spent pays at most twice what was needed. One who knows how the waits are
//! distributed does better (Karlin, Manasse, McGeoch and Owicki, 1994), and they can be learnt:
//!
//! - **What follows what.** How soon the next event comes depends on what has just happened: after a
//!   request came in the disk works, after a completion the guest does. So there is a histogram of
//!   intervals, in quarter octaves, for each combination of what brought the last events (the ring, a
//!   handler, both, neither) and whether operations are in flight: eight in all. It forgets half when it
//!   is full, so that it follows the load within some 200 waits.
//! - **The window** is the one of least expected cost: what is polled, plus for each wait that outlasts
//!   it the window in vain and the price of a sleep, 5/8 of `poll-max-ns`. So the maximum keeps its
//!   meaning: it says what an avoided sleep is worth. A slow disk gets a window of 0, a disk with a
//!   cache one just past the hits, however slow its misses are. Windows that cost next to nothing more
//!   are taken instead, the longest of them, so that rare late events do not cause sleeps.
//! - **Sharp or diffuse.** When the shortest window of about that cost is at most 1.5 times the mean wait
//!   that it catches, events come when they are expected, and the window is used. Otherwise arrivals
//!   look random (Poisson), and then no window is better than another: each trades polled time for
//!   sleeps at the same rate. With operations in flight, where a late wake-up delays the guest and with
//!   it its next request, the weighted window is used; without, polling has to pay for itself in CPU
//!   time alone, unless a [trial](super::trial) shows that events come sooner for it: then a guest
//!   waits for each answer.
//! - **Sleeping hides the truth**: the interval of a wait that ended in a sleep holds the time to wake
//!   up, which can be many times the wait. It is recorded as up to half of that, a guess that errs
//!   towards polling and is then put right; and each histogram begins with a few waits polled up to the
//!   maximum, and does so again from time to time where nothing is in flight and nothing is polled.

use super::policy::{PollParams, SourceKind};
use super::trial::Trial;

/// Buckets: one up to 256 ns, then four per octave.
const BUCKETS: usize = 49;

/// Intervals a histogram holds before it forgets half.
const MEMORY: u8 = 128;

/// Waits polled up to the maximum before anything is known.
const LOOKS: u16 = 8;

/// Waits before a histogram that polls for nothing looks again, at the earliest.
const LOOK_AGAIN: u16 = 512;

/// Waits between choices of a window.
const CHOOSE_EVERY: u16 = 8;

/// The bit of a situation that says that operations are in flight.
const IN_FLIGHT: usize = 4;

/// What is known of the waits, per situation.
#[derive(Debug, Clone, Default)]
pub(super) struct Histogram {
    situations: [Situation; 8],
    /// The present one: what brought the last events (1 ring, 2 others), and [`IN_FLIGHT`].
    now: usize,
    /// What brought the events of this iteration.
    events: usize,
    /// Whether polling brings events sooner, where nothing is in flight.
    trial: Trial,
}

/// The waits in one situation.
#[derive(Debug, Clone)]
struct Situation {
    counts: [u8; BUCKETS],
    total: u8,
    /// Waits since the last time of knowing nothing.
    waits: u16,
    /// The window of about least cost.
    window: u64,
    /// Events come when they are expected.
    is_sharp: bool,
    /// The window of least cost in CPU time alone.
    frugal: u64,
    /// What the loop was told last: an interval beyond it ended in a sleep.
    told: u64,
}

impl Default for Situation {
    fn default() -> Self {
        Situation {
            counts: [0; BUCKETS],
            total: 0,
            waits: 0,
            window: 0,
            is_sharp: false,
            frugal: 0,
            told: 0,
        }
    }
}

/// The bucket of an interval.
fn bucket(ns: u64) -> usize {
    if ns < 256 {
        return 0;
    }
    let octave = ns.ilog2();
    let quarter = (ns >> (octave - 2)) as usize & 3;
    ((octave as usize - 8) * 4 + quarter + 1).min(BUCKETS - 1)
}

/// Where a bucket ends, nanoseconds; the last one does not end.
fn end_of(bucket: usize) -> u64 {
    (4 + bucket as u64 % 4) << (6 + bucket / 4)
}

/// About the middle of a bucket.
fn middle_of(bucket: usize) -> u64 {
    end_of(bucket) - end_of(bucket) / 10
}

impl Histogram {
    pub(super) fn begin(&mut self) {
        self.events = 0;
    }

    pub(super) fn account(&mut self, kind: SourceKind, had_event: bool) {
        if had_event {
            self.events |= if kind == SourceKind::Ring { 1 } else { 2 };
        }
    }

    /// The window for the next wait, where `weighted` is that of the weighted policy.
    pub(super) fn end(
        &mut self,
        params: &PollParams,
        interval: u64,
        in_flight: bool,
        weighted: u64,
    ) -> u64 {
        // The last bucket's waits are never polled for.
        let max = params.max_ns.min(end_of(BUCKETS - 2));
        let was_in_flight = self.now & IN_FLIGHT != 0;
        let slept = interval > self.situations[self.now].told;
        let estimate = self.situations[self.now].record(interval, max, was_in_flight);
        if !was_in_flight {
            self.trial.record(estimate, slept, max);
        }
        self.now = self.events | if in_flight { IN_FLIGHT } else { 0 };
        let situation = &mut self.situations[self.now];
        let is_closed = !in_flight && self.trial.polls();
        situation.told = match situation {
            Situation { waits: ..LOOKS, .. } => max,
            Situation { window: 0, .. } if is_closed => max,
            Situation { window, .. } if is_closed => *window,
            Situation { window: 0, .. } => 0,
            Situation { is_sharp: true, window, .. } => *window,
            _ if in_flight => weighted,
            Situation { frugal, .. } => weighted.min(*frugal),
        };
        situation.told
    }
}

impl Situation {
    /// Returns the interval without what waking up is likely to have taken.
    fn record(&mut self, interval: u64, max: u64, in_flight: bool) -> u64 {
        let slept = interval > self.told;
        let waking = if slept { (interval / 2).min(max / 2) } else { 0 };
        let estimate = interval - waking;
        self.counts[bucket(estimate)] += 1;
        self.total += 1;
        if self.total >= MEMORY {
            self.counts.iter_mut().for_each(|count| *count /= 2);
            self.total = self.counts.iter().sum();
        }
        self.waits += 1;
        if self.waits < LOOKS || self.waits.is_multiple_of(CHOOSE_EVERY) {
            self.choose(max);
            if self.waits >= LOOK_AGAIN {
                self.waits -= CHOOSE_EVERY;
                self.look_again(max, in_flight);
            }
        }
        estimate
    }

    /// Forgets what is known if nothing is polled for and polling might pay after all: if it may have
    /// been the waking up that took the time.
    fn look_again(&mut self, max: u64, in_flight: bool) {
        let near: u8 = self.counts[..bucket(max / 8 * 5)].iter().sum();
        let is_closed = self.window == 0 || !in_flight && !self.is_sharp;
        if is_closed && near >= self.total / 8 {
            (self.counts, self.total, self.waits) = ([0; BUCKETS], 0, 0);
        }
    }

    fn choose(&mut self, max: u64) {
        let mut sleep = max / 8 * 5;
        if self.window > 0 {
            // Not to and fro between two that cost the same.
            sleep += sleep / 4;
        }
        let windows = self.cheapest(sleep, max);
        self.window = windows.longest;
        self.is_sharp = windows.shortest <= windows.mean + windows.mean / 2;
        self.frugal = self.cheapest(max / 16 * 3, max).longest;
    }

    /// The windows whose expected cost, where a sleep costs `sleep`, is next to the least.
    fn cheapest(&self, sleep: u64, max: u64) -> Windows {
        let total = u64::from(self.total);
        let cost_of_none = total * sleep;
        let mut costs = [u64::MAX; BUCKETS];
        let mut least = cost_of_none;
        let (mut polled, mut caught) = (0, 0);
        for (bucket, count) in self.counts.iter().enumerate() {
            let (end, count) = (end_of(bucket), u64::from(*count));
            if end > max {
                break;
            }
            polled += count * middle_of(bucket);
            caught += count;
            costs[bucket] = polled + (total - caught) * (end + sleep);
            least = least.min(costs[bucket]);
        }
        if least == cost_of_none {
            return Windows::default();
        }
        let within = |slack: u64| move |cost: &u64| *cost <= least + slack;
        let shortest = costs.iter().position(within(cost_of_none / 8)).unwrap_or(0);
        let longest = costs.iter().rposition(within(cost_of_none / 256)).unwrap_or(0);
        let (mut waits, mut sum) = (0, 0);
        for (bucket, count) in self.counts.iter().enumerate().take(shortest + 1) {
            waits += u64::from(*count);
            sum += u64::from(*count) * middle_of(bucket);
        }
        Windows { shortest: end_of(shortest), mean: sum / waits.max(1), longest: end_of(longest) }
    }
}

/// Windows that cost next to the least; all 0 when not to poll costs least.
#[derive(Default)]
struct Windows {
    /// The shortest that costs little more.
    shortest: u64,
    /// The mean of the waits that it catches.
    mean: u64,
    /// The longest that costs hardly more.
    longest: u64,
}
