//! A run: the machine, a daemon and its users, and the events between them.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use event_loop::ring::sim::{
    Happened, Storage, simulate_new_loops, socket_transfers, without_threads,
};

use crate::ahci::{self, AhciGuest};
use crate::attacker;
use crate::client::{self, Client};
use crate::coverage::Coverage;
use crate::daemon::{self, Daemon, Disk, Offered};
use crate::fds::Fds;
use crate::guest::{self, Guest};
use crate::host::Loop;
use crate::image::{Format, Image};
use crate::journals::{Folder, Journals};
use crate::lasting::Lasting;
use crate::listener::Socket;
use crate::lives::Upgrade;
use crate::machine::{ActorId, FOREVER, Machine, Step};
use crate::model::{Seen, Ticket};
use crate::nvme::{self, NvmeGuest};
use crate::operator::{self, Moving};
use crate::random::Random;
use crate::user::User;

/// The state of a run.
pub(crate) struct World {
    pub(crate) seed: u64,
    /// Requests of the run.
    requests: u64,
    pub(crate) machine: Machine,
    pub(crate) coverage: Coverage,
    pub(crate) fds: Rc<Fds>,
    /// The socket of the NBD server.
    pub(crate) nbd_socket: Rc<Socket>,
    /// The image that the attacker uses, if there is one.
    pub(crate) attacked: Option<Image>,
    /// The socket of the monitor.
    pub(crate) monitor: Rc<Socket>,
    /// The daemon that serves, and during an upgrade the one that takes over.
    pub(crate) daemons: RefCell<Vec<Daemon>>,
    /// The upgrade under way, if any.
    pub(crate) upgrade: Upgrade,
    pub(crate) users: RefCell<Vec<Rc<dyn User>>>,
    /// Addresses of mappings that do not belong to the daemon.
    pub(crate) mappings: RefCell<BTreeSet<usize>>,
    pub(crate) plan: daemon::Plan,
    pub(crate) disks: Vec<Disk>,
    /// A disk is exported as a namespace of an NVMe controller.
    has_nvme: bool,
    /// By disk, after the operator has changed them.
    pub(crate) images: RefCell<Vec<Image>>,
    /// Images of the operator's nodes, by name.
    named: RefCell<BTreeMap<String, Named>>,
    /// Files of the operator.
    folder: Folder,
    /// The storage of the images. Cuts of the power act on it.
    pub(crate) storage: Storage,
    pub(crate) journals: Journals,
    /// The persistent bitmap of each disk.
    pub(crate) lasting: RefCell<Vec<Option<Lasting>>>,
    /// What the operator does to a chain of images.
    pub(crate) moving: Cell<Option<Moving>>,
    /// The daemon may end.
    pub(crate) quits: Cell<bool>,
    /// The counters of the rings of killed daemons.
    pub(crate) past: RefCell<Happened>,
    pub(crate) kills: Cell<u64>,
    /// Grows while a daemon is ended in order.
    pub(crate) stops: Cell<u64>,
    /// The last daemon has ended by a power cut, or before one.
    pub(crate) is_cut: Cell<bool>,
    pub(crate) cuts: Cell<u64>,
    /// The daemon was killed since the last check of the users.
    pub(crate) died: Cell<bool>,
    /// Number of socket reads and writes of all loops at that check.
    transfers: Cell<u64>,
    pub(crate) over: Cell<bool>,
    /// Time of the next check for requests in flight for too long.
    look_at_ns: Cell<u64>,
    /// Number of answered requests, and when it last changed.
    answered: Cell<(u64, u64)>,
}

/// The image of a node of the operator.
struct Named {
    path: PathBuf,
    format: Format,
}

/// Interval of that check, nanoseconds.
const LOOK_NS: u64 = 10_000_000;

/// Maximum time without any answer, nanoseconds.
const STUCK_NS: u64 = 60_000_000_000;

/// Maximum bytes of reads and writes that a loop begins between two calls of its ring: a share for each of the disks'
/// users and the attacker, and a job's copies. A flood of the attacker has four times as much.
const MOST_BEGUN: u64 = 8 << 20;

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
    /// Users of the disks after those.
    pub(crate) ahci_guests: Vec<ahci::Plan>,
    /// Users of the last disks.
    pub(crate) nvme_guests: Vec<nvme::Plan>,
    /// There is an attacker beside the users.
    pub(crate) is_attacked: bool,
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
        .chain(plan.ahci_guests.iter().map(|_| {
            let socket = Rc::new(Socket::new(&fds));
            Offered::Ahci { socket }
        }))
        .chain(plan.nvme_guests.iter().map(|guest| {
            let socket = Rc::new(Socket::new(&fds));
            Offered::Nvme { socket, queues: guest.queues }
        }))
        .collect();
    let nbd_socket = Rc::new(Socket::new(&fds));
    let monitor = Rc::new(Socket::new(&fds));
    let images: Vec<_> = (plan.guests.iter().map(|guest| (guest.format, guest.sectors)))
        .chain(plan.clients.iter().map(|client| (client.format, client.sectors)))
        .chain(plan.ahci_guests.iter().map(|guest| (guest.format, guest.sectors)))
        .chain(plan.nvme_guests.iter().map(|guest| (guest.format, guest.sectors)))
        .map(|(format, sectors)| Image::new(&fds, format, sectors))
        .collect();
    let storage = Storage::new();
    simulate_new_loops(Some(storage.clone()));
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
    let attacked = plan.is_attacked.then(|| attacker::image(&fds));
    let lasting = disks.iter().map(|_| None).collect();
    let world = Rc::new(World {
        seed,
        requests: plan.requests,
        machine,
        coverage: Coverage::default(),
        fds,
        attacked,
        nbd_socket,
        monitor,
        daemons: RefCell::default(),
        upgrade: Upgrade::default(),
        users: RefCell::default(),
        mappings: RefCell::default(),
        plan: plan.daemon.clone(),
        has_nvme: disks.iter().any(|disk| disk.offered.is_nvme()),
        disks,
        images: RefCell::new(images),
        named: RefCell::default(),
        folder: Folder::new(seed),
        storage,
        journals: Journals::new(seed),
        lasting: RefCell::new(lasting),
        moving: Cell::new(None),
        quits: Cell::new(false),
        past: RefCell::default(),
        kills: Cell::new(0),
        stops: Cell::new(0),
        is_cut: Cell::new(false),
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
        let guest = AhciGuest::new(&world, number, guest.clone(), each);
        world.users.borrow_mut().push(guest);
    }
    for (number, guest) in (first + plan.ahci_guests.len()..).zip(&plan.nvme_guests) {
        let guest = NvmeGuest::new(&world, number, guest.clone(), each);
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
    let attacker = world.attacked.is_some().then(|| {
        let attacked = world.clone();
        world.machine.spawn("attacker".into(), move || attacker::run(&attacked))
    });
    world.run_until("all are done", || world.users.borrow().iter().all(|user| user.is_done()));
    world.over.set(true);
    let others: Vec<_> = [fate, operator].into_iter().chain(attacker).collect();
    others.iter().for_each(|actor| world.machine.wake(*actor));
    world.run_until("there is one daemon", || {
        world.daemons.borrow().len() == 1
            && !others.iter().any(|actor| world.machine.is_there(*actor))
    });
    world.check_shares();
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
                world.found(image).and_then(|found| user.lose(&found.contents, false))
            }
            _ => world.found(image).and_then(|found| user.check_disk(&found.contents)),
        };
        if let Err(wrong) = checked {
            world.fail(&format!("disk {number}, in the end: {wrong}"));
        }
    }
    world.users.borrow_mut().clear();
    world.named_images().iter().for_each(|(path, _)| world.remove_image(path));
    world.folder.remove();
    world.journals.remove();
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

    /// Calls `body` with the daemon that serves.
    pub(crate) fn with_daemon<T>(&self, body: impl FnOnce(&Daemon) -> T) -> T {
        body(self.daemons.borrow().first().expect("a daemon"))
    }

    /// Wakes the loops of a kicked queue.
    pub(crate) fn poke_queue(&self, _guest: usize, queue: u16) {
        let daemons = self.daemons.borrow();
        let loops = daemons.iter().filter_map(|daemon| daemon.loop_of(queue));
        loops.for_each(|l| l.poke(&self.machine));
    }

    pub(crate) fn has_daemon(&self) -> bool {
        !self.daemons.borrow().is_empty()
    }

    /// Wakes the control loops, as a socket of theirs has input.
    pub(crate) fn poke_control(&self) {
        self.daemons.borrow().iter().for_each(|daemon| daemon.loops()[0].poke(&self.machine));
    }

    /// Wakes all loops, as any of them may own the socket that was used.
    pub(crate) fn poke_all(&self) {
        self.daemons.borrow().iter().for_each(|daemon| self.poke_all_of(&daemon.loops()));
    }

    /// Wakes the I/O loops for the same reason.
    pub(crate) fn poke_io(&self) {
        self.daemons.borrow().iter().for_each(|daemon| self.poke_all_of(&daemon.loops()[1..]));
    }

    pub(crate) fn poke_all_of(&self, loops: &[Rc<Loop>]) {
        let concerned =
            loops.iter().filter(|l| !l.is_poked(&self.machine) && l.ring.sim.has_events());
        concerned.for_each(|l| l.poke(&self.machine));
    }

    pub(crate) fn listener(&self, guest: usize) -> &Socket {
        match &self.disks[guest].offered {
            Offered::VhostUser { socket, .. }
            | Offered::Ahci { socket }
            | Offered::Nvme { socket, .. } => socket,
            Offered::Nbd => &self.nbd_socket,
        }
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

    /// Whether the export of a disk fixes its size.
    pub(crate) fn has_fixed_size(&self, disk: usize) -> bool {
        matches!(self.disks[disk].offered, Offered::Nbd | Offered::Ahci { .. })
    }

    /// Whether requests are in flight on disks with such an export: 1 or 0.
    pub(crate) fn in_flight_on(&self, is_one: fn(&Offered) -> bool) -> u64 {
        let users = self.users.borrow();
        let mut all = self.disks.iter().zip(&*users);
        all.any(|(disk, user)| is_one(&disk.offered) && user.in_flight() > 0).into()
    }

    /// Counts an answered request.
    pub(crate) fn count_request(&self, disk: usize) {
        self.coverage.requests.one();
        if self.images.borrow()[disk].format != Format::Raw {
            self.coverage.qcow2.one();
            self.coverage.qcow2_hard.add(self.is_hard().into());
        }
    }

    /// Whether daemons are killed or the power is cut.
    pub(crate) fn is_hard(&self) -> bool {
        self.plan.life_ns > 0
    }

    /// Whether the power is cut.
    pub(crate) fn has_power_cuts(&self) -> bool {
        self.plan.power_cuts > 0
    }

    /// Whether disks may move to other images. No operation fails for good, and the next daemon knows of the move: it
    /// has a state file, or there is none.
    pub(crate) fn may_move(&self) -> bool {
        (self.plan.life_ns == 0 || self.keeps_state()) && self.never_fails()
    }

    /// Whether a disk was made as a qcow2 image.
    pub(crate) fn has_qcow2(&self) -> bool {
        self.disks.iter().any(|disk| disk.image.format != Format::Raw)
    }

    /// Whether the node of a disk can have persistent bitmaps.
    pub(crate) fn may_keep_bitmaps(&self, node: &str) -> bool {
        let may = self.never_fails() && !self.is_throttled();
        may && self.image_of(node).format != Format::Raw
    }

    /// Whether the daemon has a state file.
    pub(crate) fn keeps_state(&self) -> bool {
        self.plan.state
    }

    /// Records the image of a node of the operator. In a world with power cuts, its file becomes one of the storage.
    pub(crate) fn name_image(&self, node: &str, path: &Path, format: Format) {
        if self.plan.power_cuts > 0 {
            let file =
                File::options().write(true).read(true).create(true).truncate(false).open(path);
            let file = OwnedFd::from(file.expect("a file in memory"));
            self.storage.add(&file).expect("a file in memory");
            self.fds.keep(self.storage.descriptor(&file).expect("a file of the storage"));
        }
        let path = path.to_owned();
        self.named.borrow_mut().insert(node.to_owned(), Named { path, format });
    }

    /// Removes an image of the operator.
    pub(crate) fn remove_image(&self, path: &Path) {
        self.named.borrow_mut().retain(|_, named| named.path != path);
        if let Ok(file) = File::open(path).map(OwnedFd::from)
            && let Some(own) = self.storage.descriptor(&file)
        {
            self.storage.remove(&file);
            self.fds.forget(own);
        }
        // A killed daemon may not have made it.
        let _ = fs::remove_file(path);
    }

    /// The paths and images of the operator.
    pub(crate) fn named_images(&self) -> Vec<(PathBuf, Image)> {
        let named = self.named.borrow();
        let there = named.values().filter(|named| named.path.exists());
        there
            .map(|Named { path, format }| (path.clone(), Image::of_file(&self.fds, path, *format)))
            .collect()
    }

    /// The image of a node that serves a disk.
    pub(crate) fn image_of(&self, node: &str) -> Image {
        let number = (0..self.disks.len()).find(|number| daemon::disk_name(*number) == node);
        if let Some(number) = number {
            return self.disks[number].image.clone();
        }
        let named = self.named.borrow();
        let Some(Named { path, format }) = named.get(node) else {
            self.fail(&format!("a disk is on node {node}, which no command has put there"));
        };
        Image::of_file(&self.fds, path, *format)
    }

    /// The image of a node, if there is still one.
    pub(crate) fn find_image_of(&self, node: &str) -> Option<Image> {
        let is_disk = (0..self.disks.len()).any(|number| daemon::disk_name(number) == node);
        let is_there = |named: &Named| named.path.exists();
        let is_there = is_disk || self.named.borrow().get(node).is_some_and(is_there);
        is_there.then(|| self.image_of(node))
    }

    /// The image at a path.
    pub(crate) fn image_at(&self, path: &Path) -> Option<Image> {
        if let Some(disk) = self.disks.iter().find(|disk| disk.image.path() == path) {
            return Some(disk.image.clone());
        }
        let named = self.named.borrow();
        let found = named.values().find(|named| named.path == path && path.exists());
        found.map(|named| Image::of_file(&self.fds, path, named.format))
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

    pub(crate) fn happened(&self) -> Happened {
        let past = self.past.borrow().clone();
        self.daemons.borrow().iter().fold(past, |sum, daemon| sum.and(&daemon.happened()))
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

    pub(crate) fn run_until(self: &Rc<Self>, what: &str, condition: impl Fn() -> bool) {
        // Effects of calls to the loops between steps.
        self.after_step(None);
        while !condition() {
            match self.machine.step(|actor| self.before_step(actor)) {
                Step::Ran(actor) => self.after_step(Some(actor)),
                Step::Idle(FOREVER) => {
                    let actors = self.machine.actors();
                    self.fail(&format!("every actor waits for ever before \"{what}\":\n{actors}"));
                }
                Step::Idle(next) => {
                    self.check_wake_ups();
                    self.machine.advance_to(next);
                    if next >= self.look_at_ns.get() {
                        self.look_at_ns.set(next + LOOK_NS);
                        self.users.borrow().iter().for_each(|user| user.check_patience());
                        self.check_progress(next);
                        self.check_shares();
                    }
                }
            }
        }
    }

    /// Fails the run if a wake-up was lost: all threads of the daemon sleep, and a request waits for them.
    fn check_wake_ups(&self) {
        if let [daemon] = &self.daemons.borrow()[..]
            && daemon.is_asleep()
            && let Some(disk) = self.users.borrow().iter().position(|user| user.waits())
        {
            let actors = self.machine.actors();
            self.fail(&format!("the daemon sleeps, and requests wait on disk {disk}:\n{actors}"));
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

    /// Fails the run if a loop has begun more between two calls of its ring than all its users' shares allow.
    fn check_shares(&self) {
        if self.attacked.is_none() {
            return;
        }
        let daemons = self.daemons.borrow();
        let begun = daemons.iter().flat_map(|daemon| {
            daemon.loops().iter().map(|l| l.ring.sim.max_begun()).collect::<Vec<_>>()
        });
        if let Some(begun) = begun.max().filter(|begun| *begun > MOST_BEGUN) {
            self.fail(&format!("a loop has begun {begun} bytes at once, for all that wait"));
        }
    }

    fn after_step(self: &Rc<Self>, actor: Option<ActorId>) {
        self.look_at_daemons(actor);
        let transfers = socket_transfers();
        let mut sockets = self.died.take() | (self.transfers.replace(transfers) != transfers);
        for daemon in &*self.daemons.borrow() {
            // The control loop negotiates, and is the first to learn of a closed connection.
            let loops = daemon.loops();
            sockets |= actor == Some(loops[0].actor);
            if actor == Some(loops[0].actor) && self.has_nvme {
                // The control loop may have passed a doorbell on to a queue's thread.
                self.poke_all_of(&loops[1..]);
            }
            for l in loops.iter() {
                if l.was_woken() {
                    l.poke(&self.machine);
                }
            }
        }
        self.users.borrow().iter().for_each(|user| user.look(sockets));
    }

    /// Fails the run with `what`, and prints how to repeat it.
    pub(crate) fn fail(&self, what: &str) -> ! {
        let (seed, steps, now) = (self.seed, self.machine.steps(), self.machine.now_ns());
        let again = format!("--seed {seed} --requests {}", self.requests);
        panic!("seed {seed}, step {steps}, at {now} ns: {what}\nto see it again: {again}");
    }
}
