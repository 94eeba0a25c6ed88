//! `x-block-export-resume`.

use control::qmp::{QmpError, Returns};
use options::table::{Field, Row, put};

use super::super::Command;

pub(super) static COMMAND: Command<Arguments> = Command {
    name: "x-block-export-resume",
    help: "resume an export that an error has stopped; its held requests are repeated in order",
    example: r#"{"id": "e0"}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: false,
    run: |daemon, Arguments { id }| {
        Box::pin(async move {
            let resumed = daemon.exports.resume_after_error(&id, daemon.control.now_ns());
            resumed.ok_or_else(|| QmpError::generic(format!("Export '{id}' is not found")))?;
            Ok(())
        })
    },
};

#[derive(Default)]
pub(super) struct Arguments {
    id: String,
}

static ARGUMENTS: &[Field<Arguments>] =
    &[Row::required("id", "the export's name").text("<id>", |to, id| put(&mut to.id, id))];
