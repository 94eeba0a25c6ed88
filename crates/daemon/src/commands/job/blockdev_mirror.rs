//! `blockdev-mirror`.

use control::qmp::Returns;
use options::OptionError;
use options::place::OneOf;
use options::table::{self, Choice, Field, Row, put};

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
    run: |daemon, options| Box::pin(async move { daemon.start_mirror(options).await }),
};

impl Copies for MirrorOptions {
    fn copy(&mut self) -> &mut CopyOptions {
        &mut self.copy
    }
}

fn no_bitmaps(mode: &str) -> table::Set {
    Err(OptionError::new(format!("Sync mode '{mode}' not supported")))
}

static ARGUMENTS: &[Field<MirrorOptions>] = &[
    Rows::JOB_ID,
    Rows::SOURCE,
    Rows::TARGET,
    Row::optional("replaces", "the source", "the node that the target replaces at the end")
        .text("<node-name>", |to, name| put(&mut to.replaces, Some(name))),
    Row::required("sync", "what is copied").choice(&[
        Rows::FULL,
        Rows::NONE,
        Rows::TOP,
        Choice::unoffered("incremental", |_| no_bitmaps("incremental")),
        Choice::unoffered("bitmap", |_| no_bitmaps("bitmap")),
    ]),
    Rows::SPEED,
    Row::optional(
        "granularity",
        "the target's cluster size, from 4096 to 65536; 65536 without clusters",
        "bytes that are copied again when one of them is written: a power of two",
    )
    .int(0..=(u32::MAX as i64), granularity),
    Row::default("buf-size", "16777216", "bytes of memory for what is being copied").int(
        i64::MIN..=i64::MAX,
        |to, size| match u64::try_from(size) {
            Ok(0) => Ok(()),
            Ok(size) => put(&mut to.buf_size, size),
            Err(_) => Err(OptionError::new("Invalid parameter 'buf-size'")),
        },
    ),
    Rows::ON_SOURCE_ERROR,
    Rows::ON_TARGET_ERROR,
    Rows::FILTER_OF_SOURCE,
    Row::default("copy-mode", "background", "how what is written meanwhile comes to the target")
        .at(&OneOf {
            at: |to: &mut MirrorOptions| &mut to.blocking,
            words: &[
                ("background", false, "the job copies what was written"),
                ("write-blocking", true, "a write is answered when the target has it, too"),
            ],
        }),
    Row::default("target-is-zero", "off", "all of the target reads as zeroes: none are written")
        .bool(|to, on| put(&mut to.target_is_zero, on)),
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
