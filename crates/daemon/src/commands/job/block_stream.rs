//! `block-stream`.

use control::qmp::Returns;
use options::table::{Field, Kind, Need, only_off, put};
use serde_json::json;

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
    run: |daemon, Arguments(options)| {
        Box::pin(async move { daemon.start_stream(options).await.map(|()| json!({})) })
    },
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
    Field {
        name: "device",
        kind: Kind::Text { meta: "<node-name>", set: |to, text| put(&mut to.0.copy.device, text) },
        need: Need::Required,
        help: "the image",
    },
    Field {
        name: "base",
        kind: Kind::Text {
            meta: "<filename>",
            set: |to, text| put(&mut to.0.base.file, Some(text)),
        },
        need: Need::Optional("none: all images are copied"),
        help: "the image that stays behind it, by its file",
    },
    Field {
        name: "base-node",
        kind: Kind::Text {
            meta: "<node-name>",
            set: |to, text| put(&mut to.0.base.node, Some(text)),
        },
        need: Need::Optional("none: all images are copied"),
        help: "the image that stays behind it, by its node",
    },
    Field {
        name: "bottom",
        kind: Kind::Text { meta: "<node-name>", set: |to, text| put(&mut to.0.bottom, Some(text)) },
        need: Need::Optional("none: all images are copied"),
        help: "the last image that is copied",
    },
    Field {
        name: "backing-file",
        kind: Kind::Text {
            meta: "<filename>",
            set: |to, text| put(&mut to.0.backing_file, Some(text)),
        },
        need: Need::Optional("the name of the base"),
        help: "how the image is to name the one that stays behind it",
    },
    Field::unoffered("backing-mask-protocol", only_off),
    Rows::SPEED,
    Rows::ON_ERROR,
    Rows::FILTER,
    Rows::AUTO_FINALIZE,
    Rows::AUTO_DISMISS,
];
