//! A guest with its disk on an AHCI controller: an export over vfio-user.
//!
//! A kill of the daemon is visible to such a guest: the VMM connects again, and the guest restarts the port.

mod command;
mod life;
mod plan;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use vcpu::ahci::{Command, Failure, LBA, PortArea, PortDriver, reg};
use vcpu::vfio_user::wire;

use self::command::{Issued, Kind};
pub(crate) use self::plan::Plan;
use crate::fds::Kept;
use crate::machine::ActorId;
use crate::model::{self, Model, SECTOR};
use crate::random::{Random, range};
use crate::user::{PATIENCE_NS, User};
use crate::vfio::{Device, Gone, Line, Link, Memory};
use crate::world::World;

/// Slots of a port.
const SLOTS: usize = 32;
/// Most sectors of a command.
const MOST_SECTORS: u32 = 128;

/// Layout of the port's area in guest memory.
const AREA: PortArea = PortArea { base: 0, request_size: MOST_SECTORS * SECTOR as u32 };

/// READ LOG EXT, log 10h: which queued command has failed.
const READ_ERROR_LOG: Command =
    Command { command: 0x2f, features: 0, lba: 0x10, count: 1, device: LBA, write: false };

/// The controller, as its VMM finds it.
const DEVICE: Device = Device { name: "AHCI", bar: wire::BAR5, size: 0x2000, reset_at: 0xb4 };

/// A guest.
pub(crate) struct AhciGuest {
    world: Rc<World>,
    disk: usize,
    plan: Plan,
    link: Link,
    memory: Memory,
    model: RefCell<Model>,
    /// Commands that are still to be issued.
    left: Cell<u64>,
    actor: Cell<Option<ActorId>>,
    /// The eventfd of the interrupt, and whether it was signalled since the last handling.
    call: RefCell<Option<Rc<Kept>>>,
    interrupted: Cell<bool>,
    /// The driver sleeps until an interrupt.
    is_asleep: Cell<bool>,
    /// The port is up.
    is_up: Cell<bool>,
    /// By slot.
    issued: RefCell<[Option<Issued>; SLOTS]>,
    /// Bits of queued commands that may have failed just before the command list was restarted: until its error log is read,
    /// the drive refuses others then.
    unread: Cell<u32>,
    /// The drive's write cache is off for certain.
    write_through: Cell<bool>,
    done: Cell<bool>,
}

impl AhciGuest {
    pub(crate) fn new(world: &Rc<World>, disk: usize, plan: Plan, requests: u64) -> Rc<Self> {
        // Tables from 0 on, and the data behind them.
        let (data, end) = (AREA.data(0), AREA.end());
        Rc::new(AhciGuest {
            world: world.clone(),
            disk,
            link: Link::new(world, disk, &DEVICE),
            memory: Memory::new(world, data, (data, end - data)),
            model: RefCell::new(Model::new(plan.sectors, world.is_volatile(disk))),
            left: Cell::new(requests),
            actor: Cell::new(None),
            call: RefCell::default(),
            interrupted: Cell::new(false),
            is_asleep: Cell::new(false),
            is_up: Cell::new(false),
            issued: RefCell::default(),
            unread: Cell::new(0),
            write_through: Cell::new(false),
            done: Cell::new(false),
            plan,
        })
    }

    fn fail(&self, what: &str) -> ! {
        self.link.fail(what)
    }

    /// Number of commands in flight.
    fn count(&self) -> u64 {
        self.issued.borrow().iter().flatten().count() as u64
    }

    /// Whether there is an interrupt to be handled.
    fn is_interrupted(&self) -> bool {
        let is_new = self.call.borrow().as_ref().is_some_and(|call| call.was_signalled());
        self.interrupted.set(self.interrupted.get() | is_new);
        self.interrupted.get()
    }

    // ---- issuing -------------------------------------------------------------------------------

    /// Issues a batch. Returns `false` if no slot is free.
    fn issue_some(&self, driver: &mut PortDriver) -> bool {
        let AhciGuest { world, plan, left, .. } = self;
        let random = world.random();
        let under_way = self.issued.borrow().iter().flatten().map(|issued| issued.queued).next();
        // Queued commands and others never are under way together (SATA 3.x, 13.6.4).
        let queued = under_way.unwrap_or_else(|| random.one_in(plan.queued));
        let room = u64::from(plan.depth) - self.count();
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
        let count = match random.below(64) {
            0 => random.between(1, MOST_SECTORS.into()) as u32,
            1..16 => 8,
            _ => random.between(1, 2) as u32,
        };
        let (first, count) = range(random, self.plan.sectors, count);
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
                self.memory.view.write_bytes(data, &bytes).expect("memory");
            }
            (Kind::Trim, _) => {
                let mut ranges = [0; SECTOR];
                ranges[..8]
                    .copy_from_slice(&(u64::from(first) | u64::from(count) << 48).to_le_bytes());
                self.memory.view.write_bytes(data, &ranges).expect("memory");
            }
            _ => {}
        }
        let prds = pieces(random, data, len);
        driver.prepare_prdt(slot, &command, &prds).expect("memory");
        if let Kind::WriteCache(_) = kind {
            // A driver that learns of several ends at once sees them in any order.
            self.write_through.set(false);
        }
        let issued = Issued {
            kind,
            queued,
            ticket,
            write_through: self.write_through.get(),
            was_unplugged: false,
            issued_ns: self.world.machine.now_ns(),
        };
        self.issued.borrow_mut()[usize::from(slot)] = Some(issued);
    }

    // ---- answers -------------------------------------------------------------------------------

    /// Handles the interrupt, if there is one.
    fn handle(&self, line: &Line, driver: &mut PortDriver) -> Result<(), Gone> {
        if !self.is_interrupted() {
            return Ok(());
        }
        self.interrupted.set(false);
        self.world.coverage.interrupts.one();
        let handled = driver.handle_interrupt();
        line.check()?;
        match handled {
            Ok(ended) => self.ended(ended),
            Err(error) => match error.downcast::<Failure>() {
                Ok(failure) => self.failed(line, driver, failure)?,
                Err(error) => self.fail(&error.to_string()),
            },
        }
        if self.plan.has_pin {
            self.world.coverage.ahci_pins.one();
            line.ask(wire::SET_IRQS, &wire::unmask(), &[])?;
        }
        Ok(())
    }

    fn ended(&self, slots: u32) {
        for slot in (0..SLOTS).filter(|slot| slots & 1 << slot != 0) {
            let issued = self.issued.borrow_mut()[slot].take();
            let Some(issued) = issued else {
                self.fail(&format!("slot {slot} has ended, and was not issued"));
            };
            self.check(slot as u8, &issued);
        }
    }

    fn check(&self, slot: u8, issued: &Issued) {
        let AhciGuest { world, disk, .. } = self;
        let coverage = &world.coverage;
        let now = world.machine.now_ns();
        world.machine.note((*disk as u64) << 48 ^ u64::from(slot) << 32 ^ now << 1);
        world.machine.say(|| format!("disk {disk}, slot {slot}: {issued:?} has ended"));
        world.count_request(*disk);
        coverage.ahci_commands.one();
        coverage.ahci_queued.add(u64::from(issued.queued));
        let took = self.link.took_ns(issued.issued_ns);
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
                let mut bytes = vec![0; ticket.count as usize * SECTOR];
                self.memory.view.read_bytes(AREA.data(slot), &mut bytes).expect("memory");
                model.end_read(ticket, Some(&bytes))
            }
        };
        drop(model);
        if let Err(wrong) = checked {
            self.fail(&format!("{issued:?}: {wrong}"));
        }
    }

    /// Handles a failed command: commands before it have ended, all others are aborted.
    fn failed(&self, line: &Line, driver: &mut PortDriver, failure: Failure) -> Result<(), Gone> {
        let coverage = &self.world.coverage;
        self.ended(driver.issued() & !failure.unfinished);
        let may_fail = |issued: &Issued| self.may_fail(issued);
        let unfinished =
            |is_one: &dyn Fn(&Issued) -> bool| self.issued.borrow().iter().flatten().any(is_one);
        if !unfinished(&may_fail) && self.unread.get() == 0 {
            self.fail(&format!("{failure}, and none that may: {:?}", self.issued.borrow()));
        }
        let recovered = driver.recover();
        self.expect(line, recovered)?;
        // A command whose data is not memory has not reached the drive.
        let has_queued = unfinished(&|issued| issued.queued);
        if failure.is & reg::IS_TFES != 0 && (has_queued || self.unread.get() != 0) {
            let unread = self.unread.take();
            // Slot 0 is free again.
            let read = driver.run(&READ_ERROR_LOG, SECTOR as u32);
            self.expect(line, read)?;
            let tag = driver.data(0, 1).expect("memory")[0] & 0x9f;
            let named = match self.issued.borrow().get(usize::from(tag)) {
                Some(issued) => issued.as_ref().is_some_and(may_fail) || unread >> tag & 1 != 0,
                // The command that failed was not queued.
                None => !has_queued,
            };
            if !named {
                self.fail(&format!("the error log names {tag}: {:?}", self.issued.borrow()));
            }
            coverage.ahci_logs.one();
        }
        if failure.is & reg::IS_HBFS != 0 {
            coverage.ahci_without_memory.one();
        } else if unfinished(&|issued| issued.kind.is_refused()) {
            coverage.refused.one();
        } else {
            coverage.failed.one();
        }
        self.forget_all();
        Ok(())
    }

    /// Whether a command may have failed, or may yet.
    fn may_fail(&self, issued: &Issued) -> bool {
        issued.kind.is_refused() || issued.was_unplugged || self.world.has_failed()
    }

    /// Forgets all commands in flight: none of them is answered. Others are issued in their places.
    fn forget_all(&self) {
        for issued in self.issued.borrow_mut().iter_mut().filter_map(Option::take) {
            self.world.coverage.forgotten.one();
            self.left.set(self.left.get() + 1);
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
        let (machine, name) = (&self.world.machine, format!("AHCI guest of disk {}", self.disk));
        let me = self.clone();
        self.actor.set(Some(machine.spawn(name, move || me.run())));
    }

    fn is_done(&self) -> bool {
        self.done.get()
    }

    fn model(&self) -> &RefCell<Model> {
        &self.model
    }

    fn in_flight(&self) -> u64 {
        self.count()
    }

    fn check_disk(&self, bytes: &[u8]) -> Result<(), String> {
        self.model.borrow().check_disk(bytes)
    }

    fn lose(&self, bytes: &[u8], anew: bool) -> Result<(), String> {
        if anew {
            self.forget_all();
        }
        self.model.borrow_mut().lose(bytes, anew)
    }

    fn look(&self, _sockets: bool) {
        if self.is_asleep.get()
            && self.is_interrupted()
            && let Some(actor) = self.actor.get()
        {
            let machine = &self.world.machine;
            machine.wake_at(actor, machine.now_ns() + self.world.random().below(2_000));
            self.is_asleep.set(false);
        }
    }

    fn waits(&self) -> bool {
        self.is_up.get() && self.link.is_alive() && self.is_asleep.get() && self.count() > 0
    }

    fn check_patience(&self) {
        for issued in self.issued.borrow().iter().flatten().filter(|_| self.is_up.get()) {
            let took = self.link.took_ns(issued.issued_ns);
            if took > PATIENCE_NS {
                self.fail(&format!("{issued:?} has been waiting for {took} ns"));
            }
        }
    }
}
