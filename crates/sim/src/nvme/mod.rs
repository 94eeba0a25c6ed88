//! A guest with its disk on an NVMe controller: an export over vfio-user.
//!
//! A kill of the daemon is visible to such a guest: the VMM connects again, and the guest restarts the controller.

mod admin;
mod command;
mod life;
mod memory;
mod plan;
mod queue;
mod rings;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use self::admin::Admin;
pub(crate) use self::plan::Plan;
use self::queue::{Queue, Shared};
use crate::model::Model;
use crate::user::{PATIENCE_NS, User};
use crate::world::World;

/// A guest.
pub(crate) struct NvmeGuest {
    shared: Rc<Shared>,
    queues: Vec<Rc<Queue>>,
    admin: Admin,
    /// The controller is enabled, and its queues exist.
    is_up: Cell<bool>,
    /// When the disk last grew.
    grown_ns: Cell<u64>,
    done: Cell<bool>,
}

impl NvmeGuest {
    pub(crate) fn new(world: &Rc<World>, disk: usize, plan: Plan, requests: u64) -> Rc<Self> {
        let shared = Shared::new(world, disk, plan, requests);
        let queues = (1..=shared.plan.queues).map(|qid| Queue::new(&shared, qid)).collect();
        Rc::new(NvmeGuest {
            queues,
            admin: Admin::new(&shared),
            shared,
            is_up: Cell::new(false),
            grown_ns: Cell::new(0),
            done: Cell::new(false),
        })
    }
}

impl User for NvmeGuest {
    fn start(self: Rc<Self>) {
        let (machine, disk) = (self.shared.world.machine.clone(), self.shared.disk);
        for queue in &self.queues {
            let me = queue.clone();
            let name = format!("NVMe guest of disk {disk}, queue {}", queue.qid);
            queue.actor.set(Some(machine.spawn(name, move || me.run())));
        }
        let me = self.clone();
        let vmm = machine.spawn(format!("NVMe guest of disk {disk}, VMM"), move || me.run());
        self.admin.actor.set(Some(vmm));
    }

    fn is_done(&self) -> bool {
        self.done.get()
    }

    fn model(&self) -> &RefCell<Model> {
        &self.shared.model
    }

    fn grow(&self, sectors: u32) {
        self.grown_ns.set(self.shared.world.machine.now_ns());
        self.shared.model.borrow_mut().grow(sectors);
    }

    fn in_flight(&self) -> u64 {
        self.queues.iter().map(|queue| queue.in_flight()).sum()
    }

    fn check_disk(&self, bytes: &[u8]) -> Result<(), String> {
        self.shared.model.borrow().check_disk(bytes)
    }

    fn lose(&self, bytes: &[u8], anew: bool) -> Result<(), String> {
        // First takes the answers from before the loss.
        if anew {
            self.forget_all();
        }
        self.shared.model.borrow_mut().lose(bytes, anew)
    }

    fn look(&self, _sockets: bool) {
        self.admin.look();
        self.queues.iter().for_each(|queue| queue.look());
    }

    fn waits(&self) -> bool {
        let mut queues = self.queues.iter();
        self.is_up.get() && self.shared.link.is_alive() && queues.any(|queue| queue.waits())
    }

    fn check_patience(&self) {
        let Self { shared, queues, grown_ns, .. } = self;
        if !self.is_up.get() {
            return;
        }
        queues.iter().for_each(|queue| queue.check_patience());
        let since = shared.link.undisturbed_ns().max(grown_ns.get());
        let took = shared.world.machine.now_ns().saturating_sub(since);
        if shared.sectors.get() < shared.model.borrow().sectors() && took > PATIENCE_NS {
            shared.fail("no notice of the new size has come");
        }
    }
}
