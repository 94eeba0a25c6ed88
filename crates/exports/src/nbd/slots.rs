//! A connection's requests under way: preallocated, and as many as a client may have.

use event_loop::IoBufs;
use stats::Kind;

use super::arena::Extent;
use super::session::transmission::Command;
use super::wire::reply::{Asked, Reply};

/// Requests of a connection that are under way at once, replies not sent included. What a client
/// sends beyond that waits in its socket.
pub(super) const SLOTS: usize = 128;

/// A request under way.
pub(super) struct NbdSlot {
    pub(super) asked: Asked,
    pub(super) command: Command,
    /// Memory of its data.
    pub(super) memory: Option<Extent>,
    /// The list that goes down with it; kept for its capacity.
    pub(super) bufs: IoBufs,
    /// The answer, once there is one.
    pub(super) reply: Reply,
    /// Bytes of data that go with the reply, from the beginning of `memory`.
    pub(super) data: usize,
    /// The data is the whole reply, with its headers.
    pub(super) is_whole: bool,
    /// A flush of it is under way: the second half of what is to be on stable storage.
    pub(super) flushing: bool,
    /// Loop time at which it was taken, nanoseconds.
    pub(super) started_ns: u64,
}

impl NbdSlot {
    pub(super) fn new() -> Self {
        NbdSlot {
            asked: Asked { cookie: 0, offset: 0 },
            command: Command::Nothing,
            memory: None,
            bufs: IoBufs::with_capacity(1),
            reply: Reply::Done,
            data: 0,
            is_whole: false,
            flushing: false,
            started_ns: 0,
        }
    }

    /// Makes it that of another request.
    pub(super) fn begin(&mut self, asked: Asked, command: Command, now_ns: u64) {
        self.asked = asked;
        self.command = command;
        self.reply = Reply::Done;
        self.data = 0;
        self.is_whole = false;
        self.flushing = false;
        self.started_ns = now_ns;
    }
}

/// What a command is counted as, and its range; bytes are 0 where it has none, or moves none.
pub(super) fn counted(command: &Command) -> (Kind, u64, u64) {
    match *command {
        Command::Read { offset, len, .. } => (Kind::Read, offset, len.into()),
        Command::Write { offset, len, .. } => (Kind::Write, offset, len.into()),
        Command::Flush => (Kind::Flush, 0, 0),
        Command::Trim { offset, len, .. } => (Kind::Discard, offset, len),
        Command::WriteZeroes { offset, len, .. } => (Kind::WriteZeroes, offset, len),
        Command::Cache { offset, .. } | Command::BlockStatus { offset, .. } => {
            (Kind::Other, offset, 0)
        }
        Command::Nothing => (Kind::Other, 0, 0),
    }
}
