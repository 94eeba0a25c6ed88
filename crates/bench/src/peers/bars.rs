//! What ringmill is to reach, as ratios to qemu-storage-daemon in the same run.

use super::result::{LoadFigures, Outcome, idle};
use super::rows::{Disk, Row, idle as idle_row, paced, unpaced};
use crate::goal::{Bound, Goal};
use crate::load::queue::Op;

fn rounded(value: f64, digits: usize) -> f64 {
    let scale = 10f64.powi(digits as i32);
    (value * scale).round() / scale
}

/// The bars of contender `contender` beside contender `base`.
pub(crate) fn bars(results: &[(Row, Vec<Outcome>)], contender: usize, base: usize) -> Vec<Goal> {
    let outcomes = |name: &str| {
        let (_, outcomes) = results.iter().find(|(row, _)| row.name == name)?;
        Some((outcomes.get(contender)?, outcomes.get(base)?))
    };
    let ratio = |row: &Row, figure: fn(&LoadFigures) -> f64| match outcomes(&row.name)? {
        (Outcome::Load(own), Outcome::Load(base)) => Some(figure(own) / figure(base)),
        _ => None,
    };
    let cpu = |row: Row, limit: f64| Goal {
        what: format!("CPU per request, {}", row.name),
        bound: Bound::AtMost,
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
        Goal {
            what: format!("p50 latency, {}", p50_row.name),
            bound: Bound::AtMost,
            limit: 0.80,
            value: ratio(&p50_row, |figures| figures.latency()[0]),
            digits: 3,
        },
        Goal {
            what: format!("CPU %, {}", idle_row.name),
            bound: Bound::AtMost,
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
