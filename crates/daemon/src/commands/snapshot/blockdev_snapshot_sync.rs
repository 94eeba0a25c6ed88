//! `blockdev-snapshot-sync`.

use control::qmp::Returns;
use options::place::OneOf;
use options::table::{self, Field, Row, put};

use super::super::Command;
use crate::snapshot::SnapshotSync;

pub(in super::super) static COMMAND: Command<SnapshotSync> = Command {
    name: "blockdev-snapshot-sync",
    help: "create an overlay of a node; later writes go to the overlay",
    example: r#"{"node-name": "disk0", "snapshot-file": "/srv/top.qcow2", "snapshot-node-name": "top"}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, snapshot| Box::pin(async move { Ok(daemon.snapshot_sync(snapshot).await?) }),
};

static ARGUMENTS: &[Field<SnapshotSync>] = &[
    // Names a device in QEMU. The daemon has no devices.
    Field::unoffered("device", |to, device, name, at| {
        put(&mut to.device, table::text(device, name, at)?)
    }),
    Row::optional(
        "node-name",
        "none, which is an error",
        "the node that stays as it is from now on",
    )
    .text("<node-name>", |to, name| put(&mut to.node_name, name)),
    Row::required("snapshot-file", "the file of the image that takes what is written")
        .path(|to, path| put(&mut to.snapshot_file, path)),
    Row::optional("snapshot-node-name", "none, which is an error", "name of that image's node")
        .text("<node-name>", |to, name| put(&mut to.snapshot_node_name, Some(name))),
    Row::optional("format", "qcow2", "the image's format: qcow2")
        .text("<format>", |to, name| put(&mut to.format, Some(name))),
    Row::default("mode", "absolute-paths", "whether the image is made").at(&OneOf {
        at: |to: &mut SnapshotSync| &mut to.existing,
        words: &[
            (
                "absolute-paths",
                false,
                "the image is made, with the absolute path of the one behind it",
            ),
            (
                "existing",
                true,
                "the image is there, and what it says of what is behind it is not looked at",
            ),
        ],
    }),
];
