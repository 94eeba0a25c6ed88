//! A run: a machine, a daemon, guests, and who tells them of one another.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use crate::coverage::Coverage;
use crate::daemon::{self, Daemon, Disk};
use crate::fds::{Fds, Kept};
use crate::guest::{self, Guest};
use crate::listener::Socket;
use crate::machine::{ActorId, FOREVER, Machine, Step};
use crate::random::Random;

/// Everything there is.
pub(crate) struct World {
    pub(crate) seed: u64,
    pub(crate) machine: Machine,
    pub(crate) coverage: Coverage,
    pub(crate) fds: Rc<Fds>,
    sockets: Vec<Rc<Socket>>,
    daemon: RefCell<Option<Daemon>>,
    guests: RefCell<Vec<Rc<Guest>>>,
    /// Addresses of mappings that are not the daemon's.
    mappings: RefCell<BTreeSet<usize>>,
    failed: Cell<bool>,
}

/// What a run came to.
#[derive(Debug, Clone, Default)]
pub(crate) struct Outcome {
    pub(crate) trace: u64,
    pub(crate) virtual_ns: u64,
    pub(crate) steps: u64,
    pub(crate) counted: Vec<(&'static str, u64)>,
}

/// What all of a seed's run is made of.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) daemon: daemon::Plan,
    pub(crate) guests: Vec<guest::Plan>,
    pub(crate) requests: u64,
}

/// Does a seed's run.
pub(crate) fn run(seed: u64, plan: &Plan, verbose: bool) -> Outcome {
    let machine = Machine::new(seed, verbose);
    let fds = Rc::new(Fds::default());
    let sockets: Vec<_> =
        (0..plan.guests.len()).map(|number| Rc::new(Socket::new(&fds, number))).collect();
    let images: Vec<_> = plan.guests.iter().map(|guest| image(&fds, guest.sectors)).collect();
    let world = Rc::new(World {
        seed,
        machine,
        coverage: Coverage::default(),
        fds,
        sockets,
        daemon: RefCell::default(),
        guests: RefCell::default(),
        mappings: RefCell::default(),
        failed: Cell::new(false),
    });
    let disks: Vec<_> = (plan.guests.iter().zip(&images).zip(&world.sockets))
        .map(|((guest, image), socket)| Disk {
            image: image.clone(),
            socket: socket.clone(),
            queues: guest.queues,
            discard: plan.daemon.discard,
        })
        .collect();
    world.daemon.replace(Some(Daemon::start(&world.machine, &plan.daemon, &disks)));
    let each = plan.requests / plan.guests.len() as u64;
    for (number, guest) in plan.guests.iter().enumerate() {
        let guest = Guest::new(&world, number, guest.clone(), each);
        guest.start();
        world.guests.borrow_mut().push(guest);
    }
    world.go_on_until("all guests are done", || world.guests.borrow().iter().all(|g| g.is_done()));
    let stopped = world.with_daemon(|daemon| daemon.begin_stop());
    world.go_on_until("the exports end", || stopped.try_recv().is_ok());
    world.with_daemon(|daemon| daemon.stop_loops());
    world.go_on_until("the loops end", || world.with_daemon(|daemon| daemon.has_ended()));
    for (number, (guest, image)) in world.guests.borrow().iter().zip(&images).enumerate() {
        let mut bytes = vec![0; plan.guests[number].sectors as usize * crate::model::SECTOR];
        nix::sys::uio::pread(&***image, &mut bytes, 0).expect("the image");
        if let Err(wrong) = guest.check_disk(&bytes) {
            world.fail(&format!("guest {number}, its disk in the end: {wrong}"));
        }
    }
    world.guests.borrow_mut().clear();
    Outcome {
        trace: world.machine.trace(),
        virtual_ns: world.machine.now_ns(),
        steps: world.machine.steps(),
        counted: world.coverage.all(),
    }
}

fn image(fds: &Rc<Fds>, sectors: u32) -> Rc<Kept> {
    use nix::sys::memfd::{MFdFlags, memfd_create};
    let file = memfd_create(c"sim-disk", MFdFlags::MFD_CLOEXEC).expect("a memfd");
    nix::unistd::ftruncate(&file, i64::from(sectors) * 512).expect("memory");
    Kept::new(fds, file)
}

impl World {
    pub(crate) fn random(&self) -> &Random {
        self.machine.random()
    }

    fn with_daemon<T>(&self, body: impl FnOnce(&mut Daemon) -> T) -> T {
        body(self.daemon.borrow_mut().as_mut().expect("a daemon"))
    }

    /// A queue was kicked.
    pub(crate) fn poke_queue(&self, _guest: usize, queue: u16) {
        if let Some(daemon) = &*self.daemon.borrow() {
            daemon.loop_of(queue).poke(&self.machine);
        }
    }

    /// Something has come to a socket.
    pub(crate) fn poke_control(&self) {
        if let Some(daemon) = &*self.daemon.borrow() {
            daemon.loops[0].poke(&self.machine);
        }
    }

    pub(crate) fn listener(&self, guest: usize) -> &Socket {
        &self.sockets[guest]
    }

    pub(crate) fn keep_mapping(&self, addr: usize) {
        self.mappings.borrow_mut().insert(addr);
    }

    pub(crate) fn is_there(&self, actor: Option<ActorId>) -> bool {
        actor.is_some_and(|actor| self.machine.is_there(actor))
    }

    /// Whether an operation has failed for good so far.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed.get()
    }

    fn go_on_until(&self, what: &str, condition: impl Fn() -> bool) {
        // What was asked of the loops between steps.
        self.after_step();
        while !condition() {
            match self.machine.step() {
                Step::Ran(_) => self.after_step(),
                Step::Idle(FOREVER) => {
                    let actors = self.machine.actors();
                    self.fail(&format!("nobody will ever go on, and not yet {what}:\n{actors}"));
                }
                Step::Idle(next) => self.machine.advance_to(next),
            }
        }
    }

    fn after_step(&self) {
        if let Some(daemon) = &*self.daemon.borrow() {
            for l in &daemon.loops {
                if l.was_woken() {
                    l.poke(&self.machine);
                }
            }
        }
        for guest in &*self.guests.borrow() {
            guest.queues.iter().for_each(|queue| queue.look_at_call());
        }
    }

    /// It is wrong: says what, and how to see it again.
    pub(crate) fn fail(&self, what: &str) -> ! {
        let (seed, steps, now) = (self.seed, self.machine.steps(), self.machine.now_ns());
        panic!("seed {seed}, step {steps}, at {now} ns: {what}\nto see it again: --seed {seed}");
    }
}
