//! `block-dirty-bitmap-disable`.

use control::qmp::Returns;

use super::super::Command;
use super::arguments::NAME;
use crate::bitmaps::BitmapName;

pub(super) static COMMAND: Command<BitmapName> = Command {
    name: "block-dirty-bitmap-disable",
    help: "stop a bitmap from recording writes",
    example: r#"{"node": "disk0", "name": "b0"}"#,
    arguments: NAME,
    returns: Returns::Nothing,
    records: false,
    run: |daemon, bitmap| {
        Box::pin(async move {
            daemon.set_recording(&bitmap, false)?;
            Ok(())
        })
    },
};
