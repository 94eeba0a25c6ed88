//! Polling policies beside each other: in virtual time over traces, and live.

pub(crate) mod live;
pub(crate) mod model;
mod record;
pub(crate) mod simulate;
mod traces;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use event_loop::{PollParams, PollPolicy};

/// A policy to be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Contender {
    /// No polling.
    None,
    /// One of the loop's, with its defaults.
    Policy(PollPolicy),
}

impl Contender {
    /// All, in the order of their age.
    pub(crate) const ALL: [Contender; 4] = [
        Contender::None,
        Contender::Policy(PollPolicy::Stepped),
        Contender::Policy(PollPolicy::Weighted),
        Contender::Policy(PollPolicy::Histogram),
    ];

    /// As `poll-policy` calls it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Contender::None => "none",
            Contender::Policy(PollPolicy::Stepped) => "stepped",
            Contender::Policy(PollPolicy::Weighted) => "weighted",
            Contender::Policy(PollPolicy::Histogram) => "histogram",
        }
    }

    fn params(self) -> PollParams {
        match self {
            Contender::None => PollParams { max_ns: 0, ..PollParams::default() },
            Contender::Policy(policy) => PollParams { policy, ..PollParams::default() },
        }
    }
}

/// `bench polling`.
#[derive(Debug)]
pub(crate) struct Options {
    /// Measure the daemon instead of simulating.
    pub(crate) live: bool,
    /// Record traces into this directory instead.
    pub(crate) record: Option<PathBuf>,
    /// Live: rounds.
    pub(crate) rounds: usize,
    /// Live: time that counts, per measurement.
    pub(crate) run_time: Duration,
    /// Where logs and data files go.
    pub(crate) directory: PathBuf,
}

/// Runs what was asked for and prints it.
pub(crate) fn run(options: &Options) -> Result<()> {
    if let Some(into) = &options.record {
        return record::record(into, &options.directory);
    }
    if options.live {
        println!("{}", live::live(options.rounds, options.run_time, &options.directory)?.text());
        return Ok(());
    }
    let comparison = simulate::simulate(simulate::DURATION);
    println!("{}\n{}", comparison.table().text(), comparison.verdicts().text());
    Ok(())
}
