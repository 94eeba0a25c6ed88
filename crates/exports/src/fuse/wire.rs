//! FUSE messages (`linux/fuse.h`, protocol 7): requests of the kernel, and answers.
//!
//! Numbers are in the machine's byte order.

#![forbid(unsafe_code)]

use nix::errno::Errno;

/// Bytes of a request's header.
pub const IN_HEADER: usize = 40;
/// Bytes of a write's arguments. The data follows.
pub const WRITE_ARGUMENTS: usize = 40;
/// Most bytes of a request without data that are looked at.
///
/// The longest such request is a header and `fuse_setattr_in`.
pub const MAX_REQUEST: usize = 128;
/// Bytes of an answer's header.
pub const OUT_HEADER: usize = 16;
/// The most bytes of an answer without data: header and `fuse_attr_out`.
pub const MAX_ANSWER: usize = 120;

/// The most bytes of a read or write: 1 MiB.
pub const MAX_DATA: u32 = 1 << 20;

/// The protocol's major version.
const MAJOR: u32 = 7;
/// The minor version that answers are for.
const MINOR: u32 = 36;
/// The oldest minor version that is served: `max_pages` (Linux 4.20).
const OLDEST_MINOR: u32 = 28;

/// The only inode: the root, which is a regular file.
const ROOT: u64 = 1;

/// Operations of the kernel (`enum fuse_opcode`).
mod opcode {
    pub(super) const FORGET: u32 = 2;
    pub(super) const GETATTR: u32 = 3;
    pub(super) const SETATTR: u32 = 4;
    pub(super) const OPEN: u32 = 14;
    pub(super) const READ: u32 = 15;
    pub(super) const WRITE: u32 = 16;
    pub(super) const STATFS: u32 = 17;
    pub(super) const RELEASE: u32 = 18;
    pub(super) const FSYNC: u32 = 20;
    pub(super) const FLUSH: u32 = 25;
    pub(super) const INIT: u32 = 26;
    pub(super) const DESTROY: u32 = 38;
    pub(super) const BATCH_FORGET: u32 = 42;
    pub(super) const FALLOCATE: u32 = 43;
    pub(super) const LSEEK: u32 = 46;
}

/// Members that a `SETATTR` changes (`FATTR_*`).
mod valid {
    pub(super) const MODE: u32 = 1;
    pub(super) const UID: u32 = 1 << 1;
    pub(super) const GID: u32 = 1 << 2;
    pub(super) const SIZE: u32 = 1 << 3;
    /// `FH`, `LOCKOWNER`, `KILL_SUIDGID`: say how a change was asked for, and change nothing.
    pub(super) const HOW: u32 = 1 << 6 | 1 << 9 | 1 << 11;
}

/// `FUSE_*` flags of `INIT`.
mod init_flag {
    pub(super) const ASYNC_READ: u64 = 1;
    pub(super) const ATOMIC_O_TRUNC: u64 = 1 << 3;
    pub(super) const BIG_WRITES: u64 = 1 << 5;
    pub(super) const ASYNC_DIO: u64 = 1 << 15;
    pub(super) const MAX_PAGES: u64 = 1 << 22;
    pub(super) const INIT_EXT: u64 = 1 << 30;
    pub(super) const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
}

/// `FOPEN_DIRECT_IO`: past the page cache; `FOPEN_PARALLEL_DIRECT_WRITES`: writes need not wait for each other.
const OPEN_FLAGS: u32 = 1 | 1 << 6;

/// Requests that the kernel sends without waiting for answers: asynchronous direct I/O counts as such.
const MAX_BACKGROUND: u16 = 1024;

/// How long the kernel may keep attributes, seconds.
const ATTRIBUTES_S: u64 = 1;

/// A request: its number and operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// The kernel's number for the request, any value.
    pub unique: u64,
    /// The operation.
    pub request: Request,
}

/// The operation of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// The first request: negotiates the protocol.
    Init(Init),
    /// `fstat(2)`.
    GetAttributes,
    /// `fchmod(2)`, `fchown(2)`, `ftruncate(2)`.
    SetAttributes(SetAttributes),
    /// A file descriptor was opened.
    Open,
    /// The last copy of a file descriptor was closed.
    Release,
    /// Read up to `len` bytes.
    Read {
        /// First byte.
        offset: u64,
        /// Bytes, at most [`MAX_DATA`].
        len: u32,
    },
    /// Write `len` bytes, which follow the arguments.
    Write {
        /// First byte.
        offset: u64,
        /// Bytes, at most [`MAX_DATA`].
        len: u32,
        /// The file is open with `O_DSYNC` or `O_SYNC`.
        sync: bool,
    },
    /// A copy of a file descriptor is being closed.
    Flush,
    /// `fsync(2)`.
    Fsync,
    /// `fallocate(2)`.
    Fallocate {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// `FALLOC_FL_*`.
        mode: u32,
    },
    /// `lseek(2)`, `SEEK_DATA` or `SEEK_HOLE`.
    Seek {
        /// The byte from which on data or a hole is looked for.
        offset: u64,
        /// `SEEK_DATA` or `SEEK_HOLE`, or another number that is refused.
        whence: u32,
    },
    /// `statfs(2)`.
    FileSystem,
    /// The kernel has forgotten inodes. There is no answer.
    Forget,
    /// The file system was unmounted.
    Destroy,
    /// An unsupported operation with this code.
    Unknown(u32),
}

/// `fuse_init_in`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Init {
    /// The kernel's version of the protocol, the part before the dot: 7.
    pub major: u32,
    /// The kernel's version of the protocol, the part after the dot.
    pub minor: u32,
    /// Bytes that the kernel reads ahead.
    pub max_readahead: u32,
    /// Bits of the kernel's features (`FUSE_*`).
    pub flags: u64,
}

/// `fuse_setattr_in`, without times.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SetAttributes {
    /// The new size, bytes.
    pub size: Option<u64>,
    /// The new permissions, with the file's type.
    pub mode: Option<u32>,
    /// The new owner's user ID.
    pub uid: Option<u32>,
    /// The new group's ID.
    pub gid: Option<u32>,
    /// Other attributes change too: times.
    pub other: bool,
}

/// Malformed requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Invalid {
    /// The header is truncated or has a wrong length; there is no number to answer to.
    Header,
    /// The arguments are invalid. The request is answered with an error.
    Arguments {
        /// The kernel's number for the request.
        unique: u64,
    },
    /// There is no such inode.
    Inode {
        /// The kernel's number for the request.
        unique: u64,
    },
}

/// Reads numbers one after the other; `None` at the end.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn u32(&mut self) -> Option<u32> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_ne_bytes(*first))
    }

    fn u64(&mut self) -> Option<u64> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_ne_bytes(*first))
    }
}

impl Message {
    /// Parses a request.
    ///
    /// `bytes`: its first [`MAX_REQUEST`] bytes, or fewer if it is shorter. `received`: its whole length with
    /// the data of a write.
    ///
    /// # Errors
    ///
    /// The request is malformed.
    pub fn parse(bytes: &[u8], received: usize) -> Result<Message, Invalid> {
        let bytes = bytes.get(..received.min(MAX_REQUEST)).ok_or(Invalid::Header)?;
        let mut fields = Fields(bytes);
        let header = |fields: &mut Fields<'_>| {
            let (len, opcode) = (fields.u32()?, fields.u32()?);
            let (unique, node) = (fields.u64()?, fields.u64()?);
            // uid, gid, pid, lengths of extensions.
            let _ = (fields.u64()?, fields.u64()?);
            Some((len, opcode, unique, node))
        };
        let (len, opcode, unique, node) = header(&mut fields).ok_or(Invalid::Header)?;
        if usize::try_from(len) != Ok(received) {
            return Err(Invalid::Header);
        }
        let request = arguments(opcode, &mut fields, received);
        let request = request.ok_or(Invalid::Arguments { unique })?;
        let is_of_file = match request {
            Request::Init(_) | Request::Forget | Request::Destroy | Request::Unknown(_) => false,
            Request::GetAttributes
            | Request::SetAttributes(_)
            | Request::Open
            | Request::Release
            | Request::Read { .. }
            | Request::Write { .. }
            | Request::Flush
            | Request::Fsync
            | Request::Fallocate { .. }
            | Request::Seek { .. }
            | Request::FileSystem => true,
        };
        match is_of_file && node != ROOT {
            true => Err(Invalid::Inode { unique }),
            false => Ok(Message { unique, request }),
        }
    }
}

fn arguments(opcode: u32, fields: &mut Fields<'_>, received: usize) -> Option<Request> {
    Some(match opcode {
        opcode::INIT => {
            let (major, minor, max_readahead) = (fields.u32()?, fields.u32()?, fields.u32()?);
            let low = u64::from(fields.u32()?);
            // Kernels before 5.17 end here.
            let high = u64::from(fields.u32().unwrap_or(0));
            let flags = if low & init_flag::INIT_EXT != 0 { low | high << 32 } else { low };
            Request::Init(Init { major, minor, max_readahead, flags })
        }
        opcode::GETATTR => Request::GetAttributes,
        opcode::SETATTR => Request::SetAttributes(set_attributes(fields)?),
        opcode::OPEN => Request::Open,
        opcode::RELEASE => Request::Release,
        opcode::READ => {
            let _handle = fields.u64()?;
            let (offset, len) = (fields.u64()?, fields.u32()?);
            if len > MAX_DATA {
                return None;
            }
            Request::Read { offset, len }
        }
        opcode::WRITE => {
            let _handle = fields.u64()?;
            let (offset, len, _flags) = (fields.u64()?, fields.u32()?, fields.u32()?);
            let (_owner, flags, _) = (fields.u64()?, fields.u32()?, fields.u32()?);
            let data = received.checked_sub(IN_HEADER + WRITE_ARGUMENTS)?;
            if len > MAX_DATA || usize::try_from(len) != Ok(data) {
                return None;
            }
            let sync = flags & nix::libc::O_DSYNC.cast_unsigned() != 0;
            Request::Write { offset, len, sync }
        }
        opcode::FLUSH => Request::Flush,
        opcode::FSYNC => Request::Fsync,
        opcode::FALLOCATE => {
            let _handle = fields.u64()?;
            let (offset, len, mode) = (fields.u64()?, fields.u64()?, fields.u32()?);
            Request::Fallocate { offset, len, mode }
        }
        opcode::LSEEK => {
            let _handle = fields.u64()?;
            Request::Seek { offset: fields.u64()?, whence: fields.u32()? }
        }
        opcode::STATFS => Request::FileSystem,
        opcode::FORGET | opcode::BATCH_FORGET => Request::Forget,
        opcode::DESTROY => Request::Destroy,
        other => Request::Unknown(other),
    })
}

fn set_attributes(fields: &mut Fields<'_>) -> Option<SetAttributes> {
    let valid = fields.u32()?;
    let (_, _handle, size, _owner) = (fields.u32()?, fields.u64()?, fields.u64()?, fields.u64()?);
    // Three times: seconds, then nanoseconds.
    for _ in 0..3 {
        fields.u64()?;
    }
    for _ in 0..3 {
        fields.u32()?;
    }
    let mode = fields.u32()?;
    let _unused = fields.u32()?;
    let (uid, gid, _unused) = (fields.u32()?, fields.u32()?, fields.u32()?);
    let known = valid::MODE | valid::UID | valid::GID | valid::SIZE | valid::HOW;
    Some(SetAttributes {
        size: (valid & valid::SIZE != 0).then_some(size),
        mode: (valid & valid::MODE != 0).then_some(mode),
        uid: (valid & valid::UID != 0).then_some(uid),
        gid: (valid & valid::GID != 0).then_some(gid),
        other: valid & !known != 0,
    })
}

/// The file, as `fstat(2)` shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes {
    /// Size in bytes.
    pub size: u64,
    /// Bytes that take up room.
    pub allocated: u64,
    /// Access, modification and change, seconds since 1970.
    pub time_s: u64,
    /// Type and permissions, as `st_mode` has them.
    pub mode: u32,
    /// The owner's user ID.
    pub uid: u32,
    /// The group's ID.
    pub gid: u32,
    /// Preferred size of a request in bytes.
    pub block_size: u32,
}

/// An answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Failure.
    Error(Errno),
    /// Success, without data.
    Done,
    /// The negotiated protocol.
    Init {
        /// The kernel's offer.
        kernel: Init,
        /// The kernel sends `O_TRUNC` of an open on, instead of truncating the file itself.
        keeps_size: bool,
    },
    /// The file's attributes.
    Attributes(Attributes),
    /// The file is open.
    Opened,
    /// That many bytes were written.
    Written(u32),
    /// Data or a hole begins at this byte.
    Position(u64),
    /// The file system.
    FileSystem,
    /// That many bytes of data follow.
    Data(u32),
}

/// The bytes of an answer without its data.
#[derive(Debug)]
pub struct Encoded {
    bytes: [u8; MAX_ANSWER],
    len: usize,
}

impl Encoded {
    /// Returns header and arguments.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }

    fn put(&mut self, bytes: &[u8]) {
        if let Some(place) = self.bytes.get_mut(self.len..self.len + bytes.len()) {
            place.copy_from_slice(bytes);
            self.len += bytes.len();
        }
    }

    fn u32(&mut self, number: u32) {
        self.put(&number.to_ne_bytes());
    }

    fn u64(&mut self, number: u64) {
        self.put(&number.to_ne_bytes());
    }
}

impl Init {
    /// Returns whether this version of the protocol is supported.
    pub fn is_served(&self) -> bool {
        self.major > MAJOR || self.major == MAJOR && self.minor >= OLDEST_MINOR
    }
}

impl Answer {
    /// Returns the bytes of the answer to the request with the number `unique`.
    ///
    /// The data of [`Data`](Self::Data) follows them.
    pub fn encode(&self, unique: u64) -> Encoded {
        let mut out = Encoded { bytes: [0; MAX_ANSWER], len: OUT_HEADER };
        let (mut error, mut data) = (0, 0);
        match *self {
            Answer::Error(errno) => error = -(errno as i32),
            Answer::Done => {}
            Answer::Init { kernel, keeps_size } => init(&mut out, kernel, keeps_size),
            Answer::Attributes(attributes) => put_attributes(&mut out, attributes),
            Answer::Opened => {
                out.u64(0);
                out.u32(OPEN_FLAGS);
                out.u32(0);
            }
            Answer::Written(bytes) => {
                out.u32(bytes);
                out.u32(0);
            }
            Answer::Position(offset) => out.u64(offset),
            Answer::FileSystem => {
                // blocks, bfree, bavail, files, ffree.
                (0..5).for_each(|_| out.u64(0));
                for number in [512, 255, 512, 0, 0, 0, 0, 0, 0, 0] {
                    out.u32(number);
                }
            }
            Answer::Data(len) => data = len,
        }
        let len = u32::try_from(out.len).unwrap_or(0) + data;
        let (header, _) = out.bytes.split_at_mut(OUT_HEADER);
        let (first, second) = header.split_at_mut(8);
        first[..4].copy_from_slice(&len.to_ne_bytes());
        first[4..].copy_from_slice(&error.to_ne_bytes());
        second.copy_from_slice(&unique.to_ne_bytes());
        out
    }
}

fn init(out: &mut Encoded, kernel: Init, keeps_size: bool) {
    let mut flags = init_flag::ASYNC_READ
        | init_flag::BIG_WRITES
        | init_flag::ASYNC_DIO
        | init_flag::MAX_PAGES
        | init_flag::INIT_EXT
        | init_flag::DIRECT_IO_ALLOW_MMAP;
    if keeps_size {
        flags |= init_flag::ATOMIC_O_TRUNC;
    }
    flags &= kernel.flags;
    out.u32(MAJOR);
    out.u32(MINOR.min(kernel.minor));
    out.u32(kernel.max_readahead);
    // The lower half.
    out.u32((flags & u64::from(u32::MAX)) as u32);
    let background = MAX_BACKGROUND.to_ne_bytes();
    let congestion = (MAX_BACKGROUND / 4 * 3).to_ne_bytes();
    out.put(&background);
    out.put(&congestion);
    out.u32(MAX_DATA);
    // Granularity of times, nanoseconds.
    out.u32(1);
    let pages = (MAX_DATA / 4096) as u16;
    out.put(&pages.to_ne_bytes());
    // map_alignment.
    out.put(&[0; 2]);
    out.u32((flags >> 32) as u32);
    (0..7).for_each(|_| out.u32(0));
}

fn put_attributes(out: &mut Encoded, attributes: Attributes) {
    let Attributes { size, allocated, time_s, mode, uid, gid, block_size } = attributes;
    out.u64(ATTRIBUTES_S);
    out.u64(0);
    for number in [ROOT, size, allocated.div_ceil(512), time_s, time_s, time_s] {
        out.u64(number);
    }
    // Nanoseconds of the times, mode, links, owner, group, device, block size, flags.
    for number in [0, 0, 0, mode, 1, uid, gid, 0, block_size, 0] {
        out.u32(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(opcode: u32, node: u64, arguments: &[u8], data: usize) -> Vec<u8> {
        let len = (IN_HEADER + arguments.len() + data) as u32;
        let mut bytes = Vec::new();
        bytes.extend(len.to_ne_bytes());
        bytes.extend(opcode.to_ne_bytes());
        bytes.extend(7u64.to_ne_bytes());
        bytes.extend(node.to_ne_bytes());
        bytes.extend([0; 16]);
        bytes.extend(arguments);
        bytes.extend(vec![0; data]);
        bytes
    }

    fn parse(bytes: &[u8]) -> Result<Message, Invalid> {
        Message::parse(&bytes[..bytes.len().min(MAX_REQUEST)], bytes.len())
    }

    fn write(len: u32) -> Vec<u8> {
        let mut arguments = vec![0; WRITE_ARGUMENTS];
        arguments[8..16].copy_from_slice(&4096u64.to_ne_bytes());
        arguments[16..20].copy_from_slice(&len.to_ne_bytes());
        arguments
    }

    #[test]
    fn a_write_has_as_much_data_as_it_says() {
        let parsed = parse(&message(opcode::WRITE, ROOT, &write(100), 100)).unwrap();
        let request = Request::Write { offset: 4096, len: 100, sync: false };
        assert_eq!(parsed, Message { unique: 7, request });
        for (len, data) in [(100, 99), (99, 100), (u32::MAX, 0), (MAX_DATA + 1, MAX_DATA as usize)]
        {
            let invalid = parse(&message(opcode::WRITE, ROOT, &write(len), data));
            assert_eq!(invalid, Err(Invalid::Arguments { unique: 7 }), "{len} {data}");
        }
    }

    #[test]
    fn a_message_of_another_length_than_it_says_is_no_request() {
        let whole = message(opcode::GETATTR, ROOT, &[0; 16], 0);
        assert!(parse(&whole).is_ok());
        for len in 0..whole.len() {
            assert_eq!(parse(&whole[..len]), Err(Invalid::Header), "{len}");
        }
    }

    #[test]
    fn truncated_arguments_are_answered_with_an_error() {
        for (opcode, len) in [
            (opcode::READ, 20),
            (opcode::SETATTR, 88),
            (opcode::FALLOCATE, 28),
            (opcode::LSEEK, 20),
            (opcode::INIT, 16),
        ] {
            assert!(parse(&message(opcode, ROOT, &vec![0; len], 0)).is_ok(), "{opcode}");
            let short = parse(&message(opcode, ROOT, &vec![0; len - 1], 0));
            assert_eq!(short, Err(Invalid::Arguments { unique: 7 }), "{opcode}");
        }
    }

    #[test]
    fn another_inode_is_refused_and_an_unknown_operation_known_as_such() {
        let other = parse(&message(opcode::READ, 2, &[0; 40], 0));
        assert_eq!(other, Err(Invalid::Inode { unique: 7 }));
        let unknown = parse(&message(4711, 2, &[], 0)).unwrap();
        assert_eq!(unknown.request, Request::Unknown(4711));
    }

    #[test]
    fn answers_say_their_length() {
        let len = |answer: Answer| {
            let encoded = answer.encode(9);
            let said = u32::from_ne_bytes(encoded.bytes()[..4].try_into().unwrap());
            assert_eq!(encoded.bytes()[8..16], 9u64.to_ne_bytes());
            (said, encoded.bytes().len())
        };
        let attributes = Attributes {
            size: 5,
            allocated: 5,
            time_s: 0,
            mode: 0,
            uid: 0,
            gid: 0,
            block_size: 4096,
        };
        let kernel = Init { major: 7, minor: 45, max_readahead: 0, flags: u64::MAX };
        assert_eq!(len(Answer::Error(Errno::EIO)), (16, 16));
        assert_eq!(len(Answer::Init { kernel, keeps_size: true }), (80, 80));
        assert_eq!(len(Answer::Attributes(attributes)), (120, 120));
        assert_eq!(len(Answer::Opened), (32, 32));
        assert_eq!(len(Answer::Written(1)), (24, 24));
        assert_eq!(len(Answer::FileSystem), (96, 96));
        assert_eq!(len(Answer::Data(4096)), (4112, 16));
    }
}
