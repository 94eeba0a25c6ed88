//! A hostile virtio-scsi driver: CDBs, parameter lists, chains of any shape, task management, before disks
//! that answer late, in any order, well or badly, and change their size.
//!
//! Each answer is checked to be one, each request to a disk to be within it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use block::node::{Channel, Geometry};
use block::request::{Op, Request};
use devices::virtio::{Held, Virtqueue};
use devices::virtio_scsi::{Device, DeviceConfig, DeviceOnLoop, LunConfig};
use event_loop::EventLoop;
use guest_memory::MemoryView;
use nix::errno::Errno;
use queue::driver::Driver;
use queue::{Queue, Segment};
use stats::QueueStats;

use crate::input::Input;
use crate::world;

const DISK: u64 = 1 << 20;
const ENTRIES: u16 = 32;
/// The control queue, the event queue, two request queues.
const QUEUES: u16 = 4;
/// Guest memory: rings, then slots with a request, a response and data.
const SLOTS_AT: u64 = 0x8000;
const SLOT: u64 = 0x3000;
/// Each step has its own slot: a driver that uses one twice reads another request's answer.
const SLOTS: u64 = 200;
const RESPONSE_AT: u64 = 0x200;
const DATA_AT: u64 = 0x400;
const MAX_DATA: u16 = 0x2800;
/// Bytes of a request and of a response, without their data.
const REQUEST: u32 = 51;
const RESPONSE: u32 = 108;

struct World {
    memory: Rc<MemoryView>,
    event_loop: EventLoop,
}

impl World {
    fn new() -> Self {
        let size = SLOTS_AT + SLOT * SLOTS;
        let memory = guest_memory::test_util::memfd_memory(&[(0, size)]).expect("a memfd");
        let event_loop = world::quiet_loop();
        World { memory: MemoryView::new(memory), event_loop }
    }

    fn turn(&self) {
        world::turn(&self.event_loop, 3);
    }
}

thread_local! {
    static WORLD: World = World::new();
}

/// A disk that keeps its requests until a step answers one.
#[derive(Default)]
struct Disk {
    held: RefCell<Vec<Request>>,
    read_only: bool,
}

impl Channel for Disk {
    fn submit(&self, request: Request) {
        let end = request.offset.checked_add(request.len).expect("a range");
        assert!(end <= DISK, "beyond the disk");
        match request.op {
            Op::Read => assert!(request.len > 0 && request.bufs.len() as u64 == request.len),
            Op::Write { .. } => {
                assert!(!self.read_only, "a write to a read-only disk");
                assert!(request.len > 0 && request.bufs.len() as u64 == request.len);
            }
            Op::Discard | Op::WriteZeroes { .. } => {
                assert!(!self.read_only && request.len > 0);
            }
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
    /// Answers one; `false`: there is none.
    fn answer(&self, nth: usize, result: Result<(), Errno>) -> bool {
        let mut held = self.held.borrow_mut();
        let Some(last) = held.len().checked_sub(1) else { return false };
        let request = held.remove(nth.min(last));
        drop(held);
        request.complete(result);
        true
    }
}

/// A request on its way: where its response is, and how long its parts are.
#[derive(Clone, Copy)]
struct Sent {
    slot: u64,
    buffer: u32,
    writable: u32,
}

struct Guest<'a> {
    world: &'a World,
    device: Arc<Device>,
    disks: [Rc<Disk>; 2],
    drivers: Vec<Driver>,
    queues: Vec<Rc<dyn Virtqueue>>,
    _on_loop: Rc<DeviceOnLoop>,
    /// By queue and head.
    sent: Vec<Vec<Option<Sent>>>,
    next_slot: u64,
}

impl<'a> Guest<'a> {
    fn new(world: &'a World, options: u8) -> Self {
        let read_only = options & 1 != 0;
        let geometry = Geometry {
            size: DISK,
            read_only,
            physical_block_size: 4096,
            request_alignment: 1,
            discard: options & 2 != 0,
            discard_granularity: 512,
            write_zeroes: true,
            write_cache: true,
        };
        let lun = |n| LunConfig { geometry, serial: format!("fuzz-{n}") };
        let config = DeviceConfig {
            name: "fuzz".to_owned(),
            luns: (0..2).map(lun).collect(),
            num_queues: QUEUES - 2,
            logical_block_size: 512 << (options >> 2 & 3),
            writable: true,
            writethrough: options & 16 != 0,
        };
        let device = Arc::new(Device::new(config).expect("numbers that fit"));
        device.set_features(device.features());
        let disks = [(); 2].map(|()| Rc::new(Disk { read_only, ..Disk::default() }));
        let channels = disks.iter().map(|disk| disk.clone() as Rc<dyn Channel>).collect();
        let on_loop = DeviceOnLoop::new(&world.event_loop, device.clone(), channels);
        let (mut drivers, mut queues) = (Vec::new(), Vec::new());
        for index in 0..QUEUES {
            let base = u64::from(index) * 0x2000;
            let driver = Driver::new(&world.memory, base, ENTRIES, options & 32 != 0);
            let driver = driver.expect("it is memory");
            let queue = Queue::new(world.memory.clone(), driver.config()).expect("a right one");
            let stats = Arc::new(QueueStats::default());
            let queue = on_loop.start_queue(index, queue, None, None, stats);
            queue.set_enabled(true);
            drivers.push(driver);
            queues.push(queue);
        }
        let sent = vec![vec![None; ENTRIES.into()]; QUEUES.into()];
        let _on_loop = on_loop;
        Guest { world, device, disks, drivers, queues, _on_loop, sent, next_slot: 0 }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let kind = input.u8();
        match kind % 16 {
            0..=6 => self.command(input),
            7 => {
                // Of any shape.
                let queue = usize::from(input.u8()) % usize::from(QUEUES);
                let (readable, writable) = (input.u16() % 400, input.u16() % 400);
                let bytes: [u8; 64] = input.array();
                self.add(queue, &bytes, readable.into(), writable.into(), u32::from(input.u8()));
            }
            8 => {
                let mut request = [0; 24];
                request[4..12].copy_from_slice(&address(input));
                request[..4].copy_from_slice(&u32::from(input.u8() % 4).to_le_bytes());
                let function = u32::from(input.u8() % 9).to_le_bytes();
                if request[..4] == [0; 4] {
                    request.copy_within(4..12, 8);
                    request[4..8].copy_from_slice(&function);
                }
                request[16..].copy_from_slice(&u64::from(input.u8() % 4).to_le_bytes());
                self.add(0, &request, 24, 5, 0);
            }
            9 => self.add(1, &[], 0, u32::from(input.u8()), 0),
            10 => self.device.set_size((kind >> 7).into(), u64::from(input.u32()) % (DISK + 1)),
            11..=13 => {
                let disk = &self.disks[usize::from(kind >> 7)];
                let result = match input.u8() % 4 {
                    0 => Err(Errno::from_raw(i32::from(input.u8()))),
                    _ => Ok(()),
                };
                disk.answer(input.u8().into(), result);
            }
            14 => self.world.turn(),
            _ => {
                let queue = usize::from(input.u8()) % usize::from(QUEUES);
                self.queues[queue].set_enabled(!input.u8().is_multiple_of(4));
            }
        }
        self.reap();
    }

    fn command(&mut self, input: &mut Input<'_>) {
        let mut bytes = [0; REQUEST as usize + 64];
        bytes[..8].copy_from_slice(&address(input));
        bytes[8] = input.u8() % 4;
        let cdb: [u8; 16] = input.array();
        bytes[19..35].copy_from_slice(&cdb);
        let list: [u8; 64] = input.array();
        bytes[REQUEST as usize..].copy_from_slice(&list);
        let len = u32::from(input.u16() % MAX_DATA);
        let (out, inward) = match input.u8() % 8 {
            0 => (0, 0),
            1..=3 => (len, 0),
            4..=6 => (0, len),
            _ => (len, len),
        };
        let queue = usize::from(2 + input.u8() % 2);
        self.add(queue, &bytes, REQUEST + out, RESPONSE + inward, 0);
    }

    /// Adds a chain that begins with these bytes, its parts cut in two after `cut` bytes.
    fn add(&mut self, queue: usize, bytes: &[u8], readable: u32, writable: u32, cut: u32) {
        let slot = SLOTS_AT + SLOT * self.next_slot;
        self.next_slot += 1;
        let (head, data) = bytes.split_at(bytes.len().min(REQUEST as usize));
        let write = |addr, bytes| self.world.memory.write_bytes(addr, bytes).expect("memory");
        write(slot, head);
        write(slot + DATA_AT, data);
        let parts = |at: u64, first: u32, len: u32| {
            let first = if cut > 0 { cut.min(len) } else { first.min(len) };
            [Segment { addr: at, len: first }, Segment { addr: slot + DATA_AT, len: len - first }]
        };
        let some = |parts: [Segment; 2]| -> Vec<Segment> {
            parts.into_iter().filter(|segment| segment.len > 0).collect()
        };
        let readable = some(parts(slot, REQUEST, readable));
        let whole = some(parts(slot + RESPONSE_AT, RESPONSE, writable));
        let Some(head) = self.drivers[queue].add(&readable, &whole) else { return };
        let straight = cut == 0 && writable >= RESPONSE && queue >= 2;
        let out: u32 = readable.iter().map(|segment| segment.len).sum();
        let buffer = out.saturating_sub(REQUEST) + writable.saturating_sub(RESPONSE);
        // Where the response of a command is known.
        let slot = if straight { slot } else { 0 };
        self.sent[queue][usize::from(head)] = Some(Sent { slot, buffer, writable });
        let _ = self.drivers[queue].publish();
        self.queues[queue].set_enabled(true);
    }

    /// Takes all answers, and checks them.
    fn reap(&mut self) {
        for (driver, sent) in self.drivers.iter_mut().zip(&mut self.sent) {
            while let Some(used) = driver.reap() {
                let Sent { slot, buffer, writable } =
                    sent[usize::from(used.head)].take().expect("answered once");
                assert!(used.written <= writable, "more than there is room for");
                if slot == 0 || used.written == 0 {
                    continue;
                }
                let bytes: [u8; 30] =
                    self.world.memory.read_array(slot + RESPONSE_AT).expect("memory");
                let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|n| bytes[at + n]));
                let (sense, residual) = (word(0), word(4));
                let (status, response) = (bytes[10], bytes[11]);
                assert!(residual <= buffer, "more is left than there was");
                assert!(matches!(response, 0..=4 | 9), "no response: {response}");
                match status {
                    0 => assert_eq!(sense, 0),
                    2 => assert_eq!((response, sense, bytes[12]), (0, 18, 0x70)),
                    _ => panic!("no status: {status}"),
                }
            }
        }
    }

    /// Everything comes to an end.
    fn finish(mut self) {
        let stopped: Vec<_> = self
            .queues
            .iter()
            .map(|queue| {
                let stopped = Rc::new(Cell::new(false));
                let out = stopped.clone();
                queue.stop(Held::Left, Box::new(move |_| out.set(true)));
                stopped
            })
            .collect();
        // A long WRITE SAME has a part for each turn.
        for _ in 0..10_000 {
            let answered = self.disks.iter().filter(|disk| disk.answer(0, Ok(()))).count();
            self.world.event_loop.run_once(false).expect("it turns");
            if answered == 0 && stopped.iter().all(|stopped| stopped.get()) {
                break;
            }
        }
        self.reap();
        assert!(stopped.iter().all(|stopped| stopped.get()), "a queue does not stop");
    }
}

/// An address that often is one.
fn address(input: &mut Input<'_>) -> [u8; 8] {
    match input.u8() {
        byte @ 0..=239 => [1, 0, 0x40, byte % 3, 0, 0, 0, 0],
        _ => input.array(),
    }
}

/// Runs the steps.
pub fn run(data: &[u8]) {
    WORLD.with(|world| {
        let mut input = Input::new(data);
        let mut guest = Guest::new(world, input.u8());
        let mut steps = 0;
        while !input.is_empty() && steps < SLOTS {
            guest.step(&mut input);
            steps += 1;
        }
        guest.finish();
        world.turn();
    });
}
