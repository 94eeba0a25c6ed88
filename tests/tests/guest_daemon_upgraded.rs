//! The daemon is upgraded repeatedly, while a guest writes and reads back with checksums. The guest sees no error, and
//! finds each block as written.
//!
//! `RINGMILL_UPGRADES` sets the number of upgrades, 20 by default. `RINGMILL_SEED` determines their instants.

use crate::common;

use common::replaced::{Device, Format, Random, survives, times};
use integration::Guest;

fn survives_upgrades(device: Device, queues: u32, upgrades: usize) {
    let disk = (device, Format::Raw);
    survives(Guest::new(), disk, queues, upgrades, &Random::new(), |mut server, _| {
        server.upgrade();
        server
    });
}

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn the_daemon_is_upgraded_under_load_on_one_queue() {
    survives_upgrades(Device::Blk, 1, times("RINGMILL_UPGRADES") / 2);
}

#[test]
fn the_daemon_is_upgraded_under_load_on_four_queues() {
    survives_upgrades(Device::Blk, 4, times("RINGMILL_UPGRADES").div_ceil(2));
}

#[test]
fn the_daemon_is_upgraded_under_a_scsi_disk() {
    survives_upgrades(Device::Scsi, 2, times("RINGMILL_UPGRADES").div_ceil(4));
}
