//! vhost-user messages byte by byte, for what a well-behaved client cannot send.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use crate::PATIENCE;

/// `VHOST_USER_GET_FEATURES`.
pub const GET_FEATURES: u32 = 1;
/// `VHOST_USER_SET_OWNER`.
pub const SET_OWNER: u32 = 3;
/// `VHOST_USER_SET_MEM_TABLE`.
pub const SET_MEM_TABLE: u32 = 5;
/// The version that is in the flags of every message.
const VERSION: u32 = 1;

/// A connection over which anything can be sent.
pub fn connect(socket: &Path) -> UnixStream {
    let stream = UnixStream::connect(socket).expect("the export listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a time limit");
    stream
}

/// A message: its header (request, flags, size of the payload; 32 bits each, in the host's byte order) and
/// the payload.
pub fn message(request: u32, payload: &[u8]) -> Vec<u8> {
    let size = u32::try_from(payload.len()).expect("a payload that fits");
    header(request, VERSION, size).into_iter().chain(payload.iter().copied()).collect()
}

/// A header of whatever contents.
pub fn header(request: u32, flags: u32, size: u32) -> [u8; 12] {
    let mut header = [0; 12];
    header[..4].copy_from_slice(&request.to_ne_bytes());
    header[4..8].copy_from_slice(&flags.to_ne_bytes());
    header[8..].copy_from_slice(&size.to_ne_bytes());
    header
}

/// Asks for the device's features: the sign that a connection is served.
pub fn get_features(stream: &mut UnixStream) -> u64 {
    stream.write_all(&message(GET_FEATURES, &[])).expect("the export listens");
    let mut reply = [0; 20];
    stream.read_exact(&mut reply).expect("an answer to GET_FEATURES");
    u64::from_ne_bytes(reply[12..].try_into().expect("eight bytes"))
}

/// Waits until the back end has closed the connection.
///
/// # Panics
///
/// When it does not.
pub fn assert_closed(mut stream: UnixStream) {
    let mut rest = Vec::new();
    if let Err(error) = stream.read_to_end(&mut rest) {
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}");
    }
}
