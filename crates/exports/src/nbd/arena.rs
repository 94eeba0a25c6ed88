//! A connection's memory: one allocation, of which each request in flight has a part.
//!
//! A single owner lets the data of many requests leave in one list of segments, and bounds the memory
//! that a client can occupy. Pages that were never used take up no memory.

use std::ops::Range;

use event_loop::{AlignedBuf, IoBufs};

use super::slots::SLOTS;
use super::wire::MAX_PAYLOAD;
use super::wire::reply::MAX_HEADER;

/// Alignment of memory that every device accepts, in bytes. Parts are multiples of it.
const PAGE: usize = 4096;

/// Space for the headers of replies that are sent together.
pub(super) const HEADERS: Range<usize> = 0..(SLOTS * MAX_HEADER).next_multiple_of(PAGE);
/// Received bytes that were not parsed yet.
pub(super) const INPUT: Range<usize> = HEADERS.end..HEADERS.end + (64 << 10);
/// Data of requests; large enough for the largest request.
const DATA: Range<usize> = INPUT.end..INPUT.end + MAX_PAYLOAD as usize;

/// A part of the data's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extent {
    /// Offset in the whole memory.
    pub(super) offset: usize,
    /// Length in bytes, a multiple of a page.
    len: usize,
}

/// The memory, and its free parts.
pub(super) struct Arena {
    pub(super) whole: IoBufs,
    /// In order, never two adjacent ones: at most one more than the number of slots.
    free: Vec<Extent>,
}

impl Arena {
    /// `None`: out of memory.
    pub(super) fn new() -> Option<Self> {
        let mut free = Vec::with_capacity(SLOTS + 1);
        free.push(Extent { offset: DATA.start, len: DATA.len() });
        Some(Arena { whole: AlignedBuf::io_bufs(DATA.end, PAGE)?, free })
    }

    /// Takes a part of at least `len` bytes, which is not zero. Takes the first free one, so that few
    /// pages are used over and over. `None`: none is free now. When all parts have been returned, one of the
    /// largest size is free.
    pub(super) fn take(&mut self, len: usize) -> Option<Extent> {
        let len = len.next_multiple_of(PAGE);
        let index = self.free.iter().position(|free| free.len >= len)?;
        let free = &mut self.free[index];
        let taken = Extent { offset: free.offset, len };
        free.offset += len;
        free.len -= len;
        if free.len == 0 {
            self.free.remove(index);
        }
        Some(taken)
    }

    /// Returns a part.
    pub(super) fn give(&mut self, part: Extent) {
        let index = self.free.partition_point(|free| free.offset < part.offset);
        let end = part.offset + part.len;
        let joins_next = self.free.get(index).is_some_and(|next| next.offset == end);
        let before = index.checked_sub(1).and_then(|before| self.free.get_mut(before));
        match before.filter(|before| before.offset + before.len == part.offset) {
            Some(before) => {
                before.len += part.len;
                if joins_next {
                    let next = self.free.remove(index);
                    self.free[index - 1].len += next.len;
                }
            }
            None if joins_next => {
                self.free[index].offset = part.offset;
                self.free[index].len += part.len;
            }
            None => self.free.insert(index, part),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_never_overlap_and_all_come_back(
            steps in prop::collection::vec((any::<bool>(), 1usize..1 << 22, 0usize..SLOTS), 1..100),
        ) {
            let mut arena = Arena::new().unwrap();
            let mut taken: Vec<Extent> = Vec::new();
            for (take, len, which) in steps {
                if take && taken.len() < SLOTS {
                    if let Some(part) = arena.take(len) {
                        prop_assert!(part.len >= len && part.offset % PAGE == 0);
                        prop_assert!(part.offset >= DATA.start && part.offset + part.len <= DATA.end);
                        for other in &taken {
                            let apart = other.offset + other.len <= part.offset
                                || part.offset + part.len <= other.offset;
                            prop_assert!(apart, "{part:?} and {other:?}");
                        }
                        taken.push(part);
                    }
                } else if !taken.is_empty() {
                    arena.give(taken.swap_remove(which % taken.len()));
                }
                prop_assert!(arena.free.len() <= SLOTS + 1);
            }
            taken.into_iter().for_each(|part| arena.give(part));
            prop_assert_eq!(&arena.free[..], &[Extent { offset: DATA.start, len: DATA.len() }]);
        }
    }
}
