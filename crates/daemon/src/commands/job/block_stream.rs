//! `block-stream`.

use control::qmp::Returns;
use options::table::{Field, Row, put};

use super::super::Command;
use super::arguments::{Copies, Rows};
use crate::jobs::{ChainOptions, CopyOptions};

pub(super) static COMMAND: Command<Arguments> = Command {
    name: "block-stream",
    help: "copy data of backing images into an image, until the image needs them no more",
    example: r#"{"job-id": "j0", "device": "disk0", "base-node": "base"}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, Arguments(options)| Box::pin(async move { daemon.start_stream(options).await }),
};

#[derive(Default)]
pub(super) struct Arguments(ChainOptions);

impl Copies for Arguments {
    fn copy(&mut self) -> &mut CopyOptions {
        &mut self.0.copy
    }
}

static ARGUMENTS: &[Field<Arguments>] = &[
    Rows::JOB_ID,
    Row::required("device", "the image")
        .text("<node-name>", |to, text| put(&mut to.0.copy.device, text)),
    Row::optional(
        "base",
        "none: all images are copied",
        "the image that stays behind it, by its file",
    )
    .text("<filename>", |to, text| put(&mut to.0.base.file, Some(text))),
    Row::optional(
        "base-node",
        "none: all images are copied",
        "the image that stays behind it, by its node",
    )
    .text("<node-name>", |to, text| put(&mut to.0.base.node, Some(text))),
    Row::optional("bottom", "none: all images are copied", "the last image that is copied")
        .text("<node-name>", |to, text| put(&mut to.0.bottom, Some(text))),
    Row::optional(
        "backing-file",
        "the name of the base",
        "how the image is to name the one that stays behind it",
    )
    .text("<filename>", |to, text| put(&mut to.0.backing_file, Some(text))),
    Row::default(
        "backing-mask-protocol",
        "off",
        "name raw as the base's format if the base has no format",
    )
    .bool(|to, on| put(&mut to.0.masks_protocol, on)),
    Rows::SPEED,
    Rows::ON_ERROR,
    Rows::FILTER,
    Rows::AUTO_FINALIZE,
    Rows::AUTO_DISMISS,
];
