//! `block-job-set-speed`.

use control::qmp::Returns;
use options::table::{Field, Row, put};

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
        Box::pin(async move { daemon.tell_block_job(&device, JobVerb::SetSpeed(speed)).await })
    },
};

#[derive(Default)]
pub(super) struct Arguments {
    device: String,
    speed: i64,
}

static ARGUMENTS: &[Field<Arguments>] = &[
    Row::required("device", "the job's name").text("<job-id>", |to, id| put(&mut to.device, id)),
    Row::required("speed", "bytes a second; 0: as fast as it goes")
        .int(i64::MIN..=i64::MAX, |to, n| put(&mut to.speed, n)),
];
