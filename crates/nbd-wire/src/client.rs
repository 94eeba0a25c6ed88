//! The client's half of the messages: what it sends, and what it reads of the server's bytes.

use nix::errno::Errno;

use crate::option::{OptionReply, code, info};
use crate::reply::{self, NbdError, ReplyMode};
use crate::request::{self, CommandType, RequestHeader};
use crate::{INIT_MAGIC, MAX_STRING, OPTION_MAGIC, OPTION_REPLY_MAGIC, Reader};

/// `cliserv_magic` of the handshake before the newstyle one.
const OLDSTYLE_MAGIC: u64 = 0x0000_4202_8186_1253;

/// What a server sends makes no sense: nothing that follows can be understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Nonsense(
    /// What is wrong, for people.
    pub &'static str,
);

// ---- handshake ---------------------------------------------------------------------------------

/// Bytes that a server begins with: which handshake follows.
pub const MAGIC_LEN: usize = 16;

/// The handshake that a server begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Handshake {
    /// The client chooses an export by its name. The server's handshake flags follow, 16 bits.
    Newstyle,
    /// There is one export, without a name. Its [description](parse_oldstyle) follows.
    Oldstyle,
}

impl Handshake {
    /// Reads which handshake a server begins.
    ///
    /// # Errors
    ///
    /// It is no NBD server.
    pub fn parse(bytes: &[u8; MAGIC_LEN]) -> Result<Handshake, Nonsense> {
        let mut reader = Reader(bytes);
        match (reader.u64(), reader.u64()) {
            (Some(INIT_MAGIC), Some(OPTION_MAGIC)) => Ok(Handshake::Newstyle),
            (Some(INIT_MAGIC), Some(OLDSTYLE_MAGIC)) => Ok(Handshake::Oldstyle),
            _ => Err(Nonsense("Bad initial magic received: this is no NBD server")),
        }
    }
}

/// Bytes of zeroes behind an export's description, unless
/// [`NO_ZEROES`](crate::handshake_flag::NO_ZEROES) was negotiated.
pub const PADDING: usize = 124;

/// Bytes of an export's description in an oldstyle handshake, without the [zeroes](PADDING) behind.
pub const OLDSTYLE_LEN: usize = 12;

/// Reads an export's description in an oldstyle handshake: its size, and its transmission flags.
///
/// # Errors
///
/// There are flags that no server has.
pub fn parse_oldstyle(bytes: &[u8; OLDSTYLE_LEN]) -> Result<(u64, u16), Nonsense> {
    let mut reader = Reader(bytes);
    match (reader.u64(), reader.u16(), reader.u16()) {
        (Some(size), Some(0), Some(flags)) => Ok((size, flags)),
        _ => Err(Nonsense("Unexpected export flags")),
    }
}

/// Bytes of the answer to `NBD_OPT_EXPORT_NAME`, without the [zeroes](PADDING) behind.
pub const EXPORT_LEN: usize = 10;

/// Reads the answer to `NBD_OPT_EXPORT_NAME`: the export's size, and its transmission flags.
pub fn parse_export(bytes: &[u8; EXPORT_LEN]) -> (u64, u16) {
    let mut reader = Reader(bytes);
    (reader.u64().unwrap_or_default(), reader.u16().unwrap_or_default())
}

/// Appends an option to `out`, with its data.
pub fn encode_option(option: u32, data: &[u8], out: &mut Vec<u8>) {
    out.extend(OPTION_MAGIC.to_be_bytes());
    out.extend(option.to_be_bytes());
    out.extend((data.len() as u32).to_be_bytes());
    out.extend(data);
}

/// Appends `NBD_OPT_GO` for an export, with the block sizes asked for, to `out`.
pub fn encode_go(export: &str, out: &mut Vec<u8>) {
    let mut data = counted(export);
    data.extend(1u16.to_be_bytes());
    data.extend(info::BLOCK_SIZE.to_be_bytes());
    encode_option(code::GO, &data, out);
}

/// Appends `NBD_OPT_SET_META_CONTEXT` with one query to `out`.
pub fn encode_set_meta_context(export: &str, query: &str, out: &mut Vec<u8>) {
    let mut data = counted(export);
    data.extend(1u32.to_be_bytes());
    data.extend(counted(query));
    encode_option(code::SET_META_CONTEXT, &data, out);
}

fn counted(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u32).to_be_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

/// Bytes of the header of a reply to an option.
pub const OPTION_REPLY_LEN: usize = 20;

/// Most bytes of data of a reply to an option.
///
/// Two strings of the greatest length, with what goes with them.
pub const MAX_OPTION_REPLY: u32 = 2 * MAX_STRING as u32 + 64;

/// The header of a reply to an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionReplyHeader {
    /// Number of the option that is answered, `NBD_OPT_*`.
    pub option: u32,
    /// Number of the reply's kind, `NBD_REP_*`.
    pub kind: u32,
    /// Bytes of data that follow; at most [`MAX_OPTION_REPLY`].
    pub len: u32,
}

impl OptionReplyHeader {
    /// Reads a header.
    ///
    /// # Errors
    ///
    /// It does not begin with its magic number, or announces too much.
    pub fn parse(bytes: &[u8; OPTION_REPLY_LEN]) -> Result<Self, Nonsense> {
        let mut reader = Reader(bytes);
        let magic = reader.u64();
        match (magic, reader.u32(), reader.u32(), reader.u32()) {
            (Some(OPTION_REPLY_MAGIC), Some(option), Some(kind), Some(len)) => {
                if len > MAX_OPTION_REPLY {
                    return Err(Nonsense("a reply to an option is too long"));
                }
                Ok(OptionReplyHeader { option, kind, len })
            }
            _ => Err(Nonsense("Unexpected option reply magic")),
        }
    }
}

/// A reply to an option, understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptionAnswer<'a> {
    /// One that tells something.
    Reply(OptionReply<'a>),
    /// Refused.
    Refused {
        /// `NBD_REP_ERR_*`.
        code: u32,
        /// For people: what the server says, as far as it is UTF-8.
        message: &'a str,
    },
    /// A kind of reply, or of information, that is not known here.
    Unknown,
}

/// The bit that kinds of replies which refuse have.
const REFUSED: u32 = 1 << 31;

impl<'a> OptionAnswer<'a> {
    /// Reads the data of a reply.
    ///
    /// # Errors
    ///
    /// They are not what a reply of that kind has.
    pub fn parse(kind: u32, data: &'a [u8]) -> Result<Self, Nonsense> {
        const SHORT: Nonsense = Nonsense("a reply to an option has the wrong length");
        if kind & REFUSED != 0 {
            return Ok(OptionAnswer::Refused { code: kind, message: lossless(data) });
        }
        let mut reader = Reader(data);
        let reply = match kind {
            crate::option::REP_ACK if data.is_empty() => OptionReply::Ack,
            crate::option::REP_ACK => return Err(SHORT),
            crate::option::REP_META_CONTEXT => {
                let id = reader.u32().ok_or(SHORT)?;
                OptionReply::MetaContext { id, name: lossless(reader.0) }
            }
            crate::option::REP_INFO => match reader.u16().ok_or(SHORT)? {
                info::EXPORT => OptionReply::Export {
                    size: reader.u64().ok_or(SHORT)?,
                    flags: reader.u16().ok_or(SHORT)?,
                },
                info::BLOCK_SIZE => OptionReply::BlockSize {
                    minimum: reader.u32().ok_or(SHORT)?,
                    preferred: reader.u32().ok_or(SHORT)?,
                    maximum: reader.u32().ok_or(SHORT)?,
                },
                _ => return Ok(OptionAnswer::Unknown),
            },
            _ => return Ok(OptionAnswer::Unknown),
        };
        Ok(OptionAnswer::Reply(reply))
    }
}

/// The text up to what is no text any more.
fn lossless(bytes: &[u8]) -> &str {
    match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => {
            let (valid, _) = bytes.split_at(error.valid_up_to());
            std::str::from_utf8(valid).unwrap_or_default()
        }
    }
}

// ---- transmission ------------------------------------------------------------------------------

impl CommandType {
    /// Returns the command's number.
    pub fn number(self) -> u16 {
        match self {
            CommandType::Read => 0,
            CommandType::Write => 1,
            CommandType::Disconnect => 2,
            CommandType::Flush => 3,
            CommandType::Trim => 4,
            CommandType::Cache => 5,
            CommandType::WriteZeroes => 6,
            CommandType::BlockStatus => 7,
            CommandType::Unknown(number) => number,
        }
    }
}

impl RequestHeader {
    /// Writes the header: the bytes, of which the first `usize` count.
    ///
    /// Without extended headers a length that 32 bits do not hold is cut to the greatest that they
    /// do.
    pub fn encode(&self, extended: bool) -> ([u8; request::EXTENDED_HEADER_LEN], usize) {
        let mut out = reply::Writer::new();
        let magic = if extended { request::EXTENDED_REQUEST_MAGIC } else { request::REQUEST_MAGIC };
        out.put(magic.to_be_bytes());
        out.put(self.flags.to_be_bytes());
        out.put(self.command.number().to_be_bytes());
        out.put(self.cookie.to_be_bytes());
        out.put(self.offset.to_be_bytes());
        if extended {
            out.put(self.len.to_be_bytes());
        } else {
            out.put(u32::try_from(self.len).unwrap_or(u32::MAX).to_be_bytes());
        }
        (out.bytes, out.len)
    }
}

/// What kind of chunk a reply, or a part of one, is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChunkKind {
    /// `NBD_REPLY_TYPE_NONE`: nothing.
    None,
    /// `NBD_REPLY_TYPE_OFFSET_DATA`: an offset of 64 bits, then data.
    OffsetData,
    /// `NBD_REPLY_TYPE_OFFSET_HOLE`: an offset of 64 bits and a length of 32.
    OffsetHole,
    /// `NBD_REPLY_TYPE_BLOCK_STATUS`: a context's number, then extents of 8 bytes.
    BlockStatus,
    /// `NBD_REPLY_TYPE_BLOCK_STATUS_EXT`: a context's number and a count, then extents of 16 bytes.
    BlockStatusExt,
    /// `NBD_REPLY_TYPE_ERROR` and all other errors: an error number of 32 bits, then more.
    Error,
    /// Another number.
    Unknown(u16),
}

impl From<u16> for ChunkKind {
    fn from(number: u16) -> Self {
        match number {
            reply::TYPE_NONE => ChunkKind::None,
            reply::TYPE_OFFSET_DATA => ChunkKind::OffsetData,
            reply::TYPE_OFFSET_HOLE => ChunkKind::OffsetHole,
            reply::TYPE_BLOCK_STATUS => ChunkKind::BlockStatus,
            reply::TYPE_BLOCK_STATUS_EXT => ChunkKind::BlockStatusExt,
            error if error & 1 << 15 != 0 => ChunkKind::Error,
            other => ChunkKind::Unknown(other),
        }
    }
}

/// Most bytes of the header of a reply.
pub const MAX_REPLY_HEADER: usize = 32;

/// The header of a reply, or of a chunk of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyHeader {
    /// The whole answer, followed by the data of a read that went well.
    Simple {
        /// The request's cookie.
        cookie: u64,
        /// Zero, or an error; see [`errno`].
        error: u32,
    },
    /// A part of the answer.
    Chunk {
        /// The request's cookie.
        cookie: u64,
        /// What it is.
        kind: ChunkKind,
        /// It is the last one.
        done: bool,
        /// Bytes of payload that follow.
        len: u64,
    },
}

impl ReplyHeader {
    /// Reads a header from the front of `bytes`: what it says, and its length in bytes.
    ///
    /// `None`: they end before the header does.
    ///
    /// # Errors
    ///
    /// It does not begin with a magic number that was agreed on.
    pub fn parse(bytes: &[u8], mode: ReplyMode) -> Option<Result<(Self, usize), Nonsense>> {
        let mut reader = Reader(bytes);
        let header = match (reader.u32()?, mode) {
            (reply::SIMPLE_MAGIC, ReplyMode::Simple | ReplyMode::Structured) => {
                let error = reader.u32()?;
                ReplyHeader::Simple { cookie: reader.u64()?, error }
            }
            (reply::STRUCTURED_MAGIC, ReplyMode::Structured)
            | (reply::EXTENDED_MAGIC, ReplyMode::Extended) => {
                let (flags, kind) = (reader.u16()?, reader.u16()?);
                let cookie = reader.u64()?;
                let len = if mode == ReplyMode::Extended {
                    let _offset = reader.u64()?;
                    reader.u64()?
                } else {
                    reader.u32()?.into()
                };
                let done = flags & reply::FLAG_DONE != 0;
                ReplyHeader::Chunk { cookie, kind: kind.into(), done, len }
            }
            _ => return Some(Err(Nonsense("invalid magic of a reply"))),
        };
        Some(Ok((header, bytes.len() - reader.0.len())))
    }
}

/// Returns the errno of an error of the protocol. `error` is not 0.
pub fn errno(error: u32) -> Errno {
    const ERRORS: [(NbdError, Errno); 8] = [
        (NbdError::Perm, Errno::EPERM),
        (NbdError::Io, Errno::EIO),
        (NbdError::NoMem, Errno::ENOMEM),
        (NbdError::Inval, Errno::EINVAL),
        (NbdError::NoSpc, Errno::ENOSPC),
        (NbdError::Overflow, Errno::EOVERFLOW),
        (NbdError::NotSup, Errno::EOPNOTSUPP),
        (NbdError::Shutdown, Errno::ESHUTDOWN),
    ];
    // As the protocol has it: what is not known is treated as EINVAL.
    let known = ERRORS.iter().find(|(number, _)| *number as u32 == error);
    known.map_or(Errno::EINVAL, |(_, errno)| *errno)
}
