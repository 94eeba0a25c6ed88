//! The driver: it brings the controller up and lays out reads for the program of a KVM vCPU.

use std::os::fd::AsFd;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use guest_memory::{GuestMemory, MappedRegion, MemoryView, Region};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::vfio_user::{BAR0, CONFIG, Client, MappedArea};

/// Entries of each queue, a power of two.
pub const ENTRIES: u16 = 64;

const PAGE: u64 = 4096;
/// Time limit of bring-up and of each admin command.
const PATIENCE: Duration = Duration::from_secs(10);

/// Registers (NVM Express 2.0, section 3.1.3).
const CC: u64 = 0x14;
const CSTS: u64 = 0x1c;
const AQA: u64 = 0x24;
const ASQ: u64 = 0x28;
const ACQ: u64 = 0x30;
const DOORBELLS: u64 = 0x1000;
/// CC: enabled, entries of 64 and 16 bytes.
const ENABLE: u32 = 0x0046_0001;
const CSTS_RDY: u32 = 1;

/// PCI command register: memory and bus mastering are on.
const PCI_COMMAND: u64 = 4;
const PCI_ON: u32 = 0x6;

/// Opcodes.
const READ: u32 = 0x02;
const CREATE_SUBMISSION: u32 = 0x01;
const CREATE_COMPLETION: u32 = 0x05;
const DOORBELL_BUFFER_CONFIG: u32 = 0x7c;

/// Number of the I/O queue pair.
const QUEUE: u32 = 1;
/// Physically contiguous (PC): all queues are.
const CONTIGUOUS: u32 = 1;

/// The memory of the driver: queues, shadow doorbells, and a page of data for each entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NvmeArea {
    /// The first byte, a multiple of 4096.
    pub base: u64,
}

impl NvmeArea {
    fn page(&self, number: u64) -> u64 {
        self.base + number * PAGE
    }

    /// Returns the address of the submission queue. Its entries have their index as identifier.
    pub fn submissions(&self) -> u64 {
        self.page(2)
    }

    /// Returns the address of the completion queue.
    pub fn completions(&self) -> u64 {
        self.page(3)
    }

    /// Returns the address of the shadow of the submission queue's doorbell, which the completion queue's follows.
    pub fn shadow(&self) -> u64 {
        self.page(4) + Self::doorbell()
    }

    /// Returns the address of the event index of that doorbell.
    pub fn events(&self) -> u64 {
        self.page(5) + Self::doorbell()
    }

    /// Returns the address of the data of an entry.
    pub fn data(&self, entry: u16) -> u64 {
        self.page(6 + u64::from(entry))
    }

    /// Returns the first address after the area.
    pub fn end(&self) -> u64 {
        self.data(ENTRIES)
    }

    /// Offset of the submission queue's doorbell from that of the admin queue.
    pub(crate) fn doorbell() -> u64 {
        8 * u64::from(QUEUE)
    }
}

/// A driver that has brought the controller up.
pub struct NvmeDriver {
    client: Client,
    memory: Rc<MemoryView>,
    area: NvmeArea,
    /// The interrupt of the admin queue. The I/O queue is polled, and has no interrupt.
    interrupt: EventFd,
    /// The doorbells, if they may be mapped.
    page: Option<MappedArea>,
    /// Admin commands carried out.
    commands: u32,
}

impl NvmeDriver {
    /// Connects, shares the memory, brings the controller up, makes an I/O queue pair, and fills the submission queue with reads
    /// of `len` bytes: a multiple of 512, at most a page. `shadow`: configures shadow doorbells.
    ///
    /// # Errors
    ///
    /// The export or the controller refuses, or does not answer in time.
    pub fn bring_up(
        path: &Path,
        memory: &Arc<GuestMemory>,
        area: NvmeArea,
        len: u32,
        shadow: bool,
    ) -> Result<NvmeDriver> {
        ensure!(
            len > 0 && len.is_multiple_of(512) && u64::from(len) <= PAGE,
            "reads of {len} bytes"
        );
        let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
        let interrupt = EventFd::from_flags(flags).context("eventfd")?;
        let mut client = Client::connect(path)?;
        for region in memory.regions() {
            let shared = client.map(region.guest_addr(), region.size(), region.file().as_fd());
            shared.context("sharing guest memory")?;
        }
        client
            .set_interrupt(0, interrupt.as_fd())
            .context("setting the admin queue's interrupt")?;
        client.write(CONFIG, PCI_COMMAND, PCI_ON)?;
        let memory = MemoryView::new(memory.clone());
        let page = client.mapped_area(BAR0)?;
        let mut driver = NvmeDriver { client, memory, area, interrupt, page, commands: 0 };
        driver.enable()?;
        driver.make_queues(shadow)?;
        driver.prepare(len)?;
        Ok(driver)
    }

    /// Takes the doorbells that may be mapped, as memory at a guest address.
    ///
    /// # Errors
    ///
    /// They are not where the registers are, or cannot be mapped.
    pub fn take_doorbells(&mut self, guest_addr: u64) -> Result<Option<MappedRegion>> {
        let Some(MappedArea { offset, size, file }) = self.page.take() else { return Ok(None) };
        ensure!((offset, size) == (DOORBELLS, PAGE), "doorbells of {size:#x} bytes at {offset:#x}");
        let (user_addr, mmap_offset) = (guest_addr, offset);
        let region = Region { guest_addr, size, user_addr, mmap_offset, fd: file };
        Ok(Some(region.map().context("mapping the doorbells")?))
    }

    /// Returns the area.
    pub fn area(&self) -> NvmeArea {
        self.area
    }

    /// Returns the offset in BAR 0 of the I/O submission queue's doorbell, which the completion queue's follows.
    pub fn doorbell() -> u64 {
        DOORBELLS + NvmeArea::doorbell()
    }

    /// Reads a register of BAR 0.
    ///
    /// # Errors
    ///
    /// The export refuses.
    pub fn read(&mut self, register: u64) -> Result<u32> {
        self.client.read(BAR0, register)
    }

    /// Writes a register of BAR 0.
    ///
    /// # Errors
    ///
    /// The export refuses.
    pub fn write(&mut self, register: u64, value: u32) -> Result<()> {
        self.client.write(BAR0, register, value)
    }

    /// Writes a register of BAR 0 without waiting for the export.
    ///
    /// # Errors
    ///
    /// The message cannot be sent.
    pub fn post(&mut self, register: u64, value: u32) -> Result<()> {
        self.client.post(BAR0, register, value)
    }

    fn enable(&mut self) -> Result<()> {
        let zeroes = vec![0; (self.area.data(0) - self.area.base) as usize];
        self.memory.write_bytes(self.area.base, &zeroes)?;
        let last = u32::from(ENTRIES) - 1;
        let (asq, acq) = (self.area.page(0), self.area.page(1));
        self.write(AQA, last << 16 | last)?;
        for (register, addr) in [(ASQ, asq), (ACQ, acq)] {
            self.write(register, addr as u32)?;
            self.write(register + 4, (addr >> 32) as u32)?;
        }
        self.write(CC, ENABLE)?;
        let limit = Instant::now() + PATIENCE;
        loop {
            match self.read(CSTS)? {
                CSTS_RDY => return Ok(()),
                status => ensure!(
                    status == 0 && Instant::now() < limit,
                    "the controller is not ready: CSTS is {status:#x}"
                ),
            }
        }
    }

    fn make_queues(&mut self, shadow: bool) -> Result<()> {
        let area = self.area;
        let size = (u32::from(ENTRIES) - 1) << 16 | QUEUE;
        self.admin(CREATE_COMPLETION, [area.completions(), 0], [size, CONTIGUOUS])?;
        let with = QUEUE << 16 | CONTIGUOUS;
        self.admin(CREATE_SUBMISSION, [area.submissions(), 0], [size, with])?;
        if shadow {
            self.admin(DOORBELL_BUFFER_CONFIG, [area.page(4), area.page(5)], [0; 2])?;
        }
        Ok(())
    }

    fn prepare(&mut self, len: u32) -> Result<()> {
        for entry in 0..ENTRIES {
            let head = READ | u32::from(entry) << 16;
            let blocks = len / 512 - 1;
            let read = submission(head, 1, [self.area.data(entry), 0], [0, 0, blocks]);
            self.memory.write_bytes(self.area.submissions() + 64 * u64::from(entry), &read)?;
        }
        Ok(())
    }

    /// Carries an admin command out. There are fewer of them than entries of the queue.
    fn admin(&mut self, opcode: u32, prps: [u64; 2], [first, second]: [u32; 2]) -> Result<()> {
        let index = self.commands;
        self.commands += 1;
        let entry = submission(opcode | index << 16, 0, prps, [first, second, 0]);
        self.memory.write_bytes(self.area.page(0) + 64 * u64::from(index), &entry)?;
        self.write(DOORBELLS, self.commands)?;
        let at = self.area.page(1) + 16 * u64::from(index);
        let done = loop {
            let last = self.memory.load_acquire(at + 12)?;
            if last >> 16 & 1 == 1 {
                break last;
            }
            let mut fds = [PollFd::new(self.interrupt.as_fd(), PollFlags::POLLIN)];
            let limit = PollTimeout::try_from(PATIENCE).unwrap_or(PollTimeout::MAX);
            let signalled = poll(&mut fds, limit).context("waiting for an interrupt")?;
            ensure!(signalled == 1, "admin command {opcode:#x} was not answered in time");
            self.interrupt.read().context("reading the interrupt's eventfd")?;
        };
        let (status, cid) = (done >> 17, done & 0xffff);
        ensure!(
            status == 0 && cid == index,
            "admin command {opcode:#x} ended with status {status:#x}, as command {cid}"
        );
        self.write(DOORBELLS + 4, self.commands)
    }
}

/// A submission queue entry: opcode and identifier, namespace, PRPs, dwords 10 to 12.
fn submission(head: u32, namespace: u32, prps: [u64; 2], dwords: [u32; 3]) -> [u8; 64] {
    let prps = prps.map(|prp| [prp as u32, (prp >> 32) as u32]);
    let mut words = [0; 16];
    (words[0], words[1]) = (head, namespace);
    words[6..10].copy_from_slice(prps.as_flattened());
    words[10..13].copy_from_slice(&dwords);
    let mut bytes = [0; 64];
    for (to, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
        *to = u32::to_le_bytes(word);
    }
    bytes
}
