//! `blockdev-backup`.

use block::job::OnCbwError;
use control::qmp::Returns;
use options::OptionError;
use options::shape::Shape;
use options::table::{self, Choice, Field, Kind, Need, put};
use options::value::Value;
use serde_json::json;

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
            daemon.start_backup(options).await?;
            Ok(json!({}))
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
    Field {
        name: "sync",
        kind: Kind::Choice(&[
            Rows::FULL,
            Rows::NONE,
            Rows::TOP,
            Choice {
                name: "incremental",
                help: "data marked in a bitmap, which is cleared if the job succeeds",
                set: |to| put(&mut to.copy.sync, Sync::Incremental),
            },
            Choice {
                name: "bitmap",
                help: "what a bitmap has set; bitmap-mode says what becomes of it",
                set: |to| put(&mut to.copy.sync, Sync::Bitmap),
            },
        ]),
        need: Need::Required,
        help: "what is copied",
    },
    Field {
        name: "bitmap",
        kind: Kind::Text { meta: "<name>", set: |to, name| put(&mut to.bitmap, Some(name)) },
        need: Need::Optional("none"),
        help: "a dirty bitmap of the source",
    },
    Field {
        name: "bitmap-mode",
        kind: Kind::Choice(&[
            Choice {
                name: "on-success",
                help: "cleared if the job succeeds",
                set: |to| put(&mut to.bitmap_mode, Some(BitmapMode::OnSuccess)),
            },
            Choice {
                name: "never",
                help: "they stay",
                set: |to| put(&mut to.bitmap_mode, Some(BitmapMode::Never)),
            },
            Choice {
                name: "always",
                help: "cleared of what was copied, also if the job fails",
                set: |to| put(&mut to.bitmap_mode, Some(BitmapMode::Always)),
            },
        ]),
        need: Need::Optional("on-success for sync=incremental; else an error with a bitmap"),
        help: "what happens to the bitmap's bits",
    },
    Rows::SPEED,
    Rows::ON_SOURCE_ERROR,
    Rows::ON_TARGET_ERROR,
    Field {
        name: "on-cbw-error",
        kind: Kind::Choice(&[
            Choice {
                name: "break-guest-write",
                help: "the write fails",
                set: |to| put(&mut to.on_cbw_error, OnCbwError::BreakGuestWrite),
            },
            Choice {
                name: "break-snapshot",
                help: "the write is carried out, and the job fails",
                set: |to| put(&mut to.on_cbw_error, OnCbwError::BreakSnapshot),
            },
        ]),
        need: Need::Default("break-guest-write"),
        help: "when what a client overwrites cannot be copied first",
    },
    Rows::AUTO_FINALIZE,
    Rows::AUTO_DISMISS,
    Rows::FILTER_OF_SOURCE,
    Field {
        name: "compress",
        kind: Kind::Bool(|to, on| put(&mut to.compress, on)),
        need: Need::Default("off"),
        help: "the target, a qcow2 image, stores the data compressed",
    },
    Field {
        name: "x-perf",
        kind: Kind::Nested {
            shape: || Shape::Object(table::members(PERF)),
            read: |to, value, at| {
                let Value::Object(mut object) = value else {
                    return Err(table::wrong_type(at.whole(), "object"));
                };
                table::read(PERF, &mut to.perf, &mut object, at)?;
                table::refuse_rest(&object, at, "x-perf", table::names(PERF))
            },
        },
        need: Need::Optional("as its members say"),
        help: "how the job copies",
    },
    Rows::TARGET,
];

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
