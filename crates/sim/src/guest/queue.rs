//! A queue's driver in a guest: offers requests, kicks, sleeps until an interrupt, and checks all answers.

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
use crate::random::{Random, range};
use crate::user::PATIENCE_NS;
use crate::world::World;

/// Distance of one queue's rings from the next in guest memory, bytes.
pub(super) const RINGS: u64 = 0x4000;
/// Guest address of the request slots.
pub(super) const SLOTS: u64 = 0x4_0000;
/// Length of a request slot: a page for header, status and table, then data.
const SLOT: u64 = 0x1000 + MOST_SECTORS as u64 * SECTOR as u64 + 0x1000;
/// Offsets in a slot: the status byte or response, the indirect table.
const STATUS: u64 = 0x40;
const TABLE: u64 = 0x100;
const DATA: u64 = 0x1000;
/// Maximum length of a status or response, bytes.
const ANSWER: usize = scsi::ANSWER as usize;

/// Length of guest memory for these queues, bytes.
pub(super) fn memory_len(queues: u16, depth: u16) -> u64 {
    SLOTS + u64::from(queues) * u64::from(depth) * SLOT
}

/// State shared by the queues of a guest.
pub(crate) struct Shared {
    pub(super) world: Rc<World>,
    pub(super) guest: usize,
    pub(super) view: Rc<MemoryView>,
    pub(super) model: RefCell<Model>,
    pub(super) plan: super::Plan,
    /// Requests still to be offered, over all queues.
    pub(super) left: Cell<u64>,
    /// Buffer for data to or from guest memory.
    pub(super) bytes: RefCell<Vec<u8>>,
    /// Time of the VMM's last disturbance that delays requests.
    pub(super) undisturbed_ns: Cell<u64>,
    /// The step since which the write cache is off for certain.
    pub(super) write_through: Cell<Option<u64>>,
    /// Task management is under way.
    pub(super) managing: Cell<bool>,
}

impl Shared {
    /// How long a request has been in flight without disturbance, nanoseconds.
    fn took_ns(&self, request: &Request) -> u64 {
        let now = self.world.machine.now_ns();
        let undisturbed = now.saturating_sub(self.undisturbed_ns.get());
        let all = now - request.offered_ns;
        // Disturbances stretch the time limit at most 20 times.
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
    /// Disabled by the VMM for a while.
    pub(super) disabled: Cell<bool>,
    /// The step of the last kick.
    kicked: Cell<u64>,
    /// Requests in flight, by head.
    requests: RefCell<Vec<Option<Request>>>,
    /// Free slots.
    free: RefCell<Vec<u16>>,
    pub(super) in_flight: Cell<u32>,
    /// The driver offers no requests meanwhile.
    pub(super) paused: Cell<bool>,
    /// The driver sleeps until an interrupt.
    pub(super) asleep: Cell<bool>,
    /// Number of requests offered, modulo the ring's index.
    offered: Cell<u64>,
}

impl Queue {
    /// Request queue `number`.
    pub(super) fn new(shared: Rc<Shared>, number: u16) -> Rc<Self> {
        let plan = &shared.plan;
        let index = plan.device.first_queue() + number;
        let places = u64::from(number) * u64::from(plan.depth);
        let free = (0..plan.depth).map(|n| places as u16 + n).rev().collect();
        Queue::with_places(shared, index, free)
    }

    /// The control queue of virtio-scsi.
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

    /// The actor's main function.
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
                // Let others run, then continue at once.
                world.machine.wait_until(0);
                continue;
            }
            // Let the device answer just before the driver sleeps.
            world.machine.preempt(8);
            if self.driver.borrow_mut().enable_signals() {
                world.coverage.raced.one();
                continue;
            }
            // With room left, think for a while. A driver may also sleep until an answer.
            let more = !self.paused.get() && left.get() > 0;
            let until = match more && (self.in_flight.get() == 0 || random.one_in(2)) {
                true => world.machine.now_ns() + random.below(plan.think_ns + 1),
                false => FOREVER,
            };
            // An interrupt from before the sleep does not end the sleep.
            self.take_call();
            self.asleep.set(true);
            world.machine.wait_until(until);
            self.asleep.set(false);
            if random.one_in(2) {
                self.driver.borrow_mut().suppress_signals();
            }
        }
    }

    /// Wakes the actor.
    pub(super) fn wake(&self) {
        if let Some(actor) = self.actor.get() {
            self.world().machine.wake(actor);
        }
    }

    /// Checks the call eventfd, and wakes a sleeping driver a moment later.
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

    /// Returns whether an interrupt was raised since the last call.
    fn take_call(&self) -> bool {
        self.call.borrow().as_ref().is_some_and(|call| call.was_signalled())
    }

    // ---- offering ------------------------------------------------------------------------------

    /// Offers a batch. Returns `false` if the queue was full.
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

    /// Whether the queue was kicked after `step`.
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
        let (first, count) = range(random, sectors, count);
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
            // The status is the last segment.
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
            // No descriptor is free: take the request back.
            self.forget(&request);
            return false;
        };
        let before = self.requests.borrow_mut()[usize::from(head)].replace(request);
        assert!(before.is_none(), "head {head} is used twice");
        self.in_flight.set(self.in_flight.get() + 1);
        true
    }

    // ---- answers -------------------------------------------------------------------------------

    /// Takes all answers and the interrupt, for a driver that may be asleep. Wakes it if needed, as the
    /// interrupt is consumed.
    pub(super) fn look(&self) {
        let before = self.in_flight.get();
        self.reap();
        if self.in_flight.get() != before {
            self.wake();
        }
    }

    /// Takes all answers.
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

    /// Requests in flight: their slots, and when they were offered.
    pub(super) fn tasks(&self) -> Vec<(u16, u64)> {
        self.requests.borrow().iter().flatten().map(Request::task).collect()
    }

    /// A random request in flight, if there is one.
    pub(super) fn any_task(&self, random: &Random) -> Option<(u16, u64)> {
        let tasks = self.tasks();
        (!tasks.is_empty()).then(|| random.pick(&tasks))
    }

    /// Whether `task` is in flight.
    pub(super) fn has_task(&self, task: (u16, u64)) -> bool {
        self.requests.borrow().iter().flatten().any(|request| request.task() == task)
    }

    /// Whether a request offered at `ns` or before is in flight.
    pub(super) fn has_one_offered_by(&self, ns: u64) -> bool {
        self.requests.borrow().iter().flatten().any(|request| request.offered_ns <= ns)
    }

    /// Fails the run if a request has been in flight for too long.
    pub(crate) fn check_patience(&self) {
        for request in self.requests.borrow().iter().flatten() {
            let took = self.shared.took_ns(request);
            if took > PATIENCE_NS {
                self.fail(&format!("{request:?} is in flight for {took} ns"));
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
        world.count_request(*guest);
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
        if took > PATIENCE_NS {
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
            // Discarded sectors may have their old contents or zeroes.
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

    /// Checks the base of a stopped queue: all requests before it are answered, none from it on.
    pub(super) fn check_stopped(&self, base: u16) {
        self.reap();
        let (offered, in_flight) = (self.driver.borrow().available(), self.in_flight.get());
        if u32::from(offered.wrapping_sub(base)) != in_flight {
            self.fail(&format!(
                "stopped at {base}, when {offered} had been offered and {in_flight} were not answered"
            ));
        }
    }

    /// Empties the rings and forgets all requests in flight.
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

    /// Empties the rings while no request is in flight.
    pub(super) fn empty(&self) {
        // Until the device is set up again.
        self.paused.set(true);
        self.driver.replace(new_driver(&self.shared, self.index));
    }

    /// Forgets a request that will not be answered. It may be carried out in part, or not at all.
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

/// Returns `first`, and the data in up to four segments.
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
