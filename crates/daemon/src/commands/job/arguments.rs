//! Arguments that several jobs have.

use block::job::OnError;
use control::job::CopyOptions;
use options::table::{Choice, Field, Kind, Need, put};

/// What the arguments of a job that copies are read into.
pub(super) trait Copies: 'static {
    fn copy(&mut self) -> &mut CopyOptions;
}

/// Rows of a table of such arguments.
pub(super) struct Rows<T>(std::marker::PhantomData<T>);

impl<T: Copies> Rows<T> {
    pub(super) const JOB_ID: Field<T> = Field {
        name: "job-id",
        kind: Kind::Text { meta: "<job-id>", set: |to, id| put(&mut to.copy().job.id, id) },
        need: Need::Optional("none, which is an error"),
        help: "the job's name",
    };
    pub(super) const SPEED: Field<T> = Field {
        name: "speed",
        kind: Kind::Int {
            range: i64::MIN..=i64::MAX,
            set: |to, speed| put(&mut to.copy().speed, speed),
        },
        need: Need::Default("0"),
        help: "bytes a second at most; 0: as fast as it goes",
    };
    pub(super) const FILTER: Field<T> = Field {
        name: "filter-node-name",
        kind: Kind::Text {
            meta: "<node-name>",
            set: |to, name| put(&mut to.copy().filter_node_name, Some(name)),
        },
        need: Need::Optional("a name is made up"),
        help: "name of the node that is put above the image while the job runs",
    };
    pub(super) const AUTO_FINALIZE: Field<T> = Field {
        name: "auto-finalize",
        kind: Kind::Bool(|to, on| put(&mut to.copy().job.auto_finalize, on)),
        need: Need::Default("on"),
        help: "make the job's changes without waiting for job-finalize",
    };
    pub(super) const AUTO_DISMISS: Field<T> = Field {
        name: "auto-dismiss",
        kind: Kind::Bool(|to, on| put(&mut to.copy().job.auto_dismiss, on)),
        need: Need::Default("on"),
        help: "forget the job when it has ended, without waiting for job-dismiss",
    };
    const POLICIES: &'static [Choice<T>] = &[
        Choice { name: "report", help: "the job fails", set: |to| set(to, OnError::Report) },
        Choice {
            name: "ignore",
            help: "the job tries again later",
            set: |to| set(to, OnError::Ignore),
        },
        Choice {
            name: "enospc",
            help: "the job pauses when there is no space left, else fails",
            set: |to| set(to, OnError::Enospc),
        },
        Choice { name: "stop", help: "the job pauses", set: |to| set(to, OnError::Stop) },
        Choice { name: "auto", help: "as enospc", set: |to| set(to, OnError::Enospc) },
    ];
    pub(super) const ON_ERROR: Field<T> = Field {
        name: "on-error",
        kind: Kind::Choice(Self::POLICIES),
        need: Need::Default("report"),
        help: "when an image cannot be read or written",
    };
}

fn set<T: Copies>(to: &mut T, policy: OnError) -> options::table::Set {
    let copy = to.copy();
    (copy.on_source_error, copy.on_target_error) = (policy, policy);
    Ok(())
}
