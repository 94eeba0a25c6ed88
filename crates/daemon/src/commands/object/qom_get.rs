//! `qom-get`.

use control::qmp::{Reply, Returns};
use serde_json::Value as Json;

use super::super::Command;
use super::qom::{PATH, PROPERTY, Place, QomArguments};

pub(super) static COMMAND: Command<QomArguments, Json> = Command {
    name: "qom-get",
    help: "return a property of an object",
    example: r#"{"path": "/objects/io0", "property": "poll-max-ns"}"#,
    arguments: &[PATH, PROPERTY],
    returns: Returns::Data("the property's value, of the property's type", Reply::Any),
    records: false,
    run: |daemon, QomArguments { path, property, .. }| {
        Box::pin(async move { Place::find(daemon, &path)?.get(daemon, &property) })
    },
};
