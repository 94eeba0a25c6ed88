//! `query-block`.

use control::qmp::{Reply, Returns};
use serde_json::json;

use super::super::Command;

/// Block devices are guests' devices in QEMU. As in qemu-storage-daemon there are none: exports use nodes.
pub(super) static COMMAND: Command<()> = Command {
    name: "query-block",
    help: "list the block devices: always none, as nodes are used by exports",
    example: "",
    arguments: &[],
    returns: Returns::Data("an empty list", Reply::List(&Reply::Object(&[]))),
    records: false,
    run: |_, ()| Box::pin(async { Ok(json!([])) }),
};
