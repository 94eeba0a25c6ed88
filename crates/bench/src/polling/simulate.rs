//! The policies over all traces, and what is to be reached.

use super::Contender;
use super::model::{COSTS, Outcome, run};
use super::record;
use super::traces::{Trace, synthetic};
use crate::goal::{self, Bound, Goal};
use crate::report::Table;

/// Virtual time per trace, nanoseconds.
pub(crate) const DURATION: u64 = 4_000_000_000;

/// The seed of all traces.
const SEED: u64 = 1;

/// What is left over of the first looks of a policy at each trace counts for nothing.
const RESOLUTION: f64 = 0.002;

/// Every policy on every trace.
#[derive(Debug)]
pub(crate) struct Comparison {
    /// By trace; the outcomes are those of [`Contender::ALL`].
    pub(crate) results: Vec<(String, Vec<Outcome>)>,
}

/// Runs every policy on every trace, for `duration` ns of virtual time.
pub(crate) fn simulate(duration: u64) -> Comparison {
    let traces = synthetic().into_iter().chain(record::recorded());
    let results = traces.map(|Trace { name, load }| {
        let outcomes = Contender::ALL
            .iter()
            .map(|contender| run(&load, &contender.params(), &COSTS, duration, SEED))
            .collect();
        (name, outcomes)
    });
    Comparison { results: results.collect() }
}

/// Positions in [`Contender::ALL`].
const STEPPED: usize = 1;
const WEIGHTED: usize = 2;
const HISTOGRAM: usize = 3;

impl Comparison {
    /// All figures.
    pub(crate) fn table(&self) -> Table {
        let mut table = Table::new(&[
            "trace",
            "policy",
            "req/s",
            "CPU us/req",
            "CPU %",
            "polling %",
            "sleeping %",
            "p50 us",
            "p99 us",
        ]);
        for (name, outcomes) in &self.results {
            for (contender, outcome) in Contender::ALL.iter().zip(outcomes) {
                let share = |ns: u64| format!("{:.1}", ns as f64 / outcome.elapsed as f64 * 100.0);
                table.row([
                    name.clone(),
                    contender.name().into(),
                    format!("{:.0}", outcome.throughput()),
                    format!("{:.2}", outcome.cpu()),
                    format!("{:.1}", outcome.utilisation() * 100.0),
                    share(outcome.polled),
                    share(outcome.switching),
                    format!("{:.1}", outcome.latency(0.5)),
                    format!("{:.1}", outcome.latency(0.99)),
                ]);
            }
        }
        table
    }

    /// The mean over the traces of a figure's ratio, of one policy to another.
    pub(crate) fn mean(&self, of: usize, to: usize, figure: impl Fn(&Outcome) -> f64) -> f64 {
        let ratios = self.results.iter().map(|(_, o)| figure(&o[of]) / figure(&o[to]));
        ratios.sum::<f64>() / self.results.len() as f64
    }

    /// The traces on which histogram takes more CPU time per request than weighted, or serves fewer
    /// requests, and by how much.
    pub(crate) fn lost(&self) -> Vec<String> {
        let mut lost = Vec::new();
        for (name, outcomes) in &self.results {
            let (ours, weighted) = (&outcomes[HISTOGRAM], &outcomes[WEIGHTED]);
            let cpu = ours.cpu() / weighted.cpu();
            let throughput = ours.throughput() / weighted.throughput();
            if cpu > 1.0 + RESOLUTION || throughput < 1.0 - RESOLUTION {
                lost.push(format!("{name}: CPU x{cpu:.3}, throughput x{throughput:.3}"));
            }
        }
        lost
    }

    /// The goals of the polling policies.
    pub(crate) fn goals(&self) -> Vec<Goal> {
        let cpu = |of, to| self.mean(of, to, Outcome::cpu);
        let throughput = |of, to| self.mean(of, to, Outcome::throughput);
        let p99 = |of, to| self.mean(of, to, |outcome| outcome.latency(0.99));
        let goal = |what: &str, bound, limit, value| Goal {
            what: what.into(),
            bound,
            limit,
            value: Some(value),
            digits: 3,
        };
        vec![
            goal("weighted / stepped, CPU", Bound::AtMost, 0.91, cpu(WEIGHTED, STEPPED)),
            goal("weighted / stepped, req/s", Bound::AtLeast, 0.978, throughput(WEIGHTED, STEPPED)),
            goal("histogram / stepped, CPU", Bound::AtMost, 0.80, cpu(HISTOGRAM, STEPPED)),
            goal("histogram / stepped, p99", Bound::AtMost, 1.0, p99(HISTOGRAM, STEPPED)),
            goal("histogram / weighted, CPU", Bound::AtMost, 1.0, cpu(HISTOGRAM, WEIGHTED)),
            goal(
                "histogram / weighted, req/s",
                Bound::AtLeast,
                1.0,
                throughput(HISTOGRAM, WEIGHTED),
            ),
            goal("traces lost to weighted", Bound::AtMost, 0.0, self.lost().len() as f64),
        ]
    }

    /// [`Self::goals`] as a table.
    pub(crate) fn verdicts(&self) -> Table {
        goal::table("mean over the traces", &self.goals())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histogram_loses_to_weighted_on_no_synthetic_trace_and_beats_both_on_average() {
        let comparison = simulate(1_000_000_000);
        let mut lost = comparison.lost();
        lost.retain(|trace| !trace.starts_with("recorded"));
        assert!(lost.is_empty(), "{lost:#?}");
        let mean = |to, figure: fn(&Outcome) -> f64| comparison.mean(HISTOGRAM, to, figure);
        let p99 = |outcome: &Outcome| outcome.latency(0.99);
        let stepped = mean(STEPPED, Outcome::cpu);
        assert!(stepped < 0.92, "CPU x{stepped}");
        let weighted = mean(WEIGHTED, Outcome::cpu);
        // In so short a time the first looks and trials count for more.
        assert!(weighted < 0.82, "CPU x{weighted}");
        let throughput = mean(WEIGHTED, Outcome::throughput);
        assert!(throughput > 1.0, "req/s x{throughput}");
        let p99 = mean(STEPPED, p99);
        assert!(p99 < 1.0, "p99 x{p99}");
        // Recorded ones may trade CPU time for throughput, never lose both.
        for (name, outcomes) in &comparison.results {
            let (ours, weighted) = (&outcomes[HISTOGRAM], &outcomes[WEIGHTED]);
            let more_cpu = ours.cpu() > weighted.cpu() * (1.0 + RESOLUTION);
            let less_done = ours.throughput() < weighted.throughput() * (1.0 - RESOLUTION);
            assert!(!(more_cpu && less_done), "{name}");
        }
    }

    #[test]
    fn the_model_shows_what_polling_is_for() {
        let comparison = simulate(100_000_000);
        let outcomes = |name: &str| {
            let found = comparison.results.iter().find(|(trace, _)| trace == name);
            &found.unwrap_or_else(|| panic!("no trace {name}")).1
        };
        let fast = outcomes("constant, depth 1");
        assert!(fast[STEPPED].throughput() > 3.0 * fast[0].throughput(), "no wake-ups");
        assert!(fast[HISTOGRAM].switching < fast[0].switching / 100);
        let slow = outcomes("slow, 5 ms disk, depth 1");
        assert!(slow[HISTOGRAM].utilisation() < 0.02, "it sleeps");
        for (name, outcomes) in &comparison.results {
            for outcome in outcomes {
                assert!(outcome.utilisation() <= 1.000_001 && outcome.requests > 0, "{name}");
            }
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_course() {
        let (one, other) = (simulate(20_000_000), simulate(20_000_000));
        for ((name, one), (_, other)) in one.results.iter().zip(&other.results) {
            for (one, other) in one.iter().zip(other) {
                assert_eq!(
                    (one.polled, &one.latencies),
                    (other.polled, &other.latencies),
                    "{name}"
                );
            }
        }
    }
}
