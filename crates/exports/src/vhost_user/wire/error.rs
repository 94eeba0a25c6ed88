//! Why bytes are not a message.

use super::{MAX_FDS, MAX_PAYLOAD};

/// Why bytes are not a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Another version than 1, a reply, or a flag that means nothing.
    #[error("header flags {0:#x} are not those of a request of version 1")]
    Flags(u32),
    /// The header announces more than [`MAX_PAYLOAD`] bytes.
    #[error("payload of {len} bytes, at most {MAX_PAYLOAD} are taken")]
    PayloadTooLong {
        /// How many.
        len: usize,
    },
    /// No request that this back end understands.
    #[error("not a request that is supported here")]
    UnknownRequest,
    /// The payload is shorter than the request's.
    #[error("payload of {len} bytes, {least} are needed")]
    PayloadLength {
        /// What came, bytes.
        len: usize,
        /// The shortest payload, bytes.
        least: usize,
    },
    /// The message is longer than its header says.
    #[error("{0} bytes after the message")]
    Surplus(usize),
    /// Other descriptors than the request wants.
    #[error("came with {got} file descriptors instead of {wanted}")]
    Descriptors {
        /// How many came.
        got: usize,
        /// How many the request wants.
        wanted: usize,
    },
    /// More descriptors than any request wants; the surplus is lost.
    #[error("came with more than {MAX_FDS} file descriptors")]
    TooManyDescriptors,
    /// This one of the descriptors, counted from 0, is nothing that a request wants.
    #[error(
        "its file descriptor {0} is no eventfd, no unix socket, and no memory: that is a memfd, \
                 a device, or a file that is not on FUSE, overlayfs or a network's file system"
    )]
    WrongDescriptor(usize),
    /// A field holds what it cannot.
    #[error("{name} is {value:#x}, allowed is {allowed}")]
    Field {
        /// Which.
        name: &'static str,
        /// What it holds.
        value: u64,
        /// What it could hold.
        allowed: &'static str,
    },
}
