//! A hostile NVMe driver: registers, queues, commands, lists of data, doorbells in registers and in memory, resets,
//! memory exchanged, as one sequence of steps, before disks that answer late, in any order, well or badly. In between the state
//! goes to another controller, changed on its way. Then a driver that keeps to the rules.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use block::node::{Channel, Geometry};
use block::request::{Op, Request};
use devices::nvme::{
    BAR_SIZE, Controller, ControllerConfig, DoorbellMode, Messages, NamespaceConfig,
};
use event_loop::EventLoop;
use guest_memory::GuestMemory;
use guest_memory::test_util::{USER_BASE, memfd_region};
use nix::errno::Errno;

use crate::input::Input;
use crate::world;

/// Guest memory: two neighbours, a hole, a third region that may be unplugged.
const REGIONS: [(u64, u64); 3] = [(0, 0x8000), (0x8000, 0x8000), (0x20000, 0x4000)];
/// Bytes of each disk, of which the first may become larger.
const DISK: u64 = 1 << 20;
const QUEUES: u16 = 2;

/// Where queue N has its entries, and its completions behind them.
const fn queue_at(number: u64) -> u64 {
    0x2000 * (number + 1)
}
const COMPLETIONS: u64 = 0x1000;
const ENTRIES: u32 = 16;
const SHADOW: u64 = 0x1000;
const EVENTS: u64 = 0xf000;

const CC: u64 = 0x14;
const CSTS: u64 = 0x1c;
const ENABLE: u32 = 0x0046_0001;

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
        World { full: Arc::new(full), less: Arc::new(less), event_loop: world::quiet_loop() }
    }
}

thread_local! {
    static WORLD: World = World::new();
}

/// A disk that keeps its requests until `answer` is called.
struct Disk {
    held: RefCell<Vec<Request>>,
    read_only: bool,
    memory: Arc<GuestMemory>,
}

impl Channel for Disk {
    fn submit(&self, request: Request) {
        let end = request.offset.checked_add(request.len).expect("a range");
        assert!(end <= 2 * DISK, "beyond the disk");
        match request.op {
            Op::Read => self.check_memory(&request),
            Op::Write { .. } => {
                assert!(!self.read_only, "a write to a read-only disk");
                self.check_memory(&request);
            }
            Op::Discard | Op::WriteZeroes { .. } => assert!(!self.read_only && request.len > 0),
            Op::BlockStatus => unreachable!("no guest asks for it"),
            Op::Flush => assert_eq!((request.offset, request.len), (0, 0)),
        }
        self.held.borrow_mut().push(request);
    }

    fn in_flight(&self) -> usize {
        self.held.borrow().len()
    }
}

impl Disk {
    /// Segments are guest memory, or, of Compare and Verify, one of the controller's own.
    fn check_memory(&self, request: &Request) {
        assert!(request.len > 0 && request.bufs.len() as u64 == request.len);
        let is_guests = |at: usize| {
            self.memory.regions().iter().any(|region| {
                let host = region.host().as_ptr() as usize;
                (host..host + region.size() as usize).contains(&at)
            })
        };
        let iovecs = request.bufs.iovecs();
        let guests = iovecs.iter().filter(|iov| {
            let base = iov.iov_base as usize;
            is_guests(base) && is_guests(base + iov.iov_len - 1)
        });
        let all = guests.count() == iovecs.len();
        assert!(all || request.op == Op::Read && iovecs.len() == 1, "outside guest memory");
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

struct Nowhere;

impl Messages for Nowhere {
    fn send(&self, vector: u16) {
        assert!(vector <= QUEUES, "no such vector");
    }
}

fn geometry(size: u64) -> Geometry {
    Geometry {
        size,
        read_only: false,
        physical_block_size: 512,
        request_alignment: 1,
        discard: true,
        discard_granularity: 512,
        write_zeroes: true,
        write_cache: true,
    }
}

struct Run<'a> {
    world: &'a World,
    controller: Rc<Controller>,
    disks: [Rc<Disk>; 2],
    tails: [u32; 3],
}

/// A controller with a worker for each queue, all on one loop.
fn controller(world: &World, disks: &[Rc<Disk>]) -> Rc<Controller> {
    let namespace = |writable| NamespaceConfig { geometry: geometry(DISK), writable };
    let config = ControllerConfig {
        serial: "S".into(),
        model: "M".into(),
        identity: "I".into(),
        num_queues: QUEUES,
        doorbells: DoorbellMode::Auto,
        write_cache: true,
        namespaces: vec![namespace(true), namespace(false)],
    };
    let made = Controller::new(&world.event_loop, config, Box::new(Nowhere), QUEUES.into());
    let (controller, attachments) = made.expect("a controller");
    for attachment in attachments {
        let channels = disks.iter().map(|disk| disk.clone() as Rc<dyn Channel>).collect();
        attachment.attach(&world.event_loop, channels, Box::new(Nowhere));
    }
    controller.set_memory(world.full.clone());
    controller
}

/// Runs the steps in `data`.
pub fn run(data: &[u8]) {
    WORLD.with(|world| {
        for (addr, size) in REGIONS {
            world.full.write_bytes(addr, &[0; 0x8000][..size as usize]).expect("memory");
        }
        let disk = |read_only| {
            let held = RefCell::default();
            Rc::new(Disk { held, read_only, memory: world.full.clone() })
        };
        let disks = [disk(false), disk(true)];
        let controller = controller(world, &disks);
        let mut run = Run { world, controller, disks, tails: [0; 3] };
        let mut input = Input::new(data);
        for _ in 0..256 {
            if input.is_empty() {
                break;
            }
            run.step(&mut input);
        }
        run.end();
    });
}

impl Run<'_> {
    fn turn(&self) {
        world::turn(&self.world.event_loop, 3);
    }

    fn write(&self, at: u64, value: u32) {
        self.controller.mmio_write(at, &value.to_le_bytes());
    }

    fn read(&self, at: u64) -> u32 {
        let mut bytes = [0; 4];
        self.controller.mmio_read(at, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let step = match input.u8() {
            0xfc.. => return self.hand_over(input),
            step => step % 14,
        };
        match step {
            0 => {
                let at = u64::from(input.u16()) % (BAR_SIZE + 8);
                let bytes: [u8; 8] = input.array();
                self.controller.mmio_write(at, &bytes[..usize::from(input.u8() % 9)]);
            }
            1 => {
                let at = u64::from(input.u16()) % (BAR_SIZE + 8);
                self.controller.mmio_read(at, &mut [0; 8]);
            }
            2 => self.enable(),
            3 => {
                let number = u32::from(input.u8()) % 3;
                self.create(number);
            }
            4 | 5 => self.command(input),
            6 => {
                let (addr, value) = (u64::from(input.u32()) % 0x24000, input.array::<8>());
                let _ = self.world.full.write_bytes(addr, &value);
            }
            7 => {
                let number = u64::from(input.u8()) % 8;
                self.write(0x1000 + 4 * number, input.u16().into());
            }
            8 => {
                let (nth, error) = (input.u8().into(), input.u8());
                let result = match error % 8 {
                    0 => Err(Errno::EIO),
                    1 => Err(Errno::ENOSPC),
                    2 => Err(Errno::EOPNOTSUPP),
                    _ => Ok(()),
                };
                self.disks[usize::from(error >> 7)].answer(nth, result);
            }
            9 => {
                let memory =
                    if input.u8().is_multiple_of(2) { &self.world.full } else { &self.world.less };
                self.controller.set_memory(memory.clone());
            }
            10 => self.controller.reset(),
            11 => drop(self.controller.settle()),
            12 => self.controller.set_geometry(0, &geometry(u64::from(input.u16() % 4096) * 512)),
            _ => self.turn(),
        }
    }

    /// Replaces the controller by another that continues with the saved state, or with a state of which words were changed.
    fn hand_over(&mut self, input: &mut Input<'_>) {
        let (answer, paused) = event_loop::oneshot::channel();
        let pausing = self.controller.pause();
        self.world.event_loop.spawn(async move { answer.send(pausing.await) });
        self.answer_all();
        let paused = self.world.event_loop.block_on(paused).expect("it turns");
        let mut state = paused.expect("it is paused").expect("its workers are there");
        let changes = input.u8() % 4;
        for _ in 0..changes {
            let words = state.len() / 8;
            let at = 8 * (usize::from(input.u16()) % words);
            let word = state.get_mut(at..at + 8).expect("a word");
            let value = match input.u8() {
                small @ 0..0x80 => small.into(),
                0x80..0xc0 => u64::from(input.u16()) << 6,
                _ => input.u64(),
            };
            word.copy_from_slice(&value.to_le_bytes());
        }
        let next = controller(self.world, &self.disks);
        match next.check(&state) {
            Ok(restored) => next.restore(restored),
            Err(error) => assert!(changes > 0, "{error}"),
        }
        let before = std::mem::replace(&mut self.controller, next);
        self.world.event_loop.block_on(before.end()).expect("it turns");
    }

    fn enable(&mut self) {
        self.tails = [0; 3];
        self.write(0x24, (ENTRIES - 1) << 16 | (ENTRIES - 1));
        self.controller.mmio_write(0x28, &queue_at(0).to_le_bytes());
        self.controller.mmio_write(0x30, &(queue_at(0) + COMPLETIONS).to_le_bytes());
        self.write(CC, ENABLE);
    }

    /// Makes a pair of I/O queues, or, for number 0, has the driver write doorbells to memory.
    fn create(&mut self, number: u32) {
        let size = (ENTRIES - 1) << 16 | number;
        if number == 0 {
            return self.submit(0, 0x7c, 0, (SHADOW, EVENTS), [0; 6]);
        }
        self.tails[number as usize] = 0;
        let at = queue_at(number.into());
        let completion = [size, number << 16 | 3, 0, 0, 0, 0];
        self.submit(0, 0x05, 0, (at + COMPLETIONS, 0), completion);
        self.turn();
        self.submit(0, 0x01, 0, (at, 0), [size, number << 16 | 1, 0, 0, 0, 0]);
        self.turn();
    }

    /// A command of any kind. Its data is often within memory.
    fn command(&mut self, input: &mut Input<'_>) {
        let (queue, opcode) = (usize::from(input.u8()) % 3, input.u16());
        let nsid = match input.u8() {
            nsid @ 0..250 => u32::from(nsid % 4),
            _ => u32::MAX,
        };
        let address = |input: &mut Input<'_>| match input.u8() {
            0..8 => input.u64(),
            _ => u64::from(input.u16()) << 2 & 0x3_ffff,
        };
        let data = (address(input), address(input));
        let mut dwords = [0; 6];
        for dword in dwords.iter_mut().take(4) {
            *dword = if input.u8() < 16 { input.u32() } else { input.u8().into() };
        }
        self.submit(queue, opcode & 0x80ff | opcode & 0x4000, nsid, data, dwords);
    }

    fn submit(&mut self, queue: usize, opcode: u16, nsid: u32, data: (u64, u64), dwords: [u32; 6]) {
        let tail = self.tails[queue];
        let mut words = [0; 16];
        (words[0], words[1]) = (u32::from(opcode) | tail << 16, nsid);
        let pointer = [data.0, data.0 >> 32, data.1, data.1 >> 32].map(|word| word as u32);
        words[6..10].copy_from_slice(&pointer);
        words[10..].copy_from_slice(&dwords);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let at = queue_at(queue as u64) + 64 * u64::from(tail);
        self.world.full.write_bytes(at, &bytes).expect("memory");
        self.tails[queue] = (tail + 1) % ENTRIES;
        let tail = self.tails[queue];
        let shadow = SHADOW + 8 * queue as u64;
        self.world.full.write_bytes(shadow, &tail.to_le_bytes()).expect("memory");
        self.write(0x1000 + 8 * queue as u64, tail);
    }

    /// After a reset, with all requests answered, a driver that keeps to the rules is served.
    fn end(mut self) {
        self.controller.set_memory(self.world.full.clone());
        self.controller.reset();
        self.answer_all();
        let settled = self.controller.settle();
        self.world.event_loop.block_on(settled).expect("it turns").expect("it settles");
        world::until(&self.world.event_loop, "it is down", || self.read(CSTS) == 0);
        for (addr, size) in REGIONS {
            self.world.full.write_bytes(addr, &[0; 0x8000][..size as usize]).expect("memory");
        }
        self.enable();
        assert_eq!(self.read(CSTS), 1);
        self.submit(0, 0x06, 0, (0x20000, 0), [1, 0, 0, 0, 0, 0]);
        let mut status = [0; 4];
        let at = queue_at(0) + COMPLETIONS + 12;
        self.world.full.read_bytes(at, &mut status).expect("memory");
        assert_eq!(u32::from_le_bytes(status) >> 16, 1, "success, in the first phase");
        let Run { world, controller, .. } = self;
        world.event_loop.block_on(controller.end()).expect("it turns");
    }

    fn answer_all(&self) {
        for _ in 0..4096 {
            self.turn();
            if self.disks.iter().all(|disk| disk.in_flight() == 0) {
                return;
            }
            self.disks.iter().for_each(|disk| disk.answer(0, Ok(())));
        }
        panic!("requests without an end");
    }
}
