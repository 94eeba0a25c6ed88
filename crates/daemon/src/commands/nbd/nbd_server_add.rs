//! `nbd-server-add`.

use control::qmp::Returns;
use control::{Action, Step};
use options::table::{Field, Row, put};
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
            Ok(daemon.add(&Step { origin, action: Action::Export(export) }).await?)
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
    Row::required("device", "the block node")
        .text("<node-name>", |to, node| put(&mut to.device, node)),
    Row::optional("name", "the node's name", "the export's name for clients, and its id")
        .text("<name>", |to, name| put(&mut to.name, Some(name))),
    Row::optional("description", "none", "text for people, shown with the export's name")
        .text("<text>", |to, text| put(&mut to.description, text)),
    Row::default("writable", "off", "whether clients may write, if the node can be written to")
        .bool(|to, on| put(&mut to.writable, on)),
    Row::optional("bitmap", "none", "a dirty bitmap that clients can ask for")
        .text("<name>", |to, name| put(&mut to.bitmap, Some(name))),
];
