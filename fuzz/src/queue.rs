//! A queue, a hostile driver and a device, as one sequence of steps taken from the bytes.
//!
//! After each step the queue's promises are checked; each chain is also shown to `virtio-queue`,
//! which must see the same (`crates/queue/tests/oracle.rs` explains where ours is stricter).

use std::fs::File;
use std::rc::Rc;
use std::sync::Arc;

use event_loop::IoBufs;
use guest_memory::test_util::{USER_BASE, memfd_region};
use guest_memory::{GuestMemory, MemoryView};
use queue::{Chain, Descriptor, MAX_SEGMENTS, Queue, QueueConfig, QueueError, Segment, Segments};
use virtio_queue::{Queue as Oracle, QueueOwnedT, QueueT};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

use crate::input::Input;

/// Guest memory: two neighbours, a hole, a third region that may be unplugged.
const REGIONS: [(u64, u64); 3] = [(0, 0x2000), (0x2000, 0x2000), (0x5000, 0x1000)];
/// Where the rings are unless the input says otherwise; none at 0, which the oracle takes for "not
/// set".
const DESC: u64 = 0x100;
const AVAIL: u64 = 0x500;
const USED: u64 = 0x600;
/// Where the indirect tables are that steps write to, the last one across two regions.
const TABLES: [u64; 4] = [0x1000, 0x1100, 0x1208, 0x1fd8];
/// Memory of the oracle alone, for its own available ring.
const ORACLE_RING: u64 = 1 << 40;

/// Created once per thread, since mapping takes longer than a run.
struct World {
    /// All regions.
    full: Rc<MemoryView>,
    /// All but the last.
    less: Rc<MemoryView>,
    oracle: GuestMemoryMmap,
}

impl World {
    fn new() -> Self {
        let mut regions = Vec::new();
        let mut shared = Vec::new();
        for (addr, size) in REGIONS {
            let region = memfd_region(addr, size).expect("a memfd");
            let file = File::from(region.fd.try_clone().expect("a file descriptor"));
            let file = Some(FileOffset::new(file, 0));
            shared.push((GuestAddress(addr), size as usize, file));
            regions.push(Arc::new(region.map().expect("a mapping")));
        }
        shared.push((GuestAddress(ORACLE_RING), 4096, None));
        let full = GuestMemory::from_regions(regions).expect("no overlaps");
        let [.., (addr, size)] = REGIONS;
        let less = full.without_region(addr, USER_BASE + addr, size).expect("it is there");
        World {
            full: MemoryView::new(Arc::new(full)),
            less: MemoryView::new(Arc::new(less)),
            oracle: GuestMemoryMmap::from_ranges_with_files(shared).expect("a mapping"),
        }
    }

    fn wipe(&self) {
        for (addr, size) in REGIONS {
            self.full.write_bytes(addr, &[0; 0x2000][..size as usize]).expect("memory");
        }
    }
}

thread_local! {
    static WORLD: World = World::new();
}

/// Runs the steps in `data`.
pub fn run(data: &[u8]) {
    WORLD.with(|world| {
        world.wipe();
        let mut input = Input::new(data);
        let config = config(&mut input);
        let used_idx = USED + 2;
        // A queue that is resumed: most often where both indices are the same.
        world.full.write_bytes(used_idx, &config.next_avail.to_le_bytes()).expect("memory");
        let Ok(queue) = Queue::new(Rc::clone(&world.full), config) else { return };
        let mut run = Run {
            world,
            queue,
            chain: Chain::new(),
            offered: config.next_avail,
            in_flight: Vec::new(),
            pending: 0,
            unseen: 0,
        };
        // Bounded, as libFuzzer's own limit on the length of inputs may be lifted.
        for _ in 0..4096 {
            if input.is_empty() {
                break;
            }
            run.step(&mut input);
            run.check();
        }
    });
}

fn config(input: &mut Input<'_>) -> QueueConfig {
    let flags = input.u8();
    let mut config = QueueConfig {
        size: 1 << (flags & 7).min(5),
        desc: USER_BASE + DESC,
        avail: USER_BASE + AVAIL,
        used: USER_BASE + USED,
        event_idx: flags & 8 != 0,
        indirect: flags & 16 == 0,
        next_avail: input.u16(),
        index: 0,
    };
    if flags & 32 != 0 {
        config.size = input.u16();
        config.desc = USER_BASE.wrapping_add(input.u32().into());
        config.avail = USER_BASE.wrapping_add(input.u32().into());
        config.used = input.u64();
    }
    config
}

/// An address: most often memory, sometimes anything.
fn address(input: &mut Input<'_>) -> u64 {
    match input.u8() {
        0 => input.u64(),
        1 => TABLES[usize::from(input.u8()) % TABLES.len()],
        2 => u64::MAX - u64::from(input.u8()),
        page => (u64::from(page & 7) << 12) + (u64::from(input.u8()) << 4),
    }
}

fn descriptor(input: &mut Input<'_>) -> Descriptor {
    let addr = address(input);
    let len = match input.u8() {
        0 => input.u32(),
        units => u32::from(units) * 16,
    };
    let [flags, next] = input.array();
    let next = if flags & 128 != 0 { input.u16() } else { next.into() };
    Descriptor { addr, len, flags: u16::from(flags & 15), next }
}

struct Run<'a> {
    world: &'a World,
    queue: Queue,
    chain: Chain,
    /// The driver's available index.
    offered: u16,
    /// Heads popped and not given back.
    in_flight: Vec<u16>,
    /// Chains given back and not published.
    pending: u16,
    /// Those of them that the driver has not been shown.
    unseen: u16,
}

impl Run<'_> {
    fn step(&mut self, input: &mut Input<'_>) {
        let size = self.queue.size();
        let config = *self.queue.config();
        let guest = |user: u64| user.wrapping_sub(USER_BASE);
        match input.u8() % 13 {
            0 => {
                let index = u64::from(input.u8()) % u64::from(size);
                self.poke(guest(config.desc) + index * 16, &descriptor(input).to_bytes());
            }
            1 => {
                let [table, index] = input.array();
                let table = TABLES[usize::from(table) % TABLES.len()];
                self.poke(table + u64::from(index % 16) * 16, &descriptor(input).to_bytes());
            }
            2 => {
                let head = input.u8();
                let head = if head == 255 { input.u16() } else { u16::from(head) % size };
                let entry = guest(config.avail) + 4 + u64::from(self.offered % size) * 2;
                self.poke(entry, &head.to_le_bytes());
                self.offered = self.offered.wrapping_add(1);
                self.poke(guest(config.avail) + 2, &self.offered.to_le_bytes());
            }
            3 => {
                self.offered = input.u16();
                self.poke(guest(config.avail) + 2, &self.offered.to_le_bytes());
            }
            4 => {
                let addr = address(input);
                self.poke(addr, &input.array::<8>());
            }
            5 => self.pop(),
            6 => {
                for _ in 0..=size {
                    self.pop();
                }
            }
            7 => {
                if let Some(last) = self.in_flight.len().checked_sub(1) {
                    let at = usize::from(input.u8()).min(last);
                    let before = self.queue.used_idx();
                    self.queue.add_used(self.in_flight.swap_remove(at), input.u32());
                    self.pending += 1;
                    self.unseen += 1;
                    // Long batches are shown as they grow, all of it or nothing.
                    let shown = self.queue.used_idx().wrapping_sub(before);
                    assert!(shown == 0 || shown == self.unseen);
                    self.unseen -= shown;
                }
            }
            8 => {
                let before = self.queue.used_idx();
                let signal = self.queue.publish();
                assert!(!signal || self.pending > 0, "a signal for nothing");
                assert_eq!(self.queue.used_idx(), before.wrapping_add(self.unseen));
                // What was shown before may have been written over by the driver since.
                if self.unseen > 0 {
                    let shown = self.queue.memory().read_u16(guest(config.used) + 2);
                    assert_eq!(shown, Ok(self.queue.used_idx()));
                }
                (self.pending, self.unseen) = (0, 0);
            }
            9 => self.queue.suppress_kicks(),
            10 => {
                let work = self.queue.enable_kicks();
                assert_eq!(work, self.queue.has_work());
            }
            11 => {
                let less = Rc::clone(&self.world.less);
                assert!(self.queue.replace_memory(less).is_ok() || self.queue.is_broken());
            }
            _ => {
                let full = Rc::clone(&self.world.full);
                self.queue.replace_memory(full).expect("the rings were there at set-up");
            }
        }
    }

    /// Writes where the driver wants, if it is memory.
    fn poke(&self, addr: u64, bytes: &[u8]) {
        let _ = self.world.full.write_bytes(addr, bytes);
    }

    fn check(&self) {
        assert_eq!(usize::from(self.queue.in_flight()), self.in_flight.len());
        assert!(self.in_flight.len() <= self.queue.size().into());
        assert!(!(self.queue.is_broken() && self.queue.has_work()));
    }

    fn pop(&mut self) {
        let (broken, next) = (self.queue.is_broken(), self.queue.next_avail());
        match self.queue.pop(&mut self.chain) {
            Ok(true) => {
                assert!(!broken);
                assert_eq!(self.queue.next_avail(), next.wrapping_add(1));
                let head = self.chain.head();
                self.in_flight.push(head);
                let (readable, writable) = (self.chain.readable(), self.chain.writable());
                well_formed(readable, self.chain.readable_len());
                well_formed(writable, self.chain.writable_len());
                let shape = |s: Segment, writable| (s.addr, s.len, writable);
                let readable = readable.iter().map(|s| shape(s, false));
                let ours: Vec<_> =
                    readable.chain(writable.iter().map(|s| shape(s, true))).collect();
                assert!(ours.len() <= MAX_SEGMENTS);
                // Empty buffers are skipped.
                let theirs = self.oracle(head).map(|mut theirs| {
                    theirs.retain(|(_, len, _)| *len > 0);
                    theirs
                });
                // The oracle takes no table at other multiples of 8, which drivers use.
                let is_aligned = self.queue.config().desc.is_multiple_of(16);
                assert!(!is_aligned || theirs == Some(ours), "the oracle sees another chain");
                self.serve();
            }
            Ok(false) => assert!(!broken && !self.queue.has_work()),
            Err(error) => {
                assert!(self.queue.is_broken());
                assert_eq!(broken, matches!(error, QueueError::Broken));
                // Reads the whole chain once more, so that the time it takes counts, too.
                if let QueueError::TooLong { head } = error
                    && let Some(theirs) = self.oracle(head)
                {
                    assert!(theirs.len() > MAX_SEGMENTS, "refused as too long: {theirs:?}");
                }
            }
        }
    }

    /// What a device does with a request: a header, data, a status.
    fn serve(&self) {
        let memory = self.queue.memory();
        if let Ok((header, data)) = self.chain.readable().split_array::<16>(&memory) {
            let mut again = [0; 16];
            assert_eq!(self.chain.readable().read(&memory, &mut again), Ok(16));
            assert_eq!(header, again);
            self.push(&memory, data);
        }
        if let Some((data, status)) = self.chain.writable().split_last() {
            self.push(&memory, data);
            let is_memory = memory.memory().region_at(status).is_some();
            assert_eq!(memory.read_u8(status).is_ok(), is_memory);
        }
    }

    /// Makes the segments of a run and checks that they are inside the mappings.
    fn push(&self, memory: &Rc<MemoryView>, run: Segments<'_>) {
        let mut bufs = IoBufs::new();
        let pushed = run.push_iovecs(memory, &mut bufs);
        let all_memory = run.iter().all(|s| {
            let mut at = s.addr;
            let end = s.addr + u64::from(s.len);
            while at < end {
                let Some(region) = memory.memory().region_at(at) else { return false };
                at = region.guest_addr() + region.size();
            }
            true
        });
        assert_eq!(pushed.is_ok(), all_memory);
        assert!(pushed.is_err() || bufs.len() == run.len() as usize);
        for iov in bufs.iovecs() {
            // Neighbours in our address space may have become one segment.
            let mut base = iov.iov_base as usize;
            let end = base + iov.iov_len;
            while base < end {
                let inside = memory.memory().regions().iter().find_map(|r| {
                    let host = r.host().as_ptr() as usize;
                    let offset = base.checked_sub(host)?;
                    (offset < r.size() as usize).then_some(host + r.size() as usize)
                });
                base = inside.expect("a segment outside guest memory");
            }
        }
    }

    /// The chain at `head` as the oracle sees it: `None` when it refuses it.
    fn oracle(&self, head: u16) -> Option<Vec<(u64, u32, bool)>> {
        let memory = &self.world.oracle;
        let config = self.queue.config();
        let mut oracle = Oracle::new(config.size).expect("a size that ours takes");
        let desc = GuestAddress(config.desc - USER_BASE);
        oracle.try_set_desc_table_address(desc).ok()?;
        let ring = GuestAddress(ORACLE_RING);
        oracle.try_set_avail_ring_address(ring).expect("it is aligned");
        let entry = [0, 0, 1, 0, head as u8, (head >> 8) as u8];
        memory.write_slice(&entry, ring).expect("it is memory");
        oracle.set_ready(true);
        let descs: Vec<_> = oracle.iter(memory).ok()?.next()?.collect();
        let complete = descs.last().is_some_and(|d| !d.has_next());
        complete.then(|| descs.iter().map(|d| (d.addr().0, d.len(), d.is_write_only())).collect())
    }
}

fn well_formed(run: Segments<'_>, len: u32) {
    let mut sum = 0;
    for s in run.iter() {
        assert!(s.len > 0 && s.addr.checked_add(s.len.into()).is_some());
        sum += s.len;
    }
    assert_eq!((sum, run.len()), (len, len));
}
