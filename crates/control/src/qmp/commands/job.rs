//! Jobs: what takes its time, and is watched and steered meanwhile.

use std::path::PathBuf;

use super::{Arguments, Command, CommandRow, Job, Member, Reply, Returns};
use crate::error::OptionError;
use crate::job::{
    BackupOptions, CopyOptions, CreateOptions, JobCommand, JobOptions, JobVerb, MirrorOptions,
    OnCbwError, OnError, Preallocation, Sync,
};
use crate::qmp::events::{JOB_STATUS, JOB_TYPE};
use crate::shape::{Shape, Union, Variant};
use crate::table::{self, Choice, Context, Field, Kind, Need, Reads, Table, put};
use crate::value::Value;

/// `granularity` when none is given, as QEMU chooses it for a file.
const GRANULARITY: u64 = 64 << 10;
/// `buf-size` when none is given.
const BUF_SIZE: u64 = 16 << 20;

fn run(command: JobCommand) -> Result<Job, OptionError> {
    Ok(Job::Run(Command::Job(Box::new(command))))
}

pub(super) static COMMANDS: &[CommandRow] = &[
    CommandRow {
        name: "blockdev-create",
        help: "make an image, in a job",
        example: r#"{"job-id": "j0", "options": {"driver": "file", "filename": "/srv/new.img", "size": 1048576}}"#,
        arguments: Arguments::Table(&Table {
            fields: CREATE,
            build: |create: Create| {
                let job =
                    JobOptions { auto_dismiss: false, id: create.id, ..JobOptions::default() };
                let options = create.options.ok_or_else(|| table::missing("options"))?;
                run(JobCommand::Create(job, options))
            },
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "blockdev-backup",
        help: "copy a node to another one, as it is now, while it is in use",
        example: r#"{"job-id": "j0", "device": "disk0", "target": "disk1", "sync": "full"}"#,
        arguments: Arguments::Table(&Table {
            fields: BACKUP,
            build: |copy: Copy| {
                let on_cbw_error = copy.on_cbw_error;
                run(JobCommand::Backup(BackupOptions { copy: copy.options, on_cbw_error }))
            },
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "blockdev-mirror",
        help: "copy a node to another one and keep them the same, until the copy takes its place",
        example: r#"{"job-id": "j0", "device": "disk0", "target": "disk1", "sync": "full"}"#,
        arguments: Arguments::Table(&Table {
            fields: MIRROR,
            build: |copy: Copy| {
                run(JobCommand::Mirror(MirrorOptions {
                    copy: copy.options,
                    replaces: copy.replaces,
                    granularity: copy.granularity.unwrap_or(GRANULARITY),
                    buf_size: copy.buf_size.unwrap_or(BUF_SIZE),
                }))
            },
        }),
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
        help: "list the jobs that copy block nodes",
        example: "",
        arguments: Arguments::None(|| Job::Run(Command::Job(Box::new(JobCommand::QueryBlock)))),
        returns: Returns::Data("one for each job", Reply::List(&Reply::Object(BLOCK_JOB_INFO))),
    },
    CommandRow {
        name: "job-cancel",
        help: "end a job before its time",
        example: r#"{"id": "j0"}"#,
        arguments: Arguments::Table(&Table {
            fields: ID,
            build: |id: String| run(JobCommand::Tell(id, JobVerb::Cancel { force: true })),
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "job-pause",
        help: "have a job do nothing until it is resumed",
        example: r#"{"id": "j0"}"#,
        arguments: Arguments::Table(&Table {
            fields: ID,
            build: |id: String| run(JobCommand::Tell(id, JobVerb::Pause)),
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "job-resume",
        help: "have a job that was paused go on",
        example: r#"{"id": "j0"}"#,
        arguments: Arguments::Table(&Table {
            fields: ID,
            build: |id: String| run(JobCommand::Tell(id, JobVerb::Resume)),
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "job-complete",
        help: "have a mirror that is ready end, and its target take the source's place",
        example: r#"{"id": "j0"}"#,
        arguments: Arguments::Table(&Table {
            fields: ID,
            build: |id: String| run(JobCommand::Tell(id, JobVerb::Complete)),
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "job-finalize",
        help: "have a job make its changes that was started with auto-finalize=false",
        example: r#"{"id": "j0"}"#,
        arguments: Arguments::Table(&Table {
            fields: ID,
            build: |id: String| run(JobCommand::Tell(id, JobVerb::Finalize)),
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "job-dismiss",
        help: "forget a job that has ended",
        example: r#"{"id": "j0"}"#,
        arguments: Arguments::Table(&Table {
            fields: ID,
            build: |id: String| run(JobCommand::Tell(id, JobVerb::Dismiss)),
        }),
        returns: Returns::Nothing,
    },
    CommandRow {
        name: "block-job-cancel",
        help: "end a job before its time; a mirror that is ready ends with a whole copy",
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
        help: "set how many bytes a second a job copies at most",
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

#[derive(Default)]
struct Create {
    id: String,
    options: Option<CreateOptions>,
}

static CREATE: &[Field<Create>] = &[
    Field {
        name: "job-id",
        kind: Kind::Text { meta: "<job-id>", set: |create, id| put(&mut create.id, id) },
        need: Need::Required,
        help: "the job's name",
    },
    Field {
        name: "options",
        kind: Kind::Nested {
            shape: || {
                Shape::Union(Union {
                    tag: "driver",
                    help: "what kind of image it is",
                    common: Vec::new(),
                    variants: vec![Variant {
                        name: "file",
                        help: "a regular file",
                        example: "",
                        members: FILE.members(),
                    }],
                })
            },
            read: |create, value, at| put(&mut create.options, Some(read_create(value, at)?)),
        },
        need: Need::Required,
        help: "what to make",
    },
];

fn read_create(value: Value, at: &Context) -> Result<CreateOptions, OptionError> {
    let Value::Object(mut object) = value else {
        return Err(table::wrong_type(at.whole(), "object"));
    };
    let driver = match table::take(&mut object, "driver") {
        Some(value) => table::text(value, &at.full("driver"), at)?,
        None => return Err(table::missing(&at.full("driver"))),
    };
    match driver.as_str() {
        "file" => FILE.read(object, at, &["driver"], "driver 'file'"),
        "qcow2" => Err(OptionError::not_yet("blockdev-create with driver 'qcow2'")
            .hint("qemu-img create makes one, and blockdev-snapshot-sync one above a node.")),
        other => {
            // Those that QSD can open and cannot make have no options to be made with.
            let known = crate::blockdev::DRIVERS.iter().any(|row| row.name == other);
            match (known, object.first()) {
                (true, Some((name, _))) => Err(unexpected(at, name)),
                (true, None) => Err(OptionError::new("Driver does not support blockdev-create")),
                (false, _) => Err(table::not_accepted("driver", at, other, ["file"].into_iter())),
            }
        }
    }
}

fn unexpected(at: &Context, name: &str) -> OptionError {
    OptionError::new(format!("Parameter '{}' is unexpected", at.full(name)))
        .hint("Images of this driver cannot be made; files can.")
}

#[derive(Default)]
struct File {
    filename: PathBuf,
    size: u64,
    preallocation: Preallocation,
}

static FILE: Table<File, CreateOptions> = Table {
    fields: &[
        Field {
            name: "filename",
            kind: Kind::Path(|file, path| put(&mut file.filename, path)),
            need: Need::Required,
            help: "where it is made; a file that is there is emptied",
        },
        Field {
            name: "size",
            kind: Kind::Bytes(|file, size| put(&mut file.size, size)),
            need: Need::Required,
            help: "size of the disk",
        },
        Field {
            name: "preallocation",
            kind: Kind::Choice(&[
                Choice {
                    name: "off",
                    help: "sparse",
                    set: |file| put(&mut file.preallocation, Preallocation::Off),
                },
                Choice {
                    name: "falloc",
                    help: "its space is reserved",
                    set: |file| put(&mut file.preallocation, Preallocation::Falloc),
                },
                Choice {
                    name: "full",
                    help: "its space is written with zeroes",
                    set: |file| put(&mut file.preallocation, Preallocation::Full),
                },
            ]),
            need: Need::Default("off"),
            help: "what is done about its space beforehand",
        },
    ],
    build: |file: File| {
        let File { filename, size, preallocation } = file;
        Ok(CreateOptions::File { filename, size, preallocation })
    },
};

/// Of `blockdev-backup` and `blockdev-mirror`.
#[derive(Default)]
struct Copy {
    options: CopyOptions,
    on_cbw_error: OnCbwError,
    replaces: Option<String>,
    granularity: Option<u64>,
    buf_size: Option<u64>,
}

const JOB_ID: Field<Copy> = Field {
    name: "job-id",
    kind: Kind::Text { meta: "<job-id>", set: |copy, id| put(&mut copy.options.job.id, id) },
    need: Need::Optional("none, which is an error"),
    help: "the job's name",
};
const SOURCE: Field<Copy> = Field {
    name: "device",
    kind: Kind::Text { meta: "<node-name>", set: |copy, name| put(&mut copy.options.device, name) },
    need: Need::Required,
    help: "the node that is copied",
};
const TARGET: Field<Copy> = Field {
    name: "target",
    kind: Kind::Text { meta: "<node-name>", set: |copy, name| put(&mut copy.options.target, name) },
    need: Need::Required,
    help: "the node that it is copied to",
};
const SPEED: Field<Copy> = Field {
    name: "speed",
    kind: Kind::Int {
        range: i64::MIN..=i64::MAX,
        set: |copy, speed| put(&mut copy.options.speed, speed),
    },
    need: Need::Default("0"),
    help: "bytes a second at most; 0: as fast as it goes",
};
const AUTO_FINALIZE: Field<Copy> = Field {
    name: "auto-finalize",
    kind: Kind::Bool(|copy, on| put(&mut copy.options.job.auto_finalize, on)),
    need: Need::Default("on"),
    help: "make the job's changes without waiting for job-finalize",
};
const AUTO_DISMISS: Field<Copy> = Field {
    name: "auto-dismiss",
    kind: Kind::Bool(|copy, on| put(&mut copy.options.job.auto_dismiss, on)),
    need: Need::Default("on"),
    help: "forget the job when it has ended, without waiting for job-dismiss",
};
const FILTER: Field<Copy> = Field {
    name: "filter-node-name",
    kind: Kind::Text {
        meta: "<node-name>",
        set: |copy, name| put(&mut copy.options.filter_node_name, Some(name)),
    },
    need: Need::Optional("a name is made up"),
    help: "name of the node that is put above the source while the job runs",
};

/// A field of one of the two policies about errors.
macro_rules! on_error {
    ($name:literal, $field:ident, $auto:ident, $help:literal) => {
        Field {
            name: $name,
            kind: Kind::Choice(&[
                Choice {
                    name: "report",
                    help: "the job fails",
                    set: |copy| put(&mut copy.options.$field, OnError::Report),
                },
                Choice {
                    name: "ignore",
                    help: "the job tries again later",
                    set: |copy| put(&mut copy.options.$field, OnError::Ignore),
                },
                Choice {
                    name: "enospc",
                    help: "the job pauses when there is no space left, else fails",
                    set: |copy| put(&mut copy.options.$field, OnError::Enospc),
                },
                Choice {
                    name: "stop",
                    help: "the job pauses",
                    set: |copy| put(&mut copy.options.$field, OnError::Stop),
                },
                Choice {
                    name: "auto",
                    help: "as QEMU's devices do it: report errors of reads, pause without space",
                    set: |copy| put(&mut copy.options.$field, OnError::$auto),
                },
            ]),
            need: Need::Default("report"),
            help: $help,
        }
    };
}

const ON_SOURCE_ERROR: Field<Copy> =
    on_error!("on-source-error", on_source_error, Report, "when the source cannot be read");
const ON_TARGET_ERROR: Field<Copy> =
    on_error!("on-target-error", on_target_error, Enospc, "when the target cannot be written");

const fn sync(incremental: fn(&mut Copy) -> table::Set) -> [Choice<Copy>; 5] {
    [
        Choice { name: "full", help: "all", set: |copy| put(&mut copy.options.sync, Sync::Full) },
        Choice {
            name: "top",
            help: "what is in the topmost image; refused where that has a backing image",
            set: |copy| put(&mut copy.options.sync, Sync::Top),
        },
        Choice {
            name: "none",
            help: "only what is written from now on",
            set: |copy| put(&mut copy.options.sync, Sync::None),
        },
        Choice { name: "incremental", help: "by a dirty bitmap; not there", set: incremental },
        Choice { name: "bitmap", help: "by a dirty bitmap; not there", set: incremental },
    ]
}

static MIRROR_SYNC: [Choice<Copy>; 5] =
    sync(|_| Err(OptionError::new("Sync mode 'incremental' not supported")));
static BACKUP_SYNC: [Choice<Copy>; 5] =
    sync(|_| Err(OptionError::new("must provide a valid bitmap name for 'incremental' sync mode")));

static BACKUP: &[Field<Copy>] = &[
    JOB_ID,
    SOURCE,
    Field {
        name: "sync",
        kind: Kind::Choice(&BACKUP_SYNC),
        need: Need::Required,
        help: "what is copied",
    },
    SPEED,
    ON_SOURCE_ERROR,
    ON_TARGET_ERROR,
    Field {
        name: "on-cbw-error",
        kind: Kind::Choice(&[
            Choice {
                name: "break-guest-write",
                help: "the write fails",
                set: |copy| put(&mut copy.on_cbw_error, OnCbwError::BreakGuestWrite),
            },
            Choice {
                name: "break-snapshot",
                help: "the write goes on, and the job fails",
                set: |copy| put(&mut copy.on_cbw_error, OnCbwError::BreakSnapshot),
            },
        ]),
        need: Need::Default("break-guest-write"),
        help: "when what a client overwrites cannot be copied first",
    },
    AUTO_FINALIZE,
    AUTO_DISMISS,
    FILTER,
    TARGET,
];

static MIRROR: &[Field<Copy>] = &[
    JOB_ID,
    SOURCE,
    TARGET,
    Field {
        name: "replaces",
        kind: Kind::Text {
            meta: "<node-name>",
            set: |copy, name| put(&mut copy.replaces, Some(name)),
        },
        need: Need::Optional("the source"),
        help: "the node whose place the target takes in the end",
    },
    Field {
        name: "sync",
        kind: Kind::Choice(&MIRROR_SYNC),
        need: Need::Required,
        help: "what is copied",
    },
    SPEED,
    Field {
        name: "granularity",
        kind: Kind::Int { range: 0..=(u32::MAX as i64), set: granularity },
        need: Need::Default("65536"),
        help: "bytes that are copied again when one of them is written: a power of two",
    },
    Field {
        name: "buf-size",
        kind: Kind::Int {
            range: i64::MIN..=i64::MAX,
            set: |copy, size| match u64::try_from(size) {
                Ok(0) => Ok(()),
                Ok(size) => put(&mut copy.buf_size, Some(size)),
                Err(_) => Err(OptionError::new("Invalid parameter 'buf-size'")),
            },
        },
        need: Need::Default("16777216"),
        help: "bytes of memory for what is being copied",
    },
    ON_SOURCE_ERROR,
    ON_TARGET_ERROR,
    FILTER,
    Field {
        name: "copy-mode",
        kind: Kind::Choice(&[
            Choice { name: "background", help: "the job copies what was written", set: |_| Ok(()) },
            Choice {
                name: "write-blocking",
                help: "writes go to both sides; not there",
                set: |_| {
                    Err(OptionError::not_yet("Parameter 'copy-mode' with value 'write-blocking'"))
                },
            },
        ]),
        need: Need::Default("background"),
        help: "how what is written meanwhile comes to the target",
    },
    AUTO_FINALIZE,
    AUTO_DISMISS,
];

fn granularity(copy: &mut Copy, bytes: i64) -> table::Set {
    let bytes = bytes.unsigned_abs();
    if bytes == 0 {
        return Ok(());
    }
    if !(512..=64 << 20).contains(&bytes) {
        return Err(OptionError::new(
            "Parameter 'granularity' expects a value in range [512B, 64MB]",
        ));
    }
    if !bytes.is_power_of_two() {
        return Err(OptionError::new("Parameter 'granularity' expects a power of 2"));
    }
    put(&mut copy.granularity, Some(bytes))
}

static JOB_INFO: &[Member] = &[
    Member::new("id", Reply::Text, "the job's name"),
    Member::new("type", JOB_TYPE, "what it does"),
    Member::new("status", JOB_STATUS, "what it is at"),
    Member::new("current-progress", Reply::Int, "how much of its work is done; bytes, of a copy"),
    Member::new("total-progress", Reply::Int, "how much work there is, as far as is known"),
    Member::optional("error", Reply::Text, "why it failed"),
];

static BLOCK_JOB_INFO: &[Member] = &[
    Member::new("device", Reply::Text, "the job's name"),
    Member::new("type", JOB_TYPE, "what it does"),
    Member::new("status", JOB_STATUS, "what it is at"),
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
