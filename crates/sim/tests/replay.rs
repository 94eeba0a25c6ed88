//! A seed determines the course of events.

use std::process::Command;

/// Returns the output of a seed's run, with the hash of all events.
fn run(seed: u64) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sim"));
    let output =
        command.args(["--seed", &seed.to_string(), "--requests", "3000"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.lines().any(|line| line.starts_with("trace ")), "{text}");
    text
}

/// Earlier seeds in the same process do not change a run: a failure is replayed alone.
#[test]
fn earlier_seeds_do_not_change_a_run() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sim"));
    command.args(["--worker", "--first", "1", "--seeds", "8", "--requests", "3000"]);
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let runs = text.lines().filter(|line| line.starts_with("run"));
    let traces: Vec<_> = runs.filter_map(|line| line.rsplit('\t').next()).collect();
    assert_eq!(traces.len(), 8, "{text}");
    for (seed, trace) in (1..).zip(traces) {
        assert!(run(seed).ends_with(&format!("trace {trace}\n")), "seed {seed}");
    }
}

#[test]
fn a_seed_determines_the_trace() {
    let runs: Vec<_> = (1..=8).map(run).collect();
    for (seed, first) in (1..).zip(&runs) {
        assert_eq!(run(seed), *first, "seed {seed}");
    }
    let traces: std::collections::BTreeSet<_> =
        runs.iter().map(|run| run.lines().last().unwrap().to_owned()).collect();
    assert_eq!(traces.len(), runs.len());
}
