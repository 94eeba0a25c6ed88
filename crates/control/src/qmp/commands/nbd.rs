//! The NBD server, and exports on it by one name.

use super::{Arguments, Command, CommandRow, DeleteMode, Job, Returns};
use crate::nbd_server;
use crate::table::{Choice, Field, Kind, Need, Table, put};

pub(super) static COMMANDS: &[CommandRow] = &[
    CommandRow {
        name: "nbd-server-start",
        help: "start the NBD server, as --nbd-server does",
        example: r#"{"addr": {"type": "unix", "data": {"path": "nbd.sock"}}}"#,
        arguments: Arguments::Table(&Table {
            fields: nbd_server::LEGACY,
            build: |server| Ok(Job::Run(Command::Add(Box::new(server.into())))),
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "nbd-server-stop",
        help: "stop the NBD server, and end all exports on it",
        example: "",
        arguments: Arguments::None(|| Job::Run(Command::NbdServerStop)),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "nbd-server-add",
        help: "export a block node over NBD, under a name that is the export's id; block-export-add takes more options",
        example: r#"{"device": "disk0", "writable": true}"#,
        arguments: Arguments::Table(&Table {
            fields: ADD,
            build: |Add { device, name, description, writable, bitmap }| {
                let name = name.unwrap_or_else(|| device.clone());
                let add = Command::NbdServerAdd { device, name, description, writable, bitmap };
                Ok(Job::Run(add))
            },
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "nbd-server-remove",
        help: "end an export over NBD, as block-export-del does",
        example: r#"{"name": "disk0"}"#,
        arguments: Arguments::Table(&Table {
            fields: REMOVE,
            build: |Remove { name, mode }| Ok(Job::Run(Command::NbdServerRemove { name, mode })),
        }),
        returns: Returns::Nothing,
    },
];

#[derive(Default)]
struct Add {
    device: String,
    name: Option<String>,
    description: String,
    writable: bool,
    bitmap: Option<String>,
}

static ADD: &[Field<Add>] = &[
    Field {
        name: "device",
        kind: Kind::Text { meta: "<node-name>", set: |add, node| put(&mut add.device, node) },
        need: Need::Required,
        help: "the block node",
    },
    Field {
        name: "name",
        kind: Kind::Text { meta: "<name>", set: |add, name| put(&mut add.name, Some(name)) },
        need: Need::Optional("the node's name"),
        help: "what clients call the export, and its id",
    },
    Field {
        name: "description",
        kind: Kind::Text { meta: "<text>", set: |add, text| put(&mut add.description, text) },
        need: Need::Optional("none"),
        help: "text for people, shown with the export's name",
    },
    Field {
        name: "writable",
        kind: Kind::Bool(|add, on| put(&mut add.writable, on)),
        need: Need::Default("off"),
        help: "whether clients may write, if the node can be written to",
    },
    Field {
        name: "bitmap",
        kind: Kind::Text { meta: "<name>", set: |add, name| put(&mut add.bitmap, Some(name)) },
        need: Need::Optional("none"),
        help: "a dirty bitmap that clients can ask for",
    },
];

#[derive(Default)]
struct Remove {
    name: String,
    mode: DeleteMode,
}

static REMOVE: &[Field<Remove>] = &[
    Field {
        name: "name",
        kind: Kind::Text { meta: "<name>", set: |remove, name| put(&mut remove.name, name) },
        need: Need::Required,
        help: "the export's id",
    },
    Field {
        name: "mode",
        kind: Kind::Choice(&[
            Choice {
                name: "safe",
                help: "fail when a client uses it",
                set: |remove| put(&mut remove.mode, DeleteMode::Safe),
            },
            Choice {
                name: "hard",
                help: "send its clients away",
                set: |remove| put(&mut remove.mode, DeleteMode::Hard),
            },
        ]),
        need: Need::Default("safe"),
        help: "whether its clients may be sent away",
    },
];
