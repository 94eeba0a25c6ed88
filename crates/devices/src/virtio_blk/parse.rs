//! Parses a descriptor chain into a valid request.

use guest_memory::MemoryView;
use queue::{Chain, Segments, SegmentsError};

use super::device::{Device, MAX_RANGE_SECTORS, MAX_RANGES};
use super::wire::{
    HEADER_SIZE, Header, RANGE_SIZE, RANGE_UNMAP, Range, SECTOR, Status, VIRTIO_BLK_T_DISCARD,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES,
};
use crate::virtio::Broken;
use stats::Kind;

/// Name of a request's first part in errors.
const HEADER: &str = "a request's header";

/// A parsed chain.
#[derive(Debug)]
pub(crate) struct Parsed<'a> {
    /// Guest address of the status byte.
    pub(crate) status_addr: u64,
    /// The request, or the kind and status of a refused one.
    pub(crate) request: Result<BlkRequest<'a>, (Kind, Status)>,
}

/// A request within the device's limits.
#[derive(Debug, Clone, Copy)]
pub(crate) enum BlkRequest<'a> {
    Read {
        offset: u64,
        data: Segments<'a>,
    },
    Write {
        offset: u64,
        data: Segments<'a>,
    },
    Flush,
    GetId {
        data: Segments<'a>,
    },
    /// A discard or write-zeroes, with the ranges that [`Ranges::read`] reads.
    Ranges {
        discard: bool,
        data: Segments<'a>,
    },
}

/// The ranges of a discard or write-zeroes request, each on the disk.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ranges {
    pub(crate) discard: bool,
    count: usize,
    list: [ByteRange; MAX_RANGES as usize],
}

/// A range of a discard or write-zeroes request.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ByteRange {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) may_unmap: bool,
}

impl Ranges {
    /// Reads the ranges of a discard (`discard`) or write-zeroes request. Fails with the status that refuses the
    /// request.
    pub(crate) fn read(
        discard: bool,
        mut data: Segments<'_>,
        memory: &MemoryView,
        device: &Device,
    ) -> Result<Result<Ranges, Status>, Broken> {
        let count = data.len() as usize / RANGE_SIZE;
        let whole = data.len().is_multiple_of(RANGE_SIZE as u32);
        // Partial ranges, or more than the offered limit: "unsupported", as other devices answer.
        if count == 0 || count > MAX_RANGES as usize || !whole {
            return Ok(Err(Status::Unsupp));
        }
        let mut ranges = Ranges { discard, count, list: Default::default() };
        for slot in ranges.list.iter_mut().take(count) {
            let part = |error| Broken::Part("a range", error);
            let (bytes, rest) = data.split_array(memory).map_err(part)?;
            data = rest;
            let range = Range::from_bytes(bytes);
            // Unknown flags, and unmap on a discard: 5.2.6.2.
            if range.flags & !RANGE_UNMAP != 0 || (discard && range.flags != 0) {
                return Ok(Err(Status::Unsupp));
            }
            let len = u64::from(range.sectors) * SECTOR;
            let offset = match device.range(range.sector, len) {
                Some(offset) if range.sectors <= MAX_RANGE_SECTORS => offset,
                _ => return Ok(Err(Status::IoErr)),
            };
            *slot = ByteRange { offset, len, may_unmap: range.flags & RANGE_UNMAP != 0 };
        }
        Ok(Ok(ranges))
    }

    /// The kind under which such a request is counted.
    pub(crate) fn kind(discard: bool) -> Kind {
        if discard { Kind::Discard } else { Kind::WriteZeroes }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &ByteRange> {
        self.list.iter().take(self.count)
    }
}

/// Parses a chain, with any distribution over descriptors (VIRTIO_F_ANY_LAYOUT).
pub(crate) fn parse<'a>(
    chain: &'a Chain,
    memory: &MemoryView,
    device: &Device,
) -> Result<Parsed<'a>, Broken> {
    let no_status = Broken::Part("a request's status", SegmentsError::Short { wanted: 1, len: 0 });
    let (writable, status_addr) = chain.writable().split_last().ok_or(no_status)?;
    let (header, readable) = match chain.readable().split_array::<HEADER_SIZE>(memory) {
        Ok(parts) => parts,
        // There is a status byte to say so.
        Err(SegmentsError::Short { .. }) => {
            return Ok(Parsed { status_addr, request: Err((Kind::Other, Status::IoErr)) });
        }
        Err(error) => return Err(Broken::Part(HEADER, error)),
    };
    let Header { request_type, sector } = Header::from_bytes(header);
    let on_disk = |kind, data: Segments<'_>| {
        device.range(sector, data.len().into()).ok_or((kind, Status::IoErr))
    };
    let request = match request_type {
        VIRTIO_BLK_T_IN => {
            on_disk(Kind::Read, writable).map(|offset| BlkRequest::Read { offset, data: writable })
        }
        VIRTIO_BLK_T_OUT if device.is_read_only() => Err((Kind::Write, Status::IoErr)),
        VIRTIO_BLK_T_OUT => on_disk(Kind::Write, readable)
            .map(|offset| BlkRequest::Write { offset, data: readable }),
        VIRTIO_BLK_T_FLUSH => Ok(BlkRequest::Flush),
        VIRTIO_BLK_T_GET_ID => Ok(BlkRequest::GetId { data: writable }),
        VIRTIO_BLK_T_DISCARD if device.is_read_only() => Err((Kind::Discard, Status::IoErr)),
        VIRTIO_BLK_T_WRITE_ZEROES if device.is_read_only() => {
            Err((Kind::WriteZeroes, Status::IoErr))
        }
        VIRTIO_BLK_T_DISCARD => Ok(BlkRequest::Ranges { discard: true, data: readable }),
        VIRTIO_BLK_T_WRITE_ZEROES => Ok(BlkRequest::Ranges { discard: false, data: readable }),
        _ => Err((Kind::Other, Status::Unsupp)),
    };
    Ok(Parsed { status_addr, request })
}
