//! Dirty bitmaps: which parts of a node were written to.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::job::Bitmap;

/// A dirty bitmap of a node; for all threads.
pub struct DirtyBitmap {
    name: String,
    bits: Bitmap,
    recording: AtomicBool,
    busy: AtomicBool,
}

impl DirtyBitmap {
    /// A bitmap without a set bit, for a node of `size` bytes, in parts of `granularity` bytes.
    pub fn new(name: String, size: u64, granularity: u64, recording: bool) -> DirtyBitmap {
        let bits = Bitmap::new(size, granularity, false);
        let (recording, busy) = (AtomicBool::new(recording), AtomicBool::new(false));
        DirtyBitmap { name, bits, recording, busy }
    }

    /// The same for a node of another size. Parts that are new are not set.
    pub fn resized(&self, size: u64) -> DirtyBitmap {
        let name = self.name.clone();
        let resized = DirtyBitmap::new(name, size, self.bits.granularity(), self.is_recording());
        resized.bits.merge(&self.bits);
        resized
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The bits.
    pub fn bits(&self) -> &Bitmap {
        &self.bits
    }

    /// Whether writes set bits.
    pub fn is_recording(&self) -> bool {
        self.recording.load(Ordering::Relaxed)
    }

    /// Has writes set bits, or not.
    pub fn set_recording(&self, recording: bool) {
        self.recording.store(recording, Ordering::Relaxed);
    }

    /// Whether a job or an export uses it, so that no command changes it.
    pub fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Relaxed)
    }

    /// Has a job or an export use it, or no more.
    pub fn set_busy(&self, busy: bool) {
        self.busy.store(busy, Ordering::Relaxed);
    }
}

/// The bitmaps of a node, as a channel knows them.
pub(super) type Bitmaps = Arc<[Arc<DirtyBitmap>]>;

/// Notes a write that has ended, or failed: a part of it may have been done.
#[inline]
pub(super) fn note(bitmaps: &[Arc<DirtyBitmap>], offset: u64, len: u64) {
    for bitmap in bitmaps.iter().filter(|bitmap| bitmap.is_recording()) {
        bitmap.bits.set(offset, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bitmap_keeps_its_bits_in_another_size() {
        let bitmap = DirtyBitmap::new("b".into(), 10 << 20, 65536, true);
        bitmap.bits().set(0, 1);
        bitmap.bits().set((10 << 20) - 1, 1);
        for (size, bytes) in [(20 << 20, 2 * 65536), (5 << 20, 65536), (10 << 20, 2 * 65536)] {
            let resized = bitmap.resized(size);
            assert_eq!((resized.bits().size(), resized.bits().count()), (size, bytes));
            note(&[Arc::new(bitmap.resized(size))], 0, u64::MAX);
        }
    }
}
