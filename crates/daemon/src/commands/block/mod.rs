//! Block nodes.

mod block_resize;
mod block_set_write_threshold;
mod blockdev_add;
mod blockdev_del;
mod blockdev_reopen;
mod blockdev_set_active;
mod change_backing_file;
mod query_block;
mod query_named_block_nodes;

use super::DaemonCommand;

pub(super) static COMMANDS: &[&dyn DaemonCommand] = &[
    &blockdev_add::COMMAND,
    &blockdev_reopen::COMMAND,
    &blockdev_del::COMMAND,
    &blockdev_set_active::COMMAND,
    &block_resize::COMMAND,
    &query_named_block_nodes::COMMAND,
    &query_block::COMMAND,
    &block_set_write_threshold::COMMAND,
    &change_backing_file::COMMAND,
];
