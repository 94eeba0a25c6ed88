//! Bitmaps that survive a kill of the process: their bits are in files beside the [journal](super::super::journal).
//!
//! The image is marked while it has such a bitmap, also if nothing was written yet. The mark leads the next process to the
//! files. Another program does not know the mark, and removes it before it writes. A process that hands the image over lends
//! the files, and so does a node that another one takes the place of: the other one goes on with them. The files are given
//! up before changes that set no bits: a failure of the journal, and closing the image. A file is for a disk of one size.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use event_loop::sync::lock;

use super::Loaded;
use crate::drivers::qcow2::journal::{Keeper, KeptFile};
use crate::track::{Described, DirtyBitmap, KeptBits, Storage};

/// Most bitmaps of an image that are kept. Each takes a descriptor and a mapping.
const MOST: usize = 64;

/// The files of an image's bitmaps.
#[derive(Default)]
pub(in super::super) struct KeptBitmaps {
    /// `None`: a kill leaves bitmaps inconsistent.
    keeper: Option<Keeper>,
    files: Mutex<Vec<KeptFile>>,
    /// Of a process that hands the image over: those that no bitmap has yet.
    lent: Mutex<Vec<(Described, KeptFile)>>,
    /// A bitmap may be kept.
    any: AtomicBool,
}

impl KeptBitmaps {
    pub(in super::super) fn new(
        keeper: Option<Keeper>,
        lent: Vec<(Described, KeptFile)>,
    ) -> KeptBitmaps {
        KeptBitmaps { keeper, lent: Mutex::new(lent), ..KeptBitmaps::default() }
    }

    /// Whether a bitmap may be kept. Then discards survive a kill, too: the data that they drop does not come back without
    /// a bit.
    pub(in super::super) fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Whether new bitmaps can be kept at all.
    pub(super) fn has_place(&self) -> bool {
        self.keeper.is_some()
    }

    fn add(&self, file: KeptFile) -> Arc<KeptBits> {
        let bits = file.bits.clone();
        let mut files = lock(&self.files);
        files.push(file);
        self.any.store(true, Ordering::Release);
        bits
    }

    /// Bits for a new bitmap of a node, or for one that is handed over. `None`: there cannot be such.
    pub(super) fn create(&self, node: &str, of: &Described) -> Option<Arc<KeptBits>> {
        self.remove_given_up();
        if lock(&self.files).len() >= MOST {
            return None;
        }
        let is_it = |(lent, _): &mut (Described, KeptFile)| {
            (&lent.name, lent.size, lent.granularity) == (&of.name, of.size, of.granularity)
        };
        let lent = lock(&self.lent).extract_if(.., is_it).next();
        let file = match lent {
            Some((_, file)) => {
                file.bits.set_recording(of.recording);
                file
            }
            None => self.keeper.as_ref()?.create(node, of)?,
        };
        Some(self.add(file))
    }

    /// Takes over the files of a node that this one takes the place of.
    pub(super) fn take_from(&self, before: &KeptBitmaps) {
        let Some(keeper) = &self.keeper else { return };
        let files = std::mem::take(&mut *lock(&before.files));
        for file in files.into_iter().filter_map(|file| keeper.take(file)) {
            self.add(file);
        }
    }

    /// A kill leaves all bitmaps inconsistent until they are kept again, by this node or process or by another one.
    pub(in super::super) fn lend(&self) {
        self.remove_given_up();
        lock(&self.files).iter().for_each(|file| file.bits.lend());
    }

    /// Goes on with the bitmaps that were [lent](Self::lend).
    pub(in super::super) fn go_on(&self) {
        lock(&self.files).iter().for_each(|file| file.bits.begin());
    }

    /// Has the bitmaps of an image that is opened, on a disk of `size` bytes, use the bits of `left`, which a killed
    /// process has left. Those that were stored get files.
    pub(in super::super) fn take(
        &self,
        node: &str,
        loaded: &mut Loaded,
        left: Vec<(Described, KeptFile)>,
        size: u64,
    ) {
        for (of, file) in left {
            let place = loaded.bitmaps.iter().position(|bitmap| bitmap.name() == of.name);
            let fits = |place: usize| {
                loaded.bitmaps.get(place).is_some_and(|bitmap| {
                    bitmap.storage() == Storage::Inconsistent
                        && bitmap.bits().granularity() == of.granularity
                })
            };
            // One that was stored is newer: the process was killed as it closed the image.
            if of.size != size || !place.is_none_or(fits) {
                file.remove();
                continue;
            }
            let bitmap = Arc::new(DirtyBitmap::of_kept(of, self.add(file)));
            match place.and_then(|place| loaded.bitmaps.get_mut(place)) {
                Some(inconsistent) => *inconsistent = bitmap,
                None => loaded.bitmaps.push(bitmap),
            }
        }
        for bitmap in &mut loaded.bitmaps {
            if bitmap.storage() != Storage::Image || bitmap.can_be_kept() {
                continue;
            }
            let (bits, recording) = (bitmap.bits(), bitmap.is_recording());
            let (name, granularity) = (bitmap.name().to_owned(), bits.granularity());
            let of = Described { name, size, granularity, recording };
            if let Some(kept) = self.create(node, &of) {
                let with = DirtyBitmap::of_kept(of, kept);
                with.bits().merge(bits);
                *bitmap = Arc::new(with);
            }
        }
    }

    /// The image is going to be used: the bits that were left may lack writes until writes set them.
    pub(in super::super) fn seize(&self) {
        lock(&self.files).iter().for_each(|file| file.bits.seize());
    }

    /// A kill leaves all bitmaps inconsistent from now on.
    pub(in super::super) fn give_up(&self) {
        let files = lock(&self.files);
        files.iter().for_each(|file| file.bits.give_up());
        self.any.store(false, Ordering::Release);
    }

    /// Removes files that have no use any more. Not on threads that may remove no file.
    pub(super) fn remove_given_up(&self) {
        lock(&self.files).retain(|file| {
            // No bitmap has the bits of one that was removed.
            let is_used = !file.bits.is_given_up() && Arc::strong_count(&file.bits) > 1;
            if !is_used {
                file.remove();
            }
            is_used
        });
    }

    /// The same for all files.
    pub(in super::super) fn remove_all(&self) {
        self.give_up();
        self.remove_given_up();
        lock(&self.lent).drain(..).for_each(|(_, file)| file.remove());
    }
}

#[cfg(test)]
mod tests {
    use nix::unistd::geteuid;

    use super::*;
    use crate::drivers::qcow2::Journals;
    use crate::image_place::ImagePlace;

    #[test]
    fn an_image_with_many_bitmaps_does_not_take_all_descriptors() {
        let folder = format!("ringmill-many-bitmaps-{}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        let journals = Journals::in_folder(&folder, geteuid().as_raw()).unwrap();
        let journal = journals.create(Some(&ImagePlace::file(7))).unwrap();
        assert!(journal.keeper(None).is_none(), "a copy could be on any device");
        let kept = KeptBitmaps::new(journal.keeper(Some(1)), Vec::new());
        let named = |number: usize| {
            let (size, granularity) = (1 << 20, 65536);
            Described { name: format!("b{number}"), size, granularity, recording: true }
        };
        let all: Vec<_> =
            (0..MOST).map(|number| kept.create("disk", &named(number)).unwrap()).collect();
        assert!(kept.create("disk", &named(MOST)).is_none());
        all[3].give_up();
        assert!(kept.create("disk", &named(MOST)).is_some());
        kept.remove_all();
        journal.remove();
        // Nothing is left in it.
        std::fs::remove_dir(&folder).unwrap();
    }
}
