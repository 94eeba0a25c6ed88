//! A hostile AHCI driver: registers, command lists, FISes, PRD tables, resets, memory exchanged, as one
//! sequence of steps, before disks that answer late, in any order, well or badly.
//!
//! After each step the controller's promises are checked.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use block::node::{Channel, Geometry};
use block::request::{Op, Request};
use devices::ahci::{ABAR_SIZE, Ahci, Drive, DriveConfig};
use event_loop::EventLoop;
use guest_memory::GuestMemory;
use guest_memory::test_util::{USER_BASE, memfd_region};
use nix::errno::Errno;

use crate::input::Input;
use crate::world;

/// Guest memory: two neighbours, a hole, a third region that may be unplugged.
const REGIONS: [(u64, u64); 3] = [(0, 0x4000), (0x4000, 0x4000), (0x10000, 0x2000)];
const DISK: u64 = 1 << 20;
const PORTS: u64 = 2;
/// Of each port: its command list, received FISes, command tables.
const LIST: u64 = 0x400;
const RFIS: u64 = 0x200;
const TABLE: u64 = 0x1000;

/// Registers of a port.
const CLB: u64 = 0x00;
const FB: u64 = 0x08;
const CMD: u64 = 0x18;
const SSTS: u64 = 0x28;
const SCTL: u64 = 0x2c;
const SACT: u64 = 0x34;
const CI: u64 = 0x38;

struct World {
    full: Arc<GuestMemory>,
    less: Arc<GuestMemory>,
    event_loop: EventLoop,
}

impl World {
    fn new() -> Self {
        let region = |(addr, size)| {
            Arc::new(memfd_region(addr, size).expect("a memfd").map().expect("a mapping"))
        };
        let full = GuestMemory::from_regions(REGIONS.map(region)).expect("no overlaps");
        let [.., (addr, size)] = REGIONS;
        let less = full.without_region(addr, USER_BASE + addr, size).expect("it is there");
        let event_loop = world::quiet_loop();
        World { full: Arc::new(full), less: Arc::new(less), event_loop }
    }

    fn turn(&self) {
        world::turn(&self.event_loop, 3);
    }
}

thread_local! {
    static WORLD: World = World::new();
}

/// A disk that keeps its requests until a step answers one.
struct Disk {
    held: RefCell<Vec<Request>>,
    read_only: bool,
    /// Both sets of regions, to see where segments lie.
    memory: Arc<GuestMemory>,
}

impl Channel for Disk {
    fn submit(&self, request: Request) {
        let end = request.offset.checked_add(request.len).expect("a range");
        assert!(end <= DISK, "beyond the disk");
        match request.op {
            Op::Read => self.check_memory(&request),
            Op::Write { .. } => {
                assert!(!self.read_only, "a write to a read-only disk");
                self.check_memory(&request);
            }
            Op::Discard => assert!(!self.read_only && request.len > 0),
            Op::BlockStatus => unreachable!("no guest asks for it"),
            Op::Flush => assert_eq!((request.offset, request.len), (0, 0)),
            Op::WriteZeroes { .. } => panic!("no command asks for it"),
        }
        let mut held = self.held.borrow_mut();
        held.push(request);
        assert!(held.len() <= 32 * 512, "more than 32 commands' worth of requests");
    }

    fn in_flight(&self) -> usize {
        self.held.borrow().len()
    }
}

impl Disk {
    fn check_memory(&self, request: &Request) {
        assert!(request.len > 0 && request.bufs.len() as u64 == request.len);
        for iov in request.bufs.iovecs() {
            // Neighbours in our address space may have become one segment.
            let mut base = iov.iov_base as usize;
            let end = base + iov.iov_len;
            while base < end {
                let inside = self.memory.regions().iter().find_map(|r| {
                    let host = r.host().as_ptr() as usize;
                    let offset = base.checked_sub(host)?;
                    (offset < r.size() as usize).then_some(host + r.size() as usize)
                });
                base = inside.expect("a segment outside guest memory");
            }
        }
    }

    fn answer(&self, nth: usize, result: Result<(), Errno>) {
        let request = {
            let mut held = self.held.borrow_mut();
            let Some(last) = held.len().checked_sub(1) else { return };
            held.remove(nth.min(last))
        };
        request.complete(result);
    }
}

struct Run<'a> {
    world: &'a World,
    ahci: Arc<Ahci>,
    line: Arc<AtomicBool>,
    disks: Vec<Rc<Disk>>,
    drives: Vec<Rc<Drive>>,
}

/// Runs the steps in `data`.
pub fn run(data: &[u8]) {
    WORLD.with(|world| {
        for (addr, size) in REGIONS {
            world.full.write_bytes(addr, &[0; 0x4000][..size as usize]).expect("memory");
        }
        let line = Arc::new(AtomicBool::new(false));
        let told = line.clone();
        let ahci = Ahci::new(PORTS as usize, world.full.clone(), move |level| {
            assert_ne!(told.swap(level, Ordering::Relaxed), level, "told what it knew");
        })
        .expect("a controller");
        let mut run = Run { world, ahci, line, disks: Vec::new(), drives: Vec::new() };
        for port in 0..PORTS {
            run.attach(port as usize);
            run.start(port);
        }
        let mut input = Input::new(data);
        for _ in 0..1024 {
            if input.is_empty() {
                break;
            }
            run.step(&mut input);
            run.check();
        }
        run.end();
    });
}

impl Run<'_> {
    fn attach(&mut self, port: usize) {
        let read_only = port == 1;
        let disk =
            Rc::new(Disk { held: RefCell::default(), read_only, memory: self.world.full.clone() });
        let geometry = Geometry {
            size: DISK,
            read_only,
            physical_block_size: 512,
            request_alignment: 1,
            discard: true,
            discard_granularity: 512,
            write_zeroes: true,
            write_cache: true,
        };
        let config = DriveConfig {
            geometry,
            writable: true,
            write_cache: true,
            serial: "serial".into(),
            model: "model".into(),
        };
        let drive = Drive::attach(&self.world.event_loop, &self.ahci, port, disk.clone(), config);
        self.drives.push(drive.expect("a free port"));
        self.disks.push(disk);
    }

    /// What a well-behaved driver does to bring a port up.
    fn start(&self, port: u64) {
        let base = port * 0x2000;
        self.write(port, CLB, base + LIST);
        self.write(port, CLB + 4, 0);
        self.write(port, FB, base + RFIS);
        self.write(port, FB + 4, 0);
        self.write(port, CMD, 0x10);
        self.write(port, CMD, 0x11);
        self.write(port, 0x14, u64::MAX);
        self.ahci.mmio_write(0x04, 4, 2);
    }

    fn write(&self, port: u64, register: u64, value: u64) {
        self.ahci.mmio_write(0x100 + port * 0x80 + register, 4, value);
    }

    fn read(&self, port: u64, register: u64) -> u64 {
        self.ahci.mmio_read(0x100 + port * 0x80 + register, 4)
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let what = input.u8();
        let port = u64::from(what >> 7);
        match what % 12 {
            0 => {
                let offset = u64::from(input.u16()) % (ABAR_SIZE + 8);
                self.ahci.mmio_write(offset, usize::from(input.u8() % 10), input.u64());
            }
            1 => {
                let offset = u64::from(input.u16()) % (ABAR_SIZE + 8);
                self.ahci.mmio_read(offset, usize::from(input.u8() % 10));
            }
            2 => {
                let register = u64::from(input.u8() % 32) * 4;
                self.write(port, register, input.u32().into());
            }
            3 => self.command(port, input),
            4 => {
                let addr = address(input);
                let _ = self.world.full.write_bytes(addr, &input.array::<8>());
            }
            5 => {
                let slots = u64::from(input.u32());
                self.write(port, SACT, slots);
                self.write(port, CI, slots);
            }
            6 => self.world.turn(),
            7 | 8 => {
                let [nth, count] = input.array();
                let result = if count & 0x80 == 0 { Ok(()) } else { Err(Errno::EIO) };
                let disk = &self.disks[port as usize];
                self.world.event_loop.section(|| {
                    for _ in 0..=count & 0x1f {
                        disk.answer(nth.into(), result);
                    }
                });
            }
            9 => self.start(port),
            10 => match input.u8() % 4 {
                0 => self.write(port, SCTL, 1),
                1 => self.write(port, SCTL, 0),
                2 => self.write(port, CMD, input.u8().into()),
                _ => self.ahci.mmio_write(0x04, 4, u64::from(input.u8()) & 3),
            },
            _ => {
                let full = !input.u8().is_multiple_of(4);
                let memory = if full { &self.world.full } else { &self.world.less };
                self.ahci.set_memory(memory.clone());
            }
        }
    }

    /// A command in a slot that is mostly right, and announced.
    fn command(&self, port: u64, input: &mut Input<'_>) {
        const COMMANDS: [u8; 32] = [
            0x60, 0x61, 0x25, 0x35, 0xc8, 0xca, 0x06, 0xec, 0x2f, 0xef, 0xea, 0xe7, 0x20, 0x30,
            0x3d, 0x60, 0x61, 0xe5, 0x90, 0x24, 0x34, 0x40, 0xc6, 0x29, 0x39, 0xc4, 0xc5, 0xe0,
            0x60, 0x61, 0x06, 0x00,
        ];
        let [kind, slot, prds, flags] = input.array();
        let slot = slot % 32;
        let code = if kind & 0x80 == 0 { COMMANDS[usize::from(kind % 32)] } else { input.u8() };
        let table = port * 0x2000 + TABLE + u64::from(slot % 4) * 0x200;
        let mut fis = [0; 20];
        fis[0] = if flags & 1 == 0 { 0x27 } else { input.u8() };
        fis[1] = if flags & 2 == 0 { 0x80 } else { input.u8() };
        let [lba0, lba1, lba2, features, count, more] = input.array();
        (fis[2], fis[3], fis[4], fis[5]) = (code, features, lba0, lba1);
        fis[6] = if flags & 4 == 0 { 0 } else { lba2 };
        fis[7] = if flags & 8 == 0 { 0x40 } else { more };
        (fis[11], fis[12], fis[13]) = (more & 1, count, more >> 7);
        if matches!(code, 0x60 | 0x61) && flags & 16 == 0 {
            fis[12] = slot << 3;
        }
        fis[15] = more & 4;
        let memory = &self.world.full;
        let _ = memory.write_bytes(table, &fis);
        for prd in 0..u64::from(prds % 8) {
            let mut entry = [0; 16];
            entry[..8].copy_from_slice(&address(input).to_le_bytes());
            let len = match input.u8() {
                0 => input.u32(),
                n => u32::from(n) * 512 - 1,
            };
            entry[12..].copy_from_slice(&len.to_le_bytes());
            let _ = memory.write_bytes(table + 0x80 + prd * 16, &entry);
        }
        let mut header = [0; 32];
        header[0] = if flags & 32 == 0 { 5 } else { input.u8() };
        header[2] = if flags & 64 == 0 { prds % 8 } else { 0xff };
        header[3] = if flags & 64 == 0 { 0 } else { input.u8() };
        header[8..16].copy_from_slice(&table.to_le_bytes());
        let _ = memory.write_bytes(port * 0x2000 + LIST + u64::from(slot) * 32, &header);
        self.write(port, SACT, 1 << slot);
        self.write(port, CI, 1 << slot);
    }

    fn check(&self) {
        let level = self.ahci.mmio_read(4, 4) & 2 != 0 && self.ahci.mmio_read(8, 4) != 0;
        assert_eq!(self.line.load(Ordering::Relaxed), level, "the line");
        for (port, disk) in self.disks.iter().enumerate() {
            if self.read(port as u64, CMD) & 1 << 15 == 0 {
                assert!(disk.held.borrow().is_empty(), "stopped with requests in flight");
            }
        }
    }

    /// Whatever has happened, a driver that resets everything has a controller that works.
    fn end(self) {
        self.ahci.set_memory(self.world.full.clone());
        self.ahci.mmio_write(0x04, 4, 1);
        self.world.turn();
        for disk in &self.disks {
            while !disk.held.borrow().is_empty() {
                disk.answer(0, Ok(()));
            }
        }
        self.world.turn();
        assert_eq!(self.ahci.mmio_read(0x04, 4), 1 << 31, "the reset has ended");
        for port in 0..PORTS {
            assert_eq!(self.read(port, SSTS), 0x133);
            self.start(port);
            let mut fis = [0; 20];
            (fis[0], fis[1], fis[2]) = (0x27, 0x80, 0xea);
            let memory = &self.world.full;
            let base = port * 0x2000;
            memory.write_bytes(base + TABLE, &fis).expect("memory");
            memory.write_bytes(base + LIST, &[5, 0, 0, 0]).expect("memory");
            memory.write_bytes(base + LIST + 8, &(base + TABLE).to_le_bytes()).expect("memory");
            self.write(port, CI, 1);
            self.world.turn();
            self.disks[port as usize].answer(0, Ok(()));
            self.world.turn();
            assert_eq!(self.read(port, CI), 0, "a flush ends");
        }
        for drive in &self.drives {
            let gone = Rc::new(Cell::new(false));
            let told = gone.clone();
            drive.detach(move || told.set(true));
            assert!(gone.get(), "nothing is in flight");
        }
    }
}

/// An address: most often memory, sometimes anything.
fn address(input: &mut Input<'_>) -> u64 {
    match input.u8() {
        0 => input.u64(),
        1 => 0x7ff0 + u64::from(input.u8()),
        2 => u64::MAX - u64::from(input.u8()),
        page => (u64::from(page & 0x1f) << 12) + (u64::from(input.u8()) << 4),
    }
}
