//! A region: its description by the front end, and its mapping.

#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64};

use crate::bus_error::Watched;
use crate::error::Error;
use crate::limits::Share;
use crate::mapping::{FileSystem, Mapping, file_system};
use crate::release::{SMALL, is_large, release};

/// A memory region as the front end describes it. All numbers are bytes.
///
/// See vhost-user, "Memory region description".
#[derive(Debug)]
pub struct Region {
    /// Guest-physical address.
    pub guest_addr: u64,
    /// Size in bytes; not 0.
    pub size: u64,
    /// Address in the front end's address space, in which ring addresses are given.
    pub user_addr: u64,
    /// Offset in the file, in bytes. Need not be a multiple of the page size.
    pub mmap_offset: u64,
    /// The file: a memfd, a file on tmpfs or hugetlbfs, or a device. Kept while it is mapped.
    pub fd: OwnedFd,
}

/// A region mapped into this process, readable and writable; unmapped on drop.
///
/// A large region, or one of a large file, is unmapped by [another thread](crate::release()) soon after.
pub struct MappedRegion {
    guest_addr: u64,
    size: u64,
    user_addr: u64,
    /// The region's first byte: inside the mapping, which begins at a page boundary.
    host: NonNull<u8>,
    mmap_offset: u64,
    is_on_disk: bool,
    backing: ManuallyDrop<Backing>,
}

/// What a region gives back at its end, in this order.
struct Backing {
    /// Dropped before the mapping, as the kernel may then reuse its addresses.
    watched: Watched,
    mapping: Mapping,
    /// Given back after the mapping's end.
    _share: Share,
    file: OwnedFd,
}

impl Drop for MappedRegion {
    fn drop(&mut self) {
        // SAFETY: the field is not used again.
        let backing = unsafe { ManuallyDrop::take(&mut self.backing) };
        if backing.mapping.len() > SMALL || is_large(&backing.file) {
            release(backing);
        }
    }
}

// SAFETY: `host` is an address in the mapping, which the value owns.
unsafe impl Send for MappedRegion {}
// SAFETY: the methods that take `&self` return addresses and numbers. The memory itself is accessed only by
// volatile and atomic operations, as the guest writes it at the same time.
unsafe impl Sync for MappedRegion {}

impl Region {
    /// Maps the region, shared with the front end and excluded from core dumps.
    ///
    /// # Errors
    ///
    /// The region is empty, its addresses overflow, it extends past the end of its file, another process or machine
    /// supplies the file's pages, all regions would exceed [`MAX_MAPPED`](crate::MAX_MAPPED), or the kernel refuses.
    pub fn map(self) -> Result<MappedRegion, Error> {
        let Region { guest_addr, size, user_addr, mmap_offset, ref fd } = self;
        if size == 0 {
            return Err(Error::Empty { guest_addr });
        }
        let overflow = |what| Error::Overflow { guest_addr, size, what };
        let os = |call, source| Error::Os { guest_addr, size, call, source };
        guest_addr.checked_add(size).ok_or_else(|| overflow("guest address"))?;
        user_addr.checked_add(size).ok_or_else(|| overflow("user address"))?;
        let end = mmap_offset.checked_add(size).ok_or_else(|| overflow("file offset"))?;

        let stat = nix::sys::stat::fstat(fd).map_err(|e| os("fstat", e.into()))?;
        let file_size = u64::try_from(stat.st_size).unwrap_or(0);
        // Only regular files have a size to compare with, memfds and hugetlbfs files among them.
        if stat.st_mode & libc::S_IFMT == libc::S_IFREG && end > file_size {
            return Err(Error::BeyondFile { guest_addr, end, file_size });
        }

        // mmap takes an offset, and munmap a length, in units of the file's pages.
        let FileSystem { page, is_elsewhere, is_memory } =
            file_system(fd).map_err(|e| os("fstatfs", e))?;
        if is_elsewhere {
            return Err(Error::Elsewhere { guest_addr });
        }
        let lead = mmap_offset % page;
        let mapping_len = (lead + size)
            .checked_next_multiple_of(page)
            .filter(|&len| isize::try_from(len).is_ok())
            .and_then(|len| usize::try_from(len).ok())
            .ok_or_else(|| overflow("mapping"))?;
        let offset =
            libc::off_t::try_from(mmap_offset - lead).map_err(|_| overflow("file offset"))?;

        let share = Share::take(mapping_len as u64).ok_or(Error::NoRoom { guest_addr, size })?;
        let mapping = Mapping::new(fd, mapping_len, offset, page as usize);
        let mapping = mapping.map_err(|e| os("mmap", e))?;
        // Guest memory is private and large, so core files omit it. A failure is ignored.
        let _ = mapping.advise(0, mapping_len, libc::MADV_DONTDUMP);

        // SAFETY: `lead < page <= mapping_len`.
        let host = unsafe { mapping.at().cast::<u8>().add(lead as usize) };
        let watched = Watched::new(mapping.at(), mapping_len);
        Ok(MappedRegion {
            guest_addr,
            size,
            user_addr,
            host,
            mmap_offset,
            is_on_disk: !is_memory,
            backing: ManuallyDrop::new(Backing { watched, mapping, _share: share, file: self.fd }),
        })
    }
}

/// Granularity of [`MappedRegion::populate`], bytes: at least the size of a page, huge or not, of the usual sizes.
const POPULATED_UNIT: u64 = 2 << 20;

impl MappedRegion {
    /// Returns whether the region is in a file on a disk.
    ///
    /// Accesses to pages that are not in memory wait for the disk, and so does the thread.
    pub fn is_on_disk(&self) -> bool {
        self.is_on_disk
    }

    /// Returns its guest-physical address.
    pub fn guest_addr(&self) -> u64 {
        self.guest_addr
    }

    /// Returns its address in the front end's address space.
    pub fn user_addr(&self) -> u64 {
        self.user_addr
    }

    /// Whether a guest address is in it.
    pub(crate) fn contains(&self, addr: u64) -> bool {
        addr.checked_sub(self.guest_addr).is_some_and(|offset| offset < self.size)
    }

    /// Returns its offset in the file, bytes.
    pub fn mmap_offset(&self) -> u64 {
        self.mmap_offset
    }

    /// Returns the file, for a hand-over to another process.
    pub fn file(&self) -> &OwnedFd {
        &self.backing.file
    }

    /// Returns its size in bytes; not 0.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Populates the pages of up to `len` bytes from byte `offset` on.
    ///
    /// The pages are mapped writable, as if each had been written to: madvise(2), `MADV_POPULATE_WRITE`. Takes
    /// about a second per GiB that the guest has not used yet.
    ///
    /// # Errors
    ///
    /// `EINVAL` before Linux 5.14. `ENOMEM`, `EFAULT`: some pages are unavailable.
    pub fn populate(&self, offset: u64, len: u64) -> io::Result<()> {
        // Offsets in the mapping, which begins and ends at a page boundary of the file.
        let lead = self.host.addr().get() - self.backing.mapping.at().addr().get();
        let page = POPULATED_UNIT as usize;
        let from = (lead + offset.min(self.size) as usize) / page * page;
        let end = lead + offset.saturating_add(len).min(self.size) as usize;
        let end = end.next_multiple_of(page).min(self.backing.mapping.len());
        match end.checked_sub(from).filter(|&len| len > 0) {
            Some(len) => self.backing.mapping.advise(from, len, libc::MADV_POPULATE_WRITE),
            None => Ok(()),
        }
    }

    /// Returns whether an access has found that the front end shrank the file.
    ///
    /// The region is private memory since then.
    pub fn is_lost(&self) -> bool {
        self.backing.watched.is_lost()
    }

    /// Returns the address of the region's first byte in this process.
    ///
    /// The address is valid for [`size`](Self::size) bytes while the value lives.
    pub fn host(&self) -> NonNull<u8> {
        self.host
    }

    /// Returns the byte at `offset` of the region. `None`: beyond its end.
    ///
    /// For memory shared with other processes rather than with a guest.
    pub fn byte(&self, offset: u64) -> Option<&AtomicU8> {
        let offset = usize::try_from(offset).ok().filter(|_| offset < self.size)?;
        // SAFETY: inside the region, so mapped as long as `self` is borrowed. A byte needs no alignment. All other
        // accesses to this memory are volatile or atomic (see `Sync`).
        Some(unsafe { AtomicU8::from_ptr(self.host.add(offset).as_ptr()) })
    }

    /// Returns the region as words of 64 bits.
    ///
    /// A rest of less than a word is left out. A region that begins within a word has none. For memory shared with
    /// other processes rather than with a guest.
    #[inline]
    pub fn words(&self) -> &[AtomicU64] {
        let words = self.host.cast::<AtomicU64>();
        let len = if words.is_aligned() { self.size as usize / size_of::<AtomicU64>() } else { 0 };
        // SAFETY: inside the region, so mapped as long as `self` is borrowed, and aligned. All other accesses to this
        // memory are volatile or atomic (see `Sync`).
        unsafe { std::slice::from_raw_parts(words.as_ptr(), len) }
    }
}

impl fmt::Debug for MappedRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "MappedRegion(guest {:#x}, user {:#x}, {:#x} bytes)",
            self.guest_addr, self.user_addr, self.size
        )
    }
}
