//! The driver of an I/O queue pair: submits commands, rings, sleeps until an interrupt, and checks all answers.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use vcpu::vfio_user::wire;

use super::Plan;
use super::command::{
    self, ABORT_REQUESTED, Command, DATA_TRANSFER_ERROR, Data, Kind, MOST_SECTORS, SUCCESS,
};
use super::memory::{memory, pair};
use super::rings::{Completion, Rings, Told};
use crate::fds::Kept;
use crate::machine::{ActorId, FOREVER};
use crate::model::{self, Model, SECTOR};
use crate::random::range;
use crate::user::PATIENCE_NS;
use crate::vfio::{Device, Gone, Line, Link, Memory};
use crate::world::World;

/// Interval at which a driver without interrupts looks at its completion queue, nanoseconds.
const POLL_NS: u64 = 10_000;

/// The controller as its VMM finds it.
const DEVICE: Device = Device { name: "NVMe", bar: wire::BAR0, size: 0x4000, reset_at: 0x54 };

/// State shared by the queues of a guest.
pub(super) struct Shared {
    pub(super) world: Rc<World>,
    pub(super) disk: usize,
    pub(super) plan: Plan,
    pub(super) memory: Memory,
    pub(super) model: RefCell<Model>,
    /// Commands still to be offered, over all queues.
    pub(super) left: Cell<u64>,
    pub(super) link: Link,
    /// Blocks of the namespace, as the controller has said.
    pub(super) sectors: Cell<u32>,
    /// The step since which the write cache is off for certain.
    pub(super) write_through: Cell<Option<u64>>,
    /// Buffer for data to or from guest memory.
    bytes: RefCell<Vec<u8>>,
}

impl Shared {
    pub(super) fn new(world: &Rc<World>, disk: usize, plan: Plan, requests: u64) -> Rc<Self> {
        Rc::new(Shared {
            world: world.clone(),
            disk,
            memory: memory(world, plan.queues, plan.depth),
            model: RefCell::new(Model::new(plan.sectors, world.is_volatile(disk))),
            left: Cell::new(requests),
            link: Link::new(world, disk, &DEVICE),
            sectors: Cell::new(0),
            write_through: Cell::new(None),
            bytes: RefCell::default(),
            plan,
        })
    }

    pub(super) fn line(&self) -> Result<Rc<Line>, Gone> {
        self.link.line()
    }

    pub(super) fn fail(&self, what: &str) -> ! {
        self.link.fail(what)
    }

    /// How long a command has been in flight without disturbance, nanoseconds.
    fn took_ns(&self, command: &Command) -> u64 {
        self.link.took_ns(command.offered_ns)
    }
}

/// A place for a command: its slot in guest memory, and how often it was used.
struct Place {
    number: u16,
    uses: u16,
    command: Option<Command>,
}

impl Place {
    /// The identifier of its command. Later commands of the same place have others.
    fn cid(&self) -> u16 {
        self.uses << 6 | self.number & 0x3f
    }
}

/// An I/O queue pair.
pub(super) struct Queue {
    pub(super) shared: Rc<Shared>,
    pub(super) qid: u16,
    pub(super) actor: Cell<Option<ActorId>>,
    pub(super) rings: RefCell<Rings>,
    /// The eventfd of its interrupts.
    pub(super) call: RefCell<Option<Rc<Kept>>>,
    places: RefCell<Vec<Place>>,
    /// The driver leaves the queue alone.
    pub(super) is_paused: Cell<bool>,
    /// The driver is amid something that a pause has to wait for.
    pub(super) is_busy: Cell<bool>,
    /// The driver sleeps until an interrupt.
    is_asleep: Cell<bool>,
}

impl Queue {
    pub(super) fn new(shared: &Rc<Shared>, qid: u16) -> Rc<Self> {
        let depth = shared.plan.depth;
        let place = |number| Place { number, uses: 0, command: None };
        Rc::new(Queue {
            shared: shared.clone(),
            qid,
            actor: Cell::new(None),
            rings: RefCell::new(new_rings(shared, qid)),
            call: RefCell::default(),
            places: RefCell::new((0..depth).map(place).collect()),
            is_paused: Cell::new(true),
            is_busy: Cell::new(false),
            is_asleep: Cell::new(false),
        })
    }

    fn fail(&self, what: &str) -> ! {
        self.shared.fail(&format!("queue {}: {what}", self.qid))
    }

    pub(super) fn in_flight(&self) -> u64 {
        self.places.borrow().iter().filter(|place| place.command.is_some()).count() as u64
    }

    /// The actor's main function.
    pub(super) fn run(&self) {
        let Shared { world, plan, left, .. } = &*self.shared;
        let (machine, random) = (&world.machine, world.random());
        loop {
            if left.get() == 0 && self.in_flight() == 0 {
                return;
            }
            if self.is_paused.get() {
                machine.wait_until(FOREVER);
                continue;
            }
            self.is_busy.set(true);
            let offered = self.work();
            self.is_busy.set(false);
            let Ok(offered) = offered else {
                // The VMM finds that out as well.
                self.is_paused.set(true);
                continue;
            };
            if offered && random.one_in(4) {
                machine.wait_until(0);
                continue;
            }
            // Let the device answer just before the driver sleeps.
            machine.preempt(8);
            if self.is_paused.get() {
                continue;
            }
            if self.rings.borrow().has_completion() {
                world.coverage.raced.one();
                continue;
            }
            if left.get() == 0 && self.in_flight() == 0 {
                return;
            }
            let more = left.get() > 0;
            let now = machine.now_ns();
            let until = match more && (self.in_flight() == 0 || random.one_in(2)) {
                true => now + random.below(plan.think_ns + 1),
                false if plan.polls => now + POLL_NS,
                false => FOREVER,
            };
            // An interrupt from before the sleep does not end the sleep.
            self.take_call();
            self.is_asleep.set(true);
            machine.wait_until(until);
            self.is_asleep.set(false);
        }
    }

    /// Takes answers and submits commands. Returns whether there were some of the latter.
    fn work(&self) -> Result<bool, Gone> {
        self.reap(true)?;
        if self.shared.left.get() == 0 { Ok(false) } else { self.offer_some() }
    }

    /// Wakes the actor.
    pub(super) fn wake(&self) {
        if let Some(actor) = self.actor.get() {
            self.shared.world.machine.wake(actor);
        }
    }

    /// Checks the interrupt, and wakes a sleeping driver a moment later.
    pub(super) fn look(&self) {
        if !self.is_asleep.get() || !self.rings.borrow().has_completion() {
            return;
        }
        if self.take_call()
            && let Some(actor) = self.actor.get()
        {
            let world = &self.shared.world;
            world.coverage.interrupts.one();
            world.machine.wake_at(actor, world.machine.now_ns() + world.random().below(2_000));
            self.is_asleep.set(false);
        }
    }

    fn take_call(&self) -> bool {
        self.call.borrow().as_ref().is_some_and(|call| call.was_signalled())
    }

    // ---- doorbells -----------------------------------------------------------------------------

    /// Tells the device of a new value, in memory or by a message.
    fn ring(&self, told: Told) -> Result<(), Gone> {
        let Shared { world, plan, .. } = &*self.shared;
        // Between the store of the value and the load of the event index.
        world.machine.preempt(8);
        let rings = self.rings.borrow();
        if !rings.needs_register(&told) {
            world.coverage.nvme_shadowed.one();
            return Ok(());
        }
        let [tail, _] = rings.registers();
        drop(rings);
        world.coverage.nvme_registers.one();
        let is_answered = world.random().one_in(plan.answered);
        let line = self.shared.line()?;
        line.write(tail + told.doorbell, &u32::from(told.new).to_ne_bytes(), is_answered)
    }

    // ---- offering ------------------------------------------------------------------------------

    /// Offers a batch. Returns `false` if enough commands are in flight.
    fn offer_some(&self) -> Result<bool, Gone> {
        let Shared { world, plan, left, .. } = &*self.shared;
        let batch = world.random().between(1, plan.batch).min(left.get());
        let mut count = 0;
        while count < batch && self.offer() {
            count += 1;
        }
        if count == 0 {
            world.coverage.full_queues.one();
            return Ok(false);
        }
        left.set(left.get() - count);
        let told = self.rings.borrow_mut().tell_tail();
        self.ring(told)?;
        Ok(true)
    }

    fn offer(&self) -> bool {
        let Shared { world, memory, model, plan, .. } = &*self.shared;
        let random = world.random();
        let mut places = self.places.borrow_mut();
        let free = places.iter_mut().find(|place| place.command.is_none());
        let Some(place) = free else { return false };
        let kind = Kind::any(random);
        let mut model = model.borrow_mut();
        let sectors = self.shared.sectors.get().min(model.sectors());
        let count = match random.below(16) {
            0 => random.between(1, u64::from(MOST_SECTORS)) as u32,
            1..4 => 8,
            _ => random.between(1, 2) as u32,
        };
        let (first, count) = range(random, sectors, count);
        let ticket = match kind {
            Kind::Read => Some(model.begin_read(first, count)),
            Kind::Write { .. } => Some(model.begin_write(first, count, false)),
            Kind::Zeroes { .. } | Kind::Deallocate { .. } => {
                Some(model.begin_write(first, count, true))
            }
            Kind::Flush => Some(model.begin_flush()),
            Kind::Compare | Kind::Verify | Kind::OutOfRange | Kind::Unknown => None,
        };
        drop(model);
        place.uses = place.uses.wrapping_add(1);
        let number = (self.qid - 1) * plan.depth + place.number;
        let data = Data::new(random, number, kind.data_len(count));
        let mut bytes = self.shared.bytes.borrow_mut();
        bytes.clear();
        bytes.resize(data.len, 0xa5);
        if let (Kind::Write { .. }, Some(ticket)) = (kind, &ticket) {
            for (at, sector) in bytes.chunks_exact_mut(SECTOR).enumerate() {
                model::fill(ticket.version, first + at as u32, sector);
            }
        }
        data.write(&memory.view, &bytes);
        let ids = (number, place.cid());
        let (entry, lists) = command::entry(random, &memory.view, ids, kind, (first, count), &data);
        world.coverage.nvme_lists.add(lists.min(1));
        world.coverage.nvme_chained.add(lists.saturating_sub(1));
        self.rings.borrow_mut().submit(&entry);
        let write_through = match kind {
            Kind::Write { .. } | Kind::Zeroes { .. } => self.shared.write_through.get(),
            _ => None,
        };
        place.command = Some(Command {
            kind,
            ticket,
            data,
            write_through,
            is_aborting: false,
            was_unplugged: self.shared.link.is_unplugged(),
            offered_ns: world.machine.now_ns(),
        });
        true
    }

    // ---- answers -------------------------------------------------------------------------------

    /// Takes all answers. `rings`: tells the device so.
    fn reap(&self, rings: bool) -> Result<(), Gone> {
        let old = self.rings.borrow().head();
        let mut count = 0;
        loop {
            let completion = self.rings.borrow_mut().reap();
            let Some(completion) = completion else { break };
            count += 1;
            self.answered(completion);
        }
        if count == 0 || !rings {
            return Ok(());
        }
        let told = self.rings.borrow_mut().tell_head(old);
        self.ring(told)
    }

    fn answered(&self, completion: Completion) {
        let Completion { sqid, sqhd, cid, .. } = completion;
        if sqid != self.qid || sqhd >= self.rings.borrow().size() {
            self.fail(&format!("{completion:?} is of another queue"));
        }
        let command = {
            let mut places = self.places.borrow_mut();
            let place = places.get_mut(usize::from(cid & 0x3f));
            place.filter(|place| place.cid() == cid).and_then(|place| place.command.take())
        };
        match command {
            Some(command) => self.check(&command, completion),
            None => self.fail(&format!("{completion:?} is of no command under way")),
        }
    }

    fn check(&self, command: &Command, completion: Completion) {
        let Shared { world, memory, model, disk, .. } = &*self.shared;
        let coverage = &world.coverage;
        let (now, status) = (world.machine.now_ns(), completion.status);
        let id = (*disk as u64) << 48 | u64::from(self.qid) << 32 | u64::from(completion.cid);
        world.machine.note(id ^ u64::from(status) << 16 ^ now << 1);
        world.machine.say(|| {
            format!("disk {disk}, queue {}: {command:?} is answered {status:#x}", self.qid)
        });
        world.count_request(*disk);
        coverage.nvme_commands.one();
        let kind = command.kind;
        let is_aborted = status == ABORT_REQUESTED && command.is_aborting;
        let is_unplugged = status == DATA_TRANSFER_ERROR && command.was_unplugged;
        if !is_aborted && !is_unplugged && !kind.may_get(status, || world.has_failed()) {
            self.fail(&format!("{command:?} was answered {status:#x}"));
        }
        let took = self.shared.took_ns(command);
        if took > PATIENCE_NS {
            self.fail(&format!("{command:?} took {took} ns"));
        }
        let good = status == SUCCESS;
        match kind {
            Kind::Read => {
                coverage.reads.one();
                coverage.nvme_reads.one();
            }
            Kind::Write { fua } => {
                coverage.writes.one();
                coverage.nvme_writes.one();
                coverage.nvme_fua.add(u64::from(fua && good));
            }
            Kind::Flush => coverage.flushes.one(),
            Kind::Zeroes { .. } => coverage.zeroes.one(),
            Kind::Deallocate { .. } => coverage.discards.one(),
            Kind::Compare | Kind::Verify => coverage.nvme_compared.one(),
            Kind::OutOfRange | Kind::Unknown => coverage.refused.one(),
        }
        if is_aborted {
            coverage.nvme_aborted.one();
        } else if is_unplugged {
            coverage.nvme_without_memory.one();
        } else if !good && !kind.is_refused() && kind != Kind::Compare {
            coverage.failed.one();
        }
        let Some(ticket) = &command.ticket else { return };
        let mut model = model.borrow_mut();
        let checked = if kind.writes() {
            let off = command.write_through;
            let is_through = off.is_some() && off == self.shared.write_through.get();
            // Deallocated sectors may have their old contents or zeroes.
            let is_certain = good && !matches!(kind, Kind::Deallocate { .. });
            model.end_write(ticket, is_certain, kind.is_stable() || is_through);
            Ok(())
        } else if kind == Kind::Flush {
            if good {
                model.flushed(ticket);
            }
            Ok(())
        } else if good {
            let mut bytes = self.shared.bytes.borrow_mut();
            bytes.clear();
            bytes.resize(command.data.len, 0);
            command.data.read(&memory.view, &mut bytes);
            model.end_read(ticket, Some(&bytes))
        } else {
            model.end_read(ticket, None)
        };
        drop(model);
        if let Err(wrong) = checked {
            self.fail(&format!("{command:?}: {wrong}"));
        }
    }

    /// Whether the driver sleeps until the device answers a command, which it has not done.
    pub(super) fn waits(&self) -> bool {
        self.is_asleep.get()
            && !self.is_paused.get()
            && self.in_flight() > 0
            && !self.rings.borrow().has_completion()
    }

    /// Fails the run if a command has been in flight for too long.
    pub(super) fn check_patience(&self) {
        for command in self.places.borrow().iter().filter_map(|place| place.command.as_ref()) {
            let took = self.shared.took_ns(command);
            if took > PATIENCE_NS {
                self.fail(&format!("{command:?} is in flight for {took} ns"));
            }
        }
    }

    // ---- the VMM's hand ------------------------------------------------------------------------

    /// Empties the rings and forgets all commands in flight, which will not be answered. They may be carried out in
    /// part, or not at all.
    pub(super) fn renew(&self) {
        self.is_paused.set(true);
        // Answers that the driver has not seen yet count.
        let _ = self.reap(false);
        let mut places = self.places.borrow_mut();
        for command in places.iter_mut().filter_map(|place| place.command.take()) {
            self.shared.world.coverage.forgotten.one();
            let Some(ticket) = &command.ticket else { continue };
            let mut model = self.shared.model.borrow_mut();
            match command.kind.writes() {
                true => model.end_write(ticket, false, false),
                false => model.end_read(ticket, None).expect("nothing is checked"),
            }
        }
        self.rings.replace(new_rings(&self.shared, self.qid));
    }

    /// Resumes the driver.
    pub(super) fn resume(&self) {
        self.is_paused.set(false);
        self.wake();
    }

    /// Picks a random command in flight to be aborted, and returns its identifier.
    pub(super) fn pick_to_abort(&self) -> Option<u16> {
        let mut places = self.places.borrow_mut();
        let mut under_way: Vec<_> =
            places.iter_mut().filter(|place| place.command.is_some()).collect();
        if under_way.is_empty() {
            return None;
        }
        let index = self.shared.world.random().below(under_way.len() as u64) as usize;
        let cid = under_way[index].cid();
        under_way[index].command.as_mut()?.is_aborting = true;
        Some(cid)
    }

    /// Notes that the slots are not memory of the device for a while.
    pub(super) fn is_unplugged(&self) {
        let mut places = self.places.borrow_mut();
        let under_way = places.iter_mut().filter_map(|place| place.command.as_mut());
        under_way.for_each(|command| command.was_unplugged = true);
    }

    /// The data of the reads in flight, with their identifiers.
    pub(super) fn data_of_reads(&self) -> Vec<(u16, Vec<u8>)> {
        let reads = |place: &Place| {
            let command = place.command.as_ref().filter(|it| it.kind == Kind::Read)?;
            let mut bytes = vec![0; command.data.len];
            command.data.read(&self.shared.memory.view, &mut bytes);
            Some((place.cid(), bytes))
        };
        self.places.borrow().iter().filter_map(reads).collect()
    }

    /// Whether such data is another by now, and its read is still in flight.
    pub(super) fn has_other_data(&self, before: &[(u16, Vec<u8>)]) -> bool {
        let now = self.data_of_reads();
        let is_other = |(cid, bytes): &(u16, Vec<u8>)| {
            now.iter().any(|(other, now)| other == cid && now != bytes)
        };
        before.iter().any(is_other)
    }
}

fn new_rings(shared: &Shared, qid: u16) -> Rings {
    Rings::new(&shared.memory.view, qid, shared.plan.entries, pair(qid))
}
