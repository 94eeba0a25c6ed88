//! `object-del`.

use control::qmp::Returns;
use options::table::{Field, Kind, Need, put};
use serde_json::json;

use super::super::Command;

pub(super) static COMMAND: Command<Arguments> = Command {
    name: "object-del",
    help: "remove an object that is not in use",
    example: r#"{"id": "io0"}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, Arguments { id }| {
        Box::pin(async move {
            daemon.delete_object(&id)?;
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
    help: "the object's name",
}];
