//! The state of a connection: requests in flight, bytes to send, and the parser of the server's
//! bytes. It does no I/O; the channel does.
//!
//! A server is not trusted. Whatever it sends, each request is answered once, no byte is written outside
//! the memory of the request that the reply is for, and no announced length makes this side allocate
//! memory.

use std::collections::VecDeque;

use event_loop::{AlignedBuf, Gather, IoBufs, Pool};
use nbd_wire::client::{ChunkKind, ReplyHeader, errno};
use nbd_wire::reply::{ReplyMode, allocation};
use nbd_wire::request::{CommandType, EXTENDED_HEADER_LEN};
use nbd_wire::{MAX_PAYLOAD, MAX_STRING};
use nix::errno::Errno;

use super::agreed::Agreed;
use super::slots::{NbdSlot, Plan, SLOTS, Stage, cookie_of};
use crate::request::Request;
use crate::status::ExtentState;

/// Bytes per receive, apart from data of reads that is known to follow.
const INPUT: usize = 32 << 10;
/// Zeroes per write, for a server without write-zeroes.
const ZEROES: usize = 64 << 10;
/// Most segments of an operation, `IOV_MAX`.
const MAX_SEGMENTS: usize = 1024;
/// Most bytes of one list, so that a reply does not wait long.
const MAX_LIST: usize = MAX_PAYLOAD as usize;
/// Most errors in one reply.
const MAX_ERRORS: u32 = 16;

/// The violated rule of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Violation(pub(super) &'static str);

/// The result of parsing.
pub(super) enum Next {
    /// A request has ended.
    Complete(Request, Result<(), Errno>),
    /// More bytes are needed.
    Input,
}

/// Meaning of the next bytes.
#[derive(Debug, Clone, Copy)]
enum Incoming {
    /// A header.
    Header,
    /// The start of a chunk: `need` bytes of its `len`.
    Prefix { tag: u32, kind: ChunkKind, last: bool, len: u64, need: usize },
    /// Data of a read, for its memory from `at` on.
    Data { tag: u32, last: bool, at: usize, left: usize },
    /// Extents.
    Extents { tag: u32, last: bool, left: u64 },
    /// Bytes that are ignored.
    Skip { tag: u32, last: bool, left: u64 },
}

pub(super) struct ClientState {
    pub(super) agreed: Agreed,
    slots: Pool<NbdSlot>,
    /// Requests that wait for a slot.
    waiting: VecDeque<Request>,
    /// Commands to be sent, in order.
    ready: VecDeque<u32>,
    /// Commands with a part in the list that is being sent.
    sending: Vec<u32>,
    /// Commands that have ended.
    over: VecDeque<u32>,
    headers: IoBufs,
    zeroes: IoBufs,
    send: Gather,
    // ---- what comes ----
    input: IoBufs,
    /// Start of the input that was not parsed yet.
    begin: usize,
    end: usize,
    incoming: Incoming,
    /// Bytes of the current receive that go straight to a request's memory.
    direct: usize,
    receive: Gather,
}

impl ClientState {
    /// `None`: out of memory.
    pub(super) fn new(agreed: Agreed) -> Option<Self> {
        Some(ClientState {
            agreed,
            slots: std::iter::repeat_with(NbdSlot::new).take(SLOTS).collect(),
            waiting: VecDeque::with_capacity(SLOTS),
            ready: VecDeque::with_capacity(SLOTS),
            sending: Vec::with_capacity(SLOTS),
            over: VecDeque::with_capacity(SLOTS),
            headers: AlignedBuf::io_bufs(SLOTS * EXTENDED_HEADER_LEN, 64)?,
            zeroes: AlignedBuf::io_bufs(ZEROES, 4096)?,
            send: Gather::with_capacity(2 * SLOTS),
            input: AlignedBuf::io_bufs(INPUT, 4096)?,
            begin: 0,
            end: 0,
            incoming: Incoming::Header,
            direct: 0,
            receive: Gather::with_capacity(2),
        })
    }

    // ---- requests ------------------------------------------------------------------------------

    /// Takes a request, or returns it with its answer.
    pub(super) fn submit(&mut self, request: Request) -> Option<(Request, Result<(), Errno>)> {
        let Some(tag) = self.slots.take() else {
            self.waiting.push_back(request);
            return None;
        };
        self.begin(tag, request)
    }

    fn begin(&mut self, tag: u32, request: Request) -> Option<(Request, Result<(), Errno>)> {
        let slot = self.slots.get_mut(tag)?;
        slot.request = Some(request);
        slot.done = 0;
        slot.command = CommandType::Disconnect;
        self.go_on(tag)
    }

    fn go_on(&mut self, tag: u32) -> Option<(Request, Result<(), Errno>)> {
        let slot = self.slots.get_mut(tag)?;
        match slot.plan(&self.agreed, ZEROES) {
            Plan::Command => {
                self.ready.push_back(tag);
                None
            }
            Plan::Done(result) => self.end(tag, result),
        }
    }

    fn end(&mut self, tag: u32, result: Result<(), Errno>) -> Option<(Request, Result<(), Errno>)> {
        let slot = self.slots.get_mut(tag)?;
        slot.stage = Stage::Free;
        let request = slot.request.take()?;
        self.slots.give(tag);
        Some((request, result))
    }

    /// The number of requests in flight or waiting.
    pub(super) fn requests(&self) -> usize {
        self.slots.in_use() + self.waiting.len()
    }

    /// Removes the next request, to fail it. No operation is in flight on the socket.
    pub(super) fn next_failed(&mut self) -> Option<Request> {
        let taken = self.slots.iter().position(|slot| slot.request.is_some());
        match taken {
            Some(tag) => self.end(tag as u32, Err(Errno::EIO)).map(|(request, _)| request),
            None => {
                self.ready.clear();
                self.over.clear();
                self.waiting.pop_front()
            }
        }
    }

    // ---- out -----------------------------------------------------------------------------------

    /// Whether there is something to send.
    pub(super) fn has_commands(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Collects commands and their data in one list, which counts as being sent until
    /// [`sent`](Self::sent).
    pub(super) fn gather(&mut self, list: &mut IoBufs) {
        self.send.begin(list);
        while let Some(&tag) = self.ready.front() {
            let room = MAX_SEGMENTS - list.iovecs().len();
            if room < 2 || list.len() >= MAX_LIST {
                return;
            }
            let Some(slot) = self.slots.get_mut(tag) else { return };
            if !slot.sending {
                slot.sending = true;
                self.sending.push(tag);
            }
            let extended = self.agreed.mode == ReplyMode::Extended;
            let (bytes, header_len) = slot.header(tag, self.agreed.mode).encode(extended);
            if slot.sent == 0 {
                let at = tag as usize * EXTENDED_HEADER_LEN;
                self.headers.copy_in(at, &bytes[..header_len]);
                slot.sent = self.send.append(list, &self.headers, at, header_len, 1);
            }
            let whole = header_len + slot.payload();
            let (memory, base) = match &slot.request {
                Some(request) if !slot.zeroes => (&request.bufs, slot.done as usize),
                _ => (&self.zeroes, 0),
            };
            let at = base + slot.sent - header_len;
            slot.sent += self.send.append(list, memory, at, whole - slot.sent, room - 1);
            if slot.sent < whole {
                return;
            }
            slot.stage = Stage::Asked;
            self.ready.pop_front();
        }
    }

    /// Records that the collected list was sent, or never will be.
    pub(super) fn sent(&mut self, list: &mut IoBufs) {
        self.send.release(list);
        while let Some(tag) = self.sending.pop() {
            let Some(slot) = self.slots.get_mut(tag) else { continue };
            slot.sending = false;
            if slot.stage == Stage::Answered {
                slot.stage = Stage::Over;
                self.over.push_back(tag);
            }
        }
    }

    /// Records the end of the connection, without operations in flight. All unanswered requests will be sent
    /// again.
    pub(super) fn disconnected(&mut self, list: &mut IoBufs) {
        self.sent(list);
        (self.begin, self.end) = (0, 0);
        self.incoming = Incoming::Header;
        self.ready.clear();
        for (tag, slot) in (0..).zip(self.slots.iter_mut()) {
            if matches!(slot.stage, Stage::Ready | Stage::Asked) {
                slot.make_ready();
                self.ready.push_back(tag);
            }
        }
    }

    /// Records a new connection.
    pub(super) fn connected(&mut self, agreed: Agreed) {
        self.agreed = agreed;
        // The new limits may differ.
        self.ready.clear();
        for (tag, slot) in (0..).zip(self.slots.iter_mut()) {
            if slot.stage == Stage::Ready {
                match slot.plan(&agreed, ZEROES) {
                    Plan::Command => self.ready.push_back(tag),
                    Plan::Done(result) => {
                        slot.error = result.err();
                        (slot.command, slot.len) = (CommandType::Disconnect, 0);
                        slot.stage = Stage::Over;
                        self.over.push_back(tag);
                    }
                }
            }
        }
    }

    // ---- in ------------------------------------------------------------------------------------

    /// Puts the memory for the next bytes into the list.
    pub(super) fn input_memory(&mut self, list: &mut IoBufs) {
        if self.begin > 0 {
            let left = self.end - self.begin;
            // Less than a header or record: a few bytes.
            let mut rest = [0; 64];
            if let Some(rest) = rest.get_mut(..left) {
                self.input.copy_out(self.begin, rest);
                self.input.copy_in(0, rest);
            }
            (self.begin, self.end) = (0, left);
        }
        self.receive.begin(list);
        self.direct = 0;
        if let Incoming::Data { tag, at, left, .. } = self.incoming
            && let Some(slot) = self.slots.get(tag)
            && let Some(request) = &slot.request
        {
            self.direct = self.receive.append(list, &request.bufs, at, left, MAX_SEGMENTS - 1);
            if self.direct < left {
                return;
            }
        }
        self.receive.append(list, &self.input, self.end, INPUT - self.end, 1);
    }

    /// Records that so many bytes have arrived in that memory; not zero.
    pub(super) fn received(&mut self, mut bytes: usize, list: &mut IoBufs) {
        self.receive.release(list);
        let direct = std::mem::take(&mut self.direct).min(bytes);
        if let Incoming::Data { at, left, .. } = &mut self.incoming {
            *at += direct;
            *left -= direct;
            bytes -= direct;
        }
        self.end = (self.end + bytes).min(INPUT);
    }

    /// Parses the received bytes.
    ///
    /// # Errors
    ///
    /// The server has violated the protocol.
    pub(super) fn next(&mut self) -> Result<Next, Violation> {
        loop {
            while let Some(tag) = self.over.pop_front() {
                if let Some((request, result)) = self.command_over(tag) {
                    return Ok(Next::Complete(request, result));
                }
            }
            while self.slots.has_free()
                && let Some(request) = self.waiting.pop_front()
            {
                if let Some((request, result)) = self.submit(request) {
                    return Ok(Next::Complete(request, result));
                }
            }
            if !self.step()? {
                return Ok(Next::Input);
            }
        }
    }

    /// Processes the end of a command.
    fn command_over(&mut self, tag: u32) -> Option<(Request, Result<(), Errno>)> {
        let slot = self.slots.get_mut(tag)?;
        if let Some(errno) = slot.error {
            return self.end(tag, Err(errno));
        }
        if slot.command == CommandType::BlockStatus {
            let described = slot.extents > 0;
            if let Some(request) = &mut slot.request {
                crate::status::end_after(
                    &mut request.bufs,
                    slot.extents * crate::status::EXTENT_LEN,
                );
            }
            return self.end(tag, if described { Ok(()) } else { Err(Errno::EIO) });
        }
        if slot.command == CommandType::Flush {
            return self.end(tag, Ok(()));
        }
        slot.done += slot.len;
        self.go_on(tag)
    }

    /// Parses one item of the input. `false`: it is incomplete.
    fn step(&mut self) -> Result<bool, Violation> {
        match self.incoming {
            Incoming::Header => self.header(),
            Incoming::Prefix { tag, kind, last, len, need } => {
                let mut bytes = [0; 16];
                if self.end - self.begin < need {
                    return Ok(false);
                }
                self.take(&mut bytes[..need]);
                self.prefix(tag, kind, last, len - need as u64, bytes)?;
                Ok(true)
            }
            Incoming::Data { tag, last, left: 0, .. } => self.chunk_over(tag, last),
            Incoming::Data { tag, at, left, last } => {
                let here = left.min(self.end - self.begin);
                if here == 0 {
                    return Ok(false);
                }
                let slot = self.slots.get_mut(tag);
                if let Some(request) = slot.and_then(|slot| slot.request.as_mut()) {
                    self.input.copy_to(self.begin, &mut request.bufs, at, here);
                }
                self.begin += here;
                self.incoming = Incoming::Data { tag, last, at: at + here, left: left - here };
                Ok(true)
            }
            Incoming::Extents { tag, last, left: 0 } => self.chunk_over(tag, last),
            Incoming::Extents { tag, last, left } => self.extent(tag, last, left),
            Incoming::Skip { tag, last, left: 0 } => self.chunk_over(tag, last),
            Incoming::Skip { tag, last, left } => {
                let here = (self.end - self.begin).min(usize::try_from(left).unwrap_or(usize::MAX));
                if here == 0 {
                    return Ok(false);
                }
                self.begin += here;
                self.incoming = Incoming::Skip { tag, last, left: left - here as u64 };
                Ok(true)
            }
        }
    }

    /// Removes available bytes from the input's front.
    fn take(&mut self, bytes: &mut [u8]) {
        self.begin += self.input.copy_out(self.begin, bytes);
    }

    fn header(&mut self) -> Result<bool, Violation> {
        let mut bytes = [0; nbd_wire::client::MAX_REPLY_HEADER];
        let there = bytes.len().min(self.end - self.begin);
        self.input.copy_out(self.begin, &mut bytes[..there]);
        let (header, len) = match ReplyHeader::parse(&bytes[..there], self.agreed.mode) {
            None => return Ok(false),
            Some(Err(nonsense)) => return Err(Violation(nonsense.0)),
            Some(Ok(header)) => header,
        };
        self.begin += len;
        let cookie = cookie_of(&header);
        let tag = cookie as u32;
        let structured = self.agreed.mode != ReplyMode::Simple;
        let slot = self.slots.get_mut(tag);
        let slot = slot.filter(|slot| slot.stage == Stage::Asked && slot.cookie(tag) == cookie);
        let slot = slot.ok_or(Violation("a reply to nothing that was asked for"))?;
        let is_read = slot.command == CommandType::Read;
        let is_status = slot.command == CommandType::BlockStatus;
        match header {
            ReplyHeader::Simple { error: 0, .. } if is_read && structured => {
                Err(Violation("a simple reply to a read"))
            }
            ReplyHeader::Simple { error: 0, .. } if is_status => {
                Err(Violation("a simple reply to a block status request"))
            }
            ReplyHeader::Simple { error: 0, .. } if is_read => {
                slot.covered = slot.len;
                let (at, left) = (slot.done as usize, slot.len as usize);
                self.incoming = Incoming::Data { tag, last: true, at, left };
                Ok(true)
            }
            ReplyHeader::Simple { error, .. } => {
                if error != 0 {
                    slot.error = Some(errno(error));
                }
                self.chunk_over(tag, true)
            }
            ReplyHeader::Chunk { kind, done, len, .. } => {
                let need = announced(slot, self.agreed.mode, kind, done, len)?;
                if need == 0 {
                    return self.chunk_over(tag, done);
                }
                self.incoming = Incoming::Prefix { tag, kind, last: done, len, need };
                Ok(true)
            }
        }
    }

    /// Parses the start of a chunk; `left` bytes of the chunk follow.
    fn prefix(
        &mut self,
        tag: u32,
        kind: ChunkKind,
        last: bool,
        left: u64,
        bytes: [u8; 16],
    ) -> Result<(), Violation> {
        const OUTSIDE: Violation = Violation("data that were not asked for");
        let Some(slot) = self.slots.get_mut(tag) else { return Err(OUTSIDE) };
        let [a, b, c, d, rest @ ..] = bytes;
        let number = u32::from_be_bytes([a, b, c, d]);
        let [e, f, g, h, i, j, k, l, ..] = rest;
        let offset = u64::from_be_bytes([a, b, c, d, e, f, g, h]);
        let from = offset.wrapping_sub(slot.offset());
        let at = slot.done as usize;
        // Checked against the request's length, which is the length of its memory.
        let place = |len: u64| match from.checked_add(len) {
            Some(end) if from < slot.len && end <= slot.len => Ok(at + from as usize),
            _ => Err(OUTSIDE),
        };
        self.incoming = match kind {
            ChunkKind::OffsetData => {
                let at = place(left)?;
                slot.covered += left;
                Incoming::Data { tag, last, at, left: left as usize }
            }
            ChunkKind::OffsetHole => {
                let len = u64::from(u32::from_be_bytes([i, j, k, l]));
                if len == 0 || len > slot.len - slot.covered {
                    return Err(OUTSIDE);
                }
                let at = place(len)?;
                slot.covered += len;
                if let Some(request) = &mut slot.request {
                    request.bufs.zero(at, len as usize);
                }
                Incoming::Skip { tag, last, left: 0 }
            }
            ChunkKind::BlockStatus | ChunkKind::BlockStatusExt => {
                if self.agreed.allocation != Some(number) {
                    return Err(Violation("the status of a context that was not asked for"));
                }
                Incoming::Extents { tag, last, left }
            }
            _ => {
                if number == 0 {
                    return Err(Violation("an error that is none"));
                }
                slot.error.get_or_insert(errno(number));
                Incoming::Skip { tag, last, left }
            }
        };
        Ok(())
    }

    fn extent(&mut self, tag: u32, last: bool, left: u64) -> Result<bool, Violation> {
        let size = if self.agreed.mode == ReplyMode::Extended { 16 } else { 8 };
        let mut bytes = [0; 16];
        if self.end - self.begin < size {
            return Ok(false);
        }
        self.take(&mut bytes[..size]);
        let [a, b, c, d, e, f, g, h, low @ ..] = bytes;
        let first = u64::from_be_bytes([a, b, c, d, e, f, g, h]);
        let (len, flags) = match size {
            16 => (first, u64::from_be_bytes(low)),
            _ => (first >> 32, first & u64::from(u32::MAX)),
        };
        if len == 0 {
            return Err(Violation("an extent of no length"));
        }
        let (hole, zero) = (u64::from(allocation::HOLE), u64::from(allocation::ZERO));
        let state = match (flags & hole != 0, flags & zero != 0) {
            (true, true) => ExtentState::Hole,
            (false, true) => ExtentState::Zeroes,
            // A hole that does not read as zeroes has unknown contents.
            (_, false) => ExtentState::Data,
        };
        if let Some(slot) = self.slots.get_mut(tag) {
            slot.put_extent(len, state);
        }
        self.incoming = Incoming::Extents { tag, last, left: left.saturating_sub(size as u64) };
        Ok(true)
    }

    /// Processes the end of a chunk or of a simple reply.
    fn chunk_over(&mut self, tag: u32, last: bool) -> Result<bool, Violation> {
        self.incoming = Incoming::Header;
        let Some(slot) = self.slots.get_mut(tag).filter(|_| last) else {
            return Ok(true);
        };
        let is_read = slot.command == CommandType::Read;
        if is_read && slot.error.is_none() && slot.covered < slot.len {
            return Err(Violation("the answer to a read lacks data"));
        }
        if slot.sending {
            slot.stage = Stage::Answered;
        } else {
            slot.stage = Stage::Over;
            self.over.push_back(tag);
        }
        Ok(true)
    }
}

/// Checks a chunk against its request. Returns how many bytes of its start are needed to
/// parse it.
fn announced(
    slot: &mut NbdSlot,
    mode: ReplyMode,
    kind: ChunkKind,
    last: bool,
    len: u64,
) -> Result<usize, Violation> {
    let is_read = slot.command == CommandType::Read;
    let is_status = slot.command == CommandType::BlockStatus && !slot.got_status;
    let extended = mode == ReplyMode::Extended;
    let most = u64::from(MAX_PAYLOAD);
    match kind {
        ChunkKind::None if len == 0 && last => Ok(0),
        ChunkKind::OffsetData if is_read && len > 8 && len - 8 <= slot.len - slot.covered => Ok(8),
        ChunkKind::OffsetHole if is_read && len == 12 => Ok(12),
        ChunkKind::BlockStatus
            if is_status && !extended && (12..=most).contains(&len) && len % 8 == 4 =>
        {
            slot.got_status = true;
            Ok(4)
        }
        ChunkKind::BlockStatusExt
            if is_status && extended && (24..=most).contains(&len) && len % 16 == 8 =>
        {
            slot.got_status = true;
            Ok(8)
        }
        ChunkKind::Error
            if (6..=MAX_STRING as u64 + 64).contains(&len) && slot.errors < MAX_ERRORS =>
        {
            slot.errors += 1;
            Ok(6)
        }
        _ => Err(Violation("a chunk that does not fit to what was asked for, or is too long")),
    }
}

impl tls::Sink for ClientState {
    fn input_memory(&mut self, place: &mut IoBufs) {
        ClientState::input_memory(self, place);
    }

    fn received(&mut self, bytes: usize, place: &mut IoBufs) {
        ClientState::received(self, bytes, place);
    }
}
