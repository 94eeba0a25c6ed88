//! The guest's memory as mapped by a client.

#![forbid(unsafe_code)]

use std::io;
use std::sync::Arc;

use guest_memory::{GuestMemory, MappedRegion, Region};
use nix::errno::Errno;

use super::hand_over;
use super::wire::message::{dma_map, number};
use super::wire::{DmaMap, DmaRange, DmaUnmap};
use crate::vhost_user::handover::Saved;

/// Maximum number of regions that a client may map.
///
/// Each is a mapping of this process, and those are limited.
pub const MAX_DMA_MAPS: usize = 1024;

/// Why memory cannot be mapped or unmapped.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// A part of it is mapped already.
    #[error("{0:?} is mapped already, in parts or wholly")]
    Overlaps(DmaRange),
    /// The limit of regions is reached.
    #[error("more than {MAX_DMA_MAPS} regions")]
    TooMany,
    /// More bytes than the client may map.
    #[error("{needed:#x} bytes would be mapped, max-memory is {max:#x}")]
    MaxMemory {
        /// Bytes that would be mapped.
        needed: u64,
        /// The limit.
        max: u64,
    },
    /// It cannot be mapped.
    #[error("{0}")]
    Map(guest_memory::Error),
    /// Not the bounds of mapped regions.
    #[error("no regions were mapped that are {0:?}")]
    NotMapped(DmaRange),
}

impl MemoryError {
    /// Returns the error for the client.
    pub fn errno(&self) -> Errno {
        match self {
            MemoryError::Overlaps(_) => Errno::EEXIST,
            MemoryError::TooMany => Errno::ENOSPC,
            MemoryError::MaxMemory { .. } => Errno::ENOMEM,
            MemoryError::Map(_) => Errno::EINVAL,
            MemoryError::NotMapped(_) => Errno::ENOENT,
        }
    }
}

/// The mapped regions.
pub struct Memory {
    /// Bytes that may be mapped.
    max: u64,
    regions: Vec<(DmaRange, Option<Arc<MappedRegion>>)>,
}

impl Memory {
    /// Returns no memory, for a client that may map up to `max` bytes.
    pub fn new(max: u64) -> Self {
        Memory { max, regions: Vec::new() }
    }

    /// Adds a region.
    ///
    /// A region without a file, such as a ROM, or a read-only region is not memory for the device:
    /// requests that use it fail.
    ///
    /// # Errors
    ///
    /// [`MemoryError`]; nothing has changed then.
    pub fn map(&mut self, map: DmaMap) -> Result<Arc<GuestMemory>, MemoryError> {
        let DmaMap { range, writable, file } = map;
        if self.regions.iter().any(|(other, _)| other.overlaps(&range)) {
            return Err(MemoryError::Overlaps(range));
        }
        if self.regions.len() >= MAX_DMA_MAPS {
            return Err(MemoryError::TooMany);
        }
        let region = match file.filter(|_| writable) {
            Some((fd, offset)) => {
                let mapped = self.regions.iter().filter_map(|(_, region)| region.as_ref());
                let sizes = mapped.map(|region| region.size()).chain([range.size()]);
                let (needed, max) = (sizes.fold(0, u64::saturating_add), self.max);
                if needed > max {
                    return Err(MemoryError::MaxMemory { needed, max });
                }
                let region = Region {
                    guest_addr: range.address(),
                    size: range.size(),
                    user_addr: range.address(),
                    mmap_offset: offset,
                    fd,
                };
                Some(Arc::new(region.map().map_err(MemoryError::Map)?))
            }
            None => None,
        };
        self.regions.push((range, region));
        Ok(self.all())
    }

    /// Removes all regions in the range.
    ///
    /// # Errors
    ///
    /// [`MemoryError::NotMapped`]: there are none, or one lies only partly in the range.
    pub fn unmap(&mut self, unmap: DmaUnmap) -> Result<Arc<GuestMemory>, MemoryError> {
        match unmap.range {
            None => self.regions.clear(),
            Some(range) => {
                let mut touched = self.regions.iter().filter(|(other, _)| other.overlaps(&range));
                let first = touched.next();
                let whole =
                    first.into_iter().chain(touched).all(|(other, _)| range.contains(other));
                if first.is_none() || !whole {
                    return Err(MemoryError::NotMapped(range));
                }
                self.regions.retain(|(other, _)| !other.overlaps(&range));
            }
        }
        Ok(self.all())
    }

    /// The messages that map the regions.
    ///
    /// # Errors
    ///
    /// As of fcntl(2).
    pub(super) fn save(&self) -> io::Result<Vec<Saved>> {
        let save = |(range, region): &(DmaRange, Option<Arc<MappedRegion>>)| {
            let offset = region.as_ref().map_or(0, |region| region.mmap_offset());
            let payload = dma_map(*range, region.is_some(), offset);
            hand_over::message(
                number::DMA_MAP,
                payload,
                region.as_ref().map(|region| region.file()),
            )
        };
        self.regions.iter().map(save).collect()
    }

    fn all(&self) -> Arc<GuestMemory> {
        let mapped = self.regions.iter().filter_map(|(_, region)| region.clone());
        // The regions do not overlap: each was compared with all others.
        Arc::new(GuestMemory::from_regions(mapped).unwrap_or_default())
    }
}
