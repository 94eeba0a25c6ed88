//! The weighted adaptive polling policy.
//!
//! How long to busy-poll before sleeping follows how soon events have lately come, weighted so
//! that one odd interval does not throw the window away. After the weighted polling of QEMU's AioContext.

use super::policy::PollParams;

/// Accounts for an iteration in which a source had an event, or had none.
///
/// `interval`: nanoseconds from the start of the wait to the iteration's events. `ns`: the weighted mean of
/// the source's intervals, in nanoseconds; 0: unknown, or longer than polling is worth.
pub fn update(ns: &mut u64, params: &PollParams, interval: u64, had_event: bool) {
    if had_event {
        *ns = if *ns == 0 {
            interval
        } else {
            let weight = params.weight();
            (*ns - (*ns >> weight)).saturating_add(interval >> weight)
        };
    } else if *ns > 0 {
        *ns = ns.saturating_add(interval);
    }
    if *ns > params.max_ns {
        *ns = 0;
    }
}

/// Returns the next window, after `window`.
///
/// It follows `best`, the largest mean of the sources that had events in this iteration. All in nanoseconds.
pub fn follow(window: u64, params: &PollParams, best: u64) -> u64 {
    if best > window {
        best.max(window.saturating_mul(params.grow())).min(params.max_ns)
    } else if best < window / params.shrink() {
        window / params.shrink()
    } else {
        window
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::polling::policy::{PollGoal, PollPolicy};

    const PARAMS: PollParams = PollParams {
        policy: PollPolicy::Weighted,
        goal: PollGoal::Balanced,
        max_ns: 32768,
        grow: 0,
        shrink: 0,
        weight: 0,
    };

    #[test]
    fn a_source_takes_its_first_interval_whole_and_then_an_eighth_of_each() {
        let mut ns = 0;
        update(&mut ns, &PARAMS, 8000, true);
        assert_eq!(ns, 8000);
        update(&mut ns, &PARAMS, 16000, true);
        assert_eq!(ns, 8000 - 1000 + 2000);
    }

    #[test]
    fn a_quiet_source_ages_until_polling_for_it_is_not_worth_it() {
        let mut ns = 30000;
        update(&mut ns, &PARAMS, 2000, false);
        assert_eq!(ns, 32000);
        update(&mut ns, &PARAMS, 2000, false);
        assert_eq!(ns, 0, "beyond poll-max-ns");
        update(&mut ns, &PARAMS, 2000, false);
        assert_eq!(ns, 0, "an unknown interval does not age");
    }

    #[test]
    fn the_window_grows_to_what_is_needed_at_most_to_the_maximum() {
        assert_eq!(follow(0, &PARAMS, 5000), 5000);
        assert_eq!(follow(5000, &PARAMS, 6000), 10000, "twice the window is more than was needed");
        assert_eq!(follow(10000, &PARAMS, 32000), 32000);
        assert_eq!(follow(32000, &PARAMS, 32700), 32768);
    }

    #[test]
    fn the_window_shrinks_only_below_half_and_only_by_half() {
        assert_eq!(follow(10000, &PARAMS, 5000), 10000);
        assert_eq!(follow(10000, &PARAMS, 4999), 5000);
        assert_eq!(follow(5000, &PARAMS, 0), 2500);
    }

    #[test]
    fn polling_off_never_opens_a_window() {
        let off = PollParams { max_ns: 0, ..PARAMS };
        let (mut ns, mut window) = (0, 0);
        for interval in [0, 1, 1000, u64::MAX] {
            update(&mut ns, &off, interval, true);
            window = follow(window, &off, ns);
            assert_eq!((ns, window), (0, 0));
        }
    }
}
