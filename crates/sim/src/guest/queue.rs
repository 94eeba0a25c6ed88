//! A queue's driver in a guest: offers requests, kicks, sleeps until it is interrupted, and checks all
//! that it gets.

use std::cell::{Cell, RefCell};

use std::rc::Rc;

use guest_memory::MemoryView;
use queue::Segment;
use queue::driver::Driver;

use super::plan::Device;
use super::request::{ENDED, Kind, MOST_SECTORS, Request, UNANSWERED, UNIT_ATTENTION};
use super::{blk, scsi};
use crate::fds::Kept;
use crate::machine::{ActorId, FOREVER};
use crate::model::{self, Model, SECTOR};
use crate::random::Random;
use crate::world::World;

/// Guest addresses: the rings of queue `n` are at `n` times this,
pub(super) const RINGS: u64 = 0x4000;
/// the places of requests begin here,
pub(super) const SLOTS: u64 = 0x4_0000;
/// and are this far from one another: a page for header, status and table, then data.
const SLOT: u64 = 0x1000 + MOST_SECTORS as u64 * SECTOR as u64 + 0x1000;
/// In a place: the status byte or response, the indirect table.
const STATUS: u64 = 0x40;
const TABLE: u64 = 0x100;
const DATA: u64 = 0x1000;
/// Bytes of a status or response, at most.
const ANSWER: usize = scsi::ANSWER as usize;

/// Bytes of memory of a guest with so many queues of such a depth.
pub(super) fn memory_len(queues: u16, depth: u16) -> u64 {
    SLOTS + u64::from(queues) * u64::from(depth) * SLOT
}

/// What the queues of a guest have in common.
pub(crate) struct Shared {
    pub(super) world: Rc<World>,
    pub(super) guest: usize,
    pub(super) view: Rc<MemoryView>,
    pub(super) model: RefCell<Model>,
    pub(super) plan: super::Plan,
    /// Requests that are still to be offered, by all queues.
    pub(super) left: Cell<u64>,
    /// Data on their way to or from memory.
    pub(super) bytes: RefCell<Vec<u8>>,
    /// When the VMM last did something that holds requests up.
    pub(super) undisturbed_ns: Cell<u64>,
    /// The write cache is off for certain, since that step.
    pub(super) write_through: Cell<Option<u64>>,
    /// Task management is under way.
    pub(super) managing: Cell<bool>,
}

impl Shared {
    /// How long a request has been under way, undisturbed, nanoseconds.
    fn took_ns(&self, request: &Request) -> u64 {
        let now = self.world.machine.now_ns();
        let undisturbed = now.saturating_sub(self.undisturbed_ns.get());
        let all = now - request.offered_ns;
        // However often it is disturbed, it comes to an end.
        all.min(undisturbed.max(all / 20))
    }
}

/// A queue.
pub(crate) struct Queue {
    pub(super) shared: Rc<Shared>,
    pub(super) index: u16,
    pub(super) actor: Cell<Option<ActorId>>,
    pub(super) driver: RefCell<Driver>,
    pub(super) kick: RefCell<Option<Rc<Kept>>>,
    pub(super) call: RefCell<Option<Rc<Kept>>>,
    /// By the VMM, for a while.
    pub(super) disabled: Cell<bool>,
    /// The step in which it was last kicked.
    kicked: Cell<u64>,
    /// By head.
    requests: RefCell<Vec<Option<Request>>>,
    /// Places in memory.
    free: RefCell<Vec<u16>>,
    pub(super) in_flight: Cell<u32>,
    /// Nothing is offered meanwhile.
    pub(super) paused: Cell<bool>,
    /// It sleeps until it is interrupted.
    pub(super) asleep: Cell<bool>,
    /// Requests offered, as the ring counts them.
    offered: Cell<u64>,
}

impl Queue {
    /// The one of that number among those for requests.
    pub(super) fn new(shared: Rc<Shared>, number: u16) -> Rc<Self> {
        let plan = &shared.plan;
        let index = plan.device.first_queue() + number;
        let places = u64::from(number) * u64::from(plan.depth);
        let free = (0..plan.depth).map(|n| places as u16 + n).rev().collect();
        Queue::with_places(shared, index, free)
    }

    /// That of virtio-scsi for task management.
    pub(super) fn control(shared: Rc<Shared>) -> Rc<Self> {
        Queue::with_places(shared, 0, Vec::new())
    }

    fn with_places(shared: Rc<Shared>, index: u16, free: Vec<u16>) -> Rc<Self> {
        let plan = &shared.plan;
        let driver = new_driver(&shared, index);
        Rc::new(Queue {
            index,
            actor: Cell::new(None),
            driver: RefCell::new(driver),
            kick: RefCell::default(),
            call: RefCell::default(),
            disabled: Cell::new(false),
            kicked: Cell::new(0),
            requests: RefCell::new((0..plan.queue_size).map(|_| None).collect()),
            free: RefCell::new(free),
            in_flight: Cell::new(0),
            paused: Cell::new(true),
            asleep: Cell::new(false),
            offered: Cell::new(shared.plan.first_index.into()),
            shared,
        })
    }

    fn world(&self) -> &World {
        &self.shared.world
    }

    /// What the actor does.
    pub(super) fn run(&self) {
        let Shared { world, plan, left, .. } = &*self.shared;
        let random = world.random();
        loop {
            self.reap();
            if left.get() == 0 && self.in_flight.get() == 0 {
                return;
            }
            let offered = !self.paused.get() && left.get() > 0 && self.offer_some();
            if offered && random.one_in(4) {
                // Goes on at once.
                world.machine.wait_until(0);
                continue;
            }
            // The device may answer just as the driver is about to sleep.
            world.machine.preempt(8);
            if self.driver.borrow_mut().enable_signals() {
                world.coverage.raced.one();
                continue;
            }
            // With room left: how long until there is more to do. A guest may well have nothing to do
            // until it is answered.
            let more = !self.paused.get() && left.get() > 0;
            let until = match more && (self.in_flight.get() == 0 || random.one_in(2)) {
                true => world.machine.now_ns() + random.below(plan.think_ns + 1),
                false => FOREVER,
            };
            // An interrupt that came before wakes nobody who falls asleep after.
            self.take_call();
            self.asleep.set(true);
            world.machine.wait_until(until);
            self.asleep.set(false);
            if random.one_in(2) {
                self.driver.borrow_mut().suppress_signals();
            }
        }
    }

    /// Has the actor look again.
    pub(super) fn wake(&self) {
        if let Some(actor) = self.actor.get() {
            self.world().machine.wake(actor);
        }
    }

    /// The interrupt line, looked at: wakes a driver that sleeps, a moment later.
    pub(crate) fn look_at_call(&self) {
        if !self.asleep.get() || !self.driver.borrow().has_used() {
            return;
        }
        if self.take_call()
            && let Some(actor) = self.actor.get()
        {
            let world = self.world();
            world.coverage.interrupts.one();
            let delay = world.random().below(2_000);
            world.machine.wake_at(actor, world.machine.now_ns() + delay);
            self.asleep.set(false);
        }
    }

    /// Whether it was interrupted since the last time.
    fn take_call(&self) -> bool {
        let call = self.call.borrow();
        call.as_ref().is_some_and(|call| nix::unistd::read(&***call, &mut [0; 8]).is_ok())
    }

    // ---- offering ------------------------------------------------------------------------------

    /// Offers a batch. `false`: there was no room.
    fn offer_some(&self) -> bool {
        let Shared { world, plan, left, .. } = &*self.shared;
        let random = world.random();
        let batch = random.between(1, u64::from(plan.batch)).min(left.get());
        let mut count = 0;
        while count < batch && self.offer() {
            count += 1;
        }
        if count == 0 {
            world.coverage.full_queues.one();
            return false;
        }
        left.set(left.get() - count);
        let before = self.offered.get();
        self.offered.set(before + count);
        world.coverage.wrapped.add((self.offered.get() >> 16) - (before >> 16));
        if self.driver.borrow_mut().publish() {
            world.coverage.kicks.one();
            self.kick();
        } else {
            world.coverage.suppressed.add(count);
            if random.one_in(plan.spurious_kick) {
                world.coverage.spurious_kicks.one();
                self.kick();
            }
        }
        true
    }

    pub(super) fn kick(&self) {
        let world = self.world();
        let coverage = &world.coverage;
        coverage.disabled_kicks.add(self.disabled.get().into());
        let kick = self.kick.borrow();
        let Some(kick) = kick.as_ref().filter(|_| world.has_daemon()) else {
            return coverage.lost_kicks.one();
        };
        nix::unistd::write(&***kick, &1u64.to_ne_bytes()).expect("an eventfd takes a kick");
        self.kicked.set(world.machine.steps());
        world.poke_queue(self.shared.guest, self.index);
    }

    /// Whether it was kicked after that step.
    pub(super) fn was_kicked_since(&self, step: u64) -> bool {
        self.kicked.get() > step && self.kick.borrow().is_some()
    }

    fn offer(&self) -> bool {
        let Shared { world, view, model, plan, .. } = &*self.shared;
        let random = world.random();
        let Some(slot) = self.free.borrow_mut().pop() else { return false };
        let base = SLOTS + u64::from(slot) * SLOT;
        let kind = Kind::any(random, plan.ranges);
        let mut model = model.borrow_mut();
        let sectors = model.sectors();
        let count = match random.below(16) {
            0 => random.between(1, u64::from(MOST_SECTORS)) as u32,
            1..4 => 8,
            _ => random.between(1, 2) as u32,
        };
        // Some places are hot, so that requests meet.
        let area = if random.one_in(4) { sectors.min(64) } else { sectors };
        let first = random.below(u64::from(area - count.min(area) + 1)) as u32;
        let count = count.min(area);
        let ticket = match kind {
            Kind::Read => Some(model.begin_read(first, count)),
            Kind::Write => Some(model.begin_write(first, count, false)),
            Kind::Zeroes(_) | Kind::Discard => Some(model.begin_write(first, count, true)),
            Kind::Flush => Some(model.begin_flush()),
            _ => None,
        };
        drop(model);
        let data = base + DATA + random.below(8) * 64;
        let parts = match plan.device {
            Device::Blk => blk::parts(kind, first, count),
            Device::Scsi => scsi::parts(random, slot.into(), kind, first, count),
        };
        view.write_bytes(base, &parts.header).expect("memory");
        view.write_bytes(base + STATUS, &[UNANSWERED; ANSWER]).expect("memory");
        view.write_bytes(data, &parts.parameters).expect("memory");
        let (mut to_device, from_device) = (parts.parameters.len() as u32, parts.from_device);
        if kind == Kind::Write {
            let ticket = ticket.as_ref().expect("of the write");
            let mut bytes = self.shared.bytes.borrow_mut();
            bytes.resize(count as usize * SECTOR, 0);
            for (at, sector) in bytes.chunks_exact_mut(SECTOR).enumerate() {
                model::fill(ticket.version, first + at as u32, sector);
            }
            view.write_bytes(data, &bytes).expect("memory");
            to_device = count * SECTOR as u32;
        }
        let header = Segment { addr: base, len: parts.header.len() as u32 };
        let readable = segments(random, header, data, to_device);
        let answer = Segment { addr: base + STATUS, len: plan.device.answer() };
        let mut writable = segments(random, answer, data, from_device);
        if plan.device == Device::Blk {
            // The status is the last.
            writable.rotate_left(1);
        }
        let mut driver = self.driver.borrow_mut();
        let head = match random.one_in(plan.indirect) {
            true => driver.add_indirect(base + TABLE, &readable, &writable).expect("memory"),
            false => driver.add(&readable, &writable),
        };
        drop(driver);
        let request = Request {
            kind,
            ticket,
            slot,
            data,
            writable: from_device,
            fua: parts.fua,
            write_through: match kind {
                Kind::Write => self.shared.write_through.get(),
                _ => None,
            },
            offered_ns: world.machine.now_ns(),
        };
        let Some(head) = head else {
            // No descriptors are left: as if it had never been.
            self.forget(&request);
            return false;
        };
        let before = self.requests.borrow_mut()[usize::from(head)].replace(request);
        assert!(before.is_none(), "head {head} is used twice");
        self.in_flight.set(self.in_flight.get() + 1);
        true
    }

    // ---- answers -------------------------------------------------------------------------------

    /// Takes all answers that there are, for a driver that may sleep: of what it finds here no interrupt
    /// will tell it, as it is gone then.
    pub(super) fn look(&self) {
        let before = self.in_flight.get();
        self.reap();
        if self.in_flight.get() != before {
            self.wake();
        }
    }

    /// Takes all answers that there are.
    pub(super) fn reap(&self) {
        loop {
            let used = self.driver.borrow_mut().reap();
            let Some(used) = used else { return };
            let request = self.requests.borrow_mut()[usize::from(used.head)].take();
            let Some(request) = request else {
                self.fail(&format!("head {} was answered, and is not under way", used.head));
            };
            self.in_flight.set(self.in_flight.get() - 1);
            self.check(&request, used.written);
        }
    }

    /// What is under way: places, and when it was offered.
    pub(super) fn tasks(&self) -> Vec<(u16, u64)> {
        self.requests.borrow().iter().flatten().map(Request::task).collect()
    }

    /// One of these, if there is one.
    pub(super) fn any_task(&self, random: &Random) -> Option<(u16, u64)> {
        let tasks = self.tasks();
        (!tasks.is_empty()).then(|| random.pick(&tasks))
    }

    /// Whether that one is under way.
    pub(super) fn has_task(&self, task: (u16, u64)) -> bool {
        self.requests.borrow().iter().flatten().any(|request| request.task() == task)
    }

    /// Whether a request is under way that was offered by then.
    pub(super) fn has_one_offered_by(&self, ns: u64) -> bool {
        self.requests.borrow().iter().flatten().any(|request| request.offered_ns <= ns)
    }

    /// No request has been under way for too long.
    pub(crate) fn check_patience(&self) {
        for request in self.requests.borrow().iter().flatten() {
            let took = self.shared.took_ns(request);
            if took > self.shared.plan.patience_ns {
                self.fail(&format!("{request:?} has been waiting for {took} ns"));
            }
        }
    }

    fn check(&self, request: &Request, written: u32) {
        let Shared { world, view, model, guest, plan, .. } = &*self.shared;
        let coverage = &world.coverage;
        let base = SLOTS + u64::from(request.slot) * SLOT;
        let mut answer = [0; ANSWER];
        view.read_bytes(base + STATUS, &mut answer).expect("memory");
        let status = match plan.device {
            Device::Blk => answer[0],
            Device::Scsi => scsi::status(request.kind, &answer),
        };
        let now = world.machine.now_ns();
        let took = self.shared.took_ns(request);
        let id = (*guest as u64) << 48 | u64::from(self.index) << 32 | u64::from(request.slot);
        world.machine.note(id ^ u64::from(status) << 24 ^ now << 1);
        coverage.requests.one();
        let of =
            || format!("guest {guest}, queue {}: {request:?} is answered {status}", self.index);
        world.machine.say(of);
        let attention = plan.device == Device::Scsi && status == UNIT_ATTENTION;
        let ended = plan.device == Device::Scsi && status == ENDED;
        if ended && !self.shared.managing.get() {
            self.fail(&format!("{request:?} was ended, and no task management is under way"));
        }
        if !attention && !ended && !request.may_get(status, || world.has_failed()) {
            self.fail(&format!("{request:?} was answered {status}"));
        }
        if took > plan.patience_ns {
            self.fail(&format!("{request:?} took {took} ns"));
        }
        let good = status == 0;
        if good && written != request.writable + plan.device.answer() {
            self.fail(&format!("{request:?}: {written} bytes are said to be written"));
        }
        match request.kind {
            Kind::Read => coverage.reads.one(),
            Kind::Write => coverage.writes.one(),
            Kind::Flush => coverage.flushes.one(),
            Kind::Zeroes(_) => coverage.zeroes.one(),
            Kind::Discard => coverage.discards.one(),
            Kind::GetId => coverage.ids.one(),
            Kind::OutOfRange | Kind::Unknown => coverage.refused.one(),
        }
        if plan.device == Device::Scsi {
            coverage.scsi.one();
        }
        if attention {
            coverage.attentions.one();
        } else if ended {
            coverage.ended.one();
        } else if !good && !matches!(request.kind, Kind::OutOfRange | Kind::Unknown) {
            coverage.failed.one();
        }
        self.free.borrow_mut().push(request.slot);
        let Some(ticket) = &request.ticket else { return };
        let mut model = model.borrow_mut();
        let checked = if request.kind.writes() {
            // What was discarded is there or not.
            let off = request.write_through;
            let stable = request.fua || off.is_some() && off == self.shared.write_through.get();
            model.end_write(ticket, good && request.kind != Kind::Discard, stable);
            Ok(())
        } else if request.kind == Kind::Flush {
            if good {
                model.flushed(ticket);
            }
            Ok(())
        } else if good {
            let mut bytes = self.shared.bytes.borrow_mut();
            bytes.resize(request.len(), 0);
            view.read_bytes(request.data, &mut bytes).expect("memory");
            model.end_read(ticket, Some(&bytes))
        } else {
            model.end_read(ticket, None)
        };
        drop(model);
        if let Err(wrong) = checked {
            self.fail(&format!("{request:?}: {wrong}"));
        }
    }

    /// The device has stopped, with this as the next entry of the available ring: all before it was
    /// answered, nothing from there on was.
    pub(super) fn check_stopped(&self, base: u16) {
        self.reap();
        let (offered, in_flight) = (self.driver.borrow().available(), self.in_flight.get());
        if u32::from(offered.wrapping_sub(base)) != in_flight {
            self.fail(&format!(
                "stopped at {base}, when {offered} had been offered and {in_flight} were not answered"
            ));
        }
    }

    /// Begins anew with empty rings, and what was under way is forgotten.
    pub(super) fn renew(&self) {
        self.reap();
        let lost: Vec<_> = self.requests.borrow_mut().iter_mut().filter_map(Option::take).collect();
        for request in lost {
            self.world().coverage.forgotten.one();
            self.forget(&request);
        }
        self.in_flight.set(0);
        self.empty();
    }

    /// Begins with empty rings, when nothing is under way.
    pub(super) fn empty(&self) {
        // Until the device is set up again, which the driver then knows.
        self.paused.set(true);
        self.driver.replace(new_driver(&self.shared, self.index));
    }

    /// A request that nobody will answer any more: it may have been done, in part or not at all.
    fn forget(&self, request: &Request) {
        self.free.borrow_mut().push(request.slot);
        let Some(ticket) = &request.ticket else { return };
        let mut model = self.shared.model.borrow_mut();
        match request.kind.writes() {
            true => model.end_write(ticket, false, false),
            false => model.end_read(ticket, None).expect("nothing is checked"),
        }
    }

    fn fail(&self, what: &str) -> ! {
        let Shared { guest, world, .. } = &*self.shared;
        world.fail(&format!("guest {guest}, queue {}: {what}", self.index))
    }
}

/// A driver with empty rings.
fn new_driver(shared: &Shared, index: u16) -> Driver {
    let plan = &shared.plan;
    let base = u64::from(index) * RINGS;
    let driver = Driver::new(&shared.view, base, plan.queue_size, plan.event_idx);
    driver.expect("rings in memory").starting_at(plan.first_index)
}

/// A first buffer, and the data in up to four.
fn segments(random: &Random, first: Segment, data: u64, len: u32) -> Vec<Segment> {
    let mut all = vec![first];
    let (mut addr, mut left) = (data, len);
    let pieces = if left > 16 { [1, 1, 1, 2, 4][random.below(5) as usize] } else { 1 };
    for _ in 1..pieces {
        let part = 1 + random.below(u64::from(left) - 1) as u32;
        if part == left || left < 2 {
            break;
        }
        all.push(Segment { addr, len: part });
        (addr, left) = (addr + u64::from(part), left - part);
        if left < 2 {
            break;
        }
    }
    if left > 0 {
        all.push(Segment { addr, len: left });
    }
    all
}
