//! `block-commit`.

use control::qmp::Returns;
use options::table::{Field, Kind, Need, only_off, put};
use serde_json::json;

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
    run: |daemon, Arguments(options)| {
        Box::pin(async move { daemon.start_commit(options).await.map(|()| json!({})) })
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
        help: "the topmost image of the chain",
    },
    Field {
        name: "base-node",
        kind: Kind::Text {
            meta: "<node-name>",
            set: |to, text| put(&mut to.0.base.node, Some(text)),
        },
        need: Need::Optional("the last image of the chain"),
        help: "the image that is written to, by its node",
    },
    Field {
        name: "base",
        kind: Kind::Text {
            meta: "<filename>",
            set: |to, text| put(&mut to.0.base.file, Some(text)),
        },
        need: Need::Optional("the last image of the chain"),
        help: "the image that is written to, by its file",
    },
    Field {
        name: "top-node",
        kind: Kind::Text {
            meta: "<node-name>",
            set: |to, text| put(&mut to.0.top.node, Some(text)),
        },
        need: Need::Optional("the topmost image"),
        help: "the first image that is committed, by its node",
    },
    Field {
        name: "top",
        kind: Kind::Text {
            meta: "<filename>",
            set: |to, text| put(&mut to.0.top.file, Some(text)),
        },
        need: Need::Optional("the topmost image"),
        help: "the first image that is committed, by its file",
    },
    Field {
        name: "backing-file",
        kind: Kind::Text {
            meta: "<filename>",
            set: |to, text| put(&mut to.0.backing_file, Some(text)),
        },
        need: Need::Optional("the name of the base"),
        help: "how the image above is to name the base",
    },
    Field::unoffered("backing-mask-protocol", only_off),
    Rows::SPEED,
    Rows::ON_ERROR,
    Rows::FILTER,
    Rows::AUTO_FINALIZE,
    Rows::AUTO_DISMISS,
];
