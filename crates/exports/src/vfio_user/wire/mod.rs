//! The wire format of vfio-user, without I/O: bytes and descriptors in, typed messages out; replies in,
//! bytes out.
//!
//! Layouts and numbers are those of the vfio-user protocol specification in QEMU's documentation
//! (docs/interop/vfio-user.rst) and of linux/vfio.h; numbers are in the machine's byte order. What a
//! [`Message`] holds was checked as far as it can be without knowing the device.

#![forbid(unsafe_code)]

mod error;
pub(super) mod irqs;
pub(super) mod message;
mod reply;

use std::os::fd::OwnedFd;

use message::Fields;

pub use error::WireError;
pub use irqs::{IrqAction, IrqData, SetIrqs};
pub use message::{
    DmaMap, DmaRange, DmaUnmap, Message, RegionRead, RegionWrite, RegionWrites, command_name,
};
pub use reply::{IrqInfo, RegionInfo, Reply};

/// Length of a message header, bytes.
pub const HEADER_LEN: usize = 16;

/// The most bytes that a message reads from a region or writes to it.
pub const MAX_DATA: usize = 4096;

/// Bytes of the longest payload taken.
///
/// A write of [`MAX_DATA`] bytes with its place is shorter. A longer message with an unknown
/// command is read to its end, to be refused by a reply.
pub const MAX_PAYLOAD: usize = 8192;

/// Most descriptors of a message: the number that clients propose.
pub const MAX_FDS: usize = 16;

const TYPE_MASK: u32 = 0xf;
const TYPE_COMMAND: u32 = 0;
const TYPE_REPLY: u32 = 1;
const NO_REPLY: u32 = 1 << 4;
const ERROR: u32 = 1 << 5;

/// What a message begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The message's number, which its reply repeats.
    pub id: u16,
    /// The command's number, known or not.
    pub command: u16,
    /// The sender does not want a reply.
    pub no_reply: bool,
    /// Bytes that follow; at most [`MAX_PAYLOAD`].
    pub payload_len: usize,
}

impl Header {
    /// Takes a header apart.
    ///
    /// # Errors
    ///
    /// After one of these it is unknown where the next message begins: [`WireError::NotCommand`],
    /// [`WireError::Size`].
    pub fn parse(bytes: [u8; HEADER_LEN]) -> Result<Self, WireError> {
        let mut fields = Fields(&bytes);
        let (id, command) = (fields.u16()?, fields.u16()?);
        let (size, flags) = (fields.u32()?, fields.u32()?);
        if flags & TYPE_MASK != TYPE_COMMAND {
            return Err(WireError::NotCommand(flags));
        }
        let payload_len = usize::try_from(size).unwrap_or(usize::MAX).checked_sub(HEADER_LEN);
        match payload_len {
            Some(payload_len @ 0..=MAX_PAYLOAD) => {
                Ok(Header { id, command, no_reply: flags & NO_REPLY != 0, payload_len })
            }
            Some(_) | None => Err(WireError::Size(size)),
        }
    }
}

/// Takes a whole message apart: a header, its payload and nothing else.
///
/// # Errors
///
/// [`WireError`]; a message cut short shows as [`WireError::Length`].
pub fn parse(bytes: &[u8], fds: Vec<OwnedFd>) -> Result<(Header, Message<'_>), WireError> {
    let Some((header, payload)) = bytes.split_first_chunk::<HEADER_LEN>() else {
        return Err(WireError::Length(bytes.len()));
    };
    let header = Header::parse(*header)?;
    if payload.len() != header.payload_len {
        return Err(WireError::Length(payload.len()));
    }
    Ok((header, Message::parse(header.command, payload, fds)?))
}
