//! The state of a controller whose drives are paused, on its way to another process.
//!
//! [`Restored`] is what the words say, after validation: another process wrote them. What follows from other registers while
//! nothing is in flight (the link, the signature, PxCMD.CR) is not written.

use super::controller::AhciState;
use super::fis::TaskFile;
use super::identify::QueuedError;
use super::port::interrupts;
use super::regs::*;
use crate::saved::{Invalid, Reader, Words};

/// Changes with the meaning of the words. Other numbers are refused.
const FORMAT: u64 = 1;

/// 48 bits of an address of sectors.
const LBA_MASK: u64 = (1 << 48) - 1;

/// A port without a command in flight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SavedPort {
    pub(super) clb: u64,
    pub(super) fb: u64,
    pub(super) is: u32,
    pub(super) ie: u32,
    pub(super) cmd: u32,
    pub(super) ccs: u8,
    pub(super) status: u8,
    pub(super) error: u8,
    pub(super) sctl: u32,
    pub(super) serr: u32,
    pub(super) sact: u32,
    pub(super) ci: u32,
    pub(super) fatal: bool,
    pub(super) soft_reset: bool,
    pub(super) signature_due: bool,
    pub(super) write_cache: bool,
    pub(super) queued_error: Option<QueuedError>,
    /// Slots whose commands have not begun, in the order of their doorbells.
    pub(super) waiting: Vec<u8>,
}

/// The valid state of a controller that another process has paused.
#[derive(Debug)]
pub struct Restored {
    pub(super) interrupts_enabled: bool,
    pub(super) is: u32,
    /// As many as the controller has.
    pub(super) ports: Vec<SavedPort>,
}

/// The bytes of a controller whose drives are paused.
pub(super) fn bytes(state: &AhciState) -> Vec<u8> {
    let mut words = Words::new(FORMAT);
    words.put(state.interrupts_enabled);
    words.put(state.is);
    words.list(state.ports.iter(), |words, port| port.save().put(words));
    words.into_bytes()
}

impl SavedPort {
    fn put(&self, words: &mut Words) {
        words.put(self.clb);
        words.put(self.fb);
        for word in [self.is, self.ie, self.cmd] {
            words.put(word);
        }
        for byte in [self.ccs, self.status, self.error] {
            words.put(byte);
        }
        for word in [self.sctl, self.serr, self.sact, self.ci] {
            words.put(word);
        }
        for flag in [self.fatal, self.soft_reset, self.signature_due, self.write_cache] {
            words.put(flag);
        }
        words.list(self.queued_error.iter(), |words, QueuedError { tag, task_file }| {
            words.put(*tag);
            words.put(task_file.error);
            words.put(task_file.lba);
        });
        words.list(self.waiting.iter(), |words, slot| words.put(*slot));
    }

    fn parse(words: &mut Reader<'_>) -> Result<Self, Invalid> {
        let port = SavedPort {
            clb: words.take()?,
            fb: words.take()?,
            is: words.take()?,
            ie: words.take()?,
            cmd: words.take()?,
            ccs: words.take()?,
            status: words.take()?,
            error: words.take()?,
            sctl: words.take()?,
            serr: words.take()?,
            sact: words.take()?,
            ci: words.take()?,
            fatal: words.flag()?,
            soft_reset: words.flag()?,
            signature_due: words.flag()?,
            write_cache: words.flag()?,
            queued_error: words.list(1, queued_error)?.pop(),
            waiting: words.list(SLOTS, slot)?,
        };
        let beyond = |register: u64, mask: u32| register & u64::from(!mask) & 0xffff_ffff != 0;
        let reserved = port.is & !PXI_EVENTS != 0
            || port.ie & !PXIE_MASK != 0
            || port.cmd & !CMD_RW != 0
            || port.sctl & !SCTL_MASK != 0
            || port.serr & !(SERR_DIAG_N | SERR_DIAG_X) != 0
            || usize::from(port.ccs) >= SLOTS
            || beyond(port.clb, CLB_MASK)
            || beyond(port.fb, FB_MASK);
        if reserved {
            return Err(Invalid("reserved bits of a port's register are set"));
        }
        // A list that is stopped has no commands.
        if port.cmd & CMD_ST == 0 && (port.ci != 0 || port.sact != 0) {
            return Err(Invalid("a port has commands in a list that is stopped"));
        }
        let mut waiting = 0u32;
        for slot in &port.waiting {
            if waiting & 1 << slot != 0 || port.ci & 1 << slot == 0 {
                return Err(Invalid("a command waits twice, or was not issued"));
            }
            waiting |= 1 << slot;
        }
        Ok(port)
    }
}

/// The number of a slot.
fn slot(words: &mut Reader<'_>) -> Result<u8, Invalid> {
    let slot = words.take()?;
    match usize::from(slot) < SLOTS {
        true => Ok(slot),
        false => Err(Invalid("a slot does not exist")),
    }
}

fn queued_error(words: &mut Reader<'_>) -> Result<QueuedError, Invalid> {
    let (tag, error, lba): (_, _, u64) = (slot(words)?, words.take()?, words.take()?);
    match lba <= LBA_MASK {
        true => Ok(QueuedError { tag, task_file: TaskFile::failed(error, lba) }),
        false => Err(Invalid("an error's address has more than 48 bits")),
    }
}

impl Restored {
    /// Parses the state of a controller with so many ports.
    ///
    /// # Errors
    ///
    /// [`Invalid`].
    pub(super) fn parse(bytes: &[u8], ports: usize) -> Result<Self, Invalid> {
        let mut words = Reader::new(bytes, FORMAT)?;
        let (interrupts_enabled, is): (_, u32) = (words.flag()?, words.take()?);
        if u64::from(is) >> ports != 0 {
            return Err(Invalid("a port with an interrupt does not exist"));
        }
        let restored = words.list(MAX_PORTS, SavedPort::parse)?;
        if restored.len() != ports {
            return Err(Invalid("it has another number of ports"));
        }
        words.end()?;
        // A bit of IS is set as long as its port has an interrupt.
        let is_told = |(bit, port): (usize, &SavedPort)| {
            interrupts(port.is, port.serr) & port.ie == 0 || is & 1 << bit != 0
        };
        if !restored.iter().enumerate().all(is_told) {
            return Err(Invalid("a port has an interrupt that the controller does not have"));
        }
        Ok(Restored { interrupts_enabled, is, ports: restored })
    }
}
