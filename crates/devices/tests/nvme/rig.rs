//! An NVMe controller with a small driver at the other end, on one loop.
#![allow(unreachable_pub, reason = "modules of one program")]

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use block::node::{Channel, Geometry};
use block::request::{Op, Request};
use devices::nvme::{
    Controller, ControllerConfig, DoorbellMode, DoorbellPage, Messages, NamespaceConfig,
};
use event_loop::{EventLoop, IoThread, IoThreadConfig, LoopConfig, PollParams};
use guest_memory::test_util::memfd_memory;
use guest_memory::{GuestMemory, MemoryView, Region};
use nix::errno::Errno;

pub const CAP: u64 = 0x00;
pub const CC: u64 = 0x14;
pub const CSTS: u64 = 0x1c;
const AQA: u64 = 0x24;
const ASQ: u64 = 0x28;
const ACQ: u64 = 0x30;
pub const ENABLE: u32 = 0x0046_0001;

/// Blocks of a namespace.
pub const BLOCKS: u64 = 4096;
/// Entries of each queue.
pub const ENTRIES: u32 = 64;
/// Where queues are: 64 KiB each, submission queue first. Data and other things are beyond.
const QUEUE: u64 = 1 << 16;
pub const DATA: u64 = 1 << 20;
pub const SHADOW: u64 = 0xe_0000;
pub const EVENTS: u64 = 0xe_1000;
pub const MEMORY: u64 = 8 << 20;

pub const FLUSH: u8 = 0;
pub const WRITE: u8 = 1;
pub const READ: u8 = 2;

/// A disk in memory, which holds requests back when it is told to.
pub struct Disk {
    pub data: RefCell<Vec<u8>>,
    pub seen: RefCell<Vec<(Op, u64, u64)>>,
    pub is_held: Cell<bool>,
    pub held: RefCell<Vec<Request>>,
    pub error: Cell<Option<Errno>>,
    keeps_record: bool,
}

impl Disk {
    fn new(keeps_record: bool) -> Rc<Self> {
        Rc::new(Disk {
            data: RefCell::new(vec![0; (BLOCKS * 512) as usize]),
            seen: RefCell::default(),
            is_held: Cell::new(false),
            held: RefCell::default(),
            error: Cell::new(None),
            keeps_record,
        })
    }

    pub fn release(&self) {
        self.is_held.set(false);
        for request in self.held.take() {
            self.carry_out(request);
        }
    }

    fn carry_out(&self, mut request: Request) {
        if let Some(errno) = self.error.get() {
            return request.complete(Err(errno));
        }
        let range = request.offset as usize..(request.offset + request.len) as usize;
        {
            let mut data = self.data.borrow_mut();
            match request.op {
                Op::Read => drop(request.bufs.copy_in(0, &data[range])),
                Op::Write { .. } => drop(request.bufs.copy_out(0, &mut data[range])),
                Op::WriteZeroes { .. } | Op::Discard => data[range].fill(0),
                Op::Flush | Op::BlockStatus => {}
            }
        }
        request.complete(Ok(()));
    }
}

impl Channel for Disk {
    fn submit(&self, request: Request) {
        if self.keeps_record {
            self.seen.borrow_mut().push((request.op, request.offset, request.len));
        }
        if self.is_held.get() {
            return self.held.borrow_mut().push(request);
        }
        self.carry_out(request);
    }

    fn in_flight(&self) -> usize {
        self.held.borrow().len()
    }
}

/// What was sent, by vector.
#[derive(Clone, Default)]
struct Sent(Rc<RefCell<[u64; 8]>>);

/// A driver that polls wants none.
struct Nowhere;

impl Messages for Nowhere {
    fn send(&self, _vector: u16) {}
}

impl Messages for Sent {
    fn send(&self, vector: u16) {
        self.0.borrow_mut()[usize::from(vector)] += 1;
    }
}

/// A command.
#[derive(Clone, Copy)]
pub struct Command([u32; 16]);

pub fn command(opcode: u8) -> Command {
    let mut words = [0; 16];
    words[0] = opcode.into();
    Command(words)
}

impl Command {
    pub fn nsid(mut self, nsid: u32) -> Self {
        self.0[1] = nsid;
        self
    }

    pub fn prps(mut self, first: u64, second: u64) -> Self {
        let words = [first, first >> 32, second, second >> 32];
        self.0[6..10].copy_from_slice(&words.map(|word| word as u32));
        self
    }

    pub fn sgl(mut self, addr: u64, len: u32, kind: u8) -> Self {
        self.0[0] |= 0x40 << 8;
        self = self.prps(addr, 0);
        (self.0[8], self.0[9]) = (len, u32::from(kind) << 24);
        self
    }

    pub fn dword(mut self, number: usize, value: u32) -> Self {
        self.0[number] = value;
        self
    }

    /// A range of blocks.
    pub fn blocks(self, first: u64, count: u32) -> Self {
        let command = self.dword(10, first as u32).dword(11, (first >> 32) as u32);
        command.dword(12, command.0[12] | (count - 1))
    }
}

/// A read or write of namespace 1.
pub fn io(opcode: u8, first: u64, count: u32) -> Command {
    command(opcode).nsid(1).prps(DATA, DATA + 4096).blocks(first, count)
}

/// A completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completed {
    pub result: u32,
    /// Without DNR.
    pub status: u16,
    pub cid: u16,
    pub head: u16,
}

/// The driver's side of a pair of queues.
#[derive(Clone, Copy)]
struct Pair {
    tail: u32,
    head: u32,
    phase: u16,
}

const NEW: Pair = Pair { tail: 0, head: 0, phase: 1 };

pub struct Rig {
    pub event_loop: EventLoop,
    pub controller: Option<Rc<Controller>>,
    pub disks: Vec<Rc<Disk>>,
    pub memory: Rc<MemoryView>,
    sent: Sent,
    pairs: [Pair; 5],
    has_shadows: bool,
    /// The page of doorbells, as a client maps it.
    page: Option<Rc<MemoryView>>,
    /// Doorbell registers of I/O queues that were written.
    pub rings: u64,
    next_cid: u16,
    /// Those of the queues, if they are not on the loop of the driver.
    _threads: Vec<IoThread>,
}

impl Drop for Rig {
    fn drop(&mut self) {
        if let Some(controller) = self.controller.take() {
            self.disks.iter().for_each(|disk| disk.release());
            let ended = controller.end();
            let _ = self.event_loop.block_on(ended);
        }
    }
}

impl Rig {
    pub fn new(poll_max_ns: u64) -> Self {
        Self::with(poll_max_ns, true, |_| {})
    }

    pub fn with(
        poll_max_ns: u64,
        keeps_record: bool,
        change: impl FnOnce(&mut ControllerConfig),
    ) -> Self {
        let poll = PollParams { max_ns: poll_max_ns, ..PollParams::default() };
        let config = LoopConfig { poll, ..LoopConfig::default() };
        Self::start(config, 1, Vec::new(), keeps_record, change)
    }

    /// A controller with 4 I/O queues and so many workers, all on the loop of the driver. Each worker has two disks of its
    /// own.
    pub fn with_workers(workers: usize) -> Self {
        let four = |config: &mut ControllerConfig| config.num_queues = 4;
        Self::start(LoopConfig::default(), workers, Vec::new(), true, four)
    }

    /// A controller whose I/O queues are on so many threads of their own.
    pub fn on_threads(poll: PollParams, threads: usize) -> Self {
        Self::on_threads_with(poll, threads, |config| config.num_queues = 4)
    }

    pub fn on_threads_with(
        poll: PollParams,
        threads: usize,
        change: impl FnOnce(&mut ControllerConfig),
    ) -> Self {
        let event_loop = LoopConfig { poll, ..LoopConfig::default() };
        let config = IoThreadConfig { event_loop, ..IoThreadConfig::default() };
        let spawned = (0..threads).map(|_| IoThread::spawn(config.clone()).unwrap()).collect();
        Self::start(LoopConfig::default(), threads, spawned, false, change)
    }

    fn start(
        config: LoopConfig,
        workers: usize,
        threads: Vec<IoThread>,
        keeps_record: bool,
        change: impl FnOnce(&mut ControllerConfig),
    ) -> Self {
        let event_loop = EventLoop::new(config).unwrap();
        let namespace = NamespaceConfig { geometry: geometry(BLOCKS), writable: true };
        let mut config = ControllerConfig {
            serial: "S1".into(),
            model: "ringmill".into(),
            identity: "test".into(),
            num_queues: 3,
            doorbells: DoorbellMode::Auto,
            write_cache: true,
            namespaces: vec![namespace; 2],
        };
        change(&mut config);
        let sent = Sent::default();
        let made = Controller::new(&event_loop, config, Box::new(sent.clone()), workers);
        let (controller, attachments) = made.unwrap();
        let channels =
            |disks: &[Rc<Disk>]| disks.iter().map(|disk| disk.clone() as Rc<dyn Channel>).collect();
        let mut disks = Vec::new();
        for (number, attachment) in attachments.into_iter().enumerate() {
            match threads.get(number) {
                None => {
                    let own = [Disk::new(keeps_record), Disk::new(keeps_record)];
                    attachment.attach(&event_loop, channels(&own), Box::new(sent.clone()));
                    disks.extend(own);
                }
                Some(thread) => {
                    let attach = move |event_loop: &EventLoop| {
                        let disks = [Disk::new(false), Disk::new(false)];
                        attachment.attach(event_loop, channels(&disks), Box::new(Nowhere));
                    };
                    thread.handle().spawn(attach).unwrap();
                }
            }
        }
        let memory = memfd_memory(&[(0, EVENTS), (EVENTS, MEMORY - EVENTS)]).unwrap();
        controller.set_memory(memory.clone());
        Rig {
            event_loop,
            controller: Some(controller),
            disks,
            memory: MemoryView::new(memory),
            sent,
            pairs: [NEW; 5],
            has_shadows: false,
            page: None,
            rings: 0,
            next_cid: 0,
            _threads: threads,
        }
    }

    /// Continues with the memory and the driver of another rig.
    pub fn continue_driver_of(&mut self, other: &Rig) {
        self.set_memory(other.memory.memory().clone());
        self.memory = other.memory.clone();
        (self.pairs, self.has_shadows) = (other.pairs, other.has_shadows);
        self.page = other.page.clone();
        self.next_cid = other.next_cid;
    }

    /// Carries a command of I/O queue 1 out, whose completion is polled for.
    pub fn spin(&mut self, command: Command) {
        let old = self.tail(1);
        self.submit(1, command);
        self.ring(1, old);
        let begin = std::time::Instant::now();
        while self.reap(1).is_none() {
            std::hint::spin_loop();
            assert!(begin.elapsed().as_secs() < 60, "a command was lost");
        }
    }

    /// A controller that is ready, with I/O queue 1 with vector 1.
    pub fn ready(poll_max_ns: u64) -> Self {
        let mut rig = Self::new(poll_max_ns);
        rig.enable();
        rig.create(1);
        rig
    }

    pub fn controller(&self) -> &Controller {
        self.controller.as_ref().unwrap()
    }

    pub fn read(&self, at: u64) -> u32 {
        let mut bytes = [0; 4];
        self.controller().mmio_read(at, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    pub fn write(&self, at: u64, value: u32) {
        self.controller().mmio_write(at, &value.to_le_bytes());
    }

    pub fn enable(&mut self) {
        self.pairs = [NEW; 5];
        self.has_shadows = false;
        self.forget_completions(0);
        self.write(AQA, (ENTRIES - 1) << 16 | (ENTRIES - 1));
        self.controller().mmio_write(ASQ, &Self::base(0).to_le_bytes());
        self.controller().mmio_write(ACQ, &(Self::base(0) + QUEUE / 2).to_le_bytes());
        self.write(CC, ENABLE);
        self.wait("the controller is ready", |rig| rig.read(CSTS) & 1 == 1);
    }

    /// Makes a pair of I/O queues.
    pub fn create(&mut self, qid: u32) {
        self.pairs[qid as usize] = NEW;
        self.forget_completions(qid as usize);
        let base = Self::base(qid as usize);
        let size = (ENTRIES - 1) << 16 | qid;
        let completion = command(0x05).prps(base + QUEUE / 2, 0).dword(10, size);
        self.ok(0, completion.dword(11, qid << 16 | 3));
        let submission = command(0x01).prps(base, 0).dword(10, size);
        self.ok(0, submission.dword(11, qid << 16 | 1));
    }

    /// A submission queue that is made anew.
    pub fn forget(&mut self, qid: usize) {
        self.pairs[qid] = NEW;
    }

    /// Completions that an earlier queue at this address has posted have the phase of the new one.
    fn forget_completions(&self, qid: usize) {
        self.put(Self::base(qid) + QUEUE / 2, &[0; 16 * ENTRIES as usize]);
    }

    pub fn use_shadows(&mut self) {
        self.ok(0, command(0x7c).prps(SHADOW, EVENTS));
        self.has_shadows = true;
    }

    /// Maps the doorbells as a client does.
    pub fn map_doorbells(&mut self) {
        let page = self.controller().doorbell_page().unwrap();
        let fd = page.file().try_clone().unwrap();
        let (guest_addr, size) = (DoorbellPage::OFFSET, DoorbellPage::SIZE);
        let (user_addr, mmap_offset) = (guest_addr, guest_addr);
        let region = Region { guest_addr, size, user_addr, mmap_offset, fd }.map().unwrap();
        let memory = GuestMemory::from_regions([Arc::new(region)]).unwrap();
        self.page = Some(MemoryView::new(Arc::new(memory)));
    }

    /// Writes a doorbell of the page.
    pub fn set_mapped_doorbell(&self, number: u64, value: u32) {
        let page = self.page.as_ref().unwrap();
        page.store_release(DoorbellPage::OFFSET + 4 * number, value).unwrap();
    }

    fn base(pair: usize) -> u64 {
        QUEUE * (pair as u64 + 1)
    }

    /// Turns the loop until `is` holds.
    pub fn wait(&mut self, what: &str, mut is: impl FnMut(&mut Self) -> bool) {
        let begin = std::time::Instant::now();
        while !is(self) {
            assert!(begin.elapsed().as_secs() < 60, "{what}: never");
            self.event_loop.run_once(false).unwrap();
        }
    }

    /// Turns the loop a few times, to show that something does not happen.
    pub fn turn(&self) {
        for _ in 0..20 {
            self.event_loop.run_once(false).unwrap();
        }
    }

    /// Puts a command into a queue. Returns its CID.
    pub fn submit(&mut self, qid: usize, command: Command) -> u16 {
        self.next_cid = self.next_cid.wrapping_add(1);
        let Command(mut words) = command;
        words[0] |= u32::from(self.next_cid) << 16;
        let mut bytes = [0; 64];
        for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        let tail = self.pairs[qid].tail;
        self.memory.write_bytes(Self::base(qid) + 64 * u64::from(tail), &bytes).unwrap();
        self.pairs[qid].tail = (tail + 1) % ENTRIES;
        self.next_cid
    }

    /// Rings the doorbell of a submission queue: the register, if it has to be.
    pub fn ring(&mut self, qid: usize, old: u32) {
        self.doorbell(2 * qid as u64, self.pairs[qid].tail, old, qid);
    }

    fn doorbell(&mut self, number: u64, value: u32, old: u32, qid: usize) {
        if self.has_shadows && qid > 0 {
            self.memory.store_release(SHADOW + 4 * number, value).unwrap();
            std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
            let event = self.memory.load_acquire(EVENTS + 4 * number).unwrap();
            let passed = value.wrapping_sub(event).wrapping_sub(1) as u16;
            if passed >= value.wrapping_sub(old) as u16 {
                return;
            }
        }
        if self.page.is_some() {
            return self.set_mapped_doorbell(number, value);
        }
        self.rings += u64::from(qid > 0);
        self.write(0x1000 + 4 * number, value);
    }

    pub fn tail(&self, qid: usize) -> u32 {
        self.pairs[qid].tail
    }

    /// Takes the next completion, if there is one.
    pub fn reap(&mut self, qid: usize) -> Option<Completed> {
        let completed = self.peek(qid)?;
        let pair = &mut self.pairs[qid];
        let old = pair.head;
        pair.head = (pair.head + 1) % ENTRIES;
        pair.phase ^= u16::from(pair.head == 0);
        let head = pair.head;
        self.doorbell(2 * qid as u64 + 1, head, old, qid);
        Some(completed)
    }

    /// The next completion, which is not taken.
    pub fn peek(&self, qid: usize) -> Option<Completed> {
        let pair = &self.pairs[qid];
        let at = Self::base(qid) + QUEUE / 2 + 16 * u64::from(pair.head);
        let last = self.memory.load_acquire(at + 12).unwrap();
        let status = (last >> 16) as u16;
        if status & 1 != pair.phase {
            return None;
        }
        let result = self.memory.read_u32(at).unwrap();
        let head = self.memory.read_u16(at + 8).unwrap();
        let status = status >> 1 & !(1 << 14);
        Some(Completed { result, status, cid: last as u16, head })
    }

    /// The next completion, when it comes.
    pub fn completed(&mut self, qid: usize) -> Completed {
        let mut completed = None;
        self.wait("an answer", |rig| {
            completed = rig.reap(qid);
            completed.is_some()
        });
        completed.unwrap()
    }

    /// Carries a command out.
    pub fn run(&mut self, qid: usize, command: Command) -> Completed {
        let old = self.tail(qid);
        let cid = self.submit(qid, command);
        self.ring(qid, old);
        let completed = self.completed(qid);
        assert_eq!(completed.cid, cid);
        completed
    }

    pub fn status(&mut self, qid: usize, command: Command) -> u16 {
        self.run(qid, command).status
    }

    pub fn ok(&mut self, qid: usize, command: Command) -> u32 {
        let completed = self.run(qid, command);
        assert_eq!(completed.status, 0);
        completed.result
    }

    pub fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.write_bytes(at, bytes).unwrap();
    }

    pub fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read_bytes(at, &mut bytes).unwrap();
        bytes
    }

    /// Messages sent with a vector since the last call.
    pub fn sent(&self, vector: usize) -> u64 {
        std::mem::take(&mut self.sent.0.borrow_mut()[vector])
    }

    pub fn set_memory(&mut self, memory: Arc<GuestMemory>) {
        self.controller().set_memory(memory);
    }
}

pub fn geometry(blocks: u64) -> Geometry {
    Geometry {
        size: blocks * 512,
        read_only: false,
        physical_block_size: 4096,
        request_alignment: 1,
        discard: true,
        discard_granularity: 4096,
        write_zeroes: true,
        write_cache: true,
    }
}
