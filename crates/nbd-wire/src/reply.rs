//! Replies of the transmission phase: headers only, since data go by themselves.

use nix::errno::Errno;

pub(crate) const SIMPLE_MAGIC: u32 = 0x6744_6698;
pub(crate) const STRUCTURED_MAGIC: u32 = 0x668e_33ef;
pub(crate) const EXTENDED_MAGIC: u32 = 0x6e8a_278c;

pub(crate) const FLAG_DONE: u16 = 1;

pub(crate) const TYPE_NONE: u16 = 0;
pub(crate) const TYPE_OFFSET_DATA: u16 = 1;
pub(crate) const TYPE_OFFSET_HOLE: u16 = 2;
pub(crate) const TYPE_BLOCK_STATUS: u16 = 5;
pub(crate) const TYPE_BLOCK_STATUS_EXT: u16 = 6;
const TYPE_ERROR: u16 = 0x8001;

/// Most bytes of a reply before its data.
pub const MAX_HEADER: usize = 44;

/// `NBD_STATE_HOLE` and `NBD_STATE_ZERO` of the context `base:allocation`.
pub mod allocation {
    /// Nothing is stored there.
    pub const HOLE: u32 = 1 << 0;
    /// Reads as zeroes.
    pub const ZERO: u32 = 1 << 1;
}

/// `NBD_STATE_DIRTY` of the contexts `qemu:dirty-bitmap:NAME`.
pub mod dirty {
    /// The bit is set.
    pub const DIRTY: u32 = 1 << 0;
}

/// Which replies a client has negotiated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ReplyMode {
    /// Simple ones.
    #[default]
    Simple,
    /// Structured ones, with the compact header.
    Structured,
    /// Extended headers, both ways.
    Extended,
}

/// An error as the protocol numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum NbdError {
    /// `NBD_EPERM`: the export is read-only.
    Perm = 1,
    /// `NBD_EIO`.
    Io = 5,
    /// `NBD_ENOMEM`.
    NoMem = 12,
    /// `NBD_EINVAL`.
    Inval = 22,
    /// `NBD_ENOSPC`: no room, or a write beyond the end.
    NoSpc = 28,
    /// `NBD_EOVERFLOW`: more than fits into a reply.
    Overflow = 75,
    /// `NBD_ENOTSUP`: zeroes would not be faster than writing them.
    NotSup = 95,
    /// `NBD_ESHUTDOWN`.
    Shutdown = 108,
}

impl From<Errno> for NbdError {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::EPERM | Errno::EROFS | Errno::EACCES => NbdError::Perm,
            Errno::ENOMEM => NbdError::NoMem,
            Errno::EINVAL => NbdError::Inval,
            Errno::ENOSPC | Errno::EDQUOT | Errno::EFBIG => NbdError::NoSpc,
            Errno::EOVERFLOW => NbdError::Overflow,
            Errno::EOPNOTSUPP => NbdError::NotSup,
            Errno::ESHUTDOWN => NbdError::Shutdown,
            _ => NbdError::Io,
        }
    }
}

/// What a reply says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply {
    /// Done; no data.
    Done,
    /// Data of that length follow, read from that offset.
    Data {
        /// Of the first byte.
        offset: u64,
        /// Bytes; not zero.
        len: u32,
    },
    /// A range reads as zeroes. No data follow.
    Hole {
        /// Of the first byte.
        offset: u64,
        /// Bytes; not zero.
        len: u32,
    },
    /// Extents of the context with that number follow, [`extent_len`] bytes each.
    Status {
        /// The context.
        context: u32,
        /// How many; not zero.
        count: u32,
    },
    /// It failed.
    Error(NbdError),
}

/// The request that is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked {
    /// The request's cookie, any value.
    pub cookie: u64,
    /// The request's offset in bytes.
    pub offset: u64,
}

/// Returns the bytes of an extent in a block status reply.
pub fn extent_len(mode: ReplyMode) -> usize {
    if mode == ReplyMode::Extended { 16 } else { 8 }
}

/// Writes an extent of a block status reply; the first [`extent_len`] bytes count.
///
/// `len` is bytes; without extended headers it is cut to what 32 bits hold.
pub fn encode_extent(mode: ReplyMode, len: u64, status: u32) -> [u8; 16] {
    let mut out = Writer::<16>::new();
    if mode == ReplyMode::Extended {
        out.put(len.to_be_bytes());
        out.put(u64::from(status).to_be_bytes());
    } else {
        // Not to end within a block.
        let len = u32::try_from(len).unwrap_or(u32::MAX - 0xffff);
        out.put(len.to_be_bytes());
        out.put(status.to_be_bytes());
    }
    out.bytes
}

impl Reply {
    /// Encodes what precedes the data: the bytes, of which the first `usize` count.
    pub fn encode(&self, mode: ReplyMode, asked: Asked) -> ([u8; MAX_HEADER], usize) {
        self.encode_chunk(mode, asked, true)
    }

    /// Encodes the header of one chunk of several.
    ///
    /// Simple replies have no chunks, and ignore `is_last`.
    pub fn encode_chunk(
        &self,
        mode: ReplyMode,
        asked: Asked,
        is_last: bool,
    ) -> ([u8; MAX_HEADER], usize) {
        let mut out = Writer::new();
        if mode == ReplyMode::Simple {
            let error = if let Reply::Error(error) = self { *error as u32 } else { 0 };
            out.put(SIMPLE_MAGIC.to_be_bytes());
            out.put(error.to_be_bytes());
            out.put(asked.cookie.to_be_bytes());
            return (out.bytes, out.len);
        }
        let extended = mode == ReplyMode::Extended;
        let (kind, len) = match *self {
            Reply::Done => (TYPE_NONE, 0),
            Reply::Data { len, .. } => (TYPE_OFFSET_DATA, 8 + u64::from(len)),
            Reply::Hole { .. } => (TYPE_OFFSET_HOLE, 12),
            Reply::Status { count, .. } if extended => {
                (TYPE_BLOCK_STATUS_EXT, 8 + 16 * u64::from(count))
            }
            Reply::Status { count, .. } => (TYPE_BLOCK_STATUS, 4 + 8 * u64::from(count)),
            Reply::Error(_) => (TYPE_ERROR, 6),
        };
        let magic = if extended { EXTENDED_MAGIC } else { STRUCTURED_MAGIC };
        out.put(magic.to_be_bytes());
        let flags = if is_last { FLAG_DONE } else { 0 };
        out.put(flags.to_be_bytes());
        out.put(kind.to_be_bytes());
        out.put(asked.cookie.to_be_bytes());
        if extended {
            out.put(asked.offset.to_be_bytes());
            out.put(len.to_be_bytes());
        } else {
            // At most the largest payload and a few bytes.
            out.put((len as u32).to_be_bytes());
        }
        match *self {
            Reply::Done => {}
            Reply::Data { offset, .. } => out.put(offset.to_be_bytes()),
            Reply::Hole { offset, len } => {
                out.put(offset.to_be_bytes());
                out.put(len.to_be_bytes());
            }
            Reply::Status { context, count } => {
                out.put(context.to_be_bytes());
                if extended {
                    out.put(count.to_be_bytes());
                }
            }
            Reply::Error(error) => {
                out.put((error as u32).to_be_bytes());
                // No message: the number says it.
                out.put([0; 2]);
            }
        }
        (out.bytes, out.len)
    }
}

/// Bytes on the stack.
pub(crate) struct Writer<const N: usize> {
    pub(crate) bytes: [u8; N],
    pub(crate) len: usize,
}

impl<const N: usize> Writer<N> {
    pub(crate) fn new() -> Self {
        Writer { bytes: [0; N], len: 0 }
    }

    pub(crate) fn put<const M: usize>(&mut self, bytes: [u8; M]) {
        if let Some(place) = self.bytes.get_mut(self.len..self.len + M) {
            place.copy_from_slice(&bytes);
            self.len += M;
        }
    }
}
