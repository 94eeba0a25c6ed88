//! Sends zeroes in the data of a read as holes of a structured reply.
//!
//! QEMU's server asks the image for its block status before each read. Here the data is examined
//! instead. That costs two words per block where there are no zeroes. There is no second request, and
//! no race between the status and the read.

use std::ops::Range;

use event_loop::IoBufs;

use super::wire::reply::{Asked, MAX_HEADER, Reply, ReplyMode};

/// Bytes of the smallest hole. The headers of two chunks are stored in a hole, and need this much.
const SMALLEST: usize = 512;
/// Bytes of a block. A block that neither begins nor ends with zeroes is not searched further.
const BLOCK: usize = 4096;

/// Collects replies for sending.
pub(super) struct Out<'a> {
    pub(super) arena: &'a mut IoBufs,
    pub(super) bufs: &'a mut IoBufs,
    /// Offset of the next header in the arena.
    pub(super) place: usize,
}

impl Out<'_> {
    pub(super) fn header(&mut self, (bytes, len): ([u8; MAX_HEADER], usize)) {
        self.arena.copy_in(self.place, &bytes[..len]);
        self.bufs.append_part(self.arena, self.place, len);
        self.place += len;
    }

    /// Adds the data of a read, with zeroes as holes. Headers after the first are stored where the
    /// zeroes are.
    pub(super) fn read(
        &mut self,
        mode: ReplyMode,
        asked: Asked,
        (at, offset, len): (usize, u64, usize),
        holes_left: &mut usize,
    ) {
        let chunk = |range: &Range<usize>| (offset + range.start as u64, range.len() as u32);
        let mut begin = 0;
        while begin < len {
            let data = Data { memory: self.arena, at, len, offset };
            let hole = if *holes_left > 0 { data.next_hole(begin) } else { None };
            let before = begin..hole.as_ref().map_or(len, |hole| hole.start);
            if !before.is_empty() {
                let (offset, len) = chunk(&before);
                let reply = Reply::Data { offset, len };
                self.header(reply.encode_chunk(mode, asked, hole.is_none()));
                self.bufs.append_part(self.arena, at + before.start, before.len());
            }
            let Some(hole) = hole else { return };
            *holes_left -= 1;
            if hole.start > 0 {
                self.place = at + hole.start;
            }
            let (offset, hole_len) = chunk(&hole);
            let reply = Reply::Hole { offset, len: hole_len };
            self.header(reply.encode_chunk(mode, asked, hole.end == len));
            if hole.start == 0 {
                self.place = at;
            }
            begin = hole.end;
        }
    }
}

/// Data of a read.
#[derive(Debug, Clone, Copy)]
struct Data<'a> {
    /// Memory that holds the data.
    memory: &'a IoBufs,
    /// Offset of the data in `memory`.
    at: usize,
    /// Bytes of the data.
    len: usize,
    /// Offset of the first byte on the disk, which gives the boundaries of sectors.
    offset: u64,
}

impl Data<'_> {
    /// Returns the first hole from byte `from` on. Holes begin and end at sectors of the disk, or
    /// at the ends of the data.
    fn next_hole(&self, from: usize) -> Option<Range<usize>> {
        let mut at = from;
        while at < self.len {
            let block = at..self.end_of(at, BLOCK);
            at = block.end;
            if self.is_zero_at(block.start) || self.is_zero_at(block.end.saturating_sub(8)) {
                let Some(begin) = self.sectors(block).find(|sector| self.is_zero(sector)) else {
                    continue;
                };
                let mut end = begin.end;
                while end < self.len && self.is_zero(&(end..self.end_of(end, SMALLEST))) {
                    end = self.end_of(end, SMALLEST);
                }
                if end - begin.start >= SMALLEST || end - begin.start == self.len {
                    return Some(begin.start..end);
                }
                at = end;
            }
        }
        None
    }

    /// Returns the end of the piece that `at` lies in. Pieces are `size` bytes, aligned on the
    /// disk.
    fn end_of(&self, at: usize, size: usize) -> usize {
        let within = (self.offset as usize).wrapping_add(at) & (size - 1);
        (at + size - within).min(self.len)
    }

    fn sectors(&self, block: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let mut at = block.start;
        std::iter::from_fn(move || {
            let sector = at..self.end_of(at, SMALLEST);
            at = sector.end;
            (sector.start < block.end).then_some(sector)
        })
    }

    /// Whether the 8 bytes at `at`, or as many as are left, are zero.
    fn is_zero_at(&self, at: usize) -> bool {
        let mut word = [0; 8];
        let len = word.len().min(self.len - at);
        self.memory.copy_out(self.at + at, &mut word[..len]);
        word == [0; 8]
    }

    fn is_zero(&self, sector: &Range<usize>) -> bool {
        let mut bytes = [0; SMALLEST];
        let bytes = &mut bytes[..sector.len()];
        self.memory.copy_out(self.at + sector.start, bytes);
        bytes.iter().fold(0, |all, byte| all | byte) == 0
    }
}

#[cfg(test)]
mod tests {
    use event_loop::AlignedBuf;
    use proptest::prelude::*;

    use super::*;

    /// Returns all holes of `bytes`, stored at offset 4096 in their memory.
    fn holes(bytes: &[u8], offset: u64) -> Vec<Range<usize>> {
        let mut memory = AlignedBuf::io_bufs(4096 + bytes.len().max(1), 4096).unwrap();
        memory.copy_in(4096, bytes);
        let data = Data { memory: &memory, at: 4096, len: bytes.len(), offset };
        let mut from = 0;
        let next = || {
            let hole = data.next_hole(from)?;
            from = hole.end;
            Some(hole)
        };
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn holes_between_data_are_found() {
        let one = |hole: Range<usize>| vec![hole];
        let none: Vec<Range<usize>> = Vec::new();
        let mut bytes = vec![1; 192 << 10];
        bytes[64 << 10..128 << 10].fill(0);
        assert_eq!(holes(&bytes, 0), one(64 << 10..128 << 10));
        assert_eq!(holes(&[0; 8192], 0), one(0..8192));
        assert_eq!(holes(&[1; 8192], 0), none);
        // A read of two sectors. The second sector is a hole.
        let mut bytes = [1; 1024];
        bytes[512..].fill(0);
        assert_eq!(holes(&bytes, 2048), one(512..1024));
        // Less than a sector is a hole only if the whole read is zero.
        assert_eq!(holes(&[0; 100], 7), one(0..100));
        assert_eq!(holes(&[&[1; 700][..], &[0; 300]].concat(), 0), none);
    }

    proptest! {
        #[test]
        fn holes_are_zeroes_in_order_and_large_enough(
            parts in prop::collection::vec((any::<bool>(), 1usize..6000), 1..12),
            offset in 0u64..1 << 20,
        ) {
            let bytes: Vec<u8> = parts
                .iter()
                .flat_map(|&(zero, len)| std::iter::repeat_n(u8::from(!zero), len))
                .collect();
            let found = holes(&bytes, offset);
            let mut before = 0;
            for hole in &found {
                prop_assert!(hole.start >= before && hole.end <= bytes.len());
                prop_assert!(hole.len() >= SMALLEST || hole.len() == bytes.len());
                prop_assert!(bytes[hole.clone()].iter().all(|&byte| byte == 0));
                before = hole.end;
            }
            // A run of zeroes as long as a block and two sectors has a hole.
            for (at, run) in parts.iter().scan(0, |at, part| {
                *at += part.1;
                Some((*at - part.1, *part))
            }) {
                let has_one = !run.0 || run.1 < 2 * SMALLEST + BLOCK
                    || found.iter().any(|hole| hole.start < at + run.1 && hole.end > at);
                prop_assert!(has_one, "{parts:?} {found:?}");
            }
        }
    }
}
