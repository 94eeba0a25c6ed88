//! Memory for what is encrypted, which a guest must not see.

use event_loop::{AlignedBuf, IoBufs};

/// The most that is encrypted at once, bytes.
pub(super) const MOST: usize = 1 << 20;
/// The least size of a buffer, bytes.
const LEAST: usize = 1 << 12;
/// Memory that is kept of each size, bytes.
const KEPT: usize = 1 << 20;
/// Sizes: powers of two.
const SIZES: usize = MOST.ilog2() as usize - LEAST.ilog2() as usize + 1;

/// Buffers of a channel, made on demand and kept.
#[derive(Default)]
pub(super) struct Bounces([Vec<IoBufs>; SIZES]);

/// The index of the buffers that have room for `len` bytes.
fn size_of(len: usize) -> usize {
    let size = len.max(LEAST).next_power_of_two();
    (size.ilog2() - LEAST.ilog2()) as usize
}

impl Bounces {
    /// Returns a buffer for `len` bytes, at most [`MOST`]. `None`: there is no memory.
    pub(super) fn take(&mut self, len: usize) -> Option<IoBufs> {
        let index = size_of(len);
        let kept = self.0.get_mut(index)?.pop();
        kept.or_else(|| AlignedBuf::io_bufs(LEAST << index, LEAST))
    }

    /// Takes a buffer back: a whole one, as [`take`](Self::take) has returned it.
    pub(super) fn give(&mut self, buffer: IoBufs) {
        let size = buffer.len();
        debug_assert!(size.is_power_of_two(), "a part of a buffer");
        if let Some(kept) = self.0.get_mut(size_of(size))
            && kept.len() < KEPT / size.max(1)
        {
            kept.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_have_room_and_are_kept_by_their_size() {
        let mut bounces = Bounces::default();
        for (len, size) in [(512, 4096), (4096, 4096), (4608, 8192), (MOST, MOST)] {
            let buffer = bounces.take(len).unwrap();
            assert_eq!(buffer.len(), size);
            bounces.give(buffer);
            assert_eq!(bounces.0[size_of(len)].len(), 1);
        }
        assert!(bounces.take(MOST + 1).is_none());
        (0..1000).for_each(|_| bounces.give(AlignedBuf::io_bufs(4096, 4096).unwrap()));
        assert_eq!(bounces.0[0].len(), KEPT / 4096);
    }
}
