//! A port's registers and the states behind them (AHCI 1.3.1, sections 3.3, 5 and 10).
//!
//! A reset does not wait for commands in flight. They are drained, and until the last of them has ended the
//! port does not report ready (PxCMD.CR, PxSSTS, GHC.HR). So nothing is written to memory that the guest
//! believes to be unused. The results of drained commands change nothing else. The time between two resets is
//! called a life.

use std::sync::Arc;
use std::time::Instant;

use super::command::Command;
use super::config::DriveInfo;
use super::fis::{
    ERROR_DIAG_PASSED, STATUS_BSY, STATUS_DRQ, STATUS_NO_LINK, STATUS_READY, TaskFile,
};
use super::identify::QueuedError;
use super::regs::*;
use super::saved::SavedPort;

/// The state of the link between port and drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Link {
    /// No drive, or a COMRESET in progress.
    Down,
    /// Switched off by PxSCTL.
    Offline,
    Up,
}

pub(crate) struct Port {
    pub(crate) drive: Option<Arc<DriveInfo>>,
    // Registers.
    pub(crate) clb: u64,
    pub(crate) fb: u64,
    is: u32,
    ie: u32,
    /// The bits of `CMD_RW`.
    cmd: u32,
    ccs: u8,
    pub(crate) status: u8,
    pub(crate) error: u8,
    signature: u32,
    sctl: u32,
    serr: u32,
    pub(crate) sact: u32,
    pub(crate) ci: u32,
    // States.
    link: Link,
    /// PxCMD.CR: the command list runs.
    running: bool,
    /// A fatal error: no command is fetched until the driver stops and starts the list.
    pub(crate) fatal: bool,
    /// The software reset bit of the drive's control register is set.
    pub(crate) soft_reset: bool,
    /// The signature FIS waits for PxCMD.FRE.
    pub(crate) signature_due: bool,
    /// The number of the current life. Commands read in an earlier life are dropped.
    pub(crate) life: u64,
    /// Commands read and not begun, in doorbell order.
    fifo: Fifo,
    pub(crate) commands: [Command; SLOTS],
    /// Slots that the drive's loop works on.
    pub(crate) in_flight: u32,
    /// The commands in flight belong to an earlier life.
    pub(crate) draining: bool,
    /// A non-queued command is in flight.
    busy: bool,
    /// No command begins.
    pub(crate) is_paused: bool,
    // The drive's settings.
    pub(crate) write_cache: bool,
    pub(crate) queued_error: Option<QueuedError>,
    /// Time of the oldest doorbell that the loop has not handled.
    pub(crate) rung_at: Option<Instant>,
}

/// A command that may begin.
pub(crate) struct Begun {
    pub(crate) slot: u8,
    /// Writes reach stable storage before they are answered.
    pub(crate) write_through: bool,
    /// The drive is in its reset, or a queued command has failed and log 10h is unread. The drive accepts only
    /// commands that end this state.
    pub(crate) halted: bool,
}

impl Port {
    pub(crate) fn new() -> Self {
        Port {
            drive: None,
            clb: 0,
            fb: 0,
            is: 0,
            ie: 0,
            cmd: 0,
            ccs: 0,
            status: STATUS_NO_LINK,
            error: 0,
            signature: SIG_NONE,
            sctl: 0,
            serr: 0,
            sact: 0,
            ci: 0,
            link: Link::Down,
            running: false,
            fatal: false,
            soft_reset: false,
            signature_due: false,
            life: 0,
            fifo: Fifo::default(),
            commands: std::array::from_fn(|_| Command::default()),
            in_flight: 0,
            draining: false,
            busy: false,
            is_paused: false,
            write_cache: false,
            queued_error: None,
            rung_at: None,
        }
    }

    // ---- registers -----------------------------------------------------------------------------

    pub(crate) fn read(&self, register: u64) -> u32 {
        match register {
            PX_CLB => self.clb as u32,
            PX_CLBU => (self.clb >> 32) as u32,
            PX_FB => self.fb as u32,
            PX_FBU => (self.fb >> 32) as u32,
            PX_IS => self.interrupts(),
            PX_IE => self.ie,
            PX_CMD => {
                let fr = if self.cmd & CMD_FRE != 0 { CMD_FR } else { 0 };
                let cr = if self.running { CMD_CR } else { 0 };
                self.cmd | CMD_SUD | CMD_POD | fr | cr | u32::from(self.ccs) << CMD_CCS_SHIFT
            }
            PX_TFD => u32::from(self.error) << 8 | u32::from(self.status),
            PX_SIG => self.signature,
            PX_SSTS => match self.link {
                Link::Down => 0,
                Link::Offline => SSTS_DET_OFFLINE,
                Link::Up => SSTS_ACTIVE | self.generation() << SSTS_SPEED_SHIFT | SSTS_DET_UP,
            },
            PX_SCTL => self.sctl,
            PX_SERR => self.serr,
            PX_SACT => self.sact,
            PX_CI => self.ci,
            _ => 0,
        }
    }

    /// Writes the bits of `mask`. The doorbell, PxCI, is handled elsewhere.
    pub(crate) fn write(&mut self, register: u64, value: u32, mask: u32) {
        let set = value & mask;
        let merge = |old: u32| old & !mask | set;
        match register {
            PX_CLB => {
                self.clb = self.clb & !0xffff_ffff | u64::from(merge(self.clb as u32) & CLB_MASK)
            }
            PX_CLBU => {
                self.clb = self.clb & 0xffff_ffff | u64::from(merge((self.clb >> 32) as u32)) << 32;
            }
            PX_FB => self.fb = self.fb & !0xffff_ffff | u64::from(merge(self.fb as u32) & FB_MASK),
            PX_FBU => {
                self.fb = self.fb & 0xffff_ffff | u64::from(merge((self.fb >> 32) as u32)) << 32;
            }
            PX_IS => self.is &= !set,
            PX_IE => self.ie = merge(self.ie) & PXIE_MASK,
            PX_CMD => self.write_cmd(merge(self.cmd), set & CMD_CLO != 0),
            PX_SCTL => self.write_sctl(merge(self.sctl) & SCTL_MASK),
            PX_SERR => self.serr &= !set,
            // Only a running list has active commands (3.3.13).
            PX_SACT if self.cmd & CMD_ST != 0 => self.sact |= set,
            _ => {}
        }
    }

    /// PxIS, including the bits derived from PxSERR.
    fn interrupts(&self) -> u32 {
        interrupts(self.is, self.serr)
    }

    /// Whether the port requests an interrupt.
    pub(crate) fn is_pending(&self) -> bool {
        self.interrupts() & self.ie != 0
    }

    pub(crate) fn raise(&mut self, interrupts: u32) {
        self.is |= interrupts;
    }

    /// The negotiated speed, limited by PxSCTL.SPD.
    fn generation(&self) -> u32 {
        match self.sctl >> SSTS_SPEED_SHIFT & 0xf {
            limit @ 1..GENERATION => limit,
            _ => GENERATION,
        }
    }

    fn write_cmd(&mut self, new: u32, clo: bool) {
        let old = std::mem::replace(&mut self.cmd, new & CMD_RW);
        if clo {
            self.status &= !(STATUS_BSY | STATUS_DRQ);
        }
        match (old & CMD_ST != 0, new & CMD_ST != 0) {
            // A restart clears an earlier error, such as a FIS that could not be written.
            (false, true) => (self.running, self.fatal) = (true, false),
            (true, false) => self.stop(),
            _ => {}
        }
    }

    /// Handles the clearing of PxCMD.ST: drops queued commands and drains those in flight (3.3.7, 3.3.14).
    fn stop(&mut self) {
        (self.ci, self.sact, self.ccs) = (0, 0, 0);
        self.forget_commands();
        self.running = self.draining;
    }

    /// Ends the life of all commands: drops the queued ones, drains those in flight.
    fn forget_commands(&mut self) {
        self.life += 1;
        self.fifo.clear();
        self.commands.iter_mut().for_each(Command::release);
        self.rung_at = None;
        self.fatal = false;
        self.draining = self.in_flight != 0;
    }

    fn write_sctl(&mut self, new: u32) {
        let old = std::mem::replace(&mut self.sctl, new);
        let det = |sctl: u32| sctl & SCTL_DET_MASK;
        if det(old) == det(new) {
            return;
        }
        match det(new) {
            SCTL_DET_COMRESET => self.lose_link(Link::Down),
            SCTL_DET_OFFLINE => self.lose_link(Link::Offline),
            _ if self.link == Link::Up => {}
            _ => {
                self.link = Link::Down;
                self.come_up();
            }
        }
    }

    // ---- resets --------------------------------------------------------------------------------

    /// Resets the drive at the start of a COMRESET, or when the link goes down.
    pub(crate) fn lose_link(&mut self, link: Link) {
        if self.link == Link::Up {
            // PhyRdy has changed (3.3.12). A driver learns by this bit that the drive was detached.
            self.serr |= SERR_DIAG_N;
        }
        self.link = link;
        self.forget_commands();
        self.reset_drive();
        self.status = STATUS_NO_LINK;
        self.error = 0;
        self.signature = SIG_NONE;
        self.signature_due = false;
    }

    fn reset_drive(&mut self) {
        self.queued_error = None;
        self.soft_reset = false;
        self.write_cache = self.drive.as_ref().is_some_and(|drive| drive.write_cache);
    }

    /// Brings the link up, if a drive is attached, no register holds the link down, and nothing is in flight.
    pub(crate) fn come_up(&mut self) {
        let held = matches!(self.sctl & SCTL_DET_MASK, SCTL_DET_COMRESET | SCTL_DET_OFFLINE);
        if self.link == Link::Down && self.drive.is_some() && !held && !self.draining {
            self.link = Link::Up;
            self.serr |= SERR_DIAG_X | SERR_DIAG_N;
            self.sign_on();
        }
    }

    /// Shows the drive's signature after any reset.
    pub(crate) fn sign_on(&mut self) {
        self.signature = SIG_ATA;
        self.status = STATUS_READY;
        self.error = ERROR_DIAG_PASSED;
        self.signature_due = true;
    }

    /// GHC.HR: restores all registers except PxCLB and PxFB to their power-on values, once the drive is drained.
    pub(crate) fn reset(&mut self) {
        self.stop();
        self.lose_link(Link::Down);
        (self.is, self.ie, self.cmd, self.sctl, self.serr) = (0, 0, 0, 0, 0);
    }

    // ---- handover ------------------------------------------------------------------------------

    /// The state without a command in flight.
    pub(super) fn save(&self) -> SavedPort {
        SavedPort {
            clb: self.clb,
            fb: self.fb,
            is: self.is,
            ie: self.ie,
            cmd: self.cmd,
            ccs: self.ccs,
            status: self.status,
            error: self.error,
            sctl: self.sctl,
            serr: self.serr,
            sact: self.sact,
            ci: self.ci,
            fatal: self.fatal,
            soft_reset: self.soft_reset,
            signature_due: self.signature_due,
            write_cache: self.write_cache,
            queued_error: self.queued_error,
            waiting: self.fifo.iter().collect(),
        }
    }

    /// Goes on with the state of another controller's port. Its waiting commands are still to be read.
    pub(super) fn restore(&mut self, saved: &SavedPort) {
        self.forget_commands();
        let det = saved.sctl & SCTL_DET_MASK;
        (self.link, self.signature) = match det {
            SCTL_DET_COMRESET => (Link::Down, SIG_NONE),
            SCTL_DET_OFFLINE => (Link::Offline, SIG_NONE),
            _ if self.drive.is_none() => (Link::Down, SIG_NONE),
            _ => (Link::Up, SIG_ATA),
        };
        (self.clb, self.fb, self.is, self.ie) = (saved.clb, saved.fb, saved.is, saved.ie);
        (self.cmd, self.running, self.ccs) = (saved.cmd, saved.cmd & CMD_ST != 0, saved.ccs);
        (self.status, self.error) = (saved.status, saved.error);
        (self.sctl, self.serr) = (saved.sctl, saved.serr);
        (self.sact, self.ci) = (saved.sact, saved.ci);
        (self.fatal, self.soft_reset) = (saved.fatal, saved.soft_reset);
        (self.signature_due, self.write_cache) = (saved.signature_due, saved.write_cache);
        self.queued_error = saved.queued_error;
    }

    // ---- commands ------------------------------------------------------------------------------

    /// Handles a write to PxCI. Returns the new slots.
    pub(crate) fn ring(&mut self, slots: u32) -> u32 {
        // Only a running list accepts commands (3.3.14).
        if self.cmd & CMD_ST == 0 {
            return 0;
        }
        let new = slots & !self.ci;
        self.ci |= new;
        // Skip slots in flight. A queued command clears its bit before it has ended.
        let taken = if self.draining { 0 } else { self.in_flight };
        new & !taken & !self.fifo.slots()
    }

    /// Queues a command that was read.
    pub(crate) fn push(&mut self, slot: u8) {
        self.fifo.push(slot);
    }

    pub(crate) fn has_waiting(&self) -> bool {
        self.fifo.front().is_some()
    }

    /// Takes the next command, if it may begin. Queued commands run in parallel, all others alone.
    pub(crate) fn begin(&mut self) -> Option<Begun> {
        if self.is_paused
            || self.cmd & CMD_ST == 0
            || self.fatal
            || self.draining
            || self.link != Link::Up
        {
            return None;
        }
        let slot = self.fifo.front()?;
        let action = self.commands[usize::from(slot)].action;
        if action.is_queued() {
            if self.busy {
                return None;
            }
            self.ci &= !(1 << slot);
        } else {
            if self.in_flight != 0 {
                return None;
            }
            self.busy = true;
            self.status |= STATUS_BSY;
        }
        self.fifo.pop();
        self.in_flight |= 1 << slot;
        self.ccs = slot;
        let halted = (self.queued_error.is_some() || self.soft_reset) && !action.ends_halt();
        Some(Begun { slot, write_through: !self.write_cache, halted })
    }

    /// Ends a command on the loop. Returns `false` if it belongs to an earlier life.
    pub(crate) fn take_back(&mut self, slot: u8) -> bool {
        self.in_flight &= !(1 << slot);
        if self.in_flight == 0 {
            self.busy = false;
        }
        !self.draining
    }

    /// Ends the drain, once the last command of an earlier life has ended.
    pub(crate) fn end_drain(&mut self) {
        if self.draining && self.in_flight == 0 {
            self.draining = false;
            self.busy = false;
            if self.cmd & CMD_ST == 0 {
                self.running = false;
            }
            if self.link == Link::Up {
                self.status &= !STATUS_BSY;
            }
            self.come_up();
        }
    }

    /// Handles a fatal error: drains commands in flight. No command begins before the driver has stopped the list.
    pub(crate) fn fail(&mut self, interrupts: u32) {
        self.raise(interrupts);
        self.fatal = true;
        self.draining = self.in_flight != 0;
    }

    /// Copies a task file to the port's registers.
    pub(crate) fn show(&mut self, task_file: &TaskFile) {
        self.status = task_file.status;
        self.error = task_file.error;
    }

    /// Whether received FISes are written to memory.
    pub(crate) fn receives(&self) -> bool {
        self.cmd & CMD_FRE != 0
    }
}

/// PxIS, as it reads: these bits, and those that are derived from PxSERR.
pub(super) fn interrupts(mut is: u32, serr: u32) -> u32 {
    if serr & SERR_DIAG_X != 0 {
        is |= PXI_PCS;
    }
    if serr & SERR_DIAG_N != 0 {
        is |= PXI_PRCS;
    }
    is
}

/// A queue of slots. Each slot is in it at most once, so it cannot overflow.
#[derive(Debug, Default)]
struct Fifo {
    slots: [u8; SLOTS],
    first: usize,
    len: usize,
    members: u32,
}

impl Fifo {
    fn push(&mut self, slot: u8) {
        debug_assert!(self.members & 1 << slot == 0 && self.len < SLOTS);
        self.slots[(self.first + self.len) % SLOTS] = slot;
        self.len += 1;
        self.members |= 1 << slot;
    }

    fn front(&self) -> Option<u8> {
        (self.len > 0).then(|| self.slots[self.first])
    }

    fn pop(&mut self) {
        if let Some(slot) = self.front() {
            self.members &= !(1 << slot);
            self.first = (self.first + 1) % SLOTS;
            self.len -= 1;
        }
    }

    fn clear(&mut self) {
        (self.len, self.members) = (0, 0);
    }

    fn slots(&self) -> u32 {
        self.members
    }

    /// The slots in their order.
    fn iter(&self) -> impl Iterator<Item = u8> {
        (0..self.len).map(|nth| self.slots[(self.first + nth) % SLOTS])
    }
}
