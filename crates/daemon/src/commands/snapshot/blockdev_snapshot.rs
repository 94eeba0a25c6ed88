//! `blockdev-snapshot`.

use control::qmp::Returns;
use options::table::{Field, Kind, Need, put};
use serde_json::json;

use super::super::Command;

pub(in super::super) static COMMAND: Command<Arguments> = Command {
    name: "blockdev-snapshot",
    help: "make a node the backing file of an image that was opened without one, as blockdev-snapshot-sync does",
    example: r#"{"node": "disk0", "overlay": "top"}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, Arguments { node, overlay }| {
        Box::pin(async move {
            daemon.snapshot(&node, &overlay).await?;
            Ok(json!({}))
        })
    },
};

#[derive(Default)]
pub(in super::super) struct Arguments {
    pub(in super::super) node: String,
    pub(in super::super) overlay: String,
}

static ARGUMENTS: &[Field<Arguments>] = &[
    Field {
        name: "node",
        kind: Kind::Text { meta: "<node-name>", set: |to, name| put(&mut to.node, name) },
        need: Need::Required,
        help: "the node that stays as it is from now on",
    },
    Field {
        name: "overlay",
        kind: Kind::Text { meta: "<node-name>", set: |to, name| put(&mut to.overlay, name) },
        need: Need::Required,
        help: "the image that takes what is written; it has no backing image, and no users",
    },
];
