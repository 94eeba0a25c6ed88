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
    /// For the terminal.
    pub(crate) fn text(&self) -> String {
        let mut text = format!("{}\n", self.heading);
        for paragraph in &self.method {
            text += &format!("{paragraph}\n");
        }
        for table in self.all_tables() {
            text += &format!("\n{}", table.text());
        }
        text
    }

    /// To record.
    pub(crate) fn section(&self) -> Section {
        let (heading, text) = (self.heading.clone(), self.method.clone());
        Section { heading, text, tables: self.all_tables().collect() }
    }

    fn all_tables(&self) -> impl Iterator<Item = Table> {
        let goals = goal::table("to reach", &self.goals);
        self.tables.iter().cloned().chain((!goals.body.is_empty()).then_some(goals))
    }
}
