//! The table: a line per row, a column per contender.

use anyhow::Result;

use crate::contenders::Contender;
use crate::rows::Row;
use bench::figures::{Rounds, median};
use bench::report::Table;

/// What one measurement has come to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Outcome {
    /// A figure.
    Measured(f64),
    /// The contender has no such thing.
    Nothing,
    /// It did not come to an end.
    Stuck,
}

/// What a contender has shown in a row.
#[derive(Debug, Clone)]
pub(crate) enum Figure {
    /// The rounds so far.
    Measured(Vec<f64>),
    /// It has no such thing.
    Nothing,
    /// It did not come to an end.
    Stuck,
    /// It could not be measured.
    Failed(String),
}

impl Default for Figure {
    fn default() -> Self {
        Figure::Measured(Vec::new())
    }
}

impl Figure {
    /// Whether another round says more.
    pub(crate) fn goes_on(&self) -> bool {
        matches!(self, Figure::Measured(_))
    }

    /// A round's outcome.
    pub(crate) fn note(&mut self, outcome: Result<Outcome>) {
        match (outcome, &mut *self) {
            (Ok(Outcome::Measured(figure)), Figure::Measured(rounds)) if figure.is_finite() => {
                rounds.push(figure);
            }
            (Ok(Outcome::Measured(figure)), _) => {
                *self = Figure::Failed(format!("measured {figure}"));
            }
            (Ok(Outcome::Nothing), _) => *self = Figure::Nothing,
            (Ok(Outcome::Stuck), _) => *self = Figure::Stuck,
            (Err(error), _) => *self = Figure::Failed(format!("{error:#}")),
        }
    }

    fn median(&self) -> Option<f64> {
        match self {
            Figure::Measured(rounds) => Some(median(rounds.iter().copied())),
            _ => None,
        }
    }

    fn cell(&self) -> String {
        match self {
            Figure::Measured(rounds) => {
                let all = Rounds::of(rounds);
                match rounds.len() {
                    1 => short(all.median),
                    _ => {
                        format!("{} ({}..{})", short(all.median), short(all.least), short(all.most))
                    }
                }
            }
            Figure::Nothing => "-".into(),
            Figure::Stuck => "stuck".into(),
            Figure::Failed(_) => "failed".into(),
        }
    }
}

/// Three digits that mean something.
fn short(figure: f64) -> String {
    let digits = match figure {
        figure if figure < 10.0 => 2,
        figure if figure < 100.0 => 1,
        _ => 0,
    };
    format!("{figure:.digits$}")
}

/// An empty table for these contenders.
pub(crate) fn table(contenders: &[&Contender]) -> Table {
    let mut head = vec!["row", "unit"];
    head.extend(contenders.iter().map(|contender| contender.name));
    head.extend(["x raw", "x best peer"]);
    Table::new(&head)
}

/// A line of the table. The last two cells say how much better ringmill is than raw io_uring and than the best of its peers:
/// more than 1 is better, whatever the unit.
pub(crate) fn line(row: Row, contenders: &[&Contender], figures: &[Figure]) -> Vec<String> {
    let better = |own: f64, other: f64| match row.less_is_better() {
        true => other / own,
        false => own / other,
    };
    let named = || contenders.iter().zip(figures).map(|(c, figure)| (c.name, figure));
    let of = |name: &str| named().find(|(known, _)| *known == name)?.1.median();
    let own = of("ringmill");
    let raw = own.zip(of("raw io_uring")).map(|(own, raw)| better(own, raw));
    let peers = named().filter(|(name, _)| !["ringmill", "raw io_uring"].contains(name));
    let peers = peers.filter_map(|(_, figure)| Some(better(own?, figure.median()?)));
    let mut cells = vec![row.name(), row.unit().into()];
    cells.extend(figures.iter().map(Figure::cell));
    cells.extend([raw, peers.min_by(f64::total_cmp)].map(|ratio| match ratio {
        Some(ratio) => format!("{ratio:.2}"),
        None => "-".into(),
    }));
    cells
}
