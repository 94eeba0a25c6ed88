//! The lives of daemons: starts, kills, power cuts, and upgrades, in which there are two.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;

use crate::chain::State;
use crate::daemon::{Daemon, Disk, Offered, Surroundings};
use crate::fds;
use crate::host::Loop;
use crate::image::Image;
use crate::lasting::Claim;
use crate::machine::ActorId;
use crate::model::SECTOR;
use crate::operator::Moving;
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
            attacked: self.attacked.as_ref(),
            nbd_socket: &self.nbd_socket,
            monitor: &self.monitor,
            storage: &self.storage,
            journals: match self.plan.journals {
                true => self.journals.path().to_owned(),
                false => "/dev/null/no-journals".into(),
            },
            journals_besides: self.journals.known(),
            state: self.plan.state.then(|| self.folder().join("state")),
        }
    }

    pub(crate) fn start_daemon(self: &Rc<Self>) {
        let (left, elsewhere) = self.journals.begin();
        self.coverage.recovered.add(left as u64);
        self.coverage.elsewhere.add(elsewhere as u64);
        let daemon = Daemon::start(&self.around());
        self.daemons.borrow_mut().push(daemon);
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

    /// Whether the daemon may be ended in order in the middle of the run. Its users do not expect that if it is never
    /// killed.
    pub(crate) fn may_stop(&self) -> bool {
        let is_vhost_user = |disk: &Disk| matches!(disk.offered, Offered::VhostUser { .. });
        self.is_hard()
            && self.never_fails()
            && !self.is_upgrading()
            && self.disks.iter().all(is_vhost_user)
    }

    /// The daemon is about to end, or was.
    pub(crate) fn is_stopping(&self, stops: bool) {
        self.quits.set(stops);
        self.stops.set(self.stops.get() + 1);
    }

    /// Whether the daemon has ended in order.
    pub(crate) fn has_stopped(&self) -> bool {
        let daemons = self.daemons.borrow();
        let end = daemons.first().and_then(Daemon::ended);
        if let Some(Err(error)) = &end {
            self.fail(&format!("the daemon fails: {error}"));
        }
        end.is_some()
    }

    /// Starts a daemon after one that has ended in order, which has stored its bitmaps. Sometimes, the power is cut in
    /// between.
    pub(crate) fn start_again(self: &Rc<Self>) {
        self.coverage.stops.one();
        self.check_stored();
        for (user, image) in self.users.borrow().iter().zip(&*self.images.borrow()) {
            if image.keeps_back() {
                // Closing an image flushes it.
                let mut model = user.model().borrow_mut();
                let flush = model.begin_flush();
                model.flushed(&flush);
            }
        }
        let cut = self.random().one_in(self.plan.power_cuts);
        self.coverage.stops_cut.add(cut.into());
        self.kill(cut);
        self.start_daemon();
    }

    /// Checks that the bitmaps are in images that were closed, also in those behind overlays.
    fn check_stored(&self) {
        for (number, lasting) in self.lasting.borrow_mut().iter_mut().enumerate() {
            let Some(lasting) = lasting else { continue };
            let Some(image) = self.find_image_of(&lasting.node) else { continue };
            let found = self.found(&image);
            let claim = found.and_then(|found| lasting.check(&found.bitmaps, &found.contents));
            if claim != Ok(Claim::Right) {
                let name = &lasting.name;
                self.fail(&format!("{name} of disk {number} was not stored: {claim:?}"));
            }
            lasting.stored = true;
        }
    }

    // ---- upgrades ------------------------------------------------------------------------------

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
        if self.quits.get() {
            // A daemon that ends closes connections at any time.
            self.stops.set(self.stops.get() + 1);
        }
        self.kills() + self.disturbed_upgrades() + self.stops.get()
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
        self.coverage.kills.add(daemons.iter().any(|daemon| daemon.ended().is_none()).into());
        self.kills.set(self.kills.get() + 1);
        self.died.set(true);
        self.is_cut.set(cut);
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
        match cut {
            true => self.cut_power(),
            false => self.check_images(),
        }
    }

    /// Loses what is not flushed, and checks what is left: the disks that the next daemon opens.
    fn cut_power(&self) {
        self.coverage.cuts.one();
        self.cuts.set(self.cuts.get() + 1);
        match self.moving.get() {
            Some(Moving::Commit) => self.coverage.commits_cut.one(),
            Some(Moving::Stream) => self.coverage.streams_cut.one(),
            Some(Moving::Mirror) => self.coverage.mirrors_cut.one(),
            None => {}
        }
        self.journals.remove();
        let state = self.state();
        let paths = self.paths_after_restart(state.as_ref());
        for disk in &self.disks {
            self.cut_image(&disk.image);
        }
        for (path, image) in self.named_images() {
            match path.to_str().is_some_and(|path| paths.contains(path)) {
                true => self.cut_image(&image),
                // No daemon opens it any more.
                false => self.remove_image(&path),
            }
        }
        for (number, user) in self.users.borrow().iter().enumerate() {
            let node = self.node_after_restart(state.as_ref(), number);
            let checked = self.check_chain(state.as_ref(), &node);
            let checked = checked.and_then(|bytes| user.lose(&bytes, true));
            let checked = checked.and_then(|()| self.check_bitmap(number));
            if let Err(wrong) = checked {
                self.fail(&format!("what a power cut leaves of disk {number} on {node}: {wrong}"));
            }
        }
    }

    fn cut_image(&self, image: &Image) {
        self.coverage.torn.add(self.storage.unstable_sectors(image.fd()) as u64);
        image.cut(&self.storage, self.random().next());
    }

    /// The contents of a node, which are the same by the state file and by the names in headers.
    fn check_chain(&self, state: Option<&State>, node: &str) -> Result<Vec<u8>, String> {
        let contents = self.contents_after_restart(state, node)?;
        let image = self.image_of(node);
        if image.backing_name().is_none() && state.is_none() {
            return Ok(contents);
        }
        let found = self.found(&image)?.contents;
        let is_by_both =
            image.backing_name().is_some() && state.is_some_and(|state| state.has(node));
        self.coverage.chains_cut.add(is_by_both.into());
        let differs = |(one, other): (&[u8], &[u8])| one != other;
        let mut sectors = contents.chunks(SECTOR).zip(found.chunks(SECTOR));
        match sectors.position(differs) {
            _ if contents.len() != found.len() => {
                Err(format!("{} bytes, and {} by its headers", contents.len(), found.len()))
            }
            Some(sector) => Err(format!("sector {sector} is another one by its headers")),
            None => Ok(contents),
        }
    }

    /// Checks the persistent bitmap of a disk, which may lie in an image that is below another one now.
    fn check_bitmap(&self, disk: usize) -> Result<(), String> {
        let mut lasting = self.lasting.borrow_mut();
        let Some(bitmap) = &mut lasting[disk] else { return Ok(()) };
        let Some(image) = self.find_image_of(&bitmap.node) else {
            lasting[disk] = None;
            return Ok(());
        };
        let found = self.found(&image)?;
        bitmap.check(&found.bitmaps, &found.contents)?;
        Ok(())
    }

    /// Checks that the images are consistent. Their journals have what is missing.
    fn check_images(&self) {
        for (number, disk) in self.disks.iter().enumerate() {
            if !disk.image.keeps_back() {
                continue;
            }
            let checked = self.found(&disk.image).and_then(|_| self.check_bitmap(number));
            if let Err(wrong) = checked {
                self.fail(&format!("what is left of disk {number}: {wrong}"));
            }
        }
    }
}
