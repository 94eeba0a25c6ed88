//! The one source of chance of a simulation.

use std::cell::Cell;

/// Pseudo-random numbers from a seed, the same on all machines and in all versions, so that a seed names a course.
///
/// The generator is SplitMix64 (Steele, Lea and Flood, 2014).
#[derive(Debug)]
pub struct Random(Cell<u64>);

impl Random {
    /// Begins the sequence of `seed`.
    pub fn new(seed: u64) -> Self {
        Random(Cell::new(seed))
    }

    /// Returns the next number.
    pub fn next(&self) -> u64 {
        let state = self.0.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.0.set(state);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `bound`, which must not be 0.
    pub fn below(&self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// Returns a number from `least` to `most`.
    pub fn between(&self, least: u64, most: u64) -> u64 {
        least + self.below(most - least + 1)
    }

    /// Returns true once in `n` times, never for 0.
    pub fn one_in(&self, n: u64) -> bool {
        n > 0 && self.below(n) == 0
    }

    /// Returns one element of `of`, which must not be empty.
    pub fn pick<T: Copy>(&self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }

    pub(super) fn percent(&self, chance: u8) -> bool {
        chance > 0 && self.below(100) < u64::from(chance)
    }
}
