//! Whether one choice is better than another.

use super::Policy;
use crate::figures::{lower_quartile, median};
use crate::peers::compare::{Figure, Measured};
use crate::report::Table;

/// How much better one has to be in latency or in CPU time per request to beat another.
const MARGIN: f64 = 0.90;

/// How much worse it may be in the other of the two: the noise of medians of a few rounds.
const NOISE: f64 = 1.03;

/// By how much `rival` beats `default`, in words: by the medians of the rounds, and by their lower quartiles.
///
/// The host takes time away from some rounds and not from others, and so a median may be of either kind.
pub(super) fn beats(rival: &Measured, default: &Measured) -> Option<String> {
    let wins = |middle: fn(std::vec::IntoIter<f64>) -> f64| {
        let of = |measured: &Measured, figure| middle(measured.figures(figure).into_iter());
        let [p50, cpu] =
            [Figure::P50, Figure::Cpu].map(|figure| of(rival, figure) / of(default, figure));
        let wins = (p50 <= MARGIN && cpu <= NOISE) || (cpu <= MARGIN && p50 <= NOISE);
        wins.then_some([p50, cpu])
    };
    let [p50, cpu] = wins(median)?;
    wins(lower_quartile)?;
    Some(format!("p50 x{p50:.2}, CPU per request x{cpu:.2}"))
}

/// The medians.
pub(super) fn table(load: &str, policies: &[Policy], results: &[Measured]) -> Table {
    use Figure::{Cpu, Iops, P50, P99, Switches};
    let mut table = Table::new(&[load, "req/s", "CPU us/req", "switches/req", "p50 us", "p99 us"]);
    for (policy, measured) in policies.iter().zip(results) {
        let figures =
            [Iops, Cpu, Switches, P50, P99].map(|figure| figure.show(measured.median(figure)));
        table.row(std::iter::once(policy.name.into()).chain(figures));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::compare::Sample;

    fn samples(p50: f64, cpu: f64) -> Measured {
        let sample = Sample::of(&[(Figure::P50, p50), (Figure::Cpu, cpu)]);
        Measured { rounds: vec![sample; 3], ..Measured::default() }
    }

    #[test]
    fn better_in_one_and_not_worse_in_the_other_wins() {
        let default = samples(100.0, 10.0);
        assert!(beats(&samples(89.0, 10.0), &default).is_some());
        assert!(beats(&samples(100.0, 8.9), &default).is_some());
        assert!(beats(&samples(91.0, 9.1), &default).is_none());
        assert!(beats(&samples(50.0, 11.0), &default).is_none(), "a trade is no defeat");
        assert!(beats(&samples(110.0, 1.0), &default).is_none());
    }

    #[test]
    fn rounds_that_the_host_slowed_down_do_not_count() {
        let mut default = samples(130.0, 13.0);
        default.rounds[0] = samples(100.0, 10.0).rounds[0];
        assert!(beats(&samples(100.0, 10.0), &default).is_none());
        assert!(beats(&samples(80.0, 10.0), &default).is_some());
    }
}
