//! `block-export-del`.

use control::qmp::Returns;
use options::place::OneOf;
use options::table::{Field, Row, put};

use super::super::{Answer, Command};
use super::{DeleteMode, when_ended};

pub(super) static COMMAND: Command<Arguments, Answer> = Command {
    name: "block-export-del",
    help: "end an export; the event BLOCK_EXPORT_DELETED follows when it has ended",
    example: r#"{"id": "e0", "mode": "hard"}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, Arguments { id, mode }| {
        Box::pin(async move {
            let end = daemon.delete_export(&id, mode).await?;
            Ok(when_ended(daemon, vec![end]))
        })
    },
};

#[derive(Default)]
pub(super) struct Arguments {
    id: String,
    mode: DeleteMode,
}

static ARGUMENTS: &[Field<Arguments>] = &[
    Row::required("id", "the export's name").text("<id>", |to, id| put(&mut to.id, id)),
    Row::default("mode", "safe", "whether its client may be disconnected").at(&OneOf {
        at: |to: &mut Arguments| &mut to.mode,
        words: &[
            ("safe", DeleteMode::Safe, "fail when a client uses it"),
            ("hard", DeleteMode::Hard, "disconnect its client"),
        ],
    }),
];
