//! What one result has shown.

use crate::goal::{self, Goal};
use crate::report::{Section, Table};

/// The figures of one of the four results, beside what was published.
#[derive(Debug, Default)]
pub(crate) struct Finding {
    /// Its name and what it says.
    pub(crate) heading: String,
    /// How it was measured; a paragraph each.
    pub(crate) method: Vec<String>,
    /// The figures.
    pub(crate) tables: Vec<Table>,
    /// What was to be reached.
    pub(crate) goals: Vec<Goal>,
}

impl Finding {
    /// The report.
    pub(crate) fn section(self) -> Section {
        let goals = goal::table("to reach", &self.goals);
        let mut tables = self.tables;
        tables.extend((!goals.body.is_empty()).then_some(goals));
        Section { heading: self.heading, text: self.method, tables }
    }
}
