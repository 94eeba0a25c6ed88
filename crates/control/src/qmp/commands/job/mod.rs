//! Jobs: what takes its time, and is watched and steered meanwhile.

mod copy;
mod create;

use super::{Arguments, Command, CommandRow, Job, Member, Reply, Returns};
use crate::error::OptionError;
use crate::job::{JobCommand, JobVerb};
use crate::qmp::events::{JOB_STATUS, JOB_TYPE};
use crate::table::{Field, Kind, Need, Table, put};

fn run(command: JobCommand) -> Result<Job, OptionError> {
    Ok(Job::Run(Command::Job(Box::new(command))))
}

pub(super) static COMMANDS: &[CommandRow] = &[
    CommandRow {
        name: "blockdev-create",
        help: "create an image, in a job",
        example: r#"{"job-id": "j0", "options": {"driver": "file", "filename": "/srv/new.img", "size": 1048576}}"#,
        arguments: Arguments::Table(create::BLOCKDEV_CREATE),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "blockdev-backup",
        help: "copy the present contents of a node to another node",
        example: r#"{"job-id": "j0", "device": "disk0", "target": "disk1", "sync": "full"}"#,
        arguments: Arguments::Table(copy::BLOCKDEV_BACKUP),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "blockdev-mirror",
        help: "copy a node to another and keep both equal, until the copy replaces the node",
        example: r#"{"job-id": "j0", "device": "disk0", "target": "disk1", "sync": "full"}"#,
        arguments: Arguments::Table(copy::BLOCKDEV_MIRROR),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "query-jobs",
        help: "list the jobs",
        example: "",
        arguments: Arguments::None(|| Job::Run(Command::Job(Box::new(JobCommand::Query)))),
        returns: Returns::Data("one for each job", Reply::List(&Reply::Object(JOB_INFO))),
    },
    CommandRow {
        name: "query-block-jobs",
        help: "list copying jobs",
        example: "",
        arguments: Arguments::None(|| Job::Run(Command::Job(Box::new(JobCommand::QueryBlock)))),
        returns: Returns::Data("one for each job", Reply::List(&Reply::Object(BLOCK_JOB_INFO))),
    },
    CommandRow {
        name: "job-cancel",
        help: "cancel a job",
        example: r#"{"id": "j0"}"#,
        arguments: Arguments::Table(&Table {
            fields: ID,
            build: |id: String| run(JobCommand::Tell(id, JobVerb::Cancel { force: true })),
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "job-pause",
        help: "pause a job",
        example: r#"{"id": "j0"}"#,
        arguments: Arguments::Table(&Table {
            fields: ID,
            build: |id: String| run(JobCommand::Tell(id, JobVerb::Pause)),
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "job-resume",
        help: "resume a paused job",
        example: r#"{"id": "j0"}"#,
        arguments: Arguments::Table(&Table {
            fields: ID,
            build: |id: String| run(JobCommand::Tell(id, JobVerb::Resume)),
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "job-complete",
        help: "end a mirror that is ready; its target replaces the source",
        example: r#"{"id": "j0"}"#,
        arguments: Arguments::Table(&Table {
            fields: ID,
            build: |id: String| run(JobCommand::Tell(id, JobVerb::Complete)),
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "job-finalize",
        help: "let a job that was started with auto-finalize=false make its changes",
        example: r#"{"id": "j0"}"#,
        arguments: Arguments::Table(&Table {
            fields: ID,
            build: |id: String| run(JobCommand::Tell(id, JobVerb::Finalize)),
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "job-dismiss",
        help: "remove a job that has ended from the list",
        example: r#"{"id": "j0"}"#,
        arguments: Arguments::Table(&Table {
            fields: ID,
            build: |id: String| run(JobCommand::Tell(id, JobVerb::Dismiss)),
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "block-job-cancel",
        help: "cancel a job; a mirror that is ready ends with a complete copy",
        example: r#"{"device": "j0", "force": true}"#,
        arguments: Arguments::Table(&Table {
            fields: CANCEL,
            build: |cancel: Tell| {
                let verb = JobVerb::Cancel { force: cancel.force };
                run(JobCommand::TellBlock(cancel.device, verb))
            },
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "block-job-pause",
        help: "as job-pause",
        example: r#"{"device": "j0"}"#,
        arguments: Arguments::Table(&Table {
            fields: DEVICE,
            build: |tell: Tell| run(JobCommand::TellBlock(tell.device, JobVerb::Pause)),
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "block-job-resume",
        help: "as job-resume",
        example: r#"{"device": "j0"}"#,
        arguments: Arguments::Table(&Table {
            fields: DEVICE,
            build: |tell: Tell| run(JobCommand::TellBlock(tell.device, JobVerb::Resume)),
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "block-job-complete",
        help: "as job-complete",
        example: r#"{"device": "j0"}"#,
        arguments: Arguments::Table(&Table {
            fields: DEVICE,
            build: |tell: Tell| run(JobCommand::TellBlock(tell.device, JobVerb::Complete)),
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "block-job-finalize",
        help: "as job-finalize",
        example: r#"{"id": "j0"}"#,
        arguments: Arguments::Table(&Table {
            fields: ID,
            build: |id: String| run(JobCommand::TellBlock(id, JobVerb::Finalize)),
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "block-job-dismiss",
        help: "as job-dismiss",
        example: r#"{"id": "j0"}"#,
        arguments: Arguments::Table(&Table {
            fields: ID,
            build: |id: String| run(JobCommand::TellBlock(id, JobVerb::Dismiss)),
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "block-job-set-speed",
        help: "limit the rate of a job",
        example: r#"{"device": "j0", "speed": 10485760}"#,
        arguments: Arguments::Table(&Table {
            fields: SET_SPEED,
            build: |tell: Tell| {
                run(JobCommand::TellBlock(tell.device, JobVerb::SetSpeed(tell.speed)))
            },
        }),
        returns: Returns::Nothing,
    },
];

static ID: &[Field<String>] = &[Field {
    name: "id",
    kind: Kind::Text { meta: "<job-id>", set: put },
    need: Need::Required,
    help: "the job's name",
}];

#[derive(Default)]
struct Tell {
    device: String,
    force: bool,
    speed: i64,
}

const TELL_DEVICE: Field<Tell> = Field {
    name: "device",
    kind: Kind::Text { meta: "<job-id>", set: |tell, id| put(&mut tell.device, id) },
    need: Need::Required,
    help: "the job's name",
};

static DEVICE: &[Field<Tell>] = &[TELL_DEVICE];

static CANCEL: &[Field<Tell>] = &[
    TELL_DEVICE,
    Field {
        name: "force",
        kind: Kind::Bool(|tell, force| put(&mut tell.force, force)),
        need: Need::Default("off"),
        help: "also when it is paused, and without the copy of a mirror that is ready",
    },
];

static SET_SPEED: &[Field<Tell>] = &[
    TELL_DEVICE,
    Field {
        name: "speed",
        kind: Kind::Int { range: i64::MIN..=i64::MAX, set: |tell, n| put(&mut tell.speed, n) },
        need: Need::Required,
        help: "bytes a second; 0: as fast as it goes",
    },
];

static JOB_INFO: &[Member] = &[
    Member::new("id", Reply::Text, "the job's name"),
    Member::new("type", JOB_TYPE, "what it does"),
    Member::new("status", JOB_STATUS, "its status"),
    Member::new("current-progress", Reply::Int, "how much of its work is done; bytes, of a copy"),
    Member::new("total-progress", Reply::Int, "how much work there is, as far as is known"),
    Member::optional("error", Reply::Text, "why it failed"),
];

static BLOCK_JOB_INFO: &[Member] = &[
    Member::new("device", Reply::Text, "the job's name"),
    Member::new("type", JOB_TYPE, "what it does"),
    Member::new("status", JOB_STATUS, "its status"),
    Member::new("len", Reply::Int, "how much work there is, in bytes"),
    Member::new("offset", Reply::Int, "how much of it is done, in bytes"),
    Member::new("speed", Reply::Int, "bytes a second at most; 0: no limit"),
    Member::new("busy", Reply::Bool, "always false"),
    Member::new("paused", Reply::Bool, "it was paused, by a command or by an error"),
    Member::new("ready", Reply::Bool, "a mirror may complete"),
    Member::new("io-status", Reply::Word(&["ok", "failed", "nospace"]), "why it was paused"),
    Member::new("auto-finalize", Reply::Bool, "it does not wait for job-finalize"),
    Member::new("auto-dismiss", Reply::Bool, "it does not wait for job-dismiss"),
    Member::optional("actively-synced", Reply::Bool, "of a mirror; always false"),
    Member::optional("error", Reply::Text, "why it failed"),
];
