//! The memory that a driver shows to the device: the kernel's bounce buffers, or a guest's memory.

#![forbid(unsafe_code)]

use std::os::fd::OwnedFd;
use std::sync::Arc;

use guest_memory::{Error, GuestMemory, MappedRegion, Region, Source};
use nix::errno::Errno;

use super::commands;
use super::wire::Entry;

/// The most regions that are mapped at a time.
const MAX_REGIONS: usize = 512;

/// The IOTLB of a device: addresses of the driver, and the files and offsets where the memory is.
///
/// The kernel announces changes of a guest's memory. It does not announce new memory of its drivers, such as the bounce
/// buffers that appear with the first request: that memory is found when a request names it.
#[derive(Debug, Clone)]
pub(super) struct Iotlb(pub(super) Arc<OwnedFd>);

/// Why there is no memory.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoMemory {
    #[error("VDUSE_IOTLB_GET_FD failed: {}", .0.desc())]
    Unknown(#[from] Errno),
    #[error(transparent)]
    Unmapped(#[from] Error),
    #[error("it has more than {MAX_REGIONS} regions")]
    TooMany,
}

impl Iotlb {
    /// Maps the present memory. Later memory is mapped once a request names it.
    pub(super) fn map(&self) -> Result<Arc<GuestMemory>, NoMemory> {
        let mut regions = Vec::new();
        let mut start = 0;
        while let Some((entry, file)) = commands::memory(&self.0, start, u64::MAX)? {
            let Some(entry) = entry else { break };
            regions.extend(region(entry, file)?);
            if regions.len() > MAX_REGIONS {
                return Err(NoMemory::TooMany);
            }
            // The last range there can be.
            let Some(next) = entry.last.checked_add(1).filter(|next| *next > start) else { break };
            start = next;
        }
        let memory = GuestMemory::from_regions(regions)?;
        Ok(Arc::new(memory.with_source(Arc::new(self.clone()))))
    }
}

impl Source for Iotlb {
    fn find(&self, addr: u64) -> Option<Arc<MappedRegion>> {
        let (entry, file) = commands::memory(&self.0, addr, addr).ok()??;
        region(entry?, file).ok()?
    }
}

/// Maps an entry. `None`: the device may not write it, so no buffer of a driver is there.
fn region(entry: Entry, file: OwnedFd) -> Result<Option<Arc<MappedRegion>>, Error> {
    let Some(size) = entry.size().filter(|_| entry.is_writable) else { return Ok(None) };
    let region = Region {
        guest_addr: entry.start,
        size,
        // Rings have the driver's addresses, too.
        user_addr: entry.start,
        mmap_offset: entry.offset,
        fd: file,
    };
    Ok(Some(Arc::new(region.map()?)))
}
