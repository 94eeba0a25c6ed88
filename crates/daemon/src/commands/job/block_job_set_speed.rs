//! `block-job-set-speed`.

use control::qmp::Returns;
use options::table::{Field, Kind, Need, put};
use serde_json::json;

use super::super::Command;
use crate::jobs::JobVerb;

pub(super) static COMMAND: Command<Arguments> = Command {
    name: "block-job-set-speed",
    help: "limit the rate of a job",
    example: r#"{"device": "j0", "speed": 10485760}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, Arguments { device, speed }| {
        Box::pin(async move {
            daemon.tell_block_job(&device, JobVerb::SetSpeed(speed)).await?;
            Ok(json!({}))
        })
    },
};

#[derive(Default)]
pub(super) struct Arguments {
    device: String,
    speed: i64,
}

static ARGUMENTS: &[Field<Arguments>] = &[
    Field {
        name: "device",
        kind: Kind::Text { meta: "<job-id>", set: |to, id| put(&mut to.device, id) },
        need: Need::Required,
        help: "the job's name",
    },
    Field {
        name: "speed",
        kind: Kind::Int { range: i64::MIN..=i64::MAX, set: |to, n| put(&mut to.speed, n) },
        need: Need::Required,
        help: "bytes a second; 0: as fast as it goes",
    },
];
