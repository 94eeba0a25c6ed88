//! `object-add`.

use control::{Action, object_union, read_object};
use options::shape::Shape;

use super::super::OptionCommand;

pub(super) static COMMAND: OptionCommand = OptionCommand {
    name: "object-add",
    help: "create an object, as --object does",
    example: r#"{"qom-type": "iothread", "id": "io0", "poll-max-ns": 0}"#,
    option: "--object",
    arguments: || Shape::Union(object_union()),
    read: |given, at| Ok(Action::Object(read_object(given, at)?)),
};
