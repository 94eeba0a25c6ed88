//! Requests of the transmission phase.

use super::Reader;

pub(crate) const REQUEST_MAGIC: u32 = 0x2560_9513;
pub(crate) const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;

/// Bytes of a request's header.
pub const HEADER_LEN: usize = 28;
/// Bytes of an extended request's header.
pub const EXTENDED_HEADER_LEN: usize = 32;

/// Command flags.
pub mod command_flag {
    /// `NBD_CMD_FLAG_FUA`: on stable storage before the reply.
    pub const FUA: u16 = 1 << 0;
    /// `NBD_CMD_FLAG_NO_HOLE`: zeroes are to take up their space.
    pub const NO_HOLE: u16 = 1 << 1;
    /// `NBD_CMD_FLAG_DF`: one chunk of data.
    pub const DF: u16 = 1 << 2;
    /// `NBD_CMD_FLAG_REQ_ONE`: one extent.
    pub const REQ_ONE: u16 = 1 << 3;
    /// `NBD_CMD_FLAG_FAST_ZERO`: zeroes only if that is faster than writing them.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// `NBD_CMD_FLAG_PAYLOAD_LEN`: the length is that of a payload.
    ///
    /// With extended headers only.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandType {
    /// `NBD_CMD_READ`.
    Read,
    /// `NBD_CMD_WRITE`.
    Write,
    /// `NBD_CMD_DISC`.
    Disconnect,
    /// `NBD_CMD_FLUSH`.
    Flush,
    /// `NBD_CMD_TRIM`.
    Trim,
    /// `NBD_CMD_CACHE`.
    Cache,
    /// `NBD_CMD_WRITE_ZEROES`.
    WriteZeroes,
    /// `NBD_CMD_BLOCK_STATUS`.
    BlockStatus,
    /// Another number.
    Unknown(u16),
}

impl From<u16> for CommandType {
    fn from(number: u16) -> Self {
        match number {
            0 => CommandType::Read,
            1 => CommandType::Write,
            2 => CommandType::Disconnect,
            3 => CommandType::Flush,
            4 => CommandType::Trim,
            5 => CommandType::Cache,
            6 => CommandType::WriteZeroes,
            7 => CommandType::BlockStatus,
            other => CommandType::Unknown(other),
        }
    }
}

/// A request's header as it came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestHeader {
    /// Bits of [`command_flag`].
    pub flags: u16,
    /// What is asked for.
    pub command: CommandType,
    /// The client's name for the request, any value.
    pub cookie: u64,
    /// First byte of the range.
    pub offset: u64,
    /// Bytes of the range; of the payload, where there is one.
    pub len: u64,
}

/// The bytes are not a request: nothing that follows can be understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadRequestMagic(
    /// What stands there instead.
    pub u32,
);

impl RequestHeader {
    /// Reads a header from the front of `bytes`.
    ///
    /// `None`: the bytes end before the header does.
    ///
    /// # Errors
    ///
    /// It does not begin with the magic number of that kind of header.
    pub fn parse(bytes: &[u8], extended: bool) -> Option<Result<Self, BadRequestMagic>> {
        let mut reader = Reader(bytes);
        let expected = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        let magic = reader.u32()?;
        if magic != expected {
            return Some(Err(BadRequestMagic(magic)));
        }
        let (flags, command) = (reader.u16()?, reader.u16()?.into());
        let (cookie, offset) = (reader.u64()?, reader.u64()?);
        let len = if extended { reader.u64()? } else { reader.u32()?.into() };
        Some(Ok(RequestHeader { flags, command, cookie, offset, len }))
    }

    /// Returns whether a payload of `len` bytes follows.
    ///
    /// With extended headers a write is to have the flag that says so; QEMU 10.0 as a client leaves
    /// it out, and sends the payload all the same.
    pub fn has_payload(&self, extended: bool) -> bool {
        self.command == CommandType::Write
            || extended && self.flags & command_flag::PAYLOAD_LEN != 0
    }
}
