//! The memory of the rings' in-flight records, which outlives this process. The back end creates it
//! (GET_INFLIGHT_FD). The front end keeps it, and gives it to this or a later back end
//! (SET_INFLIGHT_FD). After the rings' records it has a record of the device's write cache mode.

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
use super::session::MAX_QUEUE_SIZE;
use super::wire::{InflightDescription, Request};

/// The memory, with a record for each ring and one of the write cache mode.
#[derive(Debug, Clone)]
pub(crate) struct InflightArea {
    memory: Arc<GuestMemory>,
    description: InflightDescription,
}

/// Bytes of the records of that many rings of that size. The record of the write cache mode follows.
fn rings_len(num_queues: u16, queue_size: u16) -> u64 {
    u64::from(num_queues) * Inflight::region_len(queue_size) as u64
}

/// Bytes of the memory that [`create`] makes.
fn created_len(num_queues: u16, queue_size: u16) -> u64 {
    rings_len(num_queues, queue_size) + CacheRecord::LEN
}

/// Creates zeroed memory for `num_queues` rings of at most `queue_size` entries, or [`MAX_QUEUE_SIZE`] if that is more.
///
/// QEMU 10.0 asks for the entries of its property `queue-size`, and then gives its rings 1024.
///
/// # Errors
///
/// memfd_create(2), ftruncate(2), fcntl(2).
pub(crate) fn create(
    num_queues: u16,
    queue_size: u16,
) -> io::Result<(InflightDescription, OwnedFd)> {
    let queue_size = queue_size.max(MAX_QUEUE_SIZE);
    let mmap_size = created_len(num_queues, queue_size);
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let fd = memfd_create("ringmill-inflight", flags)?;
    ftruncate(&fd, mmap_size.try_into().map_err(io::Error::other)?)?;
    // Seals: mapped memory cannot be taken away by another process.
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    fcntl(&fd, FcntlArg::F_ADD_SEALS(seals))?;
    Ok((InflightDescription { mmap_size, mmap_offset: 0, num_queues, queue_size }, fd))
}

impl InflightArea {
    /// Maps memory received from the front end.
    ///
    /// # Errors
    ///
    /// It is too small for that many rings, could shrink, or cannot be mapped.
    pub(crate) fn map(
        description: InflightDescription,
        fd: OwnedFd,
    ) -> Result<InflightArea, RequestError> {
        // An access beyond the end of a shrunk file raises SIGBUS.
        if !cannot_shrink(&fd) {
            return Err(RequestError::InflightNotSealed);
        }
        Self::of_own_file(as_created(description), fd)
    }

    /// Maps memory of this program alone, which nothing shrinks.
    ///
    /// # Errors
    ///
    /// It is too small for that many rings, or cannot be mapped.
    pub(crate) fn of_own_file(
        description: InflightDescription,
        fd: OwnedFd,
    ) -> Result<InflightArea, RequestError> {
        let InflightDescription { mmap_size, mmap_offset, num_queues, queue_size } = description;
        let needed = rings_len(num_queues, queue_size);
        if mmap_size < needed {
            return Err(RequestError::InflightSize { size: mmap_size, needed });
        }
        // Memory of another implementation ends with the rings.
        let size = mmap_size.min(needed + CacheRecord::LEN);
        let region = Region { guest_addr: 0, size, user_addr: 0, mmap_offset, fd }.map()?;
        let memory = Arc::new(GuestMemory::from_regions([Arc::new(region)])?);
        Ok(InflightArea { memory, description })
    }

    /// The SET_INFLIGHT_FD message, for a handover.
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

    /// The record of the write cache mode. `None`: the memory has no space for it.
    pub(crate) fn of_write_cache(&self) -> Option<CacheRecord> {
        let InflightDescription { num_queues, queue_size, .. } = self.description;
        let region = self.memory.regions().first()?;
        CacheRecord::new(region.clone(), rings_len(num_queues, queue_size))
    }

    /// Whether there is a record for ring `index`, which has `size` entries.
    ///
    /// # Errors
    ///
    /// Why not.
    pub(crate) fn serves(&self, index: u16, size: u16) -> Result<(), String> {
        let InflightDescription { num_queues, queue_size: entries, .. } = self.description;
        match index < num_queues {
            false => Err(format!("the front end's record is one of {num_queues} rings")),
            true if entries < size => Err(QueueError::Record { entries, size }.to_string()),
            true => Ok(()),
        }
    }

    /// The record of ring `index`, for the thread that serves the ring.
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

/// The description of memory that [`create`] made. QEMU keeps its size, but describes it by the entries that QEMU asked
/// for. Memory of another size keeps its description: another back end, or an older version, made it.
fn as_created(description: InflightDescription) -> InflightDescription {
    let InflightDescription { mmap_size, num_queues, queue_size, .. } = description;
    let created = queue_size.max(MAX_QUEUE_SIZE);
    match mmap_size == created_len(num_queues, created) {
        true => InflightDescription { queue_size: created, ..description },
        false => description,
    }
}

fn cannot_shrink(fd: &OwnedFd) -> bool {
    let seals = fcntl(fd.as_fd(), FcntlArg::F_GET_SEALS).unwrap_or(0);
    SealFlag::from_bits_truncate(seals).contains(SealFlag::F_SEAL_SHRINK)
}
