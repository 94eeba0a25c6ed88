//! Maps a file into the process, and unmaps it on drop.
//!
//! Miri does not support these system calls. Under Miri a mapping is private, zeroed memory, which Miri checks
//! byte by byte.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use libc::c_void;

/// Readable and writable memory owned by this value.
pub(crate) struct Mapping {
    at: NonNull<c_void>,
    len: usize,
    /// The page size of the file, bytes.
    page: usize,
}

// SAFETY: the value owns the mapping, and munmap may be called from any thread.
unsafe impl Send for Mapping {}
// SAFETY: the methods that take `&self` return an address and a number.
unsafe impl Sync for Mapping {}

/// The properties of a file system that mappings depend on.
pub(crate) struct FileSystem {
    /// The page size of mappings, bytes: the huge page size on hugetlbfs, else that of the system.
    pub(crate) page: u64,
    /// Another process or machine supplies the pages: an access may block for any time.
    pub(crate) is_elsewhere: bool,
    /// The pages are in memory only: an access waits for no disk.
    pub(crate) is_memory: bool,
}

impl Mapping {
    /// The first byte, at a page boundary. Valid for [`len`](Self::len) bytes while the value lives.
    pub(crate) fn at(&self) -> NonNull<c_void> {
        self.at
    }

    /// Bytes: a multiple of the page size of the file.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

#[cfg(not(miri))]
mod calls {
    use std::mem::MaybeUninit;
    use std::os::fd::AsRawFd;

    use super::*;

    impl Mapping {
        /// Maps `len` bytes of a file from `offset` on, shared with other mappings. Both are multiples of
        /// [the page size](FileSystem::page), `page`.
        pub(crate) fn new(
            fd: &OwnedFd,
            len: usize,
            offset: libc::off_t,
            page: usize,
        ) -> io::Result<Mapping> {
            Self::with(fd, len, offset, page, libc::PROT_READ | libc::PROT_WRITE)
        }

        /// Maps `len` bytes of a device file from `offset` on, for reading alone. Both are multiples of the page size.
        pub(crate) fn read_only(
            fd: &OwnedFd,
            len: usize,
            offset: libc::off_t,
        ) -> io::Result<Mapping> {
            Self::with(fd, len, offset, 4096, libc::PROT_READ)
        }

        fn with(
            fd: &OwnedFd,
            len: usize,
            offset: libc::off_t,
            page: usize,
            protection: i32,
        ) -> io::Result<Mapping> {
            // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
            let at = unsafe {
                libc::mmap(
                    std::ptr::null_mut(),
                    len,
                    protection,
                    libc::MAP_SHARED | libc::MAP_NORESERVE,
                    fd.as_raw_fd(),
                    offset,
                )
            };
            if at == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            let at = NonNull::new(at).ok_or(io::ErrorKind::InvalidData)?;
            Ok(Mapping { at, len, page })
        }

        /// Gives the kernel advice that keeps the contents, madvise(2), for `len` bytes from `offset` on.
        pub(crate) fn advise(&self, offset: usize, len: usize, advice: i32) -> io::Result<()> {
            if offset > self.len || len > self.len - offset {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            // SAFETY: the range is inside the mapping, which consists of whole pages that this value owns.
            let result = unsafe { libc::madvise(self.at.as_ptr().byte_add(offset), len, advice) };
            if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
        }
    }

    impl Drop for Mapping {
        fn drop(&mut self) {
            // Other threads that map or unmap memory wait for each call.
            let part = UNMAPPED_AT_ONCE.max(self.page);
            for from in (0..self.len).step_by(part) {
                let len = part.min(self.len - from);
                // SAFETY: mapped in `new` with this length. The parts are whole pages, and each is unmapped once. Users of
                // its addresses hold the value.
                unsafe { libc::munmap(self.at.as_ptr().byte_add(from), len) };
            }
        }
    }

    /// Bytes that one call unmaps: a power of two.
    const UNMAPPED_AT_ONCE: usize = 32 << 20;

    /// File systems whose pages another process or machine supplies, statfs(2): FUSE, NFS, CIFS, SMB 2, 9P, Ceph. Also
    /// overlayfs, whose lower layers may be any of these.
    const ELSEWHERE: [libc::__fsword_t; 7] =
        [0x6573_5546, 0x6969, 0xff53_4d42, 0xfe53_4d42, 0x0102_1997, 0x00c3_6400, 0x794c_7630];

    /// File systems in memory, statfs(2): tmpfs, which memfds and the nodes of devices are on, too; hugetlbfs; ramfs.
    const MEMORY: [libc::__fsword_t; 3] = [libc::TMPFS_MAGIC, libc::HUGETLBFS_MAGIC, 0x8584_58f6];

    /// The properties of a file system that mappings depend on.
    pub(crate) fn file_system(fd: &OwnedFd) -> io::Result<FileSystem> {
        let mut stat = MaybeUninit::<libc::statfs>::uninit();
        // SAFETY: `stat` is a place for the kernel to fill in.
        if unsafe { libc::fstatfs(fd.as_raw_fd(), stat.as_mut_ptr()) } < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: fstatfs succeeded, so it filled in the whole struct.
        let stat = unsafe { stat.assume_init() };
        // SAFETY: no pointers involved.
        let system = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        let huge = (stat.f_type == libc::HUGETLBFS_MAGIC).then_some(stat.f_bsize);
        let page = u64::try_from(huge.unwrap_or(system)).unwrap_or(0);
        let page = if page.is_power_of_two() { page } else { 4096 };
        let (is_elsewhere, is_memory) =
            (ELSEWHERE.contains(&stat.f_type), MEMORY.contains(&stat.f_type));
        Ok(FileSystem { page, is_elsewhere, is_memory })
    }
}

#[cfg(miri)]
mod calls {
    use std::alloc::{Layout, alloc_zeroed, dealloc};

    use super::*;

    /// Page size, bytes.
    const PAGE: usize = 4096;

    fn layout(len: usize) -> io::Result<Layout> {
        Layout::from_size_align(len, PAGE).map_err(io::Error::other)
    }

    impl Mapping {
        pub(crate) fn new(
            _: &OwnedFd,
            len: usize,
            _: libc::off_t,
            page: usize,
        ) -> io::Result<Mapping> {
            let layout = layout(len)?;
            assert!(len > 0);
            // SAFETY: the layout's size is not zero.
            let at = unsafe { alloc_zeroed(layout) };
            let at = NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
            Ok(Mapping { at, len, page })
        }

        pub(crate) fn read_only(fd: &OwnedFd, len: usize, _: libc::off_t) -> io::Result<Mapping> {
            Self::new(fd, len, 0, PAGE)
        }

        pub(crate) fn advise(&self, _: usize, _: usize, _: i32) -> io::Result<()> {
            Err(io::ErrorKind::Unsupported.into())
        }
    }

    impl Drop for Mapping {
        fn drop(&mut self) {
            if let Ok(layout) = layout(self.len) {
                // SAFETY: allocated in `new` with this layout, freed once.
                unsafe { dealloc(self.at.as_ptr().cast(), layout) };
            }
        }
    }

    pub(crate) fn file_system(_: &OwnedFd) -> io::Result<FileSystem> {
        Ok(FileSystem { page: PAGE as u64, is_elsewhere: false, is_memory: true })
    }
}

pub(crate) use calls::file_system;

/// Returns whether another process or machine may supply the pages of a file.
///
/// So it is on FUSE, overlayfs and network file systems. The call itself may block as long as an access.
///
/// # Errors
///
/// Those of fstatfs(2).
pub fn is_elsewhere(fd: &OwnedFd) -> io::Result<bool> {
    Ok(file_system(fd)?.is_elsewhere)
}
