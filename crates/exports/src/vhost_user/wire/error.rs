//! Why bytes are not a message.

use std::fmt;

use super::{MAX_FDS, MAX_PAYLOAD};

/// Why bytes are not a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WireError {
    /// Another version than 1, a reply, or a flag that means nothing.
    Flags(u32),
    /// The header announces more than [`MAX_PAYLOAD`] bytes.
    PayloadTooLong {
        /// How many.
        len: usize,
    },
    /// No request that this back end understands.
    UnknownRequest,
    /// The payload is shorter or longer than the request's can be.
    PayloadLength {
        /// What came, bytes.
        len: usize,
        /// What may come, least and most.
        allowed: (usize, usize),
    },
    /// Other descriptors than the request wants.
    Descriptors {
        /// How many came.
        got: usize,
        /// How many the request wants.
        wanted: usize,
    },
    /// More descriptors than any request wants; the surplus is lost.
    TooManyDescriptors,
    /// This one of the descriptors, counted from 0, is nothing that a request wants.
    WrongDescriptor(usize),
    /// A field holds what it cannot.
    Field {
        /// Which.
        name: &'static str,
        /// What it holds.
        value: u64,
        /// What it could hold.
        allowed: &'static str,
    },
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WireError::Flags(flags) => {
                write!(f, "header flags {flags:#x} are not those of a request of version 1")
            }
            WireError::PayloadTooLong { len } => {
                write!(f, "payload of {len} bytes, at most {MAX_PAYLOAD} are taken")
            }
            WireError::UnknownRequest => f.write_str("not a request that is supported here"),
            WireError::PayloadLength { len, allowed: (least, most) } if least == most => {
                write!(f, "payload of {len} bytes instead of {least}")
            }
            WireError::PayloadLength { len, allowed: (least, most) } => {
                write!(f, "payload of {len} bytes instead of {least} to {most}")
            }
            WireError::Descriptors { got, wanted } => {
                write!(f, "came with {got} file descriptors instead of {wanted}")
            }
            WireError::TooManyDescriptors => {
                write!(f, "came with more than {MAX_FDS} file descriptors")
            }
            WireError::WrongDescriptor(nth) => write!(
                f,
                "its file descriptor {nth} is no eventfd, no unix socket, and no memory: that is a memfd, \
                 a device, or a file that is not on FUSE, overlayfs or a network's file system"
            ),
            WireError::Field { name, value, allowed } => {
                write!(f, "{name} is {value:#x}, allowed is {allowed}")
            }
        }
    }
}

impl std::error::Error for WireError {}
