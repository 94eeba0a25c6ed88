//! Servers compared load by load, in several rounds: figures, their medians, and the table of all of them.

use std::ops::Index;
use std::path::Path;

use anyhow::{Result, bail, ensure};

use super::contender::Contender;
use crate::figures::{median, range, turns};
use crate::report::Table;

/// A figure of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Figure {
    /// Requests per second.
    Iops,
    /// CPU time per request in microseconds (the same number as CPU-seconds per million).
    Cpu,
    /// Context switches per request.
    Switches,
    /// Median latency in microseconds.
    P50,
    /// 99th percentile of the latency.
    P99,
    /// 99.9th percentile of the latency.
    P999,
    /// CPU time, percent of one CPU.
    CpuShare,
    /// Context switches per second: each wake-up of an idle server is one.
    WakeUps,
    /// Duration of a copy in seconds.
    Seconds,
    /// MiB per second.
    Speed,
    /// CPU time per MiB in microseconds.
    CpuPerMib,
    /// Most resident memory at once, in MiB.
    Peak,
}

/// Number of figures.
const FIGURES: usize = Figure::Peak as usize + 1;

impl Figure {
    /// Its name, and the number of digits after the point.
    const fn words(self) -> (&'static str, usize) {
        match self {
            Self::Iops => ("IOPS", 0),
            Self::Cpu => ("CPU us/req", 3),
            Self::Switches => ("switches/req", 3),
            Self::P50 => ("p50 us", 1),
            Self::P99 => ("p99 us", 1),
            Self::P999 => ("p99.9 us", 1),
            Self::CpuShare => ("CPU %", 2),
            Self::WakeUps => ("wake-ups/s", 1),
            Self::Seconds => ("seconds", 2),
            Self::Speed => ("MiB/s", 0),
            Self::CpuPerMib => ("CPU us/MiB", 0),
            Self::Peak => ("peak MiB", 1),
        }
    }

    /// Its name.
    pub(crate) fn name(self) -> &'static str {
        self.words().0
    }

    /// A value with its significant digits.
    pub(crate) fn show(self, value: f64) -> String {
        match value.is_nan() {
            true => "-".into(),
            false => format!("{value:.*}", self.words().1),
        }
    }

    /// Minimum and maximum of several rounds.
    pub(crate) fn spread(self, rounds: &[f64]) -> String {
        if rounds.iter().all(|round| round.is_nan()) {
            return "-".into();
        }
        let (least, most) = range(rounds.iter().copied());
        format!("{}..{}", self.show(least), self.show(most))
    }
}

/// The figures of a server in one round; NaN if a figure was not measured.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample([f64; FIGURES]);

impl Sample {
    /// These figures.
    pub(crate) fn of(figures: &[(Figure, f64)]) -> Self {
        let mut sample = [f64::NAN; FIGURES];
        for &(figure, value) in figures {
            sample[figure as usize] = value;
        }
        Self(sample)
    }

    /// These figures of another sample, the others of this one.
    pub(crate) fn with(mut self, figures: &[Figure], other: &Sample) -> Self {
        for &figure in figures {
            self.0[figure as usize] = other[figure];
        }
        self
    }
}

impl Index<Figure> for Sample {
    type Output = f64;

    fn index(&self, figure: Figure) -> &f64 {
        &self.0[figure as usize]
    }
}

/// The results of one contender on one row.
#[derive(Debug, Clone, Default)]
pub(crate) struct Measured {
    /// Its rounds.
    pub(crate) rounds: Vec<Sample>,
    /// System calls per request, counted once.
    pub(crate) calls: Option<f64>,
    /// Why it could not be measured.
    pub(crate) failed: Option<String>,
}

impl Measured {
    /// A figure of each round.
    pub(crate) fn figures(&self, figure: Figure) -> Vec<f64> {
        self.rounds.iter().map(|sample| sample[figure]).collect()
    }

    /// The median of the rounds; NaN without rounds.
    pub(crate) fn median(&self, figure: Figure) -> f64 {
        median(self.rounds.iter().map(|sample| sample[figure]))
    }
}

/// Rows with the results of each contender.
pub(crate) type Results<R> = Vec<(R, Vec<Measured>)>;

/// How contenders are measured.
pub(crate) trait Comparison {
    /// A load.
    type Row;

    /// The row's name; names are unique.
    fn name(row: &Self::Row) -> &str;
    /// Measures once.
    fn sample(&self, contender: &Contender, row: &Self::Row) -> Result<Sample>;
    /// Counts the system calls per request, if they can be counted.
    fn calls(&self, _contender: &Contender, _row: &Self::Row) -> Result<f64> {
        bail!("not counted")
    }
    /// Measures what else belongs to a row, once in each round.
    fn beside(&self, _row: &mut Self::Row) {}

    /// Runs all rounds of all rows. A contender that fails is omitted from later rounds of the row. `with_calls`: system calls
    /// can be counted.
    fn measure(
        &self,
        rows: Vec<Self::Row>,
        contenders: &[Contender],
        rounds: usize,
        with_calls: bool,
    ) -> Results<Self::Row> {
        let mut results = Vec::new();
        let count = rows.len();
        for (i, mut row) in rows.into_iter().enumerate() {
            eprintln!("[{}/{count}] {}", i + 1, Self::name(&row));
            let mut all = vec![Measured::default(); contenders.len()];
            for round in 0..rounds {
                for (contender, measured) in turns(contenders, &mut all, round) {
                    if measured.failed.is_some() {
                        continue;
                    }
                    let done = self.sample(contender, &row).and_then(|sample| {
                        measured.rounds.push(sample);
                        if round == 0 && with_calls {
                            measured.calls = Some(self.calls(contender, &row)?);
                        }
                        Ok(())
                    });
                    if let Err(error) = done {
                        eprintln!("{}, {}: {error:#}", Self::name(&row), contender.name);
                        measured.failed = Some(format!("{error:#}"));
                    }
                }
                self.beside(&mut row);
            }
            results.push((row, all));
        }
        results
    }
}

/// All figures by row and contender, with ratios to the contender at `base`, if there is to be one.
pub(crate) fn table<C: Comparison>(
    contenders: &[Contender],
    results: &Results<C::Row>,
    base: Option<usize>,
) -> Table {
    use Figure::{Cpu, Iops, P50, P99, P999, Switches};
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
    ]);
    if base.is_some() {
        table.head.extend(["IOPS x", "CPU x", "p50 x"].map(String::from));
    }
    for (row, all) in results {
        // Idle servers have a table of their own.
        if all.iter().all(|measured| measured.failed.is_none() && measured.median(Iops).is_nan()) {
            continue;
        }
        for (contender, measured) in contenders.iter().zip(all) {
            let mut line = vec![C::name(row).to_owned(), contender.name.clone()];
            if measured.failed.is_some() {
                line.push("failed".into());
                table.row(line);
                continue;
            }
            let show = |figure: Figure| figure.show(measured.median(figure));
            for figure in [Iops, Cpu] {
                line.extend([show(figure), figure.spread(&measured.figures(figure))]);
            }
            line.push(measured.calls.map_or("-".into(), |calls| format!("{calls:.3}")));
            line.extend([Switches, P50, P99, P999].map(show));
            if let Some(base) = base {
                line.extend([Iops, Cpu, P50].map(|figure| ratio(measured, &all[base], figure)));
            }
            table.row(line);
        }
    }
    table
}

/// These figures by row and contender, and of `ratios` the ratios to the first contender. Omits contenders without a figure in
/// a row. `what` names rows and contenders.
pub(crate) fn selected<C: Comparison>(
    what: [&str; 2],
    contenders: &[Contender],
    results: &Results<C::Row>,
    figures: &[Figure],
    ratios: &[Figure],
) -> Table {
    let mut table = Table::new(&what);
    table
        .head
        .extend(figures.iter().flat_map(|figure| [figure.name(), "least..most"].map(String::from)));
    table.head.extend(ratios.iter().map(|figure| format!("{} x", figure.name())));
    for (row, all) in results {
        for (contender, measured) in contenders.iter().zip(all) {
            let mut line = vec![C::name(row).to_owned(), contender.name.clone()];
            if measured.failed.is_some() {
                line.push("failed".into());
            } else if figures.iter().all(|&figure| measured.median(figure).is_nan()) {
                continue;
            } else {
                line.extend(figures.iter().flat_map(|&figure| {
                    [figure.show(measured.median(figure)), figure.spread(&measured.figures(figure))]
                }));
                line.extend(ratios.iter().map(|&figure| ratio(measured, &all[0], figure)));
            }
            table.row(line);
        }
    }
    table
}

/// A figure beside that of a peer.
pub(crate) fn ratio(own: &Measured, peer: &Measured, figure: Figure) -> String {
    match own.median(figure) / peer.median(figure) {
        ratio if ratio.is_nan() => "-".into(),
        ratio => format!("{ratio:.2}"),
    }
}

/// Fails if a contender could not be measured, or if there were `others` failures.
pub(crate) fn check<R>(results: &Results<R>, others: usize, directory: &Path) -> Result<()> {
    let all = results.iter().flat_map(|(_, measured)| measured);
    let count = others + all.filter(|measured| measured.failed.is_some()).count();
    let directory = directory.display();
    ensure!(count == 0, "{count} measurements failed; the servers' output is in {directory}");
    Ok(())
}
