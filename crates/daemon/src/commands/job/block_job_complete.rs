//! `block-job-complete`.

use control::qmp::Returns;
use serde_json::json;

use super::super::Command;
use super::arguments::JobName;
use crate::jobs::JobVerb;

pub(super) static COMMAND: Command<JobName> = Command {
    name: "block-job-complete",
    help: "as job-complete",
    example: r#"{"device": "j0"}"#,
    arguments: JobName::DEVICE,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, JobName(id)| {
        Box::pin(async move {
            daemon.tell_block_job(&id, JobVerb::Complete).await?;
            Ok(json!({}))
        })
    },
};
