//! Why a connection ends.

#![forbid(unsafe_code)]

use std::io;

use super::wire::WireError;
use crate::message_socket::SocketError;
use crate::vhost_user::ExportError;

/// Why serving a client ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectionError {
    /// Malformed bytes; the start of the next message is unknown.
    #[error("{0}")]
    Framing(WireError),
    /// The first message does not name a supported version.
    #[error("the client did not begin with version 0 of the vfio-user protocol")]
    NoVersion,
    /// The client disconnected within a message.
    #[error("the client left in the middle of a message")]
    CutShort,
    /// The client did not complete a message, or did not take a reply, in time.
    #[error("the client does not send the rest of a message, or read its replies")]
    Late,
    /// Too many of its commands failed.
    #[error("too many commands were refused")]
    TooManyRefused,
    /// A system call failed.
    #[error("{call} failed: {error}")]
    Os {
        /// The call.
        call: &'static str,
        /// The reason.
        error: io::Error,
    },
    /// The I/O thread has stopped.
    #[error("{0}")]
    Export(ExportError),
}

impl From<SocketError> for ConnectionError {
    fn from(error: SocketError) -> Self {
        match error {
            SocketError::CutShort => ConnectionError::CutShort,
            SocketError::Late => ConnectionError::Late,
            SocketError::Os { call, error } => ConnectionError::Os { call, error },
        }
    }
}
