//! What calls of the engine cost, so that tasks leave time for others ([`event_loop::Meter`]).
//!
//! Each way to an entry or a count is counted where it is taken, so that no loop over clusters goes uncounted.

use std::cell::Cell;

/// Thousandths of a unit of the meter: an entry or a count is looked at.
pub(super) const LOOK: u64 = 4;
/// An entry is changed.
pub(super) const SET: u64 = 16;
/// Whether a cluster holds metadata is looked up.
pub(super) const OWNER: u64 = 32;
/// A sector is changed, and kept until the next flush; or a cluster is given up.
pub(super) const SECTOR_CHANGED: u64 = 100;
/// After so much, a call ends at the next cluster. The caller calls again.
pub(super) const MOST: u64 = 50_000;

/// The cost of all calls so far, in thousandths of a unit.
#[derive(Debug, Default)]
pub(super) struct Cost(Cell<u64>);

impl Cost {
    #[inline]
    pub(super) fn add(&self, cost: u64) {
        self.0.set(self.0.get().wrapping_add(cost));
    }

    /// The total, to be compared with one of before.
    #[inline]
    pub(super) fn total(&self) -> u64 {
        self.0.get()
    }

    /// Whether a call that began at that total is to end.
    #[inline]
    pub(super) fn is_much(&self, before: u64) -> bool {
        self.0.get().wrapping_sub(before) >= MOST
    }
}
