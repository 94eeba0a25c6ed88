//! The guest's memory: queues and doorbells at 0, and a slot with lists and data for each command.

use crate::vfio::Memory;
use crate::world::World;

pub(super) const PAGE: u64 = 4096;

/// Addresses: the admin queue pair, the data of admin commands, and the pages of Doorbell Buffer Config.
pub(super) const ADMIN: [u64; 2] = [0, PAGE];
pub(super) const ADMIN_DATA: u64 = 2 * PAGE;
pub(super) const SHADOWS: u64 = 3 * PAGE;
pub(super) const EVENTS: u64 = 4 * PAGE;
/// The I/O queues, and the distance of one pair from the next.
const QUEUES: u64 = 8 * PAGE;
const PAIR: u64 = 8 * PAGE;

/// The slots, which are a region of their own.
const DATA: u64 = 1 << 30;
/// Pages of a slot: two for lists, the others for data.
const SLOT_PAGES: u64 = 8;
pub(super) const LIST_PAGES: u64 = 2;
pub(super) const DATA_PAGES: u64 = SLOT_PAGES - LIST_PAGES;

/// Addresses of an I/O queue pair's queues, of up to 256 entries.
pub(super) fn pair(qid: u16) -> [u64; 2] {
    let at = QUEUES + (u64::from(qid) - 1) * PAIR;
    [at, at + 4 * PAGE]
}

/// The first page of a slot.
pub(super) fn slot(number: u16) -> u64 {
    DATA + u64::from(number) * SLOT_PAGES * PAGE
}

/// The memory for so many queue pairs with so many slots each.
pub(super) fn memory(world: &World, queues: u16, depth: u16) -> Memory {
    let slots = u64::from(queues) * u64::from(depth);
    Memory::new(world, QUEUES + u64::from(queues) * PAIR, (DATA, slots * SLOT_PAGES * PAGE))
}
