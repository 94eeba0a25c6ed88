//! What an operator does to a daemon that runs: other limits, larger disks.

use std::cell::Cell;
use std::rc::Rc;

use block::throttle::{Limit, ThrottleLimits};

use crate::model::SECTOR;
use crate::random::Random;
use crate::world::World;

/// Limits under which guests get on, or none.
pub(crate) fn limits(random: &Random) -> ThrottleLimits {
    let average = random.pick(&[0, 50_000, 200_000, 1_000_000]);
    let iops_total = Limit { average, ..Limit::default() };
    match random.one_in(2) {
        true => ThrottleLimits { iops_total, ..ThrottleLimits::default() },
        false => ThrottleLimits {
            bps_total: Limit { average: average * 2048, ..Limit::default() },
            ..ThrottleLimits::default()
        },
    }
}

/// The operator's life.
pub(crate) fn run(world: &World) {
    let (machine, random) = (&world.machine, world.random());
    while !world.is_over() {
        machine.sleep(random.between(100_000, 3_000_000));
        if world.is_over() {
            return;
        }
        if random.one_in(2) {
            if world.set_limits(limits(random)) {
                world.coverage.limits.one();
                machine.say(|| "the limits change".into());
            }
        } else if random.one_in(4) {
            grow(world);
        }
    }
}

/// Makes a disk larger, and tells its guest once that is done.
fn grow(world: &World) {
    let disk = world.random().below(world.disks() as u64) as usize;
    let sectors = world.sectors(disk) + 8;
    let done = Rc::new(Cell::new(None));
    if !world.resize(disk, u64::from(sectors) * SECTOR as u64, done.clone()) {
        return;
    }
    let kills = world.kills();
    while done.get().is_none() && world.kills() == kills && !world.is_over() {
        world.machine.sleep(5_000);
    }
    if done.get() == Some(false) && !world.has_failed() {
        world.fail("a disk does not grow, and no operation has failed");
    }
    if done.get() == Some(true) && world.kills() == kills {
        world.coverage.resizes.one();
        world.machine.say(|| format!("disk {disk} has {sectors} sectors"));
        world.grow(disk, sectors);
    }
}
