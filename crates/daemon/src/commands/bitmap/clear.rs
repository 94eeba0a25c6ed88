//! `block-dirty-bitmap-clear`.

use control::qmp::Returns;

use super::super::Command;
use super::arguments::NAME;
use crate::bitmaps::BitmapName;

pub(super) static COMMAND: Command<BitmapName> = Command {
    name: "block-dirty-bitmap-clear",
    help: "clear all bits of a bitmap",
    example: r#"{"node": "disk0", "name": "b0"}"#,
    arguments: NAME,
    returns: Returns::Nothing,
    records: false,
    run: |daemon, bitmap| {
        Box::pin(async move {
            daemon.settle_bitmaps();
            daemon.clear_bitmap(&bitmap)?;
            Ok(())
        })
    },
};
