//! Receives typed messages of a front end.

#![forbid(unsafe_code)]

use std::os::fd::OwnedFd;

use super::descriptors::Wrong;
use super::error::ConnectionError;
use super::wire::{HEADER_LEN, Header, MAX_FDS, MAX_PAYLOAD, WireError};
use crate::message_socket::MessageSocket;

/// A message as received, with its header parsed.
pub(crate) struct Incoming {
    pub(crate) header: Header,
    /// Exactly as long as the header says.
    pub(crate) payload: Vec<u8>,
    /// Its descriptors. More than a message may have, or a wrong kind, are an error.
    pub(crate) fds: Result<Vec<OwnedFd>, WireError>,
}

/// Waits for the next complete message; `None`: the front end has disconnected.
///
/// # Errors
///
/// It disconnected within a message, or the bytes are malformed.
pub(crate) async fn receive(
    socket: &mut MessageSocket,
) -> Result<Option<Incoming>, ConnectionError> {
    let Some((header, fds)) = socket.begin::<HEADER_LEN>(MAX_FDS).await? else { return Ok(None) };
    let header = Header::parse(header).map_err(ConnectionError::Framing)?;
    debug_assert!(header.payload_len <= MAX_PAYLOAD, "checked by the header");
    let mut payload = vec![0; header.payload_len];
    let fds = socket.finish(&mut payload, fds).await?.map_err(|wrong| match wrong {
        Wrong::TooMany => WireError::TooManyDescriptors,
        Wrong::Kind(number) => WireError::WrongDescriptor(number),
    });
    Ok(Some(Incoming { header, payload, fds }))
}
