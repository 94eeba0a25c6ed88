//! The report: aligned text for the terminal, JSON to record.

use anyhow::Result;

use super::Bench;
use super::rows::{Disk, Row, Sender};
use super::servers::Serving;
use crate::figures::median;
use crate::peers::contender::Contender;
use crate::peers::fio::{self, Fio, Target};
use crate::peers::measure::LoadSample;
use crate::peers::method::command_to_show;
use crate::peers::result::{Figure, spread};
use crate::report::{Section, Table};

/// The results of one contender on one row.
#[derive(Debug, Default)]
pub(super) struct Measured {
    /// Its rounds.
    pub(super) rounds: Vec<LoadSample>,
    /// System calls per request, counted once with this program's client.
    pub(super) syscalls: Option<f64>,
    /// Why it could not be measured.
    pub(super) failed: Option<String>,
}

/// All results of a run.
pub(super) struct Report {
    conditions: Vec<String>,
    /// Names, with versions and commands.
    contenders: Vec<(String, String)>,
    /// Per row the result of each contender.
    results: Vec<(Row, Vec<Measured>)>,
    jobs: Table,
}

impl Measured {
    fn figures(&self, figure: Figure) -> Vec<f64> {
        let of = |sample: &LoadSample| match figure {
            Figure::Iops => sample.iops,
            Figure::Cpu => sample.cpu,
            Figure::Switches => sample.switches,
            Figure::P50 => sample.latency[0],
            Figure::P99 => sample.latency[1],
            _ => f64::NAN,
        };
        self.rounds.iter().map(of).collect()
    }

    fn median(&self, figure: Figure) -> f64 {
        median(self.figures(figure).into_iter())
    }
}

impl Report {
    pub(super) fn new(
        mut conditions: Vec<String>,
        bench: &Bench,
        rounds: usize,
        contenders: &[Contender<Serving>],
        results: Vec<(Row, Vec<Measured>)>,
    ) -> Result<Self> {
        let cpus = match (bench.client_cpu, bench.server_cpu) {
            (Some(client), Some(server)) if client != server => {
                format!("client on CPU {client}, server on CPU {server}")
            }
            _ => "client and server share the CPUs, so that figures of both are mixed up".into(),
        };
        let debug = if cfg!(debug_assertions) { "; DEBUG BUILD, figures mean nothing" } else { "" };
        conditions.push(format!(
            "Method: {rounds} round(s) of {:?} per server and row; {cpus}; CPU time is that of all of \
             the server's process, in the same run as requests and latency{debug}",
            bench.run_time,
        ));
        conditions.push(
            "Files, written with random data: `direct` is read and written past the page cache where \
             the server can (nbdkit's file plugin cannot), and dropped from the page cache before \
             each run; `cached` is in the page cache"
                .into(),
        );
        conditions.push(format!(
            "Client: {}: `{}`; that of the rows that say so is the load generator of `bench`, which \
             also was the client where system calls were counted",
            bench.fio.version,
            Fio::command_to_show(Target::Nbd("nbd+unix:///?socket=$SOCKETS/nbd.sock"))
        ));
        let describe = |contender: &Contender<Serving>| {
            let command = |disk| shown_command(bench, contender, disk);
            let about = format!(
                "{}\n  ```\n  {}\n  {}\n  ```",
                contender.version,
                command(Disk::Direct),
                command(Disk::Cached)
            );
            (contender.name.clone(), about)
        };
        let contenders = contenders.iter().map(describe).collect();
        let mut jobs = Table::new(&["load", "JOB"]);
        for (row, _) in results.iter().filter(|(row, _)| row.sender == Sender::Fio) {
            jobs.row([row.name.clone(), format!("`{}`", fio::job(&row.load)?.join(" "))]);
        }
        Ok(Self { conditions, contenders, results, jobs })
    }

    /// Aligned text.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for line in &self.conditions {
            text += &format!("{line}\n");
        }
        for (name, about) in &self.contenders {
            text += &format!("{name}: {}\n", plain(about));
        }
        for table in [self.ahead(), self.all()] {
            text += "\n";
            text += &table.text();
        }
        text
    }

    /// To record.
    pub(super) fn section(&self) -> Section {
        let about = |(name, about): &(_, String)| format!("{name}: {}", plain(about));
        let text =
            self.conditions.iter().cloned().chain(self.contenders.iter().map(about)).collect();
        let tables = vec![self.ahead(), self.all(), self.jobs.clone()];
        Section { heading: String::new(), text, tables }
    }

    /// Ratios of ringmill to each of the peers, row by row.
    fn ahead(&self) -> Table {
        let is_own = |name: &str| name.starts_with("ringmill");
        let mut head = vec!["load".to_owned(), "server".into()];
        for (peer, _) in self.contenders.iter().filter(|(name, _)| !is_own(name)) {
            head.extend([format!("IOPS x {peer}"), format!("CPU x {peer}")]);
        }
        head.push("ahead in".into());
        let mut table = Table { head, body: Vec::new() };
        for (row, measured) in &self.results {
            let (own, peers): (Vec<_>, Vec<_>) =
                self.contenders.iter().zip(measured).partition(|((name, _), _)| is_own(name));
            for ((name, _), own) in own {
                let mut line = vec![row.name.clone(), name.clone()];
                let (mut most, mut least) = (true, true);
                for (_, peer) in &peers {
                    let ratio = |figure| own.median(figure) / peer.median(figure);
                    let (iops, cpu) = (ratio(Figure::Iops), ratio(Figure::Cpu));
                    most &= iops > 1.0;
                    least &= cpu < 1.0;
                    line.extend([format!("{iops:.2}"), format!("{cpu:.2}")]);
                }
                line.push(ahead_in(most, least).into());
                table.row(line);
            }
        }
        table
    }

    fn all(&self) -> Table {
        let mut table = Table::new(&[
            "load",
            "server",
            "IOPS",
            "least..most",
            "CPU us/req",
            "least..most",
            "calls/req",
            "switches/req",
            "p50 us",
            "p99 us",
        ]);
        for (row, measured) in &self.results {
            for ((name, _), measured) in self.contenders.iter().zip(measured) {
                let words = [row.name.clone(), name.clone()];
                if measured.failed.is_some() {
                    table.row(words.into_iter().chain(["failed".into()]));
                    continue;
                }
                let middle = |figure: Figure| figure.show(measured.median(figure));
                let range = |figure: Figure| spread(figure, &measured.figures(figure));
                let calls = measured.syscalls;
                table.row(words.into_iter().chain([
                    middle(Figure::Iops),
                    range(Figure::Iops),
                    middle(Figure::Cpu),
                    range(Figure::Cpu),
                    calls.map_or("-".into(), |calls| format!("{calls:.3}")),
                    middle(Figure::Switches),
                    middle(Figure::P50),
                    middle(Figure::P99),
                ]));
            }
        }
        table
    }
}

fn ahead_in(iops: bool, cpu: bool) -> &'static str {
    match (iops, cpu) {
        (true, true) => "both",
        (true, false) => "IOPS",
        (false, true) => "CPU",
        (false, false) => "neither",
    }
}

/// The command of a contender, without machine-dependent paths.
fn shown_command(bench: &Bench, contender: &Contender<Serving>, disk: Disk) -> String {
    let command = contender.command(&bench.serving(disk));
    let places = [
        (&*bench.directory, "$DIR"),
        (&*bench.sockets.0, "$SOCKETS"),
        (&*bench.tree, "$RINGMILL_PEERS"),
    ];
    command_to_show(&command, &places)
}

/// Removes the marks of a code block.
fn plain(about: &str) -> String {
    about.replace("  ```\n", "").replace("\n  ```", "")
}
