//! The write cache modes of a device's disks, in memory that outlives the process. A driver that has switched a
//! write cache off does not flush any more, and does not repeat the mode for the next process.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex};

use event_loop::sync::lock;
use guest_memory::MappedRegion;

/// The first bytes of a record in use. The last one is the version of the layout.
const MAGIC: [u8; 8] = *b"ringwce1";
/// Offset of the bitmap: a set bit for each disk in write-through mode.
const BITS_AT: u64 = 32;

/// The write cache modes of up to 256 disks, for the next process.
///
/// The memory belongs to a front end: it may have any contents, and change at any time.
#[derive(Debug)]
pub struct CacheRecord {
    region: Arc<MappedRegion>,
    at: u64,
}

impl CacheRecord {
    /// Length of a record, bytes.
    pub const LEN: u64 = 64;

    /// Returns the record at byte `at` of a region. A new record is zeroed memory.
    ///
    /// `None` if the region is too short.
    pub fn new(region: Arc<MappedRegion>, at: u64) -> Option<Self> {
        let end = at.checked_add(Self::LEN)?;
        (end <= region.size()).then_some(CacheRecord { region, at })
    }

    fn byte(&self, offset: u64) -> Option<&AtomicU8> {
        self.region.byte(self.at + offset)
    }

    fn magic(&self) -> impl Iterator<Item = (&AtomicU8, u8)> {
        (0..).zip(MAGIC).filter_map(|(at, byte)| Some((self.byte(at)?, byte)))
    }

    /// Whether the record has been written.
    fn is_used(&self) -> bool {
        self.magic().all(|(at, byte)| at.load(Ordering::Acquire) == byte)
    }

    /// Marks the record as written.
    fn begin(&self) {
        self.magic().for_each(|(at, byte)| at.store(byte, Ordering::Release));
    }

    fn bit(&self, disk: u8) -> Option<(&AtomicU8, u8)> {
        Some((self.byte(BITS_AT + u64::from(disk / 8))?, 1 << (disk % 8)))
    }

    /// Whether a disk is in write-through mode.
    fn is_write_through(&self, disk: u8) -> bool {
        self.bit(disk).is_some_and(|(byte, bit)| byte.load(Ordering::Acquire) & bit != 0)
    }

    /// Records the mode of a disk.
    fn set_write_through(&self, disk: u8, on: bool) {
        match self.bit(disk) {
            Some((byte, bit)) if on => drop(byte.fetch_or(bit, Ordering::Release)),
            Some((byte, bit)) => drop(byte.fetch_and(!bit, Ordering::Release)),
            None => {}
        }
    }
}

/// The device's record, if it has one. All changes of a disk's mode go through this type. A mode is a flag, set
/// while writes may stay in a cache.
#[derive(Debug, Default)]
pub(crate) struct KeptModes(Mutex<Option<CacheRecord>>);

impl KeptModes {
    /// Keeps the modes in `record` from now on. Returns whether the record was in use.
    ///
    /// A record in use can switch a cache off, but not on: a driver that believes in a cache flushes anyway. During
    /// an upgrade another process may still use the record, so only stricter modes are written to it.
    pub(crate) fn keep<'a>(
        &self,
        record: Option<CacheRecord>,
        caches: impl Iterator<Item = &'a AtomicBool>,
    ) -> bool {
        let mut kept = lock(&self.0);
        let mut is_used = false;
        if let Some(record) = &record {
            is_used = record.is_used();
            for (disk, cache) in (0..=u8::MAX).zip(caches) {
                let write_through = !cache.load(Ordering::Relaxed);
                match is_used && record.is_write_through(disk) {
                    true => cache.store(false, Ordering::Relaxed),
                    false if write_through => record.set_write_through(disk, true),
                    false if !is_used => record.set_write_through(disk, false),
                    false => {}
                }
            }
            if !is_used {
                record.begin();
            }
        }
        *kept = record;
        is_used
    }

    /// Switches the cache of a disk on or off. "Off" is recorded at once, before the driver is answered. "On" is
    /// recorded by [`answered`](Self::answered): the driver flushes only after it has seen the answer.
    pub(crate) fn set(&self, disk: u8, cache: &AtomicBool, on: bool) {
        let kept = lock(&self.0);
        cache.store(on, Ordering::Relaxed);
        if !on && let Some(record) = &*kept {
            record.set_write_through(disk, true);
        }
    }

    /// Records the current modes, which the driver has been informed of.
    pub(crate) fn answered<'a>(&self, caches: impl Iterator<Item = &'a AtomicBool>) {
        if let Some(record) = &*lock(&self.0) {
            for (disk, cache) in (0..=u8::MAX).zip(caches) {
                record.set_write_through(disk, !cache.load(Ordering::Relaxed));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use guest_memory::test_util::memfd_region;

    use super::*;

    fn region(size: u64) -> Arc<MappedRegion> {
        Arc::new(memfd_region(0, size).unwrap().map().unwrap())
    }

    fn flags<const N: usize>(on: [bool; N]) -> [AtomicBool; N] {
        on.map(AtomicBool::new)
    }

    fn on<const N: usize>(caches: &[AtomicBool; N]) -> [bool; N] {
        std::array::from_fn(|disk| caches[disk].load(Ordering::Relaxed))
    }

    /// Runs a process: with these caches it receives the memory. Returns whether the record was in use, and the caches.
    fn process<const N: usize>(
        memory: &Arc<MappedRegion>,
        begins: [bool; N],
    ) -> (KeptModes, [AtomicBool; N], bool) {
        let (kept, caches) = (KeptModes::default(), flags(begins));
        let told = kept.keep(CacheRecord::new(memory.clone(), 64), caches.iter());
        (kept, caches, told)
    }

    #[test]
    fn a_record_is_all_in_its_region() {
        let memory = region(192);
        for (at, fits) in [(0, true), (128, true), (129, false), (192, false), (u64::MAX, false)] {
            assert_eq!(CacheRecord::new(memory.clone(), at).is_some(), fits, "{at}");
        }
    }

    #[test]
    fn the_next_process_finds_the_modes() {
        let memory = region(128);
        let mut begins = [true; 256];
        begins[7] = false;
        let (kept, caches, told) = process(&memory, begins);
        assert!(!told, "new memory");
        for disk in [0, 9, 255] {
            kept.set(disk, &caches[usize::from(disk)], false);
        }
        let (_, caches, told) = process(&memory, [true; 256]);
        assert!(told);
        let expected: [bool; 256] = std::array::from_fn(|disk| ![0, 7, 9, 255].contains(&disk));
        assert_eq!(on(&caches), expected);
    }

    #[test]
    fn a_cache_is_on_for_the_next_process_once_the_driver_knows() {
        let memory = region(128);
        let (kept, caches, _) = process(&memory, [false, false]);
        kept.set(1, &caches[1], true);
        assert_eq!(on(&caches), [false, true]);
        assert_eq!(on(&process(&memory, [true, true]).1), [false, false]);
        kept.answered(caches.iter());
        assert_eq!(on(&process(&memory, [true, true]).1), [false, true]);
    }

    #[test]
    fn a_record_makes_modes_stricter_and_never_laxer() {
        let memory = region(128);
        process(&memory, [true, false]);
        let (_, caches, told) = process(&memory, [false, true]);
        assert!(told);
        assert_eq!(on(&caches), [false, false]);
        // The third process finds these modes too.
        assert_eq!(on(&process(&memory, [true, true]).1), [false, false]);
    }

    #[test]
    fn bits_without_the_magic_say_nothing() {
        let memory = region(128);
        let bits = memory.byte(64 + BITS_AT).unwrap();
        bits.store(0xff, Ordering::Relaxed);
        let (_, caches, told) = process(&memory, [true, false]);
        assert!(!told);
        assert_eq!(on(&caches), [true, false]);
        assert_eq!(bits.load(Ordering::Relaxed) & 3, 2);
    }

    /// During an upgrade, the new process must not relax a mode, as the old one may have to resume.
    #[test]
    fn a_waiting_process_switches_no_cache_on() {
        let memory = region(128);
        let (kept, caches, _) = process(&memory, [true]);
        let (successor, _, _) = process(&memory, [true]);
        kept.set(0, &caches[0], false);
        assert!(!successor.keep(None, std::iter::empty()));
        assert_eq!(on(&process(&memory, [true]).1), [false]);
    }
}
