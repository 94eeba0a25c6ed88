//! Dirty bitmaps: which parts of a node were written to.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::{BitmapStore, Described, KeptBits};
use crate::job::Bitmap;

/// Where a bitmap is when its node is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Storage {
    /// Nowhere: it is in memory only.
    Memory,
    /// In the image, which it is stored to when the node is closed.
    Image,
    /// In an image that is only read. The bitmap does not change.
    ReadOnlyImage,
    /// In an image that was not closed since its last change. What the bitmap lacks is not known.
    Inconsistent,
}

/// A dirty bitmap of a node; for all threads.
pub struct DirtyBitmap {
    name: String,
    bits: Bitmap,
    storage: Storage,
    recording: AtomicBool,
    busy: AtomicBool,
    /// Bytes in the parts that a job has taken over as set bits, or [`NO_JOB`].
    lent: AtomicU64,
}

/// No job has bits of the bitmap.
const NO_JOB: u64 = u64::MAX;

impl DirtyBitmap {
    /// Returns a bitmap without a set bit, for a node of `size` bytes.
    ///
    /// A bit is for `granularity` bytes.
    pub fn new(
        name: String,
        size: u64,
        granularity: u64,
        recording: bool,
        storage: Storage,
    ) -> DirtyBitmap {
        // The bits of an inconsistent bitmap say nothing.
        let (size, recording) = match storage {
            Storage::Inconsistent => (0, false),
            Storage::Memory | Storage::Image | Storage::ReadOnlyImage => (size, recording),
        };
        DirtyBitmap::of(name, Bitmap::new(size, granularity, false), storage, recording)
    }

    fn of(name: String, bits: Bitmap, storage: Storage, recording: bool) -> DirtyBitmap {
        let (recording, busy) = (AtomicBool::new(recording), AtomicBool::new(false));
        DirtyBitmap { name, bits, storage, recording, busy, lent: AtomicU64::new(NO_JOB) }
    }

    /// Returns a bitmap in the image with bits that survive a kill of the process once it [is
    /// kept](Self::begin_keeping).
    pub(crate) fn of_kept(of: Described, kept: Arc<KeptBits>) -> DirtyBitmap {
        let Described { name, size, granularity, recording } = of;
        let bits = Bitmap::of_kept(size, granularity, kept);
        DirtyBitmap::of(name, bits, Storage::Image, recording)
    }

    /// Returns whether its bits can survive a kill of the process.
    pub(crate) fn can_be_kept(&self) -> bool {
        self.bits.kept().is_some()
    }

    /// The next process has the bits after a kill. From now on, all writes set them.
    pub(crate) fn begin_keeping(&self) {
        self.bits.kept().into_iter().for_each(|kept| kept.begin());
    }

    /// A kill leaves the bitmap inconsistent from now on.
    pub(crate) fn give_up_keeping(&self) {
        self.bits.kept().into_iter().for_each(|kept| kept.give_up());
    }

    /// A kill leaves the bitmap inconsistent until it is kept again, by this process or by another one.
    pub(crate) fn lend_keeping(&self) {
        self.bits.kept().into_iter().for_each(|kept| kept.lend());
    }

    /// The bits that were taken are not needed any more: a client of the daemon knows what has become of them.
    pub fn settle(&self) {
        self.bits.kept().into_iter().for_each(|kept| kept.settle());
    }

    /// Returns a copy for a node of `size` bytes, and gives up to keep this one. A bitmap that records has the bits of a part
    /// that is new set: the node may have been as large before, with other contents, and been shrunk.
    ///
    /// `store` makes the copy of a bitmap in an image, so that the copy survives a kill as well.
    pub(crate) fn resized(&self, size: u64, store: Option<&dyn BitmapStore>) -> DirtyBitmap {
        self.give_up_keeping();
        let (name, granularity, recording) =
            (self.name(), self.bits.granularity(), self.is_recording());
        let resized = match store.filter(|_| self.storage == Storage::Image) {
            Some(store) => store.new_bitmap(name, size, granularity, recording),
            None => DirtyBitmap::new(name.into(), size, granularity, recording, self.storage),
        };
        resized.bits.merge(&self.bits);
        resized.bits.retain_taken_of(&self.bits);
        let before = self.bits.size();
        if recording && size > before {
            resized.bits.set(before, size - before);
        }
        resized
    }

    /// Returns its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the bits.
    pub fn bits(&self) -> &Bitmap {
        &self.bits
    }

    /// Returns where the bitmap is when its node is closed.
    pub fn storage(&self) -> Storage {
        self.storage
    }

    /// Returns whether writes set bits.
    pub fn is_recording(&self) -> bool {
        self.recording.load(Ordering::Relaxed)
    }

    /// Has writes set bits, or not.
    pub fn set_recording(&self, recording: bool) {
        // After a kill, a bitmap that records has recorded all the time.
        if !recording {
            self.bits.kept().into_iter().for_each(|kept| kept.set_recording(false));
        }
        self.recording.store(recording, Ordering::Release);
        if recording {
            self.bits.kept().into_iter().for_each(|kept| kept.set_recording(true));
        }
    }

    /// Returns whether a job or an export uses it, so that no command changes it.
    pub fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Relaxed)
    }

    /// Has a job or an export use it, or no more.
    pub fn set_busy(&self, busy: bool) {
        self.busy.store(busy, Ordering::Relaxed);
    }

    /// Clears all bits for a job, which uses the bitmap from now on. Returns the bits that were set.
    pub fn lend(&self) -> Bitmap {
        self.set_busy(true);
        let bits = self.bits.take();
        self.lent.store(bits.count(), Ordering::Relaxed);
        bits
    }

    /// The job does not use the bitmap any more.
    pub fn end_loan(&self) {
        self.lent.store(NO_JOB, Ordering::Relaxed);
        self.set_busy(false);
    }

    /// Returns the bytes in the parts that a job has taken over as set bits. `None`: no job uses the bitmap.
    pub fn lent(&self) -> Option<u64> {
        let bytes = self.lent.load(Ordering::Relaxed);
        (bytes != NO_JOB).then_some(bytes)
    }
}

/// The bitmaps of a node, as a channel knows them.
pub(super) type Bitmaps = Arc<[Arc<DirtyBitmap>]>;

/// Returns the bitmaps that are not among others. An image may have 65,535: the time is linear.
pub(crate) fn without<'a>(
    all: &'a [Arc<DirtyBitmap>],
    others: &[Arc<DirtyBitmap>],
) -> impl Iterator<Item = &'a Arc<DirtyBitmap>> + use<'a> {
    let others: HashSet<_> = others.iter().map(Arc::as_ptr).collect();
    all.iter().filter(move |own| !others.contains(&Arc::as_ptr(own)))
}

/// Notes a write that is about to begin.
#[inline]
pub(super) fn note(bitmaps: &[Arc<DirtyBitmap>], offset: u64, len: u64) {
    for bitmap in bitmaps {
        if bitmap.is_recording() {
            bitmap.bits.set(offset, len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bitmap_keeps_its_bits_in_another_size() {
        let bitmap = DirtyBitmap::new("b".into(), 10 << 20, 65536, true, Storage::Memory);
        bitmap.bits().set(0, 1);
        bitmap.bits().set((10 << 20) - 1, 1);
        let grown = (10 << 20) + 2 * 65536;
        for (size, bytes) in [(20 << 20, grown), (5 << 20, 65536), (10 << 20, 2 * 65536)] {
            let resized = bitmap.resized(size, None);
            assert_eq!((resized.bits().size(), resized.bits().count()), (size, bytes));
            note(&[Arc::new(bitmap.resized(size, None))], 0, u64::MAX);
        }
        bitmap.set_recording(false);
        assert_eq!(bitmap.resized(20 << 20, None).bits().count(), 2 * 65536);
    }

    #[test]
    fn what_was_cut_off_and_grown_again_is_dirty() {
        let bitmap = DirtyBitmap::new("b".into(), 10 << 20, 65536, true, Storage::Memory);
        let again = bitmap.resized((5 << 20) + 512, None).resized(10 << 20, None);
        assert_eq!(again.bits().run(5 << 20, 5 << 20), (true, 5 << 20));
    }

    #[test]
    fn an_inconsistent_bitmap_has_no_bits_and_records_nothing() {
        let bitmap = DirtyBitmap::new("b".into(), 1 << 40, 512, true, Storage::Inconsistent);
        assert!(!bitmap.is_recording());
        assert_eq!((bitmap.bits().size(), bitmap.resized(1 << 20, None).bits().size()), (0, 0));
    }
}
