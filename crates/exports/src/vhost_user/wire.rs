//! The wire format of vhost-user, without I/O: bytes and descriptors in, typed messages out;
//! replies in, bytes out.
//!
//! Layouts and numbers are those of the vhost-user protocol specification in QEMU's documentation
//! (docs/interop/vhost-user.rst); numbers are in the machine's byte order. What a [`Message`] holds
//! was checked as far as it can be without knowing the session.

#![forbid(unsafe_code)]

use std::fmt;
use std::os::fd::OwnedFd;

use guest_memory::Region;

/// Length of a message header, bytes.
pub const HEADER_LEN: usize = 12;

/// The longest payload taken, bytes. No known request comes near; an unknown one may be longer than
/// all known ones, and is still read to its end so that it can be refused by a reply.
pub const MAX_PAYLOAD: usize = 4096;

/// The most regions SET_MEM_TABLE can name: 8 by the specification, but the front ends that use
/// rust-vmm's crates, such as Cloud Hypervisor, send up to 32.
pub const MAX_TABLE_REGIONS: usize = 32;

/// The most descriptors a message can come with.
pub const MAX_FDS: usize = MAX_TABLE_REGIONS;

/// The most bytes of config space that one message reads or writes.
pub const MAX_CONFIG: usize = 256;

/// The largest queue size allowed by the virtio specification (2.7).
const MAX_QUEUE_SIZE: u32 = 32768;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 0x3;
const FLAG_REPLY: u32 = 1 << 2;
const FLAG_NEED_REPLY: u32 = 1 << 3;

/// In the payload of SET_VRING_KICK, _CALL and _ERR: the queue's index, and "no descriptor comes
/// with this".
const VRING_IDX_MASK: u64 = 0xff;
const VRING_NOFD: u64 = 1 << 8;

macro_rules! requests {
    ($($name:ident = $code:literal $text:literal),* $(,)?) => {
        /// The requests that a session understands.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[expect(missing_docs, reason = "named as in the specification")]
        pub enum Request { $($name = $code),* }

        impl Request {
            /// All of them.
            pub const ALL: &[Request] = &[$(Request::$name),*];

            /// Its name in the specification, without `VHOST_USER_`.
            pub fn name(self) -> &'static str {
                match self { $(Request::$name => $text),* }
            }
        }
    };
}

requests! {
    GetFeatures = 1 "GET_FEATURES",
    SetFeatures = 2 "SET_FEATURES",
    SetOwner = 3 "SET_OWNER",
    ResetOwner = 4 "RESET_OWNER",
    SetMemTable = 5 "SET_MEM_TABLE",
    SetVringNum = 8 "SET_VRING_NUM",
    SetVringAddr = 9 "SET_VRING_ADDR",
    SetVringBase = 10 "SET_VRING_BASE",
    GetVringBase = 11 "GET_VRING_BASE",
    SetVringKick = 12 "SET_VRING_KICK",
    SetVringCall = 13 "SET_VRING_CALL",
    SetVringErr = 14 "SET_VRING_ERR",
    GetProtocolFeatures = 15 "GET_PROTOCOL_FEATURES",
    SetProtocolFeatures = 16 "SET_PROTOCOL_FEATURES",
    GetQueueNum = 17 "GET_QUEUE_NUM",
    SetVringEnable = 18 "SET_VRING_ENABLE",
    GetConfig = 24 "GET_CONFIG",
    SetConfig = 25 "SET_CONFIG",
    ResetDevice = 34 "RESET_DEVICE",
    GetMaxMemSlots = 36 "GET_MAX_MEM_SLOTS",
    AddMemReg = 37 "ADD_MEM_REG",
    RemMemReg = 38 "REM_MEM_REG",
    SetStatus = 39 "SET_STATUS",
    GetStatus = 40 "GET_STATUS",
}

impl Request {
    /// The request of this number; `None` when no session understands it.
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.iter().copied().find(|&request| request as u32 == code)
    }

    /// Whether the specification gives it a reply of its own, which stands for an acknowledgement.
    pub fn has_reply(self) -> bool {
        matches!(
            self,
            Request::GetFeatures
                | Request::GetProtocolFeatures
                | Request::GetQueueNum
                | Request::GetVringBase
                | Request::GetConfig
                | Request::GetMaxMemSlots
                | Request::GetStatus
        )
    }

    /// How long its payload may be, in bytes: least and most.
    fn payload_len(self) -> (usize, usize) {
        match self {
            Request::GetFeatures
            | Request::GetProtocolFeatures
            | Request::GetQueueNum
            | Request::GetMaxMemSlots
            | Request::GetStatus
            | Request::SetOwner
            | Request::ResetOwner
            | Request::ResetDevice => (0, 0),
            Request::SetFeatures
            | Request::SetProtocolFeatures
            | Request::SetStatus
            | Request::SetVringKick
            | Request::SetVringCall
            | Request::SetVringErr
            | Request::SetVringNum
            | Request::SetVringBase
            | Request::GetVringBase
            | Request::SetVringEnable => (8, 8),
            Request::SetVringAddr | Request::AddMemReg | Request::RemMemReg => (40, 40),
            Request::SetMemTable => (8, 8 + 32 * MAX_TABLE_REGIONS),
            Request::GetConfig | Request::SetConfig => (12, 12 + MAX_CONFIG),
        }
    }
}

/// The number of a request, for people: its name, where the specification has one.
pub fn request_name(code: u32) -> String {
    let unsupported = match code {
        6 => "SET_LOG_BASE",
        7 => "SET_LOG_FD",
        19 => "SEND_RARP",
        20 => "NET_SET_MTU",
        21 => "SET_BACKEND_REQ_FD",
        22 => "IOTLB_MSG",
        23 => "SET_VRING_ENDIAN",
        26 => "CREATE_CRYPTO_SESSION",
        27 => "CLOSE_CRYPTO_SESSION",
        28 => "POSTCOPY_ADVISE",
        29 => "POSTCOPY_LISTEN",
        30 => "POSTCOPY_END",
        31 => "GET_INFLIGHT_FD",
        32 => "SET_INFLIGHT_FD",
        33 => "GPU_SET_SOCKET",
        35 => "VRING_KICK",
        41 => "GET_SHARED_OBJECT",
        42 => "SET_DEVICE_STATE_FD",
        43 => "CHECK_DEVICE_STATE",
        44 => "GET_SHMEM_CONFIG",
        _ => match Request::from_code(code) {
            Some(request) => request.name(),
            None => return format!("request {code}"),
        },
    };
    unsupported.to_owned()
}

/// What a message begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Number of the request; maybe none that is known.
    pub code: u32,
    /// The sender waits for an acknowledgement, if REPLY_ACK was negotiated.
    pub need_reply: bool,
    /// Bytes that follow; at most [`MAX_PAYLOAD`].
    pub payload_len: usize,
}

impl Header {
    /// Takes a header apart.
    ///
    /// # Errors
    ///
    /// After one of these it is unknown where the next message begins: [`WireError::Flags`],
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

/// SET_VRING_ADDR. Addresses are in the front end's address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VringAddr {
    /// The descriptor table, a multiple of 16.
    pub desc: u64,
    /// The available ring, a multiple of 2.
    pub avail: u64,
    /// The used ring, a multiple of 4.
    pub used: u64,
    /// Writes to the used ring are to be logged (VHOST_VRING_F_LOG).
    pub log: bool,
}

/// A region to take away; its mmap offset and descriptor mean nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionId {
    /// Guest address.
    pub guest_addr: u64,
    /// Size, bytes.
    pub size: u64,
    /// Address in the front end.
    pub user_addr: u64,
}

/// Who writes config space, and thus which fields may be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConfigWrite {
    /// The guest, its writable fields.
    Driver,
    /// The destination of a migration.
    Migration,
}

/// A message, its content valid as far as that shows without the session.
#[derive(Debug)]
#[expect(missing_docs, reason = "named as in the specification")]
pub enum Message {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<Region>),
    /// `num`: a power of two up to 32768.
    SetVringNum {
        index: u32,
        num: u16,
    },
    SetVringAddr {
        index: u32,
        addr: VringAddr,
    },
    SetVringBase {
        index: u32,
        base: u16,
    },
    GetVringBase {
        index: u32,
    },
    /// Without a descriptor the ring is to be polled.
    SetVringKick {
        index: u32,
        fd: Option<OwnedFd>,
    },
    /// Without a descriptor the driver polls.
    SetVringCall {
        index: u32,
        fd: Option<OwnedFd>,
    },
    SetVringErr {
        index: u32,
        fd: Option<OwnedFd>,
    },
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable {
        index: u32,
        enable: bool,
    },
    /// `size`: at most [`MAX_CONFIG`].
    GetConfig {
        offset: u32,
        size: u32,
        flags: u32,
    },
    /// `data`: at most [`MAX_CONFIG`] bytes.
    SetConfig {
        offset: u32,
        data: Vec<u8>,
        writer: ConfigWrite,
    },
    ResetDevice,
    GetMaxMemSlots,
    AddMemReg(Region),
    RemMemReg(RegionId),
    SetStatus(u8),
    GetStatus,
}

/// Why bytes are not a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WireError {
    /// Another version than 1, a reply, or a flag that means nothing.
    Flags(u32),
    /// The header announces more than [`MAX_PAYLOAD`] bytes.
    PayloadTooLong {
        /// How many.
        len: usize,
    },
    /// No request that this back end understands.
    UnknownRequest,
    /// The payload is shorter or longer than the request's can be.
    PayloadLength {
        /// What came, bytes.
        len: usize,
        /// What may come, least and most.
        allowed: (usize, usize),
    },
    /// Other descriptors than the request wants.
    Descriptors {
        /// How many came.
        got: usize,
        /// How many the request wants.
        wanted: usize,
    },
    /// More descriptors than any request wants; the surplus is lost.
    TooManyDescriptors,
    /// A field holds what it cannot.
    Field {
        /// Which.
        name: &'static str,
        /// What it holds.
        value: u64,
        /// What it could hold.
        allowed: &'static str,
    },
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WireError::Flags(flags) => {
                write!(f, "header flags {flags:#x} are not those of a request of version 1")
            }
            WireError::PayloadTooLong { len } => {
                write!(f, "payload of {len} bytes, at most {MAX_PAYLOAD} are taken")
            }
            WireError::UnknownRequest => f.write_str("not a request that is supported here"),
            WireError::PayloadLength { len, allowed: (least, most) } if least == most => {
                write!(f, "payload of {len} bytes instead of {least}")
            }
            WireError::PayloadLength { len, allowed: (least, most) } => {
                write!(f, "payload of {len} bytes instead of {least} to {most}")
            }
            WireError::Descriptors { got, wanted } => {
                write!(f, "came with {got} file descriptors instead of {wanted}")
            }
            WireError::TooManyDescriptors => {
                write!(f, "came with more than {MAX_FDS} file descriptors")
            }
            WireError::Field { name, value, allowed } => {
                write!(f, "{name} is {value:#x}, allowed is {allowed}")
            }
        }
    }
}

impl std::error::Error for WireError {}

/// Takes a whole message apart: a header, its payload and nothing else.
///
/// # Errors
///
/// [`WireError`]; a message cut short shows as [`WireError::PayloadLength`].
pub fn parse(bytes: &[u8], fds: Vec<OwnedFd>) -> Result<(Header, Message), WireError> {
    let Some((header, payload)) = bytes.split_first_chunk::<HEADER_LEN>() else {
        let allowed = (HEADER_LEN, HEADER_LEN + MAX_PAYLOAD);
        return Err(WireError::PayloadLength { len: bytes.len(), allowed });
    };
    let header = Header::parse(*header)?;
    if payload.len() != header.payload_len {
        let allowed = (header.payload_len, header.payload_len);
        return Err(WireError::PayloadLength { len: payload.len(), allowed });
    }
    Ok((header, Message::parse(header.code, payload, fds)?))
}

impl Message {
    /// Makes a message of a payload and the descriptors that came with it. Descriptors that the
    /// message does not keep are closed.
    ///
    /// # Errors
    ///
    /// [`WireError`]. Where the next message begins is known nevertheless.
    pub fn parse(code: u32, payload: &[u8], fds: Vec<OwnedFd>) -> Result<Self, WireError> {
        let request = Request::from_code(code).ok_or(WireError::UnknownRequest)?;
        let allowed = request.payload_len();
        if payload.len() < allowed.0 || payload.len() > allowed.1 {
            return Err(WireError::PayloadLength { len: payload.len(), allowed });
        }
        let mut fields = Fields(payload);
        let mut fds = Fds(fds);
        let message = match request {
            Request::GetFeatures => Message::GetFeatures,
            Request::SetFeatures => Message::SetFeatures(fields.u64()?),
            Request::SetOwner => Message::SetOwner,
            Request::ResetOwner => Message::ResetOwner,
            Request::SetMemTable => Message::SetMemTable(mem_table(&mut fields, &mut fds)?),
            Request::SetVringNum => {
                let (index, num) = (fields.u32()?, fields.u32()?);
                let num = u16::try_from(num)
                    .ok()
                    .filter(|num| num.is_power_of_two() && u32::from(*num) <= MAX_QUEUE_SIZE)
                    .ok_or(WireError::Field {
                        name: "queue size",
                        value: num.into(),
                        allowed: "a power of two up to 32768",
                    })?;
                Message::SetVringNum { index, num }
            }
            Request::SetVringAddr => {
                let (index, flags) = (fields.u32()?, fields.u32()?);
                let addr = vring_addr(&mut fields, flags)?;
                Message::SetVringAddr { index, addr }
            }
            Request::SetVringBase => {
                let (index, base) = (fields.u32()?, fields.u32()?);
                let base = u16::try_from(base).map_err(|_| WireError::Field {
                    name: "base",
                    value: base.into(),
                    allowed: "an index of a split ring, up to 65535",
                })?;
                Message::SetVringBase { index, base }
            }
            Request::GetVringBase => Message::GetVringBase { index: fields.u32()? },
            Request::SetVringKick => {
                let (index, fd) = vring_fd(&mut fields, &mut fds)?;
                Message::SetVringKick { index, fd }
            }
            Request::SetVringCall => {
                let (index, fd) = vring_fd(&mut fields, &mut fds)?;
                Message::SetVringCall { index, fd }
            }
            Request::SetVringErr => {
                let (index, fd) = vring_fd(&mut fields, &mut fds)?;
                Message::SetVringErr { index, fd }
            }
            Request::GetProtocolFeatures => Message::GetProtocolFeatures,
            Request::SetProtocolFeatures => Message::SetProtocolFeatures(fields.u64()?),
            Request::GetQueueNum => Message::GetQueueNum,
            Request::SetVringEnable => {
                let (index, enable) = (fields.u32()?, fields.u32()?);
                let enable = match enable {
                    0 => false,
                    1 => true,
                    _ => {
                        let value = enable.into();
                        return Err(WireError::Field { name: "enable", value, allowed: "0 or 1" });
                    }
                };
                Message::SetVringEnable { index, enable }
            }
            Request::GetConfig => {
                let (offset, size, flags) = config_header(&mut fields)?;
                Message::GetConfig { offset, size, flags }
            }
            Request::SetConfig => {
                let (offset, size, flags) = config_header(&mut fields)?;
                let writer = match flags {
                    0 => ConfigWrite::Driver,
                    1 => ConfigWrite::Migration,
                    _ => {
                        let value = flags.into();
                        return Err(WireError::Field { name: "flags", value, allowed: "0 or 1" });
                    }
                };
                let data = fields.take(size as usize)?.to_vec();
                Message::SetConfig { offset, data, writer }
            }
            Request::ResetDevice => Message::ResetDevice,
            Request::GetMaxMemSlots => Message::GetMaxMemSlots,
            Request::AddMemReg => {
                fields.u64()?;
                let region = region(&mut fields)?;
                Message::AddMemReg(region.with_fd(fds.one()?))
            }
            Request::RemMemReg => {
                // One descriptor may come by mistake, and is closed unused.
                fds.0.truncate(fds.0.len().saturating_sub(1));
                fields.u64()?;
                let RegionFields { guest_addr, size, user_addr, .. } = region(&mut fields)?;
                Message::RemMemReg(RegionId { guest_addr, size, user_addr })
            }
            Request::SetStatus => {
                let status = fields.u64()?;
                Message::SetStatus(u8::try_from(status).map_err(|_| WireError::Field {
                    name: "status",
                    value: status,
                    allowed: "a device status, up to 0xff",
                })?)
            }
            Request::GetStatus => Message::GetStatus,
        };
        fds.none_left()?;
        Ok(message)
    }
}

/// The fields of a payload, in their order.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], WireError> {
        let Some((taken, rest)) = self.0.split_at_checked(len) else {
            let allowed = (len, len);
            return Err(WireError::PayloadLength { len: self.0.len(), allowed });
        };
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn u32(&mut self) -> Result<u32, WireError> {
        self.array().map(u32::from_ne_bytes)
    }

    fn u64(&mut self) -> Result<u64, WireError> {
        self.array().map(u64::from_ne_bytes)
    }
}

/// The descriptors of a message that nobody has taken yet.
struct Fds(Vec<OwnedFd>);

impl Fds {
    fn one(&mut self) -> Result<OwnedFd, WireError> {
        let got = self.0.len();
        let fd = self.0.pop().ok_or(WireError::Descriptors { got, wanted: 1 })?;
        if got != 1 {
            return Err(WireError::Descriptors { got, wanted: 1 });
        }
        Ok(fd)
    }

    fn none_left(&self) -> Result<(), WireError> {
        match self.0.len() {
            0 => Ok(()),
            got => Err(WireError::Descriptors { got, wanted: 0 }),
        }
    }
}

/// A region without its descriptor.
struct RegionFields {
    guest_addr: u64,
    size: u64,
    user_addr: u64,
    mmap_offset: u64,
}

impl RegionFields {
    fn with_fd(self, fd: OwnedFd) -> Region {
        let RegionFields { guest_addr, size, user_addr, mmap_offset } = self;
        Region { guest_addr, size, user_addr, mmap_offset, fd }
    }
}

fn region(fields: &mut Fields) -> Result<RegionFields, WireError> {
    Ok(RegionFields {
        guest_addr: fields.u64()?,
        size: fields.u64()?,
        user_addr: fields.u64()?,
        mmap_offset: fields.u64()?,
    })
}

fn mem_table(fields: &mut Fields, fds: &mut Fds) -> Result<Vec<Region>, WireError> {
    let (count, _padding) = (fields.u32()?, fields.u32()?);
    let count = usize::try_from(count).ok().filter(|&n| n <= MAX_TABLE_REGIONS).ok_or(
        WireError::Field { name: "number of regions", value: count.into(), allowed: "up to 32" },
    )?;
    // Front ends differ in whether the regions that are not there are sent.
    if fields.0.len() < 32 * count {
        let allowed = (8 + 32 * count, 8 + 32 * MAX_TABLE_REGIONS);
        return Err(WireError::PayloadLength { len: 8 + fields.0.len(), allowed });
    }
    if fds.0.len() != count {
        return Err(WireError::Descriptors { got: fds.0.len(), wanted: count });
    }
    fds.0.drain(..).map(|fd| Ok(region(fields)?.with_fd(fd))).collect()
}

fn vring_addr(fields: &mut Fields, flags: u32) -> Result<VringAddr, WireError> {
    if flags > 1 {
        let allowed = "0 or VHOST_VRING_F_LOG";
        return Err(WireError::Field { name: "flags", value: flags.into(), allowed });
    }
    let mut aligned = |name, align: u64, allowed| {
        let value = fields.u64()?;
        if !value.is_multiple_of(align) {
            return Err(WireError::Field { name, value, allowed });
        }
        Ok(value)
    };
    let desc = aligned("address of the descriptor table", 16, "a multiple of 16")?;
    let used = aligned("address of the used ring", 4, "a multiple of 4")?;
    let avail = aligned("address of the available ring", 2, "a multiple of 2")?;
    Ok(VringAddr { desc, avail, used, log: flags == 1 })
}

fn vring_fd(fields: &mut Fields, fds: &mut Fds) -> Result<(u32, Option<OwnedFd>), WireError> {
    let value = fields.u64()?;
    if value & !(VRING_IDX_MASK | VRING_NOFD) != 0 {
        let allowed = "a queue index up to 255 and the flag 0x100";
        return Err(WireError::Field { name: "queue index", value, allowed });
    }
    let index = (value & VRING_IDX_MASK) as u32;
    let fd = if value & VRING_NOFD == 0 { Some(fds.one()?) } else { None };
    Ok((index, fd))
}

fn config_header(fields: &mut Fields) -> Result<(u32, u32, u32), WireError> {
    let (offset, size, flags) = (fields.u32()?, fields.u32()?, fields.u32()?);
    if usize::try_from(size).ok() != Some(fields.0.len()) {
        let name = "config size";
        let allowed = "what the payload has room for";
        return Err(WireError::Field { name, value: size.into(), allowed });
    }
    Ok((offset, size, flags))
}

/// What a request is answered with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// A number, or an acknowledgement: 0 for success.
    U64(u64),
    /// GET_VRING_BASE.
    VringState {
        /// The queue.
        index: u32,
        /// Its base.
        num: u32,
    },
    /// GET_CONFIG.
    Config {
        /// As in the request.
        offset: u32,
        /// As in the request.
        flags: u32,
        /// The bytes; as many as were asked for.
        data: Vec<u8>,
    },
    /// GET_CONFIG that cannot be answered: no payload.
    Nothing,
}

impl Reply {
    /// A request was carried out.
    pub const ACK: Reply = Reply::U64(0);
    /// A request failed.
    pub const NACK: Reply = Reply::U64(1);

    /// The reply's bytes, header first, to the request of this number.
    pub fn encode(&self, code: u32) -> Vec<u8> {
        let mut payload = Vec::new();
        match self {
            Reply::U64(value) => payload.extend(value.to_ne_bytes()),
            Reply::VringState { index, num } => {
                payload.extend(index.to_ne_bytes());
                payload.extend(num.to_ne_bytes());
            }
            Reply::Config { offset, flags, data } => {
                payload.extend(offset.to_ne_bytes());
                payload.extend((data.len() as u32).to_ne_bytes());
                payload.extend(flags.to_ne_bytes());
                payload.extend(data);
            }
            Reply::Nothing => {}
        }
        let mut bytes = Vec::with_capacity(HEADER_LEN + payload.len());
        bytes.extend(code.to_ne_bytes());
        bytes.extend((VERSION | FLAG_REPLY).to_ne_bytes());
        bytes.extend((payload.len() as u32).to_ne_bytes());
        bytes.extend(payload);
        bytes
    }
}
