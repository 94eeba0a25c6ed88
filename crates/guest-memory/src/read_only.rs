//! Memory that a device driver of the kernel writes, and this process reads.

#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::mapping::Mapping;

/// A mapping of a device file for reading, unmapped on drop.
///
/// The driver writes at any time.
pub struct ReadOnly(Mapping);

impl ReadOnly {
    /// Maps `len` bytes of a device file from `offset` on. Both are multiples of the page size.
    ///
    /// # Errors
    ///
    /// As of mmap(2).
    pub fn map(fd: &OwnedFd, offset: u64, len: usize) -> io::Result<ReadOnly> {
        let offset = libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        Mapping::read_only(fd, len, offset).map(ReadOnly)
    }

    /// Reads the 64-bit word at a byte offset, which is a multiple of 8. Later reads see what the driver wrote before
    /// the word.
    ///
    /// Returns `None` outside of the mapping, or if the offset is no such multiple.
    #[inline]
    pub fn word(&self, offset: usize) -> Option<u64> {
        let end = offset.checked_add(size_of::<u64>())?;
        if end > self.0.len() || !offset.is_multiple_of(size_of::<u64>()) {
            return None;
        }
        // SAFETY: in the mapping, which begins at a page boundary and lives as long as this value, and aligned. The memory
        // has no Rust references.
        let word = unsafe { AtomicU64::from_ptr(self.0.at().as_ptr().byte_add(offset).cast()) };
        Some(word.load(Ordering::Acquire))
    }
}

impl fmt::Debug for ReadOnly {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReadOnly({} bytes)", self.0.len())
    }
}
