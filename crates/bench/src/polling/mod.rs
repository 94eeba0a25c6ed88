//! Compares polling policies in the daemon under real loads.

mod live;
pub(crate) mod loads;
mod verdict;

use anyhow::{Result, ensure};

use crate::options::Options;
use crate::session::Session;
pub(crate) use live::Live;

/// A choice of polling options, to be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Policy {
    /// Its name in the table.
    pub(crate) name: &'static str,
    /// The options of the I/O thread.
    pub(crate) options: &'static str,
}

/// The default first, then those that must not beat it.
pub(crate) const POLICIES: [Policy; 7] = [
    Policy { name: "default", options: "poll-policy=measured" },
    Policy { name: "off", options: "poll-max-ns=0" },
    Policy { name: "fixed 8 us", options: "poll-policy=fixed,poll-max-ns=8000" },
    Policy { name: "fixed 32 us", options: "poll-policy=fixed,poll-max-ns=32768" },
    Policy { name: "stepped", options: "poll-policy=stepped" },
    Policy { name: "weighted", options: "poll-policy=weighted" },
    Policy { name: "weighted 100 us", options: "poll-policy=weighted,poll-max-ns=100000" },
];

/// Measures and prints. Fails if a rival beats the default, but not in a short run.
pub(crate) fn run(options: &Options) -> Result<()> {
    let loads = options.choose(loads::all(), |load| load.name.clone())?;
    let live = Live::new(options, Session::new(options, 3, [50, 1_000])?)?;
    let rounds = live.session.rounds;
    live.session.machine.iter().for_each(|line| println!("{line}"));
    let mut beaten = Vec::new();
    for load in &loads {
        let results = live.measure(load, &POLICIES, rounds)?;
        println!("\n{}", verdict::table(&load.name, &POLICIES, &results).text());
        if options.quick() {
            continue;
        }
        for (rival, result) in POLICIES[1..].iter().zip(&results[1..]) {
            if verdict::beats(result, &results[0]).is_none() {
                continue;
            }
            if let Some(how) = confirmed(&live, load, [POLICIES[0], *rival], rounds)? {
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
    pair: [Policy; 2],
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
            let competes = |policy: &Policy| policy.options.split(',').any(|o| o == option);
            assert!(POLICIES.iter().any(competes), "{name} is missing in POLICIES");
        }
    }
}
