//! Errors of the set-up of memory ([`Error`]) and of accesses ([`AccessError`]).

use std::fmt;
use std::io;

/// Why a memory region or a set of them was refused.
///
/// Addresses and sizes are in bytes.
#[derive(Debug)]
pub enum Error {
    /// The region has no bytes.
    Empty {
        /// Its guest-physical address.
        guest_addr: u64,
    },
    /// The region's end does not fit the address space.
    Overflow {
        /// Its guest-physical address.
        guest_addr: u64,
        /// Its size.
        size: u64,
        /// Which of the region's addresses overflows.
        what: &'static str,
    },
    /// The region reaches past the end of its file: touching it there would raise SIGBUS.
    BeyondFile {
        /// Its guest-physical address.
        guest_addr: u64,
        /// Where in the file it ends.
        end: u64,
        /// The file's size.
        file_size: u64,
    },
    /// Another process or machine supplies the pages of the region's file. An access could block an I/O thread.
    Elsewhere {
        /// Its guest-physical address.
        guest_addr: u64,
    },
    /// A system call on the region's file failed.
    Os {
        /// Its guest-physical address.
        guest_addr: u64,
        /// Its size.
        size: u64,
        /// The system call.
        call: &'static str,
        /// Its error.
        source: io::Error,
    },
    /// Two regions claim the same addresses.
    Overlap {
        /// Guest-physical address of one region.
        first: u64,
        /// Guest-physical address of the other region.
        second: u64,
        /// The address space in which they overlap: the guest's or the front end's.
        what: &'static str,
    },
    /// The region to remove does not exist.
    NoSuchRegion {
        /// Its guest-physical address.
        guest_addr: u64,
        /// Its address in the front end.
        user_addr: u64,
        /// Its size.
        size: u64,
    },
    /// A ring is not inside one region.
    RingOutside {
        /// Its address in the front end's address space.
        user_addr: u64,
        /// Its length.
        len: u64,
    },
    /// A ring is not aligned as virtio requires.
    RingMisaligned {
        /// Its address in the front end's address space.
        user_addr: u64,
        /// The required alignment.
        align: u64,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Empty { guest_addr } => {
                write!(f, "memory region at guest address {guest_addr:#x} is empty")
            }
            Error::Overflow { guest_addr, size, what } => write!(
                f,
                "memory region at guest address {guest_addr:#x}, {size:#x} bytes: its {what} overflows"
            ),
            Error::Elsewhere { guest_addr } => write!(
                f,
                "memory region at guest address {guest_addr:#x} is in a file on FUSE, overlayfs or a network: give \
                 the guest memory of a memfd, hugetlbfs or tmpfs"
            ),
            Error::BeyondFile { guest_addr, end, file_size } => write!(
                f,
                "memory region at guest address {guest_addr:#x} ends at {end:#x} of a file of \
                 {file_size:#x} bytes"
            ),
            Error::Os { guest_addr, size, call, source } => write!(
                f,
                "memory region at guest address {guest_addr:#x}, {size:#x} bytes: {call}: {source}"
            ),
            Error::Overlap { first, second, what } => write!(
                f,
                "memory regions at guest addresses {first:#x} and {second:#x} overlap in {what} \
                 addresses"
            ),
            Error::NoSuchRegion { guest_addr, user_addr, size } => write!(
                f,
                "no memory region at guest address {guest_addr:#x}, user address {user_addr:#x}, \
                 of {size:#x} bytes"
            ),
            Error::RingOutside { user_addr, len } => write!(
                f,
                "ring at user address {user_addr:#x}, {len:#x} bytes, is not inside one memory \
                 region"
            ),
            Error::RingMisaligned { user_addr, align } => {
                write!(f, "ring at user address {user_addr:#x} is not aligned to {align} bytes")
            }
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Os { source, .. } => Some(source),
            _ => None,
        }
    }
}

/// A range of guest addresses that is not entirely memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AccessError {
    /// The first address that is not memory.
    pub addr: u64,
    /// Bytes of the range from there on.
    pub len: u64,
}

impl fmt::Display for AccessError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "guest address {:#x}, {:#x} bytes, is not memory", self.addr, self.len)
    }
}

impl std::error::Error for AccessError {}
