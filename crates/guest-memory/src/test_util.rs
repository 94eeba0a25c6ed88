//! Memory without a front end: memfds of our own, for tests and load generators.
//!
//! The "front end" of this memory has guest address `a` at user address
//! [`USER_BASE`]` + a`, so that a mix-up of the two shows.

#[cfg(not(miri))]
pub mod fuse;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::error::Error;
use crate::memory::GuestMemory;
use crate::region::Region;

/// User address of guest address 0.
pub const USER_BASE: u64 = 0x7000_0000_0000;

#[cfg(not(miri))]
fn memfd() -> nix::Result<OwnedFd> {
    use nix::sys::memfd::{MFdFlags, memfd_create};
    memfd_create(c"guest-memory", MFdFlags::MFD_CLOEXEC)
}

/// A descriptor that Miri knows: nothing is read from it there.
#[cfg(miri)]
fn memfd() -> nix::Result<OwnedFd> {
    let file = std::env::temp_dir().join(format!("guest-memory-{}", std::process::id()));
    let fd = std::fs::File::options().create(true).append(true).open(&file);
    let _ = std::fs::remove_file(file);
    Ok(fd.map_err(|_| nix::Error::EIO)?.into())
}

/// Returns a region at `guest_addr` backed by a fresh memfd.
///
/// The memfd has `size` zero bytes.
///
/// # Errors
///
/// [`Error::Os`] when the memfd cannot be had.
pub fn memfd_region(guest_addr: u64, size: u64) -> Result<Region, Error> {
    let os = |call| move |e: nix::Error| Error::Os { guest_addr, size, call, source: e.into() };
    let fd = memfd().map_err(os("memfd_create"))?;
    nix::unistd::ftruncate(&fd, size.cast_signed()).map_err(os("ftruncate"))?;
    Ok(Region { guest_addr, size, user_addr: USER_BASE + guest_addr, mmap_offset: 0, fd })
}

/// Returns a guest's memory of regions `(guest address, bytes)`, each a memfd.
///
/// # Errors
///
/// As [`Region::map`] and [`GuestMemory::from_regions`].
pub fn memfd_memory(regions: &[(u64, u64)]) -> Result<Arc<GuestMemory>, Error> {
    let mapped: Result<Vec<_>, Error> = regions
        .iter()
        .map(|&(guest_addr, size)| Ok(Arc::new(memfd_region(guest_addr, size)?.map()?)))
        .collect();
    Ok(Arc::new(GuestMemory::from_regions(mapped?)?))
}
