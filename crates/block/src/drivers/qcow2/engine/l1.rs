//! The L1 table in memory, with a summary that skips its empty entries.

use std::ops::Deref;

use super::entry::OFFSET;

/// Entries of an L1 table.
#[derive(Debug, Default)]
pub(super) struct L1 {
    entries: Vec<u64>,
    /// A bit for each entry that leads to a table, then a bit for each word of the level before that is not 0.
    levels: Vec<Vec<u64>>,
}

/// Bits of a word, as two to the power of this.
const WORD: u32 = 6;

fn is_used(entry: u64) -> bool {
    entry & OFFSET != 0
}

impl L1 {
    pub(super) fn new(entries: Vec<u64>) -> L1 {
        let mut levels = Vec::new();
        let bits = |words: &[u64], is_set: fn(u64) -> bool| -> Vec<u64> {
            let word = |chunk: &[u64]| {
                let bits = chunk.iter().zip(0..).map(|(word, at)| u64::from(is_set(*word)) << at);
                bits.fold(0, |word, bit| word | bit)
            };
            words.chunks(1 << WORD).map(word).collect()
        };
        let mut level = bits(&entries, is_used);
        while level.len() > 1 {
            let above = bits(&level, |word| word != 0);
            levels.push(std::mem::replace(&mut level, above));
        }
        levels.push(level);
        L1 { entries, levels }
    }

    /// Replaces an entry. Beyond the table, nothing happens.
    pub(super) fn set(&mut self, index: usize, entry: u64) {
        let Some(place) = self.entries.get_mut(index) else { return };
        *place = entry;
        let (mut at, mut is_set) = (index, is_used(entry));
        for level in &mut self.levels {
            let Some(word) = level.get_mut(at >> WORD) else { return };
            let bit = 1 << (at & ((1 << WORD) - 1));
            *word = if is_set { *word | bit } else { *word & !bit };
            (at, is_set) = (at >> WORD, *word != 0);
        }
    }

    /// Has so many entries from now on. Those that are new are empty.
    pub(super) fn grow(&mut self, entries: usize) {
        let mut all = std::mem::take(&mut self.entries);
        all.resize(entries, 0);
        *self = L1::new(all);
    }

    /// Replaces all entries. Returns them.
    pub(super) fn replace(&mut self, entries: Vec<u64>) -> Vec<u64> {
        std::mem::replace(self, L1::new(entries)).entries
    }

    /// The first entry that leads to a table, at or after `from`. `None`: there is none.
    pub(super) fn first_used(&self, from: usize) -> Option<usize> {
        let mut at = from;
        for (height, level) in self.levels.iter().enumerate() {
            let word = level.get(at >> WORD).copied().unwrap_or_default();
            let left = word & (u64::MAX << (at & ((1 << WORD) - 1)));
            if left != 0 {
                let found = (at >> WORD << WORD) + left.trailing_zeros() as usize;
                return self.levels[..height].iter().rev().try_fold(found, |at, level| {
                    Some((at << WORD) + level.get(at)?.trailing_zeros() as usize)
                });
            }
            at = (at >> WORD) + 1;
        }
        None
    }
}

impl Deref for L1 {
    type Target = [u64];

    fn deref(&self) -> &[u64] {
        &self.entries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_that_lead_nowhere_are_skipped() {
        const COUNT: usize = 300_000;
        let mut l1 = L1::new(vec![1 << 63; COUNT]);
        assert_eq!((l1.first_used(0), l1.levels.len()), (None, 4));
        let used = [0, 63, 64, 4095, 4096, 262_144, COUNT - 1];
        used.iter().for_each(|index| l1.set(*index, 1 << 16));
        let all = |l1: &L1| {
            let next = |from: &usize| l1.first_used(*from + 1);
            std::iter::successors(l1.first_used(0), next).collect::<Vec<_>>()
        };
        assert_eq!(all(&l1), used);
        l1.grow(2 * COUNT);
        assert_eq!((all(&l1), l1.len()), (used.to_vec(), 2 * COUNT));
        l1.set(64, 0);
        l1.set(4096, 1 << 63);
        assert_eq!(all(&l1), [0, 63, 4095, 262_144, COUNT - 1]);
        assert_eq!((l1.first_used(2 * COUNT), l1.first_used(usize::MAX / 2)), (None, None));
        assert_eq!(L1::default().first_used(0), None);
    }
}
