//! The weighted adaptive polling policy: a pure value, no clock and no I/O.
//!
//! How long to busy-poll before sleeping follows how soon events have lately come, weighted so
//! that one odd interval does not throw the window away. After QEMU 10.1's AioContext polling.

/// An I/O thread's polling parameters, changeable while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PollParams {
    /// `poll-max-ns`: the longest window, nanoseconds. 0 turns polling off.
    pub max_ns: u64,
    /// `poll-grow`: the factor the window grows by. 0 means the default, 2.
    pub grow: u32,
    /// `poll-shrink`: the divisor it shrinks by. 0 means the default, 2.
    pub shrink: u32,
    /// `poll-weight`: a new interval counts 1/2^weight. 0 means the default, 3; at most 63.
    pub weight: u32,
}

impl Default for PollParams {
    fn default() -> Self {
        PollParams { max_ns: 32768, grow: 0, shrink: 0, weight: 0 }
    }
}

impl PollParams {
    fn grow(&self) -> u64 {
        if self.grow == 0 { 2 } else { self.grow.into() }
    }

    fn shrink(&self) -> u64 {
        if self.shrink == 0 { 2 } else { self.shrink.into() }
    }

    fn weight(&self) -> u32 {
        if self.weight == 0 { 3 } else { self.weight.min(63) }
    }
}

/// How soon one source's events have lately come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SourceInterval {
    /// Weighted mean, nanoseconds. 0: unknown, or longer than polling is worth.
    pub ns: u64,
}

impl SourceInterval {
    /// Accounts for an iteration that took `interval` ns from the start of its wait to its events,
    /// in which this source had an event, or had none.
    pub fn update(&mut self, params: &PollParams, interval: u64, had_event: bool) {
        if had_event {
            self.ns = if self.ns == 0 {
                interval
            } else {
                let weight = params.weight();
                (self.ns - (self.ns >> weight)).saturating_add(interval >> weight)
            };
        } else if self.ns > 0 {
            self.ns = self.ns.saturating_add(interval);
        }
        if self.ns > params.max_ns {
            self.ns = 0;
        }
    }
}

/// The window: how long to poll before sleeping, nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PollWindow {
    /// Nanoseconds, at most `poll-max-ns`.
    pub ns: u64,
}

/// What became of the window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Adjusted {
    /// It grew.
    Grown,
    /// It shrank.
    Shrunk,
    /// It stayed.
    Kept,
}

impl PollWindow {
    /// Follows `best`, the largest interval of the sources that had events in this iteration.
    pub fn adjust(&mut self, params: &PollParams, best: u64) -> Adjusted {
        if best > self.ns {
            self.ns = best.max(self.ns.saturating_mul(params.grow())).min(params.max_ns);
            Adjusted::Grown
        } else if best < self.ns / params.shrink() {
            self.ns /= params.shrink();
            Adjusted::Shrunk
        } else {
            Adjusted::Kept
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARAMS: PollParams = PollParams { max_ns: 32768, grow: 0, shrink: 0, weight: 0 };

    #[test]
    fn a_source_takes_its_first_interval_whole_and_then_an_eighth_of_each() {
        let mut source = SourceInterval::default();
        source.update(&PARAMS, 8000, true);
        assert_eq!(source.ns, 8000);
        source.update(&PARAMS, 16000, true);
        assert_eq!(source.ns, 8000 - 1000 + 2000);
    }

    #[test]
    fn a_quiet_source_ages_until_polling_for_it_is_not_worth_it() {
        let mut source = SourceInterval { ns: 30000 };
        source.update(&PARAMS, 2000, false);
        assert_eq!(source.ns, 32000);
        source.update(&PARAMS, 2000, false);
        assert_eq!(source.ns, 0, "beyond poll-max-ns");
        source.update(&PARAMS, 2000, false);
        assert_eq!(source.ns, 0, "an unknown interval does not age");
    }

    #[test]
    fn the_window_grows_to_what_is_needed_at_most_to_the_maximum() {
        let mut window = PollWindow::default();
        assert_eq!(window.adjust(&PARAMS, 5000), Adjusted::Grown);
        assert_eq!(window.ns, 5000);
        window.adjust(&PARAMS, 6000);
        assert_eq!(window.ns, 10000, "twice the window is more than was needed");
        window.adjust(&PARAMS, 32000);
        assert_eq!(window.ns, 32000);
        window.adjust(&PARAMS, 32700);
        assert_eq!(window.ns, 32768);
    }

    #[test]
    fn the_window_shrinks_only_below_half_and_only_by_half() {
        let mut window = PollWindow { ns: 10000 };
        assert_eq!(window.adjust(&PARAMS, 5000), Adjusted::Kept);
        assert_eq!(window.adjust(&PARAMS, 4999), Adjusted::Shrunk);
        assert_eq!(window.ns, 5000);
        window.adjust(&PARAMS, 0);
        assert_eq!(window.ns, 2500);
    }

    #[test]
    fn polling_off_never_opens_a_window() {
        let off = PollParams { max_ns: 0, ..PARAMS };
        let (mut source, mut window) = (SourceInterval::default(), PollWindow::default());
        for interval in [0, 1, 1000, u64::MAX] {
            source.update(&off, interval, true);
            window.adjust(&off, source.ns);
            assert_eq!((source.ns, window.ns), (0, 0));
        }
    }
}
