//! The default policy: polls if polling costs less than a sleep, by measured costs.
//!
//! Before each wait the loop may poll for a window of time and then sleep. Polling costs the CPU time
//! until the event. A sleep costs CPU time on both ends, since the other side has to wake this one, and the
//! event is served late. In nanoseconds of CPU time, with [`Price`] as the loop measures it:
//!
//! ```text
//! cost of a wait of length g with window w  =  g                if g <= w
//!                                              w + sleep        otherwise
//! sleep, nothing in flight    =  (2 * cpu + worth * late * (n + 1) / 2) / n
//! sleep, N operations in flight, an event every g on average:
//!                                (cpu + worth * late * (n + 1) / 2 * late / (N * g + late)) / n
//! ```
//!
//! `worth` is what a nanosecond of latency is worth in CPU time: 4, 1/2 or 0, by [`PollGoal`], and less where
//! the thread shares its CPU (its share to the fourth power). A thread that often waits for others to leave
//! the CPU makes them wait as well when it polls. One wake-up serves `n` events: 1 + `late` / g, at most the number of operations in flight
//! and just completed. So a deep queue sleeps cheaply. For operations that take `N * g`, being late by `late`
//! matters only by its share.
//!
//! **The window** of least expected cost is chosen from the recent waits. They are kept as a histogram per
//! situation (which source had the last events, and whether operations are in flight), since the time until
//! the next event depends on what has just happened. Of windows with about the same cost the longest is
//! used, so that a rare late event does not end in a sleep. A window opens only if it saves a fifth of
//! a sleep.
//!
//! **Looking.** A wait that ended in a sleep says little. It holds the time to wake up; the other side may
//! itself have slept because its answer was late; and arrivals by the clock seem closer than they are. So
//! such a wait is recorded as long as it took, and situations that do not poll look from time to time. All of
//! them look together, since a sleep in one makes the next one late. They forget their waits and poll
//! 24 times for as long as a sleep is worth, plus the lateness of the other side. If polling pays, they
//! keep polling. If not, or if it stops paying before other waits have replaced those of the look, the next look
//! comes after four times as many waits, at most 8,192.

use super::policy::{PollGoal, PollParams, SourceKind};
use super::price::{Price, WHOLE};

/// Buckets: one up to 256 ns, then four per octave.
const BUCKETS: usize = 49;

/// The start of the last bucket. Longer waits are not polled for.
const LONGEST_NS: u64 = end_of(BUCKETS - 2);

/// Intervals a histogram holds before it forgets half.
const MEMORY: u8 = 128;

/// Number of waits polled in a look.
const LOOKS: u8 = 24;

/// The first waits of a look are not used: the other side has to adapt to being polled.
const SETTLE: u8 = 8;

/// Number of waits between two looks, at first.
const PERIOD: u64 = 32;

/// Maximum number of times that the period quadruples.
const MAX_BACKOFF: u8 = 4;

/// A look ends early after this many waits without an event.
const MISSES: u8 = 4;

/// Waits between choices of a window.
const CHOOSE_EVERY: u64 = 8;

/// Bit of a situation: operations are in flight.
const IN_FLIGHT: usize = 4;

/// The recent waits of each situation.
#[derive(Debug, Clone, Default)]
pub(super) struct Measured {
    situations: [Situation; 8],
    /// The current situation: the source of the last events (1 ring, 2 others), and [`IN_FLIGHT`].
    now: usize,
    /// Operations in flight in the current situation, plus those that completed just before.
    in_flight: u64,
    answered: u64,
    /// The source of this iteration's events.
    events: usize,
}

/// The waits in one situation.
#[derive(Debug, Clone)]
struct Situation {
    counts: [u8; BUCKETS],
    total: u8,
    /// Waits since the last look, or since the window opened or closed.
    waits: u64,
    /// Remaining waits of a look.
    looks: u8,
    /// No wait of this look found an event.
    missed: bool,
    /// How often the period between looks has quadrupled.
    backoff: u8,
    /// The window of least cost; 0: sleep at once.
    window: u64,
}

impl Default for Situation {
    fn default() -> Self {
        Situation {
            counts: [0; BUCKETS],
            total: 0,
            waits: 0,
            looks: 0,
            missed: false,
            backoff: 0,
            window: 0,
        }
    }
}

/// The price of a sleep for one wait, and values derived from it.
#[derive(Debug, Clone, Copy)]
struct Terms {
    price: Price,
    goal: PollGoal,
    in_flight: u64,
    answered: u64,
    max_ns: u64,
}

impl Terms {
    /// The cost of a sleep if events come every `gap` ns.
    fn sleep(&self, gap: u64) -> u64 {
        let Price { late_ns: late, cpu_ns: cpu, .. } = self.price;
        let gap = gap.max(1);
        let served = self.together().min(1 + late / gap);
        let delay = u128::from(late) * u128::from(served + 1) / 2;
        if self.in_flight == 0 {
            return (2 * cpu + worth_of(delay as u64, self.price, self.goal)) / served;
        }
        let latency = u128::from(self.in_flight) * u128::from(gap) + u128::from(late);
        let felt = (delay * u128::from(late) / latency) as u64;
        (cpu + worth_of(felt, self.price, self.goal)) / served
    }

    /// How many events one wake-up may serve.
    fn together(&self) -> u64 {
        (self.in_flight + self.answered).max(1)
    }

    /// The cost of an event found by polling, in addition to the time polled. An iteration serves it alone and
    /// submits its I/O; a wake-up would have served it with others.
    fn found(&self) -> u64 {
        if self.together() > 1 { self.price.cpu_ns / 8 } else { 0 }
    }

    /// Duration of a look's polling, nanoseconds.
    fn look(&self) -> u64 {
        let longest = match self.in_flight {
            0 => look_ns(self.price, self.goal),
            // The duration of disk I/O does not depend on whether the other side sleeps.
            _ => self.price.cpu_ns + worth_of(self.price.late_ns, self.price, self.goal),
        };
        longest.min(self.max_ns).min(LONGEST_NS)
    }
}

/// `ns` times the fourth power of the thread's share of its CPU: half a CPU leaves a sixteenth.
fn shared(ns: u64, price: Price) -> u64 {
    let power = u128::from(price.share).pow(4);
    (u128::from(ns) * power / u128::from(WHOLE).pow(4)) as u64
}

/// The value of `late_ns` nanoseconds of latency in CPU time.
fn worth_of(late_ns: u64, price: Price, goal: PollGoal) -> u64 {
    shared(goal.worth_of(late_ns), price)
}

/// Returns the longest time that is ever polled, in nanoseconds.
///
/// The time is the value of a sleep, plus the wake-up of the other side, which may sleep too.
pub fn look_ns(price: Price, goal: PollGoal) -> u64 {
    let Price { late_ns: late, cpu_ns: cpu, .. } = price;
    (2 * cpu + worth_of(late, price, goal) + shared(late, price)).min(LONGEST_NS)
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

/// The end of a bucket, nanoseconds; the last one has no end.
const fn end_of(bucket: usize) -> u64 {
    (4 + bucket as u64 % 4) << (6 + bucket / 4)
}

/// About the middle of a bucket.
const fn middle_of(bucket: usize) -> u64 {
    end_of(bucket) - end_of(bucket) / 10
}

impl Measured {
    pub(super) fn begin(&mut self) {
        self.events = 0;
    }

    pub(super) fn account(&mut self, kind: SourceKind, had_event: bool) {
        if had_event {
            self.events |= if kind == SourceKind::Ring { 1 } else { 2 };
        }
    }

    /// Returns the window for the next wait, after a wait of `interval` ns.
    pub(super) fn end(
        &mut self,
        params: &PollParams,
        price: Price,
        interval: u64,
        in_flight: u64,
        answered: u64,
    ) -> u64 {
        let terms = Terms {
            price,
            goal: params.goal,
            in_flight: self.in_flight,
            answered: self.answered,
            max_ns: params.max_ns,
        };
        if self.situations[self.now].record(interval, &terms) {
            // All situations look together, as a sleep in one delays the next.
            for (situation, i) in self.situations.iter_mut().zip(0..) {
                let in_flight = if i & IN_FLIGHT > 0 { terms.in_flight.max(1) } else { 0 };
                let short = Terms { in_flight, ..terms }.look() + terms.price.late_ns;
                situation.look(short);
            }
        }
        self.now = self.events | if in_flight > 0 { IN_FLIGHT } else { 0 };
        (self.in_flight, self.answered) = (in_flight, answered);
        let situation = &self.situations[self.now];
        match situation.looks {
            0 => situation.window.min(params.max_ns),
            _ => Terms { in_flight, answered, ..terms }.look(),
        }
    }
}

impl Situation {
    /// Records a wait. Returns `true` if a look is due.
    fn record(&mut self, interval: u64, terms: &Terms) -> bool {
        if self.looks > LOOKS - SETTLE {
            self.looks -= 1;
            self.missed &= interval > terms.look();
            if self.missed && self.looks == LOOKS - MISSES {
                self.end_look(terms);
            }
            return false;
        }
        self.counts[bucket(interval)] += 1;
        self.total += 1;
        if self.total >= MEMORY {
            self.counts.iter_mut().for_each(|count| *count /= 2);
            self.total = self.counts.iter().sum();
        }
        if self.looks > 0 {
            self.looks -= 1;
            if self.looks == 0 {
                self.end_look(terms);
            }
            return false;
        }
        self.waits += 1;
        if self.waits.is_multiple_of(CHOOSE_EVERY) && self.window > 0 {
            self.window = self.cheapest(terms);
            if self.window == 0 {
                self.backoff = if self.waits < u64::from(MEMORY) { self.next_backoff() } else { 0 };
                self.waits = 0;
            }
        }
        let is_due = self.window == 0 && self.waits >= PERIOD << (2 * self.backoff);
        if is_due {
            self.waits = 0;
        }
        is_due
    }

    /// Begins a look in a situation that does not poll and whose waits may be long only because of sleeps, as
    /// many are `short`.
    fn look(&mut self, short: u64) {
        let near: u8 = self.counts[..=bucket(short)].iter().sum();
        if self.window == 0 && self.looks == 0 && near > self.total / 4 {
            (self.counts, self.total) = ([0; BUCKETS], 0);
            (self.looks, self.missed, self.waits) = (LOOKS, true, 0);
        }
    }

    fn end_look(&mut self, terms: &Terms) {
        self.looks = 0;
        self.waits = 0;
        self.window = self.cheapest(terms);
        if self.window == 0 {
            self.backoff = self.next_backoff();
        }
    }

    fn next_backoff(&self) -> u8 {
        MAX_BACKOFF.min(self.backoff + 1)
    }

    /// The longest window with about the least expected cost; 0 if sleeping at once costs less.
    fn cheapest(&self, terms: &Terms) -> u64 {
        let total = u64::from(self.total);
        let sum: u64 = self.counts.iter().zip(0..).map(|(n, i)| u64::from(*n) * middle_of(i)).sum();
        let sleep = terms.sleep(sum / total.max(1));
        let cost_of_none = total * sleep;
        let mut costs = [u64::MAX; BUCKETS];
        let (mut polled, mut caught) = (0, 0);
        for (bucket, count) in self.counts.iter().enumerate() {
            let (end, count) = (end_of(bucket), u64::from(*count));
            if end > terms.look() {
                break;
            }
            polled += count * (middle_of(bucket) + terms.found());
            caught += count;
            costs[bucket] = polled + (total - caught) * (end + sleep);
        }
        let least = costs.iter().copied().min().unwrap_or(u64::MAX);
        // Hysteresis: alternating between two equal choices is worse than either.
        let enough = if self.window > 0 { cost_of_none } else { cost_of_none - cost_of_none / 5 };
        if least >= enough {
            return 0;
        }
        let about = least + cost_of_none / 64;
        costs.iter().rposition(|cost| *cost <= about).map_or(0, end_of)
    }
}
