//! `block_resize`.

use control::qmp::Returns;
use options::table::{self, Field, Row, put};

use super::super::{Answer, Command};

pub(super) static COMMAND: Command<Arguments, Answer> = Command {
    name: "block_resize",
    help: "change the size of a node's image and notify guests; refused while an NBD export uses the node",
    example: r#"{"node-name": "disk0", "size": 21474836480}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: false,
    run: |daemon, Arguments { device, node_name, size }| {
        Box::pin(
            async move { Ok(daemon.resize(device.as_deref(), node_name.as_deref(), size).await?) },
        )
    },
};

#[derive(Default)]
pub(super) struct Arguments {
    device: Option<String>,
    node_name: Option<String>,
    size: i64,
}

static ARGUMENTS: &[Field<Arguments>] = &[
    // Names a device in QEMU. The daemon has no devices.
    Field::unoffered("device", |to, device, name, at| {
        put(&mut to.device, Some(table::text(device, name, at)?))
    }),
    Row::optional("node-name", "none", "the node's name")
        .text("<node-name>", |to, name| put(&mut to.node_name, Some(name))),
    Row::required("size", "the new size, in bytes")
        .int(i64::MIN..=i64::MAX, |to, size| put(&mut to.size, size)),
];
