//! Jobs.

mod block_job_change;

use super::DaemonCommand;

pub(super) static COMMANDS: &[&dyn DaemonCommand] = &[&block_job_change::COMMAND];
