//! `block-commit`.

use control::qmp::Returns;
use options::table::{Field, Row, put};

use super::super::Command;
use super::arguments::{Copies, Rows};
use crate::jobs::{ChainOptions, CopyOptions};

pub(super) static COMMAND: Command<Arguments> = Command {
    name: "block-commit",
    help: "copy the data of images into a backing image; if the topmost image is included, job-complete replaces that image by the backing image",
    example: r#"{"job-id": "j0", "device": "disk0", "top-node": "mid", "base-node": "base"}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, Arguments(options)| Box::pin(async move { daemon.start_commit(options).await }),
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
    Row::required("device", "the topmost image of the chain")
        .text("<node-name>", |to, text| put(&mut to.0.copy.device, text)),
    Row::optional(
        "base-node",
        "the last image of the chain",
        "the image that is written to, by its node",
    )
    .text("<node-name>", |to, text| put(&mut to.0.base.node, Some(text))),
    Row::optional(
        "base",
        "the last image of the chain",
        "the image that is written to, by its file",
    )
    .text("<filename>", |to, text| put(&mut to.0.base.file, Some(text))),
    Row::optional(
        "top-node",
        "the topmost image",
        "the first image that is committed, by its node",
    )
    .text("<node-name>", |to, text| put(&mut to.0.top.node, Some(text))),
    Row::optional("top", "the topmost image", "the first image that is committed, by its file")
        .text("<filename>", |to, text| put(&mut to.0.top.file, Some(text))),
    Row::optional(
        "backing-file",
        "the name of the base",
        "how the image above is to name the base",
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
