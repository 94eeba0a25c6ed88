//! The three areas of a split queue (virtio 1.3, 2.7.5 to 2.7.8) and access to their fields.
//!
//! All fields are little-endian, naturally aligned and accessed by atomics, since the other side
//! accesses them at the same time. An access cannot miss the area: its bounds were checked for the
//! queue's size when the rings were made, and entries are taken modulo that size.

#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use guest_memory::{GuestMemory, RingArea, prefetch};
use virtio_bindings::virtio_ring::{VRING_AVAIL_ALIGN_SIZE, VRING_USED_ALIGN_SIZE};

use crate::error::QueueError;
use crate::queue::QueueConfig;

/// A descriptor of a table (virtio 1.3, 2.7.5), in the machine's byte order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Descriptor {
    /// Guest address of the buffer or indirect table.
    pub addr: u64,
    /// Its length in bytes.
    pub len: u32,
    /// `VRING_DESC_F_*`: bits of virtio 1.3, 2.7.5.
    pub flags: u16,
    /// The index of the next descriptor of the chain, if there is one by the flags.
    pub next: u16,
}

impl Descriptor {
    /// Bytes of a descriptor in a table.
    pub const SIZE: usize = 16;

    /// Whether `flag`, one of `VRING_DESC_F_*`, is set.
    #[inline]
    pub(crate) fn has(self, flag: u32) -> bool {
        u32::from(self.flags) & flag != 0
    }

    /// Returns the descriptor in these bytes of a table.
    #[inline]
    pub fn from_bytes(bytes: [u8; Self::SIZE]) -> Self {
        let value = u128::from_le_bytes(bytes);
        Self::from_words(value as u64, (value >> 64) as u64)
    }

    /// Returns the descriptor's bytes in a table.
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let (low, high) = self.to_words();
        (u128::from(low) | u128::from(high) << 64).to_le_bytes()
    }

    #[inline]
    fn from_words(low: u64, high: u64) -> Self {
        Descriptor {
            addr: low,
            len: high as u32,
            flags: (high >> 32) as u16,
            next: (high >> 48) as u16,
        }
    }

    fn to_words(self) -> (u64, u64) {
        let high = u64::from(self.len) | u64::from(self.flags) << 32 | u64::from(self.next) << 48;
        (self.addr, high)
    }
}

/// Returns the bytes of the used ring of a queue with `size` entries.
pub const fn used_ring_len(size: u16) -> u64 {
    Rings::used_len(size as usize) as u64
}

/// Alignment of the descriptor table that its accesses need, bytes. Drivers owe 16 (2.7).
const DESC_ALIGN_SIZE: u32 = align_of::<AtomicU64>() as u32;

/// Offset of `idx` in the available and the used ring; `flags` is at 0.
const IDX: usize = 2;
/// Offset of the entries in both.
const ENTRIES: usize = 4;
/// Bytes of an entry in the available ring.
const AVAIL_ENTRY: usize = 2;
/// Bytes of an entry in the used ring.
const USED_ENTRY: usize = 8;

/// The rings of one queue, mapped as long as this lives.
#[derive(Debug)]
pub(crate) struct Rings {
    desc: RingArea,
    avail: RingArea,
    used: RingArea,
    /// The queue's size less one; the size is a power of two, up to 32768.
    mask: u16,
}

impl Rings {
    /// Finds the rings in memory.
    pub(crate) fn new(config: &QueueConfig, memory: &GuestMemory) -> Result<Self, QueueError> {
        let QueueConfig { size, desc, avail, used, .. } = *config;
        if !size.is_power_of_two() {
            return Err(QueueError::Size(size));
        }
        let area = |addr, len: usize, align: u32| {
            memory.ring_area(addr, len as u64, align.into()).map_err(QueueError::Ring)
        };
        let n = usize::from(size);
        Ok(Rings {
            desc: area(desc, Self::desc_len(n), DESC_ALIGN_SIZE)?,
            avail: area(avail, Self::avail_len(n), VRING_AVAIL_ALIGN_SIZE)?,
            used: area(used, Self::used_len(n), VRING_USED_ALIGN_SIZE)?,
            mask: size - 1,
        })
    }

    pub(crate) const fn desc_len(size: usize) -> usize {
        size * Descriptor::SIZE
    }

    /// With the `used_event` at the end.
    pub(crate) const fn avail_len(size: usize) -> usize {
        ENTRIES + size * AVAIL_ENTRY + 2
    }

    /// With the `avail_event` at the end.
    pub(crate) const fn used_len(size: usize) -> usize {
        ENTRIES + size * USED_ENTRY + 2
    }

    pub(crate) fn size(&self) -> u16 {
        self.mask + 1
    }

    fn entry(&self, index: u16) -> usize {
        usize::from(index & self.mask)
    }

    /// The `flags`, `idx` or event field, or an available entry, at this offset.
    ///
    /// # Safety
    ///
    /// `offset` is even and `offset + 2 <= area.len()`; the area is aligned to 2 bytes.
    #[inline]
    unsafe fn u16_at(area: &RingArea, offset: usize) -> &AtomicU16 {
        debug_assert!(offset.is_multiple_of(2) && offset + 2 <= area.len());
        // SAFETY: in bounds and aligned as the caller vouches; the area is mapped as long as it is
        // borrowed; all our accesses are atomic.
        unsafe { AtomicU16::from_ptr(area.as_ptr().add(offset).cast()) }
    }

    #[inline]
    fn avail_u16(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: the offsets used in this file are even and, for entries modulo the size, below
        // `avail_len`, which is the area's length; `new` had it aligned to 2.
        unsafe { Self::u16_at(&self.avail, offset) }
    }

    #[inline]
    fn used_u16(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: likewise, below `used_len`; `new` had the area aligned to 4.
        unsafe { Self::u16_at(&self.used, offset) }
    }

    /// The two words of descriptor `index`, modulo the size.
    #[inline]
    fn desc_words(&self, index: u16) -> [&AtomicU64; 2] {
        let offset = self.entry(index) * Descriptor::SIZE;
        // SAFETY: `offset + 16 <= desc_len`, the area's length; it is aligned to 8, mapped while
        // borrowed, and all our accesses are atomic.
        unsafe {
            let base = self.desc.as_ptr().add(offset).cast::<u64>();
            [AtomicU64::from_ptr(base), AtomicU64::from_ptr(base.add(1))]
        }
    }

    /// The `id` and `len` of used entry `index`, modulo the size.
    #[inline]
    fn used_words(&self, index: u16) -> [&AtomicU32; 2] {
        let offset = ENTRIES + self.entry(index) * USED_ENTRY;
        // SAFETY: `offset + 8 <= used_len`, the area's length; it is aligned to 4, mapped while
        // borrowed, and all our accesses are atomic.
        unsafe {
            let base = self.used.as_ptr().add(offset).cast::<u32>();
            [AtomicU32::from_ptr(base), AtomicU32::from_ptr(base.add(1))]
        }
    }

    fn used_event_offset(&self) -> usize {
        ENTRIES + usize::from(self.size()) * AVAIL_ENTRY
    }

    fn avail_event_offset(&self) -> usize {
        ENTRIES + usize::from(self.size()) * USED_ENTRY
    }

    /// Descriptor `index`, modulo the size. The driver made it visible before the available index.
    #[inline]
    pub(crate) fn descriptor(&self, index: u16) -> Descriptor {
        let [low, high] = self.desc_words(index);
        let word = |w: &AtomicU64| u64::from_le(w.load(Ordering::Relaxed));
        Descriptor::from_words(word(low), word(high))
    }

    /// Has the CPU fetch descriptor `index`, modulo the size.
    #[inline]
    pub(crate) fn prefetch_descriptor(&self, index: u16) {
        prefetch(self.desc_words(index)[0].as_ptr().cast(), false);
    }

    /// The available index; what the driver wrote before it is visible afterwards.
    #[inline]
    pub(crate) fn avail_idx(&self) -> u16 {
        u16::from_le(self.avail_u16(IDX).load(Ordering::Acquire))
    }

    /// Entry `index` of the available ring, modulo the size.
    #[inline]
    pub(crate) fn avail_entry(&self, index: u16) -> u16 {
        let offset = ENTRIES + self.entry(index) * AVAIL_ENTRY;
        u16::from_le(self.avail_u16(offset).load(Ordering::Relaxed))
    }

    #[inline]
    pub(crate) fn avail_flags(&self) -> u16 {
        u16::from_le(self.avail_u16(0).load(Ordering::Relaxed))
    }

    /// Where the driver wants a signal next, if EVENT_IDX was negotiated.
    #[inline]
    pub(crate) fn used_event(&self) -> u16 {
        u16::from_le(self.avail_u16(self.used_event_offset()).load(Ordering::Relaxed))
    }

    #[inline]
    pub(crate) fn set_used_entry(&self, index: u16, head: u16, written: u32) {
        let [id, len] = self.used_words(index);
        id.store(u32::from(head).to_le(), Ordering::Relaxed);
        len.store(written.to_le(), Ordering::Relaxed);
    }

    pub(crate) fn used_idx(&self) -> u16 {
        u16::from_le(self.used_u16(IDX).load(Ordering::Acquire))
    }

    /// Shows the used entries before `index`, and the data they are about.
    #[inline]
    pub(crate) fn set_used_idx(&self, index: u16) {
        self.used_u16(IDX).store(index.to_le(), Ordering::Release);
    }

    #[inline]
    pub(crate) fn set_used_flags(&self, flags: u16) {
        self.used_u16(0).store(flags.to_le(), Ordering::Relaxed);
    }

    /// Says where the device wants a kick next, if EVENT_IDX was negotiated.
    #[inline]
    pub(crate) fn set_avail_event(&self, index: u16) {
        self.used_u16(self.avail_event_offset()).store(index.to_le(), Ordering::Relaxed);
    }
}

/// The driver's side.
#[cfg(feature = "driver")]
impl Rings {
    pub(crate) fn set_descriptor(&self, index: u16, desc: Descriptor) {
        let ([low, high], words) = (self.desc_words(index), desc.to_words());
        low.store(words.0.to_le(), Ordering::Relaxed);
        high.store(words.1.to_le(), Ordering::Relaxed);
    }

    pub(crate) fn set_avail_entry(&self, index: u16, head: u16) {
        let offset = ENTRIES + self.entry(index) * AVAIL_ENTRY;
        self.avail_u16(offset).store(head.to_le(), Ordering::Relaxed);
    }

    pub(crate) fn set_avail_idx(&self, index: u16) {
        self.avail_u16(IDX).store(index.to_le(), Ordering::Release);
    }

    pub(crate) fn set_avail_flags(&self, flags: u16) {
        self.avail_u16(0).store(flags.to_le(), Ordering::Relaxed);
    }

    pub(crate) fn set_used_event(&self, index: u16) {
        self.avail_u16(self.used_event_offset()).store(index.to_le(), Ordering::Relaxed);
    }

    /// Entry `index` of the used ring: its id and length.
    pub(crate) fn used_entry(&self, index: u16) -> (u32, u32) {
        let [id, len] = self.used_words(index);
        let word = |w: &AtomicU32| u32::from_le(w.load(Ordering::Relaxed));
        (word(id), word(len))
    }

    pub(crate) fn used_flags(&self) -> u16 {
        u16::from_le(self.used_u16(0).load(Ordering::Relaxed))
    }

    pub(crate) fn avail_event(&self) -> u16 {
        u16::from_le(self.used_u16(self.avail_event_offset()).load(Ordering::Relaxed))
    }
}
