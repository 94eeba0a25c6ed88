//! The controller's registers, doorbells and interrupt line, for any thread.
//!
//! There are three kinds of locks: a port's doorbell (held while commands are read), the registers (held for a
//! few instructions), and a loop's inbox (in [`BottomHalf::schedule`]). They are taken in this order, at most
//! one of each kind. No lock is held while a request is submitted or the line's callback runs.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use event_loop::sync::lock;
use event_loop::{BottomHalf, Counter};
use guest_memory::GuestMemory;

use super::command::{Command, Source};
use super::config::{AhciError, DriveInfo};
use super::line::Line;
use super::port::{Link, Port};
use super::probes;
use super::regs::*;
use super::saved::{self, Restored};
use crate::saved::Invalid;
use trace::trace;

/// Counters of a controller. Readable from any thread.
#[derive(Debug, Default)]
pub struct AhciStats {
    /// Commands announced by doorbells.
    pub commands: Counter,
    /// Times the interrupt line was raised.
    pub interrupts: Counter,
    /// Batches of answers published. Each causes at most one interrupt.
    pub batches: Counter,
    /// The longest time from a doorbell to the loop taking its commands, nanoseconds.
    pub longest_wait_ns: Counter,
}

/// An AHCI controller (AHCI 1.3.1): registers and interrupt line.
///
/// [`Drive`](super::Drive)s do their work on loops.
///
/// Any thread may read and write registers: a vCPU's thread that holds the machine lock, or a loop's thread. A
/// write of a doorbell reads the commands on the calling thread and hands them over to the loop.
pub struct Ahci {
    state: Mutex<AhciState>,
    doorbells: Vec<Mutex<Doorbell>>,
    line: Line,
    /// Sends a message-signalled interrupt.
    message: Box<dyn Fn() + Send + Sync>,
    stats: AhciStats,
}

pub(crate) struct AhciState {
    /// GHC.IE.
    pub(super) interrupts_enabled: bool,
    /// GHC.HR: a reset is waiting for drives to drain.
    resetting: bool,
    /// IS: a bit per port.
    pub(super) is: u32,
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) ports: Vec<Port>,
}

/// State of a port's doorbell, shared by the threads that write it.
#[derive(Default)]
struct Doorbell {
    /// Wakes the port's loop.
    bell: Option<BottomHalf>,
    /// Buffers that commands are read into.
    commands: [Command; SLOTS],
}

impl Ahci {
    /// Returns a controller with `ports` ports on guest memory, without drives.
    ///
    /// There are 1 to 32 ports, numbered from 0.
    ///
    /// `line` is called with each new level of the interrupt line, one call at a time and in order, by any thread.
    /// No lock is held during the call: `line` may take the machine lock, and may read and write registers.
    ///
    /// If the level changes while `line` runs on another thread, that thread calls `line` again. The register
    /// access that caused the change may have returned before.
    ///
    /// # Errors
    ///
    /// [`AhciError::Ports`].
    pub fn new(
        ports: usize,
        memory: Arc<GuestMemory>,
        line: impl Fn(bool) + Send + Sync + 'static,
    ) -> Result<Arc<Self>, AhciError> {
        Self::with_messages(ports, memory, line, || {})
    }

    /// Returns a controller with `ports` ports that also sends messages.
    ///
    /// `message` is called for each message-signalled interrupt (AHCI 1.3.1, section 10.6). There is one when a bit of
    /// IS becomes set, and when bits of IS remain set after others were cleared. There is also one when GHC.IE becomes
    /// set while a bit of IS is set.
    /// Otherwise like [`new`](Self::new).
    ///
    /// `message` is called without a lock, by any thread, perhaps by several at a time.
    ///
    /// # Errors
    ///
    /// [`AhciError::Ports`].
    pub fn with_messages(
        ports: usize,
        memory: Arc<GuestMemory>,
        line: impl Fn(bool) + Send + Sync + 'static,
        message: impl Fn() + Send + Sync + 'static,
    ) -> Result<Arc<Self>, AhciError> {
        if !(1..=MAX_PORTS).contains(&ports) {
            return Err(AhciError::Ports(ports));
        }
        Ok(Arc::new(Ahci {
            state: Mutex::new(AhciState {
                interrupts_enabled: false,
                resetting: false,
                is: 0,
                memory,
                ports: std::iter::repeat_with(Port::new).take(ports).collect(),
            }),
            doorbells: std::iter::repeat_with(Mutex::default).take(ports).collect(),
            line: Line::new(line),
            message: Box::new(message),
            stats: AhciStats::default(),
        }))
    }

    /// Returns the controller's counters.
    pub fn stats(&self) -> &AhciStats {
        &self.stats
    }

    /// Replaces the guest's memory. Commands in flight finish in the old memory.
    pub fn set_memory(&self, memory: Arc<GuestMemory>) {
        lock(&self.state).memory = memory;
    }

    /// Resets the controller as GHC.HR does (AHCI 1.3.1, section 10.4.3).
    ///
    /// For a reset of the PCI function or the end of the guest. Commands in flight are drained.
    pub fn reset(&self) {
        self.with_state(AhciState::reset);
    }

    /// Returns the state for [`check`](Self::check) of another process.
    ///
    /// All drives must be [paused](super::Drive::pause).
    pub fn save(&self) -> Vec<u8> {
        saved::bytes(&lock(&self.state))
    }

    /// Parses the state of another process' controller, for [`restore`](Self::restore).
    ///
    /// # Errors
    ///
    /// [`Invalid`].
    pub fn check(&self, state: &[u8]) -> Result<Restored, Invalid> {
        Restored::parse(state, self.doorbells.len())
    }

    /// Continues with the state of another controller.
    ///
    /// The memory was set before, and the drives have begun nothing. The interrupt may be signalled once more.
    pub fn restore(&self, restored: &Restored) {
        self.with_state(|state| {
            state.interrupts_enabled = restored.interrupts_enabled;
            state.is = restored.is;
            for (port, saved) in state.ports.iter_mut().zip(&restored.ports) {
                port.restore(saved);
            }
        });
        for (port, saved) in restored.ports.iter().enumerate() {
            self.read_again(port, &saved.waiting);
        }
    }

    /// Reads commands that wait to begin, and queues them in this order.
    fn read_again(&self, port: usize, waiting: &[u8]) {
        let Some(doorbell) = self.doorbells.get(port) else { return };
        let mut doorbell = lock(doorbell);
        let Doorbell { bell, commands } = &mut *doorbell;
        let order = lock(&self.state)
            .order_of(port, |_| waiting.iter().fold(0, |slots, slot| slots | 1 << slot));
        let Some(order) = order else { return };
        let source = Source { memory: &order.memory, clb: order.clb, drive: &order.drive };
        for slot in waiting {
            commands[usize::from(*slot)].parse(&source, *slot);
        }
        let queued = lock(&self.state).take_order(port, &order, waiting.iter().copied(), commands);
        if queued && let Some(bell) = bell {
            bell.schedule();
        }
    }

    /// Reads `size` bytes, 1 to 8, at `offset` of the register BAR.
    ///
    /// Offsets without a register read as 0.
    pub fn mmio_read(&self, offset: u64, size: usize) -> u64 {
        let state = lock(&self.state);
        let mut value = 0;
        for piece in pieces(offset, size) {
            let register = state.read(piece.register);
            let bytes = u64::from((register & piece.mask) >> piece.shift);
            value |= bytes << (8 * piece.bytes_before);
        }
        value
    }

    /// Writes `value`, of `size` bytes, at byte `offset` of the register BAR.
    ///
    /// `size` is 1 to 8. Offsets without a register ignore the write.
    pub fn mmio_write(&self, offset: u64, size: usize, value: u64) {
        for piece in pieces(offset, size) {
            let value = (value >> (8 * piece.bytes_before)) << piece.shift;
            self.write_register(piece.register, value as u32, piece.mask);
        }
    }

    fn write_register(&self, register: u64, value: u32, mask: u32) {
        if let Some((port, offset)) = port_register(register) {
            trace!(probes::ahci_port_write(self.trace_id(), port as u64, offset, value & mask));
            if offset == PX_CI {
                return self.ring(port, value & mask);
            }
        }
        let waiting = self.with_state(|state| {
            state.write(register, value, mask);
            state.has_waiting(register)
        });
        if let Some(port) = waiting {
            self.schedule(port);
        }
    }

    /// Identifies this controller in trace events: an address.
    pub(crate) fn trace_id(&self) -> u64 {
        std::ptr::from_ref(self).addr() as u64
    }

    /// Handles a doorbell: reads the new commands of `slots` and hands them over to the port's loop.
    fn ring(&self, port: usize, slots: u32) {
        let Some(doorbell) = self.doorbells.get(port) else { return };
        let mut doorbell = lock(doorbell);
        let Doorbell { bell, commands } = &mut *doorbell;
        let Some(order) = lock(&self.state).order(port, slots) else { return };
        // Without the lock of the registers, as a hostile list may be long.
        let source = Source { memory: &order.memory, clb: order.clb, drive: &order.drive };
        for slot in bits(order.slots) {
            commands[usize::from(slot)].parse(&source, slot);
        }
        if lock(&self.state).take_order(port, &order, bits(order.slots), commands) {
            self.stats.commands.add_from_any_thread(order.slots.count_ones().into());
            if let Some(bell) = bell {
                bell.schedule();
            }
        }
    }

    /// Wakes a port's loop to begin commands.
    fn schedule(&self, port: usize) {
        if let Some(doorbell) = self.doorbells.get(port)
            && let Some(bell) = &lock(doorbell).bell
        {
            bell.schedule();
        }
    }

    /// Runs `f` on the registers, then updates the interrupt line.
    pub(crate) fn with_state<R>(&self, f: impl FnOnce(&mut AhciState) -> R) -> R {
        let (result, changed, is_message) = {
            let mut state = lock(&self.state);
            let (before, is, enabled) = (state.level(), state.is, state.interrupts_enabled);
            let result = f(&mut state);
            let kept = state.is;
            state.update_is();
            let level = state.level();
            // A bit set between the driver's read and clear of IS needs a new message.
            let is_new = state.is != kept || kept != is || !enabled;
            (result, level != before, level && is_new)
        };
        if changed {
            self.update_line();
        }
        if is_message {
            (self.message)();
        }
        result
    }

    pub(crate) fn set_bell(&self, port: usize, bell: Option<BottomHalf>) {
        if let Some(doorbell) = self.doorbells.get(port) {
            lock(doorbell).bell = bell;
        }
    }

    fn update_line(&self) {
        self.line.update(|| lock(&self.state).level(), &self.stats.interrupts);
    }
}

impl std::fmt::Debug for Ahci {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ahci({} ports)", self.doorbells.len())
    }
}

/// The commands to be read for a doorbell.
struct Order {
    slots: u32,
    life: u64,
    clb: u64,
    memory: Arc<GuestMemory>,
    drive: Arc<DriveInfo>,
}

impl AhciState {
    fn read(&self, register: u64) -> u32 {
        if let Some((port, register)) = port_register(register) {
            return self.ports.get(port).map_or(0, |port| port.read(register));
        }
        match register {
            CAP => {
                let ports = self.ports.len() as u32 - 1;
                CAP_S64A | CAP_SNCQ | CAP_SCLO | CAP_ISS_GEN3 | CAP_SAM | CAP_NCS_32 | ports
            }
            GHC => {
                let ie = if self.interrupts_enabled { GHC_IE } else { 0 };
                let hr = if self.resetting { GHC_HR } else { 0 };
                GHC_AE | ie | hr
            }
            IS => self.is,
            PI => u32::MAX >> (MAX_PORTS - self.ports.len()),
            VS => VERSION_1_3,
            _ => 0,
        }
    }

    fn write(&mut self, register: u64, value: u32, mask: u32) {
        if self.resetting {
            return;
        }
        let set = value & mask;
        if let Some((port, register)) = port_register(register) {
            if let Some(port) = self.ports.get_mut(port) {
                port.write(register, value, mask);
                if port.post_signature(&self.memory).is_err() {
                    port.fail(PXI_HBFS);
                }
            }
            return;
        }
        match register {
            GHC if set & GHC_HR != 0 => self.reset(),
            GHC if mask & GHC_IE != 0 => self.interrupts_enabled = set & GHC_IE != 0,
            IS => self.is &= !set,
            _ => {}
        }
    }

    /// The port of this PxSCTL register, if commands are waiting for its link.
    fn has_waiting(&self, register: u64) -> Option<usize> {
        let (port, PX_SCTL) = port_register(register)? else { return None };
        self.ports.get(port)?.has_waiting().then_some(port)
    }

    /// GHC.HR (section 10.4.3).
    fn reset(&mut self) {
        (self.interrupts_enabled, self.is, self.resetting) = (false, 0, true);
        self.ports.iter_mut().for_each(Port::reset);
        self.end_reset();
    }

    /// Ends a reset once all drives are drained.
    pub(crate) fn end_reset(&mut self) {
        if self.resetting && self.ports.iter().all(|port| !port.draining) {
            self.resetting = false;
            self.ports.iter_mut().for_each(Port::come_up);
        }
    }

    /// Sets the bits of IS for ports with an interrupt. A bit stays set until cleared (section 3.1.3).
    fn update_is(&mut self) {
        for (bit, port) in self.ports.iter().enumerate() {
            if port.is_pending() {
                self.is |= 1 << bit;
            }
        }
    }

    fn level(&self) -> bool {
        self.interrupts_enabled && self.is != 0
    }

    /// First half of a doorbell: returns what is to be read.
    fn order(&mut self, port: usize, slots: u32) -> Option<Order> {
        if self.resetting {
            return None;
        }
        self.order_of(port, |port| port.ring(slots))
    }

    /// Returns the order to fetch the commands of these slots. `None`: no slots, or no drive.
    fn order_of(&mut self, port: usize, slots: impl FnOnce(&mut Port) -> u32) -> Option<Order> {
        let port = self.ports.get_mut(port)?;
        let drive = port.drive.clone()?;
        let slots = slots(port);
        (slots != 0).then(|| Order {
            slots,
            life: port.life,
            clb: port.clb,
            memory: Arc::clone(&self.memory),
            drive,
        })
    }

    /// Second half: queues the commands read, unless the port was reset meanwhile.
    fn take_order(
        &mut self,
        port: usize,
        order: &Order,
        slots: impl Iterator<Item = u8>,
        commands: &mut [Command],
    ) -> bool {
        let Some(port) = self.ports.get_mut(port) else { return false };
        if port.life != order.life {
            commands.iter_mut().for_each(Command::release);
            return false;
        }
        for slot in slots {
            let at = usize::from(slot);
            std::mem::swap(&mut port.commands[at], &mut commands[at]);
            port.push(slot);
        }
        port.rung_at.get_or_insert_with(Instant::now);
        true
    }

    /// Attaches or detaches a drive. Commands in flight are drained.
    pub(crate) fn set_drive(&mut self, port: usize, drive: Option<Arc<DriveInfo>>) {
        if let Some(port) = self.ports.get_mut(port) {
            port.drive = drive;
            port.lose_link(Link::Down);
            port.come_up();
        }
    }
}

/// The port of a register, and the register's offset in the port.
fn port_register(register: u64) -> Option<(usize, u64)> {
    let at = register.checked_sub(PORTS_AT)?;
    Some(((at / PORT_SIZE) as usize, at % PORT_SIZE))
}

/// The indices of the set bits, from the lowest.
fn bits(mut set: u32) -> impl Iterator<Item = u8> {
    std::iter::from_fn(move || {
        let bit = set.trailing_zeros();
        (set != 0).then(|| {
            set &= set - 1;
            bit as u8
        })
    })
}

/// The part of an access within one register.
struct Piece {
    register: u64,
    /// The accessed bits of the register, and their distance from bit 0.
    mask: u32,
    shift: u32,
    /// Bytes of the access before this part.
    bytes_before: u32,
}

/// Splits an access at register boundaries. An access of 0 or more than 8 bytes, or beyond the BAR, has no
/// parts.
fn pieces(offset: u64, size: usize) -> impl Iterator<Item = Piece> {
    let size = size as u64;
    let fits = (1..=8).contains(&size) && offset < ABAR_SIZE && size <= ABAR_SIZE - offset;
    let end = if fits { offset + size } else { offset };
    let mut at = offset;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let (register, bytes_before) = (at & !3, (at - offset) as u32);
        let (first, last) = (at - register, (end - register).min(4));
        at = register + last;
        let shift = 8 * first as u32;
        let mask = (u32::MAX >> (32 - 8 * (last - first) as u32)) << shift;
        Some(Piece { register, mask, shift, bytes_before })
    })
}
