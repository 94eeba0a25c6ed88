//! `blockdev-snapshot-sync`.

use control::qmp::Returns;
use options::table::{self, Choice, Field, Kind, Need, put};
use serde_json::json;

use super::super::Command;
use crate::snapshot::SnapshotSync;

pub(in super::super) static COMMAND: Command<SnapshotSync> = Command {
    name: "blockdev-snapshot-sync",
    help: "create an overlay of a node; later writes go to the overlay",
    example: r#"{"node-name": "disk0", "snapshot-file": "/srv/top.qcow2", "snapshot-node-name": "top"}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, snapshot| {
        Box::pin(async move {
            daemon.snapshot_sync(snapshot).await?;
            Ok(json!({}))
        })
    },
};

static ARGUMENTS: &[Field<SnapshotSync>] = &[
    // Names a device in QEMU. The daemon has no devices.
    Field::unoffered("device", |to, device, name, at| {
        put(&mut to.device, table::text(device, name, at)?)
    }),
    Field {
        name: "node-name",
        kind: Kind::Text { meta: "<node-name>", set: |to, name| put(&mut to.node_name, name) },
        need: Need::Optional("none, which is an error"),
        help: "the node that stays as it is from now on",
    },
    Field {
        name: "snapshot-file",
        kind: Kind::Path(|to, path| put(&mut to.snapshot_file, path)),
        need: Need::Required,
        help: "the file of the image that takes what is written",
    },
    Field {
        name: "snapshot-node-name",
        kind: Kind::Text {
            meta: "<node-name>",
            set: |to, name| put(&mut to.snapshot_node_name, Some(name)),
        },
        need: Need::Optional("none, which is an error"),
        help: "name of that image's node",
    },
    Field {
        name: "format",
        kind: Kind::Text { meta: "<format>", set: |to, name| put(&mut to.format, Some(name)) },
        need: Need::Optional("qcow2"),
        help: "the image's format: qcow2",
    },
    Field {
        name: "mode",
        kind: Kind::Choice(&[
            Choice {
                name: "absolute-paths",
                help: "the image is made, with the absolute path of the one behind it",
                set: |to| put(&mut to.existing, false),
            },
            Choice {
                name: "existing",
                help: "the image is there, and what it says of what is behind it is not looked at",
                set: |to| put(&mut to.existing, true),
            },
        ]),
        need: Need::Default("absolute-paths"),
        help: "whether the image is made",
    },
];
