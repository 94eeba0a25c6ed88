//! Arguments that several job commands share.

use std::marker::PhantomData;

use block::job::OnError;
use options::table::{self, Choice, Field, Kind, Need, put};

use crate::jobs::{CopyOptions, Sync};

/// The name of a job, as the only argument.
#[derive(Default)]
pub(super) struct JobName(pub(super) String);

impl JobName {
    pub(super) const ID: &'static [Field<Self>] = &[Self::argument("id")];
    pub(super) const DEVICE: &'static [Field<Self>] = &[Self::argument("device")];

    const fn argument(name: &'static str) -> Field<Self> {
        Field {
            name,
            kind: Kind::Text { meta: "<job-id>", set: |to, id| put(&mut to.0, id) },
            need: Need::Required,
            help: "the job's name",
        }
    }
}

/// The target type of the arguments of a job that copies.
pub(super) trait Copies: 'static {
    fn copy(&mut self) -> &mut CopyOptions;
}

/// Rows for tables of such arguments.
pub(super) struct Rows<T>(PhantomData<T>);

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
    pub(super) const SOURCE: Field<T> = Field {
        name: "device",
        kind: Kind::Text { meta: "<node-name>", set: |to, name| put(&mut to.copy().device, name) },
        need: Need::Required,
        help: "the node that is copied",
    };
    pub(super) const TARGET: Field<T> = Field {
        name: "target",
        kind: Kind::Text { meta: "<node-name>", set: |to, name| put(&mut to.copy().target, name) },
        need: Need::Required,
        help: "the node that it is copied to",
    };
    pub(super) const FILTER_OF_SOURCE: Field<T> = Field {
        help: "name of the node that is put above the source while the job runs",
        ..Self::FILTER
    };
    pub(super) const FULL: Choice<T> =
        Choice { name: "full", help: "all", set: |to| put(&mut to.copy().sync, Sync::Full) };
    pub(super) const NONE: Choice<T> = Choice {
        name: "none",
        help: "only data written from now on",
        set: |to| put(&mut to.copy().sync, Sync::None),
    };
    /// The same as `full` for a single image. Refused if the image has a backing image.
    pub(super) const TOP: Choice<T> =
        Choice::unoffered("top", |to| put(&mut to.copy().sync, Sync::Top));
    pub(super) const ON_SOURCE_ERROR: Field<T> = Field {
        name: "on-source-error",
        kind: Kind::Choice(Words::<T, OfSource>::ALL),
        need: Need::Default("report"),
        help: "when the source cannot be read",
    };
    pub(super) const ON_TARGET_ERROR: Field<T> = Field {
        name: "on-target-error",
        kind: Kind::Choice(Words::<T, OfTarget>::ALL),
        need: Need::Default("report"),
        help: "when the target cannot be written",
    };
    pub(super) const ON_ERROR: Field<T> = Field {
        name: "on-error",
        kind: Kind::Choice(Words::<T, OfAll>::ALL),
        need: Need::Default("report"),
        help: "when an image cannot be read or written",
    };
}

/// The errors that a policy applies to.
trait Policy {
    /// The meaning of the word `auto`.
    const AUTO: OnError;
    const AUTO_HELP: &'static str;

    fn set(copy: &mut CopyOptions, policy: OnError);
}

/// Errors of reads of the source.
struct OfSource;

impl Policy for OfSource {
    const AUTO: OnError = OnError::Report;
    const AUTO_HELP: &'static str = AUTO_OF_DEVICES;

    fn set(copy: &mut CopyOptions, policy: OnError) {
        copy.on_source_error = policy;
    }
}

/// Errors of writes to the target.
struct OfTarget;

impl Policy for OfTarget {
    const AUTO: OnError = OnError::Enospc;
    const AUTO_HELP: &'static str = AUTO_OF_DEVICES;

    fn set(copy: &mut CopyOptions, policy: OnError) {
        copy.on_target_error = policy;
    }
}

const AUTO_OF_DEVICES: &str =
    "as QEMU's devices do it: report errors of reads, pause without space";

/// All errors.
struct OfAll;

impl Policy for OfAll {
    const AUTO: OnError = OnError::Enospc;
    const AUTO_HELP: &'static str = "as enospc";

    fn set(copy: &mut CopyOptions, policy: OnError) {
        (copy.on_source_error, copy.on_target_error) = (policy, policy);
    }
}

/// The words of a policy.
struct Words<T, P>(PhantomData<(T, P)>);

impl<T: Copies, P: Policy + 'static> Words<T, P> {
    const ALL: &'static [Choice<T>] = &[
        Choice { name: "report", help: "the job fails", set: |to| Self::put(to, OnError::Report) },
        Choice {
            name: "ignore",
            help: "the job tries again later",
            set: |to| Self::put(to, OnError::Ignore),
        },
        Choice {
            name: "enospc",
            help: "the job pauses when there is no space left, else fails",
            set: |to| Self::put(to, OnError::Enospc),
        },
        Choice { name: "stop", help: "the job pauses", set: |to| Self::put(to, OnError::Stop) },
        Choice { name: "auto", help: P::AUTO_HELP, set: |to| Self::put(to, P::AUTO) },
    ];

    fn put(to: &mut T, policy: OnError) -> table::Set {
        P::set(to.copy(), policy);
        Ok(())
    }
}
