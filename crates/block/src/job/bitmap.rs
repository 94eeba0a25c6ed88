//! Which parts of a disk are still to be copied.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// A bit for each part of a disk; for all threads, without a lock.
pub struct Bitmap {
    size: u64,
    granularity: u64,
    words: Box<[AtomicU64]>,
}

impl Bitmap {
    /// For a disk of `size` bytes, in parts of `granularity` bytes, a power of two; all bits as `set`.
    pub fn new(size: u64, granularity: u64, set: bool) -> Bitmap {
        let granularity = granularity.next_power_of_two();
        let parts = size.div_ceil(granularity);
        let words = (0..parts.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        let bitmap = Bitmap { size, granularity, words };
        if set {
            bitmap.set(0, size);
        }
        bitmap
    }

    /// Bytes of the disk.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Bytes of a part.
    pub fn granularity(&self) -> u64 {
        self.granularity
    }

    /// The parts that a range of the disk lies in.
    pub(crate) fn parts(&self, offset: u64, len: u64) -> Range<u64> {
        let end = offset.saturating_add(len).min(self.size);
        if offset >= end {
            return 0..0;
        }
        offset / self.granularity..end.div_ceil(self.granularity)
    }

    /// The bytes of some parts.
    pub(crate) fn bytes_of(&self, parts: &Range<u64>) -> Range<u64> {
        let end = (parts.end * self.granularity).min(self.size);
        parts.start * self.granularity..end
    }

    /// Sets the bits of all parts that the range touches. What was written to the disk before is seen
    /// by whoever clears a bit afterwards.
    pub fn set(&self, offset: u64, len: u64) {
        self.for_words(self.parts(offset, len), |word, mask| {
            // Most parts are written again and again. A line that all threads read stays in all caches.
            if word.load(Ordering::Acquire) & mask != mask {
                word.fetch_or(mask, Ordering::Release);
            }
        });
    }

    pub(crate) fn clear(&self, parts: Range<u64>) {
        self.for_words(parts, |word, mask| {
            word.fetch_and(!mask, Ordering::AcqRel);
        });
    }

    /// Sets the bits of all parts that a bit of the other bitmap touches.
    pub fn merge(&self, other: &Bitmap) {
        if (self.granularity, self.size) == (other.granularity, other.size) {
            for (word, theirs) in self.words.iter().zip(&other.words) {
                let theirs = theirs.load(Ordering::Acquire);
                if theirs != 0 {
                    word.fetch_or(theirs, Ordering::Release);
                }
            }
            return;
        }
        let mut from = 0;
        while let Some(part) = other.first_set(from) {
            let range = other.bytes_of(&(part..part + 1));
            self.set(range.start, range.end - range.start);
            from = part + 1;
        }
    }

    /// Clears all bits. Returns those that were set.
    pub fn take(&self) -> Bitmap {
        let words = self.words.iter().map(|word| AtomicU64::new(word.swap(0, Ordering::AcqRel)));
        Bitmap { size: self.size, granularity: self.granularity, words: words.collect() }
    }

    /// Bytes in parts whose bits are set, a part that the disk ends in counted whole, as QEMU does it.
    pub fn count(&self) -> u64 {
        let ones = |word: &AtomicU64| u64::from(word.load(Ordering::Relaxed).count_ones());
        self.words.iter().map(ones).sum::<u64>() * self.granularity
    }

    /// Returns all bits, 64 at a time.
    pub(crate) fn words(&self) -> impl Iterator<Item = u64> {
        self.words.iter().map(|word| word.load(Ordering::Acquire))
    }

    /// Sets all bits, 64 at a time.
    pub(crate) fn set_words(&self, words: impl Iterator<Item = u64>) {
        for (own, word) in self.words.iter().zip(words) {
            own.store(word, Ordering::Release);
        }
    }

    fn for_words(&self, parts: Range<u64>, change: impl Fn(&AtomicU64, u64)) {
        let mut part = parts.start;
        while part < parts.end {
            let (index, bit) = (part / 64, part % 64);
            let count = (64 - bit).min(parts.end - part);
            let mask = (u64::MAX >> (64 - count)) << bit;
            if let Some(word) = self.words.get(index as usize) {
                change(word, mask);
            }
            part += count;
        }
    }

    /// Whether the bit of a part is set.
    pub(crate) fn is_set(&self, part: u64) -> bool {
        let word = self.words.get((part / 64) as usize);
        word.is_some_and(|word| word.load(Ordering::Acquire) >> (part % 64) & 1 == 1)
    }

    /// The first part from `from` on whose bit is set.
    pub(crate) fn first_set(&self, from: u64) -> Option<u64> {
        let mut index = (from / 64) as usize;
        let mut mask = u64::MAX << (from % 64);
        loop {
            let found = self.words.get(index)?.load(Ordering::Acquire) & mask;
            if found != 0 {
                return Some(index as u64 * 64 + u64::from(found.trailing_zeros()));
            }
            (index, mask) = (index + 1, u64::MAX);
        }
    }

    /// Bytes in parts whose bits are set.
    pub fn bytes(&self) -> u64 {
        let ones = |word: &AtomicU64| u64::from(word.load(Ordering::Relaxed).count_ones());
        let bytes = self.words.iter().map(ones).sum::<u64>() * self.granularity;
        // The last part may be a short one.
        let rest = self.size % self.granularity;
        match rest != 0 && self.is_set(self.size / self.granularity) {
            true => bytes - self.granularity + rest,
            false => bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_those_that_a_range_touches() {
        let bitmap = Bitmap::new(1000 * 512 + 100, 512, false);
        bitmap.set(511, 2);
        assert_eq!(
            (bitmap.first_set(0), bitmap.first_set(1), bitmap.first_set(2)),
            (Some(0), Some(1), None)
        );
        bitmap.set(60 * 512, 10 * 512);
        assert_eq!(bitmap.bytes(), 12 * 512);
        bitmap.clear(0..64);
        assert_eq!((bitmap.first_set(0), bitmap.bytes()), (Some(64), 6 * 512));
        bitmap.set(0, u64::MAX);
        assert_eq!(bitmap.bytes(), 1000 * 512 + 100);
        assert_eq!(bitmap.bytes_of(&(999..1001)), 999 * 512..1000 * 512 + 100);
        bitmap.set(5, 0);
        assert_eq!(Bitmap::new(0, 512, true).first_set(0), None);
    }
}
