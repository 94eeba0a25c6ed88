//! `block-job-cancel`.

use control::qmp::Returns;
use options::table::{Field, Row, put};

use super::super::Command;
use crate::jobs::JobVerb;

pub(super) static COMMAND: Command<Arguments> = Command {
    name: "block-job-cancel",
    help: "cancel a job; a mirror that is ready ends with a complete copy",
    example: r#"{"device": "j0", "force": true}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, Arguments { device, force }| {
        Box::pin(async move { daemon.tell_block_job(&device, JobVerb::Cancel { force }).await })
    },
};

#[derive(Default)]
pub(super) struct Arguments {
    device: String,
    force: bool,
}

static ARGUMENTS: &[Field<Arguments>] = &[
    Row::required("device", "the job's name").text("<job-id>", |to, id| put(&mut to.device, id)),
    Row::default(
        "force",
        "off",
        "also when it is paused, and without the copy of a mirror that is ready",
    )
    .bool(|to, force| put(&mut to.force, force)),
];
