//! A port's registers and the states behind them (AHCI 1.3.1, sections 3.3, 5 and 10).
//!
//! A port lives through resets with commands in flight: they are drained, and until the last of them
//! has come back the port does not say that it is ready again (PxCMD.CR, PxSSTS, GHC.HR), so that
//! nothing is written to memory that the guest has been told is its own. What comes back from an
//! earlier life changes nothing else.

use std::sync::Arc;
use std::time::Instant;

use super::command::Command;
use super::config::DriveInfo;
use super::fis::{
    ERROR_DIAG_PASSED, STATUS_BSY, STATUS_DRQ, STATUS_NO_LINK, STATUS_READY, TaskFile,
};
use super::identify::QueuedError;
use super::regs::*;

/// What is between the port and its drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Link {
    /// No drive, or a COMRESET under way.
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
    /// A fatal error: nothing is fetched until the driver has stopped and started the list.
    pub(crate) fatal: bool,
    /// The software reset bit of the drive's control register is set.
    pub(crate) soft_reset: bool,
    /// The signature FIS waits for PxCMD.FRE.
    pub(crate) signature_due: bool,
    /// Counts lives: a command that was read in an earlier one is not taken.
    pub(crate) life: u64,
    /// Commands read and not begun, in the order of their doorbells.
    fifo: Fifo,
    pub(crate) commands: [Command; SLOTS],
    /// Slots that the drive's loop works on.
    pub(crate) in_flight: u32,
    /// What is in flight belongs to an earlier life.
    pub(crate) draining: bool,
    /// A command that is not queued is in flight.
    busy: bool,
    // The drive's own.
    pub(crate) write_cache: bool,
    pub(crate) queued_error: Option<QueuedError>,
    /// When the oldest doorbell rang that the loop has not answered.
    pub(crate) rung_at: Option<Instant>,
}

/// A command that may begin.
pub(crate) struct Begun {
    pub(crate) slot: u8,
    /// Writes go to stable storage before they are answered.
    pub(crate) write_through: bool,
    /// The drive is in its reset, or a queued command has failed and how has not been read yet: it
    /// takes nothing but what ends that.
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

    /// Writes the bits of `mask`. PxCI is not written here but by the doorbell.
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

    /// PxIS, with the bits that show PxSERR.
    fn interrupts(&self) -> u32 {
        let mut is = self.is;
        if self.serr & SERR_DIAG_X != 0 {
            is |= PXI_PCS;
        }
        if self.serr & SERR_DIAG_N != 0 {
            is |= PXI_PRCS;
        }
        is
    }

    /// Whether the port asks for an interrupt.
    pub(crate) fn is_pending(&self) -> bool {
        self.interrupts() & self.ie != 0
    }

    pub(crate) fn raise(&mut self, interrupts: u32) {
        self.is |= interrupts;
    }

    /// The speed agreed on, PxSCTL.SPD being the limit.
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
            // An error from before (a FIS that could not be written) is over by that.
            (false, true) => (self.running, self.fatal) = (true, false),
            (true, false) => self.stop(),
            _ => {}
        }
    }

    /// PxCMD.ST was cleared: commands are forgotten, those in flight drained (3.3.7, 3.3.14).
    fn stop(&mut self) {
        (self.ci, self.sact, self.ccs) = (0, 0, 0);
        self.forget_commands();
        self.running = self.draining;
    }

    /// Ends the life of all commands.
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

    /// The drive is reset by a COMRESET that begins, or by the link's end.
    pub(crate) fn lose_link(&mut self, link: Link) {
        if self.link == Link::Up {
            // PhyRdy has changed (3.3.12): how a driver learns that its drive was taken away.
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

    /// Brings the link up, if there is a drive, nobody holds it down and nothing is in flight.
    pub(crate) fn come_up(&mut self) {
        let held = matches!(self.sctl & SCTL_DET_MASK, SCTL_DET_COMRESET | SCTL_DET_OFFLINE);
        if self.link == Link::Down && self.drive.is_some() && !held && !self.draining {
            self.link = Link::Up;
            self.serr |= SERR_DIAG_X | SERR_DIAG_N;
            self.sign_on();
        }
    }

    /// The drive shows its signature, after a reset of any kind.
    pub(crate) fn sign_on(&mut self) {
        self.signature = SIG_ATA;
        self.status = STATUS_READY;
        self.error = ERROR_DIAG_PASSED;
        self.signature_due = true;
    }

    /// GHC.HR: all but PxCLB and PxFB is as after a power-on, once the drive has drained.
    pub(crate) fn reset(&mut self) {
        self.stop();
        self.lose_link(Link::Down);
        (self.is, self.ie, self.cmd, self.sctl, self.serr) = (0, 0, 0, 0, 0);
    }

    // ---- commands ------------------------------------------------------------------------------

    /// PxCI was written: the slots that are new.
    pub(crate) fn ring(&mut self, slots: u32) -> u32 {
        // Only a running list has commands issued (3.3.14).
        if self.cmd & CMD_ST == 0 {
            return 0;
        }
        let new = slots & !self.ci;
        self.ci |= new;
        // A slot that is being worked on (a queued command gives its bit back early) is no place
        // for another command.
        let taken = if self.draining { 0 } else { self.in_flight };
        new & !taken & !self.fifo.slots()
    }

    /// A command was read; it waits for its turn.
    pub(crate) fn push(&mut self, slot: u8) {
        self.fifo.push(slot);
    }

    pub(crate) fn has_waiting(&self) -> bool {
        self.fifo.front().is_some()
    }

    /// Begins the next command, if one may. Queued commands run side by side, all others alone.
    pub(crate) fn begin(&mut self) -> Option<Begun> {
        if self.cmd & CMD_ST == 0 || self.fatal || self.draining || self.link != Link::Up {
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

    /// A command has come back from the loop. `false`: it is of an earlier life.
    pub(crate) fn take_back(&mut self, slot: u8) -> bool {
        self.in_flight &= !(1 << slot);
        if self.in_flight == 0 {
            self.busy = false;
        }
        !self.draining
    }

    /// Once the last command of an earlier life has come back, what waited for it goes on.
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

    /// A fatal error: commands in flight are drained, and nothing goes on before the driver has
    /// stopped the list.
    pub(crate) fn fail(&mut self, interrupts: u32) {
        self.raise(interrupts);
        self.fatal = true;
        self.draining = self.in_flight != 0;
    }

    /// What the drive's registers show now.
    pub(crate) fn show(&mut self, task_file: &TaskFile) {
        self.status = task_file.status;
        self.error = task_file.error;
    }

    /// Whether received FISes are written to memory.
    pub(crate) fn receives(&self) -> bool {
        self.cmd & CMD_FRE != 0
    }
}

/// Slots in order. Each is in it at most once, so it never overflows.
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
}
