//! Goals for ringmill and whether they are met: ratios to qemu-storage-daemon in the same run, and to programs without a
//! server.

use super::compare::{Figure, Measured, Results};
use super::contender::Contender;
use super::limit::{BARE, T_IO_URING};
use super::rows::{Row, Target, Work};
use crate::figures::Rounds;
use crate::goal::{Bound, Goal};
use crate::report::Table;

/// CPU time per request at depth 64, as a ratio to the bare ring's.
const OF_THE_RING: f64 = 1.35;

/// A goal of one contender on one row.
#[derive(Debug)]
pub(crate) struct Bar {
    row: String,
    figure: Figure,
    server: String,
    /// What it is compared with, if that is no server.
    beside: Option<&'static str>,
    rounds: String,
    goal: Goal,
}

impl Bar {
    fn new(
        row: &Row,
        target: Target,
        server: &str,
        own: &Measured,
        base: Option<&Measured>,
    ) -> Bar {
        let own = own.figures(target.figure);
        let values: Vec<f64> = match base {
            Some(base) => {
                let base = base.figures(target.figure);
                own.iter().zip(base).map(|(own, base)| own / base).collect()
            }
            None => own.clone(),
        };
        let value = match base {
            Some(base) => Rounds::of(&own).median / base.median(target.figure),
            // Rounded to one digit: 0.04 % is 0.0 %.
            None => (Rounds::of(&own).median * 10.0).round() / 10.0,
        };
        let value = Some(value).filter(|value| !value.is_nan());
        Bar {
            row: row.name.clone(),
            figure: target.figure,
            server: server.to_owned(),
            beside: None,
            rounds: if value.is_some() { Rounds::of(&values).range(3) } else { "-".into() },
            goal: Goal::new("", target.bound, value, 3),
        }
    }

    /// Whether the contender called `server` meets this goal relative to qemu-storage-daemon. `None`: it is not such a goal.
    fn is_met_by(&self, server: &str) -> Option<bool> {
        let is_its = self.server == server && self.beside.is_none();
        is_its.then(|| self.goal.verdict() == "met")
    }
}

/// All goals of all rows: of each ringmill, compared with the contender called `qsd`, if there is one.
pub(crate) fn bars(results: &Results<Row>, contenders: &[Contender]) -> Vec<Bar> {
    let mut bars = Vec::new();
    let base = contenders.iter().position(|contender| contender.name == "qsd");
    for (row, all) in results {
        let own = || contenders.iter().zip(all).filter(|(contender, _)| contender.is_ringmill());
        for &target in &row.targets {
            let base = match (&row.work, base) {
                (Work::Idle(_), _) => None,
                (Work::Load(_), Some(base)) => Some(&all[base]),
                (Work::Load(_), None) => continue,
            };
            bars.extend(
                own().map(|(contender, own)| Bar::new(row, target, &contender.name, own, base)),
            );
        }
        let Work::Load(load) = &row.work else { continue };
        for (beside, measured) in row.limits.all.iter().filter(|_| load.block_size == 4096) {
            let target = match *beside {
                T_IO_URING | BARE if load.depth == 64 => Target::new(Figure::Cpu, OF_THE_RING),
                _ => continue,
            };
            bars.extend(own().map(|(contender, own)| Bar {
                beside: Some(beside),
                ..Bar::new(row, target, &contender.name, own, Some(measured))
            }));
        }
    }
    bars
}

/// The goals with their verdicts.
pub(crate) fn table(bars: &[Bar]) -> Table {
    let mut table =
        Table::new(&["to reach", "of", "bar", "server", "measured", "of the rounds", "verdict"]);
    for bar in bars {
        let limit = match bar.goal.bound {
            Bound::AtMost(limit) => format!("≤ {limit:.2}"),
            Bound::AtLeast(limit) => format!("≥ {limit:.2}"),
        };
        let beside = bar.beside.map_or(String::new(), |beside| format!(", beside {beside}"));
        table.row([
            bar.row.clone(),
            format!("{}{beside}", bar.figure.name()),
            limit,
            bar.server.clone(),
            bar.goal.measured(),
            bar.rounds.clone(),
            bar.goal.verdict().into(),
        ]);
    }
    table
}

/// How many of the goals relative to qemu-storage-daemon each contender meets.
pub(crate) fn sums(bars: &[Bar], contenders: &[Contender]) -> Vec<String> {
    let own = contenders.iter().filter(|contender| contender.is_ringmill());
    own.map(|contender| {
        let verdicts: Vec<bool> =
            bars.iter().filter_map(|bar| bar.is_met_by(&contender.name)).collect();
        let met = verdicts.iter().filter(|&&met| met).count();
        format!("{}: {met} of {} bars met", contender.name, verdicts.len())
    })
    .collect()
}

/// The figures of each server beside those of what does the same without one.
pub(crate) fn beside_table(results: &Results<Row>, contenders: &[Contender]) -> Table {
    let mut table =
        Table::new(&["load", "server", "beside", "CPU us/req", "CPU x", "IOPS", "IOPS x"]);
    for (row, all) in results {
        for (name, peer) in &row.limits.all {
            let servers = contenders.iter().zip(all);
            let servers = servers.map(|(contender, own)| (contender.name.as_str(), own));
            for (server, own) in servers.chain([(*name, peer)]) {
                let mut line = vec![row.name.clone(), server.to_owned(), (*name).to_owned()];
                for figure in [Figure::Cpu, Figure::Iops] {
                    let (own, peer) = (own.median(figure), peer.median(figure));
                    let ratio = own / peer;
                    let ratio = if ratio.is_nan() { "-".into() } else { format!("{ratio:.3}") };
                    line.extend([figure.show(own), ratio]);
                }
                table.row(line);
            }
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::compare::Sample;
    use crate::peers::rows::{Extent, rows};

    #[test]
    fn bars_are_met_by_medians_of_rounds() {
        let row = rows(Extent::Full).remove(0);
        let contender = |name: &str| Contender {
            key: name.into(),
            name: name.into(),
            version: String::new(),
            program: Vec::new(),
        };
        let measured = |cpu: [f64; 3]| Measured {
            rounds: cpu.map(|cpu| Sample::of(&[(Figure::Cpu, cpu)])).into(),
            ..Measured::default()
        };
        let contenders = ["qsd", "ringmill", "ringmill pinned"].map(contender);
        let all = [[2.0, 4.0, 3.0], [1.5, 9.0, 1.0], [1.6, 1.6, 1.6]].map(measured);
        let bars = bars(&vec![(row, all.into())], &contenders);
        let body = table(&bars).body;
        assert_eq!(
            body[0][1..],
            ["CPU us/req", "≤ 0.50", "ringmill", "0.500", "0.333..2.250", "met"]
        );
        assert_eq!(body[1][3..], ["ringmill pinned", "0.533", "0.400..0.800", "missed"]);
        assert_eq!(body[2][3..], ["ringmill", "-", "-", "not measured"]);
        let sums = sums(&bars, &contenders);
        assert_eq!(sums, ["ringmill: 1 of 2 bars met", "ringmill pinned: 0 of 2 bars met"]);
    }
}
