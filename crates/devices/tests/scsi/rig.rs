//! A device with two logical units, its queues and a driver, on one loop.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use block::node::{Channel, Geometry};
use block::request::{Op, Request};
use devices::virtio::{Held, Virtqueue};
use devices::virtio_scsi::{Device, DeviceConfig, DeviceOnLoop, LunConfig};
use event_loop::{EventLoop, LoopConfig};
use guest_memory::MemoryView;
use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};
use queue::driver::Driver;
use queue::{Inflight, Queue, Segment};
use stats::QueueStats;

/// Bytes of a disk.
pub(crate) const SIZE: usize = 1 << 20;
/// Logical blocks of a disk.
pub(crate) const BLOCKS: u32 = (SIZE / 512) as u32;
/// Entries of each queue.
pub(crate) const ENTRIES: u16 = 64;
/// Layout of guest memory: the rings, then slots of this size.
const SLOTS_AT: u64 = 1 << 20;
const SLOT: u64 = 128 << 10;
const SLOTS: u64 = 32;
/// Layout of a slot: the request, the response, the data.
const RESPONSE_AT: u64 = 512;
const DATA_AT: u64 = 4096;

/// `VIRTIO_SCSI_F_CHANGE`.
pub(crate) const CHANGE: u64 = 1 << 2;

/// A disk in memory, which can hold back its answers.
pub(crate) struct Disk {
    pub(crate) data: RefCell<Vec<u8>>,
    /// All requests received: operation, offset, length.
    pub(crate) log: RefCell<Vec<(Op, u64, u64)>>,
    pub(crate) holds: Cell<bool>,
    held: RefCell<Vec<Request>>,
    pub(crate) fails: Cell<Option<Errno>>,
}

impl Disk {
    pub(crate) fn new() -> Rc<Self> {
        Rc::new(Disk {
            data: RefCell::new((0..SIZE).map(|n| (n / 512 % 251) as u8).collect()),
            log: RefCell::default(),
            holds: Cell::new(false),
            held: RefCell::default(),
            fails: Cell::new(None),
        })
    }

    /// Sends the answers held back.
    pub(crate) fn release(&self) {
        self.holds.set(false);
        self.held.take().into_iter().for_each(|request| self.submit(request));
    }

    fn carry_out(&self, request: &mut Request) {
        let (offset, len) = (request.offset as usize, request.len as usize);
        let mut data = self.data.borrow_mut();
        let part = &mut data[offset..offset + len];
        match request.op {
            Op::Read => assert_eq!(request.bufs.copy_in(0, part), len),
            Op::Write { .. } => assert_eq!(request.bufs.copy_out(0, part), len),
            Op::Flush | Op::BlockStatus => {}
            // Discarded data has a pattern of its own.
            Op::Discard => part.fill(0xdd),
            Op::WriteZeroes { .. } => part.fill(0),
        }
    }
}

impl Channel for Disk {
    fn submit(&self, mut request: Request) {
        if self.holds.get() {
            return self.held.borrow_mut().push(request);
        }
        self.log.borrow_mut().push((request.op, request.offset, request.len));
        match self.fails.get() {
            Some(errno) => request.complete(Err(errno)),
            None => {
                self.carry_out(&mut request);
                request.complete(Ok(()));
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.held.borrow().len()
    }
}

/// The result of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) response: u8,
    pub(crate) status: u8,
    pub(crate) residual: u32,
    pub(crate) sense: Vec<u8>,
    /// The whole data buffer.
    pub(crate) data: Vec<u8>,
    /// Bytes written according to the used ring.
    pub(crate) written: u32,
}

impl Reply {
    /// Sense key, additional sense code and its qualifier.
    pub(crate) fn code(&self) -> (u8, u8, u8) {
        assert_eq!((self.response, self.status), (0, 2), "no CHECK CONDITION: {self:?}");
        assert_eq!((self.sense.len(), self.sense[0], self.sense[7]), (18, 0x70, 10));
        (self.sense[2], self.sense[12], self.sense[13])
    }

    /// Offset of the CDB byte that the sense data names.
    pub(crate) fn field(&self) -> u16 {
        assert_eq!(self.code(), (5, 0x24, 0), "INVALID FIELD IN CDB");
        assert_eq!(self.sense[15], 0xc0, "SKSV, C/D");
        u16::from_be_bytes([self.sense[16], self.sense[17]])
    }

    /// Asserts success with all of the buffer used, and returns the data.
    pub(crate) fn good(self) -> Vec<u8> {
        assert_eq!((self.response, self.status, self.residual), (0, 0, 0), "{self:?}");
        assert_eq!(self.written as usize, 108 + self.data.len());
        self.data
    }
}

pub(crate) struct Rig {
    pub(crate) event_loop: EventLoop,
    pub(crate) memory: Rc<MemoryView>,
    pub(crate) device: Arc<Device>,
    pub(crate) disks: [Rc<Disk>; 2],
    /// Control, events, and two request queues.
    pub(crate) drivers: Vec<Driver>,
    queues: Vec<Rc<dyn Virtqueue>>,
    _on_loop: Rc<DeviceOnLoop>,
    next_slot: u64,
}

pub(crate) fn geometry() -> Geometry {
    Geometry {
        size: SIZE as u64,
        read_only: false,
        physical_block_size: 4096,
        request_alignment: 1,
        discard: true,
        discard_granularity: 4096,
        write_zeroes: true,
        write_cache: true,
    }
}

impl Rig {
    /// A rig whose power-on attention has been reported.
    pub(crate) fn new() -> Rig {
        let mut rig = Rig::with(|_| {});
        for lun in 0..2 {
            assert_eq!(rig.command(lun, &[0], &[], 0).code(), (6, 0x29, 0), "POWER ON");
        }
        rig
    }

    pub(crate) fn with(change: impl FnOnce(&mut DeviceConfig)) -> Rig {
        let disks = [Disk::new(), Disk::new()];
        let channels = disks.iter().map(|disk| disk.clone() as Rc<dyn Channel>).collect();
        Rig::on(EventLoop::new(LoopConfig::default()).unwrap(), channels, disks, change)
    }

    /// A rig with logical units on these two channels. `disks` are kept for the test.
    pub(crate) fn on(
        event_loop: EventLoop,
        channels: Vec<Rc<dyn Channel>>,
        disks: [Rc<Disk>; 2],
        change: impl FnOnce(&mut DeviceConfig),
    ) -> Rig {
        Rig::on_with(event_loop, channels, disks, change, None)
    }

    /// The same, with a record of requests in flight for the first request queue.
    pub(crate) fn on_with(
        event_loop: EventLoop,
        channels: Vec<Rc<dyn Channel>>,
        disks: [Rc<Disk>; 2],
        change: impl FnOnce(&mut DeviceConfig),
        mut record: Option<Inflight>,
    ) -> Rig {
        let lun = |n| LunConfig { geometry: geometry(), serial: format!("test-{n}") };
        let mut config = DeviceConfig {
            name: "test".to_owned(),
            luns: (0..2).map(lun).collect(),
            num_queues: 2,
            logical_block_size: 512,
            writable: true,
            writethrough: false,
        };
        change(&mut config);
        let device = Arc::new(Device::new(config).unwrap());
        device.set_features(CHANGE);
        let size = SLOTS_AT + SLOT * SLOTS;
        let memory = MemoryView::new(guest_memory::test_util::memfd_memory(&[(0, size)]).unwrap());
        let on_loop = DeviceOnLoop::new(&event_loop, device.clone(), channels);
        let (mut drivers, mut queues) = (Vec::new(), Vec::new());
        for index in 0..4 {
            let driver = Driver::new(&memory, u64::from(index) << 16, ENTRIES, false).unwrap();
            let record = if index == 2 { record.take() } else { None };
            let queue = Queue::with_inflight(memory.clone(), driver.config(), record).unwrap();
            // The queue uses it to continue after a bounded turn.
            let kick = EventFd::from_flags(EfdFlags::EFD_NONBLOCK).unwrap();
            let (kick, stats) = (Some(Arc::new(kick.into())), Arc::new(QueueStats::default()));
            let queue = on_loop.start_queue(index, queue, kick, None, stats);
            queue.set_enabled(true);
            drivers.push(driver);
            queues.push(queue);
        }
        let _on_loop = on_loop;
        Rig { event_loop, memory, device, disks, drivers, queues, _on_loop, next_slot: 0 }
    }

    /// Allocates a slot.
    pub(crate) fn slot(&mut self) -> u64 {
        self.next_slot += 1;
        SLOTS_AT + SLOT * (self.next_slot % SLOTS)
    }

    /// Publishes added chains, and kicks the queue.
    pub(crate) fn publish(&mut self, queue: usize) {
        let _ = self.drivers[queue].publish();
        self.queues[queue].set_enabled(true);
    }

    /// Runs the loop until a chain is used. Returns its head, and the bytes written.
    pub(crate) fn reap(&mut self, queue: usize) -> (u16, u32) {
        loop {
            match self.drivers[queue].reap() {
                Some(used) => return (used.head, used.written),
                None => self.event_loop.run_once(true).unwrap(),
            }
        }
    }

    /// Whether no chain is used in many iterations of the loop.
    pub(crate) fn nothing_comes(&mut self, queue: usize) -> bool {
        (0..20).all(|_| {
            self.event_loop.run_once(false).unwrap();
            self.drivers[queue].reap().is_none()
        })
    }

    /// Stops a queue. The flag becomes true once it has stopped.
    pub(crate) fn stop(&self, queue: usize) -> Rc<Cell<bool>> {
        let stopped = Rc::new(Cell::new(false));
        let out = stopped.clone();
        self.queues[queue].stop(Held::Left, Box::new(move |_| out.set(true)));
        stopped
    }

    /// Adds a command to request queue `queue` (2 or 3), with response and data in segments of `cut` bytes. Returns
    /// its slot.
    #[expect(clippy::too_many_arguments, reason = "all that a request has")]
    pub(crate) fn add(
        &mut self,
        queue: usize,
        lun: [u8; 8],
        id: u64,
        cdb: &[u8],
        out: &[u8],
        inward: u32,
        cut: u32,
    ) -> u64 {
        let slot = self.slot();
        let mut request = vec![0; 51];
        request[..8].copy_from_slice(&lun);
        request[8..16].copy_from_slice(&id.to_le_bytes());
        request[19..19 + cdb.len()].copy_from_slice(cdb);
        self.memory.write_bytes(slot, &request).unwrap();
        self.memory.write_bytes(slot + RESPONSE_AT, &[0xee; 108]).unwrap();
        self.memory.write_bytes(slot + DATA_AT, &vec![0xee; inward as usize]).unwrap();
        self.memory.write_bytes(slot + DATA_AT, out).unwrap();
        let pieces = |addr: u64, len: u32| {
            let piece =
                move |at: u32| Segment { addr: addr + u64::from(at), len: cut.min(len - at) };
            (0..len).step_by(cut as usize).map(piece)
        };
        let readable: Vec<_> =
            pieces(slot, 51).chain(pieces(slot + DATA_AT, out.len() as u32)).collect();
        let writable: Vec<_> =
            pieces(slot + RESPONSE_AT, 108).chain(pieces(slot + DATA_AT, inward)).collect();
        self.drivers[queue].add(&readable, &writable).expect("room in the queue");
        slot
    }

    /// The result in a slot.
    pub(crate) fn reply(&self, slot: u64, inward: u32, written: u32) -> Reply {
        let mut bytes = [0; 108];
        self.memory.read_bytes(slot + RESPONSE_AT, &mut bytes).unwrap();
        let mut data = vec![0; inward as usize];
        self.memory.read_bytes(slot + DATA_AT, &mut data).unwrap();
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let sense = bytes[12..12 + word(0) as usize].to_vec();
        let (status, response) = (bytes[10], bytes[11]);
        Reply { response, status, residual: word(4), sense, data, written }
    }

    /// Runs one command from submission to response.
    pub(crate) fn command(&mut self, lun: u8, cdb: &[u8], out: &[u8], inward: u32) -> Reply {
        self.command_at([1, 0, 0x40, lun, 0, 0, 0, 0], cdb, out, inward)
    }

    pub(crate) fn command_at(
        &mut self,
        lun: [u8; 8],
        cdb: &[u8],
        out: &[u8],
        inward: u32,
    ) -> Reply {
        let slot = self.add(2, lun, 7, cdb, out, inward, u32::MAX);
        self.publish(2);
        let (_, written) = self.reap(2);
        self.reply(slot, inward, written)
    }

    /// Runs one request on the control queue. Returns the response.
    pub(crate) fn control(&mut self, request: &[u8], answer: u32) -> Vec<u8> {
        let slot = self.add_control(request, answer);
        let (_, written) = self.reap(0);
        assert_eq!(written, answer);
        self.control_answer(slot, answer)
    }

    /// Adds a request to the control queue. Returns its slot.
    pub(crate) fn add_control(&mut self, request: &[u8], answer: u32) -> u64 {
        let slot = self.slot();
        self.memory.write_bytes(slot, request).unwrap();
        let readable = Segment { addr: slot, len: request.len() as u32 };
        let writable = Segment { addr: slot + RESPONSE_AT, len: answer };
        self.drivers[0].add(&[readable], &[writable]).unwrap();
        self.publish(0);
        slot
    }

    pub(crate) fn control_answer(&self, slot: u64, len: u32) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        self.memory.read_bytes(slot + RESPONSE_AT, &mut bytes).unwrap();
        bytes
    }
}
