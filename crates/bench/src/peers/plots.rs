//! The report in pictures.

use std::path::Path;

use anyhow::{Context, Result};

use super::bars::{Shown, shown};
use super::report::Report;
use super::result::{Figure, RowResult};
use super::rows::Work;
use crate::plot::lines::{Group, Line, Lines, Mark, Scale};
use crate::plot::{Bar, Bars};

/// A picture of a report.
#[derive(Debug)]
pub(crate) enum Picture {
    /// Figures that lie.
    Lines(Lines),
    /// Bars that stand.
    Bars(Bars),
}

/// The pictures that a report has something for, by file name.
pub(crate) fn pictures(report: &Report) -> Vec<(&'static str, Picture)> {
    let cpu = "CPU per request beside qemu-storage-daemon's: less is better";
    let iops = "Requests per second beside qemu-storage-daemon's: more is better";
    let mut all = Vec::new();
    if loads(report).next().is_some() {
        all.push(("peers-cpu.svg", Picture::Lines(ratios(report, Figure::Cpu, cpu))));
        all.push(("peers-iops.svg", Picture::Lines(ratios(report, Figure::Iops, iops))));
        all.push(("peers-latency.svg", Picture::Lines(latencies(report))));
    }
    if report.results.iter().any(|result| result.row.limits) {
        all.push(("peers-limit.svg", Picture::Bars(limits(report))));
    }
    all
}

/// Draws them into `directory`.
pub(crate) fn draw(report: &Report, directory: &Path) -> Result<()> {
    std::fs::create_dir_all(directory)
        .with_context(|| format!("making {}", directory.display()))?;
    for (file, picture) in pictures(report) {
        match picture {
            Picture::Lines(lines) => lines.draw(&directory.join(file))?,
            Picture::Bars(bars) => bars.draw(&directory.join(file))?,
        }
    }
    Ok(())
}

/// The pictures in a document in whose directory `plots` is.
pub(crate) fn markdown(report: &Report) -> String {
    let pictures = pictures(report).into_iter().map(|(file, picture)| match picture {
        Picture::Lines(Lines { title, .. }) | Picture::Bars(Bars { title, .. }) => {
            format!("\n![{title}](plots/{file})\n")
        }
    });
    pictures.collect()
}

fn loads(report: &Report) -> impl Iterator<Item = &RowResult> {
    report.results.iter().filter(|result| matches!(result.row.work, Work::Load(_)))
}

fn names(report: &Report) -> Vec<String> {
    report.contenders.iter().map(|contender| contender.name.clone()).collect()
}

fn ratios(report: &Report, figure: Figure, title: &str) -> Lines {
    let groups = loads(report).map(|result| {
        let lines = (0..result.outcomes.len()).map(|contender| {
            let Shown { own, value, mut rounds } = shown(result, figure, contender, 0)?;
            let mut label = format!("{value:.2} ({})", with_unit(figure, own));
            if contender == 0 {
                // Beside itself: its rounds beside their median.
                rounds = result.outcomes[0].rounds(figure);
                rounds.iter_mut().for_each(|round| *round /= own);
                label = with_unit(figure, own);
            }
            let bar = Bar { median: value, ..Bar::of(&rounds) };
            Some(Line { mark: Mark::Bar(bar), label })
        });
        let target = result.row.targets.iter().find(|target| target.figure == figure);
        Group {
            name: result.row.name.clone(),
            lines: lines.collect(),
            goal: target.map(|target| target.limit),
        }
    });
    Lines {
        title: title.into(),
        unit: "ratio to qemu-storage-daemon; thick stroke: to be reached; thin line: all rounds"
            .into(),
        scale: Scale::Linear(2.0),
        series: names(report),
        groups: groups.collect(),
    }
}

fn with_unit(figure: Figure, value: f64) -> String {
    match figure {
        Figure::Iops if value >= 1e6 => format!("{:.2} M/s", value / 1e6),
        Figure::Iops => format!("{:.1} k/s", value / 1e3),
        _ => format!("{value:.2} us"),
    }
}

fn latencies(report: &Report) -> Lines {
    let groups = loads(report).map(|result| {
        let lines = result.outcomes.iter().map(|outcome| {
            let [p50, p999] = [Figure::P50, Figure::P999].map(|figure| outcome.median(figure));
            let label = format!("{p50:.0} to {p999:.0} us");
            (!p50.is_nan()).then_some(Line { mark: Mark::Span(p50, p999), label })
        });
        Group { name: result.row.name.clone(), lines: lines.collect(), goal: None }
    });
    Lines {
        title: "Latency, from the median (full dot) to the 99.9th percentile (empty dot)".into(),
        unit: "microseconds".into(),
        scale: Scale::Decades(0, 4),
        series: names(report),
        groups: groups.collect(),
    }
}

fn limits(report: &Report) -> Bars {
    let mut series = vec!["t/io_uring".to_owned(), "bare loop".into()];
    series.extend(names(report));
    let groups = report.results.iter().filter(|result| result.row.limits).map(|result| {
        let limits = &result.limits;
        let of = |done: &[crate::bare::Done]| done.iter().map(|done| done.cpu).collect();
        let mut rounds: Vec<Vec<f64>> = vec![of(&limits.t_io_uring), of(&limits.bare)];
        rounds.extend(result.outcomes.iter().map(|outcome| outcome.rounds(Figure::Cpu)));
        let bars = rounds.iter().map(|rounds| (!rounds.is_empty()).then(|| Bar::of(rounds)));
        (result.row.name.clone(), bars.collect())
    });
    Bars {
        title: "CPU per read of the file, servers beside bare rings".into(),
        unit: "CPU us per read".into(),
        series,
        groups: groups.collect(),
    }
}
