//! The driver side of a split queue, for tests and load generators.

use std::rc::Rc;
use std::sync::atomic::{Ordering, fence};

use guest_memory::{AccessError, MemoryView};
use virtio_bindings::virtio_ring::{
    VRING_AVAIL_F_NO_INTERRUPT, VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE,
    VRING_USED_F_NO_NOTIFY,
};

use crate::error::QueueError;
use crate::queue::QueueConfig;
use crate::ring::{Descriptor, Rings};
use crate::segments::Segment;
use crate::used::event_passed;

/// A chain in the used ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Used {
    /// The index of the chain's first descriptor.
    pub head: u16,
    /// Bytes the device says it wrote.
    pub written: u32,
}

/// The driver's side of a queue. Trusts the device.
#[derive(Debug)]
pub struct Driver {
    memory: Rc<MemoryView>,
    config: QueueConfig,
    rings: Rings,
    /// Free descriptors.
    free: Vec<u16>,
    /// For each descriptor of a chain in flight, the next one.
    next: Vec<Option<u16>>,
    avail_idx: u16,
    /// The available index when the need for a kick was last checked.
    published: u16,
    used_idx: u16,
}

impl Driver {
    /// The alignment of rings here, which exceeds virtio's.
    const ALIGN: u64 = 64;

    /// Returns the bytes of guest memory that the rings of a queue take.
    ///
    /// `size`: entries of the queue.
    pub fn rings_len(size: u16) -> u64 {
        let [_, _, end] = Self::offsets(size);
        end + Rings::used_len(size.into()) as u64
    }

    /// Offsets of the descriptor table, the available ring and the used ring.
    fn offsets(size: u16) -> [u64; 3] {
        let avail = Rings::desc_len(size.into()) as u64;
        let used = (avail + Rings::avail_len(size.into()) as u64).next_multiple_of(Self::ALIGN);
        [0, avail.next_multiple_of(2), used]
    }

    /// Returns a driver of a queue with `size` entries.
    ///
    /// The rings are at guest address `base`, a multiple of 64. Zeroes [`rings_len`] bytes there.
    /// INDIRECT_DESC is on; a test can turn it off in its copy of the [`config`](Self::config).
    ///
    /// # Errors
    ///
    /// Those of [`Queue::new`](crate::Queue::new).
    ///
    /// [`rings_len`]: Self::rings_len
    pub fn new(
        memory: &Rc<MemoryView>,
        base: u64,
        size: u16,
        event_idx: bool,
    ) -> Result<Self, QueueError> {
        if !size.is_power_of_two() {
            return Err(QueueError::Size(size));
        }
        let len = Self::rings_len(size);
        let outside = guest_memory::Error::RingOutside { user_addr: base, len };
        let user = memory.memory().guest_to_user(base, len).ok_or(QueueError::Ring(outside))?;
        let [desc, avail, used] = Self::offsets(size).map(|offset| user + offset);
        let (indirect, next_avail, index) = (true, 0, 0);
        let config =
            QueueConfig { size, desc, avail, used, event_idx, indirect, next_avail, index };
        let rings = Rings::new(&config, memory.memory())?;
        let zeroes = vec![0; len as usize];
        let mapped = memory.write_bytes(base, &zeroes);
        debug_assert!(mapped.is_ok(), "guest_to_user found all of it");
        Ok(Driver {
            memory: Rc::clone(memory),
            config,
            rings,
            free: (0..size).rev().collect(),
            next: vec![None; size.into()],
            avail_idx: 0,
            published: 0,
            used_idx: 0,
        })
    }

    /// Makes the rings' indices begin at `index` instead of 0.
    ///
    /// Call this before the device's set-up.
    #[must_use]
    pub fn starting_at(mut self, index: u16) -> Self {
        self.config.next_avail = index;
        (self.avail_idx, self.published, self.used_idx) = (index, index, index);
        self.rings.set_avail_idx(index);
        self.rings.set_used_idx(index);
        self.rings.set_used_event(index);
        self
    }

    /// Returns the device's configuration of the queue.
    pub fn config(&self) -> QueueConfig {
        self.config
    }

    /// Returns the number of free descriptors.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Adds a chain of these buffers to the available ring. Returns its head.
    ///
    /// The chain is not yet [published](Self::publish). `None` when there are no buffers or too few free
    /// descriptors.
    pub fn add(&mut self, readable: &[Segment], writable: &[Segment]) -> Option<u16> {
        let count = readable.len() + writable.len();
        let at = self.free.len().checked_sub(count)?;
        let last = count.checked_sub(1)?;
        for (i, mut desc) in descriptors(readable, writable).enumerate() {
            let index = self.free[at + last - i];
            let next = (i < last).then(|| self.free[at + last - i - 1]);
            desc.next = next.unwrap_or(0);
            self.rings.set_descriptor(index, desc);
            self.next[usize::from(index)] = next;
        }
        let head = self.free[at + last];
        self.free.truncate(at);
        self.offer(head);
        Some(head)
    }

    /// Adds a chain by an indirect table (virtio 1.3, 2.7.5.3).
    ///
    /// `table` is the table's guest address, with 16 bytes per buffer. Otherwise like [`add`](Self::add).
    ///
    /// # Errors
    ///
    /// [`AccessError`] when the table is not in memory.
    pub fn add_indirect(
        &mut self,
        table: u64,
        readable: &[Segment],
        writable: &[Segment],
    ) -> Result<Option<u16>, AccessError> {
        let mut addr = table;
        for (i, mut desc) in descriptors(readable, writable).enumerate() {
            desc.next = i as u16 + 1;
            self.memory.write_bytes(addr, &desc.to_bytes())?;
            addr += Descriptor::SIZE as u64;
        }
        let Some(head) = self.free.pop() else { return Ok(None) };
        let len = (addr - table) as u32;
        let flags = VRING_DESC_F_INDIRECT as u16;
        self.rings.set_descriptor(head, Descriptor { addr: table, len, flags, next: 0 });
        self.next[usize::from(head)] = None;
        self.offer(head);
        Ok(Some(head))
    }

    /// Writes any descriptor to entry `index`, for tests of malformed chains.
    pub fn set_descriptor(&mut self, index: u16, desc: Descriptor) {
        self.rings.set_descriptor(index, desc);
    }

    /// Adds any head to the available ring, without publishing it.
    ///
    /// `head` need not be a descriptor's index, for tests of drivers that break the rules.
    pub fn offer(&mut self, head: u16) {
        self.rings.set_avail_entry(self.avail_idx, head);
        self.avail_idx = self.avail_idx.wrapping_add(1);
    }

    /// Moves the available index without adding entries or publishing it.
    pub fn skip(&mut self, entries: u16) {
        self.avail_idx = self.avail_idx.wrapping_add(entries);
    }

    /// Publishes the added chains. Returns `true` if the device requests a kick.
    pub fn publish(&mut self) -> bool {
        let (new, old) = (self.avail_idx, std::mem::replace(&mut self.published, self.avail_idx));
        self.rings.set_avail_idx(new);
        fence(Ordering::SeqCst);
        if self.config.event_idx {
            event_passed(self.rings.avail_event(), new, old)
        } else {
            u32::from(self.rings.used_flags()) & VRING_USED_F_NO_NOTIFY == 0
        }
    }

    /// Returns the next used chain, if any, and frees its descriptors.
    ///
    /// # Panics
    ///
    /// If the device returns a head without a chain.
    pub fn reap(&mut self) -> Option<Used> {
        if !self.has_used() {
            return None;
        }
        let (id, written) = self.rings.used_entry(self.used_idx);
        self.used_idx = self.used_idx.wrapping_add(1);
        let head = u16::try_from(id).expect("a head is a descriptor's number");
        let mut index = Some(head);
        while let Some(i) = index {
            self.free.push(i);
            index = self.next[usize::from(i)].take();
        }
        Some(Used { head, written })
    }

    /// Returns the published index of the available ring.
    pub fn available(&self) -> u16 {
        self.published
    }

    /// Returns the used index, as the device has written it.
    pub fn device_used(&self) -> u16 {
        self.rings.used_idx()
    }

    /// Returns whether a chain is ready to [`reap`](Self::reap).
    ///
    /// One read of the used index.
    pub fn has_used(&self) -> bool {
        self.rings.used_idx() != self.used_idx
    }

    /// Requests a signal for the next used chain (virtio 1.3, 2.7.7).
    ///
    /// Returns `true` if a used chain is ready already.
    pub fn enable_signals(&mut self) -> bool {
        if self.config.event_idx {
            self.rings.set_used_event(self.used_idx);
        } else {
            self.rings.set_avail_flags(0);
        }
        fence(Ordering::SeqCst);
        self.rings.used_idx() != self.used_idx
    }

    /// Asks the device not to signal (virtio 1.3, 2.7.7).
    pub fn suppress_signals(&mut self) {
        if self.config.event_idx {
            // An event that the used index cannot pass before the driver has taken all chains, as no queue
            // has more entries. The index just before would be wrong: the device may still check whether
            // chains that the driver has already taken pass the event.
            self.rings.set_used_event(self.used_idx.wrapping_add(1 << 15));
        } else {
            self.rings.set_avail_flags(VRING_AVAIL_F_NO_INTERRUPT as u16);
        }
    }
}

/// The descriptors of a chain of these buffers, `next` left open.
fn descriptors<'a>(
    readable: &'a [Segment],
    writable: &'a [Segment],
) -> impl Iterator<Item = Descriptor> + 'a {
    let count = readable.len() + writable.len();
    let all =
        readable.iter().map(|s| (s, 0)).chain(writable.iter().map(|s| (s, VRING_DESC_F_WRITE)));
    all.enumerate().map(move |(i, (s, direction))| {
        let next = if i + 1 < count { VRING_DESC_F_NEXT } else { 0 };
        Descriptor { addr: s.addr, len: s.len, flags: (direction | next) as u16, next: 0 }
    })
}
