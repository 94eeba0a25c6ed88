//! The NBD protocol's numbers and messages: bytes to typed values and back, without I/O.
//!
//! After doc/proto.md of <https://github.com/NetworkBlockDevice/nbd>; extended headers after its branch
//! `extension-ext-header`. All integers are big-endian. The server (`exports`) and the client (`block`)
//! share it.
#![forbid(unsafe_code)]

pub mod client;
pub mod option;
pub mod reply;
pub mod request;

/// `NBDMAGIC`, which begins a connection.
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`, which follows it and begins each option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Begins each reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// Handshake flags of the server, and those of the same bits of the client.
pub mod handshake_flag {
    /// `NBD_FLAG_FIXED_NEWSTYLE`.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// `NBD_FLAG_NO_ZEROES`: no padding after the answer to `NBD_OPT_EXPORT_NAME`.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Transmission flags: what an export can do.
pub mod flag {
    /// `NBD_FLAG_HAS_FLAGS`: always set.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// `NBD_FLAG_READ_ONLY`.
    pub const READ_ONLY: u16 = 1 << 1;
    /// `NBD_FLAG_SEND_FLUSH`.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// `NBD_FLAG_SEND_FUA`.
    pub const SEND_FUA: u16 = 1 << 3;
    /// `NBD_FLAG_SEND_TRIM`.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// `NBD_FLAG_SEND_WRITE_ZEROES`.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// `NBD_FLAG_SEND_DF`: with structured or extended replies only.
    pub const SEND_DF: u16 = 1 << 7;
    /// `NBD_FLAG_CAN_MULTI_CONN`: a flush is good for all connections.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// `NBD_FLAG_SEND_CACHE`.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// `NBD_FLAG_SEND_FAST_ZERO`.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Longest string the protocol allows, bytes.
pub const MAX_STRING: usize = 4096;

/// Most bytes of a request's payload, or of a reply's data: 32 MiB.
///
/// Every server should take as much, and this one advertises it.
pub const MAX_PAYLOAD: u32 = 32 << 20;

/// Takes big-endian integers and strings from the front of some bytes.
#[derive(Debug, Clone, Copy)]
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }
}
