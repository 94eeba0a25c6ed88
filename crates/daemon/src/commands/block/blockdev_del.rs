//! `blockdev-del`.

use control::qmp::Returns;
use options::table::{Field, Row, put};

use super::super::Command;

pub(super) static COMMAND: Command<Arguments> = Command {
    name: "blockdev-del",
    help: "close a block node that is not in use, and the nodes defined inside it",
    example: r#"{"node-name": "disk0"}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, Arguments { node_name }| {
        Box::pin(async move { Ok(daemon.delete_node(&node_name)?) })
    },
};

#[derive(Default)]
pub(super) struct Arguments {
    node_name: String,
}

static ARGUMENTS: &[Field<Arguments>] = &[Row::required("node-name", "the node's name")
    .text("<node-name>", |to, name| put(&mut to.node_name, name))];
