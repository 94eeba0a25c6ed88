//! Why a connection ends.

#![forbid(unsafe_code)]

use std::fmt;
use std::io;

use super::wire::WireError;
use crate::vhost_user::ExportError;

/// Why a client is served no longer.
#[derive(Debug)]
pub(super) enum ConnectionError {
    /// The bytes make no sense, and where the next message begins is unknown.
    Framing(WireError),
    /// The first message is not a version that is spoken here.
    NoVersion,
    /// The client left in the middle of a message.
    CutShort,
    /// It has begun a message and not ended it in time, or not taken a reply.
    Late,
    /// It goes on sending commands that fail.
    TooManyRefused,
    /// A system call failed.
    Os {
        /// Which.
        call: &'static str,
        /// Why.
        error: io::Error,
    },
    /// The I/O thread has stopped.
    Export(ExportError),
}

impl fmt::Display for ConnectionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConnectionError::Framing(error) => error.fmt(f),
            ConnectionError::NoVersion => {
                f.write_str("the client did not begin with version 0 of the vfio-user protocol")
            }
            ConnectionError::CutShort => f.write_str("the client left in the middle of a message"),
            ConnectionError::Late => {
                f.write_str("the client does not send the rest of a message, or read its replies")
            }
            ConnectionError::TooManyRefused => f.write_str("too many commands were refused"),
            ConnectionError::Os { call, error } => write!(f, "{call} failed: {error}"),
            ConnectionError::Export(error) => error.fmt(f),
        }
    }
}
