//! Figures of several rounds, and their medians.

use super::measure::{IdleSample, LoadSample};
use crate::figures::{median, range};

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

impl LoadFigures {
    /// Median requests per second.
    pub(crate) fn iops(&self) -> f64 {
        median(self.default.iter().map(|sample| sample.iops))
    }

    /// Least and most requests per second of a round.
    pub(crate) fn iops_range(&self) -> (f64, f64) {
        range(self.default.iter().map(|sample| sample.iops))
    }

    /// Median CPU microseconds per request.
    pub(crate) fn cpu(&self) -> f64 {
        median(self.unpolled.iter().map(|sample| sample.cpu))
    }

    /// Least and most CPU microseconds per request of a round.
    pub(crate) fn cpu_range(&self) -> (f64, f64) {
        range(self.unpolled.iter().map(|sample| sample.cpu))
    }

    /// Median context switches per request.
    pub(crate) fn switches(&self) -> f64 {
        median(self.unpolled.iter().map(|sample| sample.switches))
    }

    /// Median latencies in microseconds: 50th, 99th, 99.9th percentile.
    pub(crate) fn latency(&self) -> [f64; 3] {
        [0, 1, 2].map(|i| median(self.default.iter().map(|sample| sample.latency[i])))
    }
}

/// Median CPU percentage and context switches per second.
pub(crate) fn idle(samples: &[IdleSample]) -> (f64, f64) {
    (
        median(samples.iter().map(|sample| sample.cpu)),
        median(samples.iter().map(|sample| sample.switches)),
    )
}
