//! The daemon is killed with SIGKILL, again and again, while a guest writes and reads back with checksums. What was
//! in flight is done by the next daemon: the guest waits, sees no error, and finds each block as it wrote it.
//!
//! `RINGMILL_KILLS` says how often; 20 times when it is not set.

mod common;

use std::cell::Cell;
use std::time::Duration;

use common::replaced::{Device, survives, times};
use integration::{Guest, pattern};

fn survives_kills(queues: u32, kills: usize) {
    let guest = Guest::new().chardev_options("reconnect-ms=10");
    survives(guest, Device::Blk, queues, kills, |server, start| {
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

/// Until the new process has taken over, a debug build on busy processors.
const UPGRADE: Duration = Duration::from_millis(250);

#[test]
fn the_daemon_is_killed_while_it_gives_place_to_another_process() {
    let guest = Guest::new().chardev_options("reconnect-ms=10");
    let state = Cell::new(6);
    let random = || {
        let mut next = state.get();
        let number = pattern::splitmix64(&mut next);
        state.set(next);
        number
    };
    let kills = times("RINGMILL_KILLS").div_ceil(4);
    survives(guest, Device::Blk, 2, kills, |server, start| {
        let after = UPGRADE * u32::try_from(random() % 1024).expect("32 bits") / 1024;
        let successor = server.kill_in_upgrade(after);
        println!("{after:?}: {}", successor.is_some());
        match successor {
            // It goes on serving, or goes the same way.
            Some(successor) if random() % 2 == 0 => successor,
            Some(successor) => {
                successor.kill();
                start()
            }
            None => start(),
        }
    });
}
