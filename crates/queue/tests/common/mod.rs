//! A queue and its driver over memory of their own.

use std::rc::Rc;

use guest_memory::MemoryView;
use guest_memory::test_util::memfd_memory;
use queue::driver::Driver;
use queue::{Chain, Queue, QueueConfig, QueueError, Segment};

/// Bytes of memory, from guest address 0 on.
pub(crate) const MEMORY: u64 = 1 << 20;
/// Where the rings are.
pub(crate) const RINGS: u64 = 0x1000;
/// Where buffers are.
pub(crate) const DATA: u64 = 0x40000;

pub(crate) struct Pair {
    pub(crate) memory: Rc<MemoryView>,
    pub(crate) driver: Driver,
    pub(crate) queue: Queue,
    pub(crate) chain: Chain,
}

/// What a test wants to be different.
pub(crate) struct Setup {
    pub(crate) size: u16,
    pub(crate) event_idx: bool,
    pub(crate) indirect: bool,
    pub(crate) start: u16,
}

impl Default for Setup {
    fn default() -> Self {
        Setup { size: 8, event_idx: false, indirect: true, start: 0 }
    }
}

impl Setup {
    pub(crate) fn build(self) -> Pair {
        let memory = MemoryView::new(memfd_memory(&[(0, MEMORY)]).unwrap());
        let driver = Driver::new(&memory, RINGS, self.size, self.event_idx).unwrap();
        let driver = driver.starting_at(self.start);
        let config = QueueConfig { indirect: self.indirect, ..driver.config() };
        let queue = Queue::new(Rc::clone(&memory), config).unwrap();
        Pair { memory, driver, queue, chain: Chain::new() }
    }
}

impl Pair {
    pub(crate) fn pop(&mut self) -> Result<bool, QueueError> {
        self.queue.pop(&mut self.chain)
    }

    /// Adds one readable buffer of `len` bytes and publishes it; whether the device wants a kick.
    pub(crate) fn offer(&mut self, len: u32) -> bool {
        self.driver.add(&[segment(DATA, len)], &[]).unwrap();
        self.driver.publish()
    }

    /// Pops a chain that is there and gives it back; not yet published.
    pub(crate) fn complete(&mut self) {
        assert!(self.pop().unwrap());
        self.queue.add_used(self.chain.head(), 0);
    }
}

pub(crate) fn segment(addr: u64, len: u32) -> Segment {
    Segment { addr, len }
}

pub(crate) fn readable(chain: &Chain) -> Vec<Segment> {
    chain.readable().iter().collect()
}

pub(crate) fn writable(chain: &Chain) -> Vec<Segment> {
    chain.writable().iter().collect()
}
