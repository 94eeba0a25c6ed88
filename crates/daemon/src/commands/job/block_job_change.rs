//! `block-job-change`.

use control::qmp::{QmpError, Returns};
use options::place::OneOf;
use options::table::{Choice, Field, Row, put};

use super::super::Command;
use crate::jobs::JobVerb;

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
            if !mirror && copy_mode.is_some() {
                return Err(QmpError::generic("Parameter 'copy-mode' is unexpected"));
            }
            // As in QEMU, the argument `type` may differ from the job's type.
            daemon.tell_block_job(&id, JobVerb::Change { blocking: copy_mode }).await
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
    Row::required("id", "the job's name").text("<job-id>", |to, id| put(&mut to.id, id)),
    Row::required("type", "the kind of job").choice(&[
        Choice::new("mirror", "a mirror", |to| put(&mut to.mirror, true)),
        Choice::new("backup", "a backup: nothing can be changed", |_| Ok(())),
        Choice::new("commit", "a commit: nothing can be changed", |_| Ok(())),
        Choice::new("stream", "a stream: nothing can be changed", |_| Ok(())),
        Choice::new("create", "a creation: nothing can be changed", |_| Ok(())),
        Choice::new("amend", "new passwords: nothing can be changed", |_| Ok(())),
    ]),
    Row::optional(
        "copy-mode",
        "none, which is an error for a mirror",
        "how what is written meanwhile comes to a mirror's target",
    )
    .at(&OneOf {
        at: |to: &mut Arguments| &mut to.copy_mode,
        words: &[
            ("background", false, "the job copies what was written"),
            ("write-blocking", true, "a write is answered when the target has it, too"),
        ],
    }),
];
