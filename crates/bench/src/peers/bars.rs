//! What ringmill is to reach, as ratios to qemu-storage-daemon in the same run.

use super::result::{LoadFigures, Outcome, idle};
use super::rows::{Disk, Row, idle as idle_row, paced, unpaced};
use crate::load::queue::Op;

/// A bar, and where the figure that was measured lies.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Bar {
    /// What is measured.
    pub(crate) what: String,
    /// The figure may be at most this.
    pub(crate) limit: f64,
    /// The figure; `None` when its row was not measured.
    pub(crate) value: Option<f64>,
    /// Digits after the point, in both.
    pub(crate) digits: usize,
}

impl Bar {
    /// `met`, `missed` or `not measured`.
    pub(crate) fn verdict(&self) -> &'static str {
        match self.value {
            None => "not measured",
            Some(value) if value <= self.limit => "met",
            Some(_) => "missed",
        }
    }
}

fn rounded(value: f64, digits: usize) -> f64 {
    let scale = 10f64.powi(digits as i32);
    (value * scale).round() / scale
}

/// The bars of contender `contender` beside contender `base`.
pub(crate) fn bars(results: &[(Row, Vec<Outcome>)], contender: usize, base: usize) -> Vec<Bar> {
    let outcomes = |name: &str| {
        let (_, outcomes) = results.iter().find(|(row, _)| row.name == name)?;
        Some((outcomes.get(contender)?, outcomes.get(base)?))
    };
    let ratio = |row: &Row, figure: fn(&LoadFigures) -> f64| match outcomes(&row.name)? {
        (Outcome::Load(own), Outcome::Load(base)) => Some(figure(own) / figure(base)),
        _ => None,
    };
    let cpu = |row: Row, limit: f64| Bar {
        what: format!("CPU per request, {}", row.name),
        limit,
        value: ratio(&row, LoadFigures::cpu),
        digits: 3,
    };
    let p50_row = unpaced(Disk::Null, Op::Read, 1, 1);
    let idle_row = idle_row(1);
    vec![
        cpu(paced(Disk::Null, 400_000, 16), 0.80),
        cpu(unpaced(Disk::File, Op::Read, 1, 1), 0.85),
        cpu(unpaced(Disk::File, Op::Read, 64, 1), 0.85),
        cpu(unpaced(Disk::File, Op::Write, 1, 1), 0.85),
        cpu(unpaced(Disk::File, Op::Write, 64, 1), 0.85),
        Bar {
            what: format!("p50 latency, {}", p50_row.name),
            limit: 0.80,
            value: ratio(&p50_row, |figures| figures.latency()[0]),
            digits: 3,
        },
        Bar {
            what: format!("CPU %, {}", idle_row.name),
            limit: 0.0,
            // The bar is stated with one digit: 0.04 % is 0.0 %.
            value: match outcomes(&idle_row.name) {
                Some((Outcome::Idle(samples), _)) => Some(rounded(idle(samples).0, 1)),
                _ => None,
            },
            digits: 1,
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_are_not_rounded() {
        let bar = |value, limit, digits| Bar { what: String::new(), limit, value, digits };
        assert_eq!(bar(Some(0.8), 0.80, 3).verdict(), "met");
        assert_eq!(bar(Some(0.8004), 0.80, 3).verdict(), "missed");
        assert_eq!(bar(Some(0.0), 0.0, 1).verdict(), "met");
        assert_eq!(bar(None, 0.8, 2).verdict(), "not measured");
        assert_eq!(bar(Some(f64::NAN), 0.8, 2).verdict(), "missed");
    }
}
