//! Receives typed messages of a client.

#![forbid(unsafe_code)]

use std::os::fd::OwnedFd;

use super::error::ConnectionError;
use super::wire::{HEADER_LEN, Header, MAX_FDS, MAX_PAYLOAD, WireError};
use crate::message_socket::MessageSocket;
use crate::vhost_user::descriptors::Wrong;

/// A message as received, with its header parsed.
pub(super) struct Incoming {
    pub(super) header: Header,
    /// Its descriptors. More than a message may have, or a wrong kind, are an error.
    pub(super) fds: Result<Vec<OwnedFd>, WireError>,
}

/// Waits for the next complete message, and puts its payload into `payload`, exactly as long as the header
/// says. `None`: the client has disconnected.
///
/// # Errors
///
/// It disconnected within a message, or the bytes are malformed.
pub(super) async fn receive(
    socket: &mut MessageSocket,
    payload: &mut Vec<u8>,
) -> Result<Option<Incoming>, ConnectionError> {
    let Some((header, fds)) = socket.begin::<HEADER_LEN>(MAX_FDS).await? else { return Ok(None) };
    let header = Header::parse(header).map_err(ConnectionError::Framing)?;
    debug_assert!(header.payload_len <= MAX_PAYLOAD, "checked by the header");
    payload.clear();
    payload.resize(header.payload_len, 0);
    let fds = socket.finish(payload, fds).await?.map_err(|wrong| match wrong {
        Wrong::TooMany => WireError::TooManyDescriptors,
        Wrong::Kind(number) => WireError::WrongDescriptor(number),
    });
    Ok(Some(Incoming { header, fds }))
}
