//! A controller on a loop that the test runs, with disks that hold their answers on request.
#![allow(unreachable_pub, reason = "shared by the files of one test")]

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};

use block::node::{Channel, Geometry};
use block::request::{Op, Request};
use devices::ahci::{Drive, DriveConfig};
use event_loop::{EventLoop, LoopConfig, PollParams};
use guest_memory::GuestMemory;
use guest_memory::test_util::memfd_memory;
use nix::errno::Errno;
use vcpu::ahci::{Command, Controller, Failure, LBA, PortArea, PortDriver, reg};

pub const DISK: usize = 4 << 20;
pub const SECTORS: u64 = DISK as u64 / 512;
pub const MEMORY: u64 = 16 << 20;
pub const REQUEST: u32 = 64 << 10;
/// Guest memory without port structures.
pub const FREE: u64 = 8 << 20;

/// A disk in memory.
pub struct Disk {
    pub bytes: RefCell<Vec<u8>>,
    /// Requests are held until released.
    pub hold: Cell<bool>,
    pub held: RefCell<VecDeque<Request>>,
    /// The error of all requests, if set.
    pub fail: Cell<Option<Errno>>,
    pub log: RefCell<Vec<(Op, u64, u64)>>,
}

impl Disk {
    fn answer(&self, mut request: Request) {
        if let Some(errno) = self.fail.get() {
            return request.complete(Err(errno));
        }
        let mut bytes = self.bytes.borrow_mut();
        let range = request.offset as usize..(request.offset + request.len) as usize;
        match request.op {
            Op::Read => drop(request.bufs.copy_in(0, &bytes[range])),
            Op::Write { .. } => drop(request.bufs.copy_out(0, &mut bytes[range])),
            Op::Discard | Op::WriteZeroes { .. } => bytes[range].fill(0),
            Op::Flush | Op::BlockStatus => {}
        }
        drop(bytes);
        request.complete(Ok(()));
    }

    /// Answers the oldest held request.
    pub fn let_go(&self) {
        let request = self.held.borrow_mut().pop_front().expect("a held request");
        self.answer(request);
    }
}

impl Channel for Disk {
    fn submit(&self, request: Request) {
        self.log.borrow_mut().push((request.op, request.offset, request.len));
        if self.hold.get() {
            self.held.borrow_mut().push_back(request);
        } else {
            self.answer(request);
        }
    }

    fn in_flight(&self) -> usize {
        self.held.borrow().len()
    }
}

pub struct Rig {
    pub event_loop: EventLoop,
    pub controller: Controller,
    pub memory: Arc<GuestMemory>,
    pub disks: Vec<Rc<Disk>>,
    pub drives: Vec<Rc<Drive>>,
    pub ports: Vec<PortDriver>,
}

pub fn geometry(read_only: bool) -> Geometry {
    Geometry {
        size: DISK as u64,
        read_only,
        physical_block_size: 4096,
        request_alignment: 1,
        discard: true,
        discard_granularity: 512,
        write_zeroes: true,
        write_cache: true,
    }
}

pub fn area(port: usize) -> PortArea {
    let first = PortArea { base: 0x10000, request_size: REQUEST };
    PortArea { base: first.base + (first.end() - first.base) * port as u64, ..first }
}

/// The initial contents of byte `at`.
pub fn pattern(at: usize) -> u8 {
    (at ^ (at >> 9).wrapping_mul(7)) as u8
}

/// The initial contents of a disk.
pub fn contents() -> &'static Vec<u8> {
    static CONTENTS: OnceLock<Vec<u8>> = OnceLock::new();
    CONTENTS.get_or_init(|| (0..DISK).map(pattern).collect())
}

impl Rig {
    /// One port with a running drive.
    pub fn new() -> Rig {
        Rig::with(1, false)
    }

    pub fn with(ports: usize, read_only: bool) -> Rig {
        Rig::changed(ports, |config| config.geometry.read_only = read_only)
    }

    /// One port with a drive that says it has `size` bytes. Its disk has only [`DISK`].
    pub fn of_size(size: u64) -> Rig {
        Rig::changed(1, |config| config.geometry.size = size)
    }

    fn changed(ports: usize, change: impl Fn(&mut DriveConfig)) -> Rig {
        let poll = PollParams::OFF;
        let event_loop = EventLoop::new(LoopConfig { poll, ..LoopConfig::default() }).unwrap();
        let disk = |_| {
            Rc::new(Disk {
                bytes: RefCell::new(contents().clone()),
                hold: Cell::new(false),
                held: RefCell::default(),
                fail: Cell::new(None),
                log: RefCell::default(),
            })
        };
        let disks: Vec<_> = (0..ports).map(disk).collect();
        let channels = disks.iter().map(|disk| disk.clone() as Rc<dyn Channel>).collect();
        let mut rig = Rig::on(event_loop, channels, change);
        rig.disks = disks;
        rig
    }

    /// A port for each of `channels`, to disks of 4 MiB.
    pub fn on(
        event_loop: EventLoop,
        channels: Vec<Rc<dyn Channel>>,
        change: impl Fn(&mut DriveConfig),
    ) -> Rig {
        let memory = memfd_memory(&[(0, MEMORY)]).unwrap();
        let controller = Controller::new(channels.len(), memory.clone()).unwrap();
        let (mut drives, mut drivers) = (Vec::new(), Vec::new());
        for (port, channel) in channels.into_iter().enumerate() {
            let mut config = DriveConfig {
                geometry: geometry(false),
                writable: true,
                write_cache: true,
                serial: format!("serial-{port}"),
                model: "a model".into(),
            };
            change(&mut config);
            let ahci = &controller.ahci;
            drives.push(Drive::attach(&event_loop, ahci, port, channel, config).unwrap());
            let turned = event_loop.clone();
            let idle = move || turned.run_once(false).unwrap();
            let mut driver = PortDriver::new(&controller, &memory, port, area(port), idle);
            driver.write_generic(reg::GHC, reg::GHC_AE | reg::GHC_IE);
            driver.start().unwrap();
            drivers.push(driver);
        }
        let disks = Vec::new();
        Rig { event_loop, controller, memory, disks, drives, ports: drivers }
    }

    pub fn port(&mut self) -> &mut PortDriver {
        &mut self.ports[0]
    }

    pub fn disk(&self) -> &Disk {
        &self.disks[0]
    }

    /// Runs the loop until it has no work.
    pub fn turn(&self) {
        for _ in 0..4 {
            self.event_loop.run_once(false).unwrap();
        }
    }

    /// Releases `count` held requests in one batch.
    pub fn let_go(&self, count: usize) {
        self.event_loop.section(|| (0..count).for_each(|_| self.disk().let_go()));
        self.turn();
    }

    /// Runs a command that must fail, and recovers.
    pub fn failure(&mut self, command: &Command, len: u32) -> Failure {
        let error = self.port().run(command, len).expect_err("a command that fails");
        let failure = *error.downcast_ref::<Failure>().expect("a failure");
        self.port().recover().unwrap();
        failure
    }

    pub fn write_memory(&self, addr: u64, bytes: &[u8]) {
        self.memory.write_bytes(addr, bytes).unwrap();
    }

    pub fn read_memory(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read_bytes(addr, &mut bytes).unwrap();
        bytes
    }

    /// The received FIS at `at` of the first port's area.
    pub fn fis(&self, at: u64) -> [u8; 20] {
        self.read_memory(area(0).rfis() + at, 20).try_into().unwrap()
    }

    pub fn log(&self) -> Vec<(Op, u64, u64)> {
        std::mem::take(&mut self.disk().log.borrow_mut())
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        for disk in &self.disks {
            disk.hold.set(false);
            while !disk.held.borrow().is_empty() {
                disk.let_go();
            }
        }
        self.drives.drain(..).for_each(|drive| drive.detach(|| {}));
        self.event_loop.shut_down().unwrap();
    }
}

/// Address of a long list's data.
pub const LONG_DATA: u64 = FREE + (2 << 20);

/// Writes a read of 255 sectors from the first on to a slot of port 0, with its data in 65535 pieces of two bytes each, two
/// bytes apart.
pub fn long_list(memory: &GuestMemory, slot: u64) {
    let read = Command::dma(false, 0, 255 * 512);
    for n in 0..65535 {
        let mut entry = [0; 16];
        entry[..8].copy_from_slice(&(LONG_DATA + n * 4).to_le_bytes());
        entry[12] = 1;
        memory.write_bytes(FREE + 0x80 + n * 16, &entry).unwrap();
    }
    memory.write_bytes(FREE, &read.fis()).unwrap();
    let header = area(0).list() + slot * 32;
    memory.write_bytes(header, &[5, 0, 0xff, 0xff]).unwrap();
    memory.write_bytes(header + 8, &FREE.to_le_bytes()).unwrap();
}

/// A command by its code, LBA addresses.
pub fn command(command: u8) -> Command {
    Command { command, device: LBA, ..Command::default() }
}

/// The error register.
pub fn error(failure: &Failure) -> u32 {
    failure.tfd >> 8
}

pub const ABRT: u32 = 4;
pub const IDNF: u32 = 0x10;
pub const UNC: u32 = 0x40;
pub const PIO_SETUP: u64 = 0x20;
pub const D2H: u64 = 0x40;
pub const SDB: u64 = 0x58;
