//! `object-del`.

use control::qmp::Returns;
use options::table::{Field, Row, put};

use super::super::Command;

pub(super) static COMMAND: Command<Arguments> = Command {
    name: "object-del",
    help: "remove an object that is not in use",
    example: r#"{"id": "io0"}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, Arguments { id }| Box::pin(async move { Ok(daemon.delete_object(&id)?) }),
};

#[derive(Default)]
pub(super) struct Arguments {
    id: String,
}

static ARGUMENTS: &[Field<Arguments>] =
    &[Row::required("id", "the object's name").text("<id>", |to, id| put(&mut to.id, id))];
