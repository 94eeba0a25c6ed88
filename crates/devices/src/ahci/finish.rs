//! Completion of commands: received FISes, registers, interrupts (AHCI 1.3.1, sections 5.3 and 6.2).

use guest_memory::{AccessError, GuestMemory};

use super::ata::{Action, Page, Transfer};
use super::command::{Command, HEADER_SIZE};
use super::fis::{
    ERROR_ABRT, PIO_BLOCK, STATUS_BSY, STATUS_ERR, STATUS_READY, STATUS_SDB_MASK, TaskFile,
    set_device_bits,
};
use super::identify::{self, QueuedError};
use super::port::Port;
use super::regs::*;

/// The outcome of the loop's work on a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Good,
    /// The drive refuses the command, or the command failed, with these error bits.
    Failed(u8),
    /// The PRD table describes less memory than the transfer needs: nothing was transferred.
    Overflow,
    /// An address in the command is not in guest memory.
    NotMemory,
    /// Not a frame type that a disk accepts.
    Frame,
}

impl Outcome {
    /// The error bits, 0 for success; -1 if the command did not reach the drive.
    pub(crate) fn error(self) -> i64 {
        match self {
            Outcome::Good => 0,
            Outcome::Failed(error) => error.into(),
            Outcome::Overflow => ERROR_ABRT.into(),
            Outcome::NotMemory | Outcome::Frame => -1,
        }
    }
}

impl Port {
    /// Ends a command of the current life. Returns the bits of queued commands, for
    /// [`finish_queued`](Self::finish_queued).
    pub(crate) fn finish(
        &mut self,
        memory: &GuestMemory,
        slot: u8,
        command: &Command,
        outcome: Outcome,
    ) -> u32 {
        let error = match outcome {
            Outcome::Good => match self.succeed(memory, slot, command) {
                Ok(queued) => return queued,
                Err(AccessError { .. }) => {
                    self.fail(PXI_HBFS);
                    return 0;
                }
            },
            Outcome::Failed(error) => error,
            Outcome::Overflow => {
                self.raise(PXI_OFS);
                ERROR_ABRT
            }
            Outcome::NotMemory => {
                self.fail(PXI_HBFS);
                return 0;
            }
            Outcome::Frame => {
                self.fail(PXI_IFS);
                return 0;
            }
        };
        let task_file = TaskFile::failed(error, command.action.lba());
        let posted = if command.action.is_queued() {
            // Keep the first error: commands refused until the log is read must not replace it.
            self.queued_error.get_or_insert(QueuedError { tag: slot, task_file });
            self.set_device_bits(memory, task_file.status, task_file.error, 0)
        } else {
            // The bit in PxCI stays set: it shows the driver which command failed (6.2.2.1).
            self.receive(memory, RFIS_D2H, &task_file.reg_d2h(true)).map(|()| {
                self.show(&task_file);
                self.raise(PXI_DHRS);
            })
        };
        self.fail(if posted.is_ok() { PXI_TFES } else { PXI_HBFS });
        0
    }

    fn succeed(
        &mut self,
        memory: &GuestMemory,
        slot: u8,
        command: &Command,
    ) -> Result<u32, AccessError> {
        let mut task_file = TaskFile::GOOD;
        match command.action {
            Action::Page { page, .. } => self.send_page(memory, page, command)?,
            Action::SetWriteCache(on) => self.write_cache = on,
            Action::CheckPower => task_file.count = 0xff, // active, or idle
            Action::NativeMax { ext } => {
                let sectors = self.drive.as_ref().map_or(0, |drive| drive.sectors);
                task_file = TaskFile::native_max(sectors, ext);
            }
            Action::Diagnostic => task_file = TaskFile::SIGNATURE,
            Action::Control { reset } => {
                self.control(memory, reset)?;
                self.ci &= !(1 << slot);
                return Ok(0);
            }
            _ => {}
        }
        let mut interrupt = if command.descriptor_interrupt { PXI_DPS } else { 0 };
        if command.action.is_queued() {
            self.raise(interrupt);
            return Ok(1 << slot);
        }
        let bytes = command.action.data_len();
        if bytes > 0 {
            let count = self.clb.wrapping_add(u64::from(slot) * HEADER_SIZE as u64 + 4);
            memory.write_bytes(count, &(bytes as u32).to_le_bytes())?;
        }
        let to_host = matches!(command.action, Action::Read { .. } | Action::Page { .. });
        let is_pio = command.action.transfer() == Transfer::Pio;
        if is_pio && to_host {
            // A PIO read ends with its data. Its status was sent before the data.
            self.receive(memory, RFIS_PIO_SETUP, &task_file.pio_setup_in())?;
            self.raise(interrupt | PXI_PSS);
        } else {
            if is_pio {
                // A write's blocks are in memory already, so only the last PIO Setup FIS is written.
                let is_first = bytes <= u64::from(PIO_BLOCK);
                self.receive(memory, RFIS_PIO_SETUP, &TaskFile::pio_setup_out(is_first))?;
                interrupt |= if is_first { 0 } else { PXI_PSS };
            }
            self.receive(memory, RFIS_D2H, &task_file.reg_d2h(true))?;
            self.raise(interrupt | PXI_DHRS);
        }
        self.show(&task_file);
        self.ci &= !(1 << slot);
        Ok(0)
    }

    /// Reports successful queued commands with one FIS.
    pub(crate) fn finish_queued(&mut self, memory: &GuestMemory, finished: u32) {
        if finished != 0 && self.set_device_bits(memory, STATUS_READY, 0, finished).is_err() {
            self.fail(PXI_HBFS);
        }
    }

    fn set_device_bits(
        &mut self,
        memory: &GuestMemory,
        status: u8,
        error: u8,
        finished: u32,
    ) -> Result<(), AccessError> {
        self.receive(memory, RFIS_SDB, &set_device_bits(status, error, finished))?;
        self.status = self.status & !STATUS_SDB_MASK | status & STATUS_SDB_MASK;
        self.error = error;
        self.sact &= !finished;
        self.raise(PXI_SDBS);
        Ok(())
    }

    /// Writes a page of drive information to the command's data buffer.
    fn send_page(
        &mut self,
        memory: &GuestMemory,
        page: Page,
        command: &Command,
    ) -> Result<(), AccessError> {
        let page = match (page, &self.drive) {
            (Page::Identify, Some(drive)) => identify::identify(drive, self.write_cache),
            (Page::Identify | Page::LogDirectory, _) => identify::log_directory(),
            (Page::QueuedError, _) => identify::queued_error(self.queued_error.take().as_ref()),
        };
        let mut rest = &page[..];
        for segment in &command.segments {
            let (piece, tail) = rest.split_at(rest.len().min(segment.len as usize));
            memory.write_bytes(segment.addr, piece)?;
            rest = tail;
        }
        Ok(())
    }

    /// Handles a write of the device control register: software reset set or cleared.
    fn control(&mut self, memory: &GuestMemory, reset: bool) -> Result<(), AccessError> {
        if reset {
            self.queued_error = None;
            self.status = STATUS_BSY;
        } else if self.soft_reset {
            self.sign_on();
            self.post_signature(memory)?;
        } else {
            self.status &= !STATUS_BSY;
        }
        self.soft_reset = reset;
        Ok(())
    }

    /// Writes the signature FIS, if one is due and the driver receives FISes.
    pub(crate) fn post_signature(&mut self, memory: &GuestMemory) -> Result<(), AccessError> {
        if self.signature_due && self.receives() {
            self.signature_due = false;
            self.receive(memory, RFIS_D2H, &TaskFile::SIGNATURE.reg_d2h(false))?;
        }
        Ok(())
    }

    /// Writes a received FIS to memory, unless the driver does not receive FISes.
    fn receive(&self, memory: &GuestMemory, at: u64, fis: &[u8]) -> Result<(), AccessError> {
        if !self.receives() {
            return Ok(());
        }
        memory.write_bytes(self.fb.wrapping_add(at), fis)
    }
}

/// The error bits of a block request that failed.
pub(crate) fn error_bits(action: &Action) -> u8 {
    match action {
        Action::Read { .. } => super::fis::ERROR_UNC,
        _ => ERROR_ABRT,
    }
}

const _: () = assert!(STATUS_ERR & STATUS_SDB_MASK == STATUS_ERR);
