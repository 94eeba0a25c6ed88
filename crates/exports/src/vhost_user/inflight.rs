//! The memory in which the rings' requests in flight are kept, so that they outlive this process: made
//! here (GET_INFLIGHT_FD), kept by the front end, and handed back by it, also to whoever comes after
//! us (SET_INFLIGHT_FD). Behind the rings' records there is one of the device's write cache mode.

#![forbid(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use devices::virtio::CacheRecord;
use guest_memory::{GuestMemory, Region};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::ftruncate;
use queue::{Inflight, QueueError};

use super::error::RequestError;
use super::handover::Saved;
use super::wire::{InflightDescription, Request};

/// The memory, with a record for each ring and one of the write cache mode.
#[derive(Debug, Clone)]
pub(crate) struct InflightArea {
    memory: Arc<GuestMemory>,
    description: InflightDescription,
}

/// Bytes for that many rings of that size, where that of the write cache mode begins.
fn rings_len(num_queues: u16, queue_size: u16) -> u64 {
    u64::from(num_queues) * Inflight::region_len(queue_size) as u64
}

/// New memory, zeroed, for rings of which there are `num_queues`, with at most `queue_size` entries.
///
/// # Errors
///
/// memfd_create(2), ftruncate(2), fcntl(2).
pub(crate) fn create(
    num_queues: u16,
    queue_size: u16,
) -> io::Result<(InflightDescription, OwnedFd)> {
    let mmap_size = rings_len(num_queues, queue_size) + CacheRecord::LEN;
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let fd = memfd_create("ringmill-inflight", flags)?;
    ftruncate(&fd, mmap_size.try_into().map_err(io::Error::other)?)?;
    // Nobody can take away what others have mapped.
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    fcntl(&fd, FcntlArg::F_ADD_SEALS(seals))?;
    Ok((InflightDescription { mmap_size, mmap_offset: 0, num_queues, queue_size }, fd))
}

impl InflightArea {
    /// Maps what the front end hands over.
    ///
    /// # Errors
    ///
    /// It is too small for that many rings, is no memory of a kind that cannot shrink, or cannot be
    /// mapped.
    pub(crate) fn map(
        description: InflightDescription,
        fd: OwnedFd,
    ) -> Result<InflightArea, RequestError> {
        let InflightDescription { mmap_size, mmap_offset, num_queues, queue_size } = description;
        let needed = rings_len(num_queues, queue_size);
        if mmap_size < needed {
            return Err(RequestError::InflightSize { size: mmap_size, needed });
        }
        // A file that shrinks would take us with it (SIGBUS).
        if !cannot_shrink(&fd) {
            return Err(RequestError::InflightNotSealed);
        }
        // Memory that another back end has made ends with the rings.
        let size = mmap_size.min(needed + CacheRecord::LEN);
        let region = Region { guest_addr: 0, size, user_addr: 0, mmap_offset, fd }.map()?;
        let memory = Arc::new(GuestMemory::from_regions([Arc::new(region)])?);
        Ok(InflightArea { memory, description })
    }

    /// SET_INFLIGHT_FD, for who takes over.
    ///
    /// # Errors
    ///
    /// As of fcntl(2).
    pub(crate) fn save(&self) -> io::Result<Saved> {
        let InflightDescription { mmap_size, mmap_offset, num_queues, queue_size } =
            self.description;
        let files = self.memory.regions().iter().map(|region| region.file().try_clone());
        let mut saved = Saved::fields(
            Request::SetInflightFd,
            &[mmap_size, mmap_offset],
            files.collect::<Result<_, _>>()?,
        );
        saved.payload.extend([num_queues, queue_size].map(u16::to_ne_bytes).concat());
        Ok(saved)
    }

    /// The record of the write cache mode. `None`: there is no room for it.
    pub(crate) fn of_write_cache(&self) -> Option<CacheRecord> {
        let InflightDescription { num_queues, queue_size, .. } = self.description;
        let region = self.memory.regions().first()?;
        CacheRecord::new(region.clone(), rings_len(num_queues, queue_size))
    }

    /// The record of ring `index`, for the thread that the ring is served on.
    ///
    /// # Errors
    ///
    /// There is none for this ring.
    pub(crate) fn of_ring(&self, index: u16) -> Result<Inflight, QueueError> {
        let InflightDescription { num_queues, queue_size, .. } = self.description;
        if index >= num_queues {
            return Err(QueueError::Index { index, table: num_queues });
        }
        let addr = u64::from(index) * Inflight::region_len(queue_size) as u64;
        Inflight::new(&self.memory, addr, queue_size)
    }
}

fn cannot_shrink(fd: &OwnedFd) -> bool {
    let seals = fcntl(fd.as_fd(), FcntlArg::F_GET_SEALS).unwrap_or(0);
    SealFlag::from_bits_truncate(seals).contains(SealFlag::F_SEAL_SHRINK)
}
