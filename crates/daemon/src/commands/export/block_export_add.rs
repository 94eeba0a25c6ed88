//! `block-export-add`.

use control::{Action, export_union, read_export};
use options::shape::Shape;

use super::super::OptionCommand;

pub(super) static COMMAND: OptionCommand = OptionCommand {
    name: "block-export-add",
    help: "export a block node, as --export does",
    example: r#"{"type": "nbd", "id": "e0", "node-name": "disk0", "writable": true}"#,
    option: "--export",
    arguments: || Shape::Union(export_union()),
    read: |given, at| Ok(Action::Export(read_export(given, at)?)),
};
