//! F4: adaptive polling, by policy.

use anyhow::Result;

use super::finding::Finding;
use super::options::Options;
use crate::peers;
use crate::plot::{Bar, Bars};
use crate::polling::model::Outcome;
use crate::polling::simulate::{DURATION, simulate};
use crate::polling::{Contender, live};

/// Measures it.
pub(crate) fn measure(options: &Options) -> Result<Finding> {
    let rounds = options.run.rounds(3);
    let run_time = options.run.run_time(100, 1000);
    peers::build_ringmill()?;
    let simulated = simulate(if options.run.quick { DURATION / 20 } else { DURATION });
    let live = live::live(rounds, run_time, &options.run.directory)?;
    let series: Vec<String> = Contender::ALL.map(|contender| contender.name().into()).into();
    let ratios = |name: &str, figure: fn(&Outcome) -> f64| {
        // To stepped, which is second.
        let ratio = |of| Some(Bar::of(&[simulated.mean(of, 1, figure)]));
        (name.to_owned(), (0..Contender::ALL.len()).map(ratio).collect())
    };
    let groups = vec![
        ratios("CPU per request", Outcome::cpu),
        ratios("requests per second", Outcome::throughput),
        ratios("p99 latency", |outcome| outcome.latency(0.99)),
    ];
    let live_cpu = live.rows.iter().map(|(row, contenders)| {
        let bars = contenders.iter().map(|samples| {
            Some(Bar::of(&samples.iter().map(|sample| sample.cpu).collect::<Vec<_>>()))
        });
        (row.clone(), bars.collect())
    });
    Ok(Finding {
        heading: "F4: adaptive polling".into(),
        method: vec![
            "Simulated: each policy over the same traces in virtual time, then the means over the \
             traces of the ratios to the policy named. Published, weighted against the one before \
             (stepped): CPU -9.4 %, throughput -2.2 %."
                .into(),
            format!(
                "Live: the daemon under real loads, {rounds} round(s); CPU of the whole process, \
                 polling included."
            ),
        ],
        goals: simulated.goals(),
        plots: vec![
            (
                "f4-simulated.svg".into(),
                Bars {
                    title: "F4, simulated: mean ratio to the stepped policy".into(),
                    unit: "ratio".into(),
                    series: series.clone(),
                    groups,
                },
            ),
            (
                "f4-live.svg".into(),
                Bars {
                    title: "F4, live: CPU per request".into(),
                    unit: "us".into(),
                    series,
                    groups: live_cpu.collect(),
                },
            ),
        ],
        tables: vec![simulated.table(), live.table()],
    })
}
