//! `block-job-pause`.

use control::qmp::Returns;
use serde_json::json;

use super::super::Command;
use super::arguments::JobName;
use crate::jobs::JobVerb;

pub(super) static COMMAND: Command<JobName> = Command {
    name: "block-job-pause",
    help: "as job-pause",
    example: r#"{"device": "j0"}"#,
    arguments: JobName::DEVICE,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, JobName(id)| {
        Box::pin(async move {
            daemon.tell_block_job(&id, JobVerb::Pause).await?;
            Ok(json!({}))
        })
    },
};
