//! A guest with its disk on an AHCI controller.
//!
//! The controller and its loops are part of the VMM's process, so a kill of the VMM kills the guest too.

mod command;

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use guest_memory::{GuestMemory, Region};
use nix::sys::memfd::{MFdFlags, memfd_create};
use vcpu::ahci::{Command, Failure, LBA, Line, PortArea, PortDriver, reg};

use self::command::{Issued, Kind};
use crate::image::Format;
use crate::machine::{ActorId, FOREVER};
use crate::model::{self, Model, SECTOR};
use crate::random::Random;
use crate::user::{PATIENCE_NS, User};
use crate::world::World;

/// Slots of a port.
const SLOTS: usize = 32;
/// Most sectors of a command.
const MOST_SECTORS: u32 = 128;

/// Layout of the port's area in guest memory.
const AREA: PortArea = PortArea { base: 0, request_size: MOST_SECTORS * SECTOR as u32 };

/// Interval at which the driver polls a register, nanoseconds.
const LOOK_NS: u64 = 2_000;

/// READ LOG EXT, log 10h: which queued command has failed.
const READ_ERROR_LOG: Command =
    Command { command: 0x2f, features: 0, lba: 0x10, count: 1, device: LBA, write: false };

/// The behaviour of a guest with AHCI.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) format: Format,
    /// Sectors of the disk.
    pub(crate) sectors: u32,
    /// Commands at the same time, at most.
    depth: u32,
    /// Commands announced at once, at most.
    batch: u64,
    /// It uses native command queuing once in so many times.
    queued: u64,
    think_ns: u64,
    /// It resets something after so many batches; 0 for never.
    resets: u64,
}

impl Plan {
    pub(crate) fn new(random: &Random) -> Self {
        Plan {
            format: Format::Raw,
            sectors: random.pick(&[64, 1024, 4096]),
            depth: random.pick(&[1, 2, 8, 32]),
            batch: random.pick(&[1, 4, 32]),
            queued: random.pick(&[1, 2, 2, 0]),
            think_ns: random.pick(&[0, 5_000, 100_000]),
            resets: random.pick(&[0, 50, 200]),
        }
    }
}

/// A guest.
pub(crate) struct AhciGuest {
    me: Weak<AhciGuest>,
    world: Rc<World>,
    disk: usize,
    plan: Plan,
    model: RefCell<Model>,
    /// Commands that are still to be issued.
    left: Cell<u64>,
    memory: Arc<GuestMemory>,
    actor: Cell<Option<ActorId>>,
    /// It sleeps until it is interrupted.
    asleep: Cell<bool>,
    /// Whether the line is up.
    line: RefCell<Option<Arc<Line>>>,
    /// Sectors that the drive has said it has.
    sectors: Cell<u32>,
    /// By slot.
    issued: RefCell<[Option<Issued>; SLOTS]>,
    /// The drive's write cache is off for certain.
    write_through: Cell<bool>,
    done: Cell<bool>,
}

/// The guest's memory, which outlives its daemons.
pub(crate) fn memory() -> Arc<GuestMemory> {
    let size = AREA.end();
    let fd = memfd_create(c"sim-ahci", MFdFlags::MFD_CLOEXEC).expect("a memfd");
    nix::unistd::ftruncate(&fd, size.cast_signed()).expect("memory");
    let region = Region { guest_addr: 0, size, user_addr: 0, mmap_offset: 0, fd };
    let mapped = Arc::new(region.map().expect("memory"));
    Arc::new(GuestMemory::from_regions([mapped]).expect("memory"))
}

impl AhciGuest {
    pub(crate) fn new(
        world: &Rc<World>,
        disk: usize,
        plan: Plan,
        memory: Arc<GuestMemory>,
        requests: u64,
    ) -> Rc<Self> {
        Rc::new_cyclic(|me| AhciGuest {
            me: me.clone(),
            world: world.clone(),
            disk,
            model: RefCell::new(Model::new(plan.sectors, world.is_volatile(disk))),
            left: Cell::new(requests),
            memory,
            actor: Cell::new(None),
            asleep: Cell::new(false),
            line: RefCell::default(),
            sectors: Cell::new(0),
            issued: RefCell::default(),
            write_through: Cell::new(false),
            done: Cell::new(false),
            plan,
        })
    }

    fn fail(&self, what: &str) -> ! {
        self.world.fail(&format!("AHCI guest of disk {}: {what}", self.disk))
    }

    /// Starts the actor of the guest's first life, or of the next one.
    fn boot(&self) {
        let Some(me) = self.me.upgrade() else { return };
        let name = format!("AHCI guest of disk {}", self.disk);
        self.actor.set(Some(self.world.machine.spawn(name, move || me.run())));
    }

    /// The actor's main function.
    fn run(&self) {
        let AhciGuest { world, plan, left, .. } = self;
        let (machine, random) = (&world.machine, world.random());
        let mut driver = self.bring_up();
        loop {
            self.handle(&mut driver);
            if left.get() == 0 && self.in_flight() == 0 {
                break;
            }
            if left.get() > 0 && self.issue_some(&mut driver) {
                if random.one_in(plan.resets) {
                    self.reset(&mut driver);
                }
                if random.one_in(4) {
                    machine.wait_until(0);
                    continue;
                }
            }
            let more = left.get() > 0;
            let until = match more && (self.in_flight() == 0 || random.one_in(2)) {
                true => machine.now_ns() + random.below(plan.think_ns + 1),
                false => FOREVER,
            };
            self.asleep.set(true);
            machine.wait_until(until);
            self.asleep.set(false);
        }
        self.line.replace(None);
        self.done.set(true);
    }

    /// Initialises the port: from no drive to a running command list.
    fn bring_up(&self) -> PortDriver {
        let (world, machine) = (&self.world, self.world.machine.clone());
        let controller = loop {
            match world.controller(self.disk) {
                Some(controller) => break controller,
                None => machine.sleep(LOOK_NS),
            }
        };
        self.line.replace(Some(controller.line.clone()));
        let look = move || machine.sleep(LOOK_NS);
        let mut driver = PortDriver::new(&controller, &self.memory, 0, AREA, look);
        driver.write_generic(reg::GHC, reg::GHC_AE | reg::GHC_IE);
        self.expect(driver.start());
        self.write_through.set(false);
        let identity = self.expect(driver.identify());
        let sectors =
            identity[200..206].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        if sectors < u64::from(self.plan.sectors) || sectors > u64::from(self.sectors() + 8) {
            self.fail(&format!("the drive has {sectors} sectors, it says"));
        }
        self.sectors.set(sectors as u32);
        world.coverage.ahci_starts.one();
        driver
    }

    fn expect<T>(&self, result: Result<T, impl std::fmt::Display>) -> T {
        result.unwrap_or_else(|error| self.fail(&error.to_string()))
    }

    // ---- issuing -------------------------------------------------------------------------------

    /// Issues a batch. Returns `false` if no slot is free.
    fn issue_some(&self, driver: &mut PortDriver) -> bool {
        let AhciGuest { world, plan, left, .. } = self;
        let random = world.random();
        let under_way = self.issued.borrow().iter().flatten().map(|issued| issued.queued).next();
        // Queued commands and others never are under way together (SATA 3.x, 13.6.4).
        let queued = under_way.unwrap_or_else(|| random.one_in(plan.queued));
        let room = u64::from(plan.depth) - self.in_flight();
        let count = random.between(1, plan.batch).min(left.get()).min(room);
        let mut slots = 0;
        for _ in 0..count {
            let slot = self.issued.borrow().iter().position(Option::is_none).expect("a slot");
            self.prepare(driver, slot as u8, queued);
            slots |= 1 << slot;
        }
        left.set(left.get() - count);
        if slots != 0 {
            world.coverage.ahci_doorbells.one();
            driver.ring(slots);
        }
        slots != 0
    }

    fn prepare(&self, driver: &mut PortDriver, slot: u8, queued: bool) {
        let random = self.world.random();
        let kind = Kind::any(random, queued);
        let mut model = self.model.borrow_mut();
        let sectors = self.sectors.get().min(model.sectors());
        let count = match random.below(64) {
            0 => random.between(1, MOST_SECTORS.into()) as u32,
            1..16 => 8,
            _ => random.between(1, 2) as u32,
        };
        let (first, count) = random.range(sectors, count);
        let ticket = match kind {
            Kind::Read => Some(model.begin_read(first, count)),
            Kind::Write { .. } => Some(model.begin_write(first, count, false)),
            Kind::Trim => Some(model.begin_write(first, count, true)),
            Kind::Flush => Some(model.begin_flush()),
            _ => None,
        };
        drop(model);
        let data = AREA.data(slot);
        let (command, len) = command::command(random, kind, slot, queued, first, count);
        match (kind, &ticket) {
            (Kind::Write { .. }, Some(ticket)) => {
                let mut bytes = vec![0; len as usize];
                for (at, sector) in bytes.chunks_exact_mut(SECTOR).enumerate() {
                    model::fill(ticket.version, first + at as u32, sector);
                }
                self.expect(driver.memory().write_bytes(data, &bytes));
            }
            (Kind::Trim, _) => {
                let mut ranges = [0; SECTOR];
                ranges[..8]
                    .copy_from_slice(&(u64::from(first) | u64::from(count) << 48).to_le_bytes());
                self.expect(driver.memory().write_bytes(data, &ranges));
            }
            _ => {}
        }
        let prds = pieces(random, data, len);
        self.expect(driver.prepare_prdt(slot, &command, &prds));
        if let Kind::WriteCache(_) = kind {
            // A driver that learns of several ends at once sees them in any order.
            self.write_through.set(false);
        }
        let issued = Issued {
            kind,
            queued,
            ticket,
            write_through: self.write_through.get(),
            issued_ns: self.world.machine.now_ns(),
        };
        self.issued.borrow_mut()[usize::from(slot)] = Some(issued);
    }

    // ---- answers -------------------------------------------------------------------------------

    /// Handles the interrupt, if there is one.
    fn handle(&self, driver: &mut PortDriver) {
        let is_up = self.line.borrow().as_ref().is_some_and(|line| line.is_up());
        if !is_up {
            return;
        }
        self.world.coverage.interrupts.one();
        match driver.handle_interrupt() {
            Ok(ended) => self.ended(driver, ended),
            Err(error) => match error.downcast::<Failure>() {
                Ok(failure) => self.failed(driver, failure),
                Err(error) => self.fail(&error.to_string()),
            },
        }
    }

    fn ended(&self, driver: &PortDriver, slots: u32) {
        for slot in (0..SLOTS).filter(|slot| slots & 1 << slot != 0) {
            let issued = self.issued.borrow_mut()[slot].take();
            let Some(issued) = issued else {
                self.fail(&format!("slot {slot} has ended, and was not issued"));
            };
            self.check(driver, slot as u8, &issued);
        }
    }

    fn check(&self, driver: &PortDriver, slot: u8, issued: &Issued) {
        let AhciGuest { world, disk, .. } = self;
        let coverage = &world.coverage;
        let now = world.machine.now_ns();
        world.machine.note((*disk as u64) << 48 ^ u64::from(slot) << 32 ^ now << 1);
        world.machine.say(|| format!("disk {disk}, slot {slot}: {issued:?} has ended"));
        world.count_request(*disk);
        coverage.ahci_commands.one();
        coverage.ahci_queued.add(u64::from(issued.queued));
        let took = now - issued.issued_ns;
        if took > PATIENCE_NS {
            self.fail(&format!("{issued:?} took {took} ns"));
        }
        match issued.kind {
            Kind::Read => coverage.reads.one(),
            Kind::Write { .. } => coverage.writes.one(),
            Kind::Flush => coverage.flushes.one(),
            Kind::Trim => coverage.discards.one(),
            Kind::Identify => coverage.ids.one(),
            Kind::WriteCache(on) => {
                coverage.write_caches.one();
                let switches = |other: &Issued| matches!(other.kind, Kind::WriteCache(_));
                let last = !self.issued.borrow().iter().flatten().any(switches);
                self.write_through.set(!on && last);
            }
            Kind::OutOfRange | Kind::Unknown => self.fail(&format!("{issued:?} was not refused")),
        }
        let Some(ticket) = &issued.ticket else { return };
        let mut model = self.model.borrow_mut();
        let checked = match issued.kind {
            Kind::Write { fua } => {
                let stable = fua || issued.write_through && self.write_through.get();
                model.end_write(ticket, true, stable);
                Ok(())
            }
            // Discarded sectors may have their old contents or zeroes.
            Kind::Trim => {
                model.end_write(ticket, false, false);
                Ok(())
            }
            Kind::Flush => {
                model.flushed(ticket);
                Ok(())
            }
            _ => {
                let bytes = self.expect(driver.data(slot, ticket.count as usize * SECTOR));
                model.end_read(ticket, Some(&bytes))
            }
        };
        drop(model);
        if let Err(wrong) = checked {
            self.fail(&format!("{issued:?}: {wrong}"));
        }
    }

    /// Handles a failed command: commands before it have ended, all others are aborted.
    fn failed(&self, driver: &mut PortDriver, failure: Failure) {
        let coverage = &self.world.coverage;
        self.ended(driver, driver.issued() & !failure.unfinished);
        let may_fail = |issued: &Issued| issued.kind.is_refused() || self.world.has_failed();
        let queued = {
            let issued = self.issued.borrow();
            let mut unfinished = issued.iter().flatten().peekable();
            let queued = unfinished.peek().is_some_and(|issued| issued.queued);
            if !unfinished.any(may_fail) {
                drop(issued);
                self.fail(&format!("{failure}, and none that may: {:?}", self.issued.borrow()));
            }
            queued
        };
        self.expect(driver.recover());
        if queued {
            // Slot 0 is free again.
            self.expect(driver.run(&READ_ERROR_LOG, SECTOR as u32));
            let tag = self.expect(driver.data(0, 1))[0] & 0x9f;
            let named = self
                .issued
                .borrow()
                .get(usize::from(tag))
                .is_some_and(|issued| issued.as_ref().is_some_and(may_fail));
            if !named {
                self.fail(&format!("the error log names {tag}: {:?}", self.issued.borrow()));
            }
            coverage.ahci_logs.one();
        }
        let refused = self.issued.borrow().iter().flatten().any(|issued| issued.kind.is_refused());
        if refused {
            coverage.refused.one()
        } else {
            coverage.failed.one()
        }
        self.forget_all();
    }

    /// Resets the list, the link or the controller while commands are in flight, which aborts them.
    fn reset(&self, driver: &mut PortDriver) {
        let (machine, random) = (&self.world.machine, self.world.random());
        self.world.coverage.ahci_resets.one();
        machine.sleep(random.pick(&[0, 5_000, 50_000]));
        // Commands that have completed before the reset keep their results.
        self.handle(driver);
        match random.below(3) {
            // Stop and restart the command list.
            0 => self.expect(driver.recover()),
            // Reset the link.
            1 => {
                self.expect(driver.start());
                self.write_through.set(false);
            }
            _ => {
                driver.write_generic(reg::GHC, reg::GHC_AE | reg::GHC_HR);
                while driver.read_generic(reg::GHC) & reg::GHC_HR != 0 {
                    machine.sleep(LOOK_NS);
                }
                driver.write_generic(reg::GHC, reg::GHC_AE | reg::GHC_IE);
                self.expect(driver.start());
                self.write_through.set(false);
            }
        }
        self.forget_all();
    }

    /// Forgets all commands in flight: none of them is answered.
    fn forget_all(&self) {
        for issued in self.issued.borrow_mut().iter_mut().filter_map(Option::take) {
            self.world.coverage.forgotten.one();
            let Some(ticket) = &issued.ticket else { continue };
            let mut model = self.model.borrow_mut();
            match issued.kind.writes() {
                true => model.end_write(ticket, false, false),
                false => model.end_read(ticket, None).expect("nothing is checked"),
            }
        }
    }
}

/// Data in pieces of even lengths.
fn pieces(random: &Random, mut at: u64, len: u32) -> Vec<(u64, u32)> {
    let (mut left, mut pieces) = (len, Vec::new());
    while left > 0 {
        let cut = left > 2 && pieces.len() < 8 && random.one_in(2);
        let piece = if cut { random.between(1, u64::from(left) / 2) as u32 * 2 } else { left };
        pieces.push((at, piece));
        at += u64::from(piece);
        left -= piece;
    }
    pieces
}

impl User for AhciGuest {
    fn start(self: Rc<Self>) {
        self.boot();
    }

    fn is_done(&self) -> bool {
        self.done.get()
    }

    fn model(&self) -> &RefCell<Model> {
        &self.model
    }

    fn grow(&self, sectors: u32) {
        self.model.borrow_mut().grow(sectors);
    }

    fn in_flight(&self) -> u64 {
        self.issued.borrow().iter().flatten().count() as u64
    }

    fn daemon_died(&self) {
        if self.done.get() {
            return;
        }
        if let Some(actor) = self.actor.take() {
            self.world.machine.kill(actor);
        }
        self.asleep.set(false);
        self.line.replace(None);
        self.forget_all();
        self.boot();
    }

    fn check_disk(&self, bytes: &[u8]) -> Result<(), String> {
        self.model.borrow().check_disk(bytes)
    }

    fn lose(&self, bytes: &[u8], anew: bool) -> Result<(), String> {
        self.model.borrow_mut().lose(bytes, anew)
    }

    fn look(&self, _sockets: bool) {
        let is_up = self.line.borrow().as_ref().is_some_and(|line| line.is_up());
        if is_up
            && self.asleep.take()
            && let Some(actor) = self.actor.get()
        {
            let machine = &self.world.machine;
            machine.wake_at(actor, machine.now_ns() + self.world.random().below(2_000));
        }
    }

    fn check_patience(&self) {
        let now = self.world.machine.now_ns();
        for issued in self.issued.borrow().iter().flatten() {
            let took = now - issued.issued_ns;
            if took > PATIENCE_NS {
                self.fail(&format!("{issued:?} has been waiting for {took} ns"));
            }
        }
    }
}
