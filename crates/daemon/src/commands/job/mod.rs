//! Jobs.

mod arguments;
mod block_commit;
mod block_job_change;
mod block_stream;

use super::DaemonCommand;

pub(super) static COMMANDS: &[&dyn DaemonCommand] =
    &[&block_stream::COMMAND, &block_commit::COMMAND, &block_job_change::COMMAND];
