//! A guest: a disk, queues, and the VMM around them.

mod queue;
mod request;
mod vmm;

use std::cell::{Cell, RefCell};
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

use exports::vhost_user::session::{
    VHOST_USER_F_PROTOCOL_FEATURES, VIRTIO_F_RING_EVENT_IDX, VIRTIO_F_RING_INDIRECT_DESC,
    protocol_features,
};
use exports::vhost_user::wire::Request;
use guest_memory::{GuestMemory, MemoryView, Region};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};

use self::queue::{Queue, Shared};
use self::vmm::{Connection, Gone};
use crate::fds::Kept;
use crate::model::{Model, Wrong};
use crate::random::Random;
use crate::world::World;

/// What a guest is like.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) queues: u16,
    pub(crate) queue_size: u16,
    /// Requests of a queue at the same time, at most.
    pub(crate) depth: u16,
    /// Requests offered at once, at most.
    pub(crate) batch: u16,
    pub(crate) event_idx: bool,
    /// A request goes by an indirect table once in so many times; 0 for never.
    pub(crate) indirect: u64,
    /// It kicks for nothing once in so many times.
    pub(crate) spurious_kick: u64,
    /// How long it thinks between batches, at most, nanoseconds.
    pub(crate) think_ns: u64,
    /// Where the rings' indices begin.
    pub(crate) first_index: u16,
    /// Sectors of the disk.
    pub(crate) sectors: u32,
    /// The disk takes discards and write-zeroes.
    pub(crate) ranges: bool,
    /// Operations on the disk fail, now and then.
    pub(crate) may_fail: bool,
    /// How long a request may take, nanoseconds.
    pub(crate) patience_ns: u64,
}

impl Plan {
    pub(crate) fn new(random: &Random) -> Self {
        let queue_size = random.pick(&[4, 16, 64, 128, 256]);
        let depth = random.pick(&[1, 2, 8, 32, 64]).min(queue_size);
        Plan {
            queues: random.pick(&[1, 1, 2, 4]),
            queue_size,
            depth,
            batch: random.pick(&[1, 4, 16, 64]),
            event_idx: !random.one_in(3),
            indirect: random.pick(&[0, 1, 1, 2]),
            spurious_kick: random.pick(&[0, 4, 50]),
            think_ns: random.pick(&[0, 5_000, 100_000]),
            first_index: random.pick(&[0, 0xffff - 100, 0x7ff0]),
            sectors: random.pick(&[64, 1024, 4096]),
            ranges: !random.one_in(4),
            may_fail: false,
            patience_ns: 100_000_000,
        }
    }
}

/// A guest.
pub(crate) struct Guest {
    shared: Rc<Shared>,
    pub(crate) queues: Vec<Rc<Queue>>,
    memory: Rc<Kept>,
    memory_len: u64,
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
        let view = MemoryView::new(Arc::new(GuestMemory::from_regions([mapped]).expect("memory")));
        let shared = Rc::new(Shared {
            world: world.clone(),
            guest,
            view,
            model: RefCell::new(Model::new(plan.sectors)),
            left: Cell::new(requests),
            reading: RefCell::default(),
            plan,
        });
        let queues = (0..shared.plan.queues).map(|i| Queue::new(shared.clone(), i)).collect();
        Rc::new(Guest { shared, queues, memory, memory_len, done: Cell::new(false) })
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

    /// Whether its disk may hold this.
    pub(crate) fn check_disk(&self, bytes: &[u8]) -> Result<(), Wrong> {
        let model = self.shared.model.borrow();
        let sectors = bytes.chunks_exact(crate::model::SECTOR);
        (0..).zip(sectors).try_for_each(|(sector, bytes)| model.check(sector, bytes))
    }

    fn world(&self) -> &Rc<World> {
        &self.shared.world
    }

    /// What the VMM does.
    fn run(&self) {
        let world = self.world();
        loop {
            if let Ok(()) = self.life() {
                break;
            }
            // The daemon has gone.
            world.machine.sleep(10_000);
        }
        self.done.set(true);
    }

    /// One connection.
    fn life(&self) -> Result<(), Gone> {
        let world = self.world();
        let mut connection = Connection::new(world, self.shared.guest);
        world.coverage.connections.one();
        world.machine.say(|| format!("guest {} connects", self.shared.guest));
        self.negotiate(&mut connection)?;
        self.set_memory(&connection)?;
        for queue in &self.queues {
            self.start_queue(&connection, queue)?;
        }
        while self.queues.iter().any(|queue| world.is_there(queue.actor.get())) {
            world.machine.sleep(100_000);
        }
        for queue in &self.queues {
            connection.ask(Request::GetVringBase, &u32s(&[queue.index.into(), 0]))?;
        }
        Ok(())
    }

    fn negotiate(&self, connection: &mut Connection) -> Result<(), Gone> {
        let offered = connection.ask_number(Request::GetFeatures)?;
        let mut features = offered;
        if !self.shared.plan.event_idx {
            features &= !VIRTIO_F_RING_EVENT_IDX;
        }
        if self.shared.plan.indirect == 0 {
            features &= !VIRTIO_F_RING_INDIRECT_DESC;
        }
        assert!(features & VHOST_USER_F_PROTOCOL_FEATURES != 0);
        let protocol = connection.ask_number(Request::GetProtocolFeatures)?;
        connection.tell(Request::SetProtocolFeatures, &protocol.to_ne_bytes(), &[])?;
        if protocol & protocol_features::REPLY_ACK != 0 {
            connection.has_reply_ack();
        }
        connection.tell(Request::SetOwner, &[], &[])?;
        connection.tell(Request::SetFeatures, &features.to_ne_bytes(), &[])
    }

    fn set_memory(&self, connection: &Connection) -> Result<(), Gone> {
        let mut payload = u32s(&[1, 0]);
        payload.extend(u64s(&[0, self.memory_len, USER_BASE, 0]));
        connection.tell(Request::SetMemTable, &payload, &[self.memory.as_raw_fd()])
    }

    fn start_queue(&self, connection: &Connection, queue: &Queue) -> Result<(), Gone> {
        let config = queue.driver.borrow().config();
        let index = u32::from(queue.index);
        let fds = &self.world().fds;
        let new = || -> OwnedFd {
            let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
            EventFd::from_flags(flags).expect("an eventfd").into()
        };
        let (kick, call) = (Kept::new(fds, new()), Kept::new(fds, new()));
        let base = self.base(queue);
        connection.tell(Request::SetVringNum, &u32s(&[index, config.size.into()]), &[])?;
        connection.tell(Request::SetVringBase, &u32s(&[index, base.into()]), &[])?;
        let mut addr = u32s(&[index, 0]);
        addr.extend(u64s(&[config.desc, config.used, config.avail, 0]));
        connection.tell(Request::SetVringAddr, &addr, &[])?;
        let number = u64s(&[index.into()]);
        connection.tell(Request::SetVringCall, &number, &[call.as_raw_fd()])?;
        queue.call.replace(Some(call));
        connection.tell(Request::SetVringKick, &number, &[kick.as_raw_fd()])?;
        queue.kick.replace(Some(kick));
        connection.tell(Request::SetVringEnable, &u32s(&[index, 1]), &[])?;
        queue.paused.set(false);
        queue.wake();
        Ok(())
    }

    /// Where the device goes on in a queue's available ring.
    fn base(&self, queue: &Queue) -> u16 {
        queue.driver.borrow().config().next_avail
    }
}

fn u32s(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

fn u64s(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}
