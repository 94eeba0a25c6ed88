//! `blockdev-set-active`.

use control::qmp::Returns;
use options::table::{Field, Kind, Need, put};
use serde_json::json;

use super::super::Command;

pub(super) static COMMAND: Command<Arguments> = Command {
    name: "blockdev-set-active",
    help: "flush, close and unlock a node's image for another process, or open it again",
    example: r#"{"node-name": "disk0", "active": false}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, Arguments { node_name, active }| {
        Box::pin(async move {
            daemon.set_active(node_name.as_deref(), active).await?;
            Ok(json!({}))
        })
    },
};

#[derive(Default)]
pub(super) struct Arguments {
    node_name: Option<String>,
    active: bool,
}

static ARGUMENTS: &[Field<Arguments>] = &[
    Field {
        name: "node-name",
        kind: Kind::Text {
            meta: "<node-name>",
            set: |to, name| put(&mut to.node_name, Some(name)),
        },
        need: Need::Optional("all nodes"),
        help: "the node's name",
    },
    Field {
        name: "active",
        kind: Kind::Bool(|to, active| put(&mut to.active, active)),
        need: Need::Required,
        help: "on: open and lock the image; off: flush, close and unlock it",
    },
];
