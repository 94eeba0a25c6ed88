//! The report: a line per row, a column per contender.

use anyhow::Result;

use super::contenders::Contender;
use super::rows::Row;
use crate::figures::{median, range};
use crate::report::{Section, Table};

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
                let (least, most) = range(rounds.iter().copied());
                let middle = median(rounds.iter().copied());
                match rounds.len() {
                    1 => short(middle),
                    _ => format!("{} ({}..{})", short(middle), short(least), short(most)),
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

/// All that a run has found.
#[derive(Debug)]
pub(crate) struct Report {
    conditions: Vec<String>,
    contenders: Vec<&'static Contender>,
    rows: Vec<(Row, Vec<Figure>)>,
}

impl Report {
    /// With nothing measured yet.
    pub(crate) fn new(conditions: Vec<String>, contenders: &[&'static Contender]) -> Self {
        Report { conditions, contenders: contenders.to_vec(), rows: Vec::new() }
    }

    /// A row, with a figure per contender.
    pub(crate) fn add(&mut self, row: Row, figures: Vec<Figure>) {
        self.rows.push((row, figures));
    }

    /// With the settings of the contenders, and what failed.
    pub(crate) fn section(&self) -> Section {
        let mut text = self.conditions.clone();
        text.extend(self.contenders.iter().map(|c| format!("{}: {}", c.name, c.settings)));
        for (row, figures) in &self.rows {
            for (contender, figure) in self.contenders.iter().zip(figures) {
                if let Figure::Failed(why) = figure {
                    text.push(format!("{}, {} failed: {why}", row.name(), contender.name));
                }
            }
        }
        Section { heading: String::new(), text, tables: vec![self.table()] }
    }

    fn table(&self) -> Table {
        let mut head = vec!["row", "unit"];
        head.extend(self.contenders.iter().map(|contender| contender.name));
        head.extend(["x raw", "x best peer"]);
        let mut table = Table::new(&head);
        for (row, figures) in &self.rows {
            let mut cells = vec![row.name(), row.unit().into()];
            cells.extend(figures.iter().map(Figure::cell));
            let [raw, peer] = self.ratios(*row, figures);
            cells.extend([raw, peer].map(|ratio| match ratio {
                Some(ratio) => format!("{ratio:.2}"),
                None => "-".into(),
            }));
            table.row(cells);
        }
        table
    }

    /// How much better ringmill is than raw io_uring and than the best of its peers: more than 1 is
    /// better, whatever the unit.
    fn ratios(&self, row: Row, figures: &[Figure]) -> [Option<f64>; 2] {
        let better = |own: f64, other: f64| match row.less_is_better() {
            true => other / own,
            false => own / other,
        };
        let named = || self.contenders.iter().zip(figures).map(|(c, figure)| (c.name, figure));
        let of = |name: &str| named().find(|(known, _)| *known == name)?.1.median();
        let Some(own) = of("ringmill") else { return [None, None] };
        let raw = of("raw io_uring").map(|raw| better(own, raw));
        let peers = named().filter(|(name, _)| !name.contains("ringmill") && !name.contains("raw"));
        let peer = peers
            .filter_map(|(_, figure)| figure.median())
            .map(|peer| better(own, peer))
            .min_by(f64::total_cmp);
        [raw, peer]
    }
}
