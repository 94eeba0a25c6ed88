//! The next step of a transfer: how much of it, in place, bounced, or read-modify-write.

use event_loop::IoBufs;

use super::probe::Alignment;

/// Most bytes of one read or write. The kernel copies them from the page cache while everything else on
/// the thread waits. Its own limit is 2 GiB (`MAX_RW_COUNT`).
const MAX_BYTES: u64 = 4 << 20;
/// `UIO_MAXIOV`: the most segments per system call.
pub(crate) const MAX_SEGMENTS: usize = 1024;
/// Size of a bounce buffer in bytes.
pub(crate) const BOUNCE: usize = 128 * 1024;

/// Limits of an image's transfers, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Alignment of memory and ranges.
    pub(crate) align: Alignment,
    /// Alignment of discards and write-zeroes: a device's logical block.
    pub(crate) sector: u64,
    /// Start of the partial block at the image's end. It is accessed without `O_DIRECT`, so in any
    /// alignment.
    pub(crate) tail: Option<u64>,
    max_bytes: u64,
    max_segments: usize,
}

/// One step of a read or write. Lengths count the request's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileStep {
    /// Between the image and the request's own memory.
    InPlace {
        /// Bytes.
        len: usize,
    },
    /// Read an aligned span into a bounce buffer, and copy `len` bytes after the first `skip`.
    BounceRead {
        /// First byte of the span.
        start: u64,
        /// Bytes of the span, at most [`BOUNCE`].
        span: usize,
        /// Bytes of the span before the wanted ones.
        skip: usize,
        /// Bytes wanted.
        len: usize,
    },
    /// Copy into a bounce buffer and write it.
    BounceWrite {
        /// Bytes, at most [`BOUNCE`].
        len: usize,
    },
    /// Read one block, change `len` bytes after the first `skip`, write it back.
    Modify {
        /// First byte of the block.
        start: u64,
        /// Bytes before the changed ones.
        skip: usize,
        /// Number of changed bytes.
        len: usize,
    },
}

/// Direction and progress of a transfer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Position {
    /// Next byte of the image.
    pub(crate) at: u64,
    /// Next byte of the memory.
    pub(crate) memory: usize,
    /// Bytes left.
    pub(crate) left: u64,
    /// To the image.
    pub(crate) write: bool,
}

impl Limits {
    pub(crate) fn new(align: Alignment, sector: u64) -> Self {
        Limits { align, sector, tail: None, max_bytes: MAX_BYTES, max_segments: MAX_SEGMENTS }
    }

    /// The same limits for an image of that size in bytes.
    pub(crate) fn with_size(self, size: u64) -> Self {
        let rest = size % self.align.request as u64;
        Limits { tail: (rest > 0).then_some(size - rest), ..self }
    }

    /// Whether a byte lies in the unaligned tail.
    pub(crate) fn in_tail(&self, at: u64) -> bool {
        self.tail.is_some_and(|tail| at >= tail)
    }

    /// Whether a range begins or ends inside a block.
    pub(crate) fn is_misaligned(&self, offset: u64, len: u64) -> bool {
        (offset | len) & (self.align.request as u64 - 1) != 0
    }

    /// Whether the kernel accepts the request as it is, which is true for nearly all requests. The
    /// request does not reach beyond the image; whole blocks do not reach into the tail, so this needs no
    /// size.
    #[inline]
    pub(crate) fn is_simple(&self, offset: u64, bufs: &IoBufs) -> bool {
        let len = bufs.len() as u64;
        !self.is_misaligned(offset, len)
            && len <= self.max_bytes
            && bufs.iovecs().len() <= self.max_segments
            && self.memory_fits(bufs)
    }

    /// Whether `O_DIRECT` accepts the memory: addresses by the device's DMA, lengths by its block.
    #[inline]
    fn memory_fits(&self, bufs: &IoBufs) -> bool {
        let Alignment { memory, request } = self.align;
        if memory == 1 && request == 1 {
            return true;
        }
        let mut addresses = 0;
        let mut lengths = 0;
        for segment in bufs.iovecs() {
            addresses |= segment.iov_base as usize;
            lengths |= segment.iov_len;
        }
        addresses & (memory - 1) == 0 && lengths & (request - 1) == 0
    }

    /// Plans the next step. `part` becomes the memory of an in-place step. `left` is not 0.
    pub(crate) fn next(&self, position: Position, bufs: &IoBufs, part: &mut IoBufs) -> FileStep {
        let Position { at, memory, left, write } = position;
        let in_tail = self.in_tail(at);
        let align = if in_tail { 1 } else { self.align.request };
        let until = match self.tail {
            Some(tail) if !in_tail => tail - at,
            _ => u64::MAX,
        };
        // Fits in usize: MAX_BYTES does.
        let left = left.min(until).min(self.max_bytes) as usize;
        let head = (at & (align as u64 - 1)) as usize;
        if head == 0 && left >= align {
            let whole = left - left % align;
            let got = part.set_part(bufs, memory, whole, self.max_segments);
            let len = got - got % align;
            if len < got {
                part.set_part(bufs, memory, len, self.max_segments);
            }
            if len > 0 && (in_tail || self.memory_fits(part)) {
                return FileStep::InPlace { len };
            }
            let len = whole.min(BOUNCE);
            return if write {
                FileStep::BounceWrite { len }
            } else {
                FileStep::BounceRead { start: at, span: len, skip: 0, len }
            };
        }
        let start = at - head as u64;
        if write {
            return FileStep::Modify { start, skip: head, len: left.min(align - head) };
        }
        let span = (head + left).next_multiple_of(align).min(BOUNCE);
        FileStep::BounceRead { start, span, skip: head, len: left.min(span - head) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use event_loop::AlignedBuf;
    use proptest::prelude::*;

    fn limits(memory: usize, request: usize, tail: Option<u64>) -> Limits {
        Limits {
            align: Alignment { memory, request },
            sector: 1,
            tail,
            max_bytes: 1 << 20,
            max_segments: 4,
        }
    }

    proptest! {
        /// Steps cover the range exactly, in order, and each keeps the limits.
        #[test]
        fn steps_cover_the_range_and_keep_to_the_limits(
            shift in 0u32..=12, memory in 0u32..=12, at in 0u64..100_000, len in 1usize..400_000,
            lead in 0usize..4096, sectors in any::<bool>(), write in any::<bool>(),
        ) {
            let (at, len) = if sectors { (at / 512 * 512, len.next_multiple_of(512)) } else { (at, len) };
            let request = 1 << shift;
            let end = at + len as u64;
            let tail = Some(end - end % request as u64).filter(|&tail| tail != end);
            let limits = limits(1 << memory, request, tail);
            let all = AlignedBuf::io_bufs(lead + len, 4096).unwrap();
            let mut bufs = IoBufs::new();
            bufs.set_part(&all, lead, len, 1);
            let mut part = IoBufs::new();
            let mut done = 0;
            let mut steps = 0;
            while done < len {
                let pos = at + done as u64;
                let position = Position { at: pos, memory: done, left: (len - done) as u64, write };
                let step = limits.next(position, &bufs, &mut part);
                let tail = limits.in_tail(pos);
                let align = if tail { 1 } else { request };
                let n = match step {
                    FileStep::InPlace { len } => {
                        prop_assert_eq!(part.len(), len);
                        prop_assert!(tail || limits.memory_fits(&part));
                        prop_assert_eq!((pos % align as u64, len % align), (0, 0));
                        len
                    }
                    FileStep::BounceRead { start, span, skip, len } => {
                        prop_assert!(!write && span <= BOUNCE && skip + len <= span);
                        prop_assert_eq!((start % align as u64, span % align), (0, 0));
                        prop_assert_eq!(start + skip as u64, pos);
                        len
                    }
                    FileStep::BounceWrite { len } => {
                        prop_assert!(write && len <= BOUNCE);
                        prop_assert_eq!((pos % align as u64, len % align), (0, 0));
                        len
                    }
                    FileStep::Modify { start, skip, len } => {
                        prop_assert!(write && skip + len <= align && align > 1);
                        prop_assert_eq!(start % align as u64, 0);
                        prop_assert_eq!(start + skip as u64, pos);
                        len
                    }
                };
                prop_assert!(n > 0 && done + n <= len);
                prop_assert!(tail || limits.tail.is_none_or(|t| pos + n as u64 <= t));
                done += n;
                steps += 1;
            }
            prop_assert!(steps <= 8 + 2 * len / BOUNCE, "{steps} steps");
        }
    }

    #[test]
    fn an_aligned_request_is_simple() {
        let bufs = AlignedBuf::io_bufs(8192, 4096).unwrap();
        let limits = limits(512, 4096, Some(16384));
        assert!(limits.is_simple(4096, &bufs));
        assert!(limits.is_simple(8192, &bufs));
        assert!(!limits.is_simple(512, &bufs), "begins inside a block");
        let mut odd = IoBufs::new();
        odd.set_part(&bufs, 512, 4096, 1);
        assert!(limits.is_simple(4096, &odd), "memory is aligned to the device's DMA");
        odd.set_part(&bufs, 8, 4096, 1);
        assert!(!limits.is_simple(4096, &odd), "memory is not aligned");
    }
}
