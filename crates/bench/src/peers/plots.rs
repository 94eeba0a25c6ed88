//! The report in pictures.

use std::path::Path;

use anyhow::{Context, Result};

use super::bars::{Shown, shown};
use super::report::Report;
use super::result::{Figure, RowResult};
use super::rows::Work;
use crate::plot::Bar;
use crate::plot::lines::{Group, Line, Lines, Mark, Scale};

/// The pictures that a report has something for, by file name.
pub(crate) fn pictures(report: &Report) -> Vec<(&'static str, Lines)> {
    let cpu = "CPU per request beside qemu-storage-daemon's: less is better";
    let pictures = [
        ("peers-cpu.svg", ratios(report, Figure::Cpu, cpu)),
        ("peers-latency.svg", latencies(report)),
    ];
    pictures.into_iter().filter(|(_, lines)| !lines.groups.is_empty()).collect()
}

/// Draws them into `directory`.
pub(crate) fn draw(report: &Report, directory: &Path) -> Result<()> {
    std::fs::create_dir_all(directory)
        .with_context(|| format!("making {}", directory.display()))?;
    pictures(report).iter().try_for_each(|(file, lines)| lines.draw(&directory.join(file)))
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
