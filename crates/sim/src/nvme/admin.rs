//! The admin queue: commands one at a time, and requests for events beside them.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use super::command::{SUCCESS, submission};
use super::memory::{ADMIN, ADMIN_DATA, EVENTS, SHADOWS};
use super::queue::{Queue, Shared};
use super::rings::{Completion, Rings};
use crate::fds::Kept;
use crate::machine::ActorId;
use crate::user::PATIENCE_NS;
use crate::vfio::Gone;

/// Entries of the admin queues, which is more than there are commands at a time.
pub(super) const ENTRIES: u16 = 8;

/// Interval at which a waiting driver checks its connection, nanoseconds.
const LOOK_NS: u64 = 200_000;

/// Opcodes.
const DELETE_SUBMISSION: u8 = 0x00;
const CREATE_SUBMISSION: u8 = 0x01;
const GET_LOG_PAGE: u8 = 0x02;
const DELETE_COMPLETION: u8 = 0x04;
const CREATE_COMPLETION: u8 = 0x05;
const IDENTIFY: u8 = 0x06;
const ABORT: u8 = 0x08;
const SET_FEATURES: u8 = 0x09;
const ASYNC_EVENT: u8 = 0x0c;
const DOORBELL_BUFFERS: u8 = 0x7c;

/// Features.
const WRITE_CACHE: u32 = 0x06;
const NUMBER_OF_QUEUES: u32 = 0x07;
const EVENT_CONFIGURATION: u32 = 0x0b;
const NAMESPACE_NOTICES: u32 = 1 << 8;

/// Log pages.
const ERROR_LOG: u32 = 0x01;
const HEALTH_LOG: u32 = 0x02;
const CHANGED_NAMESPACES: u32 = 0x04;

/// Requests for events that wait at a time.
const REQUESTS: usize = 2;

/// The admin queue pair.
pub(super) struct Admin {
    shared: Rc<Shared>,
    /// The VMM's.
    pub(super) actor: Cell<Option<ActorId>>,
    rings: RefCell<Rings>,
    pub(super) call: RefCell<Option<Rc<Kept>>>,
    is_asleep: Cell<bool>,
    was_interrupted: Cell<bool>,
    /// The identifier of the next command.
    next: Cell<u16>,
    awaited: Cell<Option<u16>>,
    answer: Cell<Option<Completion>>,
    /// Identifiers of requests for events.
    requests: RefCell<BTreeSet<u16>>,
    /// Events that were not looked at.
    events: RefCell<Vec<u32>>,
}

fn new_rings(shared: &Shared) -> Rings {
    Rings::new(&shared.memory.view, 0, ENTRIES, ADMIN)
}

impl Admin {
    pub(super) fn new(shared: &Rc<Shared>) -> Self {
        Admin {
            shared: shared.clone(),
            actor: Cell::new(None),
            rings: RefCell::new(new_rings(shared)),
            call: RefCell::default(),
            is_asleep: Cell::new(false),
            was_interrupted: Cell::new(false),
            next: Cell::new(0),
            awaited: Cell::new(None),
            answer: Cell::new(None),
            requests: RefCell::default(),
            events: RefCell::default(),
        }
    }

    /// Empties the queues, of which the controller knows nothing.
    pub(super) fn renew(&self) {
        self.rings.replace(new_rings(&self.shared));
        self.awaited.set(None);
        self.answer.set(None);
        self.requests.borrow_mut().clear();
        self.events.borrow_mut().clear();
    }

    /// Checks the interrupt, and wakes a sleeping driver.
    pub(super) fn look(&self) {
        if self.is_asleep.get()
            && self.take_call()
            && let Some(actor) = self.actor.get()
        {
            let world = &self.shared.world;
            self.was_interrupted.set(true);
            self.is_asleep.set(false);
            world.machine.wake_at(actor, world.machine.now_ns() + world.random().below(2_000));
        }
    }

    fn take_call(&self) -> bool {
        self.call.borrow().as_ref().is_some_and(|call| call.was_signalled())
    }

    /// Sleeps for `ns` or until an interrupt.
    pub(super) fn sleep(&self, ns: u64) {
        self.is_asleep.set(true);
        self.shared.world.machine.sleep(ns);
        self.is_asleep.set(false);
    }

    fn submit(&self, opcode: u8, nsid: u32, prps: [u64; 2], dwords: [u32; 3]) -> Result<u16, Gone> {
        let cid = self.next.get();
        self.next.set(cid.wrapping_add(1));
        let tail = {
            let mut rings = self.rings.borrow_mut();
            rings.submit(&submission(opcode, cid, nsid, prps, dwords));
            rings.tell_tail().new
        };
        match opcode {
            ASYNC_EVENT => drop(self.requests.borrow_mut().insert(cid)),
            _ => self.awaited.set(Some(cid)),
        }
        self.ring(0, tail)?;
        Ok(cid)
    }

    /// Writes a doorbell.
    fn ring(&self, which: usize, value: u16) -> Result<(), Gone> {
        let Shared { world, plan, .. } = &*self.shared;
        let register = self.rings.borrow().registers()[which];
        let is_answered = world.random().one_in(plan.answered);
        let line = self.shared.line()?;
        line.write(register, &u32::from(value).to_ne_bytes(), is_answered)
    }

    fn reap(&self) -> Result<(), Gone> {
        let mut count = 0;
        loop {
            let completion = self.rings.borrow_mut().reap();
            let Some(completion) = completion else { break };
            count += 1;
            let Completion { cid, sqid, result, status, .. } = completion;
            if sqid == 0 && self.requests.borrow_mut().remove(&cid) {
                if status != SUCCESS {
                    self.shared.fail(&format!("a request for events ended with {status:#x}"));
                }
                self.events.borrow_mut().push(result);
            } else if sqid == 0 && self.awaited.get() == Some(cid) {
                self.awaited.set(None);
                self.answer.set(Some(completion));
            } else {
                self.shared.fail(&format!("{completion:?} is of no admin command under way"));
            }
        }
        let head = self.rings.borrow().head();
        if count == 0 { Ok(()) } else { self.ring(1, head) }
    }

    /// Carries a command out that has to succeed. Returns its result.
    fn carry_out(
        &self,
        opcode: u8,
        nsid: u32,
        prps: [u64; 2],
        dwords: [u32; 3],
    ) -> Result<u32, Gone> {
        let Completion { result, status, .. } = self.answer(opcode, nsid, prps, dwords)?;
        if status != SUCCESS {
            self.shared.fail(&format!("admin command {opcode:#x} ended with {status:#x}"));
        }
        Ok(result)
    }

    /// Carries a command out.
    fn answer(
        &self,
        opcode: u8,
        nsid: u32,
        prps: [u64; 2],
        dwords: [u32; 3],
    ) -> Result<Completion, Gone> {
        let Shared { world, .. } = &*self.shared;
        let until = world.machine.now_ns() + PATIENCE_NS;
        world.coverage.nvme_admin.one();
        self.was_interrupted.set(false);
        self.submit(opcode, nsid, prps, dwords)?;
        let answer = loop {
            self.reap()?;
            if let Some(answer) = self.answer.take() {
                break answer;
            }
            self.wait("the answer", opcode, until)?;
        };
        // The interrupt comes after the completion.
        while !self.was_interrupted.get() && !self.take_call() {
            self.wait("the interrupt", opcode, until)?;
        }
        Ok(answer)
    }

    fn wait(&self, what: &str, opcode: u8, until: u64) -> Result<(), Gone> {
        self.shared.line()?.check()?;
        if self.shared.world.machine.now_ns() > until {
            self.shared.fail(&format!("{what} to admin command {opcode:#x} does not come"));
        }
        self.sleep(LOOK_NS);
        Ok(())
    }

    // ---- commands ------------------------------------------------------------------------------

    fn data<const N: usize>(&self, at: u64) -> [u8; N] {
        self.shared.memory.view.read_array(ADMIN_DATA + at).expect("memory")
    }

    /// Checks what the controller says of itself.
    pub(super) fn identify_controller(&self) -> Result<(), Gone> {
        self.carry_out(IDENTIFY, 0, [ADMIN_DATA, 0], [1, 0, 0])?;
        let serial = crate::daemon::disk_name(self.shared.disk);
        if !self.data::<20>(4).starts_with(serial.as_bytes()) {
            self.shared.fail("the serial number is another one's");
        }
        Ok(())
    }

    /// Learns the size of the namespace.
    pub(super) fn identify_namespace(&self) -> Result<(), Gone> {
        let Shared { plan, model, sectors, .. } = &*self.shared;
        self.carry_out(IDENTIFY, 1, [ADMIN_DATA, 0], [0; 3])?;
        let blocks = u64::from_le_bytes(self.data(0));
        if blocks < u64::from(plan.sectors) || blocks > u64::from(model.borrow().sectors() + 8) {
            self.shared.fail(&format!("the namespace has {blocks} blocks, it says"));
        }
        sectors.set(blocks as u32);
        Ok(())
    }

    /// Has events reported, from now on.
    pub(super) fn ask_for_events(&self) -> Result<(), Gone> {
        let dwords = [EVENT_CONFIGURATION, NAMESPACE_NOTICES, 0];
        self.carry_out(SET_FEATURES, 0, [0; 2], dwords)?;
        self.request_events()
    }

    fn request_events(&self) -> Result<(), Gone> {
        while self.requests.borrow().len() < REQUESTS {
            self.submit(ASYNC_EVENT, 0, [0; 2], [0; 3])?;
        }
        Ok(())
    }

    /// Handles the events that were reported.
    pub(super) fn handle_events(&self) -> Result<(), Gone> {
        self.reap()?;
        loop {
            let event = self.events.borrow_mut().pop();
            let Some(event) = event else { return Ok(()) };
            let (kind, page) = (event & 7, event >> 16 & 0xff);
            // The next event of the page is reported once the page was read.
            self.read_log(page)?;
            match (kind, page) {
                (2, CHANGED_NAMESPACES) => {
                    self.identify_namespace()?;
                    self.shared.world.coverage.nvme_notices.one();
                }
                (0, ERROR_LOG) => self.shared.world.coverage.nvme_errors.one(),
                _ => self.shared.fail(&format!("event {event:#x}")),
            }
            self.request_events()?;
        }
    }

    fn read_log(&self, page: u32) -> Result<(), Gone> {
        let dwords = 512 / 4 - 1;
        self.carry_out(GET_LOG_PAGE, u32::MAX, [ADMIN_DATA, 0], [page | dwords << 16, 0, 0])?;
        Ok(())
    }

    pub(super) fn read_health(&self) -> Result<(), Gone> {
        self.read_log(HEALTH_LOG)
    }

    /// Asks for so many queue pairs.
    pub(super) fn request_queues(&self, count: u16) -> Result<(), Gone> {
        let wanted = u32::from(count - 1) << 16 | u32::from(count - 1);
        let granted = self.carry_out(SET_FEATURES, 0, [0; 2], [NUMBER_OF_QUEUES, wanted, 0])?;
        if granted as u16 != count - 1 || granted >> 16 != u32::from(count - 1) {
            self.shared.fail(&format!("{count} queues were wanted, {granted:#x} are granted"));
        }
        Ok(())
    }

    /// Switches the write cache on or off. Returns whether that succeeded: switching off flushes.
    pub(super) fn set_write_cache(&self, on: bool) -> Result<bool, Gone> {
        let dwords = [WRITE_CACHE, on.into(), 0];
        let Completion { status, .. } = self.answer(SET_FEATURES, 0, [0; 2], dwords)?;
        if status != SUCCESS && (on || !self.shared.world.has_failed()) {
            self.shared.fail(&format!("the write cache, on: {on}, is not set: {status:#x}"));
        }
        Ok(status == SUCCESS)
    }

    pub(super) fn set_doorbell_buffers(&self) -> Result<(), Gone> {
        self.carry_out(DOORBELL_BUFFERS, 0, [SHADOWS, EVENTS], [0; 3]).map(drop)
    }

    /// Creates an I/O queue pair.
    pub(super) fn create(&self, queue: &Queue) -> Result<(), Gone> {
        let (size, [submissions, completions]) = {
            let rings = queue.rings.borrow();
            (rings.size(), rings.places())
        };
        let qid = u32::from(queue.qid);
        let size = u32::from(size - 1) << 16 | qid;
        // Contiguous, and perhaps with interrupts by the vector of the queue's number.
        let interrupts = if self.shared.plan.polls { 0 } else { 2 };
        let with = qid << 16 | interrupts | 1;
        self.carry_out(CREATE_COMPLETION, 0, [completions, 0], [size, with, 0])?;
        self.carry_out(CREATE_SUBMISSION, 0, [submissions, 0], [size, qid << 16 | 1, 0])?;
        Ok(())
    }

    /// Deletes an I/O queue pair. Commands that the controller has taken are answered.
    pub(super) fn delete(&self, qid: u16) -> Result<(), Gone> {
        self.carry_out(DELETE_SUBMISSION, 0, [0; 2], [qid.into(), 0, 0])?;
        self.carry_out(DELETE_COMPLETION, 0, [0; 2], [qid.into(), 0, 0])?;
        Ok(())
    }

    /// Aborts a command, if the controller has not begun it.
    pub(super) fn abort(&self, qid: u16, cid: u16) -> Result<(), Gone> {
        let command = u32::from(cid) << 16 | u32::from(qid);
        self.carry_out(ABORT, 0, [0; 2], [command, 0, 0]).map(drop)
    }
}
