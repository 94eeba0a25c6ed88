//! The wire format of vhost-user, without I/O: bytes and descriptors in, typed messages out;
//! replies in, bytes out.
//!
//! Layouts and numbers are those of the vhost-user protocol specification in QEMU's documentation
//! (docs/interop/vhost-user.rst); numbers are in the machine's byte order. A [`Message`] is valid as far
//! as that can be checked without the session.

#![forbid(unsafe_code)]

mod error;
mod message;
mod reply;
mod request;

use std::os::fd::OwnedFd;

use message::Fields;

pub use error::WireError;
pub use message::{ConfigWrite, InflightDescription, LogDescription, Message, RegionId, VringAddr};
pub use reply::Reply;
pub use request::{Request, request_name};

/// Length of a message header, bytes.
pub const HEADER_LEN: usize = 12;

/// Longest accepted payload in bytes.
///
/// Known requests are much shorter. A longer unknown request is read to its end, so that it can be
/// refused by a reply.
pub const MAX_PAYLOAD: usize = 4096;

/// Maximum number of regions of SET_MEM_TABLE.
///
/// The specification says 8, but front ends with rust-vmm's crates, such as Cloud Hypervisor, send up to
/// 32.
pub const MAX_TABLE_REGIONS: usize = 32;

/// Most descriptors of a message.
pub const MAX_FDS: usize = MAX_TABLE_REGIONS;

/// Most bytes of configuration space in one message.
pub const MAX_CONFIG: usize = 256;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 0x3;
const FLAG_REPLY: u32 = 1 << 2;
const FLAG_NEED_REPLY: u32 = 1 << 3;

/// A message header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Number of the request, known or not.
    pub code: u32,
    /// The sender waits for an acknowledgement if REPLY_ACK was negotiated.
    pub need_reply: bool,
    /// Length of the payload in bytes, at most [`MAX_PAYLOAD`].
    pub payload_len: usize,
}

impl Header {
    /// Parses a header.
    ///
    /// # Errors
    ///
    /// After one of these the start of the next message is unknown: [`WireError::Flags`],
    /// [`WireError::PayloadTooLong`].
    pub fn parse(bytes: [u8; HEADER_LEN]) -> Result<Self, WireError> {
        let mut fields = Fields(&bytes);
        let (code, flags, size) = (fields.u32()?, fields.u32()?, fields.u32()?);
        if flags & VERSION_MASK != VERSION || flags & !(VERSION_MASK | FLAG_NEED_REPLY) != 0 {
            return Err(WireError::Flags(flags));
        }
        let payload_len = usize::try_from(size).unwrap_or(usize::MAX);
        if payload_len > MAX_PAYLOAD {
            return Err(WireError::PayloadTooLong { len: payload_len });
        }
        Ok(Header { code, need_reply: flags & FLAG_NEED_REPLY != 0, payload_len })
    }
}

/// A message of the back end to the front end, over a separate socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackendRequest {
    /// CONFIG_CHANGE_MSG: the configuration space has changed.
    ConfigChange = 2,
}

impl BackendRequest {
    /// Returns the message's bytes. It asks for no answer.
    pub fn encode(self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        let words = [self as u32, VERSION, 0].map(u32::to_ne_bytes);
        bytes.iter_mut().zip(words.as_flattened()).for_each(|(to, from)| *to = *from);
        bytes
    }
}

/// Parses a whole message: a header, its payload and nothing else.
///
/// # Errors
///
/// [`WireError`]; a truncated message is [`WireError::PayloadLength`], a longer one [`WireError::Surplus`].
pub fn parse(bytes: &[u8], fds: Vec<OwnedFd>) -> Result<(Header, Message), WireError> {
    let Some((header, payload)) = bytes.split_first_chunk::<HEADER_LEN>() else {
        return Err(WireError::PayloadLength { len: bytes.len(), least: HEADER_LEN });
    };
    let header = Header::parse(*header)?;
    let (len, least) = (payload.len(), header.payload_len);
    match len.checked_sub(least) {
        None => Err(WireError::PayloadLength { len, least }),
        Some(0) => Ok((header, Message::parse(header.code, payload, fds)?)),
        Some(surplus) => Err(WireError::Surplus(surplus)),
    }
}
