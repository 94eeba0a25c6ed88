//! `blockdev-snapshot-delete-internal-sync`.

use control::qmp::{Member, Reply, Returns};
use options::table::{Field, Row, put};
use serde_json::Value as Json;

use super::super::Command;
use crate::internal_snapshots;

pub(in super::super) static COMMAND: Command<Arguments, Json> = Command {
    name: "blockdev-snapshot-delete-internal-sync",
    help: "delete a snapshot inside a qcow2 image; requests wait meanwhile",
    example: r#"{"device": "disk0", "name": "before-upgrade"}"#,
    arguments: ARGUMENTS,
    returns: Returns::Data("what it was", Reply::Object(SNAPSHOT)),
    records: false,
    run: |daemon, Arguments { device, id, name }| {
        Box::pin(async move {
            let deleted =
                daemon.delete_internal_snapshot(&device, id.as_deref(), name.as_deref()).await?;
            Ok(internal_snapshots::info(&deleted))
        })
    },
};

/// QEMU's `SnapshotInfo`.
pub(in super::super) static SNAPSHOT: &[Member] = &[
    Member::new("id", Reply::Text, "its id, which the image gives"),
    Member::new("name", Reply::Text, "its name"),
    Member::new("vm-state-size", Reply::Int, "bytes of the state of a virtual machine"),
    Member::new("date-sec", Reply::Int, "when it was made: seconds since the beginning of 1970"),
    Member::new("date-nsec", Reply::Int, "and nanoseconds"),
    Member::new("vm-clock-sec", Reply::Int, "the virtual machine's clock; of a daemon, the date"),
    Member::new("vm-clock-nsec", Reply::Int, "and nanoseconds"),
    Member::optional("icount", Reply::Int, "instructions that a virtual machine had executed"),
];

#[derive(Default)]
pub(in super::super) struct Arguments {
    device: String,
    id: Option<String>,
    name: Option<String>,
}

static ARGUMENTS: &[Field<Arguments>] = &[
    Row::required("device", "the node's name")
        .text("<node-name>", |to, name| put(&mut to.device, name)),
    Row::optional("id", "of any id", "the snapshot's id")
        .text("<id>", |to, id| put(&mut to.id, Some(id))),
    Row::optional("name", "of any name", "the snapshot's name; id or name is needed")
        .text("<name>", |to, name| put(&mut to.name, Some(name))),
];
