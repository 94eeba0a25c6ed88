//! Sets of clusters, as ranges of numbers.

use std::collections::BTreeMap;
use std::ops::Range;

/// A set of numbers, mostly neighbours.
#[derive(Debug, Clone, Default)]
pub(in super::super) struct Intervals(BTreeMap<u64, u64>);

impl Intervals {
    /// The end of the run that a number is in.
    pub(super) fn end_of(&self, number: u64) -> Option<u64> {
        let (_, end) = self.0.range(..=number).next_back()?;
        (*end > number).then_some(*end)
    }

    /// Puts in a range of which nothing is in the set.
    pub(super) fn insert(&mut self, range: Range<u64>) {
        let Range { mut start, mut end } = range;
        if let Some((before, to)) = self.0.range(..=start).next_back().map(|(a, b)| (*a, *b))
            && to >= start
        {
            (start, end) = (before, end.max(to));
        }
        if let Some(to) = self.0.remove(&end) {
            end = to;
        }
        self.0.insert(start, end);
    }

    /// Takes out a range, all of which is in the set, or some.
    pub(super) fn remove(&mut self, range: Range<u64>) {
        while let Some((start, end)) = self.0.range(..range.end).next_back().map(|(a, b)| (*a, *b))
            && end > range.start
        {
            self.0.remove(&start);
            if end > range.end {
                self.0.insert(range.end, end);
            }
            if start < range.start {
                self.0.insert(start, range.start);
            }
        }
    }

    /// Runs in the set.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_become_one_and_can_be_parted() {
        let mut set = Intervals::default();
        set.insert(4..6);
        set.insert(8..9);
        set.insert(6..8);
        assert_eq!((set.len(), set.end_of(4), set.end_of(9)), (1, Some(9), None));
        set.remove(5..7);
        assert_eq!(
            [3, 4, 5, 6, 7, 8].map(|at| set.end_of(at)),
            [None, Some(5), None, None, Some(9), Some(9)]
        );
        set.insert(5..7);
        set.remove(0..100);
        assert_eq!(set.len(), 0);
    }
}
