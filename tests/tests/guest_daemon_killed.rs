//! The daemon is killed with SIGKILL, again and again, while a guest writes and reads back with checksums. What was
//! in flight is done by the next daemon: the guest waits, sees no error, and finds each block as it wrote it.
//!
//! `RINGMILL_KILLS` says how often; 20 times when it is not set.

mod common;

use common::replaced::{survives, times};
use integration::Guest;

fn survives_kills(queues: u32, kills: usize) {
    let guest = Guest::new().chardev_options("reconnect-ms=10");
    survives(guest, queues, kills, |server, start| {
        server.kill();
        start()
    });
}

#[test]
fn the_daemon_is_killed_under_load_on_one_queue() {
    survives_kills(1, times("RINGMILL_KILLS") / 2);
}

#[test]
fn the_daemon_is_killed_under_load_on_four_queues() {
    survives_kills(4, times("RINGMILL_KILLS").div_ceil(2));
}
