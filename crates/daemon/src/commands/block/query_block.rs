//! `query-block`.

use control::qmp::{Reply, Returns};
use serde_json::{Value as Json, json};

use super::super::Command;

/// In QEMU, block devices are devices of a guest. As in qemu-storage-daemon, the list is empty:
/// exports use nodes.
pub(super) static COMMAND: Command<(), Json> = Command {
    name: "query-block",
    help: "list the block devices: always none, as nodes are used by exports",
    example: "",
    arguments: &[],
    returns: Returns::Data("an empty list", Reply::List(&Reply::Object(&[]))),
    records: false,
    run: |_, ()| Box::pin(async { Ok(json!([])) }),
};
