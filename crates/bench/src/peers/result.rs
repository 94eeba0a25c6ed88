//! Figures of several rounds, and their medians.

use super::limit::Limits;
use super::measure::{IdleSample, LoadSample};
use super::rows::Row;
use crate::figures::{median, range};

/// A figure of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Figure {
    /// CPU time per request in microseconds, polling off.
    Cpu,
    /// Context switches per request, polling off.
    Switches,
    /// Requests per second, default polling.
    Iops,
    /// Median latency in microseconds, default polling.
    P50,
    /// 99th percentile of the latency.
    P99,
    /// 99.9th percentile of the latency.
    P999,
    /// CPU time when idle, percent.
    IdleCpu,
    /// Context switches per second when idle.
    WakeUps,
}

impl Figure {
    /// Its name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Cpu => "CPU us/req",
            Self::Switches => "switches/req",
            Self::Iops => "IOPS",
            Self::P50 => "p50 us",
            Self::P99 => "p99 us",
            Self::P999 => "p99.9 us",
            Self::IdleCpu => "CPU %",
            Self::WakeUps => "wake-ups/s",
        }
    }

    /// A value with its significant digits.
    pub(crate) fn show(self, value: f64) -> String {
        let digits = match self {
            _ if value.is_nan() => return "-".into(),
            Self::Cpu | Self::Switches => 3,
            Self::Iops => 0,
            Self::P50 | Self::P99 | Self::P999 | Self::WakeUps => 1,
            Self::IdleCpu => 2,
        };
        format!("{value:.digits$}")
    }
}

/// The results of one contender on one row.
#[derive(Debug, Clone)]
pub(crate) enum Outcome {
    /// Under a load.
    Load(LoadFigures),
    /// When idle.
    Idle(Vec<IdleSample>),
    /// It could not be measured, for this reason.
    Failed(String),
}

/// The rounds of one contender under one load.
#[derive(Debug, Clone, Default)]
pub(crate) struct LoadFigures {
    /// With default polling: the source of throughput and latency.
    pub(crate) default: Vec<LoadSample>,
    /// Without polling: the source of CPU time and context switches.
    pub(crate) unpolled: Vec<LoadSample>,
    /// System calls per request, counted once.
    pub(crate) syscalls: Option<f64>,
}

/// The results of one row.
#[derive(Debug, Clone)]
pub(crate) struct RowResult {
    /// The row.
    pub(crate) row: Row,
    /// The result of each contender.
    pub(crate) outcomes: Vec<Outcome>,
    /// Without a server.
    pub(crate) limits: Limits,
}

impl Outcome {
    /// The figure in each round; empty where it does not apply.
    pub(crate) fn rounds(&self, figure: Figure) -> Vec<f64> {
        let load =
            |of: fn(&LoadFigures) -> &[LoadSample], figure: fn(&LoadSample) -> f64| match self {
                Self::Load(figures) => of(figures).iter().map(figure).collect(),
                _ => Vec::new(),
            };
        let idle = |figure: fn(&IdleSample) -> f64| match self {
            Self::Idle(samples) => samples.iter().map(figure).collect(),
            _ => Vec::new(),
        };
        match figure {
            Figure::Cpu => load(|f| &f.unpolled, |sample| sample.cpu),
            Figure::Switches => load(|f| &f.unpolled, |sample| sample.switches),
            Figure::Iops => load(|f| &f.default, |sample| sample.iops),
            Figure::P50 => load(|f| &f.default, |sample| sample.latency[0]),
            Figure::P99 => load(|f| &f.default, |sample| sample.latency[1]),
            Figure::P999 => load(|f| &f.default, |sample| sample.latency[2]),
            Figure::IdleCpu => idle(|sample| sample.cpu),
            Figure::WakeUps => idle(|sample| sample.switches),
        }
    }

    /// The median of the rounds; NaN without rounds.
    pub(crate) fn median(&self, figure: Figure) -> f64 {
        median(self.rounds(figure).into_iter())
    }

    /// Minimum and maximum of the rounds.
    pub(crate) fn range(&self, figure: Figure) -> String {
        spread(figure, &self.rounds(figure))
    }
}

/// Minimum and maximum.
pub(crate) fn spread(figure: Figure, rounds: &[f64]) -> String {
    if rounds.is_empty() {
        return "-".into();
    }
    let (least, most) = range(rounds.iter().copied());
    format!("{}..{}", figure.show(least), figure.show(most))
}
