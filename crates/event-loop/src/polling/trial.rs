//! Whether events come sooner when the loop polls for them.
//!
//! Where nothing is in flight, what the histogram knows does not tell whether the next request comes by
//! the clock or because the last answer came. By the clock, polling only saves the waking up. But a
//! guest that waits for each answer asks sooner when it is answered sooner, and it may itself fall
//! asleep when it is not: then there are two states, both of which look right from within. So each is
//! tried from time to time, ever more seldom while the outcome stays the same.

/// Waits after a change that count for nothing: the other side has to get used to it.
const SETTLE: u32 = 16;

/// Waits of a trial, those of settling included.
const TRIAL: u32 = SETTLE + 64;

/// Waits between trials at first.
const PERIOD: u32 = 512;

/// How many times that doubles at most.
const MAX_BACKOFF: u32 = 6;

/// A new wait counts 1/2^this in the mean.
const WEIGHT: u32 = 5;

/// The state of the trials: frugal at first.
#[derive(Debug, Clone, Default)]
pub(super) struct Trial {
    /// Which is in force: polling for as long as is worth it to a guest, or only for what saves CPU
    /// time.
    polls: bool,
    /// That is a trial of what is not thought best.
    is_trial: bool,
    /// Waits since the last change, and how many of those that count ended in a sleep.
    waits: u32,
    sleeps: u32,
    /// Mean interval without and with polling, nanoseconds; 0: not known.
    means: [u64; 2],
    backoff: u32,
}

impl Trial {
    /// Whether to poll as if a guest waited.
    pub(super) fn polls(&self) -> bool {
        self.polls
    }

    /// A wait took `interval` ns, the time to wake up taken off as far as it is known.
    pub(super) fn record(&mut self, interval: u64, slept: bool, max: u64) {
        self.waits += 1;
        if self.waits <= SETTLE {
            return;
        }
        self.sleeps += u32::from(slept);
        let mean = &mut self.means[usize::from(self.polls)];
        // A few long pauses must not hide how soon the rest comes.
        let interval = interval.min(2 * max);
        *mean = match *mean {
            0 => interval,
            mean => mean - (mean >> WEIGHT) + (interval >> WEIGHT),
        };
        if self.is_trial && self.waits >= TRIAL {
            self.decide();
        } else if !self.is_trial && self.waits >= PERIOD << self.backoff {
            self.begin(max);
        }
    }

    fn begin(&mut self, max: u64) {
        (self.waits, self.sleeps) = (0, 0);
        // What takes longer than an avoided sleep is worth is not polled for.
        if self.polls || self.means[0] < max / 8 * 5 {
            self.is_trial = true;
            self.polls = !self.polls;
            self.means[usize::from(self.polls)] = 0;
        }
    }

    fn decide(&mut self) {
        let [sleeping, polling] = self.means;
        // Without sleeps a trial of sleeping says nothing.
        let tells = self.polls || self.sleeps > (TRIAL - SETTLE) / 8;
        let pays = polling < sleeping / 2 || !tells;
        // A trial that changes nothing makes the next one rarer.
        self.backoff = if pays == self.polls { 0 } else { (self.backoff + 1).min(MAX_BACKOFF) };
        (self.polls, self.is_trial) = (pays, false);
        (self.waits, self.sleeps) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: u64 = 32768;

    /// Tells of `waits` waits; each takes what `load` says of one that is polled for or not, and was
    /// slept if it is not polled for and `sleeps` says so. The share that was polled for, percent.
    fn run(trial: &mut Trial, waits: u32, load: fn(bool) -> u64, sleeps: bool) -> u32 {
        let mut polled = 0;
        for _ in 0..waits {
            polled += u32::from(trial.polls());
            trial.record(load(trial.polls()), !trial.polls() && sleeps, MAX);
        }
        polled * 100 / waits
    }

    /// A guest that waits for its answer, and falls asleep when it does not come at once.
    fn closed(polls: bool) -> u64 {
        if polls { 1_500 } else { 13_000 }
    }

    fn open(_: bool) -> u64 {
        10_000
    }

    #[test]
    fn a_guest_that_is_faster_for_it_is_polled_for() {
        let mut trial = Trial::default();
        run(&mut trial, PERIOD + TRIAL, closed, true);
        assert!(run(&mut trial, 100_000, closed, true) > 90);
    }

    #[test]
    fn arrivals_by_the_clock_are_not_and_the_trials_become_rare() {
        let mut trial = Trial::default();
        run(&mut trial, 20_000, open, true);
        assert!(run(&mut trial, 100_000, open, true) < 2);
        // What comes too late is not even tried.
        assert_eq!(run(&mut Trial::default(), 10_000, |_| 25_000, true), 0);
    }

    #[test]
    fn a_change_of_load_is_found_out() {
        let mut trial = Trial::default();
        run(&mut trial, 10_000, open, true);
        let longest = (PERIOD << MAX_BACKOFF) + TRIAL;
        run(&mut trial, longest, closed, true);
        assert!(trial.polls());
        run(&mut trial, 2 * longest, open, true);
        assert!(run(&mut trial, 10_000, open, true) < 20);
    }

    #[test]
    fn a_trial_of_sleeping_without_sleeps_changes_nothing() {
        let mut trial = Trial::default();
        run(&mut trial, PERIOD + TRIAL, closed, true);
        assert!(trial.polls());
        assert!(run(&mut trial, 20_000, |_| 1_500, false) > 80);
    }
}
