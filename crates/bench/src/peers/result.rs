//! Figures of several rounds, and their medians.

use super::limit::Limits;
use super::measure::{IdleSample, LoadSample};
use super::rows::Row;
use crate::figures::{median, range};

/// Something that is measured of a server.
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
    /// 99th percentile of that.
    P99,
    /// 99.9th percentile of that.
    P999,
    /// CPU time with nothing to do, percent.
    IdleCpu,
    /// Context switches per second with nothing to do.
    WakeUps,
}

impl Figure {
    /// What it is called.
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

    /// As many digits as say something.
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

/// What is known of one contender on one row.
#[derive(Debug, Clone)]
pub(crate) enum Outcome {
    /// Under a load.
    Load(LoadFigures),
    /// With nothing to do.
    Idle(Vec<IdleSample>),
    /// It could not be measured, and why.
    Failed(String),
}

/// The rounds of one contender under one load.
#[derive(Debug, Clone, Default)]
pub(crate) struct LoadFigures {
    /// With default polling: throughput and latency are taken from these.
    pub(crate) default: Vec<LoadSample>,
    /// Without polling: CPU time and context switches are taken from these.
    pub(crate) unpolled: Vec<LoadSample>,
    /// System calls per request, counted once.
    pub(crate) syscalls: Option<f64>,
}

/// What is known of one row.
#[derive(Debug, Clone)]
pub(crate) struct RowResult {
    /// Which.
    pub(crate) row: Row,
    /// Of each contender.
    pub(crate) outcomes: Vec<Outcome>,
    /// With no server between.
    pub(crate) limits: Limits,
}

impl Outcome {
    /// The figure in each round; none where it does not apply.
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

    /// The median of the rounds; NaN where there are none.
    pub(crate) fn median(&self, figure: Figure) -> f64 {
        median(self.rounds(figure).into_iter())
    }

    /// Least and most of the rounds.
    pub(crate) fn range(&self, figure: Figure) -> String {
        spread(figure, &self.rounds(figure))
    }
}

/// Least and most.
pub(crate) fn spread(figure: Figure, rounds: &[f64]) -> String {
    if rounds.is_empty() {
        return "-".into();
    }
    let (least, most) = range(rounds.iter().copied());
    format!("{}..{}", figure.show(least), figure.show(most))
}
