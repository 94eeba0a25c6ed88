//! Ways into private parts, for fuzz targets.

use event_loop::EventLoop;

/// Plays a server of NBD in the transmission phase.
///
/// The first byte says which replies were agreed on. Then come steps, of the node's users and of the
/// server.
pub fn nbd_transmission(data: &[u8]) {
    crate::drivers::nbd::hostile::play(data);
}

/// Plays a server of NBD that sends these bytes to a client, and leaves.
pub fn nbd_handshake(event_loop: &EventLoop, bytes: &[u8]) {
    crate::drivers::nbd::hostile::shake_hands(event_loop, bytes);
}
