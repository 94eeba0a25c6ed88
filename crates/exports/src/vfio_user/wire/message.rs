//! Commands of a client.

use std::fmt;
use std::os::fd::OwnedFd;

use super::irqs::SetIrqs;
use super::{MAX_DATA, WireError};

/// Command numbers.
pub(in super::super) mod number {
    pub(in super::super::super) const VERSION: u16 = 1;
    pub(in super::super::super) const DMA_MAP: u16 = 2;
    pub(in super::super::super) const DMA_UNMAP: u16 = 3;
    pub(in super::super::super) const DEVICE_GET_INFO: u16 = 4;
    pub(in super::super::super) const DEVICE_GET_REGION_INFO: u16 = 5;
    pub(in super::super::super) const DEVICE_GET_REGION_IO_FDS: u16 = 6;
    pub(in super::super::super) const DEVICE_GET_IRQ_INFO: u16 = 7;
    pub(in super::super::super) const DEVICE_SET_IRQS: u16 = 8;
    pub(in super::super::super) const REGION_READ: u16 = 9;
    pub(in super::super::super) const REGION_WRITE: u16 = 10;
    pub(in super::super::super) const DMA_READ: u16 = 11;
    pub(in super::super::super) const DMA_WRITE: u16 = 12;
    pub(in super::super::super) const DEVICE_RESET: u16 = 13;
    pub(in super::super::super) const REGION_WRITE_MULTI: u16 = 15;
    pub(in super::super::super) const DEVICE_FEATURE: u16 = 16;
}

/// Returns the name of a command.
pub fn command_name(command: u16) -> String {
    let name = match command {
        number::VERSION => "VERSION",
        number::DMA_MAP => "DMA_MAP",
        number::DMA_UNMAP => "DMA_UNMAP",
        number::DEVICE_GET_INFO => "DEVICE_GET_INFO",
        number::DEVICE_GET_REGION_INFO => "DEVICE_GET_REGION_INFO",
        number::DEVICE_GET_REGION_IO_FDS => "DEVICE_GET_REGION_IO_FDS",
        number::DEVICE_GET_IRQ_INFO => "DEVICE_GET_IRQ_INFO",
        number::DEVICE_SET_IRQS => "DEVICE_SET_IRQS",
        number::REGION_READ => "REGION_READ",
        number::REGION_WRITE => "REGION_WRITE",
        number::DMA_READ => "DMA_READ",
        number::DMA_WRITE => "DMA_WRITE",
        number::DEVICE_RESET => "DEVICE_RESET",
        number::REGION_WRITE_MULTI => "REGION_WRITE_MULTI",
        number::DEVICE_FEATURE => "DEVICE_FEATURE",
        other => return format!("command {other}"),
    };
    name.to_owned()
}

/// A command of a client.
#[derive(Debug)]
pub enum Message<'a> {
    /// VERSION: the version of the protocol. The client's capabilities are not used.
    Version {
        /// Versions with different major numbers are incompatible.
        major: u16,
        /// Higher minor numbers add features.
        minor: u16,
    },
    /// DMA_MAP.
    DmaMap(DmaMap),
    /// DMA_UNMAP.
    DmaUnmap(DmaUnmap),
    /// DEVICE_GET_INFO.
    DeviceInfo,
    /// DEVICE_GET_REGION_INFO.
    RegionInfo {
        /// Number of the region.
        index: u32,
        /// Bytes of the reply that the client has room for, header excluded.
        room: u32,
    },
    /// DEVICE_GET_IRQ_INFO of the interrupts with this number.
    IrqInfo(u32),
    /// DEVICE_SET_IRQS.
    SetIrqs(SetIrqs<'a>),
    /// REGION_READ.
    RegionRead(RegionRead),
    /// REGION_WRITE.
    RegionWrite(RegionWrite<'a>),
    /// REGION_WRITE_MULTI.
    RegionWriteMulti(RegionWrites<'a>),
    /// DEVICE_RESET.
    Reset,
    /// DEVICE_FEATURE: none is offered.
    Feature,
    /// The number of an unknown command, or of one that needs a feature that was not offered.
    Unknown(u16),
}

/// A range of guest addresses: not empty, and within 64 bits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct DmaRange {
    address: u64,
    size: u64,
}

impl DmaRange {
    /// Returns the range of `size` bytes at `address`.
    ///
    /// # Errors
    ///
    /// [`WireError::Range`].
    pub fn new(address: u64, size: u64) -> Result<Self, WireError> {
        match address.checked_add(size) {
            Some(_) if size > 0 => Ok(DmaRange { address, size }),
            Some(_) | None => Err(WireError::Range { address, size }),
        }
    }

    /// Returns the first address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the size in bytes; not 0.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the first address after the range.
    pub fn end(&self) -> u64 {
        self.address + self.size
    }

    /// Returns whether the two ranges have an address in common.
    pub fn overlaps(&self, other: &DmaRange) -> bool {
        self.address < other.end() && other.address < self.end()
    }

    /// Returns whether `other` lies completely in this range.
    pub fn contains(&self, other: &DmaRange) -> bool {
        self.address <= other.address && other.end() <= self.end()
    }
}

impl fmt::Debug for DmaRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}..{:#x}", self.address, self.end())
    }
}

/// Memory of the guest.
#[derive(Debug)]
pub struct DmaMap {
    /// Addresses for the device.
    pub range: DmaRange,
    /// Whether the device may write to it.
    pub writable: bool,
    /// The file that contains it, and the offset there. `None`: accessible only by messages.
    pub file: Option<(OwnedFd, u64)>,
}

/// Memory to unmap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaUnmap {
    /// The addresses; `None`: all.
    pub range: Option<DmaRange>,
}

/// A read from a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionRead {
    /// Number of the region.
    pub region: u32,
    /// First byte.
    pub offset: u64,
    /// Number of bytes, at most [`MAX_DATA`].
    pub count: usize,
}

/// A write to a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionWrite<'a> {
    /// Number of the region.
    pub region: u32,
    /// First byte.
    pub offset: u64,
    /// At most [`MAX_DATA`].
    pub data: &'a [u8],
}

/// Bytes per write in REGION_WRITE_MULTI, and the most data bytes among them.
const WRITE_LEN: usize = 24;
const WRITE_DATA: usize = 8;

/// Writes in order, each of at most 8 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionWrites<'a>(&'a [[u8; WRITE_LEN]]);

impl<'a> RegionWrites<'a> {
    fn parse(mut fields: Fields<'a>) -> Result<Self, WireError> {
        let count = fields.u64()?;
        let (writes, rest) = fields.0.as_chunks::<WRITE_LEN>();
        if count != writes.len() as u64 || !rest.is_empty() {
            return Err(WireError::Length(fields.0.len()));
        }
        for write in writes {
            let (_, _, count) = Self::head(write);
            if count as usize > WRITE_DATA {
                return Err(WireError::Data(count));
            }
        }
        Ok(RegionWrites(writes))
    }

    fn head(write: &[u8; WRITE_LEN]) -> (u64, u32, u32) {
        let [o0, o1, o2, o3, o4, o5, o6, o7, r0, r1, r2, r3, c0, c1, c2, c3, ..] = *write;
        (
            u64::from_ne_bytes([o0, o1, o2, o3, o4, o5, o6, o7]),
            u32::from_ne_bytes([r0, r1, r2, r3]),
            u32::from_ne_bytes([c0, c1, c2, c3]),
        )
    }

    /// Returns the number of writes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there are no writes.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the writes.
    pub fn iter(&self) -> impl Iterator<Item = RegionWrite<'a>> {
        self.0.iter().map(|write| {
            let (offset, region, count) = Self::head(write);
            let data = write.get(WRITE_LEN - WRITE_DATA..).unwrap_or_default();
            RegionWrite { region, offset, data: data.get(..count as usize).unwrap_or_default() }
        })
    }
}

const MAP_READ: u32 = 1 << 0;
const MAP_WRITE: u32 = 1 << 1;
const UNMAP_ALL: u32 = 1 << 1;

impl<'a> Message<'a> {
    /// Parses the payload of a command, and the descriptors received with it.
    ///
    /// `command`: the command's number.
    ///
    /// # Errors
    ///
    /// [`WireError`]; the descriptors are closed.
    pub fn parse(command: u16, payload: &'a [u8], fds: Vec<OwnedFd>) -> Result<Self, WireError> {
        let mut fields = Fields(payload);
        let message = match command {
            number::DMA_MAP => return DmaMap::parse(fields, fds).map(Message::DmaMap),
            number::DEVICE_SET_IRQS => {
                return SetIrqs::parse(fields, fds).map(Message::SetIrqs);
            }
            // SPDK's client sends the descriptor of the mapping. It is closed.
            number::DMA_UNMAP => return DmaUnmap::parse(&mut fields).map(Message::DmaUnmap),
            _ if !fds.is_empty() => return Err(WireError::Descriptors(fds.len())),
            number::VERSION => {
                let (major, minor) = (fields.u16()?, fields.u16()?);
                match fields.rest() {
                    [] => {}
                    [text @ .., 0] if std::str::from_utf8(text).is_ok() && !text.contains(&0) => {}
                    _ => return Err(WireError::Capabilities),
                }
                return Ok(Message::Version { major, minor });
            }
            // SPDK's client sends the whole buffer of the reply with these three. Their `argsz` is the reply's room.
            number::DEVICE_GET_INFO => {
                fields.skip(16)?;
                return Ok(Message::DeviceInfo);
            }
            number::DEVICE_GET_REGION_INFO => {
                let room = fields.u32()?;
                fields.skip(4)?;
                let index = fields.u32()?;
                fields.skip(20)?;
                return Ok(Message::RegionInfo { index, room });
            }
            number::DEVICE_GET_IRQ_INFO => {
                fields.skip(8)?;
                let index = fields.u32()?;
                fields.skip(4)?;
                return Ok(Message::IrqInfo(index));
            }
            number::REGION_READ => {
                let (offset, region, count) = place(&mut fields)?;
                Message::RegionRead(RegionRead { region, offset, count })
            }
            number::REGION_WRITE => {
                let (offset, region, count) = place(&mut fields)?;
                let data = fields.rest();
                if data.len() != count {
                    return Err(WireError::Length(payload.len()));
                }
                Message::RegionWrite(RegionWrite { region, offset, data })
            }
            number::REGION_WRITE_MULTI => {
                return RegionWrites::parse(fields).map(Message::RegionWriteMulti);
            }
            number::DEVICE_RESET => Message::Reset,
            number::DEVICE_FEATURE => return Ok(Message::Feature),
            other => return Ok(Message::Unknown(other)),
        };
        match fields.0 {
            [] => Ok(message),
            _ => Err(WireError::Length(payload.len())),
        }
    }
}

/// Offset, region and length of an access.
fn place(fields: &mut Fields<'_>) -> Result<(u64, u32, usize), WireError> {
    let (offset, region, count) = (fields.u64()?, fields.u32()?, fields.u32()?);
    match usize::try_from(count) {
        Ok(bytes @ 0..=MAX_DATA) => Ok((offset, region, bytes)),
        Ok(_) | Err(_) => Err(WireError::Data(count)),
    }
}

/// The payload of DMA_MAP for memory that is readable, with the offset in its file.
pub(in super::super) fn dma_map(range: DmaRange, writable: bool, offset: u64) -> Vec<u8> {
    let flags = if writable { MAP_READ | MAP_WRITE } else { MAP_READ };
    let fields = [offset, range.address(), range.size()].map(u64::to_ne_bytes);
    [[32, flags].map(u32::to_ne_bytes).concat(), fields.concat()].concat()
}

/// The payload of REGION_WRITE from the beginning of a region.
pub(in super::super) fn region_write(region: u32, data: &[u8]) -> Vec<u8> {
    let place = [region, data.len() as u32].map(u32::to_ne_bytes);
    [&0u64.to_ne_bytes(), place.as_flattened(), data].concat()
}

impl DmaMap {
    fn parse(mut fields: Fields<'_>, fds: Vec<OwnedFd>) -> Result<Self, WireError> {
        fields.skip(4)?;
        let flags = fields.u32()?;
        let (offset, address, size) = (fields.u64()?, fields.u64()?, fields.u64()?);
        if flags & !(MAP_READ | MAP_WRITE) != 0 {
            return Err(WireError::Flags(flags));
        }
        let (count, mut fds) = (fds.len(), fds.into_iter());
        let file = match (fds.next(), fds.next()) {
            (Some(fd), None) => Some((fd, offset)),
            (None, None) => None,
            (Some(_) | None, Some(_)) => return Err(WireError::Descriptors(count)),
        };
        let range = DmaRange::new(address, size)?;
        Ok(DmaMap { range, writable: flags & MAP_WRITE != 0, file })
    }
}

impl DmaUnmap {
    fn parse(fields: &mut Fields<'_>) -> Result<Self, WireError> {
        fields.skip(4)?;
        let flags = fields.u32()?;
        let (address, size) = (fields.u64()?, fields.u64()?);
        let range = match flags {
            0 => Some(DmaRange::new(address, size)?),
            UNMAP_ALL if (address, size) == (0, 0) => None,
            UNMAP_ALL => return Err(WireError::Range { address, size }),
            // Among them a bitmap of dirty pages.
            flags => return Err(WireError::Flags(flags)),
        };
        Ok(DmaUnmap { range })
    }
}

/// The rest of a payload.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        match self.0.split_first_chunk() {
            Some((field, rest)) => {
                self.0 = rest;
                Ok(*field)
            }
            None => Err(WireError::Length(self.0.len())),
        }
    }

    pub(super) fn u16(&mut self) -> Result<u16, WireError> {
        self.take().map(u16::from_ne_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, WireError> {
        self.take().map(u32::from_ne_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, WireError> {
        self.take().map(u64::from_ne_bytes)
    }

    pub(super) fn skip(&mut self, bytes: usize) -> Result<(), WireError> {
        self.0 = self.0.get(bytes..).ok_or(WireError::Length(self.0.len()))?;
        Ok(())
    }

    pub(super) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }
}
