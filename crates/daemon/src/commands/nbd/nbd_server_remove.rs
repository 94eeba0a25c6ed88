//! `nbd-server-remove`.

use control::qmp::{QmpError, Returns};
use options::place::OneOf;
use options::table::{Field, Row, put};

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
    Row::required("name", "the export's id").text("<name>", |to, name| put(&mut to.name, name)),
    Row::default("mode", "safe", "whether its clients may be disconnected").at(&OneOf {
        at: |to: &mut Arguments| &mut to.mode,
        words: &[
            ("safe", DeleteMode::Safe, "fail when a client uses it"),
            ("hard", DeleteMode::Hard, "disconnect its clients"),
        ],
    }),
];
