//! `blockdev-del`.

use control::qmp::Returns;
use options::table::{Field, Kind, Need, put};
use serde_json::json;

use super::super::Command;

pub(super) static COMMAND: Command<Arguments> = Command {
    name: "blockdev-del",
    help: "close a block node that is not in use, and the nodes defined inside it",
    example: r#"{"node-name": "disk0"}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, Arguments { node_name }| {
        Box::pin(async move {
            daemon.delete_node(&node_name)?;
            Ok(json!({}))
        })
    },
};

#[derive(Default)]
pub(super) struct Arguments {
    node_name: String,
}

static ARGUMENTS: &[Field<Arguments>] = &[Field {
    name: "node-name",
    kind: Kind::Text { meta: "<node-name>", set: |to, name| put(&mut to.node_name, name) },
    need: Need::Required,
    help: "the node's name",
}];
