//! Goals, and whether they are met.

use crate::report::Table;

/// The limit of a figure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Bound {
    /// At the limit or below.
    AtMost(f64),
    /// At the limit or above.
    AtLeast(f64),
}

/// A limit, and the measured figure.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Goal {
    what: String,
    /// The limit.
    pub(crate) bound: Bound,
    value: Option<f64>,
    digits: usize,
}

impl Goal {
    /// A goal for the figure called `what`, whose value is `None` if it was not measured. Limit and value are shown with so many
    /// digits after the point.
    pub(crate) fn new(
        what: impl Into<String>,
        bound: Bound,
        value: Option<f64>,
        digits: usize,
    ) -> Self {
        Self { what: what.into(), bound, value, digits }
    }

    /// `met`, `missed` or `not measured`.
    pub(crate) fn verdict(&self) -> &'static str {
        match (self.bound, self.value) {
            (_, None) => "not measured",
            (Bound::AtMost(limit), Some(value)) if value <= limit => "met",
            (Bound::AtLeast(limit), Some(value)) if value >= limit => "met",
            (_, Some(_)) => "missed",
        }
    }

    /// The figure.
    pub(crate) fn measured(&self) -> String {
        self.value.map_or("-".into(), |value| format!("{value:.*}", self.digits))
    }
}

/// Goals with their verdicts; `heading` is that of the first column.
pub(crate) fn table(heading: &str, goals: &[Goal]) -> Table {
    let mut table = Table::new(&[heading, "", "goal", "measured", "verdict"]);
    for goal in goals {
        let (side, limit) = match goal.bound {
            Bound::AtMost(limit) => ("at most", limit),
            Bound::AtLeast(limit) => ("at least", limit),
        };
        let limit = format!("{limit:.*}", goal.digits);
        let verdict = goal.verdict().into();
        table.row([goal.what.clone(), side.into(), limit, goal.measured(), verdict]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::Bound::{AtLeast, AtMost};
    use super::*;

    #[test]
    fn verdicts_are_not_rounded() {
        let verdict = |value, bound| Goal::new("", bound, value, 3).verdict();
        assert_eq!(verdict(Some(0.8), AtMost(0.80)), "met");
        assert_eq!(verdict(Some(0.8004), AtMost(0.80)), "missed");
        assert_eq!(verdict(Some(0.7996), AtLeast(0.80)), "missed");
        assert_eq!(verdict(Some(0.8), AtLeast(0.80)), "met");
        assert_eq!(verdict(None, AtMost(0.8)), "not measured");
        assert_eq!(verdict(Some(f64::NAN), AtMost(0.8)), "missed");
        assert_eq!(verdict(Some(f64::NAN), AtLeast(0.8)), "missed");
    }
}
