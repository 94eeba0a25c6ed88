//! A connection's requests in flight: preallocated slots, and the steps of each request.

use event_loop::IoBufs;
use nbd_wire::client::ReplyHeader;
use nbd_wire::flag;
use nbd_wire::reply::ReplyMode;
use nbd_wire::request::{CommandType, RequestHeader, command_flag};
use nix::errno::Errno;

use super::agreed::Agreed;
use crate::request::{Op, Request};
use crate::status::{self, Extent, ExtentState};

/// Most requests at the server; further ones wait.
pub(super) const SLOTS: usize = 128;

/// Most bytes of a range without data in one command.
const MAX_RANGE: u64 = 1 << 30;

/// The state of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// No request.
    Free,
    /// Its command is to be sent, or is partly sent.
    Ready,
    /// Sent; the server works on it.
    Asked,
    /// Answered, but not sent completely.
    Answered,
    /// The command has ended, and its result was not processed yet.
    Over,
}

/// A place for a request.
pub(super) struct NbdSlot {
    pub(super) request: Option<Request>,
    pub(super) stage: Stage,
    /// The list that is being sent contains a part of it.
    pub(super) sending: bool,
    /// Distinguishes the successive commands of a slot, in cookies.
    pub(super) generation: u32,
    /// Bytes of the request that earlier commands have done.
    pub(super) done: u64,
    pub(super) command: CommandType,
    flags: u16,
    /// Bytes of the command's range.
    pub(super) len: u64,
    /// The written data is zeroes, not the request's memory.
    pub(super) zeroes: bool,
    /// Bytes of header and payload that were put into lists.
    pub(super) sent: usize,
    // ---- the reply so far ----
    /// Bytes of a read that were announced.
    pub(super) covered: u64,
    pub(super) error: Option<Errno>,
    pub(super) errors: u32,
    /// Extents written, and bytes that they describe.
    pub(super) extents: usize,
    pub(super) described: u64,
    pub(super) got_status: bool,
}

/// The next step of a request.
pub(super) enum Plan {
    /// A command for the server.
    Command,
    /// None: the request has ended.
    Done(Result<(), Errno>),
}

impl NbdSlot {
    pub(super) fn new() -> Self {
        NbdSlot {
            request: None,
            stage: Stage::Free,
            sending: false,
            generation: 0,
            done: 0,
            command: CommandType::Disconnect,
            flags: 0,
            len: 0,
            zeroes: false,
            sent: 0,
            covered: 0,
            error: None,
            errors: 0,
            extents: 0,
            described: 0,
            got_status: false,
        }
    }

    /// Offset of the command's range.
    pub(super) fn offset(&self) -> u64 {
        self.request.as_ref().map_or(0, |request| request.offset) + self.done
    }

    /// The command's header.
    pub(super) fn header(&self, tag: u32, mode: ReplyMode) -> RequestHeader {
        let mut flags = self.flags;
        if mode == ReplyMode::Extended && self.command == CommandType::Write {
            flags |= command_flag::PAYLOAD_LEN;
        }
        let offset = if self.command == CommandType::Flush { 0 } else { self.offset() };
        RequestHeader {
            flags,
            command: self.command,
            cookie: self.cookie(tag),
            offset,
            len: self.len,
        }
    }

    /// Bytes of payload that go with the command.
    pub(super) fn payload(&self) -> usize {
        if self.command == CommandType::Write { self.len as usize } else { 0 }
    }

    pub(super) fn cookie(&self, tag: u32) -> u64 {
        u64::from(self.generation) << 32 | u64::from(tag)
    }

    /// Queues the command, possibly again.
    pub(super) fn make_ready(&mut self) {
        self.generation = self.generation.wrapping_add(1);
        self.stage = Stage::Ready;
        self.sent = 0;
        self.covered = 0;
        self.error = None;
        self.errors = 0;
        self.extents = 0;
        self.described = 0;
        self.got_status = false;
    }

    /// Plans the next step of the request; `zeroes`: bytes of zeroes that one write may
    /// carry.
    pub(super) fn plan(&mut self, agreed: &Agreed, zeroes: usize) -> Plan {
        let Some(request) = &mut self.request else { return Plan::Done(Err(Errno::EIO)) };
        let has = |bit| agreed.flags & bit != 0;
        let left = request.len - self.done;
        let at = request.offset + self.done;
        // An export may end within the last sector.
        let here = left.min(agreed.size.saturating_sub(at));
        let max = u64::from(agreed.maximum);
        let range = MAX_RANGE - MAX_RANGE % u64::from(agreed.minimum);
        self.zeroes = false;
        let fua = |fua: bool| if fua && has(flag::SEND_FUA) { command_flag::FUA } else { 0 };
        let (command, flags, len) = match request.op {
            Op::Flush if !has(flag::SEND_FLUSH) => return Plan::Done(Ok(())),
            Op::Flush => (CommandType::Flush, 0, 0),
            Op::Discard if !has(flag::SEND_TRIM) || here == 0 => return Plan::Done(Ok(())),
            Op::Discard => (CommandType::Trim, 0, here.min(range)),
            Op::BlockStatus if agreed.allocation.is_none() || here == 0 => {
                let state = if here == 0 { ExtentState::Zeroes } else { ExtentState::Data };
                status::write_one(&mut request.bufs, Extent::own(left, state));
                return Plan::Done(Ok(()));
            }
            Op::BlockStatus => (CommandType::BlockStatus, 0, here.min(range)),
            Op::Read if here == 0 => {
                request.bufs.zero(self.done as usize, left as usize);
                return Plan::Done(Ok(()));
            }
            Op::Write { fua } | Op::WriteZeroes { fua, .. } if here == 0 => {
                let mut beyond = IoBufs::new();
                if request.op == (Op::Write { fua }) {
                    beyond.set_part(&request.bufs, self.done as usize, left as usize, usize::MAX);
                }
                if !beyond.is_zero() {
                    return Plan::Done(Err(Errno::ENOSPC));
                }
                // A server without the flag gets a flush afterwards.
                if !fua || self.done == 0 || has(flag::SEND_FUA) || !has(flag::SEND_FLUSH) {
                    return Plan::Done(Ok(()));
                }
                (CommandType::Flush, 0, 0)
            }
            Op::Read => (CommandType::Read, 0, here.min(max)),
            Op::Write { fua: wanted } => (CommandType::Write, fua(wanted), here.min(max)),
            Op::WriteZeroes { no_fallback: true, .. } if !has(flag::SEND_FAST_ZERO) => {
                return Plan::Done(Err(Errno::EOPNOTSUPP));
            }
            Op::WriteZeroes { may_unmap, no_fallback, fua: wanted }
                if has(flag::SEND_WRITE_ZEROES) =>
            {
                let hole = if may_unmap { 0 } else { command_flag::NO_HOLE };
                let fast = if no_fallback { command_flag::FAST_ZERO } else { 0 };
                (CommandType::WriteZeroes, fua(wanted) | hole | fast, here.min(max))
            }
            Op::WriteZeroes { fua: wanted, .. } => {
                self.zeroes = true;
                (CommandType::Write, fua(wanted), here.min(max).min(zeroes as u64))
            }
        };
        (self.command, self.flags, self.len) = (command, flags, len);
        self.make_ready();
        Plan::Command
    }

    /// Writes an extent of a block status, limited to the range.
    pub(super) fn put_extent(&mut self, len: u64, state: ExtentState) {
        let Some(request) = &mut self.request else { return };
        let len = len.min(self.len.saturating_sub(self.described));
        if len > 0 && status::put(&mut request.bufs, self.extents, Extent::own(len, state)) {
            self.extents += 1;
            self.described += len;
        }
    }
}

/// The cookie of a reply, which identifies the request.
pub(super) fn cookie_of(header: &ReplyHeader) -> u64 {
    match *header {
        ReplyHeader::Simple { cookie, .. } | ReplyHeader::Chunk { cookie, .. } => cookie,
    }
}
