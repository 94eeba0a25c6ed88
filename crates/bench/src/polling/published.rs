//! The published comparison, live: weighted against stepped, with 1 and 8 I/O threads and 1, 4 and 8 jobs.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use super::Contender;
use super::live::Live;
use super::loads::{Disk, LiveLoad};
use crate::load::{Load, Threads};
use crate::peers::measure::LoadSample;
use crate::peers::rows::load;

/// By age: off, the algorithm before, the published one, the default.
pub(crate) const POLICIES: [Contender; 4] = [
    Contender { name: "off", options: "poll-max-ns=0" },
    Contender { name: "stepped", options: "poll-policy=stepped" },
    Contender { name: "weighted", options: "poll-policy=weighted" },
    Contender { name: "measured", options: "poll-policy=measured" },
];

/// What each of [`POLICIES`] has shown, a sample per round, by load.
pub(crate) fn measure(
    rounds: usize,
    run_time: Duration,
    directory: &Path,
) -> Result<Vec<(String, Vec<Vec<LoadSample>>)>> {
    let live = Live::new(run_time, directory)?;
    let mut results = Vec::new();
    for disk in [Disk::Null, Disk::File] {
        for io_threads in [1, 8] {
            for jobs in [1, 4, 8] {
                let what = format!("{io_threads} I/O threads, {jobs} jobs");
                let load = Load { queues: jobs, threads: Threads::PerQueue, ..load() };
                let load = LiveLoad { io_threads, ..LiveLoad::new(&what, disk, load) };
                let samples = live.measure(&load, &POLICIES, rounds)?;
                results.push((load.name, samples));
            }
        }
    }
    Ok(results)
}
