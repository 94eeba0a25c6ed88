//! An AHCI controller on the machine's I/O threads, and the driver's side of its ports.
//!
//! The driver runs on the thread that plays the vCPU: its register accesses are calls of the device
//! model, as they are in a VMM.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use block::node::BlockNode;
use devices::ahci::{Ahci, Drive, DriveConfig};
use event_loop::{LoopHandle, oneshot};
use guest_memory::{GuestMemory, MemoryView};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;

use crate::machine::{Machine, on_loop};

/// Registers (AHCI 1.3.1, section 3): generic ones, and those of a port from its first byte on.
#[allow(missing_docs, reason = "named as in the specification")]
pub mod reg {
    pub const CAP: u64 = 0x00;
    pub const GHC: u64 = 0x04;
    pub const IS: u64 = 0x08;
    pub const PI: u64 = 0x0c;
    pub const VS: u64 = 0x10;
    pub const PORTS: u64 = 0x100;
    pub const PORT_SIZE: u64 = 0x80;
    pub const PX_CLB: u64 = 0x00;
    pub const PX_CLBU: u64 = 0x04;
    pub const PX_FB: u64 = 0x08;
    pub const PX_FBU: u64 = 0x0c;
    pub const PX_IS: u64 = 0x10;
    pub const PX_IE: u64 = 0x14;
    pub const PX_CMD: u64 = 0x18;
    pub const PX_TFD: u64 = 0x20;
    pub const PX_SIG: u64 = 0x24;
    pub const PX_SSTS: u64 = 0x28;
    pub const PX_SCTL: u64 = 0x2c;
    pub const PX_SERR: u64 = 0x30;
    pub const PX_SACT: u64 = 0x34;
    pub const PX_CI: u64 = 0x38;

    pub const GHC_HR: u32 = 1;
    pub const GHC_IE: u32 = 1 << 1;
    pub const GHC_AE: u32 = 1 << 31;
    pub const CMD_ST: u32 = 1;
    pub const CMD_CLO: u32 = 1 << 3;
    pub const CMD_FRE: u32 = 1 << 4;
    pub const CMD_FR: u32 = 1 << 14;
    pub const CMD_CR: u32 = 1 << 15;
    pub const IS_DHRS: u32 = 1;
    pub const IS_PSS: u32 = 1 << 1;
    pub const IS_SDBS: u32 = 1 << 3;
    pub const IS_DPS: u32 = 1 << 5;
    pub const IS_PCS: u32 = 1 << 6;
    pub const IS_PRCS: u32 = 1 << 22;
    pub const IS_OFS: u32 = 1 << 24;
    pub const IS_IFS: u32 = 1 << 27;
    pub const IS_HBFS: u32 = 1 << 29;
    pub const IS_TFES: u32 = 1 << 30;
    /// What ends a command well, and what ends it badly.
    pub const IE_ALL: u32 = 0xfdc0_00ff;
    pub const IS_ERRORS: u32 = IS_TFES | IS_HBFS | IS_IFS | IS_OFS;
}

/// ATA commands (ATA8-ACS).
#[allow(missing_docs, reason = "named as in the specification")]
pub mod ata {
    pub const READ_DMA_EXT: u8 = 0x25;
    pub const WRITE_DMA_EXT: u8 = 0x35;
    pub const READ_FPDMA_QUEUED: u8 = 0x60;
    pub const WRITE_FPDMA_QUEUED: u8 = 0x61;
    pub const FLUSH_CACHE_EXT: u8 = 0xea;
    pub const IDENTIFY_DEVICE: u8 = 0xec;
}

/// How long a command, or a step of bringing a port up, may take at most.
const LIMIT: Duration = Duration::from_secs(20);

/// An AHCI controller at work: port i is served by I/O thread i, counted round. Dropping it takes
/// the drives away and waits until nothing is in flight.
pub struct AhciDevice {
    ahci: Arc<Ahci>,
    line: Arc<Line>,
    on_loops: Vec<OnLoop>,
}

/// The interrupt line, as an interrupt controller sees it.
struct Line {
    level: AtomicBool,
    /// Written each time it goes up.
    raised: OwnedFd,
}

/// Ends a drive's part on its loop.
struct OnLoop {
    stop: oneshot::Sender<()>,
    stopped: std::sync::mpsc::Receiver<()>,
}

impl AhciDevice {
    /// A controller with a drive for each of `disks`.
    ///
    /// # Errors
    ///
    /// There are no disks, or more than 32, or an I/O thread cannot use one.
    pub fn start(machine: &Machine, disks: &[Arc<dyn BlockNode>]) -> Result<AhciDevice> {
        let fd = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC);
        let raised = fd.context("eventfd")?.into();
        let line = Arc::new(Line { level: AtomicBool::new(false), raised });
        let told = line.clone();
        let ahci = Ahci::new(disks.len(), machine.memory().clone(), move |level| {
            told.level.store(level, Ordering::Release);
            if level {
                // It cannot overflow: whoever waits takes it to 0.
                let _ = nix::unistd::write(&told.raised, &1u64.to_ne_bytes());
            }
        })
        .map_err(|error| anyhow!("{error}"))?;
        let mut device = AhciDevice { ahci, line, on_loops: Vec::new() };
        for (port, disk) in disks.iter().enumerate() {
            let on_loop = OnLoop::start(machine.loop_of(port), &device.ahci, port, disk.clone())?;
            device.on_loops.push(on_loop);
        }
        Ok(device)
    }

    /// The controller's registers.
    pub fn ahci(&self) -> &Arc<Ahci> {
        &self.ahci
    }

    /// An eventfd that is written each time the interrupt line goes up.
    pub fn interrupt(&self) -> BorrowedFd<'_> {
        self.line.raised.as_fd()
    }

    /// Whether the interrupt line is up.
    pub fn is_raised(&self) -> bool {
        self.line.level.load(Ordering::Acquire)
    }
}

impl Drop for AhciDevice {
    fn drop(&mut self) {
        for on_loop in self.on_loops.drain(..) {
            on_loop.stop.send(());
            // A loop that is gone has let go of the drive.
            let _ = on_loop.stopped.recv();
        }
    }
}

impl OnLoop {
    fn start(
        handle: &LoopHandle,
        ahci: &Arc<Ahci>,
        port: usize,
        disk: Arc<dyn BlockNode>,
    ) -> Result<OnLoop> {
        let (stop, stopping) = oneshot::channel();
        let (end, stopped) = std::sync::mpsc::sync_channel(1);
        let ahci = ahci.clone();
        on_loop(handle, move |event_loop| {
            let geometry = disk.geometry();
            let config = DriveConfig {
                geometry,
                writable: true,
                write_cache: true,
                serial: format!("vcpu-{port}"),
                model: "ringmill".into(),
            };
            let channel = disk.open_channel(event_loop).context("opening the disk")?;
            let drive = Drive::attach(event_loop, &ahci, port, channel, config)
                .map_err(|error| anyhow!("{error}"))?;
            event_loop.spawn(async move {
                let _ = stopping.await;
                let (sender, stopped) = oneshot::channel();
                drive.detach(move || sender.send(()));
                let _ = stopped.await;
                let _ = end.send(());
            });
            anyhow::Ok(())
        })??;
        Ok(OnLoop { stop, stopped })
    }
}

/// Where a port's structures and its requests' data are in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortArea {
    /// The first byte, a multiple of 4096.
    pub base: u64,
    /// Bytes of the largest request.
    pub request_size: u32,
}

impl PortArea {
    const RFIS_AT: u64 = 0x400;
    const TABLES_AT: u64 = 0x1000;
    /// Room for a FIS and 56 PRD entries.
    const TABLE_SIZE: u64 = 0x400;
    const PRDT_AT: u64 = 0x80;

    /// The command list.
    pub fn list(&self) -> u64 {
        self.base
    }

    /// Where received FISes go.
    pub fn rfis(&self) -> u64 {
        self.base + Self::RFIS_AT
    }

    /// The command table of a slot.
    pub fn table(&self, slot: u8) -> u64 {
        self.base + Self::TABLES_AT + Self::TABLE_SIZE * u64::from(slot)
    }

    /// The data of a slot's request, page-aligned.
    pub fn data(&self, slot: u8) -> u64 {
        let size = u64::from(self.request_size).next_multiple_of(4096);
        self.table(32) + size * u64::from(slot)
    }

    /// The first byte behind it.
    pub fn end(&self) -> u64 {
        self.data(32)
    }
}

/// A command as the driver sends it: the fields of a Register FIS.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Command {
    /// The ATA command.
    pub command: u8,
    /// FEATURES, 16 bits.
    pub features: u16,
    /// LBA, 48 bits; of 28-bit commands bits 27:24 go into `device`.
    pub lba: u64,
    /// COUNT, 16 bits.
    pub count: u16,
    /// DEVICE.
    pub device: u8,
    /// Data goes to the drive.
    pub write: bool,
}

/// DEVICE: the address is an LBA.
pub const LBA: u8 = 1 << 6;

impl Command {
    /// A read or write of whole sectors by DMA, 48-bit.
    pub fn dma(write: bool, offset: u64, len: u32) -> Command {
        let command = if write { ata::WRITE_DMA_EXT } else { ata::READ_DMA_EXT };
        let count = (len / 512) as u16;
        Command { command, lba: offset / 512, count, device: LBA, write, features: 0 }
    }

    /// A queued read or write of whole sectors, to be sent from slot `slot`.
    pub fn queued(slot: u8, write: bool, offset: u64, len: u32) -> Command {
        let command = if write { ata::WRITE_FPDMA_QUEUED } else { ata::READ_FPDMA_QUEUED };
        let features = (len / 512) as u16;
        let count = u16::from(slot) << 3;
        Command { command, features, lba: offset / 512, count, device: LBA, write }
    }

    /// The Register FIS.
    pub fn fis(&self) -> [u8; 20] {
        let [l0, l1, l2, l3, l4, l5, _, _] = self.lba.to_le_bytes();
        let [f0, f1] = self.features.to_le_bytes();
        let [c0, c1] = self.count.to_le_bytes();
        let mut fis = [0; 20];
        fis[..14].copy_from_slice(&[
            0x27,
            0x80,
            self.command,
            f0,
            l0,
            l1,
            l2,
            self.device,
            l3,
            l4,
            l5,
            f1,
            c0,
            c1,
        ]);
        fis
    }

    fn is_queued(&self) -> bool {
        matches!(self.command, ata::READ_FPDMA_QUEUED | ata::WRITE_FPDMA_QUEUED)
    }
}

/// A command that failed: what the port shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    /// PxIS, error bits and all others.
    pub is: u32,
    /// PxTFD: error in bits 15:8, status in bits 7:0.
    pub tfd: u32,
    /// PxCI and PxSACT: what has not ended.
    pub unfinished: u32,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Failure { is, tfd, unfinished } = self;
        write!(f, "a command failed: PxIS {is:#x}, PxTFD {tfd:#x}, unfinished {unfinished:#x}")
    }
}

impl std::error::Error for Failure {}

/// The driver's side of a port, on the thread that plays a vCPU.
pub struct PortDriver {
    ahci: Arc<Ahci>,
    line: Arc<Line>,
    memory: Rc<MemoryView>,
    port: usize,
    area: PortArea,
    /// Slots on their way, and those of them that are queued commands.
    issued: u32,
    queued: u32,
    interrupts: u64,
}

impl PortDriver {
    /// Brings a port up: structures in `area`, FIS reception, COMRESET, command list, interrupts.
    ///
    /// # Errors
    ///
    /// The area is not in memory, or the port does not answer.
    pub fn bring_up(
        device: &AhciDevice,
        memory: &Arc<GuestMemory>,
        port: usize,
        area: PortArea,
    ) -> Result<PortDriver> {
        let mut driver = PortDriver {
            ahci: device.ahci.clone(),
            line: device.line.clone(),
            memory: MemoryView::new(memory.clone()),
            port,
            area,
            issued: 0,
            queued: 0,
            interrupts: 0,
        };
        let pages = area.table(32) - area.base;
        driver.memory.write_bytes(area.base, &vec![0; pages as usize])?;
        driver.write_generic(reg::GHC, reg::GHC_AE | reg::GHC_IE);
        driver.start()?;
        Ok(driver)
    }

    /// Brings the port up as after a reset of the controller.
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
    /// The drive does not come back.
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

    /// Stops the command list: what is on its way is forgotten.
    ///
    /// # Errors
    ///
    /// It goes on running.
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

    /// Recovers from a failed command as AHCI 1.3.1, 6.2.2.1, has it.
    ///
    /// # Errors
    ///
    /// As [`stop_list`](Self::stop_list).
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
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Reads one of the port's registers.
    pub fn read(&self, register: u64) -> u32 {
        let port = reg::PORTS + reg::PORT_SIZE * self.port as u64;
        self.ahci.mmio_read(port + register, 4) as u32
    }

    /// Writes one of the port's registers.
    pub fn write(&self, register: u64, value: u32) {
        let port = reg::PORTS + reg::PORT_SIZE * self.port as u64;
        self.ahci.mmio_write(port + register, 4, value.into());
    }

    /// Reads one of the controller's registers.
    pub fn read_generic(&self, register: u64) -> u32 {
        self.ahci.mmio_read(register, 4) as u32
    }

    /// Writes one of the controller's registers.
    pub fn write_generic(&self, register: u64, value: u32) {
        self.ahci.mmio_write(register, 4, value.into());
    }

    /// Where its structures are.
    pub fn area(&self) -> &PortArea {
        &self.area
    }

    /// The guest's memory.
    pub fn memory(&self) -> &Rc<MemoryView> {
        &self.memory
    }

    /// Slots with a command on its way.
    pub fn issued(&self) -> u32 {
        self.issued
    }

    /// How often the interrupt line was seen to go up.
    pub fn interrupts(&self) -> u64 {
        self.interrupts
    }

    /// Puts a command with `len` bytes of data, at the slot's own place, into a slot.
    ///
    /// # Errors
    ///
    /// The data is longer than [`PortArea::request_size`].
    pub fn prepare(&mut self, slot: u8, command: &Command, len: u32) -> Result<()> {
        ensure!(len <= self.area.request_size, "{len} bytes are too long for a slot");
        let prd = (self.area.data(slot), len);
        self.prepare_prdt(slot, command, if len == 0 { &[] } else { std::slice::from_ref(&prd) })
    }

    /// Puts a command into a slot, its data in pieces `(address, length)`.
    ///
    /// # Errors
    ///
    /// There are more pieces than a table has room for.
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

    /// Rings the doorbell: the commands in these slots are to be done.
    pub fn ring(&mut self, slots: u32) {
        let queued = slots & self.queued;
        if queued != 0 {
            self.write(reg::PX_SACT, queued);
        }
        self.issued |= slots;
        self.write(reg::PX_CI, slots);
    }

    /// The slots whose commands have ended since the last time, by polling.
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

    /// Sleeps until the interrupt line is up, at most `limit`, and handles the interrupt as Linux's
    /// driver does: the slots whose commands have ended, of which there may be none.
    ///
    /// # Errors
    ///
    /// [`Failure`]; ppoll(2) or read(2) on the eventfd.
    pub fn wait(&mut self, limit: Duration) -> Result<u32> {
        // A line that stayed up interrupts again.
        if !self.line.level.load(Ordering::Acquire) {
            let mut fds = [PollFd::new(self.line.raised.as_fd(), PollFlags::POLLIN)];
            match ppoll(&mut fds, Some(TimeSpec::from(limit)), None) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => return Err(error).context("waiting for an interrupt"),
            }
        }
        let mut count = [0; 8];
        match nix::unistd::read(&self.line.raised, &mut count) {
            Ok(_) => self.interrupts += u64::from_ne_bytes(count),
            Err(Errno::EAGAIN) => {}
            Err(error) => return Err(error).context("reading the interrupt's eventfd"),
        }
        self.handle_interrupt()
    }

    /// What the interrupt handler does.
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
    /// [`Failure`], or it takes too long.
    pub fn finish(&mut self, slots: u32) -> Result<()> {
        let limit = Instant::now() + LIMIT;
        while self.issued & slots != 0 {
            self.poll()?;
            ensure!(Instant::now() < limit, "commands {:#x} do not end", self.issued);
            std::thread::yield_now();
        }
        Ok(())
    }

    /// One command in slot 0 from start to end.
    ///
    /// # Errors
    ///
    /// As [`finish`](Self::finish).
    pub fn run(&mut self, command: &Command, len: u32) -> Result<()> {
        self.prepare(0, command, len)?;
        self.ring(1);
        self.finish(1)
    }

    /// The IDENTIFY DEVICE data.
    ///
    /// # Errors
    ///
    /// As [`finish`](Self::finish).
    pub fn identify(&mut self) -> Result<[u8; 512]> {
        let command = Command { command: ata::IDENTIFY_DEVICE, ..Command::default() };
        self.run(&command, 512)?;
        Ok(self.memory.read_array(self.area.data(0))?)
    }

    /// The data of a slot.
    ///
    /// # Errors
    ///
    /// `len` reaches beyond guest memory.
    pub fn data(&self, slot: u8, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.memory.read_bytes(self.area.data(slot), &mut bytes)?;
        Ok(bytes)
    }
}
