//! Messages with valid contents.

use std::os::fd::OwnedFd;

use guest_memory::Region;

use super::{MAX_CONFIG, MAX_TABLE_REGIONS, Request, WireError};

/// The largest queue size allowed by the virtio specification (2.7).
const MAX_QUEUE_SIZE: u32 = 32768;

/// Fields of the payload of SET_VRING_KICK, _CALL and _ERR: the queue's index, and the flag for "without
/// descriptor".
const VRING_IDX_MASK: u64 = 0xff;
const VRING_NOFD: u64 = 1 << 8;

/// SET_VRING_ADDR. Addresses are in the front end's address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VringAddr {
    /// Address of the descriptor table in the front end, a multiple of 8. Drivers owe a multiple of 16.
    pub desc: u64,
    /// Address of the available ring in the front end, a multiple of 2.
    pub avail: u64,
    /// Address of the used ring in the front end, a multiple of 4.
    pub used: u64,
    /// Guest address for the log of writes to the used ring (VHOST_VRING_F_LOG).
    pub log: Option<u64>,
}

/// A region to remove; its mmap offset and descriptor have no meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionId {
    /// Guest address.
    pub guest_addr: u64,
    /// Size, bytes.
    pub size: u64,
    /// Address of the first byte in the front end.
    pub user_addr: u64,
}

/// The writer of configuration space, which decides the writable fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConfigWrite {
    /// The guest.
    Driver,
    /// The destination of a migration.
    Migration,
}

/// SET_LOG_BASE: memory for the log of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogDescription {
    /// Size in bytes.
    pub mmap_size: u64,
    /// Offset in its file in bytes.
    pub mmap_offset: u64,
}

/// GET_INFLIGHT_FD, SET_INFLIGHT_FD: memory for in-flight records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InflightDescription {
    /// Size in bytes.
    pub mmap_size: u64,
    /// Offset in its file in bytes.
    pub mmap_offset: u64,
    /// Number of rings.
    pub num_queues: u16,
    /// Number of entries of each ring: a power of two up to 32768.
    pub queue_size: u16,
}

/// A message that has passed all checks that need no session.
#[derive(Debug)]
#[expect(missing_docs, reason = "named as in the specification")]
pub enum Message {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<Region>),
    SetLogBase {
        description: LogDescription,
        fd: OwnedFd,
    },
    /// Eventfd to signal after an entry in the log.
    SetLogFd(OwnedFd),
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
    /// Without a descriptor the ring is polled.
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
    /// Socket for messages of the back end.
    SetBackendReqFd(OwnedFd),
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
    /// `payload_len`: length of the request's payload, which is also that of the reply.
    GetInflightFd {
        num_queues: u16,
        queue_size: u16,
        payload_len: usize,
    },
    SetInflightFd {
        description: InflightDescription,
        fd: OwnedFd,
    },
    ResetDevice,
    GetMaxMemSlots,
    AddMemReg(Region),
    RemMemReg(RegionId),
    SetStatus(u8),
    GetStatus,
}

impl Message {
    /// Parses the payload of a request, and the descriptors received with it.
    ///
    /// `code`: the request's number. Unused descriptors are closed.
    ///
    /// # Errors
    ///
    /// [`WireError`]. The start of the next message is still known.
    pub fn parse(code: u32, payload: &[u8], fds: Vec<OwnedFd>) -> Result<Self, WireError> {
        let request = Request::from_code(code).ok_or(WireError::UnknownRequest)?;
        let least = request.payload_len();
        if payload.len() < least {
            return Err(WireError::PayloadLength { len: payload.len(), least });
        }
        let mut fields = Fields(payload);
        let mut fds = Fds(fds);
        let message = match request {
            Request::GetFeatures => Message::GetFeatures,
            Request::SetFeatures => Message::SetFeatures(fields.u64()?),
            Request::SetOwner => Message::SetOwner,
            Request::ResetOwner => Message::ResetOwner,
            Request::SetMemTable => Message::SetMemTable(mem_table(&mut fields, &mut fds)?),
            Request::SetLogBase => {
                let description =
                    LogDescription { mmap_size: fields.u64()?, mmap_offset: fields.u64()? };
                Message::SetLogBase { description, fd: fds.one()? }
            }
            Request::SetLogFd => Message::SetLogFd(fds.one()?),
            Request::SetVringNum => {
                let (index, num) = (fields.u32()?, fields.u32()?);
                Message::SetVringNum { index, num: queue_size(num)? }
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
            Request::SetBackendReqFd => Message::SetBackendReqFd(fds.one()?),
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
            Request::GetInflightFd => {
                let InflightDescription { num_queues, queue_size, .. } = inflight(&mut fields)?;
                let payload_len = payload.len();
                Message::GetInflightFd { num_queues, queue_size, payload_len }
            }
            Request::SetInflightFd => {
                let description = inflight(&mut fields)?;
                Message::SetInflightFd { description, fd: fds.one()? }
            }
            Request::ResetDevice => Message::ResetDevice,
            Request::GetMaxMemSlots => Message::GetMaxMemSlots,
            Request::AddMemReg => {
                fields.u64()?;
                let region = region(&mut fields)?;
                Message::AddMemReg(region.with_fd(fds.one()?))
            }
            Request::RemMemReg => {
                // A superfluous descriptor is tolerated and closed.
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

/// The fields of a payload in order.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], WireError> {
        let Some((taken, rest)) = self.0.split_at_checked(len) else {
            return Err(WireError::PayloadLength { len: self.0.len(), least: len });
        };
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(super) fn u32(&mut self) -> Result<u32, WireError> {
        self.array().map(u32::from_ne_bytes)
    }

    fn u16(&mut self) -> Result<u16, WireError> {
        self.array().map(u16::from_ne_bytes)
    }

    fn u64(&mut self) -> Result<u64, WireError> {
        self.array().map(u64::from_ne_bytes)
    }
}

/// The descriptors of a message that were not taken yet.
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
    // Some front ends omit unused regions.
    if fields.0.len() < 32 * count {
        return Err(WireError::PayloadLength { len: 8 + fields.0.len(), least: 8 + 32 * count });
    }
    if fds.0.len() != count {
        return Err(WireError::Descriptors { got: fds.0.len(), wanted: count });
    }
    fds.0.drain(..).map(|fd| Ok(region(fields)?.with_fd(fd))).collect()
}

fn queue_size(num: u32) -> Result<u16, WireError> {
    u16::try_from(num)
        .ok()
        .filter(|num| num.is_power_of_two() && u32::from(*num) <= MAX_QUEUE_SIZE)
        .ok_or(WireError::Field {
            name: "queue size",
            value: num.into(),
            allowed: "a power of two up to 32768",
        })
}

fn inflight(fields: &mut Fields) -> Result<InflightDescription, WireError> {
    Ok(InflightDescription {
        mmap_size: fields.u64()?,
        mmap_offset: fields.u64()?,
        num_queues: fields.u16()?,
        queue_size: queue_size(fields.u16()?.into())?,
    })
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
    let desc = aligned("address of the descriptor table", 8, "a multiple of 8")?;
    let used = aligned("address of the used ring", 4, "a multiple of 4")?;
    let avail = aligned("address of the available ring", 2, "a multiple of 2")?;
    let log = fields.u64()?;
    Ok(VringAddr { desc, avail, used, log: (flags == 1).then_some(log) })
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
    match usize::try_from(size) {
        Ok(bytes) if bytes <= fields.0.len().min(MAX_CONFIG) => Ok((offset, size, flags)),
        Ok(_) | Err(_) => Err(WireError::Field {
            name: "config size",
            value: size.into(),
            allowed: "what the payload has room for, up to 256",
        }),
    }
}
