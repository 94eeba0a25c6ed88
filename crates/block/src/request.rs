//! A request to a block node, and the obligation to answer it exactly once.

use std::rc::Rc;

use event_loop::IoBufs;
use nix::errno::Errno;

use crate::status::{self, Extent, ExtentState};

/// An operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Fill the buffers from the range.
    Read,
    /// Write the buffers to the range.
    Write {
        /// Force unit access: on stable storage before the answer.
        fua: bool,
    },
    /// Everything answered before is on stable storage before this answer.
    Flush,
    /// The range's contents are no longer needed.
    Discard,
    /// The range reads as zeroes afterwards.
    WriteZeroes {
        /// The space may be given back.
        may_unmap: bool,
        /// Fail with `EOPNOTSUPP` instead of writing zeroes as data.
        no_fallback: bool,
        /// Force unit access, as in a write.
        fua: bool,
    },
    /// Report what is stored in the range: fills the one segment of the buffers with
    /// [extents](crate::status::Extent), from the range's start on: at least one, and
    /// as many as are known and fit. [`status::put`] writes one; `EOPNOTSUPP` is one of data.
    BlockStatus,
}

impl Op {
    /// Returns whether the operation leaves the disk unchanged.
    ///
    /// A read-only node accepts it then.
    pub fn only_reads(&self) -> bool {
        matches!(self, Op::Read | Op::Flush | Op::BlockStatus)
    }

    /// Returns the errno for a request beyond the end of a node that cannot grow.
    ///
    /// A write finds no space there, as on a full file system. A format on top of the node reports a full disk then.
    pub fn beyond_end(&self) -> Errno {
        match self {
            Op::Write { .. } | Op::WriteZeroes { .. } => Errno::ENOSPC,
            Op::Read | Op::Flush | Op::Discard | Op::BlockStatus => Errno::EIO,
        }
    }
}

/// What of an image a request of its format is for: `blkdebug` has an event for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Part {
    /// Data of the disk; also of a request that no format has made.
    #[default]
    Data,
    /// The same, compressed.
    Compressed,
    /// An L1 table.
    L1,
    /// An L2 table.
    L2,
    /// The refcount table.
    RefcountTable,
    /// A refcount block.
    RefcountBlock,
    /// Other metadata, such as the header.
    Other,
}

/// A request on its way down the graph, owned by the node that processes it.
///
/// Moves, never copied: it ends in [`Request::complete`].
#[derive(Debug)]
pub struct Request {
    /// What to do.
    pub op: Op,
    /// First byte of the range, in bytes from the disk's beginning. Zero for a flush.
    pub offset: u64,
    /// Bytes in the range. For reads and writes it is `bufs.len()`; zero for a flush.
    pub len: u64,
    /// The memory of a read, write or block status; empty for all others.
    pub bufs: IoBufs,
    /// Of a write: it is stored compressed, by a node that [can do so](crate::node::BlockNode::compresses).
    pub(crate) compress: bool,
    pub(crate) part: Part,
    reply: CompletionGuard,
}

impl Request {
    /// Creates a request for `len` bytes from byte `offset` on.
    ///
    /// The answer goes to `to` with `tag`, the requester's own number.
    #[inline]
    pub fn new(
        op: Op,
        offset: u64,
        len: u64,
        bufs: IoBufs,
        to: &Rc<dyn RequestOwner>,
        tag: u32,
    ) -> Self {
        debug_assert!(!matches!(op, Op::Read | Op::Write { .. }) || bufs.len() as u64 == len);
        let reply = CompletionGuard { to: Some(to.clone()), tag };
        Request { op, offset, len, bufs, compress: false, part: Part::Data, reply }
    }

    /// Creates a request again for a `reply` that is still owed.
    pub(crate) fn answered_to(
        reply: CompletionGuard,
        op: Op,
        offset: u64,
        len: u64,
        bufs: IoBufs,
    ) -> Self {
        Request { op, offset, len, bufs, compress: false, part: Part::Data, reply }
    }

    /// The requester's number of the request.
    pub(crate) fn tag(&self) -> u32 {
        self.reply.tag()
    }

    /// Has the data of a write stored compressed.
    ///
    /// For a node that [can do so](crate::node::BlockNode::compresses).
    #[must_use]
    pub fn compressed(self) -> Self {
        Request { compress: matches!(self.op, Op::Write { .. }), ..self }
    }

    /// Answers the request. The memory goes back with the answer.
    ///
    /// `EOPNOTSUPP` for a block status means that the node knows no more than that all of the range may be data.
    #[inline]
    pub fn complete(self, result: Result<(), Errno>) {
        if result == Err(Errno::EOPNOTSUPP) && self.op == Op::BlockStatus {
            return self.complete_as_data();
        }
        let Request { bufs, mut reply, .. } = self;
        reply.send(result, bufs);
    }

    #[cold]
    fn complete_as_data(self) {
        let Request { mut bufs, len, mut reply, .. } = self;
        status::write_one(&mut bufs, Extent::own(len, ExtentState::Data));
        reply.send(Ok(()), bufs);
    }

    /// Answers that the request was held: see [`RequestOwner::given_up`].
    ///
    /// It is neither done nor failed.
    #[cold]
    pub fn give_up(self) {
        let Request { bufs, mut reply, .. } = self;
        if let Some(to) = reply.to.take() {
            to.given_up(reply.tag, bufs);
        }
    }

    /// The request without its memory, which is used elsewhere meanwhile.
    #[inline]
    pub(crate) fn detach(self) -> (Detached, IoBufs) {
        let Request { op, offset, len, bufs, compress, part, reply } = self;
        (Detached { op, offset, len, compress, part, reply }, bufs)
    }

    /// Directs the answer of this request to `to` with `tag`.
    ///
    /// Returns the original answer. A node that splits, bounces or watches requests uses this.
    pub fn intercept(&mut self, to: &Rc<dyn RequestOwner>, tag: u32) -> CompletionGuard {
        std::mem::replace(&mut self.reply, CompletionGuard { to: Some(to.clone()), tag })
    }
}

/// A [`Request`] without its memory.
#[derive(Debug)]
pub(crate) struct Detached {
    op: Op,
    offset: u64,
    len: u64,
    compress: bool,
    part: Part,
    reply: CompletionGuard,
}

impl Detached {
    /// What to do.
    #[inline]
    pub(crate) fn op(&self) -> Op {
        self.op
    }

    /// Bytes in the range.
    #[inline]
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// The request with its memory back.
    pub(crate) fn attach(self, bufs: IoBufs) -> Request {
        let Detached { op, offset, len, compress, part, reply } = self;
        Request { op, offset, len, bufs, compress, part, reply }
    }

    /// Answers the request, with its memory.
    #[inline]
    pub(crate) fn complete(mut self, result: Result<(), Errno>, bufs: IoBufs) {
        self.reply.send(result, bufs);
    }
}

/// An answer that is owed.
///
/// Dropping it unsent is a bug: a debug build panics, a release build answers `EIO`, because a guest that waits
/// for ever is worse.
pub struct CompletionGuard {
    to: Option<Rc<dyn RequestOwner>>,
    tag: u32,
}

impl CompletionGuard {
    /// The requester's number of the request.
    pub(crate) fn tag(&self) -> u32 {
        self.tag
    }

    /// Sends the answer.
    #[inline]
    pub fn send(&mut self, result: Result<(), Errno>, bufs: IoBufs) {
        if let Some(to) = self.to.take() {
            to.complete(self.tag, result, bufs);
        }
    }
}

impl CompletionGuard {
    #[cold]
    fn was_dropped(&mut self) {
        debug_assert!(std::thread::panicking(), "request {} dropped unanswered", self.tag);
        self.send(Err(Errno::EIO), IoBufs::new());
    }
}

impl Drop for CompletionGuard {
    #[inline]
    fn drop(&mut self) {
        if self.to.is_some() {
            self.was_dropped();
        }
    }
}

impl std::fmt::Debug for CompletionGuard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CompletionGuard({})", self.tag)
    }
}

/// Receives the answers of requests.
///
/// Called once per request, on the loop that the request was submitted on, possibly from within
/// [`Channel::submit`](crate::node::Channel::submit): an implementation must not hold a borrow of
/// its state while it submits. An I/O error keeps its errno; the device maps it to its own status.
pub trait RequestOwner {
    /// Takes the answer to the request with this tag, and the request's memory.
    fn complete(&self, tag: u32, result: Result<(), Errno>, bufs: IoBufs);

    /// Takes back the request with this tag, neither done nor failed.
    ///
    /// The request was held, as by an error policy, and its queue stops. An owner that cannot leave the request to
    /// the next process answers `ECANCELED`.
    fn given_up(&self, tag: u32, bufs: IoBufs) {
        self.complete(tag, Err(Errno::ECANCELED), bufs);
    }
}
