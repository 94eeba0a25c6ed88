//! Snapshots: an image that takes what is written from now on, above one that stays as it is.

use std::path::PathBuf;

use super::{Arguments, Command, CommandRow, Job, Returns};
use crate::table::{self, Choice, Field, Kind, Need, Table, put};

pub(super) static COMMANDS: &[CommandRow] = &[
    CommandRow {
        name: "blockdev-snapshot-sync",
        help: "create an overlay of a node; later writes go to the overlay",
        example: r#"{"node-name": "disk0", "snapshot-file": "/srv/top.qcow2", "snapshot-node-name": "top"}"#,
        arguments: Arguments::Table(&Table {
            fields: SYNC,
            build: |snapshot: SnapshotSync| {
                Ok(Job::Run(Command::BlockdevSnapshotSync(Box::new(snapshot))))
            },
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "blockdev-snapshot",
        help: "make a node the backing file of an image that was opened without one, as blockdev-snapshot-sync does",
        example: r#"{"node": "disk0", "overlay": "top"}"#,
        arguments: Arguments::Table(&Table {
            fields: SNAPSHOT,
            build: |snapshot: Snapshot| {
                let Snapshot { node, overlay } = snapshot;
                Ok(Job::Run(Command::BlockdevSnapshot { node, overlay }))
            },
        }),
        returns: Returns::Nothing,
    },
];

/// Arguments of `blockdev-snapshot-sync`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SnapshotSync {
    /// `device`: of QEMU's, which there is none of here.
    pub device: String,
    /// `node-name`: the node that stays as it is.
    pub node_name: String,
    /// `snapshot-file`: where the image is made, or is.
    pub snapshot_file: PathBuf,
    /// `snapshot-node-name`: the image's node.
    pub snapshot_node_name: Option<String>,
    /// `format`; `None`: qcow2.
    pub format: Option<String>,
    /// `mode=existing`: the image is there.
    pub existing: bool,
}

static SYNC: &[Field<SnapshotSync>] = &[
    // Names a device in QEMU. There are no devices here.
    Field::unoffered("device", |sync, device, name, at| {
        put(&mut sync.device, table::text(device, name, at)?)
    }),
    Field {
        name: "node-name",
        kind: Kind::Text { meta: "<node-name>", set: |sync, name| put(&mut sync.node_name, name) },
        need: Need::Optional("none, which is an error"),
        help: "the node that stays as it is from now on",
    },
    Field {
        name: "snapshot-file",
        kind: Kind::Path(|sync, path| put(&mut sync.snapshot_file, path)),
        need: Need::Required,
        help: "the file of the image that takes what is written",
    },
    Field {
        name: "snapshot-node-name",
        kind: Kind::Text {
            meta: "<node-name>",
            set: |sync, name| put(&mut sync.snapshot_node_name, Some(name)),
        },
        need: Need::Optional("none, which is an error"),
        help: "name of that image's node",
    },
    Field {
        name: "format",
        kind: Kind::Text { meta: "<format>", set: |sync, name| put(&mut sync.format, Some(name)) },
        need: Need::Optional("qcow2"),
        help: "the image's format: qcow2",
    },
    Field {
        name: "mode",
        kind: Kind::Choice(&[
            Choice {
                name: "absolute-paths",
                help: "the image is made, with the absolute path of the one behind it",
                set: |sync| put(&mut sync.existing, false),
            },
            Choice {
                name: "existing",
                help: "the image is there, and what it says of what is behind it is not looked at",
                set: |sync| put(&mut sync.existing, true),
            },
        ]),
        need: Need::Default("absolute-paths"),
        help: "whether the image is made",
    },
];

#[derive(Default)]
struct Snapshot {
    node: String,
    overlay: String,
}

static SNAPSHOT: &[Field<Snapshot>] = &[
    Field {
        name: "node",
        kind: Kind::Text {
            meta: "<node-name>",
            set: |snapshot, name| put(&mut snapshot.node, name),
        },
        need: Need::Required,
        help: "the node that stays as it is from now on",
    },
    Field {
        name: "overlay",
        kind: Kind::Text {
            meta: "<node-name>",
            set: |snapshot, name| put(&mut snapshot.overlay, name),
        },
        need: Need::Required,
        help: "the image that takes what is written; it has no backing image, and no users",
    },
];
