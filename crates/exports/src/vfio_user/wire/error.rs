//! Errors in the bytes of a message.

use std::fmt;

use nix::errno::Errno;

/// A malformed message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WireError {
    /// The header's flags are not those of a command.
    NotCommand(u32),
    /// The header's size is less than a header, or more than any message has.
    Size(u32),
    /// The payload is shorter or longer than its command's.
    Length(usize),
    /// More or fewer descriptors than the command has.
    Descriptors(usize),
    /// More descriptors than any message has.
    TooManyDescriptors,
    /// A descriptor that is neither an eventfd nor memory.
    WrongDescriptor(usize),
    /// Unknown flags, or flags that exclude each other.
    Flags(u32),
    /// An empty range, or one whose end does not fit the address space.
    Range {
        /// First address.
        address: u64,
        /// Bytes.
        size: u64,
    },
    /// More bytes of a region than one message may read or write.
    Data(u32),
    /// The version's capabilities are not text that ends with a zero byte.
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

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WireError::NotCommand(flags) => {
                write!(f, "header flags {flags:#x} are not those of a command")
            }
            WireError::Size(size) => write!(
                f,
                "message size {size} is not from {} to {}",
                super::HEADER_LEN,
                super::HEADER_LEN + super::MAX_PAYLOAD
            ),
            WireError::Length(len) => {
                write!(f, "a payload of {len} bytes is too short or too long")
            }
            WireError::Descriptors(fds) => {
                write!(f, "{fds} file descriptors are too few or too many")
            }
            WireError::TooManyDescriptors => {
                write!(f, "more than {} file descriptors", super::MAX_FDS)
            }
            WireError::WrongDescriptor(fd) => {
                write!(f, "file descriptor {fd} of the message is neither an eventfd nor memory")
            }
            WireError::Flags(flags) => {
                write!(f, "flags {flags:#x} are unknown or exclude each other")
            }
            WireError::Range { address, size } => {
                write!(f, "{size:#x} bytes at {address:#x} are not a range of addresses")
            }
            WireError::Data(count) => write!(
                f,
                "{count} bytes are more than the {} that were agreed on (max_data_xfer_size)",
                super::MAX_DATA
            ),
            WireError::Capabilities => {
                f.write_str("the version's capabilities are not text that ends with a zero byte")
            }
        }
    }
}

impl std::error::Error for WireError {}
