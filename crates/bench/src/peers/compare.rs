//! Servers compared load by load, in several rounds.

use std::path::Path;

use anyhow::{Result, ensure};

use super::contender::Contender;
use super::measure::LoadSample;
use super::result::{Figure, spread};
use crate::figures::{median, turns};
use crate::options::RunOptions;
use crate::report::Table;

/// The results of one contender on one row.
#[derive(Debug, Default)]
pub(crate) struct Measured {
    /// Its rounds.
    pub(crate) rounds: Vec<LoadSample>,
    /// System calls per request, counted once.
    pub(crate) calls: Option<f64>,
    /// Why it could not be measured.
    pub(crate) failed: Option<String>,
}

impl Measured {
    /// A figure of each round.
    pub(crate) fn figures(&self, figure: Figure) -> Vec<f64> {
        let of = |sample: &LoadSample| match figure {
            Figure::Iops => sample.iops,
            Figure::Cpu => sample.cpu,
            Figure::Switches => sample.switches,
            Figure::P50 => sample.latency[0],
            Figure::P99 => sample.latency[1],
            Figure::P999 | Figure::IdleCpu | Figure::WakeUps => f64::NAN,
        };
        self.rounds.iter().map(of).collect()
    }

    /// The median of the rounds.
    pub(crate) fn median(&self, figure: Figure) -> f64 {
        median(self.figures(figure).into_iter())
    }
}

/// How contenders are measured.
pub(crate) trait Comparison {
    /// A load.
    type Row;
    /// What a server's options are made of.
    type Setup;

    /// The row's name; names are unique.
    fn name(row: &Self::Row) -> &str;
    /// Measures once.
    fn sample(&self, contender: &Contender<Self::Setup>, row: &Self::Row) -> Result<LoadSample>;
    /// Counts the system calls per request. `None`: they cannot be counted here.
    fn calls(&self, contender: &Contender<Self::Setup>, row: &Self::Row) -> Result<Option<f64>>;

    /// Runs all rounds of all rows. A contender that fails is omitted from later rounds of the row.
    fn measure(
        &self,
        rows: Vec<Self::Row>,
        contenders: &[Contender<Self::Setup>],
        rounds: usize,
    ) -> Vec<(Self::Row, Vec<Measured>)> {
        let mut results = Vec::new();
        let count = rows.len();
        for (i, row) in rows.into_iter().enumerate() {
            eprintln!("[{}/{count}] {}", i + 1, Self::name(&row));
            let mut all: Vec<Measured> = contenders.iter().map(|_| Measured::default()).collect();
            for round in 0..rounds {
                for (contender, measured) in turns(contenders, &mut all, round) {
                    if measured.failed.is_some() {
                        continue;
                    }
                    let done = self.sample(contender, &row).and_then(|sample| {
                        measured.rounds.push(sample);
                        if round == 0 {
                            measured.calls = self.calls(contender, &row)?;
                        }
                        Ok(())
                    });
                    if let Err(error) = done {
                        eprintln!("{}, {}: {error:#}", Self::name(&row), contender.name);
                        measured.failed = Some(format!("{error:#}"));
                    }
                }
            }
            results.push((row, all));
        }
        results
    }
}

/// Keeps rows that are to be measured.
pub(crate) fn choose<C: Comparison>(
    mut rows: Vec<C::Row>,
    options: &RunOptions,
) -> Result<Vec<C::Row>> {
    rows.retain(|row| options.wants(C::name(row)));
    ensure!(!rows.is_empty(), "--rows matches none");
    Ok(rows)
}

/// All figures by row and contender, beside those of the contender `peer`, if there is to be one.
pub(crate) fn table<C: Comparison>(
    contenders: &[Contender<C::Setup>],
    results: &[(C::Row, Vec<Measured>)],
    peer: Option<&str>,
) -> Table {
    let ratio = peer.map(|peer| format!("x {peer}"));
    let beside = |figure: Figure| {
        [figure.name().into(), "least..most".into()].into_iter().chain(ratio.clone())
    };
    let mut head = vec!["load".to_owned(), "server".into()];
    head.extend([Figure::Iops, Figure::Cpu].into_iter().flat_map(beside));
    head.push("calls/req".into());
    head.extend([Figure::Switches, Figure::P50, Figure::P99].map(|figure| figure.name().into()));
    let mut table = Table { head, body: Vec::new() };
    for (row, all) in results {
        let all = || contenders.iter().zip(all);
        let peer = all().find(|(contender, _)| Some(contender.name.as_str()) == peer);
        for (contender, measured) in all() {
            let mut line = vec![C::name(row).to_owned(), contender.name.clone()];
            if measured.failed.is_some() {
                line.push("failed".into());
                table.row(line);
                continue;
            }
            let show = |figure: Figure| figure.show(measured.median(figure));
            for figure in [Figure::Iops, Figure::Cpu] {
                line.extend([show(figure), spread(figure, &measured.figures(figure))]);
                line.extend(ratio.iter().map(|_| match peer {
                    Some((_, peer)) => {
                        format!("{:.2}", measured.median(figure) / peer.median(figure))
                    }
                    None => "-".into(),
                }));
            }
            line.push(measured.calls.map_or("-".into(), |calls| format!("{calls:.3}")));
            line.extend([Figure::Switches, Figure::P50, Figure::P99].map(show));
            table.row(line);
        }
    }
    table
}

/// Fails if a contender could not be measured.
pub(crate) fn check<R>(results: &[(R, Vec<Measured>)], directory: &Path) -> Result<()> {
    let all = results.iter().flat_map(|(_, measured)| measured);
    no_failures(all.filter(|measured| measured.failed.is_some()).count(), directory)
}

/// Fails if there were failures.
pub(crate) fn no_failures(count: usize, directory: &Path) -> Result<()> {
    let directory = directory.display();
    ensure!(count == 0, "{count} measurements failed; the servers' output is in {directory}");
    Ok(())
}
