//! `blockdev-snapshot-internal-sync`.

use control::qmp::Returns;
use options::table::{Field, Row, put};

use super::super::Command;

pub(in super::super) static COMMAND: Command<Arguments> = Command {
    name: "blockdev-snapshot-internal-sync",
    help: "keep the present state of a qcow2 image's disk inside the image; requests wait meanwhile",
    example: r#"{"device": "disk0", "name": "before-upgrade"}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: false,
    run: |daemon, Arguments { device, name }| {
        Box::pin(async move { daemon.make_internal_snapshot(&device, &name).await.map(drop) })
    },
};

#[derive(Default)]
pub(in super::super) struct Arguments {
    pub(in super::super) device: String,
    pub(in super::super) name: String,
}

static ARGUMENTS: &[Field<Arguments>] = &[
    Row::required("device", "the node's name")
        .text("<node-name>", |to, name| put(&mut to.device, name)),
    Row::required("name", "the snapshot's name, which no other snapshot of the image has")
        .text("<name>", |to, name| put(&mut to.name, name)),
];
