//! The state of a connection in the transmission phase: received bytes, requests in flight, replies to be
//! sent.
//!
//! This module makes no calls outwards; [`Connection`](super::connection::Connection) does.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::Arc;

use block::request::Op;
use block::track::DirtyBitmap;
use event_loop::{IoBufs, Pool};
use nix::errno::Errno;
use stats::InFlight;
use trace::trace;

use super::arena::{Arena, HEADERS, INPUT};
use super::extents::{self, Chunks};
use super::holes::Out;
use super::probes;
use super::session::transmission::{Agreed, Command, Contexts, Verdict};
use super::slots::{NbdSlot, SLOTS, counted};
use super::wire::MAX_PAYLOAD;
use super::wire::reply::{Asked, MAX_HEADER, NbdError, Reply, ReplyMode};
use super::wire::request::{
    CommandType, EXTENDED_HEADER_LEN, HEADER_LEN, RequestHeader, command_flag,
};

/// Most holes in the replies that are sent together. Further zeroes are sent as data. A hole takes up to
/// three of the 1024 segments that the kernel takes at once.
const MAX_HOLES: usize = (1024 - 2 * SLOTS) / 3;

/// No command has this flag.
const UNKNOWN_FLAG: u16 = 1 << 15;

/// Why a client is served no longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum End {
    /// It said so, or closed the connection.
    #[error("the client left")]
    Left,
    /// It closed the connection within a message.
    #[error("the client left in the middle of a message")]
    CutShort,
    /// Its socket failed.
    #[error("its socket failed: {}", .0.desc())]
    Socket(Errno),
    /// TLS failed.
    #[error("TLS failed: {0}")]
    Tls(&'static str),
    /// What it sent is no request.
    #[error("{0:#x} is not the beginning of a request")]
    BadMagic(u32),
    /// It announced a payload longer than any may be.
    #[error("a payload of {0} bytes is announced; {MAX_PAYLOAD} are the most")]
    TooLong(u64),
    /// The export is being stopped.
    #[error("the export is being stopped")]
    Stopped,
}

/// What the next bytes are.
enum Incoming {
    /// A header.
    Header,
    /// The payload of a write, of which `got` bytes are there.
    Payload { tag: u32, len: usize, got: usize },
    /// The payload of a request that is refused.
    Skip { left: usize, header: RequestHeader, error: NbdError },
}

/// What came of looking for the next request.
pub(super) enum Next {
    /// It goes down the channel.
    Submit { op: Op, offset: u64, len: u64, bufs: IoBufs, tag: u32 },
    /// The dirty bitmaps answer it: the node is not asked.
    OfBitmaps { tag: u32 },
    /// It was answered.
    Answered,
    /// It was answered with an error.
    Refused,
    /// More bytes have to come.
    Input,
    /// Requests under way have to end first.
    Wait,
    /// There will be no more.
    End(End),
}

pub(super) struct ServerState {
    client: RawFd,
    agreed: Agreed,
    bitmaps: Arc<[Arc<DirtyBitmap>]>,
    writethrough: bool,
    arena: Arena,
    pub(super) slots: Pool<NbdSlot>,
    incoming: Incoming,
    /// The bytes of the input that were not looked at yet.
    begin: usize,
    end: usize,
    /// Answered, in order.
    ready: VecDeque<u32>,
    /// Being sent.
    sending: Vec<u32>,
    /// What replies have cost since the last call of `take_cost`, in thousandths of a unit of the loop's meter.
    cost: u64,
}

impl ServerState {
    /// `None`: there is no memory.
    /// `client` names it in traces.
    pub(super) fn new(
        agreed: Agreed,
        bitmaps: Arc<[Arc<DirtyBitmap>]>,
        writethrough: bool,
        client: RawFd,
    ) -> Option<Self> {
        Some(ServerState {
            client,
            agreed,
            bitmaps,
            writethrough,
            arena: Arena::new()?,
            slots: std::iter::repeat_with(NbdSlot::new).take(SLOTS).collect(),
            incoming: Incoming::Header,
            begin: 0,
            end: 0,
            ready: VecDeque::with_capacity(SLOTS),
            sending: Vec::with_capacity(SLOTS),
            cost: 0,
        })
    }

    /// The connection's memory, at its end.
    pub(super) fn take_memory(&mut self) -> IoBufs {
        std::mem::take(&mut self.arena.whole)
    }

    // ---- bytes in ------------------------------------------------------------------------------

    /// The memory for what comes next: the rest of a payload straight to its place, and behind it
    /// requests. Everything that came was looked at.
    pub(super) fn input_memory(&mut self, bufs: &mut IoBufs) {
        bufs.clear();
        let left = self.end - self.begin;
        if self.begin > 0 {
            let mut rest = [0; EXTENDED_HEADER_LEN];
            if let Some(rest) = rest.get_mut(..left) {
                self.arena.whole.copy_out(INPUT.start + self.begin, rest);
                self.arena.whole.copy_in(INPUT.start, rest);
            }
            (self.begin, self.end) = (0, left);
        }
        if let Incoming::Payload { tag, len, got } = self.incoming
            && let Some(memory) = self.slots.get(tag).and_then(|slot| slot.memory)
        {
            bufs.append_part(&self.arena.whole, memory.offset + got, len - got);
        }
        bufs.append_part(&self.arena.whole, INPUT.start + self.end, INPUT.len() - self.end);
    }

    /// The export has another size now, bytes: requests from here on are judged by it.
    pub(super) fn set_size(&mut self, size: u64) {
        self.agreed.size = size;
    }

    /// That many bytes have come to the memory just given; not zero.
    pub(super) fn received(&mut self, mut bytes: usize) {
        if let Incoming::Payload { len, got, .. } = &mut self.incoming {
            let part = bytes.min(*len - *got);
            *got += part;
            bytes -= part;
        }
        self.end = (self.end + bytes).min(INPUT.len());
    }

    /// Whether the client has sent part of a message.
    pub(super) fn is_within_message(&self) -> bool {
        self.begin < self.end || !matches!(self.incoming, Incoming::Header)
    }

    /// Stops taking requests, and drops a request with an incomplete payload.
    pub(super) fn end_input(&mut self) {
        if let Incoming::Payload { tag, .. } =
            std::mem::replace(&mut self.incoming, Incoming::Header)
        {
            self.forget(tag);
        }
        (self.begin, self.end) = (0, 0);
    }

    // ---- requests ------------------------------------------------------------------------------

    /// Looks for the next request in what has come.
    pub(super) fn next(&mut self, now_ns: u64) -> Next {
        match &mut self.incoming {
            Incoming::Header => self.next_header(now_ns),
            Incoming::Payload { tag, len, got } if got == len => {
                let tag = *tag;
                self.incoming = Incoming::Header;
                self.submit(tag)
            }
            Incoming::Payload { .. } => Next::Input,
            Incoming::Skip { left, header, error } => {
                let part = (*left).min(self.end - self.begin);
                self.begin += part;
                *left -= part;
                if *left > 0 {
                    return Next::Input;
                }
                let asked = Asked { cookie: header.cookie, offset: header.offset };
                let error = *error;
                let Some(tag) = self.slots.take() else { return Next::Wait };
                self.incoming = Incoming::Header;
                self.answer_at_once(tag, asked, Reply::Error(error), now_ns)
            }
        }
    }

    fn next_header(&mut self, now_ns: u64) -> Next {
        let extended = self.agreed.mode == ReplyMode::Extended;
        let header_len = if extended { EXTENDED_HEADER_LEN } else { HEADER_LEN };
        let mut bytes = [0; EXTENDED_HEADER_LEN];
        let there = (self.end - self.begin).min(header_len);
        self.arena.whole.copy_out(INPUT.start + self.begin, &mut bytes[..there]);
        let header = match RequestHeader::parse(&bytes[..there], extended) {
            None => return Next::Input,
            Some(Err(magic)) => return Next::End(End::BadMagic(magic.0)),
            Some(Ok(header)) => header,
        };
        let asked = Asked { cookie: header.cookie, offset: header.offset };
        let command = match self.agreed.judge(&header) {
            Verdict::Disconnect => return Next::End(End::Left),
            Verdict::TooLong => return Next::End(End::TooLong(header.len)),
            Verdict::Refuse { error, payload } => {
                self.begin += header_len;
                self.trace_request(&header);
                self.incoming = Incoming::Skip { left: payload as usize, header, error };
                return Next::Answered;
            }
            Verdict::Do(command) => command,
        };
        let Some(tag) = self.slots.take() else { return Next::Wait };
        let (reply_len, len) = memory_of(&command, self.agreed.contexts);
        let memory = match reply_len + len {
            0 => None,
            len => match self.arena.take(len) {
                Some(memory) => Some(memory),
                None => {
                    self.slots.give(tag);
                    return Next::Wait;
                }
            },
        };
        self.begin += header_len;
        self.trace_request(&header);
        let Some(slot) = self.slots.get_mut(tag) else { return Next::Wait };
        slot.begin(asked, command, now_ns);
        slot.bufs.clear();
        if let Some(memory) = memory.filter(|_| len > 0) {
            slot.bufs.append_part(&self.arena.whole, memory.offset + reply_len, len);
        }
        slot.memory = memory;
        if let Command::Write { len, .. } = command {
            let len = len as usize;
            let got = len.min(self.end - self.begin);
            self.arena.whole.copy_to(INPUT.start + self.begin, &mut slot.bufs, 0, got);
            self.begin += got;
            if got < len {
                self.incoming = Incoming::Payload { tag, len, got };
                return Next::Input;
            }
        }
        self.submit(tag)
    }

    #[inline]
    fn trace_request(&self, header: &RequestHeader) {
        let RequestHeader { flags, command, cookie, offset, len } = *header;
        trace!(probes::nbd_receive_request(
            self.client,
            cookie,
            flags,
            command.number(),
            offset,
            len
        ));
    }

    fn answer_at_once(&mut self, tag: u32, asked: Asked, reply: Reply, now_ns: u64) -> Next {
        if let Some(slot) = self.slots.get_mut(tag) {
            slot.begin(asked, Command::Nothing, now_ns);
            slot.reply = reply;
            self.ready.push_back(tag);
        }
        Next::Refused
    }

    fn submit(&mut self, tag: u32) -> Next {
        let through = self.writethrough;
        let Some(slot) = self.slots.get_mut(tag) else { return Next::Answered };
        let (op, offset, len) = match slot.command {
            // A node with limits counts it.
            Command::Nothing => (Op::Read, 0, 0),
            Command::Read { offset, len, .. } => (Op::Read, offset, len.into()),
            Command::Write { offset, len, fua } => {
                (Op::Write { fua: fua || through }, offset, len.into())
            }
            Command::Flush => (Op::Flush, 0, 0),
            Command::Trim { offset, len, .. } => (Op::Discard, offset, len),
            Command::WriteZeroes { offset, len, may_unmap, fast_only, fua } => {
                let fua = fua || through;
                (Op::WriteZeroes { may_unmap, no_fallback: fast_only, fua }, offset, len)
            }
            // Reading the range fills the host's page cache, if the node uses it.
            Command::Cache { offset, len } => (Op::Read, offset, len.min(MAX_PAYLOAD.into())),
            Command::BlockStatus { .. } if !extents::asks_node(self.agreed.contexts) => {
                return Next::OfBitmaps { tag };
            }
            Command::BlockStatus { offset, len, .. } => (Op::BlockStatus, offset, len),
        };
        let bufs = std::mem::take(&mut slot.bufs);
        Next::Submit { op, offset, len, bufs, tag }
    }

    // ---- answers -------------------------------------------------------------------------------

    /// A request has come back. `true`: it is to be followed by a flush under the same tag.
    pub(super) fn answered(&mut self, tag: u32, result: Result<(), Errno>, bufs: IoBufs) -> bool {
        let through = self.writethrough;
        let Agreed { mode, contexts, .. } = self.agreed;
        let Some(slot) = self.slots.get_mut(tag) else { return false };
        slot.bufs = bufs;
        if let Command::Trim { fua, .. } = slot.command
            && (fua || through)
            && result.is_ok()
            && !slot.flushing
        {
            slot.flushing = true;
            return true;
        }
        (slot.reply, slot.data) = match (result, slot.command) {
            (Err(errno), _) => (Reply::Error(errno.into()), 0),
            (Ok(()), Command::Read { offset, len, .. }) => {
                (Reply::Data { offset, len }, len as usize)
            }
            (Ok(()), Command::BlockStatus { len, one, .. }) => {
                let begin = slot.memory.map_or(0, |memory| memory.offset);
                let memory = &mut self.arena.whole;
                let (client, asked) = (self.client, slot.asked);
                let mut chunks =
                    Chunks { client, mode, asked, len, one, memory, at: begin, cost: 0 };
                slot.is_whole = chunks.put_all(contexts, &self.bitmaps, &slot.bufs);
                self.cost += chunks.cost;
                match slot.is_whole {
                    true => (Reply::Done, chunks.at - begin),
                    // The block layer gives at least one extent.
                    false => (Reply::Error(NbdError::Io), 0),
                }
            }
            (Ok(()), _) => (Reply::Done, 0),
        };
        if slot.data == 0
            && let Some(memory) = slot.memory.take()
        {
            self.arena.give(memory);
        }
        self.ready.push_back(tag);
        false
    }

    /// Units of the loop's meter that replies have cost since the last call.
    pub(super) fn take_cost(&mut self) -> u64 {
        std::mem::take(&mut self.cost).div_ceil(1000)
    }

    /// Whether the reply to a request is put together from bitmaps.
    pub(super) fn has_costly_reply(&self, tag: u32) -> bool {
        let command = self.slots.get(tag).map(|slot| &slot.command);
        !self.bitmaps.is_empty() && matches!(command, Some(Command::BlockStatus { .. }))
    }

    /// What the node has been asked for and has not answered.
    pub(super) fn in_flight(&self) -> Vec<InFlight> {
        let payload = match self.incoming {
            Incoming::Payload { tag, .. } => Some(tag),
            _ => None,
        };
        let ServerState { slots, ready, sending, .. } = self;
        let waits =
            |tag: &u32| ready.contains(tag) || sending.contains(tag) || payload == Some(*tag);
        let of = |(_, slot): (u32, &NbdSlot)| {
            let (kind, offset, len) = counted(&slot.command);
            let (id, started_ns) = (slot.asked.cookie, slot.started_ns);
            InFlight { id, kind, lun: None, offset, len, started_ns }
        };
        slots.taken().filter(|(tag, _)| !waits(tag)).map(of).collect()
    }

    /// Whether there is something to be sent.
    pub(super) fn has_replies(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Puts all replies that are ready into one list. They are being sent until
    /// [`sent`](Self::sent).
    pub(super) fn gather(&mut self, bufs: &mut IoBufs) {
        bufs.clear();
        let mut at = HEADERS.start;
        let mut holes_left = MAX_HOLES;
        while let Some(tag) = self.ready.pop_front() {
            self.sending.push(tag);
            let Some(slot) = self.slots.get_mut(tag) else { continue };
            if !slot.is_whole {
                trace_reply(self.client, self.agreed.mode, slot.asked, slot.reply);
            }
            let mut out = Out { arena: &mut self.arena.whole, bufs: &mut *bufs, place: at };
            match (slot.command, slot.reply, slot.memory) {
                (
                    Command::Read { in_chunks: true, .. },
                    Reply::Data { offset, len },
                    Some(memory),
                ) => {
                    let data = (memory.offset, offset, len as usize);
                    out.read(self.agreed.mode, slot.asked, data, &mut holes_left);
                }
                (_, reply, memory) => {
                    if !slot.is_whole {
                        out.header(reply.encode(self.agreed.mode, slot.asked));
                    }
                    if let Some(memory) = memory.filter(|_| slot.data > 0) {
                        bufs.append_part(&self.arena.whole, memory.offset, slot.data);
                    }
                }
            }
            at += MAX_HEADER;
        }
    }

    /// What was gathered has been sent, or never will be.
    pub(super) fn sent(&mut self) {
        while let Some(tag) = self.sending.pop() {
            self.forget(tag);
        }
    }

    /// The client is gone: replies that are ready need not be sent.
    pub(super) fn drop_replies(&mut self) {
        while let Some(tag) = self.ready.pop_front() {
            self.forget(tag);
        }
    }

    // ---- handing over --------------------------------------------------------------------------

    /// Bytes that [`unparsed`](Self::unparsed) and [`take_replies`](Self::take_replies) give, at most.
    pub(super) fn left_len(&self) -> usize {
        let data = |&tag: &u32| Some(MAX_HEADER + self.slots.get(tag)?.data);
        let replies = self.ready.iter().filter_map(data);
        let payload = match self.incoming {
            Incoming::Payload { got, .. } => got,
            _ => 0,
        };
        replies.sum::<usize>() + EXTENDED_HEADER_LEN + payload + self.end - self.begin
    }

    /// The bytes that came and belong to no request under way, from the beginning of a request on: given
    /// them, another state is where this one is. Of what is skipped the rest is announced, by a request
    /// that is refused whatever the export has become meanwhile.
    pub(super) fn unparsed(&mut self) -> Vec<u8> {
        let extended = self.agreed.mode == ReplyMode::Extended;
        let mut bytes = Vec::new();
        let mut put_header = |header: RequestHeader| {
            let (encoded, len) = header.encode(extended);
            bytes.extend_from_slice(&encoded[..len]);
        };
        let mut payload = None;
        match self.incoming {
            Incoming::Header => {}
            Incoming::Payload { tag, got, .. } => {
                if let Some(slot) = self.slots.get(tag)
                    && let Command::Write { offset, len, fua } = slot.command
                {
                    let fua = if fua { command_flag::FUA } else { 0 };
                    let flags = fua | if extended { command_flag::PAYLOAD_LEN } else { 0 };
                    let (command, cookie) = (CommandType::Write, slot.asked.cookie);
                    put_header(RequestHeader { flags, command, cookie, offset, len: len.into() });
                    payload = slot.memory.map(|memory| (memory.offset, got));
                }
            }
            Incoming::Skip { left, mut header, error } => {
                if header.has_payload(extended) {
                    header.len = left as u64;
                    match error {
                        // Who may not write now may not later.
                        NbdError::Perm => {}
                        // Beyond the end of any export. An extended reply has the offset as well.
                        NbdError::NoSpc if !extended => header.offset = u64::MAX,
                        _ => header.flags |= UNKNOWN_FLAG,
                    }
                }
                put_header(header);
            }
        }
        let input = (INPUT.start + self.begin, self.end - self.begin);
        for (at, len) in payload.into_iter().chain([input]) {
            let end = bytes.len();
            bytes.resize(end + len, 0);
            self.arena.whole.copy_out(at, &mut bytes[end..]);
        }
        bytes
    }

    /// Appends the bytes of all replies that are ready, which then count as sent.
    pub(super) fn take_replies(&mut self, bytes: &mut Vec<u8>) {
        let mut bufs = IoBufs::new();
        self.gather(&mut bufs);
        append(bytes, &bufs);
        self.sent();
    }

    /// Frees the slot of a request that is not carried out, or has been answered.
    pub(super) fn forget(&mut self, tag: u32) {
        let Some(slot) = self.slots.get_mut(tag) else { return };
        if let Some(memory) = slot.memory.take() {
            self.arena.give(memory);
        }
        self.slots.give(tag);
    }
}

/// Appends what is in the buffers. Memory that was not used yet is touched once: by far the most of what
/// it costs.
pub(super) fn append(bytes: &mut Vec<u8>, bufs: &IoBufs) {
    let mut part = [0; 16 << 10];
    let mut at = 0;
    while at < bufs.len() {
        let copied = bufs.copy_out(at, &mut part);
        bytes.extend_from_slice(&part[..copied]);
        at += copied;
    }
}

#[inline]
pub(super) fn trace_reply(client: RawFd, mode: ReplyMode, asked: Asked, reply: Reply) {
    let Asked { cookie, .. } = asked;
    match (mode, reply) {
        (ReplyMode::Simple, Reply::Data { len, .. }) => {
            trace!(probes::nbd_co_send_simple_reply(client, cookie, 0u32, len));
        }
        (ReplyMode::Simple, Reply::Error(error)) => {
            trace!(probes::nbd_co_send_simple_reply(client, cookie, error as u32, 0u32));
        }
        (ReplyMode::Simple, _) => {
            trace!(probes::nbd_co_send_simple_reply(client, cookie, 0u32, 0u32))
        }
        (_, Reply::Done) => trace!(probes::nbd_co_send_chunk_done(client, cookie)),
        (_, Reply::Data { offset, len } | Reply::Hole { offset, len }) => {
            trace!(probes::nbd_co_send_chunk_read(client, cookie, offset, len));
        }
        (_, Reply::Error(error)) => {
            trace!(probes::nbd_co_send_chunk_error(client, cookie, error as u32))
        }
        (_, Reply::Status { context, count }) => {
            trace!(probes::nbd_co_send_extents(client, cookie, count, context));
        }
    }
}

/// Bytes of memory that a command needs: for a reply with headers, and behind it for the node.
fn memory_of(command: &Command, contexts: Contexts) -> (usize, usize) {
    match *command {
        Command::Read { len, .. } | Command::Write { len, .. } => (0, len as usize),
        Command::Cache { len, .. } => (0, len.min(MAX_PAYLOAD.into()) as usize),
        Command::BlockStatus { one, .. } => {
            (extents::reply_len(contexts, one), extents::told_len(contexts, one))
        }
        Command::Flush | Command::Trim { .. } | Command::WriteZeroes { .. } | Command::Nothing => {
            (0, 0)
        }
    }
}

impl tls::Sink for ServerState {
    fn input_memory(&mut self, place: &mut IoBufs) {
        ServerState::input_memory(self, place);
    }

    fn received(&mut self, bytes: usize, _place: &mut IoBufs) {
        ServerState::received(self, bytes);
    }
}
