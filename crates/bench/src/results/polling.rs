//! Adaptive polling, by policy: weighted against stepped, with 1 and 8 I/O threads and 1, 4 and 8 jobs.

use anyhow::Result;

use super::section;
use crate::goal::{Bound, Goal};
use crate::load::{Load, Threads};
use crate::options::Options;
use crate::peers::compare::Figure;
use crate::peers::rows::load;
use crate::polling::loads::{Disk, LiveLoad};
use crate::polling::{Live, Policy};
use crate::report::{Section, Table};
use crate::session::Session;

/// By age: off, the algorithm before, the published one, the default.
const POLICIES: [Policy; 4] = [
    Policy { name: "off", options: "poll-max-ns=0" },
    Policy { name: "stepped", options: "poll-policy=stepped" },
    Policy { name: "weighted", options: "poll-policy=weighted" },
    Policy { name: "measured", options: "poll-policy=measured" },
];
/// Positions in [`POLICIES`].
const STEPPED: usize = 1;
const WEIGHTED: usize = 2;

/// Measures it.
pub(super) fn measure(options: &Options) -> Result<Section> {
    use Figure::{Cpu, Iops, P50, P99};
    let live = Live::new(options, Session::new(options, 3, [100, 1000])?)?;
    let rounds = live.session.rounds;
    let mut table = Table::new(&["load", "policy", "req/s", "CPU us/req", "p50 us", "p99 us"]);
    // Of weighted polling to stepped, by load.
    let mut ratios = Vec::new();
    for disk in [Disk::Null, Disk::File] {
        for (io_threads, jobs) in [(1, 1), (1, 4), (1, 8), (8, 1), (8, 4), (8, 8)] {
            let what = format!("{io_threads} I/O threads, {jobs} jobs");
            let load = Load { queues: jobs, threads: Threads::PerQueue, ..load() };
            let load = LiveLoad { io_threads, ..LiveLoad::new(&what, disk, load) };
            let results = live.measure(&load, &POLICIES, rounds)?;
            for (policy, measured) in POLICIES.iter().zip(&results) {
                let figures =
                    [Iops, Cpu, P50, P99].map(|figure| figure.show(measured.median(figure)));
                table.row([load.name.clone(), policy.name.into()].into_iter().chain(figures));
            }
            let [stepped, weighted] = [STEPPED, WEIGHTED].map(|policy| &results[policy]);
            ratios.push([Cpu, Iops].map(|figure| weighted.median(figure) / stepped.median(figure)));
        }
    }
    let mean = |nth: usize| {
        Some(ratios.iter().map(|ratios| ratios[nth]).sum::<f64>() / ratios.len() as f64)
    };
    let method = format!(
        "The daemon under the published kind of load, a queue and a client thread per job, one request at \
         a time each, {rounds} round(s); CPU of the whole process, polling included. Published, \
         weighted against the one before (stepped): CPU -9.4 %, throughput -2.2 %."
    );
    let goals = [
        Goal::new("weighted / stepped, CPU", Bound::AtMost(0.91), mean(0), 3),
        Goal::new("weighted / stepped, req/s", Bound::AtLeast(0.978), mean(1), 3),
    ];
    Ok(section("Adaptive polling", vec![method], vec![table], &goals))
}
