//! Persistent dirty bitmaps of an image: one that claims to be right has every change since it was added.
//!
//! Incremental backups copy the parts whose bits are set. A missing bit is data that no backup has.

use std::ops::Range;
use std::sync::Arc;

use block::request::Op;
use block::track::{BitmapStore, DirtyBitmap, Storage, Tracking};
use event_loop::LoopConfig;
use event_loop::ring::sim::{Faults, Sim};
use fastrand::Rng;

use crate::common::{Rig, filled};
use crate::power::guest::{Disk, SECTOR, sector};
use crate::power::kinds::{Extras, Kind};
use crate::power::left::{Left, contents};
use crate::power::oracle::Stored;
use crate::power::path_of;
use crate::power::recovery::{Interrupt, Reopened};

impl Stored {
    fn has(&self, sector: usize) -> bool {
        let bit = sector * SECTOR / self.granularity;
        self.bits.get(bit / 8).is_some_and(|byte| byte >> (bit % 8) & 1 != 0)
    }
}

/// A bitmap that the host has added.
#[derive(Clone)]
struct Added {
    name: String,
    /// The disk at that time.
    base: Arc<Vec<u8>>,
    /// Bytes of that disk which still count: of a disk that was smaller meanwhile, the rest is new.
    kept: usize,
    /// Sectors written to since.
    written: Vec<bool>,
    /// The image has it, on stable storage.
    stored: bool,
    /// When the image was opened, it did not claim to be right.
    lost: bool,
}

impl Added {
    /// The first sector that has changed without its bit.
    fn missing(&self, stored: &Stored, contents: &[u8]) -> Option<usize> {
        let base = &self.base[..self.kept];
        contents.chunks(SECTOR).enumerate().position(|(number, found)| {
            let at = number * SECTOR;
            let is_as_before = match base.get(at..at + found.len()) {
                Some(before) => before == found,
                None => found.iter().all(|byte| *byte == 0),
            };
            let is_written = self.written.get(number).is_some_and(|written| *written);
            (is_written || !is_as_before) && !stored.has(number)
        })
    }
}

/// A bitmap that a process hands over, as the daemon describes it.
pub(crate) struct HandedOver {
    name: String,
    granularity: u64,
    recording: bool,
    storage: Storage,
    bits: Vec<u8>,
}

impl HandedOver {
    /// All of a process that has stopped its queues, the oldest first.
    pub(crate) fn all(tracking: &Tracking) -> Vec<HandedOver> {
        let all = tracking.bitmaps().into_iter().rev();
        all.map(|bitmap| HandedOver {
            name: bitmap.name().to_owned(),
            granularity: bitmap.bits().granularity(),
            recording: bitmap.is_recording(),
            storage: bitmap.storage(),
            bits: bitmap.bits().to_bytes(),
        })
        .collect()
    }

    /// Has the process that takes the image over go on with them.
    pub(crate) fn take(
        all: &[HandedOver],
        tracking: &Tracking,
        store: &dyn BitmapStore,
        size: u64,
    ) {
        let make = |of: &HandedOver| {
            let HandedOver { name, granularity, recording, storage, bits } = of;
            let bitmap = match storage {
                Storage::Image => store.new_bitmap(name, size, *granularity, *recording),
                _ => DirtyBitmap::new(name.clone(), size, *granularity, *recording, *storage),
            };
            bitmap.bits().set_bytes(0, bits);
            Arc::new(bitmap)
        };
        tracking.set_bitmaps(all.iter().map(make).collect());
    }
}

/// The bitmaps of a course.
#[derive(Clone, Default)]
pub(crate) struct Bitmaps(Vec<Added>);

impl Bitmaps {
    /// Adds a bitmap to an opened image, with these contents.
    pub(crate) fn add(
        &mut self,
        tracking: &Tracking,
        store: &dyn BitmapStore,
        contents: &[u8],
        random: &mut Rng,
    ) {
        let name = format!("b{}", self.0.len());
        let granularity = [512, 4096, 65536][random.usize(..3)];
        let size = contents.len() as u64;
        tracking.add_bitmap(Arc::new(store.new_bitmap(&name, size, granularity, true)));
        let (base, kept) = (Arc::new(contents.to_vec()), contents.len());
        let written = Vec::new();
        self.0.push(Added { name, base, kept, written, stored: false, lost: false });
    }

    /// Whether a bitmap records.
    pub(crate) fn any_right(&self) -> bool {
        self.0.iter().any(|added| !added.lost)
    }

    /// Begins a bitmap anew, as of now, when the disk has these contents: for a backup that is made of them.
    pub(crate) fn take(&mut self, tracking: &Tracking, contents: &[u8], random: &mut Rng) {
        let number = random.usize(..self.0.len().max(1));
        let Some(added) = self.0.get_mut(number).filter(|added| !added.lost) else { return };
        let Some(bitmap) = tracking.bitmap(&added.name) else { return };
        if random.usize(..2) == 0 {
            bitmap.settle();
        }
        bitmap.bits().take();
        (added.base, added.kept) = (Arc::new(contents.to_vec()), contents.len());
        added.written.clear();
    }

    /// Notes that a write to some sectors begins.
    pub(crate) fn written(&mut self, range: &Range<usize>) {
        for added in &mut self.0 {
            let end = added.written.len().max(range.end);
            added.written.resize(end, false);
            added.written[range.clone()].fill(true);
        }
    }

    /// The disk has another size, in sectors. Data that is cut off needs no bits any more, nor do new sectors.
    pub(crate) fn resized(&mut self, size: usize) {
        for added in &mut self.0 {
            added.written.truncate(size);
            added.kept = added.kept.min(size * SECTOR);
        }
    }

    /// Checks the bitmaps of an image with these contents. Returns them as the next process finds them, and the
    /// number of those that claim to be right. `stable`: a later power cut leaves what was found.
    pub(crate) fn check(
        &self,
        found: &[Stored],
        contents: &[u8],
        stable: bool,
    ) -> Result<(Bitmaps, usize), String> {
        let (mut next, mut right) = (self.clone(), 0);
        for added in &mut next.0 {
            let name = &added.name;
            let stored = found.iter().find(|stored| stored.name == *name);
            if stored.is_none() && added.stored {
                return Err(format!("bitmap {name} is gone"));
            }
            let claims = stored.filter(|stored| !stored.in_use);
            if let Some(sector) = claims.and_then(|stored| added.missing(stored, contents)) {
                return Err(format!("bitmap {name} claims to be right, and lacks sector {sector}"));
            }
            added.stored |= stored.is_some() && stable;
            added.lost = claims.is_none();
            right += usize::from(claims.is_some());
        }
        let is_known = |stored: &Stored| self.0.iter().any(|added| added.name == stored.name);
        match found.iter().find(|stored| !is_known(stored)) {
            Some(other) => Err(format!("bitmap {} was never added", other.name)),
            None => Ok((next, right)),
        }
    }

    /// The number of bitmaps that a closed image has to have, and not as inconsistent ones.
    pub(crate) fn expected(&self) -> usize {
        self.0.iter().filter(|added| !added.lost).count()
    }
}

/// A process is killed before its mark of use is on stable storage. The next process finds the mark in the page cache;
/// if that process does not sync it, a power cut takes the mark and leaves data of the guest.
#[test]
fn a_mark_of_use_that_a_killed_process_left_is_made_stable() {
    let kind = Kind::named("qcow2, 4k");
    let start =
        kind.start(Extras { luks: false, bitmaps: true, compressed: false, snapshots: false });
    let open = |left: &Left, interrupt| {
        Reopened::new(kind, start, left, &mut Rng::with_seed(1), interrupt, true)
    };
    let closing = || Interrupt::Closing(Rng::with_seed(1));
    let write = |rig: &mut Rig, stamp| {
        let data = sector(stamp, 0);
        rig.write_op(Op::Write { fua: true }, 0, &data, 0).unwrap();
    };
    let left_with = |image: &[u8]| {
        let contents = contents(kind, start, image).unwrap();
        Left { image: image.to_vec(), ..Left::with(contents, None) }
    };
    // A mapped sector, and a bitmap that was stored.
    let first = open(&left_with(&start.image), closing());
    let mut rig = Rig::on(first.sim.event_loop(LoopConfig::default()).unwrap(), first.node.clone());
    write(&mut rig, 1);
    let mut bitmaps = Bitmaps::default();
    let base = rig.read(0, kind.size, 0).unwrap();
    let store = first.registry.node("disk").unwrap().bitmap_store().unwrap();
    bitmaps.add(first.tracking.as_ref().unwrap(), &*store, &base, &mut Rng::with_seed(1));
    drop(store);
    let Reopened { fd, node, registry, .. } = first;
    drop((rig, node, registry));
    let closed = std::fs::read(path_of(&fd)).unwrap();
    let found = contents(kind, start, &closed).unwrap();
    let disk = || Disk::new(&found, false).with_bitmaps(bitmaps.clone());
    let by_cut = Left::by_cut(kind, start, &closed, &disk(), None).unwrap();
    assert_eq!(by_cut.right, 1);
    // Marked, not on stable storage.
    let killed = open(&left_with(&closed), closing());
    let marked = std::fs::read(path_of(&killed.fd)).unwrap();
    assert!(marked != closed);
    let sim = Sim::new(1, Faults::default());
    let fd = sim.file(&closed).unwrap();
    std::fs::write(path_of(&fd), &marked).unwrap();
    sim.storage().look(&fd);
    let unflushed = sim.storage().unflushed(&fd).unwrap();
    let left = Left::by_kill(kind, start, &marked, &disk(), None).unwrap();
    assert_eq!(left.right, 0);
    let left = Left { image: marked, unflushed: Some((unflushed, disk())), ..left };
    // The next process, with an overwrite that nothing flushes.
    let next = open(&left, Interrupt::Opening(Rng::with_seed(1)));
    let mut rig = Rig::on(next.sim.event_loop(LoopConfig::default()).unwrap(), next.node.clone());
    let mut disk = disk();
    let range = 0..1;
    disk.bitmaps.written(&range);
    disk.begin(range, crate::power::guest::Change::Written(2));
    let tag = rig.submit(Op::Write { fua: false }, 0, SECTOR as u64, filled(&sector(2, 0), 0));
    rig.wait(tag).0.unwrap();
    for seed in 0..100 {
        let image = next.sim.cut(&next.fd, seed).unwrap();
        let left = Left::by_cut(kind, start, &image, &disk, None);
        assert_eq!(left.map(|left| left.right), Ok(0), "{seed}");
    }
}
