//! Jobs.

mod arguments;
mod block_commit;
mod block_job_cancel;
mod block_job_change;
mod block_job_set_speed;
mod block_stream;
pub(super) mod blockdev_backup;
mod blockdev_create;
mod blockdev_mirror;
mod by_driver;
mod query_block_jobs;
mod query_jobs;
mod verbs;
mod x_blockdev_amend;

use super::DaemonCommand;

pub(super) static COMMANDS: &[&dyn DaemonCommand] = &[
    &blockdev_create::COMMAND,
    &x_blockdev_amend::COMMAND,
    &blockdev_backup::COMMAND,
    &blockdev_mirror::COMMAND,
    &block_stream::COMMAND,
    &block_commit::COMMAND,
    &query_jobs::COMMAND,
    &query_block_jobs::COMMAND,
    &verbs::CANCEL,
    &verbs::PAUSE,
    &verbs::RESUME,
    &verbs::COMPLETE,
    &verbs::FINALIZE,
    &verbs::DISMISS,
    &block_job_cancel::COMMAND,
    &verbs::BLOCK_PAUSE,
    &verbs::BLOCK_RESUME,
    &verbs::BLOCK_COMPLETE,
    &verbs::BLOCK_FINALIZE,
    &verbs::BLOCK_DISMISS,
    &block_job_set_speed::COMMAND,
    &block_job_change::COMMAND,
];
