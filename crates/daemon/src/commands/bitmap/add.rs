//! `block-dirty-bitmap-add`.

use control::qmp::Returns;

use super::super::Command;
use super::arguments::NEW;
use crate::bitmaps::NewBitmap;

pub(super) static COMMAND: Command<NewBitmap> = Command {
    name: "block-dirty-bitmap-add",
    help: "create a bitmap, which records the parts of a node that are written to",
    example: r#"{"node": "disk0", "name": "b0"}"#,
    arguments: NEW,
    returns: Returns::Nothing,
    records: false,
    run: |daemon, bitmap| Box::pin(async move { daemon.add_bitmap(bitmap).await }),
};
