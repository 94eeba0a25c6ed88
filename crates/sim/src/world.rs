//! A run: the machine, a daemon and its users, and the events between them.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::path::Path;
use std::rc::Rc;

use event_loop::ring::sim::{Happened, Storage, socket_transfers, without_threads};
use vcpu::ahci::Controller;

use crate::ahci::{self, AhciGuest};
use crate::client::{self, Client};
use crate::coverage::Coverage;
use crate::daemon::{self, Daemon, Disk, Loop, Offered, Surroundings};
use crate::fds::Fds;
use crate::guest::{self, Guest};
use crate::image::{Format, Image};
use crate::journals::{Folder, Journals};
use crate::listener::Socket;
use crate::machine::{ActorId, FOREVER, Machine, Step};
use crate::mappings;
use crate::model::{Seen, Ticket};
use crate::operator;
use crate::random::Random;
use crate::user::User;

/// The state of a run.
pub(crate) struct World {
    pub(crate) seed: u64,
    pub(crate) machine: Machine,
    pub(crate) coverage: Coverage,
    pub(crate) fds: Rc<Fds>,
    /// The socket of the NBD server.
    nbd_socket: Rc<Socket>,
    /// The socket of the monitor.
    monitor: Rc<Socket>,
    daemon: RefCell<Option<Daemon>>,
    users: RefCell<Vec<Rc<dyn User>>>,
    /// Addresses of mappings that do not belong to the daemon.
    mappings: RefCell<BTreeSet<usize>>,
    plan: daemon::Plan,
    disks: Vec<Disk>,
    /// By disk, after the operator has changed them.
    images: RefCell<Vec<Image>>,
    /// Files of the operator.
    folder: Folder,
    /// The storage of the images. Cuts of the power act on it.
    storage: Storage,
    journals: Journals,
    /// Images were recovered by a daemon that is not ready yet.
    recovered: Cell<bool>,
    /// The daemon may end.
    quits: Cell<bool>,
    /// The counters of the rings of killed daemons.
    past: RefCell<Happened>,
    kills: Cell<u64>,
    cuts: Cell<u64>,
    /// The daemon was killed since the last check of the users.
    died: Cell<bool>,
    /// Number of socket reads and writes of all loops at that check.
    transfers: Cell<u64>,
    over: Cell<bool>,
    /// Time of the next check for requests in flight for too long.
    look_at_ns: Cell<u64>,
    /// Number of answered requests, and when it last changed.
    answered: Cell<(u64, u64)>,
}

/// Interval of that check, nanoseconds.
const LOOK_NS: u64 = 10_000_000;

/// Maximum time without any answer, nanoseconds.
const STUCK_NS: u64 = 60_000_000_000;

/// The result of a run.
#[derive(Debug, Clone, Default)]
pub(crate) struct Outcome {
    pub(crate) trace: u64,
    pub(crate) virtual_ns: u64,
    pub(crate) steps: u64,
    pub(crate) counted: Vec<(&'static str, u64)>,
}

/// The mixture of a seed's run.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) daemon: daemon::Plan,
    /// Users of the first disks.
    pub(crate) guests: Vec<guest::Plan>,
    /// Users of the next disks.
    pub(crate) clients: Vec<client::Plan>,
    /// Users of the last disks.
    pub(crate) ahci_guests: Vec<ahci::Plan>,
    pub(crate) requests: u64,
    /// How often [`queue::pause`] points switch to other actors: once in this many times.
    pub(crate) pause: u64,
}

/// Runs a seed.
pub(crate) fn run(seed: u64, plan: &Plan, verbose: bool) -> Outcome {
    let machine = Machine::new(seed, verbose);
    machine.pause_in_queues(plan.pause);
    without_threads();
    let fds = Rc::new(Fds::default());
    fds.keep_all();
    let offered: Vec<_> = (plan.guests.iter())
        .map(|&guest::Plan { device, queues, .. }| {
            let socket = Rc::new(Socket::new(&fds));
            Offered::VhostUser { socket, device, queues }
        })
        .chain(plan.clients.iter().map(|_| Offered::Nbd))
        .chain(plan.ahci_guests.iter().map(|_| Offered::Ahci { memory: ahci::memory() }))
        .collect();
    let nbd_socket = Rc::new(Socket::new(&fds));
    let monitor = Rc::new(Socket::new(&fds));
    let images: Vec<_> = (plan.guests.iter().map(|guest| (guest.format, guest.sectors)))
        .chain(plan.clients.iter().map(|client| (client.format, client.sectors)))
        .chain(plan.ahci_guests.iter().map(|guest| (guest.format, guest.sectors)))
        .map(|(format, sectors)| Image::new(&fds, format, sectors))
        .collect();
    let storage = Storage::new();
    if plan.daemon.power_cuts > 0 {
        images.iter().for_each(|image| storage.add(image.fd()).expect("an image"));
        // The descriptors of the storage.
        fds.keep_all();
    }
    let disks: Vec<_> = (images.iter().zip(offered))
        .map(|(image, offered)| Disk {
            image: image.clone(),
            offered,
            discard: plan.daemon.discard,
            throttled: plan.daemon.throttled,
        })
        .collect();
    let world = Rc::new(World {
        seed,
        machine,
        coverage: Coverage::default(),
        fds,
        nbd_socket,
        monitor,
        daemon: RefCell::default(),
        users: RefCell::default(),
        mappings: RefCell::default(),
        plan: plan.daemon.clone(),
        disks,
        images: RefCell::new(images),
        folder: Folder::new(seed),
        storage,
        journals: Journals::new(seed),
        recovered: Cell::new(false),
        quits: Cell::new(false),
        past: RefCell::default(),
        kills: Cell::new(0),
        cuts: Cell::new(0),
        died: Cell::new(false),
        transfers: Cell::new(0),
        over: Cell::new(false),
        look_at_ns: Cell::new(0),
        answered: Cell::new((0, 0)),
    });
    let each = plan.requests / world.disks() as u64;
    for (number, guest) in plan.guests.iter().enumerate() {
        let guest = Guest::new(&world, number, guest.clone(), each);
        world.users.borrow_mut().push(guest);
    }
    for (number, client) in (plan.guests.len()..).zip(&plan.clients) {
        let client = Client::new(&world, number, client.clone(), each);
        world.users.borrow_mut().push(client);
    }
    let first = plan.guests.len() + plan.clients.len();
    for (number, guest) in (first..).zip(&plan.ahci_guests) {
        let Offered::Ahci { memory } = &world.disks[number].offered else { unreachable!() };
        let guest = AhciGuest::new(&world, number, guest.clone(), memory.clone(), each);
        world.users.borrow_mut().push(guest);
    }
    // The mappings of guest memory.
    world.fds.keep_all();
    world.start_daemon();
    world.users.borrow().iter().for_each(|user| user.clone().start());
    let fate = world.clone();
    let fate = world.machine.spawn("fate".into(), move || fate.kill_now_and_then());
    let operated = world.clone();
    let operator = world.machine.spawn("operator".into(), move || operator::run(&operated));
    world.run_until("all are done", || world.users.borrow().iter().all(|user| user.is_done()));
    world.over.set(true);
    [fate, operator].iter().for_each(|actor| world.machine.wake(*actor));
    world.run_until("there is a daemon", || {
        ![fate, operator].iter().any(|actor| world.machine.is_there(*actor))
    });
    let flushed = world.quit();
    world.check_nothing_is_left();
    if !flushed && !world.has_failed() {
        world.fail("not all could be flushed, and no operation has failed");
    }
    for (number, (user, image)) in
        world.users.borrow().iter().zip(&*world.images.borrow()).enumerate()
    {
        let checked = match flushed {
            false if image.keeps_back() => {
                image.contents().and_then(|bytes| user.lose(&bytes, false))
            }
            _ => image.contents().and_then(|bytes| user.check_disk(&bytes)),
        };
        if let Err(wrong) = checked {
            world.fail(&format!("disk {number}, in the end: {wrong}"));
        }
    }
    world.users.borrow_mut().clear();
    let happened = world.happened();
    let mut counted = world.coverage.all();
    counted.extend(happened.all());
    Outcome {
        trace: world.machine.trace(),
        virtual_ns: world.machine.now_ns(),
        steps: world.machine.steps(),
        counted,
    }
}

impl World {
    pub(crate) fn random(&self) -> &Random {
        self.machine.random()
    }

    fn with_daemon<T>(&self, body: impl FnOnce(&Daemon) -> T) -> T {
        body(self.daemon.borrow().as_ref().expect("a daemon"))
    }

    /// Wakes the loop of a kicked queue.
    pub(crate) fn poke_queue(&self, _guest: usize, queue: u16) {
        if let Some(l) = self.daemon.borrow().as_ref().and_then(|daemon| daemon.loop_of(queue)) {
            l.poke(&self.machine);
        }
    }

    pub(crate) fn has_daemon(&self) -> bool {
        self.daemon.borrow().is_some()
    }

    /// Wakes the control loop, as its socket has input.
    pub(crate) fn poke_control(&self) {
        if let Some(daemon) = &*self.daemon.borrow() {
            daemon.loops()[0].poke(&self.machine);
        }
    }

    /// Wakes all loops, as any of them may own the socket that was used.
    pub(crate) fn poke_all(&self) {
        if let Some(daemon) = &*self.daemon.borrow() {
            self.poke_all_of(&daemon.loops());
        }
    }

    /// Wakes the I/O loops for the same reason.
    pub(crate) fn poke_io(&self) {
        if let Some(daemon) = &*self.daemon.borrow() {
            self.poke_all_of(&daemon.loops()[1..]);
        }
    }

    fn poke_all_of(&self, loops: &[Rc<Loop>]) {
        let concerned = loops.iter().filter(|l| l.ring.sim.has_events());
        concerned.for_each(|l| l.poke(&self.machine));
    }

    pub(crate) fn listener(&self, guest: usize) -> &Socket {
        match &self.disks[guest].offered {
            Offered::VhostUser { socket, .. } => socket,
            Offered::Nbd | Offered::Ahci { .. } => &self.nbd_socket,
        }
    }

    /// The AHCI controller of a disk, if a daemon runs.
    pub(crate) fn controller(&self, disk: usize) -> Option<Controller> {
        self.daemon.borrow().as_ref().and_then(|daemon| daemon.controller(disk))
    }

    pub(crate) fn nbd_listener(&self) -> &Socket {
        &self.nbd_socket
    }

    pub(crate) fn monitor(&self) -> &Socket {
        &self.monitor
    }

    pub(crate) fn keep_mapping(&self, addr: usize) {
        self.mappings.borrow_mut().insert(addr);
    }

    pub(crate) fn is_there(&self, actor: Option<ActorId>) -> bool {
        actor.is_some_and(|actor| self.machine.is_there(actor))
    }

    /// Whether all users are done.
    pub(crate) fn is_over(&self) -> bool {
        self.over.get()
    }

    pub(crate) fn disks(&self) -> usize {
        self.disks.len()
    }

    /// Sectors of a disk, as its user knows it.
    pub(crate) fn sectors(&self, disk: usize) -> u32 {
        self.users.borrow()[disk].sectors()
    }

    /// Whether a disk is exported over NBD.
    pub(crate) fn is_nbd(&self, disk: usize) -> bool {
        matches!(self.disks[disk].offered, Offered::Nbd)
    }

    /// Number of exports on the daemon's command line.
    pub(crate) fn exports(&self) -> usize {
        let disks = self.disks.iter();
        disks.filter(|disk| !matches!(disk.offered, Offered::Ahci { .. })).count()
    }

    /// Whether daemons are not killed and operations do not fail for good. A new daemon does not know changes by an
    /// operator.
    pub(crate) fn is_mild(&self) -> bool {
        self.plan.life_ns == 0 && self.never_fails()
    }

    /// Whether no operation fails for good.
    pub(crate) fn never_fails(&self) -> bool {
        self.plan.faults.fail == 0
    }

    /// The folder for files of the operator.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Records that a disk is in another image from now on.
    pub(crate) fn set_image(&self, disk: usize, image: Image) {
        self.images.borrow_mut()[disk] = image;
    }

    /// Begins to look at a disk that is copied.
    pub(crate) fn begin_look(&self, disk: usize) -> Ticket {
        let users = self.users.borrow();
        let sectors = users[disk].sectors();
        users[disk].model().borrow_mut().begin_read(0, sectors)
    }

    /// Returns what the disk may have had since.
    pub(crate) fn end_look(&self, disk: usize, ticket: &Ticket) -> Seen {
        self.users.borrow()[disk].model().borrow_mut().seen(ticket)
    }

    /// Informs a disk's user of a larger disk.
    pub(crate) fn grow(&self, disk: usize, sectors: u32) {
        self.users.borrow()[disk].grow(sectors);
    }

    /// Whether the disks are in a throttle group.
    pub(crate) fn is_throttled(&self) -> bool {
        self.plan.throttled
    }

    fn start_daemon(self: &Rc<Self>) {
        let filled = self.journals.filled();
        self.recovered.set(filled > 0 || self.recovered.get());
        self.coverage.recovered.add(filled as u64);
        let around = Surroundings {
            machine: &self.machine,
            plan: &self.plan,
            disks: &self.disks,
            nbd_socket: &self.nbd_socket,
            monitor: &self.monitor,
            storage: &self.storage,
            journals: match self.plan.journals {
                true => self.journals.path().to_owned(),
                false => "/dev/null/no-journals".into(),
            },
        };
        // A killed daemon keeps the function for ever.
        let world = Rc::downgrade(self);
        let ready = move || world.upgrade().iter().for_each(|world| world.daemon_is_ready());
        let daemon = Daemon::start(&around, ready);
        self.daemon.replace(Some(daemon));
    }

    /// The daemon has opened all images, and has not served a request.
    fn daemon_is_ready(&self) {
        // The recovery of the images wrote and flushed outside of the simulated rings.
        if self.recovered.take() && self.plan.power_cuts > 0 {
            let images = self.disks.iter().filter(|disk| disk.image.format != Format::Raw);
            images.for_each(|disk| disk.image.is_stable(&self.storage));
        }
    }

    /// Fails the run if the daemon has ended by itself.
    fn check_daemon(&self) {
        let ended = self.daemon.borrow().as_ref().and_then(Daemon::ended);
        if let Some(end) = ended.filter(|_| !self.quits.get()) {
            self.fail(&format!("the daemon has ended: {end:?}"));
        }
    }

    /// Ends the daemon in order. Returns whether all flushes succeeded.
    fn quit(self: &Rc<Self>) -> bool {
        self.quits.set(true);
        let attached = self.with_daemon(Daemon::detach_drives);
        self.run_until("the AHCI drives are detached", || attached.get() == 0);
        let quitting = self.clone();
        self.machine.spawn("operator".into(), move || operator::quit(&quitting));
        self.run_until("the daemon ends", || self.with_daemon(|daemon| daemon.ended().is_some()));
        match self.with_daemon(Daemon::ended) {
            Some(Err(error)) if !error.contains("could be flushed") => {
                self.fail(&format!("the daemon fails: {error}"))
            }
            end => end == Some(Ok(())),
        }
    }

    /// Kills and restarts daemons.
    fn kill_now_and_then(self: &Rc<Self>) {
        let (random, mut life_ns) = (self.random(), self.plan.life_ns);
        while life_ns > 0 && !self.over.get() {
            self.machine.sleep(random.between(life_ns / 8, life_ns));
            if self.over.get() {
                return;
            }
            self.kill(random.one_in(self.plan.power_cuts));
            // Lives become longer, so that the run ends.
            life_ns += life_ns / 8;
            self.machine.sleep(random.pick(&[0, 10_000, 500_000]));
            self.start_daemon();
        }
    }

    /// Kills the daemon as by SIGKILL: its loops end wherever they are, and its descriptors and mappings are
    /// removed. `cut`: by a power cut, which also kills the guests and loses unflushed data.
    fn kill(&self, cut: bool) {
        let Some(daemon) = self.daemon.take() else { return };
        self.machine.say(|| if cut { "the power is cut" } else { "the daemon is killed" }.into());
        self.coverage.kills.one();
        self.kills.set(self.kills.get() + 1);
        self.died.set(true);
        let in_flight = self.users.borrow().iter().map(|user| user.in_flight()).sum();
        self.coverage.redone.add(in_flight);
        let step = |l: Rc<Loop>| self.machine.last_step(l.actor);
        let ran = |queue| daemon.loop_of(queue).map_or(0, step);
        let unseen = self.users.borrow().iter().map(|user| user.unseen_kicks(&ran)).sum();
        self.coverage.unseen_kicks.add(unseen);
        let happened = self.past.borrow().and(&daemon.happened());
        self.past.replace(happened);
        daemon.kill();
        mappings::unmap_others(&self.mappings.borrow());
        self.fds.close_others();
        if cut {
            self.coverage.cuts.one();
            self.cuts.set(self.cuts.get() + 1);
        }
        for (number, (disk, user)) in self.disks.iter().zip(&*self.users.borrow()).enumerate() {
            let image = &disk.image;
            user.daemon_died();
            if cut {
                self.journals.remove();
                self.coverage.torn.add(self.storage.unstable_sectors(image.fd()) as u64);
                image.cut(&self.storage, self.random().next());
            } else if !image.keeps_back() {
                continue;
            }
            let checked = match (image.contents(), cut) {
                (Ok(bytes), true) => user.lose(&bytes, true),
                // The image is consistent. Its journal has the missing changes.
                (contents, _) => contents.map(drop),
            };
            if let Err(wrong) = checked {
                self.fail(&format!("what is left of disk {number}: {wrong}"));
            }
        }
    }

    /// Number of power cuts so far.
    pub(crate) fn cuts(&self) -> u64 {
        self.cuts.get()
    }

    /// Whether answered but unflushed data may be lost.
    pub(crate) fn is_volatile(&self, image: usize) -> bool {
        self.plan.power_cuts > 0 || self.disks[image].image.keeps_back()
    }

    /// Number of killed daemons so far.
    pub(crate) fn kills(&self) -> u64 {
        self.kills.get()
    }

    fn happened(&self) -> Happened {
        let past = self.past.borrow().clone();
        self.daemon.borrow().iter().fold(past, |sum, daemon| sum.and(&daemon.happened()))
    }

    /// Whether an operation has failed permanently so far.
    pub(crate) fn has_failed(&self) -> bool {
        self.happened().failed > 0
    }

    /// Fails the run if a daemon that has ended in order has operations in flight.
    fn check_nothing_is_left(&self) {
        for (number, user) in self.users.borrow().iter().enumerate() {
            let left = user.in_flight();
            if left > 0 {
                self.fail(&format!("the user of disk {number} has gone with {left} in flight"));
            }
        }
        let left = self.with_daemon(|daemon| daemon.in_flight());
        if left > 0 {
            self.fail(&format!("the loops have ended with {left} operations in flight"));
        }
    }

    fn run_until(&self, what: &str, condition: impl Fn() -> bool) {
        // Effects of calls to the loops between steps.
        self.after_step(None);
        while !condition() {
            match self.machine.step() {
                Step::Ran(actor) => self.after_step(Some(actor)),
                Step::Idle(FOREVER) => {
                    let actors = self.machine.actors();
                    self.fail(&format!("every actor waits for ever before \"{what}\":\n{actors}"));
                }
                Step::Idle(next) => {
                    self.machine.advance_to(next);
                    if next >= self.look_at_ns.get() {
                        self.look_at_ns.set(next + LOOK_NS);
                        self.users.borrow().iter().for_each(|user| user.check_patience());
                        self.check_progress(next);
                    }
                }
            }
        }
    }

    /// Fails the run if no request is answered for long. A driver that was never woken may have none in flight.
    fn check_progress(&self, now: u64) {
        let (answered, (before, since)) = (self.coverage.requests.get(), self.answered.get());
        if answered != before {
            self.answered.set((answered, now));
        } else if now - since > STUCK_NS {
            let actors = self.machine.actors();
            self.fail(&format!("no request is answered any more:\n{actors}"));
        }
    }

    fn after_step(&self, actor: Option<ActorId>) {
        let transfers = socket_transfers();
        let mut sockets = self.died.take() | (self.transfers.replace(transfers) != transfers);
        if let Some(daemon) = &*self.daemon.borrow() {
            // The control loop negotiates, and is the first to learn of a closed connection.
            let loops = daemon.loops();
            sockets |= actor == Some(loops[0].actor);
            for l in &loops {
                if l.was_woken() {
                    l.poke(&self.machine);
                }
            }
        }
        self.users.borrow().iter().for_each(|user| user.look(sockets));
        self.check_daemon();
    }

    /// Fails the run with `what`, and prints how to repeat it.
    pub(crate) fn fail(&self, what: &str) -> ! {
        let (seed, steps, now) = (self.seed, self.machine.steps(), self.machine.now_ns());
        panic!("seed {seed}, step {steps}, at {now} ns: {what}\nto see it again: --seed {seed}");
    }
}
