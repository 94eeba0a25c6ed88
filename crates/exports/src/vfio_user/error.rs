//! Why a connection ends.

#![forbid(unsafe_code)]

use std::fmt;
use std::io;

use super::wire::WireError;
use crate::vhost_user::ExportError;

/// Why serving a client ended.
#[derive(Debug)]
pub(super) enum ConnectionError {
    /// Malformed bytes; the start of the next message is unknown.
    Framing(WireError),
    /// The first message does not name a supported version.
    NoVersion,
    /// The client disconnected within a message.
    CutShort,
    /// The client did not complete a message, or did not take a reply, in time.
    Late,
    /// Too many of its commands failed.
    TooManyRefused,
    /// A system call failed.
    Os {
        /// The call.
        call: &'static str,
        /// The reason.
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
