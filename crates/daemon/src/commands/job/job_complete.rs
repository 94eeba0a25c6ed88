//! `job-complete`.

use control::qmp::Returns;
use serde_json::json;

use super::super::Command;
use super::arguments::JobName;
use crate::jobs::JobVerb;

pub(super) static COMMAND: Command<JobName> = Command {
    name: "job-complete",
    help: "end a mirror that is ready; its target replaces the source",
    example: r#"{"id": "j0"}"#,
    arguments: JobName::ID,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, JobName(id)| {
        Box::pin(async move {
            daemon.tell_job(&id, JobVerb::Complete).await?;
            Ok(json!({}))
        })
    },
};
