//! `blockdev-backup`.

use block::job::OnCbwError;
use control::qmp::Returns;
use options::OptionError;
use options::place::OneOf;
use options::shape::Shape;
use options::table::{self, Choice, Field, Row, put};
use options::value::Value;

use super::super::Command;
use super::arguments::{Copies, Rows};
use crate::jobs::{BackupOptions, BitmapMode, CopyOptions, Perf, Sync};

pub(in super::super) static COMMAND: Command<BackupOptions> = Command {
    name: "blockdev-backup",
    help: "copy the present contents of a node to another node",
    example: r#"{"job-id": "j0", "device": "disk0", "target": "disk1", "sync": "full"}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, options| {
        Box::pin(async move {
            check(&options)?;
            daemon.settle_bitmaps();
            daemon.start_backup(options).await
        })
    },
};

impl Copies for BackupOptions {
    fn copy(&mut self) -> &mut CopyOptions {
        &mut self.copy
    }
}

/// Checks that bitmap, bitmap mode and sync mode are compatible. Errors have QEMU's wording.
pub(in super::super) fn check(options: &BackupOptions) -> Result<(), OptionError> {
    let (sync, bitmap, mode) = (options.copy.sync, options.bitmap.is_some(), options.bitmap_mode);
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

static ARGUMENTS: &[Field<BackupOptions>] = &[
    Rows::JOB_ID,
    Rows::SOURCE,
    Row::required("sync", "what is copied").choice(&[
        Rows::FULL,
        Rows::NONE,
        Rows::TOP,
        Choice::new(
            "incremental",
            "data marked in a bitmap, which is cleared if the job succeeds",
            |to| put(&mut to.copy.sync, Sync::Incremental),
        ),
        Choice::new("bitmap", "what a bitmap has set; bitmap-mode says what becomes of it", |to| {
            put(&mut to.copy.sync, Sync::Bitmap)
        }),
    ]),
    Row::optional("bitmap", "none", "a dirty bitmap of the source")
        .text("<name>", |to, name| put(&mut to.bitmap, Some(name))),
    Row::optional(
        "bitmap-mode",
        "on-success for sync=incremental; else an error with a bitmap",
        "what happens to the bitmap's bits",
    )
    .at(&OneOf {
        at: |to: &mut BackupOptions| &mut to.bitmap_mode,
        words: &[
            ("on-success", BitmapMode::OnSuccess, "cleared if the job succeeds"),
            ("never", BitmapMode::Never, "they stay"),
            ("always", BitmapMode::Always, "cleared of what was copied, also if the job fails"),
        ],
    }),
    Rows::SPEED,
    Rows::ON_SOURCE_ERROR,
    Rows::ON_TARGET_ERROR,
    Row::default(
        "on-cbw-error",
        "break-guest-write",
        "when what a client overwrites cannot be copied first",
    )
    .at(&OneOf {
        at: |to: &mut BackupOptions| &mut to.on_cbw_error,
        words: &[
            ("break-guest-write", OnCbwError::BreakGuestWrite, "the write fails"),
            (
                "break-snapshot",
                OnCbwError::BreakSnapshot,
                "the write is carried out, and the job fails",
            ),
        ],
    }),
    Rows::AUTO_FINALIZE,
    Rows::AUTO_DISMISS,
    Rows::FILTER_OF_SOURCE,
    Row::default("discard-source", "off", "discard in the source what was copied")
        .bool(|to, on| put(&mut to.copy.discard_source, on)),
    Row::default("compress", "off", "the target, a qcow2 image, stores the data compressed")
        .bool(|to, on| put(&mut to.compress, on)),
    Row::optional("x-perf", "as its members say", "how the job copies").nested(
        || Shape::Object(table::members(PERF)),
        |to, value, at| {
            let Value::Object(mut object) = value else {
                return Err(table::wrong_type(at.whole(), "object"));
            };
            table::read(PERF, &mut to.perf, &mut object, at)?;
            table::refuse_rest(&object, at, "x-perf", table::names(PERF))
        },
    ),
    Rows::TARGET,
];

static PERF: &[Field<Perf>] = &[
    Row::default("use-copy-range", "off", "changes nothing: data passes through memory")
        .bool(|_, _| Ok(())),
    Row::default(
        "max-workers",
        "64",
        "copies at the same time, which the job's memory of 16 MiB limits to 16",
    )
    .int(i64::MIN..=i64::MAX, |perf, workers| put(&mut perf.max_workers, workers)),
    Row::default("max-chunk", "0", "most bytes of one copy, at most 1048576, which 0 stands for")
        .int(i64::MIN..=i64::MAX, |perf, bytes| put(&mut perf.max_chunk, bytes)),
    Row::default(
        "min-cluster-size",
        "65536",
        "bytes that are copied before one of them is overwritten: a power of two",
    )
    .int(0..=1 << 20, |perf, bytes| put(&mut perf.min_cluster_size, bytes.unsigned_abs())),
];
