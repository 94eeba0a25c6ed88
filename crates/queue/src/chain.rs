//! A descriptor chain, read from the driver's tables and checked (virtio 1.3, 2.7.4 and 2.7.5).

use guest_memory::MemoryView;
use virtio_bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};

use crate::error::QueueError;
use crate::quirks::{Quirk, Quirks};
use crate::ring::{Descriptor, Rings};
use crate::segments::{Segment, Segments};

/// Maximum number of buffers in a chain, whatever the queue's size.
///
/// The specification permits as many as the queue has descriptors. With indirect tables, Linux observes `seg_max`
/// instead and may make a longer chain on a small queue, which all devices accept. This limit is that of other devices,
/// and of one preadv2(2).
pub const MAX_SEGMENTS: usize = 1024;

/// Buffers of a request: first those that the device reads, then those it writes.
///
/// A descriptor chain (virtio 1.3, 2.7.4.2).
///
/// Reusable: [`Queue::pop`](crate::Queue::pop) fills it without allocating.
#[derive(Debug)]
pub struct Chain {
    head: u16,
    segments: Vec<Segment>,
    /// Number of readable segments.
    readable: usize,
    readable_len: u32,
    writable_len: u32,
    /// Number of empty descriptors, which have no segment.
    empty: u32,
}

impl Default for Chain {
    fn default() -> Self {
        Self::new()
    }
}

impl Chain {
    /// Returns an empty chain with room for the longest one, 16 KiB.
    pub fn new() -> Self {
        Chain {
            head: 0,
            segments: Vec::with_capacity(MAX_SEGMENTS),
            readable: 0,
            readable_len: 0,
            writable_len: 0,
            empty: 0,
        }
    }

    /// Returns the index of the first descriptor, which identifies the chain.
    ///
    /// [`Queue::add_used`](crate::Queue::add_used) takes this index.
    pub fn head(&self) -> u16 {
        self.head
    }

    /// Returns the buffers that the driver wrote and the device reads.
    #[inline]
    pub fn readable(&self) -> Segments<'_> {
        Segments::new(self.segments.get(..self.readable).unwrap_or_default(), self.readable_len)
    }

    /// Returns the buffers that the device writes.
    #[inline]
    pub fn writable(&self) -> Segments<'_> {
        Segments::new(self.segments.get(self.readable..).unwrap_or_default(), self.writable_len)
    }

    /// Returns the number of bytes in the readable buffers.
    pub fn readable_len(&self) -> u32 {
        self.readable_len
    }

    /// Returns the number of bytes in the writable buffers.
    pub fn writable_len(&self) -> u32 {
        self.writable_len
    }

    /// Returns the number of bytes in all buffers.
    pub fn total_len(&self) -> u32 {
        // Limited by push().
        self.readable_len.saturating_add(self.writable_len)
    }

    /// Returns the number of buffers, empty ones included: what reading the chain has cost.
    ///
    /// At most twice [`MAX_SEGMENTS`].
    pub fn buffers(&self) -> u32 {
        // At most `MAX_SEGMENTS` each.
        self.segments.len() as u32 + self.empty
    }

    /// Empties the chain.
    fn reset(&mut self, head: u16) {
        self.head = head;
        self.segments.clear();
        self.readable = 0;
        self.readable_len = 0;
        self.writable_len = 0;
        self.empty = 0;
    }

    /// Reads the chain that begins at descriptor `head` of the queue's table.
    ///
    /// Deviations that leave no doubt about the buffers are accepted and noted in `quirks`.
    pub(crate) fn read(
        &mut self,
        rings: &Rings,
        memory: &MemoryView,
        quirks: &Quirks,
        head: u16,
    ) -> Result<(), QueueError> {
        self.reset(head);
        let size = rings.size();
        let mut index = head;
        // A chain has no descriptor twice, so one longer than the table is a loop.
        for _ in 0..size {
            if index >= size {
                return Err(QueueError::Index { index, table: size });
            }
            let desc = rings.descriptor(index);
            if desc.has(VRING_DESC_F_INDIRECT) {
                // The table ends the chain, as in QEMU: 2.7.5.3.1 forbids a successor.
                if !quirks.indirect || desc.has(VRING_DESC_F_NEXT) {
                    quirks.note_indirect(desc.has(VRING_DESC_F_NEXT));
                }
                return self.read_indirect(desc, memory, quirks);
            }
            self.push(desc, quirks)?;
            if !desc.has(VRING_DESC_F_NEXT) {
                return Ok(());
            }
            index = desc.next;
        }
        Err(QueueError::TooLong { head })
    }

    /// Continues in the indirect table that `table` describes (2.7.5.3).
    fn read_indirect(
        &mut self,
        table: Descriptor,
        memory: &MemoryView,
        quirks: &Quirks,
    ) -> Result<(), QueueError> {
        let head = self.head;
        let entry = Descriptor::SIZE as u32;
        let size = match u16::try_from(table.len / entry) {
            Ok(size) if size > 0 && table.len.is_multiple_of(entry) => size,
            _ => return Err(QueueError::IndirectLength { head, len: table.len }),
        };
        if table.addr.checked_add(u64::from(table.len)).is_none() {
            return Err(QueueError::Buffer { addr: table.addr, len: table.len });
        }
        let mut index = 0;
        for _ in 0..size {
            if index >= size {
                return Err(QueueError::Index { index, table: size });
            }
            let addr = table.addr + u64::from(index) * u64::from(entry);
            let bytes = memory
                .read_array(addr)
                .map_err(|source| QueueError::IndirectAccess { head, source })?;
            let desc = Descriptor::from_bytes(bytes);
            if desc.has(VRING_DESC_F_INDIRECT) {
                return Err(QueueError::Indirect { head });
            }
            self.push(desc, quirks)?;
            if !desc.has(VRING_DESC_F_NEXT) {
                return Ok(());
            }
            index = desc.next;
        }
        Err(QueueError::TooLong { head })
    }

    /// Checks a buffer and appends it.
    #[inline]
    fn push(&mut self, desc: Descriptor, quirks: &Quirks) -> Result<(), QueueError> {
        let head = self.head;
        let Descriptor { addr, len, .. } = desc;
        if len == 0 || addr.checked_add(u64::from(len)).is_none() {
            return self.push_unusual(desc, quirks);
        }
        let total = u64::from(self.readable_len) + u64::from(self.writable_len) + u64::from(len);
        if total > u64::from(u32::MAX) {
            return Err(QueueError::TooManyBytes { head });
        }
        if self.segments.len() >= MAX_SEGMENTS {
            return Err(QueueError::TooLong { head });
        }
        if desc.has(VRING_DESC_F_WRITE) {
            self.writable_len += len;
        } else if self.writable_len > 0 {
            return Err(QueueError::ReadableAfterWritable { head });
        } else {
            self.readable_len += len;
            self.readable += 1;
        }
        self.segments.push(Segment { addr, len });
        Ok(())
    }

    /// Skips an empty buffer. Linux' drivers never send one; others do for requests without data.
    #[cold]
    fn push_unusual(&mut self, desc: Descriptor, quirks: &Quirks) -> Result<(), QueueError> {
        let Descriptor { addr, len, .. } = desc;
        if len > 0 {
            return Err(QueueError::Buffer { addr, len });
        }
        if self.empty as usize >= MAX_SEGMENTS {
            return Err(QueueError::TooLong { head: self.head });
        }
        self.empty += 1;
        quirks.note(Quirk::EmptyBuffer);
        Ok(())
    }
}
