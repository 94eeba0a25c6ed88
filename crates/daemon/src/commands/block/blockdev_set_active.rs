//! `blockdev-set-active`.

use control::qmp::Returns;
use options::table::{Field, Row, put};

use super::super::{Answer, Command};

pub(super) static COMMAND: Command<Arguments, Answer> = Command {
    name: "blockdev-set-active",
    help: "flush, close and unlock a node's image for another process, or open it again",
    example: r#"{"node-name": "disk0", "active": false}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, Arguments { node_name, active }| {
        Box::pin(async move { Ok(daemon.set_active_for_monitor(node_name, active).await?) })
    },
};

#[derive(Default)]
pub(super) struct Arguments {
    node_name: Option<String>,
    active: bool,
}

static ARGUMENTS: &[Field<Arguments>] = &[
    Row::optional("node-name", "all nodes", "the node's name")
        .text("<node-name>", |to, name| put(&mut to.node_name, Some(name))),
    Row::required("active", "on: open and lock the image; off: flush, close and unlock it")
        .bool(|to, active| put(&mut to.active, active)),
];
