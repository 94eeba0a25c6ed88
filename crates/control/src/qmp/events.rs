//! The events there are: one row each, from which they are told and described.

use super::reply::{Member, Reply};
use crate::shape::Shape;

/// An event: a row of the table.
#[derive(Debug)]
pub struct EventRow {
    /// Its name.
    pub name: &'static str,
    /// When it is told, in one sentence.
    pub(crate) help: &'static str,
    /// What it says.
    pub(crate) data: &'static [Member],
    /// What it can say, as JSON.
    pub(crate) example: &'static str,
}

/// All events.
pub(crate) static EVENTS: &[&EventRow] = &[&BLOCK_EXPORT_DELETED];

/// An export has ended, whatever ended it.
pub static BLOCK_EXPORT_DELETED: EventRow = EventRow {
    name: "BLOCK_EXPORT_DELETED",
    help: "an export has ended, and what it used may go",
    data: &[Member::new("id", Reply::Text, "the export's name")],
    example: r#"{"id": "e0"}"#,
};

impl EventRow {
    /// What it says, as a type.
    pub(crate) fn shape(&self) -> Shape {
        Shape::Object(self.data.iter().map(Member::shape).collect())
    }
}

impl PartialEq for EventRow {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}
