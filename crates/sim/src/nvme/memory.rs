//! The guest's memory: queues and doorbells at 0, and a slot with lists and data for each command.

use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;

use guest_memory::{GuestMemory, MappedRegion, MemoryView, Region};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::fds::Kept;
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

/// Where the slots begin in their file.
const OFFSET: u64 = PAGE;

/// The memory, which the VMM shares with the export.
pub(super) struct Memory {
    pub(super) view: Rc<MemoryView>,
    pub(super) queues: Part,
    /// The slots.
    pub(super) data: Part,
}

/// A region of the memory. Each has another file: the system would show adjacent mappings of one file as one.
pub(super) struct Part {
    pub(super) file: Rc<Kept>,
    pub(super) offset: u64,
    pub(super) address: u64,
    pub(super) len: u64,
}

impl Part {
    fn new(world: &World, address: u64, len: u64, offset: u64) -> Self {
        let file = memfd_create(c"sim-guest-nvme", MFdFlags::MFD_CLOEXEC).expect("a memfd");
        nix::unistd::ftruncate(&file, (offset + len).cast_signed()).expect("memory");
        Part { file: Kept::new(&world.fds, file), offset, address, len }
    }

    /// Maps it for the guest.
    fn map(&self, world: &World) -> Arc<MappedRegion> {
        let Part { offset: mmap_offset, address: guest_addr, len: size, .. } = *self;
        let fd = self.file.try_clone().expect("a descriptor");
        let region = Region { guest_addr, size, user_addr: guest_addr, mmap_offset, fd };
        let mapped = Arc::new(region.map().expect("memory"));
        world.keep_mapping(mapped.host().as_ptr().addr());
        world.fds.keep(mapped.file().as_raw_fd());
        mapped
    }
}

impl Memory {
    pub(super) fn new(world: &World, queues: u16, depth: u16) -> Self {
        let slots = u64::from(queues) * u64::from(depth);
        let queues = Part::new(world, 0, QUEUES + u64::from(queues) * PAIR, 0);
        let data = Part::new(world, DATA, slots * SLOT_PAGES * PAGE, OFFSET);
        let regions = [queues.map(world), data.map(world)];
        let memory = GuestMemory::from_regions(regions).expect("memory");
        Memory { view: MemoryView::new(Arc::new(memory)), queues, data }
    }
}
