//! `block-dirty-bitmap-enable`.

use control::qmp::Returns;

use super::super::Command;
use super::arguments::NAME;
use crate::bitmaps::BitmapName;

pub(super) static COMMAND: Command<BitmapName> = Command {
    name: "block-dirty-bitmap-enable",
    help: "let a bitmap record writes",
    example: r#"{"node": "disk0", "name": "b0"}"#,
    arguments: NAME,
    returns: Returns::Nothing,
    records: false,
    run: |daemon, bitmap| {
        Box::pin(async move {
            daemon.set_recording(&bitmap, true)?;
            Ok(())
        })
    },
};
