//! A virtio-blk queue with a driver of ours at the other end, on one loop.
#![allow(unreachable_pub, reason = "modules of one program")]

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use block::NodeRegistry;
use block::node::BlockNode;
use block::options::{BlockdevOptions, Discard, Driver as NodeDriver, NullOptions};
use devices::virtio::Virtqueue;
use devices::virtio_blk::{Device, DeviceConfig, start_queue};
use event_loop::{EventLoop, LoopConfig, PollParams, Signal};
use guest_memory::MemoryView;
use nix::sys::eventfd::{EfdFlags, EventFd};
use queue::driver::Driver;
use queue::{Chain, Inflight, Queue, Segment};
use stats::QueueStats;

pub const IN: u32 = 0;
pub const OUT: u32 = 1;
pub const FLUSH: u32 = 4;
pub const GET_ID: u32 = 8;
pub const DISCARD: u32 = 11;
pub const WRITE_ZEROES: u32 = 13;

pub const OK: u8 = 0;
pub const IOERR: u8 = 1;
pub const UNSUPP: u8 = 2;

/// Where things are in the guest's memory: rings first, then a slot of this size per request.
const SLOTS_AT: u64 = 1 << 20;
const SLOT: u64 = 64 << 10;
/// In a slot: the header, the status, the data.
pub const STATUS_AT: u64 = 64;
const DATA_AT: u64 = 4096;

pub struct Rig {
    pub event_loop: EventLoop,
    pub memory: Rc<MemoryView>,
    pub driver: Driver,
    pub handler: Rc<dyn Virtqueue>,
    pub device: Arc<Device>,
    pub kick: Arc<OwnedFd>,
    pub call: Arc<OwnedFd>,
    pub stats: Arc<QueueStats>,
    next_slot: u64,
}

pub fn null_options() -> BlockdevOptions {
    let null = NullOptions { size: 1 << 30, latency_ns: 0, read_zeroes: false };
    BlockdevOptions {
        discard: Discard::Unmap,
        ..BlockdevOptions::new(Some("n"), NodeDriver::null_co(null))
    }
}

pub fn device_config(node: &dyn BlockNode) -> DeviceConfig {
    DeviceConfig {
        geometry: node.geometry(),
        num_queues: 1,
        logical_block_size: 512,
        writable: true,
        writethrough: false,
        serial: "ringmill-test".into(),
    }
}

fn eventfd() -> Arc<OwnedFd> {
    let fd = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC).unwrap();
    Arc::new(fd.into())
}

impl Drop for Rig {
    /// The loop holds the queue, and the queue the loop.
    fn drop(&mut self) {
        let _ = self.event_loop.shut_down();
    }
}

impl Rig {
    pub fn new(options: &BlockdevOptions, queue_size: u16, poll_max_ns: u64) -> Rig {
        Rig::with(options, queue_size, poll_max_ns, |_| {})
    }

    pub fn with(
        options: &BlockdevOptions,
        queue_size: u16,
        poll_max_ns: u64,
        change: impl FnOnce(&mut DeviceConfig),
    ) -> Rig {
        let poll = PollParams { max_ns: poll_max_ns, ..PollParams::default() };
        let event_loop = EventLoop::new(LoopConfig { poll, ..LoopConfig::default() }).unwrap();
        let node = NodeRegistry::new().open(options).unwrap();
        Rig::on(event_loop, &node, queue_size, change)
    }

    pub fn on(
        event_loop: EventLoop,
        node: &Arc<dyn BlockNode>,
        queue_size: u16,
        change: impl FnOnce(&mut DeviceConfig),
    ) -> Rig {
        Rig::on_with(event_loop, node, queue_size, change, None)
    }

    /// The same with a record of what is in flight, of as many entries.
    pub fn on_with(
        event_loop: EventLoop,
        node: &Arc<dyn BlockNode>,
        queue_size: u16,
        change: impl FnOnce(&mut DeviceConfig),
        record: Option<Inflight>,
    ) -> Rig {
        let mut config = device_config(&**node);
        change(&mut config);
        let device = Arc::new(Device::new(config).unwrap());
        device.set_features(device.features());
        let size = SLOTS_AT + SLOT * u64::from(queue_size);
        let memory = MemoryView::new(guest_memory::test_util::memfd_memory(&[(0, size)]).unwrap());
        let driver = Driver::new(&memory, 0, queue_size, true).unwrap();
        let queue = Queue::with_inflight(memory.clone(), driver.config(), record).unwrap();
        let channel = node.clone().open_channel(&event_loop).unwrap();
        let (kick, call) = (eventfd(), eventfd());
        let stats = Arc::new(QueueStats::default());
        let handler = start_queue(
            &event_loop,
            device.clone(),
            channel,
            queue,
            Some(kick.clone()),
            Some(Signal::new(call.clone())),
            stats.clone(),
        );
        handler.set_enabled(true);
        Rig { event_loop, memory, driver, handler, device, kick, call, stats, next_slot: 0 }
    }

    /// Adds a request, not yet published, with `data` for the device to read and `reply` bytes for
    /// it to write; returns its head and its slot's address.
    pub fn add(&mut self, kind: u32, sector: u64, data: &[u8], reply: u32) -> (u16, u64) {
        let slots = u64::from(self.driver.config().size);
        let slot = SLOTS_AT + SLOT * (self.next_slot % slots);
        self.next_slot += 1;
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        self.memory.write_bytes(slot, &header).unwrap();
        self.memory.write_u8(slot + STATUS_AT, 0xff).unwrap();
        self.memory.write_bytes(slot + DATA_AT, data).unwrap();
        let header = Segment { addr: slot, len: 16 };
        let out = Segment { addr: slot + DATA_AT, len: data.len() as u32 };
        let inward = Segment { addr: slot + DATA_AT, len: reply };
        let status = Segment { addr: slot + STATUS_AT, len: 1 };
        let readable = [header, out];
        let writable = [inward, status];
        let readable = if data.is_empty() { &readable[..1] } else { &readable[..] };
        let writable = if reply == 0 { &writable[1..] } else { &writable[..] };
        let head = self.driver.add(readable, writable).expect("room in the queue");
        (head, slot)
    }

    /// Asks for a signal, shows the device what was added, and kicks if it wants a kick.
    pub fn publish(&mut self) {
        // What was answered meanwhile is found by `reap`.
        let _ = self.driver.enable_signals();
        if self.driver.publish() {
            nix::unistd::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
        }
    }

    /// The rings as another process finds them, with the record: the heads that it does again.
    pub fn redone(&self, record: Inflight) -> Vec<u16> {
        let config = self.driver.config();
        let queue = Queue::with_inflight(self.memory.clone(), config, Some(record)).unwrap();
        let mut chain = Chain::new();
        std::iter::from_fn(|| queue.pop(&mut chain).unwrap().then(|| chain.head())).collect()
    }

    /// Turns the loop until the driver has `count` answers.
    pub fn reap(&mut self, count: usize) {
        let mut reaped = 0;
        while reaped < count {
            match self.driver.reap() {
                Some(_) => reaped += 1,
                None => self.event_loop.run_once(true).unwrap(),
            }
        }
    }

    /// One request from start to end: its status.
    pub fn request(&mut self, kind: u32, sector: u64, data: &[u8], reply: u32) -> u8 {
        let (_, slot) = self.add(kind, sector, data, reply);
        self.publish();
        self.reap(1);
        self.memory.read_u8(slot + STATUS_AT).unwrap()
    }

    /// What the device wrote for the latest request.
    pub fn reply(&self, len: usize) -> Vec<u8> {
        let slots = u64::from(self.driver.config().size);
        let slot = SLOTS_AT + SLOT * ((self.next_slot - 1) % slots);
        let mut bytes = vec![0; len];
        self.memory.read_bytes(slot + DATA_AT, &mut bytes).unwrap();
        bytes
    }

    /// Signals since the last time this was asked.
    pub fn signals(&self) -> u64 {
        let mut count = [0; 8];
        match nix::unistd::read(&self.call, &mut count) {
            Ok(_) => u64::from_ne_bytes(count),
            Err(_) => 0,
        }
    }
}

/// A range of a discard or write-zeroes request.
pub fn range(sector: u64, sectors: u32, flags: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&sector.to_le_bytes());
    bytes[8..12].copy_from_slice(&sectors.to_le_bytes());
    bytes[12..].copy_from_slice(&flags.to_le_bytes());
    bytes
}
