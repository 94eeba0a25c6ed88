//! `job-finalize`.

use control::qmp::Returns;
use serde_json::json;

use super::super::Command;
use super::arguments::JobName;
use crate::jobs::JobVerb;

pub(super) static COMMAND: Command<JobName> = Command {
    name: "job-finalize",
    help: "let a job that was started with auto-finalize=false make its changes",
    example: r#"{"id": "j0"}"#,
    arguments: JobName::ID,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, JobName(id)| {
        Box::pin(async move {
            daemon.tell_job(&id, JobVerb::Finalize).await?;
            Ok(json!({}))
        })
    },
};
