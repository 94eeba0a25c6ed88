//! `blockdev-del`.

use control::qmp::Returns;
use event_loop::until;
use options::table::{Field, Row, put};

use super::super::{Answer, Command};

/// Longest wait for the end of an image, nanoseconds. Images of a cluster are closed by threads.
const CLOSING_NS: u64 = 5_000_000_000;

pub(super) static COMMAND: Command<Arguments, Answer> = Command {
    name: "blockdev-del",
    help: "close a block node that is not in use, and the nodes defined inside it",
    example: r#"{"node-name": "disk0"}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, Arguments { node_name }| {
        Box::pin(async move {
            let closed = daemon.delete_node(&node_name)?;
            Ok(Answer::after(closed, |daemon, ()| {
                Box::pin(async move {
                    daemon.nodes.forget_removed();
                    let Some(closed) = daemon.nodes.services().closed() else {
                        return Ok(().into());
                    };
                    let enough = daemon.control.sleep_until(daemon.control.now_ns() + CLOSING_NS);
                    Ok(Answer::Later(Box::pin(async move {
                        let _ = until(closed, enough).await;
                    })))
                })
            }))
        })
    },
};

#[derive(Default)]
pub(super) struct Arguments {
    node_name: String,
}

static ARGUMENTS: &[Field<Arguments>] = &[Row::required("node-name", "the node's name")
    .text("<node-name>", |to, name| put(&mut to.node_name, name))];
