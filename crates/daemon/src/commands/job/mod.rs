//! Jobs.

mod arguments;
mod block_commit;
mod block_job_cancel;
mod block_job_change;
mod block_job_complete;
mod block_job_dismiss;
mod block_job_finalize;
mod block_job_pause;
mod block_job_resume;
mod block_job_set_speed;
mod block_stream;
pub(super) mod blockdev_backup;
mod blockdev_create;
mod blockdev_mirror;
mod by_driver;
mod job_cancel;
mod job_complete;
mod job_dismiss;
mod job_finalize;
mod job_pause;
mod job_resume;
mod query_block_jobs;
mod query_jobs;
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
    &job_cancel::COMMAND,
    &job_pause::COMMAND,
    &job_resume::COMMAND,
    &job_complete::COMMAND,
    &job_finalize::COMMAND,
    &job_dismiss::COMMAND,
    &block_job_cancel::COMMAND,
    &block_job_pause::COMMAND,
    &block_job_resume::COMMAND,
    &block_job_complete::COMMAND,
    &block_job_finalize::COMMAND,
    &block_job_dismiss::COMMAND,
    &block_job_set_speed::COMMAND,
    &block_job_change::COMMAND,
];
