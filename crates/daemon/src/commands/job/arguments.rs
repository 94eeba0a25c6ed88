//! Arguments that several job commands share.

use std::marker::PhantomData;

use block::job::OnError;
use options::table::{self, Choice, Field, Row, put};

use crate::jobs::{CopyOptions, Sync};

/// The name of a job, as the only argument.
#[derive(Default)]
pub(super) struct JobName(pub(super) String);

impl JobName {
    pub(super) const ID: &'static [Field<Self>] = &[Self::argument("id")];
    pub(super) const DEVICE: &'static [Field<Self>] = &[Self::argument("device")];

    const fn argument(name: &'static str) -> Field<Self> {
        Row::required(name, "the job's name").text("<job-id>", |to, id| put(&mut to.0, id))
    }
}

/// The target type of the arguments of a job that copies.
pub(super) trait Copies: 'static {
    fn copy(&mut self) -> &mut CopyOptions;
}

/// Rows for tables of such arguments.
pub(super) struct Rows<T>(PhantomData<T>);

impl<T: Copies> Rows<T> {
    pub(super) const JOB_ID: Field<T> =
        Row::optional("job-id", "none, which is an error", "the job's name")
            .text("<job-id>", |to, id| put(&mut to.copy().job.id, id));
    pub(super) const SPEED: Field<T> =
        Row::default("speed", "0", "bytes a second at most; 0: as fast as it goes")
            .int(i64::MIN..=i64::MAX, |to, speed| put(&mut to.copy().speed, speed));
    pub(super) const FILTER: Field<T> = Row::optional(
        "filter-node-name",
        "a name is made up",
        "name of the node that is put above the image while the job runs",
    )
    .text("<node-name>", |to, name| put(&mut to.copy().filter_node_name, Some(name)));
    pub(super) const AUTO_FINALIZE: Field<T> = Row::default(
        "auto-finalize",
        "on",
        "make the job's changes without waiting for job-finalize",
    )
    .bool(|to, on| put(&mut to.copy().job.auto_finalize, on));
    pub(super) const AUTO_DISMISS: Field<T> = Row::default(
        "auto-dismiss",
        "on",
        "forget the job when it has ended, without waiting for job-dismiss",
    )
    .bool(|to, on| put(&mut to.copy().job.auto_dismiss, on));
    pub(super) const SOURCE: Field<T> = Row::required("device", "the node that is copied")
        .text("<node-name>", |to, name| put(&mut to.copy().device, name));
    pub(super) const TARGET: Field<T> = Row::required("target", "the node that it is copied to")
        .text("<node-name>", |to, name| put(&mut to.copy().target, name));
    pub(super) const FILTER_OF_SOURCE: Field<T> = Field {
        help: "name of the node that is put above the source while the job runs",
        ..Self::FILTER
    };
    pub(super) const FULL: Choice<T> =
        Choice::new("full", "all", |to| put(&mut to.copy().sync, Sync::Full));
    pub(super) const NONE: Choice<T> = Choice::new("none", "only data written from now on", |to| {
        put(&mut to.copy().sync, Sync::None)
    });
    pub(super) const TOP: Choice<T> =
        Choice::new("top", "only what the topmost image stores, not its backing images", |to| {
            put(&mut to.copy().sync, Sync::Top)
        });
    pub(super) const ON_SOURCE_ERROR: Field<T> =
        Row::default("on-source-error", "report", "when the source cannot be read")
            .choice(Words::<T, OfSource>::ALL);
    pub(super) const ON_TARGET_ERROR: Field<T> =
        Row::default("on-target-error", "report", "when the target cannot be written")
            .choice(Words::<T, OfTarget>::ALL);
    pub(super) const ON_ERROR: Field<T> =
        Row::default("on-error", "report", "when an image cannot be read or written")
            .choice(Words::<T, OfAll>::ALL);
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
        Choice::new("report", "the job fails", |to| Self::put(to, OnError::Report)),
        Choice::new(
            "ignore",
            "the job tries again later; a stream skips the part, and fails at its end",
            |to| Self::put(to, OnError::Ignore),
        ),
        Choice::new("enospc", "the job pauses when there is no space left, else fails", |to| {
            Self::put(to, OnError::Enospc)
        }),
        Choice::new("stop", "the job pauses", |to| Self::put(to, OnError::Stop)),
        Choice::new("auto", P::AUTO_HELP, |to| Self::put(to, P::AUTO)),
    ];

    fn put(to: &mut T, policy: OnError) -> table::Set {
        P::set(to.copy(), policy);
        Ok(())
    }
}
