//! The daemon is killed with SIGKILL repeatedly, while a guest writes and reads back with checksums. The next daemon
//! completes the requests in flight. The guest waits, sees no error, and finds each block as written.
//!
//! `RINGMILL_KILLS` sets the number of kills, 20 by default. `RINGMILL_SEED` determines their instants; a failing test
//! prints its seed.

use crate::common;

use std::time::Duration;

use common::replaced::{Device, Format, Random, survives, times};
use integration::Guest;

/// A quarter of all kills.
fn survives_kills(device: Device, format: Format, queues: u32) {
    let guest = Guest::new().chardev_options("reconnect-ms=10");
    let kills = times("RINGMILL_KILLS").div_ceil(4);
    survives(guest, (device, format), queues, kills, &Random::new(), |server, start| {
        server.kill();
        start()
    });
}

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn the_daemon_is_killed_under_load_on_one_queue() {
    survives_kills(Device::Blk, Format::Raw, 1);
}

#[test]
fn the_daemon_is_killed_under_load_on_four_queues() {
    survives_kills(Device::Blk, Format::Reordered, 4);
}

#[test]
fn the_daemon_is_killed_under_a_scsi_disk() {
    survives_kills(Device::Scsi, Format::Reordered, 2);
}

#[test]
fn the_daemon_is_killed_under_a_growing_qcow2_image() {
    survives_kills(Device::Blk, Format::Qcow2, 2);
}

/// The time that a debug build on busy processors may take to take over.
const UPGRADE: Duration = Duration::from_millis(250);

#[test]
fn the_daemon_is_killed_during_an_upgrade() {
    let guest = Guest::new().chardev_options("reconnect-ms=10");
    let random = Random::new();
    let kills = times("RINGMILL_KILLS").div_ceil(4);
    let disk = (Device::Blk, Format::Raw);
    survives(guest, disk, 2, kills, &random, |server, start| {
        let after = UPGRADE * u32::try_from(random.below(1024)).expect("32 bits") / 1024;
        let successor = server.kill_in_upgrade(after);
        println!("{after:?}: {}", successor.is_some());
        match successor {
            // Half of the successors are kept, the others are killed too.
            Some(successor) if random.below(2) == 0 => successor,
            Some(successor) => {
                successor.kill();
                start()
            }
            None => start(),
        }
    });
}
