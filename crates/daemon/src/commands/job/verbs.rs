//! Verbs for a job, with the job's name as the only argument: `job-pause`, and in its older form `block-job-pause`.

use control::qmp::Returns;

use super::super::Command;
use super::arguments::JobName;
use crate::jobs::JobVerb;

/// A command that gives a verb to a job.
pub(super) type VerbCommand = Command<JobName>;

macro_rules! verb {
    ($name:literal, $help:literal, $verb:expr) => {
        verb!($name, $help, ID, r#"{"id": "j0"}"#, tell_job, $verb)
    };
    ($name:literal, $help:literal, $argument:ident, $example:literal, $tell:ident, $verb:expr) => {
        Command {
            name: $name,
            help: $help,
            example: $example,
            arguments: JobName::$argument,
            returns: Returns::Nothing,
            records: true,
            run: |daemon, JobName(id)| Box::pin(async move { daemon.$tell(&id, $verb).await }),
        }
    };
}

/// A verb of the older form, whose argument is `id` or `device`.
macro_rules! old_verb {
    ($name:literal, $help:literal, ID, $verb:expr) => {
        verb!($name, $help, ID, r#"{"id": "j0"}"#, tell_block_job, $verb)
    };
    ($name:literal, $help:literal, DEVICE, $verb:expr) => {
        verb!($name, $help, DEVICE, r#"{"device": "j0"}"#, tell_block_job, $verb)
    };
}

pub(super) static CANCEL: VerbCommand =
    verb!("job-cancel", "cancel a job", JobVerb::Cancel { force: true });
pub(super) static PAUSE: VerbCommand = verb!("job-pause", "pause a job", JobVerb::Pause);
pub(super) static RESUME: VerbCommand = verb!("job-resume", "resume a paused job", JobVerb::Resume);
pub(super) static COMPLETE: VerbCommand = verb!(
    "job-complete",
    "end a mirror that is ready; its target replaces the source",
    JobVerb::Complete
);
pub(super) static FINALIZE: VerbCommand = verb!(
    "job-finalize",
    "let a job that was started with auto-finalize=false make its changes",
    JobVerb::Finalize
);
pub(super) static DISMISS: VerbCommand =
    verb!("job-dismiss", "remove a job that has ended from the list", JobVerb::Dismiss);

pub(super) static BLOCK_PAUSE: VerbCommand =
    old_verb!("block-job-pause", "as job-pause", DEVICE, JobVerb::Pause);
pub(super) static BLOCK_RESUME: VerbCommand =
    old_verb!("block-job-resume", "as job-resume", DEVICE, JobVerb::Resume);
pub(super) static BLOCK_COMPLETE: VerbCommand =
    old_verb!("block-job-complete", "as job-complete", DEVICE, JobVerb::Complete);
pub(super) static BLOCK_FINALIZE: VerbCommand =
    old_verb!("block-job-finalize", "as job-finalize", ID, JobVerb::Finalize);
pub(super) static BLOCK_DISMISS: VerbCommand =
    old_verb!("block-job-dismiss", "as job-dismiss", ID, JobVerb::Dismiss);
