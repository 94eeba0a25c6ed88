//! Errors of a queue ([`QueueError`]) and of the buffers of a chain ([`SegmentsError`]).

use guest_memory::AccessError;

/// Why a queue cannot be set up, or is broken from now on.
///
/// Section numbers are virtio 1.3's.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The size is not a power of two from 1 to 32768 (2.7).
    #[error("queue size {0} is not a power of two from 1 to 32768")]
    Size(u16),
    /// The record of requests in flight has fewer entries than the queue.
    #[error("the record of requests in flight has {entries} entries, the queue has {size}")]
    Record {
        /// Entries of the record.
        entries: u16,
        /// Entries of the queue.
        size: u16,
    },
    /// A ring is misaligned or not in one memory region (2.7).
    #[error("queue cannot be set up")]
    Ring(#[source] guest_memory::Error),
    /// The queue broke earlier with another error.
    #[error("queue is broken")]
    Broken,
    /// The available index is further ahead than the queue has entries (2.7.6).
    #[error("available index {index} is further from {next} than the queue has entries")]
    AvailJump {
        /// The available index found.
        index: u16,
        /// The entry to be popped next.
        /// The next entry to pop.
        next: u16,
    },
    /// The driver offers a chain while as many are in flight as the queue has entries.
    #[error("driver offers more buffers than the queue has descriptors")]
    TooManyInFlight,
    /// The available ring or a descriptor names a descriptor that does not exist.
    #[error("descriptor {index} is out of range, the table has {table}")]
    Index {
        /// The number of the descriptor.
        index: u16,
        /// Number of descriptors in the table.
        table: u16,
    },
    /// A chain is a loop, or has more than [`MAX_SEGMENTS`](crate::MAX_SEGMENTS) descriptors.
    #[error("chain at descriptor {head} is too long or a loop")]
    TooLong {
        /// The chain's first descriptor.
        head: u16,
    },
    /// A chain has more than `u32::MAX` bytes. 2.7.5 permits one more, which a used length could not express.
    #[error("chain at descriptor {head} has more than 4294967295 bytes")]
    TooManyBytes {
        /// The chain's first descriptor.
        head: u16,
    },
    /// A buffer's end overflows the address space.
    #[error("buffer at {addr:#x}, {len:#x} bytes, overflows")]
    Buffer {
        /// The buffer's guest address.
        addr: u64,
        /// Its length.
        len: u32,
    },
    /// A readable descriptor follows a writable one (2.7.4.2).
    #[error("chain at descriptor {head} has a readable buffer after a writable one")]
    ReadableAfterWritable {
        /// The chain's first descriptor.
        head: u16,
    },
    /// An indirect table inside another one (2.7.5.3.1).
    #[error("chain at descriptor {head} has an indirect table inside another one")]
    Indirect {
        /// The chain's first descriptor.
        head: u16,
    },
    /// The length of an indirect table is not a multiple of 16 bytes, 0, or for more than 65535
    /// descriptors.
    #[error(
        "chain at descriptor {head} has an indirect table of {len} bytes, not 1 to 65535 \
                 descriptors of 16"
    )]
    IndirectLength {
        /// The chain's first descriptor.
        head: u16,
        /// The table's length in bytes.
        len: u32,
    },
    /// An indirect table is not memory.
    #[error("chain at descriptor {head}: cannot read the indirect table")]
    IndirectAccess {
        /// The chain's first descriptor.
        head: u16,
        /// The part outside of memory.
        source: AccessError,
    },
}

impl QueueError {
    /// Returns the error with its cause, for a log line.
    pub fn in_full(&self) -> String {
        match std::error::Error::source(self) {
            Some(source) => format!("{self}: {source}"),
            None => self.to_string(),
        }
    }
}

/// Why bytes of a chain are not accessible.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SegmentsError {
    /// The chain has fewer bytes.
    #[error("buffer has {len} bytes, {wanted} are needed")]
    Short {
        /// Bytes requested.
        wanted: u32,
        /// Bytes available.
        len: u32,
    },
    /// They are not in guest memory.
    #[error(transparent)]
    Access(#[from] AccessError),
}
