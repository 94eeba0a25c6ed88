//! The driver side of a port, on the thread that acts as a vCPU.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use guest_memory::{GuestMemory, MemoryView};

use super::device::{Controller, Line};
use super::layout::{Command, PortArea};
use super::{ata, reg};

/// Time limit of a command, or of a step of the port's initialisation.
const LIMIT: Duration = Duration::from_secs(60);

/// A failed command: the port's registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    /// PxIS, error bits and all others.
    pub is: u32,
    /// PxTFD: error in bits 15:8, status in bits 7:0.
    pub tfd: u32,
    /// PxCI and PxSACT: commands that have not ended.
    pub unfinished: u32,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Failure { is, tfd, unfinished } = self;
        write!(f, "a command failed: PxIS {is:#x}, PxTFD {tfd:#x}, unfinished {unfinished:#x}")
    }
}

impl std::error::Error for Failure {}

/// A controller's registers, as a driver accesses them.
pub trait Registers {
    /// Reads the 4 bytes at `offset` of the register BAR.
    fn read(&self, offset: u64) -> u32;

    /// Writes the 4 bytes at `offset` of the register BAR.
    fn write(&self, offset: u64, value: u32);
}

impl Registers for Controller {
    fn read(&self, offset: u64) -> u32 {
        self.ahci.mmio_read(offset, 4) as u32
    }

    fn write(&self, offset: u64, value: u32) {
        self.ahci.mmio_write(offset, 4, value.into());
    }
}

/// The driver side of a port, on the thread that acts as a vCPU.
pub struct PortDriver {
    registers: Box<dyn Registers>,
    /// `None`: interrupts come in another way.
    line: Option<Arc<Line>>,
    memory: Rc<MemoryView>,
    port: usize,
    area: PortArea,
    /// Called while waiting. `false`: gives up.
    idle: Box<dyn Fn() -> bool>,
    /// Slots in flight, and those of them with queued commands.
    issued: u32,
    queued: u32,
    interrupts: u64,
}

impl PortDriver {
    /// Returns a driver for port number `port` with its structures in `area`. It calls `idle` while it waits for
    /// registers, such as [`std::thread::yield_now`].
    pub fn new(
        controller: &Controller,
        memory: &Arc<GuestMemory>,
        port: usize,
        area: PortArea,
        idle: impl Fn() + 'static,
    ) -> PortDriver {
        let idle = move || {
            idle();
            true
        };
        let mut driver = PortDriver::over(Box::new(controller.clone()), memory, port, area, idle);
        driver.line = Some(controller.line.clone());
        driver
    }

    /// Returns a driver that reaches the controller by `registers`, without its interrupt line. The driver gives up
    /// waiting for registers when `idle` returns `false`.
    pub fn over(
        registers: Box<dyn Registers>,
        memory: &Arc<GuestMemory>,
        port: usize,
        area: PortArea,
        idle: impl Fn() -> bool + 'static,
    ) -> PortDriver {
        PortDriver {
            registers,
            line: None,
            memory: MemoryView::new(memory.clone()),
            port,
            area,
            idle: Box::new(idle),
            issued: 0,
            queued: 0,
            interrupts: 0,
        }
    }

    /// Brings a port up: [`new`](Self::new), AHCI and interrupts on, [`start`](Self::start).
    ///
    /// # Errors
    ///
    /// The area is not in memory, or the port does not answer.
    pub fn bring_up(
        controller: &Controller,
        memory: &Arc<GuestMemory>,
        port: usize,
        area: PortArea,
    ) -> Result<PortDriver> {
        let mut driver = PortDriver::new(controller, memory, port, area, std::thread::yield_now);
        driver.write_generic(reg::GHC, reg::GHC_AE | reg::GHC_IE);
        driver.start()?;
        Ok(driver)
    }

    /// Goes on with another controller, which has the state of the one before.
    pub fn continue_on(&mut self, controller: &Controller) {
        self.registers = Box::new(controller.clone());
        self.line = Some(controller.line.clone());
    }

    /// Brings the port up: FIS reception, COMRESET, command list, its interrupts.
    ///
    /// # Errors
    ///
    /// The port does not answer.
    pub fn start(&mut self) -> Result<()> {
        self.stop_list()?;
        for (register, value) in [(reg::PX_CLB, self.area.list()), (reg::PX_FB, self.area.rfis())] {
            self.write(register, value as u32);
            self.write(register + 4, (value >> 32) as u32);
        }
        self.write(reg::PX_CMD, reg::CMD_FRE);
        self.comreset()?;
        self.start_list();
        self.write(reg::PX_IE, reg::IE_ALL);
        Ok(())
    }

    /// Resets drive and link.
    ///
    /// # Errors
    ///
    /// The drive does not come up again.
    pub fn comreset(&mut self) -> Result<()> {
        self.write(reg::PX_SCTL, 0x301);
        self.write(reg::PX_SCTL, 0x300);
        self.wait_for("the link", |port| port.read(reg::PX_SSTS) & 0xf == 3)?;
        self.wait_for("the drive", |port| port.read(reg::PX_TFD) & 0x88 == 0)?;
        self.write(reg::PX_SERR, u32::MAX);
        self.write(reg::PX_IS, u32::MAX);
        self.write_generic(reg::IS, 1 << self.port);
        Ok(())
    }

    /// Stops the command list: commands in flight are forgotten.
    ///
    /// # Errors
    ///
    /// The list does not stop.
    pub fn stop_list(&mut self) -> Result<()> {
        let cmd = self.read(reg::PX_CMD);
        self.write(reg::PX_CMD, cmd & !reg::CMD_ST);
        self.wait_for("the list's end", |port| port.read(reg::PX_CMD) & reg::CMD_CR == 0)?;
        (self.issued, self.queued) = (0, 0);
        Ok(())
    }

    /// Starts the command list.
    pub fn start_list(&mut self) {
        let cmd = self.read(reg::PX_CMD);
        self.write(reg::PX_CMD, cmd | reg::CMD_ST);
    }

    /// Recovers from a failed command according to AHCI 1.3.1, 6.2.2.1.
    ///
    /// # Errors
    ///
    /// Those of [`stop_list`](Self::stop_list).
    pub fn recover(&mut self) -> Result<()> {
        self.stop_list()?;
        self.write(reg::PX_SERR, u32::MAX);
        self.write(reg::PX_IS, u32::MAX);
        self.write_generic(reg::IS, 1 << self.port);
        self.start_list();
        Ok(())
    }

    fn wait_for(&self, what: &str, done: impl Fn(&Self) -> bool) -> Result<()> {
        let limit = Instant::now() + LIMIT;
        while !done(self) {
            ensure!(Instant::now() < limit, "AHCI port {}: {what} does not come", self.port);
            ensure!((self.idle)(), "AHCI port {}: gave up waiting for {what}", self.port);
        }
        Ok(())
    }

    /// Reads one of the port's registers.
    pub fn read(&self, register: u64) -> u32 {
        let port = reg::PORTS + reg::PORT_SIZE * self.port as u64;
        self.registers.read(port + register)
    }

    /// Writes one of the port's registers.
    pub fn write(&self, register: u64, value: u32) {
        let port = reg::PORTS + reg::PORT_SIZE * self.port as u64;
        self.registers.write(port + register, value);
    }

    /// Reads one of the controller's registers.
    pub fn read_generic(&self, register: u64) -> u32 {
        self.registers.read(register)
    }

    /// Writes one of the controller's registers.
    pub fn write_generic(&self, register: u64, value: u32) {
        self.registers.write(register, value);
    }

    /// Returns the location of its structures.
    pub fn area(&self) -> &PortArea {
        &self.area
    }

    /// The guest's memory.
    pub fn memory(&self) -> &Rc<MemoryView> {
        &self.memory
    }

    /// Returns the slots with a command in flight.
    pub fn issued(&self) -> u32 {
        self.issued
    }

    /// How often the interrupt line was seen to go up.
    pub fn interrupts(&self) -> u64 {
        self.interrupts
    }

    /// Writes a command with `len` bytes of data, in the slot's own data area, to a slot.
    ///
    /// # Errors
    ///
    /// The data is longer than [`PortArea::request_size`].
    pub fn prepare(&mut self, slot: u8, command: &Command, len: u32) -> Result<()> {
        ensure!(len <= self.area.request_size, "{len} bytes are too long for a slot");
        let prd = (self.area.data(slot), len);
        self.prepare_prdt(slot, command, if len == 0 { &[] } else { std::slice::from_ref(&prd) })
    }

    /// Writes a command to a slot, with its data in pieces `(address, length)`.
    ///
    /// # Errors
    ///
    /// There are more pieces than table entries.
    pub fn prepare_prdt(&mut self, slot: u8, command: &Command, prds: &[(u64, u32)]) -> Result<()> {
        let room = (PortArea::TABLE_SIZE - PortArea::PRDT_AT) / 16;
        ensure!(prds.len() as u64 <= room, "{} pieces are too many", prds.len());
        let table = self.area.table(slot);
        self.memory.write_bytes(table, &command.fis())?;
        for (at, (addr, len)) in (table + PortArea::PRDT_AT..).step_by(16).zip(prds) {
            let mut entry = [0; 16];
            entry[..8].copy_from_slice(&addr.to_le_bytes());
            entry[12..].copy_from_slice(&len.wrapping_sub(1).to_le_bytes());
            self.memory.write_bytes(at, &entry)?;
        }
        let flags = 5 | u16::from(command.write) << 6;
        let mut header = [0; 32];
        header[..2].copy_from_slice(&flags.to_le_bytes());
        header[2..4].copy_from_slice(&(prds.len() as u16).to_le_bytes());
        header[8..16].copy_from_slice(&table.to_le_bytes());
        self.memory.write_bytes(self.area.list() + 32 * u64::from(slot), &header)?;
        let bit = 1 << slot;
        self.queued = if command.is_queued() { self.queued | bit } else { self.queued & !bit };
        Ok(())
    }

    /// Writes the doorbell for the commands in these slots.
    pub fn ring(&mut self, slots: u32) {
        let queued = slots & self.queued;
        if queued != 0 {
            self.write(reg::PX_SACT, queued);
        }
        self.issued |= slots;
        self.write(reg::PX_CI, slots);
    }

    /// Returns the slots whose commands have ended since the last call, by polling.
    ///
    /// # Errors
    ///
    /// [`Failure`].
    pub fn poll(&mut self) -> Result<u32> {
        let is = self.read(reg::PX_IS);
        if is & reg::IS_ERRORS != 0 {
            let unfinished = self.read(reg::PX_CI) | self.read(reg::PX_SACT);
            bail!(Failure { is, tfd: self.read(reg::PX_TFD), unfinished });
        }
        Ok(self.reap())
    }

    fn reap(&mut self) -> u32 {
        let mut running = self.read(reg::PX_CI);
        if self.issued & self.queued != 0 {
            running |= self.read(reg::PX_SACT);
        }
        let ended = self.issued & !running;
        self.issued &= running;
        ended
    }

    /// Sleeps until the interrupt line is up, at most `limit`, and handles the interrupt as Linux's driver does. Returns
    /// the slots whose commands have ended, perhaps none.
    ///
    /// # Errors
    ///
    /// [`Failure`]; ppoll(2) or read(2) on the eventfd.
    pub fn wait(&mut self, limit: Duration) -> Result<u32> {
        let line = self.line.as_ref().context("the driver has no interrupt line")?;
        self.interrupts += line.wait(limit)?;
        self.handle_interrupt()
    }

    /// Handles an interrupt.
    ///
    /// # Errors
    ///
    /// [`Failure`].
    pub fn handle_interrupt(&mut self) -> Result<u32> {
        let pending = self.read_generic(reg::IS);
        if pending & 1 << self.port == 0 {
            return Ok(0);
        }
        let is = self.read(reg::PX_IS);
        self.write(reg::PX_IS, is);
        let ended = if is & reg::IS_ERRORS == 0 {
            Ok(self.reap())
        } else {
            let unfinished = self.read(reg::PX_CI) | self.read(reg::PX_SACT);
            Err(Failure { is, tfd: self.read(reg::PX_TFD), unfinished }.into())
        };
        self.write_generic(reg::IS, 1 << self.port);
        ended
    }

    /// Waits, polling, until all of `slots` have ended.
    ///
    /// # Errors
    ///
    /// [`Failure`], or a timeout.
    pub fn finish(&mut self, slots: u32) -> Result<()> {
        let limit = Instant::now() + LIMIT;
        while self.issued & slots != 0 {
            self.poll()?;
            ensure!(Instant::now() < limit, "commands {:#x} do not end", self.issued);
            ensure!((self.idle)(), "gave up waiting for commands {:#x}", self.issued);
        }
        Ok(())
    }

    /// Runs one command in slot 0 to its end.
    ///
    /// # Errors
    ///
    /// Those of [`finish`](Self::finish).
    pub fn run(&mut self, command: &Command, len: u32) -> Result<()> {
        self.prepare(0, command, len)?;
        self.ring(1);
        self.finish(1)
    }

    /// Returns the IDENTIFY DEVICE data.
    ///
    /// # Errors
    ///
    /// Those of [`finish`](Self::finish).
    pub fn identify(&mut self) -> Result<[u8; 512]> {
        let command = Command { command: ata::IDENTIFY_DEVICE, ..Command::default() };
        self.run(&command, 512)?;
        Ok(self.memory.read_array(self.area.data(0))?)
    }

    /// Returns the data of a slot.
    ///
    /// # Errors
    ///
    /// `len` extends beyond guest memory.
    pub fn data(&self, slot: u8, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.memory.read_bytes(self.area.data(slot), &mut bytes)?;
        Ok(bytes)
    }
}
