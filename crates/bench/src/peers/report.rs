//! The report: aligned text for the terminal, JSON to record.

use super::bars;
use super::result::{Figure, Outcome, RowResult, spread};
use super::rows::{Extent, Work};
use crate::figures::median;
use crate::goal;
use crate::report::{Section, Table};

/// All that a run has found.
#[derive(Debug)]
pub(crate) struct Report {
    /// What was run.
    pub(crate) extent: Extent,
    /// What was measured on, with what, and how; one line each.
    pub(crate) conditions: Vec<String>,
    /// Each contender; the first is what the others are compared with.
    pub(crate) contenders: Vec<Described>,
    /// fio's options per row, where it is the client.
    pub(crate) jobs: Vec<(String, String)>,
    /// Per row the outcome of each contender.
    pub(crate) results: Vec<RowResult>,
}

/// A contender, in words.
#[derive(Debug)]
pub(crate) struct Described {
    /// Its name.
    pub(crate) name: String,
    /// The version it says it has.
    pub(crate) version: String,
    /// Its command line.
    pub(crate) command: String,
}

impl Report {
    /// Aligned text.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        for line in &self.conditions {
            text += &format!("{line}\n");
        }
        for Described { name, version, command } in &self.contenders {
            text += &format!("{name}: {version}\n  {command}\n");
        }
        for table in self.tables() {
            text += "\n";
            text += &table.text();
        }
        text += "\n";
        for line in self.sums() {
            text += &format!("{line}\n");
        }
        text
    }

    /// To record.
    pub(crate) fn section(&self) -> Section {
        let servers = self
            .contenders
            .iter()
            .map(|Described { name, version, command }| format!("{name}: {version}\n{command}"));
        let text = self.conditions.iter().cloned().chain(servers).chain(self.sums()).collect();
        Section { heading: String::new(), text, tables: self.tables() }
    }

    /// Where contender `name` is.
    pub(crate) fn position(&self, name: &str) -> Option<usize> {
        self.contenders.iter().position(|contender| contender.name == name)
    }

    /// Those with something to reach.
    pub(crate) fn own(&self) -> Vec<(usize, &str)> {
        let names = self.contenders.iter().map(|contender| contender.name.as_str());
        names.enumerate().filter(|(_, name)| name.starts_with("ringmill")).collect()
    }

    /// How many bars are met.
    fn sums(&self) -> Vec<String> {
        let (Some(base), Extent::Full) = (self.position("qsd"), self.extent) else {
            return Vec::new();
        };
        let own = self.own();
        let sum = own.iter().map(|&(contender, name)| {
            let (met, all) = bars::met(&self.results, contender, base);
            format!("{name}: {met} of {all} bars met")
        });
        sum.collect()
    }

    fn tables(&self) -> Vec<Table> {
        let own = self.own();
        let bars = match self.position("qsd") {
            Some(base) => bars::table(&self.results, &own, (base, "qsd")),
            None => Table::default(),
        };
        let beside = bars::beside_the_limit(&self.results, &own);
        [
            bars,
            goal::table("to reach beside the limit", &beside),
            self.limit_table(),
            self.echo_table(),
            self.load_table(),
            self.idle_table(),
            self.job_table(),
        ]
        .into_iter()
        .filter(|table| !table.body.is_empty())
        .collect()
    }

    fn limit_table(&self) -> Table {
        let mut table = Table::new(&[
            "reads of the file",
            "by",
            "CPU us/req",
            "least..most",
            "x t/io_uring",
            "x bare loop",
            "IOPS",
            "least..most",
            "x fio on the file",
        ]);
        for result in self.results.iter().filter(|result| result.row.limits) {
            let limits = &result.limits;
            let cpu = |done: &[crate::bare::Done]| done.iter().map(|done| done.cpu).collect();
            let iops = |done: &[crate::bare::Done]| done.iter().map(|done| done.iops).collect();
            let mut readers: Vec<(&str, Vec<f64>, Vec<f64>)> = vec![
                ("t/io_uring", cpu(&limits.t_io_uring), iops(&limits.t_io_uring)),
                ("bare loop", cpu(&limits.bare), iops(&limits.bare)),
                ("fio on the file", Vec::new(), limits.fio.clone()),
            ];
            for (outcome, contender) in result.outcomes.iter().zip(&self.contenders) {
                let rounds = |figure| outcome.rounds(figure);
                readers.push((&contender.name, rounds(Figure::Cpu), rounds(Figure::Iops)));
            }
            let middle = |rounds: &[f64]| median(rounds.iter().copied());
            let of = |rounds: &[f64], base: &[f64]| match middle(rounds) / middle(base) {
                ratio if ratio.is_nan() => "-".into(),
                ratio => format!("{ratio:.3}"),
            };
            for (name, cpu, iops) in &readers {
                table.row([
                    result.row.name.clone(),
                    (*name).to_owned(),
                    Figure::Cpu.show(middle(cpu)),
                    spread(Figure::Cpu, cpu),
                    of(cpu, &readers[0].1),
                    of(cpu, &readers[1].1),
                    Figure::Iops.show(middle(iops)),
                    spread(Figure::Iops, iops),
                    of(iops, &readers[2].2),
                ]);
            }
        }
        table
    }

    /// What sleeping and waking costs, which no server that sleeps can do without.
    fn echo_table(&self) -> Table {
        let mut head =
            vec!["one at a time, polling off".to_owned(), "bare echo, CPU us/req".into()];
        head.push("least..most".into());
        for contender in &self.contenders {
            head.extend([format!("{}, CPU us/req", contender.name), "x bare echo".into()]);
        }
        let mut table = Table { head, body: Vec::new() };
        for result in self.results.iter().filter(|result| !result.limits.echo.is_empty()) {
            let echo: Vec<f64> = result.limits.echo.iter().map(|done| done.cpu).collect();
            let base = median(echo.iter().copied());
            let mut line =
                vec![result.row.name.clone(), Figure::Cpu.show(base), spread(Figure::Cpu, &echo)];
            for outcome in &result.outcomes {
                let own = outcome.median(Figure::Cpu);
                line.extend([Figure::Cpu.show(own), format!("{:.3}", own / base)]);
            }
            table.row(line);
        }
        table
    }

    fn load_table(&self) -> Table {
        let mut table = Table::new(&[
            "load",
            "server",
            "IOPS",
            "least..most",
            "CPU s/M",
            "least..most",
            "calls/req",
            "switches/req",
            "p50 us",
            "p99 us",
            "p99.9 us",
            "IOPS x",
            "CPU x",
            "p50 x",
        ]);
        for result in &self.results {
            if matches!(result.row.work, Work::Idle(_)) {
                continue;
            }
            for (outcome, contender) in result.outcomes.iter().zip(&self.contenders) {
                let words = [result.row.name.clone(), contender.name.clone()];
                match outcome {
                    Outcome::Failed(_) => table.row(words.into_iter().chain(["failed".into()])),
                    _ => {
                        let cells = load_cells(outcome, result.outcomes.first());
                        table.row(words.into_iter().chain(cells));
                    }
                }
            }
        }
        table
    }

    fn idle_table(&self) -> Table {
        let mut table = Table::new(&["idle", "server", "CPU %", "switches/s"]);
        for result in &self.results {
            for (outcome, contender) in result.outcomes.iter().zip(&self.contenders) {
                if let Outcome::Idle(_) = outcome {
                    table.row([
                        result.row.name.clone(),
                        contender.name.clone(),
                        Figure::IdleCpu.show(outcome.median(Figure::IdleCpu)),
                        Figure::WakeUps.show(outcome.median(Figure::WakeUps)),
                    ]);
                }
            }
        }
        table
    }

    fn job_table(&self) -> Table {
        let mut table = Table::new(&["load", "JOB"]);
        for (row, job) in &self.jobs {
            table.row([row.clone(), format!("`{job}`")]);
        }
        table
    }
}

fn load_cells(outcome: &Outcome, base: Option<&Outcome>) -> Vec<String> {
    let ratio = |figure: Figure| {
        let base = base.map_or(f64::NAN, |base| base.median(figure));
        match outcome.median(figure) / base {
            ratio if ratio.is_nan() => "-".into(),
            ratio => format!("{ratio:.2}"),
        }
    };
    let middle = |figure: Figure| figure.show(outcome.median(figure));
    let calls = match outcome {
        Outcome::Load(figures) => figures.syscalls,
        _ => None,
    };
    vec![
        middle(Figure::Iops),
        outcome.range(Figure::Iops),
        middle(Figure::Cpu),
        outcome.range(Figure::Cpu),
        calls.map_or("-".into(), |calls| format!("{calls:.3}")),
        middle(Figure::Switches),
        middle(Figure::P50),
        middle(Figure::P99),
        middle(Figure::P999),
        ratio(Figure::Iops),
        ratio(Figure::Cpu),
        ratio(Figure::P50),
    ]
}
