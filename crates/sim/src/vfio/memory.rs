//! A guest's memory in two parts: what driver and device share from address 0 on, and the data.

use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;

use guest_memory::{GuestMemory, MappedRegion, MemoryView, Region};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::fds::Kept;
use crate::world::World;

/// Where the data begins in its file, bytes.
const OFFSET: u64 = 4096;

/// The memory, which the VMM shares with the export.
pub(crate) struct Memory {
    pub(crate) view: Rc<MemoryView>,
    /// Queues and tables.
    pub(crate) tables: Part,
    pub(crate) data: Part,
}

impl Memory {
    /// Tables of so many bytes, and data at an address, of so many bytes.
    pub(crate) fn new(world: &World, tables: u64, (address, len): (u64, u64)) -> Self {
        let (tables, data) =
            (Part::new(world, 0, tables, 0), Part::new(world, address, len, OFFSET));
        let memory = GuestMemory::from_regions([tables.map(world), data.map(world)]);
        Memory { view: MemoryView::new(Arc::new(memory.expect("memory"))), tables, data }
    }
}

/// A region of the memory. Each has another file: the system would show adjacent mappings of one file as one.
pub(crate) struct Part {
    pub(super) file: Rc<Kept>,
    pub(super) offset: u64,
    pub(super) address: u64,
    pub(super) len: u64,
}

impl Part {
    fn new(world: &World, address: u64, len: u64, offset: u64) -> Self {
        let file = memfd_create(c"sim-guest-vfio", MFdFlags::MFD_CLOEXEC).expect("a memfd");
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
