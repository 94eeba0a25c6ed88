//! `block-job-cancel`.

use control::qmp::Returns;
use options::table::{Field, Kind, Need, put};
use serde_json::json;

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
        Box::pin(async move {
            daemon.tell_block_job(&device, JobVerb::Cancel { force }).await?;
            Ok(json!({}))
        })
    },
};

#[derive(Default)]
pub(super) struct Arguments {
    device: String,
    force: bool,
}

static ARGUMENTS: &[Field<Arguments>] = &[
    Field {
        name: "device",
        kind: Kind::Text { meta: "<job-id>", set: |to, id| put(&mut to.device, id) },
        need: Need::Required,
        help: "the job's name",
    },
    Field {
        name: "force",
        kind: Kind::Bool(|to, force| put(&mut to.force, force)),
        need: Need::Default("off"),
        help: "also when it is paused, and without the copy of a mirror that is ready",
    },
];
