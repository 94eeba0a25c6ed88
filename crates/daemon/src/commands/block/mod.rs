//! Block nodes.

mod block_set_write_threshold;
mod change_backing_file;
mod query_block;

use super::DaemonCommand;

pub(super) static COMMANDS: &[&dyn DaemonCommand] =
    &[&query_block::COMMAND, &block_set_write_threshold::COMMAND, &change_backing_file::COMMAND];
