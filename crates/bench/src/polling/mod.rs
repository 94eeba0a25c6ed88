//! Compares polling policies in the daemon under real loads.

mod live;
mod loads;
pub(crate) mod published;
mod verdict;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::host::machine;
use crate::peers::build_ringmill;
use crate::peers::contender::Places;
use live::Live;

/// A choice of polling options, to be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Contender {
    /// Its name in the table.
    pub(crate) name: &'static str,
    /// The options of the I/O thread.
    pub(crate) options: &'static str,
}

/// The default first, then those that must not beat it.
pub(crate) const CONTENDERS: [Contender; 7] = [
    Contender { name: "default", options: "poll-policy=measured" },
    Contender { name: "off", options: "poll-max-ns=0" },
    Contender { name: "fixed 8 us", options: "poll-policy=fixed,poll-max-ns=8000" },
    Contender { name: "fixed 32 us", options: "poll-policy=fixed,poll-max-ns=32768" },
    Contender { name: "stepped", options: "poll-policy=stepped" },
    Contender { name: "weighted", options: "poll-policy=weighted" },
    Contender { name: "weighted 100 us", options: "poll-policy=weighted,poll-max-ns=100000" },
];

/// `bench polling`.
#[derive(Debug)]
pub(crate) struct Options {
    /// A short run, in which no figure is a failure.
    pub(crate) quick: bool,
    /// Only loads whose names contain this.
    pub(crate) only: String,
    /// Rounds.
    pub(crate) rounds: Option<usize>,
    /// Duration of each measurement.
    pub(crate) run_time: Option<Duration>,
    /// Where logs and data files go.
    pub(crate) directory: PathBuf,
}

/// Measures and prints. Fails if a rival beats the default.
pub(crate) fn run(options: &Options) -> Result<()> {
    let (rounds, ms) = if options.quick { (1, 50) } else { (3, 1_000) };
    let rounds = options.rounds.unwrap_or(rounds);
    let run_time = options.run_time.unwrap_or(Duration::from_millis(ms));
    ensure!(rounds > 0, "--rounds has to be at least 1");
    build_ringmill(&Places::default())?;
    machine::describe(&options.directory).iter().for_each(|line| println!("{line}"));
    let live = Live::new(run_time, &options.directory)?;
    let mut loads = loads::all();
    loads.retain(|load| load.name.contains(&options.only));
    ensure!(!loads.is_empty(), "no load's name contains '{}'", options.only);
    let mut beaten = Vec::new();
    for load in &loads {
        let results = live.measure(load, &CONTENDERS, rounds)?;
        println!("\n{}", verdict::table(&load.name, &CONTENDERS, &results).text());
        if options.quick {
            continue;
        }
        for (rival, result) in CONTENDERS[1..].iter().zip(&results[1..]) {
            if verdict::beats(result, &results[0]).is_none() {
                continue;
            }
            if let Some(how) = confirmed(&live, load, [CONTENDERS[0], *rival], rounds)? {
                println!("beaten by {}: {how}", rival.name);
                beaten.push(format!("{}: by {}, {how}", load.name, rival.name));
            }
        }
    }
    println!("\n{} loads, the default is beaten on {}", loads.len(), beaten.len());
    ensure!(beaten.is_empty(), "the default is beaten:\n{}", beaten.join("\n"));
    Ok(())
}

/// Measures the default and a rival that has beaten it again, for longer and longer. Returns how the rival wins if it
/// wins each time.
///
/// A few rounds of two servers that do the same may differ by more than 10%, and there are hundreds of pairs.
fn confirmed(
    live: &Live,
    load: &loads::LiveLoad,
    pair: [Contender; 2],
    rounds: usize,
) -> Result<Option<String>> {
    let mut how = None;
    for times in [2, 8] {
        let results = live.measure(load, &pair, times * rounds)?;
        how = verdict::beats(&results[1], &results[0]);
        if how.is_none() {
            break;
        }
    }
    Ok(how)
}

#[cfg(test)]
mod tests {
    use event_loop::PollPolicy;

    use super::*;

    #[test]
    fn each_policy_competes() {
        for (name, ..) in PollPolicy::ALL {
            let option = format!("poll-policy={name}");
            let competes =
                |contender: &Contender| contender.options.split(',').any(|o| o == option);
            assert!(CONTENDERS.iter().any(competes), "{name} is missing in CONTENDERS");
        }
    }
}
