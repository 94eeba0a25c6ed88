//! The start times of requests.

/// How requests arrive at the device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Arrivals {
    /// The next request starts when a slot is free: the device sets the pace.
    Closed,
    /// The next request starts this many nanoseconds after the last answer: a guest that computes in between.
    Thinking(u64),
    /// Requests start at fixed times, whether or not the device keeps up.
    Paced(Pace),
}

/// A fixed rate, in equal bursts at equal distances.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Pace {
    /// Requests per second, over all queues.
    pub(crate) per_second: f64,
    /// Requests that arrive at the same moment. A burst is the same for every server. A client that submits everything that
    /// became due during its sleep would send larger batches to a slower server.
    pub(crate) burst: u32,
}

/// The arrival times of one queue. Time is in nanoseconds from an origin of the caller's.
#[derive(Debug)]
pub(crate) struct Schedule {
    clock: Clock,
}

#[derive(Debug)]
enum Clock {
    None,
    Thinking { ns: u64, due: u64 },
    Burst(BurstClock),
}

#[derive(Debug)]
struct BurstClock {
    start: u64,
    gap: f64,
    burst: u32,
    bursts_begun: u64,
    left_in_burst: u32,
    due: u64,
}

impl Schedule {
    /// A schedule that begins at `start`, for one of `queues` queues that share the load evenly.
    pub(crate) fn new(arrivals: Arrivals, queues: usize, start: u64) -> Self {
        let clock = match arrivals {
            Arrivals::Closed => Clock::None,
            Arrivals::Thinking(ns) => Clock::Thinking { ns, due: start },
            Arrivals::Paced(pace) => Clock::Burst(BurstClock {
                start,
                gap: 1e9 * f64::from(pace.burst) * queues as f64 / pace.per_second,
                burst: pace.burst,
                bursts_begun: 0,
                left_in_burst: pace.burst,
                due: start,
            }),
        };
        Self { clock }
    }

    /// When the next request arrives; `None` for as soon as a slot is free.
    pub(crate) fn due(&self) -> Option<u64> {
        match &self.clock {
            Clock::None => None,
            Clock::Thinking { due, .. } => Some(*due),
            Clock::Burst(clock) => Some(clock.due),
        }
    }

    /// Notes an answer.
    pub(crate) fn answered(&mut self, now: u64) {
        if let Clock::Thinking { ns, due } = &mut self.clock {
            *due = now + *ns;
        }
    }

    /// Takes the next arrival if it is due by `now`. Returns the time from which its latency counts.
    ///
    /// That is the time of its arrival, not of its submission: waiting behind slower requests is latency for the guest.
    pub(crate) fn take(&mut self, now: u64) -> Option<u64> {
        let clock = match &mut self.clock {
            Clock::None => return Some(now),
            Clock::Thinking { due, .. } => return (*due <= now).then_some(now),
            Clock::Burst(clock) => clock,
        };
        if clock.due > now {
            return None;
        }
        let due = clock.due;
        clock.left_in_burst -= 1;
        if clock.left_in_burst == 0 {
            clock.left_in_burst = clock.burst;
            clock.bursts_begun += 1;
            // Relative to the start, so that rounding errors do not accumulate.
            clock.due = clock.start + (clock.bursts_begun as f64 * clock.gap) as u64;
        }
        Some(due)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bursts_keep_their_distance_however_late_they_are_taken() {
        let pace = Pace { per_second: 400_000.0, burst: 16 };
        let mut schedule = Schedule::new(Arrivals::Paced(pace), 1, 1_000);
        assert_eq!(schedule.take(999), None);
        // Taken 95 us late: three bursts are due, each counted from its own time.
        let taken: Vec<u64> = std::iter::from_fn(|| schedule.take(96_000)).collect();
        assert_eq!(taken.len(), 48);
        assert_eq!((taken[0], taken[16], taken[47]), (1_000, 41_000, 81_000));
        assert_eq!(schedule.due(), Some(121_000));
    }

    #[test]
    fn queues_share_the_rate() {
        let pace = Pace { per_second: 2_000.0, burst: 1 };
        let mut schedule = Schedule::new(Arrivals::Paced(pace), 4, 0);
        assert_eq!(schedule.take(0), Some(0));
        assert_eq!(schedule.due(), Some(2_000_000));
    }

    #[test]
    fn a_guest_that_computes_waits_from_its_last_answer_on() {
        let mut schedule = Schedule::new(Arrivals::Thinking(5_000), 1, 0);
        assert_eq!(schedule.take(100), Some(100));
        schedule.answered(2_000);
        assert_eq!((schedule.due(), schedule.take(6_999)), (Some(7_000), None));
        assert_eq!(schedule.take(7_010), Some(7_010));
    }

    #[test]
    fn a_closed_loop_never_waits_for_the_clock() {
        let mut schedule = Schedule::new(Arrivals::Closed, 1, 0);
        assert_eq!(schedule.due(), None);
        assert_eq!((schedule.take(5), schedule.take(5)), (Some(5), Some(5)));
    }
}
