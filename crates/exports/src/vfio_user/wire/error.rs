//! Errors in the bytes of a message.

use nix::errno::Errno;

use super::{HEADER_LEN, MAX_DATA, MAX_PAYLOAD};

/// A malformed message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The header's flags are not those of a command.
    #[error("header flags {0:#x} are not those of a command")]
    NotCommand(u32),
    /// The header's size is less than a header, or more than any message has.
    #[error(
        "message size {0} is not from {HEADER_LEN} to {most}",
        most = HEADER_LEN + MAX_PAYLOAD
    )]
    Size(u32),
    /// The payload is shorter or longer than its command's.
    #[error("a payload of {0} bytes is too short or too long")]
    Length(usize),
    /// More or fewer descriptors than the command has.
    #[error("{0} file descriptors are too few or too many")]
    Descriptors(usize),
    /// More descriptors than any message has.
    #[error("more than {} file descriptors", super::MAX_FDS)]
    TooManyDescriptors,
    /// A descriptor that is neither an eventfd nor memory.
    #[error("file descriptor {0} of the message is neither an eventfd nor memory")]
    WrongDescriptor(usize),
    /// Unknown flags, or flags that exclude each other.
    #[error("flags {0:#x} are unknown or exclude each other")]
    Flags(u32),
    /// An empty range, or one whose end does not fit the address space.
    #[error("{size:#x} bytes at {address:#x} are not a range of addresses")]
    Range {
        /// First address.
        address: u64,
        /// Bytes.
        size: u64,
    },
    /// More bytes of a region than one message may read or write.
    #[error("{0} bytes are more than the {MAX_DATA} that were agreed on (max_data_xfer_size)")]
    Data(u32),
    /// The version's capabilities are not text that ends with a zero byte.
    #[error("the version's capabilities are not text that ends with a zero byte")]
    Capabilities,
}

impl WireError {
    /// Returns the error for the client.
    pub fn errno(self) -> Errno {
        match self {
            WireError::Data(_) => Errno::E2BIG,
            WireError::NotCommand(_)
            | WireError::Size(_)
            | WireError::Length(_)
            | WireError::Descriptors(_)
            | WireError::TooManyDescriptors
            | WireError::WrongDescriptor(_)
            | WireError::Flags(_)
            | WireError::Range { .. }
            | WireError::Capabilities => Errno::EINVAL,
        }
    }
}
