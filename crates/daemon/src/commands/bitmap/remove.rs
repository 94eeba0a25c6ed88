//! `block-dirty-bitmap-remove`.

use control::qmp::Returns;

use super::super::Command;
use super::arguments::NAME;
use crate::bitmaps::BitmapName;

pub(super) static COMMAND: Command<BitmapName> = Command {
    name: "block-dirty-bitmap-remove",
    help: "remove a bitmap",
    example: r#"{"node": "disk0", "name": "b0"}"#,
    arguments: NAME,
    returns: Returns::Nothing,
    records: false,
    run: |daemon, bitmap| {
        Box::pin(async move {
            daemon.remove_bitmap(&bitmap).await?;
            Ok(())
        })
    },
};
