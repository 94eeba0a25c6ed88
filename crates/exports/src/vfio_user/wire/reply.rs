//! Replies.

use nix::errno::Errno;

use super::message::DmaUnmap;
use super::{ERROR, HEADER_LEN, Header, MAX_DATA, MAX_FDS, TYPE_REPLY};

/// What a command is answered with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// VERSION: 0.0, and what is offered.
    Version {
        /// Maximum number of regions of memory.
        max_dma_maps: usize,
    },
    /// DEVICE_GET_INFO of a PCI device that can be reset.
    DeviceInfo {
        /// Number of kinds of regions.
        regions: u32,
        /// Number of kinds of interrupts.
        irqs: u32,
    },
    /// DEVICE_GET_REGION_INFO.
    RegionInfo(RegionInfo),
    /// DEVICE_GET_IRQ_INFO.
    IrqInfo(IrqInfo),
    /// REGION_READ.
    RegionData {
        /// Number of the region, as in the command.
        region: u32,
        /// First byte in the region, as in the command.
        offset: u64,
        /// As many bytes as were asked for.
        data: Vec<u8>,
    },
    /// REGION_WRITE.
    RegionWritten {
        /// Number of the region, as in the command.
        region: u32,
        /// First byte in the region, as in the command.
        offset: u64,
        /// Bytes written: all.
        count: usize,
    },
    /// REGION_WRITE_MULTI: how many were made.
    RegionsWritten(usize),
    /// DMA_UNMAP.
    DmaUnmapped(DmaUnmap),
    /// It is done.
    Done,
    /// It failed.
    Error(Errno),
}

/// A region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionInfo {
    /// The region's number.
    pub index: u32,
    /// Size in bytes; 0: there is no such region.
    pub size: u64,
    /// Offset and bytes of the part that may be mapped. The file's descriptor goes with the reply.
    pub area: Option<(u64, u64)>,
    /// Bytes that the client has room for. The description of the part is left out where it does not fit.
    pub room: u32,
}

/// A kind of interrupts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IrqInfo {
    /// The kind's number: INTx, MSI, MSI-X and others.
    pub index: u32,
    /// Number of interrupts of this kind.
    pub count: u32,
    /// They are masked when they are raised, until they are unmasked.
    pub is_level: bool,
}

const DEVICE_RESET: u32 = 1 << 0;
const DEVICE_PCI: u32 = 1 << 1;
const REGION_READ: u32 = 1 << 0;
const REGION_WRITE: u32 = 1 << 1;
const REGION_MMAP: u32 = 1 << 2;
const REGION_CAPS: u32 = 1 << 3;
/// Bytes of a region's description, and of the capability behind it that lists parts.
const REGION_INFO: u32 = 32;
const SPARSE: u32 = 32;
/// VFIO_REGION_INFO_CAP_SPARSE_MMAP.
const CAP_SPARSE_MMAP: u16 = 1;
const IRQ_EVENTFD: u32 = 1 << 0;
const IRQ_MASKABLE: u32 = 1 << 1;
const IRQ_AUTOMASKED: u32 = 1 << 2;
const IRQ_NORESIZE: u32 = 1 << 3;
const UNMAP_ALL: u32 = 1 << 1;

impl Reply {
    /// Returns the reply's bytes, header first, to a command with this header.
    pub fn encode(&self, to: &Header) -> Vec<u8> {
        let mut payload = Payload(Vec::new());
        match self {
            Reply::Version { max_dma_maps } => {
                payload.u16(0).u16(0);
                let offer = format!(
                    "{{\"capabilities\":{{\"max_msg_fds\":{MAX_FDS},\"max_data_xfer_size\":{MAX_DATA},\
                     \"max_dma_maps\":{max_dma_maps},\"write_multiple\":true}}}}\0"
                );
                payload.0.extend(offer.as_bytes());
            }
            Reply::DeviceInfo { regions, irqs } => {
                payload.u32(16).u32(DEVICE_RESET | DEVICE_PCI).u32(*regions).u32(*irqs);
            }
            Reply::RegionInfo(RegionInfo { index, size, area, room }) => {
                let flags = if *size == 0 { 0 } else { REGION_READ | REGION_WRITE };
                match area {
                    None => {
                        payload.u32(REGION_INFO).u32(flags).u32(*index).u32(0).u64(*size).u64(0);
                    }
                    Some((offset, len)) => {
                        let (flags, all) =
                            (flags | REGION_MMAP | REGION_CAPS, REGION_INFO + SPARSE);
                        payload.u32(all).u32(flags).u32(*index).u32(REGION_INFO);
                        payload.u64(*size).u64(0);
                        if *room >= all {
                            // One capability, and one area in it.
                            payload.u16(CAP_SPARSE_MMAP).u16(1).u32(0).u32(1).u32(0);
                            payload.u64(*offset).u64(*len);
                        }
                    }
                }
            }
            Reply::IrqInfo(IrqInfo { index, count, is_level }) => {
                let how = if *is_level { IRQ_MASKABLE | IRQ_AUTOMASKED } else { IRQ_NORESIZE };
                let flags = if *count == 0 { 0 } else { IRQ_EVENTFD | how };
                payload.u32(16).u32(flags).u32(*index).u32(*count);
            }
            Reply::RegionData { region, offset, data } => {
                payload.u64(*offset).u32(*region).u32(data.len() as u32);
                payload.0.extend(data);
            }
            Reply::RegionWritten { region, offset, count } => {
                payload.u64(*offset).u32(*region).u32(*count as u32);
            }
            Reply::RegionsWritten(count) => {
                payload.u64(*count as u64);
            }
            Reply::DmaUnmapped(DmaUnmap { range }) => {
                let (flags, address, size) = match range {
                    Some(range) => (0, range.address(), range.size()),
                    None => (UNMAP_ALL, 0, 0),
                };
                payload.u32(24).u32(flags).u64(address).u64(size);
            }
            Reply::Done | Reply::Error(_) => {}
        }
        let error = match self {
            Reply::Error(errno) => Some(*errno as i32 as u32),
            Reply::Version { .. }
            | Reply::DeviceInfo { .. }
            | Reply::RegionInfo(_)
            | Reply::IrqInfo(_)
            | Reply::RegionData { .. }
            | Reply::RegionWritten { .. }
            | Reply::RegionsWritten(_)
            | Reply::DmaUnmapped(_)
            | Reply::Done => None,
        };
        let payload = payload.0;
        let mut bytes = Payload(Vec::with_capacity(HEADER_LEN + payload.len()));
        let flags = TYPE_REPLY | error.map_or(0, |_| ERROR);
        bytes.u16(to.id).u16(to.command).u32((HEADER_LEN + payload.len()) as u32);
        bytes.u32(flags).u32(error.unwrap_or(0));
        bytes.0.extend(payload);
        bytes.0
    }
}

struct Payload(Vec<u8>);

impl Payload {
    fn u16(&mut self, value: u16) -> &mut Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend(value.to_ne_bytes());
        self
    }
}
