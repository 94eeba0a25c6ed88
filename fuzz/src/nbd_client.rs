//! A hostile NBD server before the nbd driver: what it says in the handshake, and its replies.
//!
//! The first byte says which. Each request is answered once, nothing outside its memory is written, and
//! what a server says of an export is believed only if it makes sense (`block`'s own properties).

use event_loop::EventLoop;

use crate::world;

thread_local! {
    static LOOP: EventLoop = world::quiet_loop();
}

/// Plays the server.
pub fn run(data: &[u8]) {
    match data.split_first() {
        Some((first, rest)) if first & 3 == 0 => {
            LOOP.with(|event_loop| block::fuzzing::nbd_handshake(event_loop, rest));
        }
        Some((_, rest)) => block::fuzzing::nbd_transmission(rest),
        None => {}
    }
}
