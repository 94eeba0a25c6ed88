//! Errors of a queue ([`QueueError`]) and of the buffers of a chain ([`SegmentsError`]).

use std::fmt;

use guest_memory::AccessError;

/// Why a queue cannot be set up, or is broken from now on.
///
/// Section numbers are virtio 1.3's.
#[derive(Debug)]
pub enum QueueError {
    /// The size is not a power of two from 1 to 32768 (2.7).
    Size(u16),
    /// A ring is misaligned or not in one memory region (2.7).
    Ring(guest_memory::Error),
    /// The queue broke earlier with another error.
    Broken,
    /// The available index is further ahead than the queue has entries (2.7.6).
    AvailJump {
        /// The available index found.
        index: u16,
        /// The entry to be popped next.
        /// The next entry to pop.
        next: u16,
    },
    /// The driver offers a chain while as many are in flight as the queue has entries.
    TooManyInFlight,
    /// The available ring or a descriptor names a descriptor that does not exist.
    Index {
        /// The number of the descriptor.
        index: u16,
        /// Number of descriptors in the table.
        table: u16,
    },
    /// A chain is a loop, or has more than [`MAX_SEGMENTS`](crate::MAX_SEGMENTS) descriptors.
    TooLong {
        /// The chain's first descriptor.
        head: u16,
    },
    /// A chain has more than `u32::MAX` bytes. 2.7.5 permits one more, which a used length could not express.
    TooManyBytes {
        /// The chain's first descriptor.
        head: u16,
    },
    /// A buffer is empty, or its end overflows the address space.
    Buffer {
        /// The buffer's guest address.
        addr: u64,
        /// Its length.
        len: u32,
    },
    /// A readable descriptor follows a writable one (2.7.4.2).
    ReadableAfterWritable {
        /// The chain's first descriptor.
        head: u16,
    },
    /// An indirect table without VIRTIO_F_INDIRECT_DESC, inside another one, or with a successor
    /// (2.7.5.3.1).
    Indirect {
        /// The chain's first descriptor.
        head: u16,
    },
    /// The length of an indirect table is not a multiple of 16 bytes, 0, or for more than 65535
    /// descriptors.
    IndirectLength {
        /// The chain's first descriptor.
        head: u16,
        /// The table's length in bytes.
        len: u32,
    },
    /// An indirect table is not memory.
    IndirectAccess {
        /// The chain's first descriptor.
        head: u16,
        /// The part outside of memory.
        source: AccessError,
    },
}

impl fmt::Display for QueueError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            QueueError::Size(size) => {
                write!(f, "queue size {size} is not a power of two from 1 to 32768")
            }
            QueueError::Ring(_) => write!(f, "queue cannot be set up"),
            QueueError::Broken => write!(f, "queue is broken"),
            QueueError::AvailJump { index, next } => write!(
                f,
                "available index {index} is further from {next} than the queue has entries"
            ),
            QueueError::TooManyInFlight => {
                write!(f, "driver offers more buffers than the queue has descriptors")
            }
            QueueError::Index { index, table } => {
                write!(f, "descriptor {index} is out of range, the table has {table}")
            }
            QueueError::TooLong { head } => {
                write!(f, "chain at descriptor {head} is too long or a loop")
            }
            QueueError::TooManyBytes { head } => {
                write!(f, "chain at descriptor {head} has more than 4294967295 bytes")
            }
            QueueError::Buffer { addr, len } => {
                write!(f, "buffer at {addr:#x}, {len:#x} bytes, is empty or overflows")
            }
            QueueError::ReadableAfterWritable { head } => {
                write!(f, "chain at descriptor {head} has a readable buffer after a writable one")
            }
            QueueError::Indirect { head } => {
                write!(f, "chain at descriptor {head} has an indirect table where none is allowed")
            }
            QueueError::IndirectLength { head, len } => write!(
                f,
                "chain at descriptor {head} has an indirect table of {len} bytes, not 1 to 65535 \
                 descriptors of 16"
            ),
            QueueError::IndirectAccess { head, .. } => {
                write!(f, "chain at descriptor {head}: cannot read the indirect table")
            }
        }
    }
}

impl std::error::Error for QueueError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            QueueError::Ring(source) => Some(source),
            QueueError::IndirectAccess { source, .. } => Some(source),
            _ => None,
        }
    }
}

/// Why bytes of a chain are not accessible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SegmentsError {
    /// The chain has fewer bytes.
    Short {
        /// Bytes requested.
        wanted: u32,
        /// Bytes available.
        len: u32,
    },
    /// They are not in guest memory.
    Access(AccessError),
}

impl From<AccessError> for SegmentsError {
    fn from(error: AccessError) -> Self {
        SegmentsError::Access(error)
    }
}

impl fmt::Display for SegmentsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SegmentsError::Short { wanted, len } => {
                write!(f, "buffer has {len} bytes, {wanted} are needed")
            }
            SegmentsError::Access(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for SegmentsError {}
