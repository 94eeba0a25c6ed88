//! `nbd-server-remove`.

use control::qmp::{QmpError, Returns};
use options::table::{Choice, Field, Kind, Need, put};

use super::super::export::{DeleteMode, when_ended};
use super::super::{Answer, Command};

pub(super) static COMMAND: Command<Arguments, Answer> = Command {
    name: "nbd-server-remove",
    help: "end an export over NBD, as block-export-del does",
    example: r#"{"name": "disk0"}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, Arguments { name, mode }| {
        Box::pin(async move {
            if daemon.inventory.is_nbd_export(&name) == Some(false) {
                let desc = format!("Block export '{name}' is not an NBD export");
                return Err(QmpError::generic(desc));
            }
            let end = daemon.delete_export(&name, mode).await?;
            Ok(when_ended(daemon, vec![end]))
        })
    },
};

#[derive(Default)]
pub(super) struct Arguments {
    name: String,
    mode: DeleteMode,
}

static ARGUMENTS: &[Field<Arguments>] = &[
    Field {
        name: "name",
        kind: Kind::Text { meta: "<name>", set: |to, name| put(&mut to.name, name) },
        need: Need::Required,
        help: "the export's id",
    },
    Field {
        name: "mode",
        kind: Kind::Choice(&[
            Choice {
                name: "safe",
                help: "fail when a client uses it",
                set: |to| put(&mut to.mode, DeleteMode::Safe),
            },
            Choice {
                name: "hard",
                help: "disconnect its clients",
                set: |to| put(&mut to.mode, DeleteMode::Hard),
            },
        ]),
        need: Need::Default("safe"),
        help: "whether its clients may be disconnected",
    },
];
