//! `blockdev-backup` and `blockdev-mirror`: what their arguments are read into.

use super::run;
use crate::error::OptionError;
use crate::job::{
    BackupOptions, BitmapMode, CopyOptions, JobCommand, MirrorOptions, OnCbwError, Perf, Sync,
};
use crate::qmp::commands::Job;
use crate::rows::{OnErrorHelp, on_error};
use crate::shape::Shape;
use crate::table::{self, Choice, Field, Kind, Need, Reads, Table, put};
use crate::value::Value;

/// `granularity` when none is given, as QEMU chooses it for a file.
const GRANULARITY: u64 = 64 << 10;
/// `buf-size` when none is given.
const BUF_SIZE: u64 = 16 << 20;

/// The arguments of a backup.
pub(super) const BLOCKDEV_BACKUP: &dyn Reads<Job> = &Table {
    fields: BACKUP,
    build: |copy: Copy| {
        let Copy { options, on_cbw_error, bitmap, bitmap_mode, perf, .. } = copy;
        check_bitmap(options.sync, bitmap.is_some(), bitmap_mode)?;
        let copy = options;
        run(JobCommand::Backup(BackupOptions { copy, on_cbw_error, bitmap, bitmap_mode, perf }))
    },
};

/// Those of a mirror.
pub(super) const BLOCKDEV_MIRROR: &dyn Reads<Job> = &Table {
    fields: MIRROR,
    build: |copy: Copy| {
        run(JobCommand::Mirror(MirrorOptions {
            copy: copy.options,
            replaces: copy.replaces,
            granularity: copy.granularity.unwrap_or(GRANULARITY),
            buf_size: copy.buf_size.unwrap_or(BUF_SIZE),
        }))
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
    bitmap: Option<String>,
    bitmap_mode: Option<BitmapMode>,
    perf: Perf,
}

static PERF: &[Field<Perf>] = &[
    Field {
        name: "use-copy-range",
        kind: Kind::Bool(|_, _| Ok(())),
        need: Need::Default("off"),
        help: "changes nothing: data passes through memory",
    },
    Field {
        name: "max-workers",
        kind: Kind::Int {
            range: i64::MIN..=i64::MAX,
            set: |perf, workers| put(&mut perf.max_workers, workers),
        },
        need: Need::Default("64"),
        help: "copies at the same time, which the job's memory of 16 MiB limits to 16",
    },
    Field {
        name: "max-chunk",
        kind: Kind::Int {
            range: i64::MIN..=i64::MAX,
            set: |perf, bytes| put(&mut perf.max_chunk, bytes),
        },
        need: Need::Default("0"),
        help: "most bytes of one copy, at most 1048576, which 0 stands for",
    },
    Field {
        name: "min-cluster-size",
        kind: Kind::Int {
            range: 0..=1 << 20,
            set: |perf, bytes| put(&mut perf.min_cluster_size, bytes.unsigned_abs()),
        },
        need: Need::Default("65536"),
        help: "bytes that are copied before one of them is overwritten: a power of two",
    },
];

/// Checks that a bitmap and what becomes of it go together. In QEMU's words.
fn check_bitmap(sync: Sync, bitmap: bool, mode: Option<BitmapMode>) -> table::Set {
    let name = if sync == Sync::Incremental { "incremental" } else { "bitmap" };
    let wrong = match (sync, bitmap, mode) {
        (Sync::Incremental | Sync::Bitmap, false, _) => {
            format!("must provide a valid bitmap name for '{name}' sync mode")
        }
        (Sync::Incremental, true, Some(BitmapMode::Never | BitmapMode::Always)) => {
            "Bitmap sync mode must be 'on-success' when using sync mode 'incremental'".to_owned()
        }
        (Sync::Bitmap | Sync::Full | Sync::Top | Sync::None, true, None) => {
            "Bitmap sync mode must be given when providing a bitmap".to_owned()
        }
        (Sync::None, true, _) => {
            "sync mode 'none' does not produce meaningful bitmap outputs".to_owned()
        }
        (Sync::Full | Sync::Top, true, Some(BitmapMode::Never)) => {
            let name = if sync == Sync::Full { "full" } else { "top" };
            format!(
                "Bitmap sync mode 'never' has no meaningful effect when combined with sync mode '{name}'"
            )
        }
        (_, false, Some(_)) => "Cannot specify bitmap sync mode without a bitmap".to_owned(),
        _ => return Ok(()),
    };
    Err(OptionError::new(wrong))
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

/// What the job does about an error.
const THEN: OnErrorHelp = OnErrorHelp {
    report: "the job fails",
    ignore: "the job tries again later",
    enospc: "the job pauses when there is no space left, else fails",
    stop: "the job pauses",
    auto: "as QEMU's devices do it: report errors of reads, pause without space",
};

const ON_SOURCE_ERROR: Field<Copy> = on_error!(
    "on-source-error",
    options.on_source_error,
    auto: Report,
    THEN,
    "when the source cannot be read"
);
const ON_TARGET_ERROR: Field<Copy> = on_error!(
    "on-target-error",
    options.on_target_error,
    auto: Enospc,
    THEN,
    "when the target cannot be written"
);

const fn sync(last: [Choice<Copy>; 2]) -> [Choice<Copy>; 5] {
    let [incremental, bitmap] = last;
    [
        Choice { name: "full", help: "all", set: |copy| put(&mut copy.options.sync, Sync::Full) },
        Choice {
            name: "none",
            help: "only what is written from now on",
            set: |copy| put(&mut copy.options.sync, Sync::None),
        },
        // The same as full for a single image. Refused where an image has a backing image.
        Choice::unoffered("top", |copy| put(&mut copy.options.sync, Sync::Top)),
        incremental,
        bitmap,
    ]
}

fn no_bitmaps(_: &mut Copy) -> table::Set {
    Err(OptionError::new("Sync mode 'incremental' not supported"))
}

static MIRROR_SYNC: [Choice<Copy>; 5] =
    sync([Choice::unoffered("incremental", no_bitmaps), Choice::unoffered("bitmap", no_bitmaps)]);
static BACKUP_SYNC: [Choice<Copy>; 5] = sync([
    Choice {
        name: "incremental",
        help: "what a bitmap has set, which is cleared of it if the job succeeds",
        set: |copy| put(&mut copy.options.sync, Sync::Incremental),
    },
    Choice {
        name: "bitmap",
        help: "what a bitmap has set; bitmap-mode says what becomes of it",
        set: |copy| put(&mut copy.options.sync, Sync::Bitmap),
    },
]);

static BACKUP: &[Field<Copy>] = &[
    JOB_ID,
    SOURCE,
    Field {
        name: "sync",
        kind: Kind::Choice(&BACKUP_SYNC),
        need: Need::Required,
        help: "what is copied",
    },
    Field {
        name: "bitmap",
        kind: Kind::Text { meta: "<name>", set: |copy, name| put(&mut copy.bitmap, Some(name)) },
        need: Need::Optional("none"),
        help: "a dirty bitmap of the source",
    },
    Field {
        name: "bitmap-mode",
        kind: Kind::Choice(&[
            Choice {
                name: "on-success",
                help: "cleared if the job succeeds",
                set: |copy| put(&mut copy.bitmap_mode, Some(BitmapMode::OnSuccess)),
            },
            Choice {
                name: "never",
                help: "they stay",
                set: |copy| put(&mut copy.bitmap_mode, Some(BitmapMode::Never)),
            },
            Choice {
                name: "always",
                help: "cleared of what was copied, also if the job fails",
                set: |copy| put(&mut copy.bitmap_mode, Some(BitmapMode::Always)),
            },
        ]),
        need: Need::Optional("on-success for sync=incremental; else an error with a bitmap"),
        help: "what becomes of the bitmap's bits",
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
    // No node writes compressed clusters.
    Field::unoffered("compress", |_, on, name, at| match table::boolean(on, name, at)? {
        true => Err(OptionError::new("Compression is not supported for this drive ")),
        false => Ok(()),
    }),
    Field {
        name: "x-perf",
        kind: Kind::Nested {
            shape: || Shape::Object(table::members(PERF)),
            read: |copy, value, at| {
                let Value::Object(mut object) = value else {
                    return Err(table::wrong_type(at.whole(), "object"));
                };
                table::read(PERF, &mut copy.perf, &mut object, at)?;
                table::refuse_rest(&object, at, "x-perf", table::names(PERF))
            },
        },
        need: Need::Optional("as its members say"),
        help: "how the job copies",
    },
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
            Choice::unoffered("write-blocking", |_| {
                Err(OptionError::not_yet("Parameter 'copy-mode' with value 'write-blocking'"))
            }),
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
