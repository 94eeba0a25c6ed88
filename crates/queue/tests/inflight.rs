//! Requests in flight outlive the process: another queue on the same memory repeats them.

use crate::common;

use std::collections::VecDeque;
use std::sync::Arc;

use common::{DATA, RINGS, segment};
use guest_memory::test_util::memfd_memory;
use guest_memory::{GuestMemory, MemoryView};
use proptest::prelude::*;
use queue::driver::Driver;
use queue::{Chain, Inflight, Queue, QueueConfig, QueueError};
use std::rc::Rc;

const SIZE: u16 = 16;

/// Offsets in the record, by the vhost-user specification.
const VERSION: u64 = 8;
const USED_IDX: u64 = 14;
const ENTRIES: u64 = 16;
const ENTRY: u64 = 16;

/// A guest whose back ends are killed.
struct Guest {
    memory: Rc<MemoryView>,
    driver: Driver,
    config: QueueConfig,
    record: Arc<GuestMemory>,
    /// A view of the record, for checks.
    record_view: Rc<MemoryView>,
    queue: Queue,
    chain: Chain,
    /// Heads in flight, in the order in which a back end first took them.
    in_flight: Vec<u16>,
    /// Heads offered and never taken.
    offered: VecDeque<u16>,
    /// Heads in the used ring that are not published: at most three.
    unseen: Vec<u16>,
}

fn record() -> Arc<GuestMemory> {
    memfd_memory(&[(0, Inflight::region_len(SIZE) as u64)]).unwrap()
}

fn start(memory: &Rc<MemoryView>, config: QueueConfig, record: &GuestMemory) -> Queue {
    let inflight = Inflight::new(record, record.regions()[0].user_addr(), SIZE).unwrap();
    Queue::with_inflight(memory.clone(), config, Some(inflight)).unwrap()
}

impl Guest {
    fn new(first: u16) -> Guest {
        let memory = MemoryView::new(memfd_memory(&[(0, common::MEMORY)]).unwrap());
        let driver = Driver::new(&memory, RINGS, SIZE, true).unwrap().starting_at(first);
        let config = driver.config();
        let record = record();
        let queue = start(&memory, config, &record);
        Guest {
            memory,
            driver,
            config,
            record_view: MemoryView::new(record.clone()),
            record,
            queue,
            chain: Chain::new(),
            in_flight: Vec::new(),
            offered: VecDeque::new(),
            unseen: Vec::new(),
        }
    }

    fn offer(&mut self) {
        if let Some(head) = self.driver.add(&[segment(DATA, 8)], &[]) {
            self.driver.publish();
            self.offered.push_back(head);
        }
    }

    fn pop(&mut self) -> Option<u16> {
        self.queue.pop(&mut self.chain).unwrap().then(|| self.chain.head())
    }

    fn take(&mut self) {
        let head = self.pop();
        assert_eq!(head, self.offered.pop_front());
        self.in_flight.extend(head);
    }

    fn answer(&mut self, which: usize) {
        if self.in_flight.is_empty() {
            return;
        }
        let head = self.in_flight.remove(which % self.in_flight.len());
        self.queue.add_used(head, 0);
        self.unseen.push(head);
        if self.unseen.len() == 4 {
            self.seen();
        }
    }

    fn publish(&mut self) {
        let _ = self.queue.publish();
        self.seen();
    }

    /// Checks that the driver takes exactly the published chains.
    fn seen(&mut self) {
        let shown: Vec<u16> = std::iter::from_fn(|| self.driver.reap()).map(|u| u.head).collect();
        assert_eq!(shown, std::mem::take(&mut self.unseen));
    }

    /// Starts the queue at `next_avail` with a new record.
    fn begin_at(&mut self, next_avail: u16) {
        let config = QueueConfig { next_avail, ..self.config };
        self.record_view.write_bytes(0, &vec![0; Inflight::region_len(SIZE)]).unwrap();
        self.queue = start(&self.memory, config, &self.record);
    }

    /// Kills the back end. The next one gets the position `base` from the front end.
    fn die(&mut self, order: &[u16], base: u16) {
        let config = QueueConfig { next_avail: base, ..self.config };
        let next_avail = self.queue.next_avail();
        self.queue = start(&self.memory, config, &self.record);
        assert_eq!(self.queue.next_avail(), next_avail, "with base {base}");
        self.unseen.clear();
        self.in_flight.clear();
        assert_eq!(self.queue.has_work(), !order.is_empty() || !self.offered.is_empty());
        for &head in order {
            assert_eq!(self.pop(), Some(head), "done again, in order");
            self.in_flight.push(head);
        }
    }

    fn base(&self, base: Base) -> u16 {
        match base {
            Base::Used => self.queue.used_idx(),
            Base::Available => self.driver.available(),
            Base::Any(base) => base,
        }
    }
}

/// The position that a reconnecting front end sends.
#[derive(Debug, Clone, Copy)]
enum Base {
    /// The used index, as QEMU does.
    Used,
    /// The available index, as Cloud Hypervisor does.
    Available,
    Any(u16),
}

fn base() -> impl Strategy<Value = Base> {
    prop_oneof![Just(Base::Used), Just(Base::Available), any::<u16>().prop_map(Base::Any)]
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Offer,
    Take,
    Answer(usize),
    Publish,
    Die(Base),
    /// A kill after a batch was published, before that was recorded.
    DieWithinShowing(Base),
    /// GET_VRING_BASE, and another start: requests in flight are left, or answered.
    Stop {
        leaves: bool,
        base: Base,
    },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => Just(Step::Offer),
        4 => Just(Step::Take),
        4 => any::<usize>().prop_map(Step::Answer),
        1 => Just(Step::Publish),
        1 => base().prop_map(Step::Die),
        1 => base().prop_map(Step::DieWithinShowing),
        1 => (any::<bool>(), base()).prop_map(|(leaves, base)| Step::Stop { leaves, base }),
    ]
}

proptest! {
    #[test]
    fn nothing_is_lost_or_answered_twice(
        first in any::<u16>(),
        steps in proptest::collection::vec(step(), 1..200),
    ) {
        let mut guest = Guest::new(first);
        // The order in which requests were first taken, whatever was answered since.
        let mut taken: Vec<u16> = Vec::new();
        for step in steps {
            match step {
                Step::Offer => guest.offer(),
                Step::Take => {
                    let before = guest.in_flight.len();
                    guest.take();
                    taken.extend(&guest.in_flight[before..]);
                }
                Step::Answer(which) => guest.answer(which),
                Step::Publish => guest.publish(),
                Step::Die(base) => {
                    let (order, base) = (still_owed(&taken, &guest), guest.base(base));
                    guest.die(&order, base);
                }
                Step::Stop { leaves, base } => {
                    while !leaves && !guest.in_flight.is_empty() {
                        guest.answer(0);
                    }
                    guest.publish();
                    let left = guest.in_flight.iter().all(|&head| guest.queue.leave(head));
                    prop_assert!(left && guest.queue.in_flight() == 0);
                    let (order, base) = (still_owed(&taken, &guest), guest.base(base));
                    guest.die(&order, base);
                }
                Step::DieWithinShowing(base) => {
                    let batch = guest.unseen.clone();
                    let used_before = guest.queue.used_idx();
                    guest.publish();
                    let set = |at: u64, bytes: &[u8]| guest.record_view.write_bytes(at, bytes);
                    for head in batch {
                        set(ENTRIES + ENTRY * u64::from(head), &[1]).unwrap();
                    }
                    set(USED_IDX, &used_before.to_le_bytes()).unwrap();
                    let (order, base) = (still_owed(&taken, &guest), guest.base(base));
                    guest.die(&order, base);
                }
            }
            taken = still_owed(&taken, &guest);
        }
        // Complete everything that is left.
        while guest.queue.has_work() {
            guest.take();
        }
        while !guest.in_flight.is_empty() {
            guest.answer(0);
        }
        guest.publish();
        prop_assert!(guest.driver.reap().is_none() && guest.offered.is_empty());
        prop_assert_eq!(guest.driver.free(), usize::from(SIZE), "each chain came back once");
    }
}

/// Taken chains that are not published, in the order in which they were taken.
fn still_owed(taken: &[u16], guest: &Guest) -> Vec<u16> {
    let owed = |head: &&u16| guest.in_flight.contains(head) || guest.unseen.contains(head);
    taken.iter().filter(owed).copied().collect()
}

#[test]
fn the_order_survives_a_second_death_in_the_middle_of_doing_again() {
    let mut guest = Guest::new(7);
    for _ in 0..6 {
        guest.offer();
        guest.take();
    }
    let order = guest.in_flight.clone();
    guest.die(&order[..3], 7);
    guest.offer();
    guest.die(&order, 7);
    assert_eq!(guest.pop(), guest.offered.pop_front());
    assert_eq!(guest.pop(), None);
}

#[test]
fn a_new_record_knows_of_no_entry() {
    let mut guest = Guest::new(7);
    for _ in 0..3 {
        guest.offer();
    }
    guest.begin_at(9);
    assert_eq!((guest.pop(), guest.pop()), (guest.offered.pop_back(), None));
}

/// A queue that began behind entries that are never popped is stopped and started at its position.
#[test]
fn a_stopped_queue_resumes_at_its_position() {
    let mut guest = Guest::new(7);
    guest.offer();
    guest.offer();
    guest.begin_at(9);
    guest.offered.clear();
    guest.offer();
    guest.take();
    guest.answer(0);
    guest.publish();
    let config = QueueConfig { next_avail: guest.queue.next_avail(), ..guest.config };
    let at = guest.record.regions()[0].user_addr();
    let record = Inflight::new(&guest.record, at, SIZE).unwrap().of_a_stopped_queue();
    guest.queue = Queue::with_inflight(guest.memory.clone(), config, Some(record)).unwrap();
    assert_eq!(guest.pop(), None, "nothing twice");
}

/// A device was reset, and its front end has kept the record.
#[test]
fn a_record_of_other_rings_has_nothing_in_flight() {
    let mut guest = Guest::new(7);
    for _ in 0..6 {
        guest.offer();
        guest.take();
    }
    guest.answer(0);
    guest.publish();
    guest.driver = Driver::new(&guest.memory, RINGS, SIZE, true).unwrap();
    guest.offer();
    guest.offer();
    let config = QueueConfig { next_avail: 2, ..guest.config };
    guest.queue = start(&guest.memory, config, &guest.record);
    for _ in 0..3 {
        let head = guest.pop();
        assert_eq!(head, guest.offered.pop_front());
    }
}

#[test]
fn a_corrupt_record_harms_only_its_queue() {
    for byte in [0x01, 0x7f, 0xff] {
        let mut guest = Guest::new(0);
        guest.offer();
        let len = Inflight::region_len(SIZE);
        guest.record_view.write_bytes(0, &vec![byte; len]).unwrap();
        guest.record_view.write_bytes(VERSION, &1u16.to_le_bytes()).unwrap();
        guest.record_view.write_bytes(USED_IDX, &u16::MAX.to_le_bytes()).unwrap();
        guest.queue = start(&guest.memory, guest.config, &guest.record);
        // The record then has all entries but one in flight, most of them nonexistent chains.
        let mut chain = Chain::new();
        for _ in 0..=SIZE {
            if guest.queue.pop(&mut chain).is_err() {
                break;
            }
        }
        assert!(guest.queue.is_broken());
    }
}

#[test]
fn a_record_must_have_room_for_the_queue() {
    let memory = MemoryView::new(memfd_memory(&[(0, common::MEMORY)]).unwrap());
    let config = Driver::new(&memory, RINGS, SIZE, true).unwrap().config();
    let small = memfd_memory(&[(0, Inflight::region_len(8) as u64)]).unwrap();
    let at = small.regions()[0].user_addr();
    let inflight = Inflight::new(&small, at, 8).unwrap();
    let error = Queue::with_inflight(memory, config, Some(inflight)).unwrap_err();
    assert!(matches!(error, QueueError::Record { entries: 8, size: SIZE }), "{error:?}");
    let error = Inflight::new(&small, at, SIZE).unwrap_err();
    assert!(matches!(error, QueueError::Ring(_)), "{error:?}");
}
