//! `block-dirty-bitmap-merge`.

use control::qmp::Returns;

use super::super::Command;
use super::arguments::MERGE;
use crate::bitmaps::Merge;

pub(super) static COMMAND: Command<Merge> = Command {
    name: "block-dirty-bitmap-merge",
    help: "add the bits of several bitmaps to another one",
    example: r#"{"node": "disk0", "target": "b0", "bitmaps": ["b1"]}"#,
    arguments: MERGE,
    returns: Returns::Nothing,
    records: false,
    run: |daemon, bitmap| {
        Box::pin(async move {
            daemon.merge_bitmaps(bitmap)?;
            Ok(())
        })
    },
};
