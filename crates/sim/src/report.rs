//! Sums the results of runs. Worker processes report theirs as lines of text.

use std::collections::BTreeMap;
use std::fmt;

use crate::world::Outcome;

/// Prefix of a report line with a counter.
const COUNT: &str = "count";
const RUN: &str = "run";

/// The sum of several runs.
#[derive(Debug, Default)]
pub(crate) struct Report {
    runs: u64,
    steps: u64,
    virtual_ns: u128,
    /// Descriptions of counters, in their order.
    counts: Vec<String>,
    sums: BTreeMap<String, u64>,
}

impl Report {
    pub(crate) fn add(&mut self, outcome: &Outcome) {
        self.add_run(outcome.steps, outcome.virtual_ns);
        for (what, n) in &outcome.counted {
            self.add_count(what, *n);
        }
    }

    fn add_run(&mut self, steps: u64, virtual_ns: u64) {
        self.runs += 1;
        self.steps += steps;
        self.virtual_ns += u128::from(virtual_ns);
    }

    fn add_count(&mut self, what: &str, n: u64) {
        if !self.sums.contains_key(what) {
            self.counts.push(what.to_owned());
        }
        *self.sums.entry(what.to_owned()).or_default() += n;
    }

    /// Prints a run for [`read`](Self::read).
    pub(crate) fn print(outcome: &Outcome) {
        println!("{RUN}\t{}\t{}\t{:016x}", outcome.steps, outcome.virtual_ns, outcome.trace);
        for (what, n) in &outcome.counted {
            println!("{COUNT}\t{what}\t{n}");
        }
    }

    /// Adds a worker's report.
    pub(crate) fn read(&mut self, lines: &str) {
        for line in lines.lines() {
            let fields: Vec<_> = line.split('\t').collect();
            match fields.as_slice() {
                [RUN, steps, ns, _trace] => {
                    self.add_run(steps.parse().unwrap_or(0), ns.parse().unwrap_or(0));
                }
                [COUNT, what, n] => self.add_count(what, n.parse().unwrap_or(0)),
                _ => println!("{line}"),
            }
        }
    }

    /// Number of seeds that were run to the end.
    pub(crate) fn runs(&self) -> u64 {
        self.runs
    }

    /// The sum of a counter, by its place.
    fn count(&self, counter: usize) -> u64 {
        self.counts.get(counter).map_or(0, |what| self.sums[what])
    }

    /// Number of answered requests.
    pub(crate) fn requests(&self) -> u64 {
        self.count(0)
    }

    /// Number of answered QMP commands.
    pub(crate) fn commands(&self) -> u64 {
        self.count(1)
    }

    /// Descriptions of counters that are zero, of all or of the `wanted` ones.
    pub(crate) fn missing(&self, wanted: Option<&[&str]>) -> Vec<&str> {
        let is_wanted = |what: &&str| wanted.is_none_or(|wanted| wanted.contains(what));
        let zero = self.counts.iter().filter(|what| self.sums[*what] == 0);
        zero.map(String::as_str).filter(is_wanted).collect()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for what in &self.counts {
            writeln!(f, "{:>14}  {what}", self.sums[what])?;
        }
        let seconds = self.virtual_ns as f64 / 1e9;
        writeln!(f, "{} seeds, {} steps, {seconds:.1} s of virtual time", self.runs, self.steps)?;
        let [all, commands, qcow2, hard] = [0, 1, 2, 3].map(|counter| self.count(counter));
        write!(
            f,
            "{all} requests, {commands} QMP commands; {qcow2} requests on qcow2, {hard} of them with kills or power cuts"
        )
    }
}
