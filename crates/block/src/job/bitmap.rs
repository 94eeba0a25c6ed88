//! Which parts of a disk are still to be copied.

use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::summary::Summary;
use crate::track::KeptBits;

/// Most bits of a [`Bitmap`] that a command makes: 256 MiB of memory.
pub const MAX_PARTS: u64 = 1 << 31;
/// Words of set bits that a [run](Bitmap::run) looks at.
const MOST_WORDS: u64 = 1024;

/// A bit for each part of a disk; for all threads, without a lock.
pub struct Bitmap {
    size: u64,
    /// A part has two to the power of this many bytes. A shift is ten times as fast as a division.
    shift: u32,
    words: Words,
    summary: Summary,
}

/// 64 bits each, the lowest first.
enum Words {
    Memory(Box<[AtomicU64]>),
    /// They survive a kill of the process.
    Kept(Arc<KeptBits>),
}

impl Deref for Words {
    type Target = [AtomicU64];

    #[inline]
    fn deref(&self) -> &[AtomicU64] {
        match self {
            Words::Memory(words) => words,
            Words::Kept(kept) => kept.words(),
        }
    }
}

impl Bitmap {
    /// Returns a bitmap for a disk of `size` bytes, with all bits as `set`.
    ///
    /// A bit is for `granularity` bytes, a power of two.
    pub fn new(size: u64, granularity: u64, set: bool) -> Bitmap {
        let shift = granularity.next_power_of_two().trailing_zeros();
        let parts = size.div_ceil(1 << shift);
        let words: Box<[_]> = (0..parts.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        let summary = Summary::new(words.len());
        let bitmap = Bitmap { size, shift, words: Words::Memory(words), summary };
        if set {
            bitmap.set(0, size);
        }
        bitmap
    }

    /// Returns the bitmap of such a disk with these bits.
    pub(crate) fn of_kept(size: u64, granularity: u64, kept: Arc<KeptBits>) -> Bitmap {
        let shift = granularity.next_power_of_two().trailing_zeros();
        let summary = Summary::of(kept.words());
        Bitmap { size, shift, words: Words::Kept(kept), summary }
    }

    /// Returns the bits that survive a kill of the process. `None`: they do not.
    pub(crate) fn kept(&self) -> Option<&Arc<KeptBits>> {
        match &self.words {
            Words::Memory(_) => None,
            Words::Kept(kept) => Some(kept),
        }
    }

    /// Returns the bytes of the disk.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the bytes of a part.
    pub fn granularity(&self) -> u64 {
        1 << self.shift
    }

    /// The parts that a range of the disk lies in.
    pub(crate) fn parts(&self, offset: u64, len: u64) -> Range<u64> {
        let end = offset.saturating_add(len).min(self.size);
        if offset >= end {
            return 0..0;
        }
        offset >> self.shift..((end - 1) >> self.shift) + 1
    }

    /// The parts that lie within a range of the disk.
    pub(crate) fn parts_within(&self, offset: u64, len: u64) -> Range<u64> {
        let end = offset.saturating_add(len);
        let end = if end >= self.size { self.size.next_multiple_of(1 << self.shift) } else { end };
        let start = offset.next_multiple_of(1 << self.shift);
        start >> self.shift..(end >> self.shift).max(start >> self.shift)
    }

    /// The bytes of some parts.
    pub(crate) fn bytes_of(&self, parts: &Range<u64>) -> Range<u64> {
        let end = (parts.end << self.shift).min(self.size);
        parts.start << self.shift..end
    }

    /// Sets the bits of all parts that `len` bytes from `offset` on touch.
    ///
    /// A thread that clears such a bit afterwards sees the earlier writes to the disk.
    pub fn set(&self, offset: u64, len: u64) {
        self.for_words(self.parts(offset, len), |index, word, mask| {
            // Most parts are written again and again. A line that all threads read stays in all caches.
            if word.load(Ordering::SeqCst) & mask != mask {
                self.set_word(word, mask);
            }
            self.summary.raise(index);
        });
    }

    pub(crate) fn clear(&self, parts: Range<u64>) {
        self.kept().into_iter().for_each(|kept| kept.give_up());
        self.for_words(parts, |index, word, mask| self.clear_word(index, word, mask));
    }

    fn set_word(&self, word: &AtomicU64, bits: u64) {
        let before = word.fetch_or(bits, Ordering::SeqCst);
        self.summary.count(i64::from((bits & !before).count_ones()));
    }

    fn clear_word(&self, index: usize, word: &AtomicU64, bits: u64) {
        let before = word.fetch_and(!bits, Ordering::SeqCst);
        self.summary.count(-i64::from((bits & before).count_ones()));
        if before & bits != 0 && before & !bits == 0 {
            self.summary.lower(index, word);
        }
    }

    /// Sets the bits of all parts that a bit of the other bitmap touches.
    pub fn merge(&self, other: &Bitmap) {
        if (self.shift, self.size) == (other.shift, other.size) {
            let mut from = 0;
            while let Some(part) = other.first_set(from) {
                let index = (part / 64) as usize;
                if let (Some(word), Some(theirs)) = (self.words.get(index), other.words.get(index))
                {
                    self.set_word(word, theirs.load(Ordering::Acquire));
                    self.summary.raise(index);
                }
                from = (index as u64 + 1) * 64;
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

    /// Clears all bits. Returns the bits that were set.
    ///
    /// Bits that are set meanwhile may stay. After a kill of the process, a bitmap in an image has the returned bits
    /// as well: what they are taken for may not have been done.
    pub fn take(&self) -> Bitmap {
        let words: Box<[_]> = self.words().map(AtomicU64::new).collect();
        let summary = Summary::of(&words);
        let words = Words::Memory(words);
        let taken = Bitmap { size: self.size, shift: self.shift, words, summary };
        if let Some(kept) = self.kept() {
            kept.retain(&taken.words);
        }
        for ((index, word), taken) in self.words.iter().enumerate().zip(&*taken.words) {
            let taken = taken.load(Ordering::Relaxed);
            if taken != 0 {
                self.clear_word(index, word, taken);
            }
        }
        taken
    }

    /// Adds the bits that were taken from the other bitmap to those that this one has after a kill of the process.
    pub(crate) fn retain_taken_of(&self, other: &Bitmap) {
        let (Some(own), Some(theirs)) = (self.kept(), other.kept()) else { return };
        match theirs.taken() {
            Ok(None) => {}
            Ok(Some(words)) => {
                let [all, taken] = [other.size, self.size]
                    .map(|size| Bitmap::new(size, self.granularity(), false));
                all.set_words(words.into_iter());
                taken.merge(&all);
                own.retain(&taken.words);
            }
            Err(error) => {
                log::warn!("a dirty bitmap does not survive a kill from now on: {error}");
                own.give_up();
            }
        }
    }

    /// Gives the bits back that it had, as [`take`](Self::take) has returned them. Nothing is written meanwhile.
    pub fn restore(&self, before: &Bitmap) {
        self.merge(before);
        for ((index, word), before) in self.words.iter().enumerate().zip(&*before.words) {
            self.clear_word(index, word, !before.load(Ordering::Relaxed));
        }
    }

    /// Returns the bits as bytes, lowest bit first: the form of qcow2.
    ///
    /// There are as many bits as there are parts.
    pub fn to_bytes(&self) -> Vec<u8> {
        let words = self.words.iter().map(|word| word.load(Ordering::Acquire).to_le_bytes());
        let mut bytes: Vec<u8> = words.flatten().collect();
        bytes.truncate(self.byte_len() as usize);
        bytes
    }

    /// Returns the number of bytes of [`to_bytes`](Self::to_bytes).
    pub fn byte_len(&self) -> u64 {
        self.size.div_ceil(self.granularity()).div_ceil(8)
    }

    /// Sets bits that are set in bytes of that form, `at` bytes from the beginning.
    ///
    /// Bits past the end are left out.
    pub fn set_bytes(&self, at: u64, bytes: &[u8]) {
        let parts = self.size.div_ceil(self.granularity());
        for (byte, first) in bytes.iter().zip((at * 8..parts).step_by(8)) {
            let left = (parts - first).min(8);
            let bits = u64::from(*byte) & (u64::MAX >> (64 - left));
            let index = (first / 64) as usize;
            if let Some(word) = self.words.get(index).filter(|_| bits != 0) {
                self.set_word(word, bits << (first % 64));
                self.summary.raise(index);
            }
        }
    }

    /// Returns whether the bits at `offset` are set, and for how many bytes.
    ///
    /// The run ends where the bits change, or after `len` bytes, or before: a call looks at no more than 1,024 words that
    /// are set. The next run begins there.
    pub fn run(&self, offset: u64, len: u64) -> (bool, u64) {
        let parts = self.parts(offset, len);
        if parts.is_empty() {
            return (false, len);
        }
        let is_set = self.is_set(parts.start);
        let end = match is_set {
            true => {
                let most = (parts.start / 64 + MOST_WORDS) * 64;
                self.first_clear(parts.start..parts.end.min(most))
            }
            false => self.first_set(parts.start).map_or(parts.end, |set| set.min(parts.end)),
        };
        (is_set, ((end << self.shift).min(offset.saturating_add(len)) - offset))
    }

    /// Returns the first part of a range with a clear bit, or the range's end.
    fn first_clear(&self, parts: Range<u64>) -> u64 {
        let mut part = parts.start;
        while part < parts.end {
            let word = self.words.get((part / 64) as usize);
            let clear = !word.map_or(0, |word| word.load(Ordering::Acquire)) >> (part % 64);
            if clear != 0 {
                return (part + u64::from(clear.trailing_zeros())).min(parts.end);
            }
            part = (part / 64 + 1) * 64;
        }
        parts.end
    }

    /// Returns the size of all parts with set bits, in bytes.
    ///
    /// A part that the disk ends in counts whole, as in QEMU.
    pub fn count(&self) -> u64 {
        self.summary.ones() * self.granularity()
    }

    /// Returns all bits, 64 at a time.
    pub(crate) fn words(&self) -> impl Iterator<Item = u64> {
        self.words.iter().map(|word| word.load(Ordering::Acquire))
    }

    /// Sets all bits, 64 at a time.
    pub(crate) fn set_words(&self, words: impl Iterator<Item = u64>) {
        self.kept().into_iter().for_each(|kept| kept.give_up());
        for ((index, own), word) in self.words.iter().enumerate().zip(words) {
            self.clear_word(index, own, !word);
            if word != 0 {
                self.set_word(own, word);
                self.summary.raise(index);
            }
        }
    }

    fn for_words(&self, parts: Range<u64>, change: impl Fn(usize, &AtomicU64, u64)) {
        let mut part = parts.start;
        while part < parts.end {
            let (index, bit) = (part / 64, part % 64);
            let count = (64 - bit).min(parts.end - part);
            let mask = (u64::MAX >> (64 - count)) << bit;
            if let Some(word) = self.words.get(index as usize) {
                change(index as usize, word, mask);
            }
            part += count;
        }
    }

    /// Whether the bit of a part is set.
    pub(crate) fn is_set(&self, part: u64) -> bool {
        let word = self.words.get((part / 64) as usize);
        word.is_some_and(|word| word.load(Ordering::Acquire) >> (part % 64) & 1 == 1)
    }

    /// Returns the first part at or after `from` with a set bit.
    pub(crate) fn first_set(&self, from: u64) -> Option<u64> {
        let mask = u64::MAX << (from % 64);
        let bits = |index: usize| match self.words.get(index) {
            Some(word) if index as u64 == from / 64 => word.load(Ordering::SeqCst) & mask,
            Some(word) => word.load(Ordering::SeqCst),
            None => 0,
        };
        let found = self.summary.first(self.words.len(), (from / 64) as usize, bits)?;
        Some(found.0 as u64 * 64 + u64::from(found.1.trailing_zeros()))
    }

    /// Returns whether no bit is set. Looks at part `first` and later ones first.
    pub(crate) fn is_empty(&self, first: u64) -> bool {
        self.first_set(first).or_else(|| self.first_set(0)).is_none()
    }

    /// Returns the size of all parts with set bits, in bytes.
    pub fn bytes(&self) -> u64 {
        let bytes = self.count();
        // The last part may be a short one.
        let rest = self.size % self.granularity();
        match rest != 0 && self.is_set(self.size >> self.shift) {
            true => (bytes + rest).saturating_sub(self.granularity()),
            false => bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_all_bits_and_none_past_the_end() {
        let bitmap = Bitmap::new(1000 * 512 + 100, 512, false);
        for part in [0, 1, 63, 64, 999, 1000] {
            bitmap.set(part * 512, 1);
        }
        let bytes = bitmap.to_bytes();
        assert_eq!((bytes.len(), bytes[0], bytes[7], bytes[8], bytes[125]), (126, 3, 0x80, 1, 1));
        let other = Bitmap::new(bitmap.size(), 512, false);
        other.set_bytes(0, &bytes[..100]);
        other.set_bytes(100, &bytes[100..]);
        assert_eq!(other.to_bytes(), bytes);
        other.set_bytes(100, &[0xff; 1000]);
        assert_eq!(other.count(), (4 + 1001 - 800) * 512);
    }

    #[test]
    fn runs_end_where_bits_change() {
        let bitmap = Bitmap::new(300 * 512 + 100, 512, false);
        bitmap.set(60 * 512, 100 * 512);
        bitmap.set(299 * 512, 1000);
        let runs = |mut at: u64, end: u64| {
            let mut runs = Vec::new();
            while at < end {
                let (is_set, len) = bitmap.run(at, end - at);
                runs.push((is_set, len));
                at += len;
            }
            runs
        };
        let all = [(false, 60 * 512), (true, 100 * 512), (false, 139 * 512), (true, 612)];
        assert_eq!(runs(0, bitmap.size()), all);
        assert_eq!(runs(100, 200), [(false, 100)]);
        assert_eq!(runs(60 * 512 + 1, 161 * 512), [(true, 100 * 512 - 1), (false, 512)]);
        let whole = Bitmap::new(256 * 512, 512, true);
        assert_eq!(whole.run(512, 255 * 512), (true, 255 * 512));
        let parts = 3 * MOST_WORDS * 64;
        let large = Bitmap::new(parts * 512, 512, true);
        assert_eq!(large.run(512, parts * 512), (true, (parts / 3 - 1) * 512));
    }

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
