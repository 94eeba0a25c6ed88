//! `block-set-write-threshold`.

use control::qmp::{QmpError, Returns};
use options::table::{Field, Row, put};

use super::super::Command;
use crate::DaemonError;

pub(super) static COMMAND: Command<Arguments> = Command {
    name: "block-set-write-threshold",
    help: "send BLOCK_WRITE_THRESHOLD for the first write to a node that ends beyond a byte",
    example: r#"{"node-name": "disk0", "write-threshold": 17179869184}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: false,
    run: |daemon, Arguments { node_name, threshold }| {
        Box::pin(async move {
            daemon.is_no_filter(&node_name)?;
            if daemon.nodes.node(&node_name).is_err() {
                return Err(QmpError::generic(format!("Device '{node_name}' not found")));
            }
            let tracking = daemon.nodes.track(&node_name).await.map_err(DaemonError::from)?;
            tracking.threshold.set(threshold);
            Ok(())
        })
    },
};

#[derive(Default)]
pub(super) struct Arguments {
    node_name: String,
    threshold: u64,
}

static ARGUMENTS: &[Field<Arguments>] = &[
    Row::required(
        "node-name",
        "the node, as a rule the file of an image, whose writes show how much of it is in use",
    )
    .text("<node-name>", |to, name| put(&mut to.node_name, name)),
    Row::required(
        "write-threshold",
        "bytes from the node's beginning; 0: none. One event removes it",
    )
    .bytes(|to, bytes| put(&mut to.threshold, bytes)),
];
