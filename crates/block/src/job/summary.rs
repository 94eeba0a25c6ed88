//! A summary of a bitmap: which of its words may have bits, so that a search skips the others, and how many bits are set.
//!
//! Threads set and clear bits without a lock. A word is changed before its summary is looked at, and the summary is lowered
//! before the word is looked at again. So whichever of two threads comes later sees the other one.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// For each word, whether it may have bits; and for each 64 words.
pub(super) struct Summary {
    low: Box<[AtomicU64]>,
    high: Box<[AtomicU64]>,
    /// Set bits of the bitmap.
    ones: AtomicI64,
    /// How often a bit of the summary was about to be lowered, and how often that was over. A search that runs meanwhile
    /// does without the summary: the bit may have to be raised again.
    begun: AtomicU64,
    ended: AtomicU64,
}

fn place(index: usize) -> (usize, u64) {
    (index / 64, 1 << (index % 64))
}

fn zeroes(words: usize) -> Box<[AtomicU64]> {
    (0..words).map(|_| AtomicU64::new(0)).collect()
}

/// Sets a bit, if it is not set. Lines that all threads read stay in all caches.
#[inline]
fn raise(level: &[AtomicU64], index: usize) {
    let (at, bit) = place(index);
    if let Some(word) = level.get(at)
        && word.load(Ordering::SeqCst) & bit == 0
    {
        word.fetch_or(bit, Ordering::SeqCst);
    }
}

impl Summary {
    /// Of so many words without a bit.
    pub(super) fn new(words: usize) -> Summary {
        let low = zeroes(words.div_ceil(64));
        let high = zeroes(low.len().div_ceil(64));
        let [begun, ended] = [0, 0].map(AtomicU64::new);
        Summary { low, high, ones: AtomicI64::new(0), begun, ended }
    }

    /// Of words that nothing changes meanwhile.
    pub(super) fn of(words: &[AtomicU64]) -> Summary {
        let summary = Summary::new(words.len());
        for (index, word) in words.iter().enumerate() {
            let bits = word.load(Ordering::Relaxed);
            if bits != 0 {
                summary.count(bits.count_ones().into());
                summary.raise(index);
            }
        }
        summary
    }

    /// Set bits of the bitmap.
    pub(super) fn ones(&self) -> u64 {
        // Threads that are about to count may have it below 0.
        u64::try_from(self.ones.load(Ordering::Relaxed)).unwrap_or(0)
    }

    /// So many bits more are set.
    pub(super) fn count(&self, more: i64) {
        if more != 0 {
            self.ones.fetch_add(more, Ordering::Relaxed);
        }
    }

    /// A word has bits. To be called after they are set, and also if they were set before: by a thread that may not have got
    /// here yet.
    #[inline]
    pub(super) fn raise(&self, index: usize) {
        raise(&self.low, index);
        raise(&self.high, index / 64);
    }

    /// A word has lost its last bits, and may have got others.
    pub(super) fn lower(&self, index: usize, word: &AtomicU64) {
        self.begun.fetch_add(1, Ordering::SeqCst);
        let (at, bit) = place(index);
        if let Some(low) = self.low.get(at) {
            let left = low.fetch_and(!bit, Ordering::SeqCst) & !bit;
            if word.load(Ordering::SeqCst) != 0 {
                self.raise(index);
            } else if left == 0 {
                let (above, above_bit) = place(at);
                if let Some(high) = self.high.get(above) {
                    high.fetch_and(!above_bit, Ordering::SeqCst);
                }
                if low.load(Ordering::SeqCst) != 0 {
                    raise(&self.high, at);
                }
            }
        }
        self.ended.fetch_add(1, Ordering::SeqCst);
    }

    /// The first word with bits from `from` on, of so many words, and its `bits`.
    pub(super) fn first(
        &self,
        words: usize,
        from: usize,
        bits: impl Fn(usize) -> u64,
    ) -> Option<(usize, u64)> {
        let ended = self.ended.load(Ordering::SeqCst);
        if self.begun.load(Ordering::SeqCst) == ended {
            let found = self.search(words, from, &bits);
            if self.begun.load(Ordering::SeqCst) == ended {
                return found;
            }
        }
        (from..words).map(|index| (index, bits(index))).find(|(_, bits)| *bits != 0)
    }

    fn search(
        &self,
        words: usize,
        from: usize,
        bits: impl Fn(usize) -> u64,
    ) -> Option<(usize, u64)> {
        let mut at = from;
        while at < words {
            let (low, _) = place(at);
            let (high, _) = place(low);
            let next = |level: &[AtomicU64], at: usize| {
                let word = level.get(at / 64)?.load(Ordering::SeqCst) & u64::MAX << (at % 64);
                (word != 0).then(|| at / 64 * 64 + word.trailing_zeros() as usize)
            };
            if self.high.get(high)?.load(Ordering::SeqCst) & u64::MAX << (low % 64) == 0 {
                at = (high + 1) * 64 * 64;
                continue;
            }
            match next(&self.low, at) {
                Some(index) => match bits(index) {
                    0 => at = index + 1,
                    bits => return Some((index, bits)),
                },
                // The next word of the summary that has a bit.
                None => at = next(&self.high, low + 1).map_or((high + 1) * 64, |low| low) * 64,
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::super::bitmap::Bitmap;

    #[test]
    fn searches_skip_words_without_bits() {
        // 4 Gi parts.
        let bitmap = Bitmap::new(1 << 48, 1 << 20, false);
        let parts = [5, 64 * 63, 64 * 64, 64 * 64 * 64 - 1, 64 * 64 * 64, (1 << 28) - 1];
        let all = |bitmap: &Bitmap| {
            let next = |part: &u64| bitmap.first_set(*part + 1);
            std::iter::successors(bitmap.first_set(0), next).collect::<Vec<_>>()
        };
        parts.iter().for_each(|part| bitmap.set(part << 20, 1));
        assert_eq!((all(&bitmap), bitmap.count()), (parts.to_vec(), 6 << 20));
        bitmap.clear(64 * 64..64 * 64 * 64);
        assert_eq!(all(&bitmap), [5, 64 * 63, 64 * 64 * 64, (1 << 28) - 1]);
        let taken = bitmap.take();
        assert_eq!((all(&bitmap), bitmap.count(), taken.count()), (Vec::new(), 0, 4 << 20));
        bitmap.restore(&taken);
        assert_eq!((all(&bitmap), bitmap.count()), (all(&taken), 4 << 20));
    }

    /// A bit that was set before a search is found by it, whatever others clear meanwhile.
    #[test]
    fn bits_that_others_clear_beside_hide_none() {
        const ROUNDS: u64 = 20_000;
        // In one word, in one word of the summary, and elsewhere.
        for beside in [1, 64, 64 * 64] {
            let bitmap = Bitmap::new(1 << 30, 512, false);
            thread::scope(|scope| {
                scope.spawn(|| {
                    for _ in 0..ROUNDS {
                        bitmap.set(beside * 512, 1);
                        bitmap.clear(beside..beside + 1);
                    }
                });
                for _ in 0..ROUNDS {
                    bitmap.set(0, 1);
                    assert_eq!(bitmap.first_set(0), Some(0));
                    bitmap.clear(0..1);
                    assert_ne!(bitmap.first_set(0), Some(0));
                }
            });
            assert_eq!((bitmap.first_set(0), bitmap.count()), (None, 0));
        }
    }
}
