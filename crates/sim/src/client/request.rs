//! Requests and their permitted answers.

use std::ops::Range;

use exports::nbd::wire::reply::{NbdError, ReplyMode, allocation};
use exports::nbd::wire::request::{CommandType, RequestHeader, command_flag};

use crate::model::{SECTOR, Ticket};
use crate::random::Random;

/// Maximum sectors of an ordinary request: 16 KiB.
const MOST_SECTORS: u32 = 32;
/// Maximum sectors of a large request: more than a socket buffer holds.
const LARGE_SECTORS: u32 = 512;

/// The kind of a request.
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
    /// Block status, sometimes limited to one extent.
    Status {
        one: bool,
    },
    /// A request of no bytes.
    Nothing,
    /// Beyond the end of the disk.
    ReadOutOfRange,
    WriteOutOfRange,
    /// A command number that does not exist.
    Unknown,
    /// A command flag that does not exist.
    UnknownFlag,
}

impl Kind {
    /// A random request, mostly a read or a write. `allocation`: block status is permitted.
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

    /// Whether the request changes the disk.
    pub(super) fn writes(self) -> bool {
        matches!(self, Kind::Write | Kind::Trim | Kind::Zeroes { .. })
    }

    /// Whether the server has to refuse the request.
    pub(super) fn is_refused(self) -> bool {
        use Kind::*;
        matches!(self, ReadOutOfRange | WriteOutOfRange | Unknown | UnknownFlag)
    }

    /// Whether the request has a payload, unless it is empty.
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

/// A random number of sectors; very many once in `large` times.
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
    /// The change of the model, if the request reads or writes.
    pub(super) ticket: Option<Ticket>,
    pub(super) first: u32,
    pub(super) count: u32,
    /// Forced unit access: the data is stable once answered.
    pub(super) fua: bool,
    pub(super) offered_ns: u64,
    /// The received part of a read's answer.
    pub(super) came: Came,
}

/// The received part of an answer in chunks.
#[derive(Default)]
pub(super) struct Came {
    pub(super) data: Vec<u8>,
    /// Number of data bytes received.
    pub(super) count: usize,
    /// Extents: length in bytes, flags.
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
    /// Returns the header, and the number of payload bytes after it.
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
            // Beyond the end of any disk, grown disks included.
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

    /// First byte of the range.
    pub(super) fn offset(&self) -> u64 {
        u64::from(self.first) * SECTOR as u64
    }

    /// Length of the range, bytes.
    pub(super) fn bytes(&self) -> usize {
        self.count as usize * SECTOR
    }

    /// Bytes of data in a successful answer.
    pub(super) fn answer_bytes(&self) -> usize {
        if self.kind == Kind::Read { self.bytes() } else { 0 }
    }

    /// Returns the byte ranges that the received extents report as zeroes. Fails if the extents are malformed.
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

    /// Whether `error` is a permitted answer. `may_fail`: whether operations have failed.
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
