//! `blockdev-mirror`.

use control::qmp::Returns;
use options::OptionError;
use options::table::{self, Choice, Field, Kind, Need, put};
use serde_json::json;

use super::super::Command;
use super::arguments::{Copies, Rows};
use crate::jobs::{CopyOptions, MirrorOptions};

pub(super) static COMMAND: Command<MirrorOptions> = Command {
    name: "blockdev-mirror",
    help: "copy a node to another and keep both equal, until the copy replaces the node",
    example: r#"{"job-id": "j0", "device": "disk0", "target": "disk1", "sync": "full"}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, options| {
        Box::pin(async move {
            daemon.start_mirror(options).await?;
            Ok(json!({}))
        })
    },
};

impl Copies for MirrorOptions {
    fn copy(&mut self) -> &mut CopyOptions {
        &mut self.copy
    }
}

fn no_bitmaps(_: &mut MirrorOptions) -> table::Set {
    Err(OptionError::new("Sync mode 'incremental' not supported"))
}

static ARGUMENTS: &[Field<MirrorOptions>] = &[
    Rows::JOB_ID,
    Rows::SOURCE,
    Rows::TARGET,
    Field {
        name: "replaces",
        kind: Kind::Text { meta: "<node-name>", set: |to, name| put(&mut to.replaces, Some(name)) },
        need: Need::Optional("the source"),
        help: "the node that the target replaces at the end",
    },
    Field {
        name: "sync",
        kind: Kind::Choice(&[
            Rows::FULL,
            Rows::NONE,
            Rows::TOP,
            Choice::unoffered("incremental", no_bitmaps),
            Choice::unoffered("bitmap", no_bitmaps),
        ]),
        need: Need::Required,
        help: "what is copied",
    },
    Rows::SPEED,
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
            set: |to, size| match u64::try_from(size) {
                Ok(0) => Ok(()),
                Ok(size) => put(&mut to.buf_size, size),
                Err(_) => Err(OptionError::new("Invalid parameter 'buf-size'")),
            },
        },
        need: Need::Default("16777216"),
        help: "bytes of memory for what is being copied",
    },
    Rows::ON_SOURCE_ERROR,
    Rows::ON_TARGET_ERROR,
    Rows::FILTER_OF_SOURCE,
    Field {
        name: "copy-mode",
        kind: Kind::Choice(&[
            Choice {
                name: "background",
                help: "the job copies what was written",
                set: |to| put(&mut to.blocking, false),
            },
            Choice {
                name: "write-blocking",
                help: "a write is answered when the target has it, too",
                set: |to| put(&mut to.blocking, true),
            },
        ]),
        need: Need::Default("background"),
        help: "how what is written meanwhile comes to the target",
    },
    Rows::AUTO_FINALIZE,
    Rows::AUTO_DISMISS,
];

fn granularity(to: &mut MirrorOptions, bytes: i64) -> table::Set {
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
    put(&mut to.granularity, bytes)
}
