//! The lives of daemons: starts, kills, power cuts, and upgrades, in which there are two.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;

use crate::daemon::{Daemon, Offered, Surroundings};
use crate::fds;
use crate::host::Loop;
use crate::image::Format;
use crate::machine::ActorId;
use crate::world::World;
use crate::{mappings, operator};

/// What the world knows of upgrades. Descriptors of the process cannot tell the two daemons apart.
#[derive(Default)]
pub(crate) struct Upgrade {
    /// Descriptors of the daemon that takes over.
    fds: RefCell<BTreeSet<RawFd>>,
    /// Open descriptors before a step of that daemon.
    before: RefCell<Option<BTreeSet<RawFd>>>,
    /// The step in which one of the two daemons, or both, are killed.
    kill_at: Cell<Option<u64>>,
    /// One of the two was killed, so the other one may leave.
    killed: Cell<bool>,
    /// Number of upgrades that were disturbed by a kill.
    disturbed: Cell<u64>,
    /// Number of daemons that have left to another one.
    done: Cell<u64>,
}

impl World {
    fn around(&self) -> Surroundings<'_> {
        Surroundings {
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
            state: self.plan.state.then(|| self.folder().join("state")),
        }
    }

    pub(crate) fn start_daemon(self: &Rc<Self>) {
        let filled = self.journals.filled();
        self.recovered.set(filled > 0 || self.recovered.get());
        self.coverage.recovered.add(filled as u64);
        // A killed daemon keeps the function for ever.
        let world = Rc::downgrade(self);
        let ready = move || world.upgrade().iter().for_each(|world| world.daemon_is_ready());
        let daemon = Daemon::start(&self.around(), ready);
        self.daemons.borrow_mut().push(daemon);
    }

    /// The daemon has opened all images, and has not served a request.
    fn daemon_is_ready(&self) {
        // The recovery of the images wrote and flushed outside of the simulated rings.
        if self.recovered.take() && self.plan.power_cuts > 0 {
            let images = self.disks.iter().filter(|disk| disk.image.format != Format::Raw);
            images.for_each(|disk| disk.image.is_stable(&self.storage));
        }
    }

    /// Fails the run if a daemon has ended by itself.
    fn check_daemons(&self) {
        let ended = self.daemons.borrow().iter().find_map(Daemon::ended);
        if let Some(end) = ended.filter(|_| !self.quits.get()) {
            self.fail(&format!("the daemon has ended: {end:?}"));
        }
    }

    /// Ends the daemon in order. Returns whether all flushes succeeded.
    pub(crate) fn quit(self: &Rc<Self>) -> bool {
        self.quits.set(true);
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

    // ---- upgrades ------------------------------------------------------------------------------

    /// Whether upgrades are possible. A hand-over of a qcow2 image writes outside of the simulated rings, which a cut of
    /// the power would take back.
    pub(crate) fn can_upgrade(&self) -> bool {
        self.plan.power_cuts == 0 || !self.disks.iter().any(|disk| disk.image.keeps_back())
    }

    /// Whether there are two daemons.
    pub(crate) fn is_upgrading(&self) -> bool {
        self.daemons.borrow().len() > 1
    }

    /// Number of upgrades so far.
    pub(crate) fn upgrades(&self) -> u64 {
        self.upgrade.done.get()
    }

    /// Number of upgrades so far in which a daemon was killed.
    pub(crate) fn disturbed_upgrades(&self) -> u64 {
        self.upgrade.disturbed.get()
    }

    /// Number of moments so far at which a daemon may have lost its connections.
    pub(crate) fn losses(&self) -> u64 {
        self.kills() + self.disturbed_upgrades()
    }

    /// Called before an actor runs.
    pub(crate) fn before_step(&self, actor: ActorId) {
        if self.daemons.borrow().iter().any(|daemon| daemon.has(actor)) {
            self.fds.daemon_runs();
        }
        // A blocked thread opens nothing, and a list takes long.
        if let [_, young] = &self.daemons.borrow()[..]
            && young.has(actor)
            && !(young.loops()[0].actor == actor && young.process.is_blocked())
        {
            self.upgrade.before.replace(Some(fds::open().collect()));
        }
    }

    /// Called after each step. Carries out what daemons have asked of the system.
    pub(crate) fn look_at_daemons(self: &Rc<Self>, ran: Option<ActorId>) {
        self.note_descriptors();
        self.kill_in_upgrade();
        let left = self.daemons.borrow().iter().position(|one| one.process.exit_code().is_some());
        if let Some(index) = left {
            self.has_left(index);
        }
        let asks = |daemon: &Daemon| (daemon.process.ends_other(), daemon.process.to_start());
        let Some((ends, to_start)) = self.daemons.borrow().first().map(asks) else { return };
        if let Some(socket) = to_start {
            let old = self.daemons.borrow()[0].process.clone();
            // The old daemon has opened the socket, which is the new one's.
            let mut before: BTreeSet<_> = fds::open().collect();
            before.remove(&socket.as_raw_fd());
            let daemon = Daemon::take_over(&self.around(), socket);
            old.has_started(daemon.process.clone());
            self.daemons.borrow_mut().push(daemon);
            self.upgrade.fds.replace(fds::open().filter(|fd| !before.contains(fd)).collect());
            self.upgrade.killed.set(false);
            self.coverage.upgrades_begun.one();
            let random = self.random();
            let kills = self.plan.life_ns > 0 && random.one_in(2);
            let after = random.pick(&[20, 200, 1_000]);
            let kill_at = || self.machine.steps() + random.below(after);
            self.upgrade.kill_at.set(kills.then(kill_at));
        }
        // Perhaps the one that was just started.
        if ends && self.is_upgrading() {
            self.end(1);
        }
        // What one of the two has sent to the other.
        if let ([old, young], Some(ran)) = (&self.daemons.borrow()[..], ran) {
            let ones = [(old, young), (young, old)];
            let others = ones.iter().filter(|(one, _)| one.has(ran)).map(|(_, other)| other);
            let awake = others.filter(|other| !other.process.is_blocked());
            awake.for_each(|other| self.poke_all_of(&other.loops()[..1]));
        }
        self.check_daemons();
    }

    /// Records the descriptors that the daemon that takes over has opened or closed.
    fn note_descriptors(&self) {
        let Some(before) = self.upgrade.before.take() else { return };
        let mut fds = self.upgrade.fds.borrow_mut();
        let is_its = |fd: &RawFd| fds.contains(fd) || !before.contains(fd);
        let now = fds::open().filter(is_its).collect();
        *fds = now;
    }

    /// A daemon has left by itself.
    fn has_left(self: &Rc<Self>, index: usize) {
        let code = self.daemons.borrow()[index].process.exit_code();
        let count = self.daemons.borrow().len();
        match (count, index, code) {
            (2, 0, Some(0)) => {
                self.machine.say(|| "the daemon has handed over".into());
                self.upgrade.done.set(self.upgrade.done.get() + 1);
                self.coverage.upgrades.one();
                self.coverage.ahci_upgrades.add(self.in_flight_on(Offered::is_ahci));
                self.coverage.nvme_upgrades.add(self.in_flight_on(Offered::is_nvme));
            }
            (2, 1, Some(1)) => self.machine.say(|| "the new daemon gives up".into()),
            (1, ..) if self.upgrade.killed.take() => {
                self.machine.say(|| "the last daemon has left".into());
                self.kill(false);
                return self.start_daemon();
            }
            _ => self.fail(&format!("daemon {index} of {count} has left with status {code:?}")),
        }
        self.end(index);
    }

    /// Kills one of two daemons, or both, at the step that the seed has chosen.
    fn kill_in_upgrade(self: &Rc<Self>) {
        if self.upgrade.kill_at.get().is_none_or(|step| self.machine.steps() < step) {
            return;
        }
        self.upgrade.kill_at.set(None);
        if self.daemons.borrow().len() < 2 {
            return;
        }
        self.upgrade.killed.set(true);
        self.upgrade.disturbed.set(self.upgrade.disturbed.get() + 1);
        match self.random().below(3) {
            2 => {
                self.kill(self.random().one_in(self.plan.power_cuts));
                self.start_daemon();
            }
            index => {
                let (index, of) = (index as usize, ["old", "new"][index as usize]);
                self.machine.say(|| format!("the {of} daemon is killed"));
                self.coverage.upgrades_killed.one();
                self.end(index);
            }
        }
    }

    /// Removes one of two daemons, as the system does for a process that has ended.
    fn end(&self, index: usize) {
        let daemon = self.daemons.borrow_mut().remove(index);
        let happened = self.past.borrow().and(&daemon.happened());
        self.past.replace(happened);
        self.died.set(true);
        daemon.kill();
        let fds = self.upgrade.fds.take();
        match index {
            0 => self.fds.close_all_but(&fds),
            _ => fds::close(fds),
        }
        self.poke_control();
    }

    // ---- kills ---------------------------------------------------------------------------------

    /// Kills and restarts daemons.
    pub(crate) fn kill_now_and_then(self: &Rc<Self>) {
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

    /// Kills all daemons as by SIGKILL: their loops end wherever they are, and their descriptors and mappings are
    /// removed. `cut`: by a power cut, which also kills the guests and loses unflushed data.
    fn kill(&self, cut: bool) {
        let daemons = self.daemons.take();
        if daemons.is_empty() {
            return;
        }
        self.machine.say(|| if cut { "the power is cut" } else { "the daemon is killed" }.into());
        self.coverage.kills.one();
        self.kills.set(self.kills.get() + 1);
        self.died.set(true);
        let in_flight = self.users.borrow().iter().map(|user| user.in_flight()).sum();
        self.coverage.redone.add(in_flight);
        self.coverage.ahci_kills.add(self.in_flight_on(Offered::is_ahci));
        self.coverage.nvme_kills.add(self.in_flight_on(Offered::is_nvme));
        let step = |l: Rc<Loop>| self.machine.last_step(l.actor);
        let ran = |queue| {
            let loops = daemons.iter().filter_map(|daemon| daemon.loop_of(queue));
            loops.map(step).max().unwrap_or(0)
        };
        let unseen = self.users.borrow().iter().map(|user| user.unseen_kicks(&ran)).sum();
        self.coverage.unseen_kicks.add(unseen);
        for daemon in daemons {
            let happened = self.past.borrow().and(&daemon.happened());
            self.past.replace(happened);
            daemon.kill();
        }
        mappings::unmap_others(&self.mappings.borrow());
        self.fds.close_all_but(&BTreeSet::new());
        self.upgrade.fds.take();
        if cut {
            self.coverage.cuts.one();
            self.cuts.set(self.cuts.get() + 1);
        }
        for (number, (disk, user)) in self.disks.iter().zip(&*self.users.borrow()).enumerate() {
            let image = &disk.image;
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
}
