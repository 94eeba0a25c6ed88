//! `x-block-export-resume`.

use control::qmp::{QmpError, Returns};
use options::table::{Field, Kind, Need, put};
use serde_json::json;

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
            Ok(json!({}))
        })
    },
};

#[derive(Default)]
pub(super) struct Arguments {
    id: String,
}

static ARGUMENTS: &[Field<Arguments>] = &[Field {
    name: "id",
    kind: Kind::Text { meta: "<id>", set: |to, id| put(&mut to.id, id) },
    need: Need::Required,
    help: "the export's name",
}];
