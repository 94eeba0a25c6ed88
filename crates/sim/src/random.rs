//! The one source of chance.

use std::cell::Cell;

/// splitmix64: small, and the same everywhere.
#[derive(Debug)]
pub(crate) struct Random(Cell<u64>);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Random(Cell::new(seed))
    }

    pub(crate) fn next(&self) -> u64 {
        let state = self.0.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.0.set(state);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `bound`, which is not 0.
    pub(crate) fn below(&self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// From `least` to `most`.
    pub(crate) fn between(&self, least: u64, most: u64) -> u64 {
        least + self.below(most - least + 1)
    }

    /// True once in `n` times; never for 0.
    pub(crate) fn one_in(&self, n: u64) -> bool {
        n > 0 && self.below(n) == 0
    }

    /// Some of the sectors of a disk: all, or a hot area, so that requests overlap.
    pub(crate) fn area(&self, sectors: u32) -> u32 {
        if self.one_in(4) { sectors.min(64) } else { sectors }
    }

    /// The first sector and the number of sectors of a request for at most `count` of them.
    pub(crate) fn range(&self, sectors: u32, count: u32) -> (u32, u32) {
        let area = self.area(sectors);
        let count = count.min(area);
        (self.below(u64::from(area - count + 1)) as u32, count)
    }

    /// One of these.
    pub(crate) fn pick<T: Copy>(&self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}
