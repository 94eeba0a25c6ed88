//! A guest: a disk, queues, and the VMM around them.

mod blk;
mod life;
mod plan;
mod queue;
mod request;
mod scsi;
mod vmm;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use guest_memory::{GuestMemory, MemoryView, Region};
use nix::sys::memfd::{MFdFlags, memfd_create};

pub(crate) use self::plan::{Device, Plan};
use self::queue::{Queue, Shared};
use crate::fds::Kept;
use crate::model::Model;
use crate::world::World;

/// A guest.
pub(crate) struct Guest {
    shared: Rc<Shared>,
    pub(crate) queues: Vec<Rc<Queue>>,
    memory: Rc<Kept>,
    memory_len: u64,
    /// Where the daemon keeps what it has in flight, once it has made it: as it described it.
    inflight: RefCell<Option<(Vec<u8>, Rc<Kept>)>>,
    /// How many daemons had been killed when it last looked, and how many of those by power cuts.
    kills: Cell<u64>,
    cuts: Cell<u64>,
    done: Cell<bool>,
}

/// Where the guest's memory is in the VMM: what SET_VRING_ADDR gives addresses of.
const USER_BASE: u64 = 0x7000_0000_0000;

impl Guest {
    pub(crate) fn new(world: &Rc<World>, guest: usize, plan: Plan, requests: u64) -> Rc<Self> {
        let memory_len = queue::memory_len(plan.queues, plan.depth).next_multiple_of(0x1000);
        let file = memfd_create(c"sim-guest", MFdFlags::MFD_CLOEXEC).expect("a memfd");
        nix::unistd::ftruncate(&file, memory_len.cast_signed()).expect("memory");
        let memory = Kept::new(&world.fds, file);
        let region = Region {
            guest_addr: 0,
            size: memory_len,
            user_addr: USER_BASE,
            mmap_offset: 0,
            fd: memory.try_clone().expect("a descriptor"),
        };
        let mapped = Arc::new(region.map().expect("memory"));
        world.keep_mapping(mapped.host().as_ptr().addr());
        world.fds.keep(std::os::fd::AsRawFd::as_raw_fd(mapped.file()));
        let view = MemoryView::new(Arc::new(GuestMemory::from_regions([mapped]).expect("memory")));
        let shared = Rc::new(Shared {
            world: world.clone(),
            guest,
            view,
            model: RefCell::new(Model::new(plan.sectors, world.is_volatile(guest))),
            left: Cell::new(requests),
            bytes: RefCell::default(),
            undisturbed_ns: Cell::new(0),
            write_through: Cell::new(false),
            plan,
        });
        let queues = (0..shared.plan.queues).map(|i| Queue::new(shared.clone(), i)).collect();
        Rc::new(Guest {
            shared,
            queues,
            memory,
            memory_len,
            inflight: RefCell::default(),
            kills: Cell::new(0),
            cuts: Cell::new(0),
            done: Cell::new(false),
        })
    }

    /// Puts its actors to work.
    pub(crate) fn start(self: &Rc<Self>) {
        let (machine, guest) = (&self.shared.world.machine, self.shared.guest);
        for queue in &self.queues {
            let (me, name) = (queue.clone(), format!("guest {guest}, queue {}", queue.index));
            queue.actor.set(Some(machine.spawn(name, move || me.run())));
        }
        let me = self.clone();
        machine.spawn(format!("guest {guest}, VMM"), move || me.run());
    }

    /// Whether it has had all its answers and has gone.
    pub(crate) fn is_done(&self) -> bool {
        self.done.get()
    }

    /// Sectors of its disk, as far as it knows.
    pub(crate) fn sectors(&self) -> u32 {
        self.shared.model.borrow().sectors()
    }

    /// It is told that there are more.
    pub(crate) fn grow(&self, sectors: u32) {
        self.shared.model.borrow_mut().grow(sectors);
    }

    /// Requests offered and not answered.
    pub(crate) fn in_flight(&self) -> u64 {
        self.queues.iter().map(|queue| u64::from(queue.in_flight.get())).sum()
    }

    /// Whether its disk may hold this.
    pub(crate) fn check_disk(&self, bytes: &[u8]) -> Result<(), String> {
        let model = self.shared.model.borrow();
        let sectors = bytes.chunks_exact(crate::model::SECTOR);
        let mut sectors = (0..model.sectors()).zip(sectors);
        let checked = sectors.try_for_each(|(sector, bytes)| model.check(sector, bytes));
        checked.map_err(|wrong| wrong.to_string())
    }

    /// What was not flushed may be lost, and this is what is left of its disk. `anew`: it dies of that,
    /// too, and begins anew.
    pub(crate) fn lose(&self, bytes: &[u8], anew: bool) -> Result<(), String> {
        // What it was answered before it was.
        match anew {
            true => self.forget_all(),
            false => self.queues.iter().for_each(|queue| queue.reap()),
        }
        self.shared.model.borrow_mut().lose(bytes, anew)
    }

    fn world(&self) -> &Rc<World> {
        &self.shared.world
    }
}
