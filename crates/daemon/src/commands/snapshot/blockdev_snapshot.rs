//! `blockdev-snapshot`.

use control::qmp::Returns;
use options::table::{Field, Row, put};

use super::super::Command;

pub(in super::super) static COMMAND: Command<Arguments> = Command {
    name: "blockdev-snapshot",
    help: "make a node the backing file of an image that was opened without one, as blockdev-snapshot-sync does",
    example: r#"{"node": "disk0", "overlay": "top"}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, Arguments { node, overlay }| {
        Box::pin(async move { Ok(daemon.snapshot(&node, &overlay).await?) })
    },
};

#[derive(Default)]
pub(in super::super) struct Arguments {
    pub(in super::super) node: String,
    pub(in super::super) overlay: String,
}

static ARGUMENTS: &[Field<Arguments>] = &[
    Row::required("node", "the node that stays as it is from now on")
        .text("<node-name>", |to, name| put(&mut to.node, name)),
    Row::required(
        "overlay",
        "the image that takes what is written; it has no backing image, and no users",
    )
    .text("<node-name>", |to, name| put(&mut to.overlay, name)),
];
