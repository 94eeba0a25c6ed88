//! Goals for ringmill and whether they are met: ratios to qemu-storage-daemon in the same run, and to the bare ring.

use super::result::{Figure, RowResult, spread};
use super::rows::{Row, Target, Work};
use crate::figures::median;
use crate::goal::{Bound, Goal};
use crate::report::Table;

/// CPU time per request at depth 64, as a ratio to the bare ring's.
const OF_THE_RING: f64 = 1.35;
/// Requests per second, as a ratio to fio's on the file itself.
const OF_THE_FILE: f64 = 0.95;

/// One contender's figure compared with another's, for one target.
#[derive(Debug)]
pub(crate) struct Shown {
    /// Its median.
    pub(crate) own: f64,
    /// The figure that is compared, from the medians: a ratio or the figure itself.
    pub(crate) value: f64,
    /// The same for each round.
    pub(crate) rounds: Vec<f64>,
}

/// The figure of contender `own` in a row.
pub(crate) fn shown(result: &RowResult, figure: Figure, own: usize, base: usize) -> Option<Shown> {
    let rounds = |contender: usize| Some(result.outcomes.get(contender)?.rounds(figure));
    let (own, base) = (rounds(own)?, rounds(base)?);
    let absolute = matches!(result.row.work, Work::Idle(_));
    if own.is_empty() || (base.is_empty() && !absolute) {
        return None;
    }
    let medians = (median(own.iter().copied()), median(base.iter().copied()));
    Some(match absolute {
        // Rounded to one digit: 0.04 % is 0.0 %.
        true => Shown { own: medians.0, value: (medians.0 * 10.0).round() / 10.0, rounds: own },
        false => Shown {
            own: medians.0,
            value: medians.0 / medians.1,
            rounds: own.iter().zip(&base).map(|(own, base)| own / base).collect(),
        },
    })
}

fn goal(what: String, target: &Target, value: Option<f64>) -> Goal {
    Goal { what, bound: target.bound, limit: target.limit, value, digits: 3 }
}

/// All targets of all rows: the contenders at `own` (with their names) compared with the one at `base`.
pub(crate) fn table(results: &[RowResult], own: &[(usize, &str)], base: (usize, &str)) -> Table {
    let mut head = vec!["to reach".to_owned(), "of".into(), "bar".into(), base.1.into()];
    for (_, name) in own {
        head.extend([(*name).to_owned(), "ratio".into(), "of the rounds".into(), String::new()]);
    }
    let mut table = Table { head, body: Vec::new() };
    for result in results {
        for target in &result.row.targets {
            let figure = target.figure;
            let sign = match target.bound {
                Bound::AtMost => "≤",
                Bound::AtLeast => "≥",
            };
            let of_base = result.outcomes.get(base.0).map_or(f64::NAN, |base| base.median(figure));
            let mut line = vec![
                result.row.name.clone(),
                figure.name().into(),
                format!("{sign} {:.2}", target.limit),
                figure.show(of_base),
            ];
            for &(contender, _) in own {
                let shown = shown(result, figure, contender, base.0);
                let verdict =
                    goal(String::new(), target, shown.as_ref().map(|s| s.value)).verdict();
                let ratio = !matches!(result.row.work, Work::Idle(_));
                line.extend(match shown {
                    Some(shown) if ratio => [
                        figure.show(shown.own),
                        format!("{:.3}", shown.value),
                        spread(Figure::Cpu, &shown.rounds),
                        verdict.into(),
                    ],
                    Some(shown) => [
                        figure.show(shown.own),
                        "-".into(),
                        spread(figure, &shown.rounds),
                        verdict.into(),
                    ],
                    None => ["-".into(), "-".into(), "-".into(), verdict.into()],
                });
            }
            table.row(line);
        }
    }
    table
}

/// How many of the goals contender `own` meets, and their number.
pub(crate) fn met(results: &[RowResult], own: usize, base: usize) -> (usize, usize) {
    let verdicts = results.iter().flat_map(|result| {
        result.row.targets.iter().map(move |target| {
            let value = shown(result, target.figure, own, base).map(|shown| shown.value);
            goal(String::new(), target, value).verdict() == "met"
        })
    });
    verdicts.fold((0, 0), |(met, all), verdict| (met + usize::from(verdict), all + 1))
}

/// The limit of a row's CPU time per request, as a ratio to the bare ring's.
pub(crate) fn of_the_ring(row: &Row) -> Option<f64> {
    match &row.work {
        Work::Load(load) if row.limits && load.depth == 64 => Some(OF_THE_RING),
        _ => None,
    }
}

/// The goals relative to the bare ring, for each of the contenders at `own`.
pub(crate) fn beside_the_limit(results: &[RowResult], own: &[(usize, &str)]) -> Vec<Goal> {
    let mut goals = Vec::new();
    for result in results.iter().filter(|result| result.row.limits) {
        let Work::Load(load) = &result.row.work else { continue };
        if load.block_size != 4096 {
            continue;
        }
        let limits = &result.limits;
        for &(contender, name) in own {
            let figure = |figure| result.outcomes.get(contender).map(|own| own.median(figure));
            let mut add = |what: String, bound, limit, figure: Option<f64>, of: &[f64]| {
                let value = figure
                    .filter(|figure| !figure.is_nan() && !of.is_empty())
                    .map(|figure| figure / median(of.iter().copied()));
                goals.push(Goal { what, bound, limit, value, digits: 3 });
            };
            if let Some(limit) = of_the_ring(&result.row) {
                let cpu = figure(Figure::Cpu);
                for (rival, rounds) in
                    [("t/io_uring", &limits.t_io_uring), ("bare loop", &limits.bare)]
                {
                    let rounds: Vec<f64> = rounds.iter().map(|done| done.cpu).collect();
                    let what = format!("CPU per request, {}: {name} / {rival}", result.row.name);
                    add(what, Bound::AtMost, limit, cpu, &rounds);
                }
            }
            let what = format!("IOPS, {}: guest of {name} / fio on the file", result.row.name);
            add(what, Bound::AtLeast, OF_THE_FILE, figure(Figure::Iops), &limits.fio);
        }
    }
    goals
}
