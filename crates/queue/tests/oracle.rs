//! This queue and rust-vmm's `virtio-queue` on the same guest memory find the same chains and refuse the same ones.
//!
//! The oracle does not report refusals: its iterator over a chain's descriptors just ends. So the oracle accepts a chain
//! if the last descriptor returned has no successor.
//!
//! This queue refuses more than the oracle; nothing else may differ:
//!
//! - [`QueueError::Buffer`]: an empty buffer, or one that ends beyond 64 bits. The oracle leaves the check to users of
//!   the buffer; a device could then only fail.
//! - [`QueueError::ReadableAfterWritable`]: the oracle hands out descriptors one by one, so order
//!   is not its concern.
//! - [`QueueError::Indirect`]: the oracle does not know whether INDIRECT_DESC was negotiated, and
//!   follows a descriptor to its table even if it has a successor as well (2.7.5.3.1 forbids it).
//! - [`QueueError::TooLong`] beyond 1024 segments: the oracle takes 65535 from an indirect table.
//! - [`QueueError::TooManyInFlight`]: the oracle does not count.

use std::fs::File;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use guest_memory::test_util::{USER_BASE, memfd_region};
use guest_memory::{GuestMemory, MemoryView};
use proptest::prelude::*;
use proptest::sample::select;
use queue::driver::Driver;
use queue::{Chain, Descriptor, Queue, QueueConfig, QueueError, Segment};
use virtio_queue::{Queue as OracleQueue, QueueOwnedT, QueueT};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Bytes of guest memory, from address 0 on.
const MEMORY: u64 = 0x10000;
/// Addresses of the rings, each on a separate page. Not 0, which the oracle takes for "not set".
const RINGS: [u64; 3] = [0x1000, 0x2000, 0x3000];
/// Where indirect tables are.
const TABLES: [u64; 3] = [0x4000, 0x5008, MEMORY - 64];

/// Both queues over the same memory.
struct Both {
    memory: Rc<MemoryView>,
    ours: Queue,
    oracle: OracleQueue,
    oracle_memory: GuestMemoryMmap,
}

/// A chain in common terms: the head, and (address, length, writable) of each buffer.
type Seen = (u16, Vec<(u64, u32, bool)>);

impl Both {
    fn new(size: u16, event_idx: bool, start: u16) -> Self {
        let region = memfd_region(0, MEMORY).unwrap();
        let file = FileOffset::new(File::from(region.fd.try_clone().unwrap()), 0);
        let oracle_memory = GuestMemoryMmap::from_ranges_with_files([(
            GuestAddress(0),
            MEMORY as usize,
            Some(file),
        )])
        .unwrap();
        let memory = GuestMemory::from_regions([Arc::new(region.map().unwrap())]).unwrap();
        let memory = MemoryView::new(Arc::new(memory));

        let [desc, avail, used] = RINGS;
        memory.write_bytes(used + 2, &start.to_le_bytes()).unwrap();
        let config = QueueConfig {
            size,
            desc: USER_BASE + desc,
            avail: USER_BASE + avail,
            used: USER_BASE + used,
            event_idx,
            indirect: true,
            next_avail: start,
            index: 0,
        };
        let ours = Queue::new(Rc::clone(&memory), config).unwrap();
        let mut oracle = OracleQueue::new(size).unwrap();
        oracle.try_set_desc_table_address(GuestAddress(desc)).unwrap();
        oracle.try_set_avail_ring_address(GuestAddress(avail)).unwrap();
        oracle.try_set_used_ring_address(GuestAddress(used)).unwrap();
        oracle.set_event_idx(event_idx);
        oracle.set_next_avail(start);
        oracle.set_next_used(start);
        oracle.set_ready(true);
        assert!(oracle.is_valid(&oracle_memory));
        Both { memory, ours, oracle, oracle_memory }
    }

    fn pop_ours(&self, chain: &mut Chain) -> Result<Option<Seen>, QueueError> {
        if !self.ours.pop(chain)? {
            return Ok(None);
        }
        let (readable, writable) = (chain.readable(), chain.writable());
        let readable = readable.iter().map(|s| (s.addr, s.len, false));
        let writable = writable.iter().map(|s| (s.addr, s.len, true));
        Ok(Some((chain.head(), readable.chain(writable).collect())))
    }

    /// `Err` if the oracle refuses the index; `Ok(Some(None))` if it refuses the chain.
    fn pop_oracle(&mut self) -> Result<Option<Option<Seen>>, virtio_queue::Error> {
        let Some(chain) = self.oracle.iter(&self.oracle_memory)?.next() else { return Ok(None) };
        let head = chain.head_index();
        let descs: Vec<_> = chain.collect();
        let complete = descs.last().is_some_and(|d| !d.has_next());
        // This queue skips empty buffers.
        let with_bytes = descs.iter().filter(|d| d.len() > 0);
        let seen = with_bytes.map(|d| (d.addr().0, d.len(), d.is_write_only())).collect();
        Ok(Some(complete.then_some((head, seen))))
    }
}

/// A descriptor of a table of `table` entries; of 30, about `indirect` refer to a table.
fn descriptor(table: u16, indirect: u32) -> impl Strategy<Value = Descriptor> {
    let addr = prop_oneof![
        8 => 0x6000..MEMORY,
        4 => select(TABLES.to_vec()),
        1 => any::<u64>(),
        1 => u64::MAX - 64..=u64::MAX,
    ];
    let len = prop_oneof![
        8 => 1..1024u32,
        12 => select(vec![16, 32, 48, 64]),
        1 => select(vec![0, 8, 17, 65536 * 16, 65535 * 16, 1 << 31, u32::MAX]),
    ];
    let flags = prop_oneof![
        6 => Just(0), 9 => Just(NEXT), 6 => Just(WRITE), 4 => Just(NEXT | WRITE),
        indirect => Just(INDIRECT), 1 => any::<u16>(),
    ];
    let next = prop_oneof![9 => 0..table, 1 => Just(table), 1 => any::<u16>()];
    (addr, len, flags, next).prop_map(|(addr, len, flags, next)| Descriptor {
        addr,
        len,
        flags,
        next,
    })
}

/// A size, a descriptor table of that size, indirect tables, an available ring, entries offered.
fn hostile() -> impl Strategy<Value = (u16, Vec<Descriptor>, Vec<Vec<Descriptor>>, Vec<u16>, u16)> {
    (0..5u32).prop_flat_map(|log2| {
        let size = 1 << log2;
        (
            Just(size),
            prop::collection::vec(descriptor(size, 6), usize::from(size)),
            prop::collection::vec(prop::collection::vec(descriptor(4, 1), 4), TABLES.len()),
            prop::collection::vec(prop_oneof![19 => 0..size, 1 => 0..=u16::MAX], usize::from(size)),
            prop_oneof![19 => 1..=size, 1 => any::<u16>()],
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn hostile_tables(
        (size, table, indirect, ring, offered) in hostile(),
        start in any::<u16>(),
    ) {
        let mut both = Both::new(size, false, start);
        let write = |addr: u64, bytes: &[u8]| both.memory.write_bytes(addr, bytes).unwrap();
        for (at, descs) in [RINGS[0]].iter().chain(&TABLES).zip([&table].into_iter().chain(&indirect)) {
            for (i, desc) in descs.iter().enumerate() {
                write(at + i as u64 * 16, &desc.to_bytes());
            }
        }
        for (i, head) in ring.iter().enumerate() {
            write(RINGS[1] + 4 + i as u64 * 2, &head.to_le_bytes());
        }
        write(RINGS[1] + 2, &start.wrapping_add(offered).to_le_bytes());

        let mut chain = Chain::new();
        // One more than offered: the last pop finds the ring empty.
        for _ in 0..=size {
            let ours = both.pop_ours(&mut chain);
            let oracle = both.pop_oracle();
            match (ours, oracle) {
                (Ok(None), Ok(None)) => break,
                (Ok(Some(ours)), Ok(Some(Some(oracle)))) => prop_assert_eq!(ours, oracle),
                (Err(QueueError::AvailJump { .. }), Err(virtio_queue::Error::InvalidAvailRingIndex)) => {
                    prop_assert!(offered > size);
                    break;
                }
                // Stricter, as explained above.
                (Err(
                    QueueError::Buffer { .. }
                    | QueueError::ReadableAfterWritable { .. }
                    | QueueError::Indirect { .. },
                ), Ok(Some(_))) => break,
                // Both refuse.
                (Err(error), Ok(Some(None))) => {
                    let named = matches!(error, QueueError::TooLong { .. } | QueueError::Index { .. }
                        | QueueError::TooManyBytes { .. } | QueueError::IndirectLength { .. }
                        | QueueError::IndirectAccess { .. });
                    prop_assert!(named, "{}", error);
                    break;
                }
                (ours, oracle) => {
                    prop_assert!(false, "ours: {:?}, oracle: {:?}", ours, oracle);
                }
            }
        }
    }

    /// Both accept chains as drivers make them.
    #[test]
    fn valid_chains(
        chains in prop::collection::vec(
            (prop::collection::vec(1..4096u32, 0..4), prop::collection::vec(1..4096u32, 0..4), any::<bool>()),
            1..12,
        ),
        start in any::<u16>(),
    ) {
        let mut both = Both::new(16, false, start);
        let base = 0x1000;
        let mut driver = Driver::new(&both.memory, base, 16, false).unwrap().starting_at(start);
        both.ours = Queue::new(Rc::clone(&both.memory), driver.config()).unwrap();
        let guest = |user| GuestAddress(user - USER_BASE);
        both.oracle.try_set_desc_table_address(guest(driver.config().desc)).unwrap();
        both.oracle.try_set_avail_ring_address(guest(driver.config().avail)).unwrap();
        both.oracle.try_set_used_ring_address(guest(driver.config().used)).unwrap();

        let mut chain = Chain::new();
        for (i, (readable, writable, indirect)) in chains.iter().enumerate() {
            let at = |(j, len): (usize, &u32)| Segment { addr: 0x6000 + j as u64 * 64, len: *len };
            let r: Vec<_> = readable.iter().enumerate().map(at).collect();
            let w: Vec<_> = writable.iter().enumerate().map(at).collect();
            let added = if r.is_empty() && w.is_empty() {
                None
            } else if *indirect {
                driver.add_indirect(0x4000 + i as u64 * 128, &r, &w).unwrap()
            } else {
                driver.add(&r, &w)
            };
            let Some(head) = added else { continue };
            driver.publish();
            let r = r.iter().map(|s| (s.addr, s.len, false));
            let sent = Some((head, r.chain(w.iter().map(|s| (s.addr, s.len, true))).collect()));
            prop_assert_eq!(&both.pop_ours(&mut chain).unwrap(), &sent);
            prop_assert_eq!(both.pop_oracle().unwrap(), Some(sent));
            both.ours.add_used(head, i as u32);
            let _ = both.ours.publish();
            prop_assert_eq!(driver.reap().map(|used| used.written), Some(i as u32));
        }
    }

    /// Used rings are equal, and so are the decisions to signal, after the first, which this queue always does.
    #[test]
    fn used_ring_and_signals(
        start in any::<u16>(),
        batches in prop::collection::vec((1..=8u16, -12..12i16), 1..40),
    ) {
        // Two memories: each queue writes its own used ring.
        let ours = Both::new(8, true, start);
        let mut theirs = Both::new(8, true, start);
        let [desc, avail, used] = RINGS;
        let buffer = Descriptor { addr: 0x6000, len: 1, flags: 0, next: 0 };
        let mut index = start;
        let mut chain = Chain::new();
        for (i, (count, event)) in batches.into_iter().enumerate() {
            // The driver wants a signal somewhere near the index.
            let event = index.wrapping_add_signed(event);
            index = index.wrapping_add(count);
            for both in [&ours, &theirs] {
                for d in 0..8 {
                    both.memory.write_bytes(desc + d * 16, &buffer.to_bytes()).unwrap();
                    both.memory.write_bytes(avail + 4 + d * 2, &[d as u8, 0]).unwrap();
                }
                both.memory.write_bytes(avail + 2, &index.to_le_bytes()).unwrap();
                both.memory.write_bytes(avail + 20, &event.to_le_bytes()).unwrap();
            }
            for len in 0..count {
                let (head, _) = ours.pop_ours(&mut chain).unwrap().unwrap();
                ours.ours.add_used(head, len.into());
                let (head, _) = theirs.pop_oracle().unwrap().flatten().unwrap();
                let Both { oracle, oracle_memory, .. } = &mut theirs;
                oracle.add_used(oracle_memory, head, len.into()).unwrap();
            }
            let signal = ours.ours.publish();
            let Both { oracle, oracle_memory, .. } = &mut theirs;
            let oracle_signal = oracle.needs_notification(oracle_memory).unwrap();
            prop_assert_eq!(signal, oracle_signal || i == 0);
            let used_idx = oracle.used_idx(oracle_memory, Ordering::Acquire).unwrap().0;
            prop_assert_eq!(used_idx, ours.ours.used_idx());
            let ring = |both: &Both| both.memory.read_array::<{ 4 + 8 * 8 }>(used).unwrap();
            prop_assert_eq!(ring(&ours), ring(&theirs));

            // Both request the next kick at the same entry.
            let raced = ours.ours.enable_kicks();
            let Both { oracle, oracle_memory, .. } = &mut theirs;
            prop_assert_eq!(raced, oracle.enable_notification(oracle_memory).unwrap());
            let event = |both: &Both| both.memory.read_u16(used + 68).unwrap();
            prop_assert_eq!(event(&ours), event(&theirs));
        }
    }
}
