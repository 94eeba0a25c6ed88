//! `block-job-change`.

use control::qmp::{QmpError, Returns};
use options::table::{Choice, Field, Kind, Need, put};
use serde_json::json;

use super::super::Command;

pub(super) static COMMAND: Command<Arguments> = Command {
    name: "block-job-change",
    help: "change options of a job: a mirror can become one with copy-mode=write-blocking",
    example: r#"{"id": "j0", "type": "mirror", "copy-mode": "background"}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: false,
    run: |daemon, Arguments { id, copy_mode, mirror }| {
        Box::pin(async move {
            if mirror && copy_mode.is_none() {
                return Err(QmpError::generic("Parameter 'copy-mode' is missing"));
            }
            if !daemon.jobs.is_copy(&id) {
                return Err(QmpError::block_job_not_found(&id));
            }
            // As in QEMU, the argument `type` may differ from the job's type.
            let Some(turns) = daemon.jobs.turns_of_mirror(&id) else {
                return Err(QmpError::generic("Job type does not support change"));
            };
            match (copy_mode, turns.is_blocking()) {
                (Some(true), false) => turns.set_blocking(),
                (Some(false), true) => {
                    let why = "Change to copy mode 'background' is not implemented";
                    return Err(QmpError::generic(why));
                }
                (Some(_) | None, _) => {}
            }
            Ok(json!({}))
        })
    },
};

#[derive(Default)]
pub(super) struct Arguments {
    id: String,
    mirror: bool,
    /// Whether writes are to wait for the target.
    copy_mode: Option<bool>,
}

static ARGUMENTS: &[Field<Arguments>] = &[
    Field {
        name: "id",
        kind: Kind::Text { meta: "<job-id>", set: |to, id| put(&mut to.id, id) },
        need: Need::Required,
        help: "the job's name",
    },
    Field {
        name: "type",
        kind: Kind::Choice(&[
            Choice { name: "mirror", help: "a mirror", set: |to| put(&mut to.mirror, true) },
            Choice { name: "backup", help: "a backup: nothing can be changed", set: |_| Ok(()) },
            Choice { name: "commit", help: "a commit: nothing can be changed", set: |_| Ok(()) },
            Choice { name: "stream", help: "a stream: nothing can be changed", set: |_| Ok(()) },
            Choice { name: "create", help: "a creation: nothing can be changed", set: |_| Ok(()) },
            Choice {
                name: "amend",
                help: "new passwords: nothing can be changed",
                set: |_| Ok(()),
            },
        ]),
        need: Need::Required,
        help: "the kind of job",
    },
    Field {
        name: "copy-mode",
        kind: Kind::Choice(&[
            Choice {
                name: "background",
                help: "the job copies what was written",
                set: |to| put(&mut to.copy_mode, Some(false)),
            },
            Choice {
                name: "write-blocking",
                help: "a write is answered when the target has it, too",
                set: |to| put(&mut to.copy_mode, Some(true)),
            },
        ]),
        need: Need::Optional("none, which is an error for a mirror"),
        help: "how what is written meanwhile comes to a mirror's target",
    },
];
