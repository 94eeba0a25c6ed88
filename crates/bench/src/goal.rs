//! Goals, and whether they are met.

use crate::report::Table;

/// The side of its limit on which a figure has to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bound {
    /// At the limit or below.
    AtMost,
    /// At the limit or above.
    AtLeast,
}

/// A limit, and the measured figure.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Goal {
    /// The name of the figure.
    pub(crate) what: String,
    /// The side of the limit it has to be on.
    pub(crate) bound: Bound,
    /// The limit.
    pub(crate) limit: f64,
    /// The figure; `None` if it was not measured.
    pub(crate) value: Option<f64>,
    /// Digits after the point, in both.
    pub(crate) digits: usize,
}

impl Goal {
    /// `met`, `missed` or `not measured`.
    pub(crate) fn verdict(&self) -> &'static str {
        match (self.bound, self.value) {
            (_, None) => "not measured",
            (Bound::AtMost, Some(value)) if value <= self.limit => "met",
            (Bound::AtLeast, Some(value)) if value >= self.limit => "met",
            (_, Some(_)) => "missed",
        }
    }
}

/// Goals with their verdicts; `heading` is that of the first column.
pub(crate) fn table(heading: &str, goals: &[Goal]) -> Table {
    let mut table = Table::new(&[heading, "", "goal", "measured", "verdict"]);
    for goal in goals {
        let bound = match goal.bound {
            Bound::AtMost => "at most",
            Bound::AtLeast => "at least",
        };
        table.row([
            goal.what.clone(),
            bound.into(),
            format!("{:.*}", goal.digits, goal.limit),
            goal.value.map_or("-".into(), |value| format!("{value:.*}", goal.digits)),
            goal.verdict().into(),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_are_not_rounded() {
        let verdict = |value, bound, limit| {
            Goal { what: String::new(), bound, limit, value, digits: 3 }.verdict()
        };
        assert_eq!(verdict(Some(0.8), Bound::AtMost, 0.80), "met");
        assert_eq!(verdict(Some(0.8004), Bound::AtMost, 0.80), "missed");
        assert_eq!(verdict(Some(0.7996), Bound::AtLeast, 0.80), "missed");
        assert_eq!(verdict(Some(0.8), Bound::AtLeast, 0.80), "met");
        assert_eq!(verdict(None, Bound::AtMost, 0.8), "not measured");
        assert_eq!(verdict(Some(f64::NAN), Bound::AtMost, 0.8), "missed");
        assert_eq!(verdict(Some(f64::NAN), Bound::AtLeast, 0.8), "missed");
    }
}
