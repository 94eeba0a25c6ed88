//! Which parts of a disk are still to be copied.

use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::track::KeptBits;

/// Most bits of a [`Bitmap`] that a command makes: 256 MiB of memory.
pub const MAX_PARTS: u64 = 1 << 31;

/// A bit for each part of a disk; for all threads, without a lock.
pub struct Bitmap {
    size: u64,
    /// A part has two to the power of this many bytes. A shift is ten times as fast as a division.
    shift: u32,
    words: Words,
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
        let words = (0..parts.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        let bitmap = Bitmap { size, shift, words: Words::Memory(words) };
        if set {
            bitmap.set(0, size);
        }
        bitmap
    }

    /// Returns the bitmap of such a disk with these bits.
    pub(crate) fn of_kept(size: u64, granularity: u64, kept: Arc<KeptBits>) -> Bitmap {
        let shift = granularity.next_power_of_two().trailing_zeros();
        Bitmap { size, shift, words: Words::Kept(kept) }
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
        self.for_words(self.parts(offset, len), |word, mask| {
            // Most parts are written again and again. A line that all threads read stays in all caches.
            if word.load(Ordering::Acquire) & mask != mask {
                word.fetch_or(mask, Ordering::Release);
            }
        });
    }

    pub(crate) fn clear(&self, parts: Range<u64>) {
        self.kept().into_iter().for_each(|kept| kept.give_up());
        self.for_words(parts, |word, mask| {
            word.fetch_and(!mask, Ordering::AcqRel);
        });
    }

    /// Sets the bits of all parts that a bit of the other bitmap touches.
    pub fn merge(&self, other: &Bitmap) {
        if (self.shift, self.size) == (other.shift, other.size) {
            for (word, theirs) in self.words.iter().zip(&*other.words) {
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

    /// Clears all bits. Returns the bits that were set.
    ///
    /// Bits that are set meanwhile may stay. After a kill of the process, a bitmap in an image has the returned bits
    /// as well: what they are taken for may not have been done.
    pub fn take(&self) -> Bitmap {
        let words = self.words().map(AtomicU64::new).collect();
        let taken = Bitmap { size: self.size, shift: self.shift, words: Words::Memory(words) };
        if let Some(kept) = self.kept() {
            kept.retain(&taken.words);
        }
        for (word, taken) in self.words.iter().zip(&*taken.words) {
            let taken = taken.load(Ordering::Relaxed);
            if taken != 0 {
                word.fetch_and(!taken, Ordering::AcqRel);
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
        for (word, before) in self.words.iter().zip(&*before.words) {
            word.fetch_and(before.load(Ordering::Relaxed), Ordering::AcqRel);
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
            if let Some(word) = self.words.get((first / 64) as usize).filter(|_| bits != 0) {
                word.fetch_or(bits << (first % 64), Ordering::Release);
            }
        }
    }

    /// Returns whether the bits at `offset` are set, and for how many bytes.
    ///
    /// The run ends where the bits change, or after `len` bytes.
    pub fn run(&self, offset: u64, len: u64) -> (bool, u64) {
        let parts = self.parts(offset, len);
        if parts.is_empty() {
            return (false, len);
        }
        let is_set = self.is_set(parts.start);
        let end = match is_set {
            true => self.first_clear(parts.clone()),
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
        let ones = |word: &AtomicU64| u64::from(word.load(Ordering::Relaxed).count_ones());
        self.words.iter().map(ones).sum::<u64>() * self.granularity()
    }

    /// Returns all bits, 64 at a time.
    pub(crate) fn words(&self) -> impl Iterator<Item = u64> {
        self.words.iter().map(|word| word.load(Ordering::Acquire))
    }

    /// Sets all bits, 64 at a time.
    pub(crate) fn set_words(&self, words: impl Iterator<Item = u64>) {
        self.kept().into_iter().for_each(|kept| kept.give_up());
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

    /// Returns the first part at or after `from` with a set bit.
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

    /// Returns whether no bit is set. Looks at part `first` and later ones first.
    pub(crate) fn is_empty(&self, first: u64) -> bool {
        self.first_set(first).or_else(|| self.first_set(0)).is_none()
    }

    /// Returns the size of all parts with set bits, in bytes.
    pub fn bytes(&self) -> u64 {
        let ones = |word: &AtomicU64| u64::from(word.load(Ordering::Relaxed).count_ones());
        let bytes = self.words.iter().map(ones).sum::<u64>() * self.granularity();
        // The last part may be a short one.
        let rest = self.size % self.granularity();
        match rest != 0 && self.is_set(self.size >> self.shift) {
            true => bytes - self.granularity() + rest,
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
