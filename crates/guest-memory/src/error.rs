//! Errors of the set-up of memory ([`Error`]) and of accesses ([`AccessError`]).

use std::io;

use crate::limits::{MAX_MAPPED, MAX_REGIONS};

/// Why a memory region or a set of them was refused.
///
/// Addresses and sizes are in bytes.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The region has no bytes.
    #[error("memory region at guest address {guest_addr:#x} is empty")]
    Empty {
        /// Its guest-physical address.
        guest_addr: u64,
    },
    /// The region's end does not fit the address space.
    #[error(
        "memory region at guest address {guest_addr:#x}, {size:#x} bytes: its {what} overflows"
    )]
    Overflow {
        /// Its guest-physical address.
        guest_addr: u64,
        /// Its size.
        size: u64,
        /// Which of the region's addresses overflows.
        what: &'static str,
    },
    /// The region reaches past the end of its file: touching it there would raise SIGBUS.
    #[error(
        "memory region at guest address {guest_addr:#x} ends at {end:#x} of a file of \
                 {file_size:#x} bytes"
    )]
    BeyondFile {
        /// Its guest-physical address.
        guest_addr: u64,
        /// Where in the file it ends.
        end: u64,
        /// The file's size.
        file_size: u64,
    },
    /// Another process or machine supplies the pages of the region's file. An access could block an I/O thread.
    #[error(
        "memory region at guest address {guest_addr:#x} is in a file on FUSE, overlayfs or a network: give \
                 the guest memory of a memfd, hugetlbfs or tmpfs"
    )]
    Elsewhere {
        /// Its guest-physical address.
        guest_addr: u64,
    },
    /// A system call on the region's file failed.
    #[error("memory region at guest address {guest_addr:#x}, {size:#x} bytes: {call}: {source}")]
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
    /// All front ends together would map more than the process has room for.
    #[error(
        "memory region at guest address {guest_addr:#x}, {size:#x} bytes: no room, all front ends together may map \
                 {:#x} bytes in {MAX_REGIONS} regions",
        MAX_MAPPED
    )]
    NoRoom {
        /// Its guest-physical address.
        guest_addr: u64,
        /// Its size.
        size: u64,
    },
    /// Two regions claim the same addresses.
    #[error(
        "memory regions at guest addresses {first:#x} and {second:#x} overlap in {what} \
                 addresses"
    )]
    Overlap {
        /// Guest-physical address of one region.
        first: u64,
        /// Guest-physical address of the other region.
        second: u64,
        /// The address space in which they overlap: the guest's or the front end's.
        what: &'static str,
    },
    /// The region to remove does not exist.
    #[error(
        "no memory region at guest address {guest_addr:#x}, user address {user_addr:#x}, \
                 of {size:#x} bytes"
    )]
    NoSuchRegion {
        /// Its guest-physical address.
        guest_addr: u64,
        /// Its address in the front end.
        user_addr: u64,
        /// Its size.
        size: u64,
    },
    /// A ring is not inside one region.
    #[error(
        "ring at user address {user_addr:#x}, {len:#x} bytes, is not inside one memory \
                 region"
    )]
    RingOutside {
        /// Its address in the front end's address space.
        user_addr: u64,
        /// Its length.
        len: u64,
    },
    /// A ring is not aligned as virtio requires.
    #[error("ring at user address {user_addr:#x} is not aligned to {align} bytes")]
    RingMisaligned {
        /// Its address in the front end's address space.
        user_addr: u64,
        /// The required alignment.
        align: u64,
    },
}

/// A range of guest addresses that is not entirely memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("guest address {addr:#x}, {len:#x} bytes, is not memory")]
pub struct AccessError {
    /// The first address that is not memory.
    pub addr: u64,
    /// Bytes of the range from there on.
    pub len: u64,
}
