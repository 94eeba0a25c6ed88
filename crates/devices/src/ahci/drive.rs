//! A drive on its image's loop. It takes commands from the doorbell, sends requests to the block node, and
//! updates registers and interrupt.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use block::node::Channel;
use block::request::{Op, Request, RequestOwner};
use event_loop::{BottomHalf, DeferredCall, EventLoop, IoBufs};
use guest_memory::MemoryView;
use nix::errno::Errno;

use super::ata::{Action, Broken};
use super::command::Command;
use super::config::{AhciError, DriveConfig, DriveInfo};
use super::controller::Ahci;
use super::finish::{Outcome, error_bits};
use super::fis::{ERROR_ABRT, ERROR_IDNF};
use super::port::Begun;
use super::probes;
use super::regs::SLOTS;
use super::trim::{Ranges, read_ranges};
use stats::InFlight as InFlightRequest;
use stats::{Batch, QueueStats};
use trace::trace;

/// Maximum work of one turn, in segments to translate and ranges to discard. It bounds the wait of the loop's
/// other sources (fairness contract). The command that exceeds it is the last of its turn.
const PIECES_PER_TURN: usize = 8192;

/// A drive attached to a port, on the loop that does its I/O.
pub struct Drive {
    event_loop: EventLoop,
    controller: Arc<Ahci>,
    port: usize,
    channel: Rc<dyn Channel>,
    info: Arc<DriveInfo>,
    me: Weak<Drive>,
    bell: RefCell<Option<BottomHalf>>,
    work: RefCell<Work>,
    /// Whether unpublished answers exist, and the publication is deferred.
    queued: Cell<bool>,
    /// The callback of `detach`, called once nothing is in flight.
    detaching: Cell<Option<Box<dyn FnOnce()>>>,
    /// Callbacks of `settle`.
    settling: RefCell<Vec<Settling>>,
    stats: Arc<QueueStats>,
    batch: Batch,
}

/// The slots that a callback of `settle` waits for, and the callback.
type Settling = (u32, Box<dyn FnOnce()>);

/// Preallocated working memory.
struct Work {
    memory: Rc<MemoryView>,
    slots: [InFlight; SLOTS],
    /// Commands begun in this turn.
    begun: Vec<Begun>,
    /// Commands that have ended and are not published.
    done: Vec<(u8, Outcome)>,
    spare_bufs: Vec<IoBufs>,
    ranges: Ranges,
}

#[derive(Default)]
struct InFlight {
    command: Command,
    /// Block requests not yet answered.
    pending: u32,
    outcome: Option<Outcome>,
    /// Loop time at which the command began, nanoseconds.
    started_ns: u64,
}

/// The next step of a command that has begun.
enum CommandStep {
    Done(Outcome),
    Submit {
        op: Op,
        offset: u64,
        len: u64,
        bufs: IoBufs,
    },
    /// Discard the ranges that were read into [`Work`].
    Ranges(usize),
}

impl Drive {
    /// Attaches a drive to a port of `controller`.
    ///
    /// Its requests go to `channel`. Call this on the loop on which `channel` was opened. The loop keeps the
    /// drive until it is [detached](Self::detach), or until the loop stops.
    ///
    /// # Errors
    ///
    /// The port does not exist, or has a drive.
    pub fn attach(
        event_loop: &EventLoop,
        controller: &Arc<Ahci>,
        port: usize,
        channel: Rc<dyn Channel>,
        config: DriveConfig,
    ) -> Result<Rc<Self>, AhciError> {
        let info = Arc::new(DriveInfo::new(config));
        let memory = controller.with_state(|state| {
            let there = state.ports.get(port).ok_or(AhciError::NoSuchPort(port))?;
            if there.drive.is_some() || there.in_flight != 0 {
                return Err(AhciError::PortInUse(port));
            }
            Ok(Arc::clone(&state.memory))
        })?;
        let drive = Rc::new_cyclic(|me| Drive {
            event_loop: event_loop.clone(),
            controller: Arc::clone(controller),
            port,
            channel,
            info: Arc::clone(&info),
            me: me.clone(),
            bell: RefCell::new(None),
            work: RefCell::new(Work {
                memory: MemoryView::new(memory),
                slots: std::array::from_fn(|_| InFlight::default()),
                begun: Vec::with_capacity(SLOTS),
                done: Vec::with_capacity(SLOTS),
                spare_bufs: Vec::with_capacity(SLOTS),
                ranges: Ranges::default(),
            }),
            queued: Cell::new(false),
            detaching: Cell::new(None),
            settling: RefCell::default(),
            stats: Arc::default(),
            batch: Batch::default(),
        });
        let rung = Rc::clone(&drive);
        let bell = event_loop.bottom_half(move || rung.begin_all());
        controller.set_bell(port, Some(bell.clone()));
        drive.bell.replace(Some(bell));
        controller.with_state(|state| state.set_drive(port, Some(info)));
        Ok(drive)
    }

    /// Detaches the drive: takes the link down, and drains commands in flight.
    ///
    /// Then calls `done` once, perhaps before this returns.
    pub fn detach(&self, done: impl FnOnce() + 'static) {
        self.controller.set_bell(self.port, None);
        if let Some(bell) = self.bell.take() {
            self.event_loop.delete_bottom_half(&bell);
        }
        self.controller.with_state(|state| state.set_drive(self.port, None));
        let earlier = self.detaching.take();
        self.detaching.set(Some(Box::new(move || {
            if let Some(earlier) = earlier {
                earlier();
            }
            done();
        })));
        self.finish_detach();
    }

    fn finish_detach(&self) {
        let Some(done) = self.detaching.take() else { return };
        let idle = self
            .controller
            .with_state(|state| state.ports.get(self.port).is_none_or(|port| port.in_flight == 0));
        if idle {
            done();
        } else {
            self.detaching.set(Some(done));
        }
    }

    /// Calls `done` once the commands now in flight have ended.
    ///
    /// The call may come before this returns. From then on the drive does not access memory that the controller
    /// had before its last [change](Ahci::set_memory).
    pub fn settle(&self, done: impl FnOnce() + 'static) {
        let mut work = self.work.borrow_mut();
        let slots = self.controller.with_state(|state| {
            if !Arc::ptr_eq(work.memory.memory(), &state.memory) {
                work.memory = MemoryView::new(Arc::clone(&state.memory));
            }
            state.ports.get(self.port).map_or(0, |port| port.in_flight)
        });
        drop(work);
        if slots == 0 {
            done();
        } else {
            self.settling.borrow_mut().push((slots, Box::new(done)));
        }
    }

    /// Begins no more commands, and calls `done` once those in flight have ended.
    ///
    /// The call may come before this returns. Doorbells are still taken.
    pub fn pause(&self, done: impl FnOnce() + 'static) {
        self.set_paused(true);
        self.settle(done);
    }

    /// Begins commands again.
    pub fn resume(&self) {
        self.set_paused(false);
        self.ring_myself();
    }

    fn set_paused(&self, is_paused: bool) {
        self.controller.with_state(|state| {
            if let Some(port) = state.ports.get_mut(self.port) {
                port.is_paused = is_paused;
            }
        });
    }

    /// Removes `slots` from what callbacks of `settle` wait for, and calls those that are complete.
    fn settled(&self, slots: u32) {
        if self.settling.borrow().is_empty() {
            return;
        }
        let ended: Vec<Settling> = {
            let mut settling = self.settling.borrow_mut();
            settling.iter_mut().for_each(|(waits, _)| *waits &= !slots);
            let (ended, left) = settling.drain(..).partition(|(waits, _)| *waits == 0);
            *settling = left;
            ended
        };
        ended.into_iter().for_each(|(_, done)| done());
    }

    /// Returns the drive's counters.
    pub fn stats(&self) -> &Arc<QueueStats> {
        &self.stats
    }

    /// Commands in flight, by slot.
    pub fn in_flight(&self) -> Vec<InFlightRequest> {
        let work = self.work.borrow();
        let begun = work.slots.iter().enumerate().filter(|(_, place)| place.pending > 0);
        let describe = |(slot, place): (usize, &InFlight)| {
            let action = &place.command.action;
            InFlightRequest {
                id: slot as u64,
                kind: action.kind(),
                lun: None,
                offset: action.trace_offset(),
                len: action.data_len(),
                started_ns: place.started_ns,
            }
        };
        begun.map(describe).collect()
    }

    /// Begins the commands handed over by doorbells.
    fn begin_all(&self) {
        let Some(me) = self.me.upgrade() else { return };
        let me: Rc<dyn RequestOwner> = me;
        let mut begun = {
            let mut work = self.work.borrow_mut();
            self.collect(&mut work);
            std::mem::take(&mut work.begun)
        };
        for Begun { slot, write_through, halted } in begun.drain(..) {
            self.trace_begin(slot);
            let step = self.work.borrow_mut().step(slot, write_through, halted, &self.info);
            match step {
                CommandStep::Done(outcome) => self.answer(slot, outcome),
                CommandStep::Submit { op, offset, len, bufs } => {
                    let request = Request::new(op, offset, len, bufs, &me, slot.into());
                    self.channel.submit(request);
                }
                CommandStep::Ranges(count) => {
                    for nth in 0..count {
                        let (offset, len) = self.work.borrow().ranges.get(nth);
                        let bufs = self.work.borrow_mut().take_bufs();
                        let tag = slot.into();
                        let request = Request::new(Op::Discard, offset, len, bufs, &me, tag);
                        self.channel.submit(request);
                    }
                }
            }
        }
        self.work.borrow_mut().begun = begun;
    }

    /// Takes the commands that may begin from the port.
    fn collect(&self, work: &mut Work) {
        let mut pieces = 0;
        let now_ns = self.event_loop.now_ns();
        let stats = self.controller.stats();
        let more = self.controller.with_state(|state| {
            if !Arc::ptr_eq(work.memory.memory(), &state.memory) {
                work.memory = MemoryView::new(Arc::clone(&state.memory));
            }
            let Some(port) = state.ports.get_mut(self.port) else { return false };
            if let Some(rung_at) = port.rung_at.take() {
                let waited = rung_at.elapsed().as_nanos() as u64;
                stats.longest_wait_ns.set(stats.longest_wait_ns.get().max(waited));
            }
            while pieces < PIECES_PER_TURN {
                let Some(begun) = port.begin() else { break };
                let at = usize::from(begun.slot);
                let place = &mut work.slots[at];
                std::mem::swap(&mut place.command, &mut port.commands[at]);
                (place.pending, place.outcome, place.started_ns) = (1, None, now_ns);
                pieces += place.command.pieces();
                work.begun.push(begun);
            }
            pieces >= PIECES_PER_TURN && port.has_waiting()
        });
        self.stats.taken.add(work.begun.len() as u64);
        if more {
            self.ring_myself();
        }
    }

    #[inline]
    fn trace_begin(&self, slot: u8) {
        let (s, port) = (self.controller.trace_id(), self.port as u64);
        let action = || self.work.borrow().slots[usize::from(slot)].command.action;
        trace!(probes::ahci_cmd_begin(
            s,
            port,
            slot,
            action().trace_op(),
            action().trace_offset(),
            action().data_len(),
        ));
    }

    fn ring_myself(&self) {
        if let Some(bell) = &*self.bell.borrow() {
            bell.schedule();
        }
    }

    /// Ends a command. The driver sees the answer at the end of the section.
    fn answer(&self, slot: u8, outcome: Outcome) {
        let (s, port) = (self.controller.trace_id(), self.port as u64);
        trace!(probes::ahci_cmd_end(s, port, slot, outcome.error()));
        self.count(slot, outcome);
        self.work.borrow_mut().done.push((slot, outcome));
        if !self.queued.get()
            && let Some(me) = self.me.upgrade()
        {
            self.event_loop.defer(&(me as Rc<dyn DeferredCall>));
        }
    }
}

impl Drive {
    /// Counts a command that has ended.
    fn count(&self, slot: u8, outcome: Outcome) {
        let mut work = self.work.borrow_mut();
        let place = &mut work.slots[usize::from(slot)];
        place.pending = 0;
        let (action, started_ns) = (&place.command.action, place.started_ns);
        let (kind, now_ns) = (action.kind(), self.event_loop.now_ns());
        match (outcome, action) {
            (Outcome::Good, _) => {
                self.batch.done(&self.stats, kind, action.data_len(), started_ns, now_ns);
            }
            (_, Action::Refused { .. } | Action::Broken(_)) => {
                self.batch.invalid(&self.stats, kind);
            }
            (
                Outcome::Failed(_) | Outcome::Overflow | Outcome::NotMemory | Outcome::Frame,
                Action::Read { .. }
                | Action::Write { .. }
                | Action::Flush
                | Action::Trim { .. }
                | Action::Page { .. }
                | Action::CheckPower
                | Action::NativeMax { .. }
                | Action::SetWriteCache(_)
                | Action::Diagnostic
                | Action::Nothing
                | Action::Control { .. },
            ) => self.batch.failed(&self.stats, kind, started_ns, now_ns),
        }
    }
}

impl Work {
    /// Decides the next step of a command that has begun.
    fn step(
        &mut self,
        slot: u8,
        write_through: bool,
        halted: bool,
        info: &DriveInfo,
    ) -> CommandStep {
        if halted {
            return CommandStep::Done(Outcome::Failed(ERROR_ABRT));
        }
        let command = &self.slots[usize::from(slot)].command;
        if command.short {
            return CommandStep::Done(Outcome::Overflow);
        }
        let (op, offset, len) = match command.action {
            Action::Read { offset, len, .. } => (Op::Read, offset, len),
            Action::Write { offset, len, fua, .. } => {
                (Op::Write { fua: fua || write_through }, offset, len)
            }
            // The cache is flushed before it is switched off (ATA8-ACS, SET FEATURES).
            Action::Flush | Action::SetWriteCache(false) => (Op::Flush, 0, 0),
            Action::Trim { .. } => return self.trim(slot, info),
            Action::Refused { error, .. } => return CommandStep::Done(Outcome::Failed(error)),
            Action::Broken(Broken::NotMemory) => return CommandStep::Done(Outcome::NotMemory),
            Action::Broken(Broken::Frame) => return CommandStep::Done(Outcome::Frame),
            _ => return CommandStep::Done(Outcome::Good),
        };
        let mut bufs = self.take_bufs();
        let command = &self.slots[usize::from(slot)].command;
        for segment in &command.segments {
            if self.memory.push_iovecs(segment.addr, segment.len as usize, &mut bufs).is_err() {
                self.keep_bufs(bufs);
                return CommandStep::Done(Outcome::NotMemory);
            }
        }
        CommandStep::Submit { op, offset, len, bufs }
    }

    fn trim(&mut self, slot: u8, info: &DriveInfo) -> CommandStep {
        let place = &mut self.slots[usize::from(slot)];
        match read_ranges(&place.command, &self.memory, info, &mut self.ranges) {
            Err(_) => CommandStep::Done(Outcome::NotMemory),
            Ok(false) => CommandStep::Done(Outcome::Failed(ERROR_IDNF)),
            Ok(true) if self.ranges.is_empty() => CommandStep::Done(Outcome::Good),
            Ok(true) => {
                place.pending = self.ranges.len() as u32;
                CommandStep::Ranges(self.ranges.len())
            }
        }
    }

    fn take_bufs(&mut self) -> IoBufs {
        self.spare_bufs.pop().unwrap_or_default()
    }

    fn keep_bufs(&mut self, mut bufs: IoBufs) {
        bufs.clear();
        if self.spare_bufs.len() < self.spare_bufs.capacity() {
            self.spare_bufs.push(bufs);
        }
    }
}

impl RequestOwner for Drive {
    fn complete(&self, tag: u32, result: Result<(), Errno>, bufs: IoBufs) {
        let done = {
            let mut work = self.work.borrow_mut();
            let Some(place) = work.slots.get_mut(tag as usize) else { return };
            if let Err(errno) = result {
                let action = &place.command.action;
                self.stats.node_failed(0, action.kind(), action.trace_offset(), errno);
                place.outcome = Some(Outcome::Failed(error_bits(&place.command.action)));
            }
            place.pending = place.pending.saturating_sub(1);
            let done = place.pending == 0;
            let outcome = place.outcome.unwrap_or(Outcome::Good);
            if place.command.is_ordinary() {
                work.keep_bufs(bufs);
            }
            done.then_some(outcome)
        };
        if let Some(outcome) = done {
            self.answer(tag as u8, outcome);
        }
    }
}

impl DeferredCall for Drive {
    /// Publishes a batch: registers and received FISes, then the line once.
    fn run(&self) {
        let (more, ended) = {
            let mut work = self.work.borrow_mut();
            let Work { done, slots, .. } = &mut *work;
            self.controller.with_state(|state| {
                let memory = Arc::clone(&state.memory);
                let Some(port) = state.ports.get_mut(self.port) else { return (false, 0) };
                let (mut finished, mut ended) = (0, 0);
                for (slot, outcome) in done.drain(..) {
                    ended |= 1 << slot;
                    let command = &mut slots[usize::from(slot)].command;
                    // Report the earlier successes before the failure of a queued command.
                    if outcome != Outcome::Good {
                        port.finish_queued(&memory, std::mem::take(&mut finished));
                    }
                    if port.take_back(slot) {
                        finished |= port.finish(&memory, slot, command, outcome);
                    }
                    command.release();
                }
                port.finish_queued(&memory, finished);
                port.end_drain();
                if port.post_signature(&memory).is_err() {
                    port.fail(super::regs::PXI_HBFS);
                }
                let more = port.has_waiting();
                state.end_reset();
                (more, ended)
            })
        };
        self.controller.stats().batches.add_from_any_thread(1);
        self.batch.publish(&self.stats, false);
        self.settled(ended);
        if more {
            self.ring_myself();
        }
        self.finish_detach();
    }

    fn queued(&self) -> &Cell<bool> {
        &self.queued
    }
}

impl fmt::Debug for Drive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drive").field("port", &self.port).finish_non_exhaustive()
    }
}
