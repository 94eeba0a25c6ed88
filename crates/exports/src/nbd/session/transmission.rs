//! The transmission phase: which requests are allowed, and what they then mean.

use crate::nbd::wire::MAX_PAYLOAD;
use crate::nbd::wire::reply::{NbdError, ReplyMode};
use crate::nbd::wire::request::{CommandType, RequestHeader, command_flag};

/// What the handshake came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agreed {
    /// Bytes of the export.
    pub size: u64,
    /// No write passes.
    pub read_only: bool,
    /// Which replies the client takes.
    pub mode: ReplyMode,
    /// The metadata contexts that were chosen.
    pub contexts: Contexts,
}

/// Metadata contexts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Contexts {
    /// `base:allocation`.
    pub allocation: bool,
    /// `qemu:allocation-depth`.
    pub depth: bool,
    /// `qemu:dirty-bitmap:NAME`: a bit for each of the export's bitmaps, the first one's the lowest.
    pub bitmaps: u64,
}

/// Maximum number of bitmaps of an export.
pub const MAX_BITMAPS: usize = 64;

/// Numbers of contexts, those of QEMU. Bitmaps are numbered from the last one on.
const ALLOCATION: u32 = 0;
const DEPTH: u32 = 1;
const FIRST_BITMAP: u32 = 2;

/// A metadata context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Context {
    /// `base:allocation`.
    Allocation,
    /// `qemu:allocation-depth`.
    Depth,
    /// `qemu:dirty-bitmap:NAME`: of the bitmap of that index.
    Bitmap(u32),
}

impl Context {
    /// Returns the context's number.
    pub fn id(self) -> u32 {
        match self {
            Context::Allocation => ALLOCATION,
            Context::Depth => DEPTH,
            Context::Bitmap(index) => FIRST_BITMAP + index,
        }
    }
}

impl Contexts {
    /// Returns whether there is none.
    pub fn is_empty(&self) -> bool {
        *self == Contexts::default()
    }

    /// Returns all contexts, in the order of their numbers.
    pub fn iter(self) -> impl Iterator<Item = Context> {
        let bitmaps = (0..MAX_BITMAPS as u32).filter(move |index| self.bitmaps >> index & 1 == 1);
        let allocation = self.allocation.then_some(Context::Allocation);
        let depth = self.depth.then_some(Context::Depth);
        allocation.into_iter().chain(depth).chain(bitmaps.map(Context::Bitmap))
    }

    /// Returns the contexts of these numbers. Those that there cannot be are left out.
    pub fn of_ids(ids: impl IntoIterator<Item = u32>) -> Contexts {
        let mut contexts = Contexts::default();
        for id in ids {
            match id {
                ALLOCATION => contexts.allocation = true,
                DEPTH => contexts.depth = true,
                id => contexts.bitmaps |= 1u64.checked_shl(id - FIRST_BITMAP).unwrap_or(0),
            }
        }
        contexts
    }
}

/// A request that can be carried out: in range, aligned, allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Read.
    Read {
        /// First byte.
        offset: u64,
        /// Bytes: from 1 to [`MAX_PAYLOAD`].
        len: u32,
        /// The reply may be split into chunks, with zeroes as holes.
        in_chunks: bool,
    },
    /// Write the payload.
    Write {
        /// First byte.
        offset: u64,
        /// Bytes: from 1 to [`MAX_PAYLOAD`].
        len: u32,
        /// On stable storage before the reply.
        fua: bool,
    },
    /// Flush.
    Flush,
    /// The range is not needed any more.
    Trim {
        /// First byte.
        offset: u64,
        /// Bytes; not zero.
        len: u64,
        /// On stable storage before the reply.
        fua: bool,
    },
    /// Zero the range.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Bytes; not zero.
        len: u64,
        /// Its space may be given back.
        may_unmap: bool,
        /// Only if that is faster than writing zeroes.
        fast_only: bool,
        /// On stable storage before the reply.
        fua: bool,
    },
    /// The range will be read.
    Cache {
        /// First byte.
        offset: u64,
        /// Bytes; not zero.
        len: u64,
    },
    /// Tell of data and holes.
    BlockStatus {
        /// First byte.
        offset: u64,
        /// Bytes; not zero.
        len: u64,
        /// Of one extent only.
        one: bool,
    },
    /// Nothing at all: a range of no bytes.
    Nothing,
}

/// What becomes of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is carried out; only a write has a payload.
    Do(Command),
    /// It is refused, once the bytes of its payload have been taken.
    Refuse {
        /// Why.
        error: NbdError,
        /// Bytes to be skipped.
        payload: u32,
    },
    /// The client leaves.
    Disconnect,
    /// Its payload is longer than any may be: the connection is closed.
    TooLong,
}

impl Agreed {
    /// Judges a request.
    #[inline]
    pub fn judge(&self, header: &RequestHeader) -> Verdict {
        let extended = self.mode == ReplyMode::Extended;
        let payload = match header.has_payload(extended) {
            false => 0,
            true => match u32::try_from(header.len) {
                Ok(len) if len <= MAX_PAYLOAD => len,
                _ => return Verdict::TooLong,
            },
        };
        if header.command == CommandType::Disconnect {
            return Verdict::Disconnect;
        }
        match self.command(header, extended) {
            Ok(command) => Verdict::Do(command),
            Err(error) => Verdict::Refuse { error, payload },
        }
    }

    fn command(&self, header: &RequestHeader, extended: bool) -> Result<Command, NbdError> {
        let RequestHeader { flags, command, offset, len, .. } = *header;
        let has = |flag| flags & flag != 0;
        let chunks = self.mode != ReplyMode::Simple;
        let (more_flags, writes) = match command {
            CommandType::Read if chunks => (command_flag::DF, false),
            CommandType::Read | CommandType::Flush | CommandType::Cache => (0, false),
            CommandType::Write if extended => (command_flag::PAYLOAD_LEN, true),
            CommandType::Write | CommandType::Trim => (0, true),
            CommandType::WriteZeroes => (command_flag::NO_HOLE | command_flag::FAST_ZERO, true),
            CommandType::BlockStatus if !self.contexts.is_empty() => (command_flag::REQ_ONE, false),
            _ => return Err(NbdError::Inval),
        };
        // Any command may have FUA.
        let unknown = flags & !(more_flags | command_flag::FUA);
        if unknown != 0 {
            return Err(NbdError::Inval);
        }
        if writes && self.read_only {
            return Err(NbdError::Perm);
        }
        let fua = has(command_flag::FUA);
        if command == CommandType::Flush {
            return Ok(Command::Flush);
        }
        if offset.checked_add(len).is_none_or(|end| end > self.size) {
            let of_writes = matches!(command, CommandType::Write | CommandType::WriteZeroes);
            return Err(if of_writes { NbdError::NoSpc } else { NbdError::Inval });
        }
        if len == 0 {
            // A reply to that has at least one extent.
            return match command {
                CommandType::BlockStatus => Err(NbdError::Inval),
                _ => Ok(Command::Nothing),
            };
        }
        let short = u32::try_from(len).ok().filter(|&len| len <= MAX_PAYLOAD);
        Ok(match command {
            CommandType::Read => match short {
                Some(len) => {
                    let in_chunks = chunks && !has(command_flag::DF);
                    Command::Read { offset, len, in_chunks }
                }
                None if chunks => return Err(NbdError::Overflow),
                None => return Err(NbdError::Inval),
            },
            CommandType::Write => {
                Command::Write { offset, len: short.ok_or(NbdError::Inval)?, fua }
            }
            CommandType::Trim => Command::Trim { offset, len, fua },
            CommandType::WriteZeroes => Command::WriteZeroes {
                offset,
                len,
                may_unmap: !has(command_flag::NO_HOLE),
                fast_only: has(command_flag::FAST_ZERO),
                fua,
            },
            CommandType::Cache => Command::Cache { offset, len },
            _ => Command::BlockStatus { offset, len, one: has(command_flag::REQ_ONE) },
        })
    }
}
