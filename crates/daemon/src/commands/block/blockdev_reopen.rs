//! `blockdev-reopen`.

use block::options::{BlockdevOptions, node_shape, read_blockdevs};
use control::qmp::Returns;
use options::shape::Shape;
use options::table::{Field, Row, put};

use super::super::Command;

pub(super) static COMMAND: Command<Vec<BlockdevOptions>> = Command {
    name: "blockdev-reopen",
    help: "change options of nodes in use",
    example: r#"{"options": [{"driver": "file", "node-name": "disk0", "filename": "/srv/disk0.img", "discard": "unmap"}]}"#,
    arguments: ARGUMENTS,
    returns: Returns::Nothing,
    records: true,
    run: |daemon, nodes| Box::pin(async move { Ok(daemon.reopen(nodes).await?) }),
};

static ARGUMENTS: &[Field<Vec<BlockdevOptions>>] =
    &[Row::required("options", "all options of each node: what is left out counts as its default")
        .nested(
            || Shape::List(Box::new(node_shape()), "options of node <n>, as blockdev-add has them"),
            |nodes, value, at| put(nodes, read_blockdevs(value, at)?),
        )];
