//! `block-export-del`.

use control::qmp::Returns;
use options::table::{Choice, Field, Kind, Need, put};

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
    Field {
        name: "id",
        kind: Kind::Text { meta: "<id>", set: |to, id| put(&mut to.id, id) },
        need: Need::Required,
        help: "the export's name",
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
                help: "disconnect its client",
                set: |to| put(&mut to.mode, DeleteMode::Hard),
            },
        ]),
        need: Need::Default("safe"),
        help: "whether its client may be disconnected",
    },
];
