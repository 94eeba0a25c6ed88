//! `query-block-jobs`.

use control::qmp::events::{JOB_STATUS, JOB_TYPE};
use control::qmp::{Member, Reply, Returns};
use serde_json::Value as Json;

use super::super::Command;

pub(super) static COMMAND: Command<(), Json> = Command {
    name: "query-block-jobs",
    help: "list copying jobs",
    example: "",
    arguments: &[],
    returns: Returns::Data("one for each job", Reply::List(&Reply::Object(BLOCK_JOB_INFO))),
    records: false,
    run: |daemon, ()| Box::pin(async { Ok(daemon.jobs.block_info()) }),
};

static BLOCK_JOB_INFO: &[Member] = &[
    Member::new("device", Reply::Text, "the job's name"),
    Member::new("type", JOB_TYPE, "what it does"),
    Member::new("status", JOB_STATUS, "its status"),
    Member::new("len", Reply::Int, "how much work there is, in bytes"),
    Member::new("offset", Reply::Int, "how much of it is done, in bytes"),
    Member::new("speed", Reply::Int, "bytes a second at most; 0: no limit"),
    Member::new(
        "busy",
        Reply::Bool,
        "whether requests are in flight: a paused job finishes those that it has begun",
    ),
    Member::new("paused", Reply::Bool, "it was paused, by a command or by an error"),
    Member::new("ready", Reply::Bool, "a mirror may complete"),
    Member::new("io-status", Reply::Word(&["ok", "failed", "nospace"]), "why it was paused"),
    Member::new("auto-finalize", Reply::Bool, "it does not wait for job-finalize"),
    Member::new("auto-dismiss", Reply::Bool, "it does not wait for job-dismiss"),
    Member::optional(
        "actively-synced",
        Reply::Bool,
        "of a mirror with copy-mode=write-blocking: both sides are equal, and stay so",
    ),
    Member::optional("error", Reply::Text, "why it failed"),
];
