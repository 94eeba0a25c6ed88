//! `nbd-server-add`.

use control::qmp::Returns;
use control::{Action, Step};
use options::table::{Field, Kind, Need, put};
use serde_json::json;

use super::super::Command;
use crate::DaemonError;

pub(super) static COMMAND: Command<Arguments> = Command {
    name: "nbd-server-add",
    help: "export a block node over NBD, under a name that is the export's id; block-export-add takes more options",
    example: r#"{"device": "disk0", "writable": true}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, Arguments { device, name, description, writable, bitmap }| {
        Box::pin(async move {
            let name = name.unwrap_or_else(|| device.clone());
            let bitmap_name = bitmap.as_deref();
            let export =
                daemon.inventory.nbd_export(&device, &name, &description, bitmap_name, writable);
            let export = export.map_err(DaemonError::from)?;
            let options = json!({
                "type": "nbd", "id": export.id, "node-name": device, "name": name,
                "description": description, "writable": export.writable,
                "bitmaps": bitmap.into_iter().collect::<Vec<_>>(),
            });
            let origin = format!("--export {options}");
            daemon.add(&Step { origin, action: Action::Export(export) }).await?;
            Ok(json!({}))
        })
    },
};

#[derive(Default)]
pub(super) struct Arguments {
    device: String,
    name: Option<String>,
    description: String,
    writable: bool,
    bitmap: Option<String>,
}

static ARGUMENTS: &[Field<Arguments>] = &[
    Field {
        name: "device",
        kind: Kind::Text { meta: "<node-name>", set: |to, node| put(&mut to.device, node) },
        need: Need::Required,
        help: "the block node",
    },
    Field {
        name: "name",
        kind: Kind::Text { meta: "<name>", set: |to, name| put(&mut to.name, Some(name)) },
        need: Need::Optional("the node's name"),
        help: "the export's name for clients, and its id",
    },
    Field {
        name: "description",
        kind: Kind::Text { meta: "<text>", set: |to, text| put(&mut to.description, text) },
        need: Need::Optional("none"),
        help: "text for people, shown with the export's name",
    },
    Field {
        name: "writable",
        kind: Kind::Bool(|to, on| put(&mut to.writable, on)),
        need: Need::Default("off"),
        help: "whether clients may write, if the node can be written to",
    },
    Field {
        name: "bitmap",
        kind: Kind::Text { meta: "<name>", set: |to, name| put(&mut to.bitmap, Some(name)) },
        need: Need::Optional("none"),
        help: "a dirty bitmap that clients can ask for",
    },
];
