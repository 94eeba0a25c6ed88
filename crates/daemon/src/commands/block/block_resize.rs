//! `block_resize`.

use control::qmp::Returns;
use options::table::{self, Field, Kind, Need, put};
use serde_json::json;

use super::super::Command;

pub(super) static COMMAND: Command<Arguments> = Command {
    name: "block_resize",
    help: "change the size of a node's image and notify guests; refused while an NBD export uses the node",
    example: r#"{"node-name": "disk0", "size": 21474836480}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: false,
    run: |daemon, Arguments { device, node_name, size }| {
        Box::pin(async move {
            daemon.resize(device.as_deref(), node_name.as_deref(), size).await?;
            Ok(json!({}))
        })
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
    Field {
        name: "node-name",
        kind: Kind::Text {
            meta: "<node-name>",
            set: |to, name| put(&mut to.node_name, Some(name)),
        },
        need: Need::Optional("none"),
        help: "the node's name",
    },
    Field {
        name: "size",
        kind: Kind::Int { range: i64::MIN..=i64::MAX, set: |to, size| put(&mut to.size, size) },
        need: Need::Required,
        help: "the new size, in bytes",
    },
];
