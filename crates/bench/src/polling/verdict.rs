//! Whether one choice is better than another.

use super::Contender;
use crate::figures::{lower_quartile, median};
use crate::peers::measure::LoadSample;
use crate::report::Table;

/// How much better one has to be in latency or in CPU time per request to beat another.
const MARGIN: f64 = 0.90;

/// How much worse it may be in the other of the two: the noise of medians of a few rounds.
const NOISE: f64 = 1.03;

/// By how much `rival` beats `default`, in words: by the medians of the rounds, and by their lower quartiles.
///
/// The host takes time away from some rounds and not from others, and so a median may be of either kind.
pub(super) fn beats(rival: &[LoadSample], default: &[LoadSample]) -> Option<String> {
    let ratio = |figure: fn(&[LoadSample], Of) -> f64, of| figure(rival, of) / figure(default, of);
    let wins = |figure| {
        let [p50, cpu] = [ratio(figure, p50), ratio(figure, cpu)];
        let wins = (p50 <= MARGIN && cpu <= NOISE) || (cpu <= MARGIN && p50 <= NOISE);
        wins.then_some([p50, cpu])
    };
    let [p50, cpu] = wins(|samples, of| median(samples.iter().map(of)))?;
    wins(|samples, of| lower_quartile(samples.iter().map(of)))?;
    Some(format!("p50 x{p50:.2}, CPU per request x{cpu:.2}"))
}

type Of = fn(&LoadSample) -> f64;

fn p50(sample: &LoadSample) -> f64 {
    sample.latency[0]
}

fn cpu(sample: &LoadSample) -> f64 {
    sample.cpu
}

/// The medians.
pub(super) fn table(load: &str, contenders: &[Contender], results: &[Vec<LoadSample>]) -> Table {
    let heads = [load, "req/s", "CPU us/req", "switches/req", "p50 us", "p99 us"];
    let mut table = Table::new(&heads);
    for (contender, samples) in contenders.iter().zip(results) {
        let figure = |of: fn(&LoadSample) -> f64| median(samples.iter().map(of));
        table.row([
            contender.name.into(),
            format!("{:.0}", figure(|sample| sample.iops)),
            format!("{:.2}", figure(|sample| sample.cpu)),
            format!("{:.3}", figure(|sample| sample.switches)),
            format!("{:.1}", figure(|sample| sample.latency[0])),
            format!("{:.1}", figure(|sample| sample.latency[1])),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(p50: f64, cpu: f64) -> Vec<LoadSample> {
        let latency = [p50, p50, p50];
        vec![LoadSample { iops: 1.0, cpu, switches: 0.0, latency }; 3]
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
        default[0] = samples(100.0, 10.0)[0];
        assert!(beats(&samples(100.0, 10.0), &default).is_none());
        assert!(beats(&samples(80.0, 10.0), &default).is_some());
    }
}
