//! Adaptive polling, by policy.

use anyhow::Result;

use super::finding::Finding;
use super::options::Options;
use crate::figures::median;
use crate::goal::{Bound, Goal};
use crate::peers;
use crate::peers::contender::Places;
use crate::peers::measure::LoadSample;
use crate::polling::published::{self, POLICIES};
use crate::report::Table;

/// Positions in [`POLICIES`].
const STEPPED: usize = 1;
const WEIGHTED: usize = 2;

/// Measures it.
pub(crate) fn measure(options: &Options) -> Result<Finding> {
    let rounds = options.run.rounds(3);
    let run_time = options.run.run_time(100, 1000);
    peers::build_ringmill(&Places::default())?;
    let results = published::measure(rounds, run_time, &options.run.directory)?;
    let mut table = Table::new(&["load", "policy", "req/s", "CPU us/req", "p50 us", "p99 us"]);
    for (load, policies) in &results {
        for (policy, samples) in POLICIES.iter().zip(policies) {
            let figure = |of: fn(&LoadSample) -> f64| median(samples.iter().map(of));
            table.row([
                load.clone(),
                policy.name.into(),
                format!("{:.0}", figure(|sample| sample.iops)),
                format!("{:.2}", figure(|sample| sample.cpu)),
                format!("{:.1}", figure(|sample| sample.latency[0])),
                format!("{:.1}", figure(|sample| sample.latency[1])),
            ]);
        }
    }
    let mean = |figure: fn(&LoadSample) -> f64| {
        let of = |samples: &[LoadSample]| median(samples.iter().map(figure));
        let ratios =
            results.iter().map(|(_, policies)| of(&policies[WEIGHTED]) / of(&policies[STEPPED]));
        Some(ratios.sum::<f64>() / results.len() as f64)
    };
    let goal = |what: &str, bound, limit, value| Goal {
        what: what.into(),
        bound,
        limit,
        value,
        digits: 3,
    };
    Ok(Finding {
        heading: "Adaptive polling".into(),
        method: vec![format!(
            "The daemon under the published kind of load, a queue and a client thread per job, one request at \
             a time each, {rounds} round(s); CPU of the whole process, polling included. Published, \
             weighted against the one before (stepped): CPU -9.4 %, throughput -2.2 %."
        )],
        goals: vec![
            goal("weighted / stepped, CPU", Bound::AtMost, 0.91, mean(|sample| sample.cpu)),
            goal("weighted / stepped, req/s", Bound::AtLeast, 0.978, mean(|sample| sample.iops)),
        ],
        tables: vec![table],
    })
}
