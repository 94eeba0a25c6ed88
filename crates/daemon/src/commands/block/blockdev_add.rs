//! `blockdev-add`.

use block::options::{node_shape, read_blockdev};
use control::Action;

use super::super::OptionCommand;

pub(super) static COMMAND: OptionCommand = OptionCommand {
    name: "blockdev-add",
    help: "open a block node, as --blockdev does",
    example: r#"{"driver": "file", "node-name": "disk0", "filename": "/srv/disk0.img"}"#,
    option: "--blockdev",
    arguments: node_shape,
    read: |given, at| Ok(Action::Blockdev(read_blockdev(given, at)?)),
};
