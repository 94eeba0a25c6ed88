//! `query-jobs`.

use control::qmp::events::{JOB_STATUS, JOB_TYPE};
use control::qmp::{Member, Reply, Returns};
use serde_json::Value as Json;

use super::super::Command;

pub(super) static COMMAND: Command<(), Json> = Command {
    name: "query-jobs",
    help: "list the jobs",
    example: "",
    arguments: &[],
    returns: Returns::Data("one for each job", Reply::List(&Reply::Object(JOB_INFO))),
    records: false,
    run: |daemon, ()| Box::pin(async { Ok(daemon.jobs.info()) }),
};

static JOB_INFO: &[Member] = &[
    Member::new("id", Reply::Text, "the job's name"),
    Member::new("type", JOB_TYPE, "what it does"),
    Member::new("status", JOB_STATUS, "its status"),
    Member::new("current-progress", Reply::Int, "how much of its work is done; bytes, of a copy"),
    Member::new("total-progress", Reply::Int, "how much work there is, as far as is known"),
    Member::optional("error", Reply::Text, "why it failed"),
];
