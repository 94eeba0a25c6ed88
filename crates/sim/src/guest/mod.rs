//! A guest: a disk, queues, and the VMM around them.

mod blk;
mod life;
mod plan;
mod queue;
mod request;
mod scsi;
mod tasks;
mod vmm;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use guest_memory::{GuestMemory, MemoryView, Region};
use nix::sys::memfd::{MFdFlags, memfd_create};

use self::life::Disturbance;
pub(crate) use self::plan::{Device, Plan};
use self::queue::{Queue, Shared};
use crate::fds::Kept;
use crate::model::Model;
use crate::user::User;
use crate::world::World;

/// A guest.
pub(crate) struct Guest {
    shared: Rc<Shared>,
    queues: Vec<Rc<Queue>>,
    /// The control queue of virtio-scsi, if the guest uses task management.
    control: Option<Rc<Queue>>,
    memory: Rc<Kept>,
    memory_len: u64,
    /// The daemon's record of requests in flight, with its description. `None` until the daemon has created it.
    inflight: RefCell<Option<(Vec<u8>, Rc<Kept>)>>,
    /// Killed daemons when the guest last looked, and those killed by power cuts.
    kills: Cell<u64>,
    cuts: Cell<u64>,
    /// Losses at the time of the connection.
    connected: Cell<u64>,
    /// The VMM has closed its connection itself.
    vanished: Cell<bool>,
    done: Cell<bool>,
}

/// The address of the guest's memory in the VMM. Addresses in SET_VRING_ADDR refer to it.
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
            write_through: Cell::new(None),
            managing: Cell::new(false),
            plan,
        });
        let queues = (0..shared.plan.queues).map(|i| Queue::new(shared.clone(), i)).collect();
        let manages = shared.plan.disturbances.contains(&Disturbance::Tasks);
        let control = manages.then(|| Queue::control(shared.clone()));
        Rc::new(Guest {
            shared,
            queues,
            control,
            memory,
            memory_len,
            inflight: RefCell::default(),
            kills: Cell::new(0),
            cuts: Cell::new(0),
            connected: Cell::new(0),
            vanished: Cell::new(false),
            done: Cell::new(false),
        })
    }

    fn world(&self) -> &Rc<World> {
        &self.shared.world
    }
}

impl User for Guest {
    fn start(self: Rc<Self>) {
        let (machine, guest) = (self.shared.world.machine.clone(), self.shared.guest);
        for queue in &self.queues {
            let (me, name) = (queue.clone(), format!("guest {guest}, queue {}", queue.index));
            queue.actor.set(Some(machine.spawn(name, move || me.run())));
        }
        machine.spawn(format!("guest {guest}, VMM"), move || self.run());
    }

    fn is_done(&self) -> bool {
        self.done.get()
    }

    fn model(&self) -> &RefCell<Model> {
        &self.shared.model
    }

    fn in_flight(&self) -> u64 {
        self.queues.iter().map(|queue| u64::from(queue.in_flight.get())).sum()
    }

    fn check_disk(&self, bytes: &[u8]) -> Result<(), String> {
        self.shared.model.borrow().check_disk(bytes)
    }

    fn lose(&self, bytes: &[u8], anew: bool) -> Result<(), String> {
        // First takes the answers from before the loss.
        match anew {
            true => self.forget_all(),
            false => self.queues.iter().for_each(|queue| queue.look()),
        }
        self.shared.model.borrow_mut().lose(bytes, anew)
    }

    fn look(&self, _sockets: bool) {
        self.queues.iter().for_each(|queue| queue.look_at_call());
    }

    fn unseen_kicks(&self, ran: &dyn Fn(u16) -> u64) -> u64 {
        let unseen = |queue: &&Rc<Queue>| queue.was_kicked_since(ran(queue.index));
        self.queues.iter().filter(unseen).count() as u64
    }

    fn check_patience(&self) {
        self.queues.iter().for_each(|queue| queue.check_patience());
    }
}
