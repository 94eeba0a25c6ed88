//! Requests, and what is right as an answer.

use std::ops::Range;

use exports::nbd::wire::reply::{NbdError, ReplyMode, allocation};
use exports::nbd::wire::request::{CommandType, RequestHeader, command_flag};

use crate::model::{SECTOR, Ticket};
use crate::random::Random;

/// Most sectors of a request, but for one in some: 16 KiB.
const MOST_SECTORS: u32 = 32;
/// Most of all: more than a socket takes at once.
const LARGE_SECTORS: u32 = 512;

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write,
    Flush,
    Trim,
    Zeroes {
        fast: bool,
    },
    Cache,
    /// What is data and what zeroes, of one extent perhaps.
    Status {
        one: bool,
    },
    /// Of no bytes at all.
    Nothing,
    /// Beyond the end of the disk.
    ReadOutOfRange,
    WriteOutOfRange,
    /// Is a command that there is not.
    Unknown,
    /// Has a flag that there is not.
    UnknownFlag,
}

impl Kind {
    /// Reads and writes, mostly. `allocation`: it may ask what is where.
    pub(super) fn any(random: &Random, allocation: bool) -> Kind {
        match random.below(100) {
            0..4 if allocation => Kind::Status { one: random.one_in(4) },
            0..44 => Kind::Read,
            44..84 => Kind::Write,
            84..89 => Kind::Flush,
            89..91 => Kind::Trim,
            91..95 => Kind::Zeroes { fast: random.one_in(4) },
            95 => Kind::Cache,
            96 => Kind::Nothing,
            97 => {
                if random.one_in(2) {
                    Kind::ReadOutOfRange
                } else {
                    Kind::WriteOutOfRange
                }
            }
            98 => Kind::Unknown,
            _ => Kind::UnknownFlag,
        }
    }

    /// Whether it changes what a disk holds.
    pub(super) fn writes(self) -> bool {
        matches!(self, Kind::Write | Kind::Trim | Kind::Zeroes { .. })
    }

    /// Whether it makes no sense.
    pub(super) fn is_refused(self) -> bool {
        use Kind::*;
        matches!(self, ReadOutOfRange | WriteOutOfRange | Unknown | UnknownFlag)
    }

    /// Whether it is sent with data, if of any length.
    fn has_payload(self) -> bool {
        matches!(self, Kind::Write | Kind::WriteOutOfRange | Kind::UnknownFlag)
    }

    fn command(self) -> CommandType {
        match self {
            Kind::Read | Kind::ReadOutOfRange | Kind::Nothing => CommandType::Read,
            Kind::Write | Kind::WriteOutOfRange | Kind::UnknownFlag => CommandType::Write,
            Kind::Flush => CommandType::Flush,
            Kind::Trim => CommandType::Trim,
            Kind::Zeroes { .. } => CommandType::WriteZeroes,
            Kind::Cache => CommandType::Cache,
            Kind::Status { .. } => CommandType::BlockStatus,
            Kind::Unknown => CommandType::Unknown(77),
        }
    }
}

/// How many sectors a request is for; once in `large` times very many.
pub(super) fn any_count(random: &Random, large: u64) -> u32 {
    match random.below(256) {
        _ if random.one_in(large) => random.between(1, LARGE_SECTORS.into()) as u32,
        0..16 => random.between(1, MOST_SECTORS.into()) as u32,
        16..64 => 8,
        _ => random.between(1, 2) as u32,
    }
}

/// A request under way.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) kind: Kind,
    /// What it does to the disk, if anything.
    pub(super) ticket: Option<Ticket>,
    pub(super) first: u32,
    pub(super) count: u32,
    /// What it writes is stable once it is answered.
    pub(super) fua: bool,
    pub(super) offered_ns: u64,
    /// Of a read, as far as it has come.
    pub(super) came: Came,
}

/// What has come of an answer that comes in chunks.
#[derive(Default)]
pub(super) struct Came {
    pub(super) data: Vec<u8>,
    /// Bytes of them.
    pub(super) count: usize,
    /// Lengths, bytes, and flags.
    pub(super) extents: Vec<(u64, u64)>,
    /// 0: none.
    pub(super) error: u32,
}

impl std::fmt::Debug for Came {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes, error {}", self.count, self.error)
    }
}

impl Request {
    /// Its header, and how many bytes of data follow.
    pub(super) fn header(
        &self,
        random: &Random,
        mode: ReplyMode,
        cookie: u64,
    ) -> (RequestHeader, usize) {
        let Request { kind, fua, .. } = *self;
        let (mut flags, mut offset, mut len) = (0, self.offset(), self.bytes() as u64);
        if fua {
            flags |= command_flag::FUA;
        }
        match kind {
            Kind::Zeroes { fast } => {
                flags |= if fast { command_flag::FAST_ZERO } else { 0 };
                flags |= if random.one_in(2) { command_flag::NO_HOLE } else { 0 };
            }
            Kind::Read if mode != ReplyMode::Simple && random.one_in(4) => {
                flags |= command_flag::DF
            }
            Kind::Status { one: true } => flags |= command_flag::REQ_ONE,
            Kind::Flush | Kind::Unknown => (offset, len) = (0, 0),
            Kind::Nothing => len = 0,
            // However large the disk becomes.
            Kind::ReadOutOfRange | Kind::WriteOutOfRange => offset = 1 << 40,
            Kind::UnknownFlag => flags |= 1 << 14,
            _ => {}
        }
        let payload = if kind.has_payload() { len as usize } else { 0 };
        if payload > 0 && mode == ReplyMode::Extended {
            flags |= command_flag::PAYLOAD_LEN;
        }
        (RequestHeader { flags, command: kind.command(), cookie, offset, len }, payload)
    }

    /// Where it begins, bytes.
    pub(super) fn offset(&self) -> u64 {
        u64::from(self.first) * SECTOR as u64
    }

    /// Bytes of its range.
    pub(super) fn bytes(&self) -> usize {
        self.count as usize * SECTOR
    }

    /// Bytes that a good answer brings.
    pub(super) fn answer_bytes(&self) -> usize {
        if self.kind == Kind::Read { self.bytes() } else { 0 }
    }

    /// Which sectors read as zeroes, by the extents that have come: a range of bytes each. An error: they
    /// make no sense.
    pub(super) fn zeroes(&self) -> Result<Vec<Range<u64>>, String> {
        let (extents, len) = (&self.came.extents, self.bytes() as u64);
        let (mut at, mut zeroes) = (0, Vec::new());
        for (extent, flags) in extents {
            if at >= len || *extent == 0 {
                return Err(format!("extents beyond the range, or of no bytes: {extents:?}"));
            }
            if flags & u64::from(allocation::ZERO) != 0 {
                zeroes.push(at..at + extent);
            }
            at += extent;
        }
        let one = self.kind == Kind::Status { one: true };
        if at == 0 || one && (extents.len() > 1 || at > len) {
            return Err(format!("no extents, or more than were asked for: {extents:?}"));
        }
        Ok(zeroes)
    }

    /// Whether it may be answered with that error, or none; `may_fail`: operations have failed.
    pub(super) fn may_get(&self, error: u32, may_fail: impl Fn() -> bool) -> bool {
        let is = |of: NbdError| error == of as u32;
        match self.kind {
            Kind::WriteOutOfRange => is(NbdError::NoSpc),
            kind if kind.is_refused() => is(NbdError::Inval),
            Kind::Nothing => error == 0,
            Kind::Zeroes { fast: true } if is(NbdError::NotSup) => true,
            _ => error == 0 || (is(NbdError::Io) || is(NbdError::NoSpc)) && may_fail(),
        }
    }
}
