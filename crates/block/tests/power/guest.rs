//! The guest's knowledge of its disk: the possible contents of each sector, after a power cut too.

use fastrand::Rng;

use crate::power::bitmaps::Bitmaps;
use crate::power::snapshots::Snapshots;

/// Bytes of a sector, which are written together or not at all.
pub(crate) const SECTOR: usize = 512;

/// Contents of a sector: the number of the write they come from. 0: zeroes.
pub(crate) type Stamp = u64;

/// A sector as a write with that number leaves it. No two sectors and no two writes have the same.
pub(crate) fn sector(stamp: Stamp, number: u64) -> [u8; SECTOR] {
    let mut bytes = [0; SECTOR];
    if stamp != 0 {
        bytes[..8].copy_from_slice(&stamp.to_le_bytes());
        bytes[8..16].copy_from_slice(&(!number).to_le_bytes());
        let mut done = 16;
        while done < SECTOR {
            bytes.copy_within(..done, done);
            done *= 2;
        }
        if stamp.is_multiple_of(3) {
            // Hard to compress.
            let mut random = Rng::with_seed(stamp ^ number.rotate_left(32));
            for word in bytes[32..].as_chunks_mut().0 {
                *word = random.u64(..).to_le_bytes();
            }
        }
    }
    bytes
}

/// Zeroes that were decrypted. Unlike in data of any sector, the first sixteen bytes differ from the next.
const NOISE: Stamp = Stamp::MAX;

/// Which write a sector's contents come from. `None`: none of this sector's.
fn stamp(bytes: &[u8], number: u64) -> Option<Stamp> {
    let stamp = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
    match bytes == sector(stamp, number) {
        true => Some(stamp),
        false => (bytes[..16] != bytes[16..32]).then_some(NOISE),
    }
}

/// Possible contents of a sector after a change. After a discard, the old contents are possible. On an encrypted disk, a power
/// cut may leave noise of a discard, and of zeroes, until they are flushed: the file may have a hole, and the image not say
/// so. A kill does not, as the image or the journal says so before there is a hole.
#[derive(Debug, Clone)]
struct Version {
    stamps: Vec<Stamp>,
    /// Noise is possible after a power cut.
    noise: bool,
    /// When it was answered with success.
    answered: Option<u64>,
}

impl Version {
    fn new(stamps: Vec<Stamp>, answered: Option<u64>) -> Version {
        Version { stamps, noise: false, answered }
    }

    /// Whether a sector may have these contents. `killed`: what was answered is not lost.
    fn allows(&self, found: Stamp, killed: bool) -> bool {
        self.stamps.contains(&found) || (self.noise && found == NOISE && !killed)
    }
}

/// Oldest first: the one that must have survived, and those that may have come after.
#[derive(Debug, Clone)]
struct Sector(Vec<Version>);

impl Sector {
    /// The last answered version, and those of later requests that failed, whose result is
    /// unknown.
    fn newest(&self) -> &[Version] {
        let answered = self.0.iter().rposition(|version| version.answered.is_some());
        &self.0[answered.unwrap_or(0)..]
    }
}

/// A change of a range by a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    Written(Stamp),
    Zeroed,
    Discarded,
}

/// The disk as its guest knows it.
#[derive(Clone)]
pub(crate) struct Disk {
    sectors: Vec<Sector>,
    /// Sizes that the disk may have, sectors; the first is the one that it had for certain.
    sizes: Vec<usize>,
    time: u64,
    /// When it got its size.
    resized: u64,
    is_resizing: bool,
    is_encrypted: bool,
    pub(crate) bitmaps: Bitmaps,
    pub(crate) snapshots: Snapshots,
}

impl Disk {
    /// A disk with these contents, stable.
    pub(crate) fn new(contents: &[u8], is_encrypted: bool) -> Disk {
        let sector = |(number, bytes): (usize, &[u8])| {
            let stamps = vec![stamp(bytes, number as u64).expect("contents of this disk")];
            Sector(vec![Version::new(stamps, Some(0))])
        };
        let sectors: Vec<_> = contents.chunks(SECTOR).enumerate().map(sector).collect();
        let sizes = vec![sectors.len()];
        Disk {
            sectors,
            sizes,
            time: 1,
            resized: 0,
            is_resizing: false,
            is_encrypted,
            bitmaps: Bitmaps::default(),
            snapshots: Snapshots::default(),
        }
    }

    /// The same disk with these snapshots in its image.
    pub(crate) fn with_snapshots(self, found: &[Vec<u8>]) -> Disk {
        Disk { snapshots: Snapshots::new(found), ..self }
    }

    /// The same disk with these bitmaps.
    pub(crate) fn with_bitmaps(self, bitmaps: Bitmaps) -> Disk {
        Disk { bitmaps, ..self }
    }

    /// Sectors.
    pub(crate) fn len(&self) -> usize {
        *self.sizes.last().expect("never empty")
    }

    pub(crate) fn now(&mut self) -> u64 {
        self.time += 1;
        self.time
    }

    /// Begins a request that changes a range. No other request changes it.
    pub(crate) fn begin(&mut self, range: std::ops::Range<usize>, change: Change) {
        for sector in &mut self.sectors[range] {
            let stamps = match change {
                Change::Written(0) | Change::Zeroed => vec![0],
                Change::Written(stamp) => vec![stamp],
                Change::Discarded => {
                    let before = sector.newest().iter().flat_map(|version| &version.stamps);
                    before.copied().chain([0]).collect()
                }
            };
            let noise = self.is_encrypted && stamps.contains(&0);
            sector.0.push(Version { stamps, noise, answered: None });
        }
    }

    /// Records a successful answer. `stable`: it has to survive a power cut.
    pub(crate) fn answered(&mut self, range: std::ops::Range<usize>, stable: bool) {
        let now = self.now();
        for Sector(versions) in &mut self.sectors[range] {
            if let Some(last) = versions.last_mut() {
                last.answered = Some(now);
            }
            if stable {
                versions.drain(..versions.len() - 1);
                versions.iter_mut().for_each(|version| version.noise = false);
            }
        }
    }

    /// Records the answer to a flush that began at `asked`.
    pub(crate) fn flushed(&mut self, asked: u64) {
        if self.resized < asked && !self.is_resizing {
            self.size_is_stable();
        }
        for Sector(versions) in &mut self.sectors {
            let covered = |version: &Version| version.answered.is_some_and(|at| at < asked);
            if let Some(newest) = versions.iter().rposition(covered) {
                versions.drain(..newest);
                versions.first_mut().into_iter().for_each(|version| version.noise = false);
            }
        }
    }

    /// Begins a resize, in sectors. Truncated data may be lost, and new sectors are
    /// zeroes.
    pub(crate) fn begin_resize(&mut self, size: usize) {
        let before = self.len();
        self.is_resizing = true;
        self.sizes.push(size);
        match size < before {
            true => self.begin(size..before, Change::Discarded),
            false => self.begin(before..size.min(self.sectors.len()), Change::Zeroed),
        }
        let fresh = || Sector(vec![Version::new(vec![0], Some(0))]);
        self.sectors.resize_with(self.sectors.len().max(size), fresh);
    }

    /// Records a successful resize. `stable`: it has to survive a power cut.
    pub(crate) fn resized(&mut self, stable: bool) {
        let [.., before, size] = self.sizes[..] else { return };
        self.answered(before.min(size)..before.max(size), false);
        (self.is_resizing, self.resized) = (false, self.time);
        if stable {
            self.size_is_stable();
        }
    }

    /// Records a failed resize: the disk has its old size, but the file may have the new one.
    pub(crate) fn resize_failed(&mut self) {
        if let [.., before, _] = self.sizes[..] {
            self.sizes.push(before);
            (self.is_resizing, self.resized) = (false, u64::MAX);
        }
    }

    fn size_is_stable(&mut self) {
        let size = self.len();
        self.sizes = vec![size];
        self.sectors.truncate(size);
    }

    /// Checks a read of the newest contents.
    pub(crate) fn check_read(&self, first: usize, bytes: &[u8]) -> Result<(), String> {
        let sectors = self.sectors[first..].iter().map(Sector::newest);
        check(first, bytes, sectors, true)
    }

    /// The disk after a kill, with these contents: unflushed data may still be lost. `cut_off`: data past the end of a
    /// disk that has shrunk, of which a part may exist until that is flushed.
    pub(crate) fn after_kill(mut self, contents: &[u8], cut_off: &[u8]) -> Disk {
        let (now, size) = (self.now(), contents.len() / SECTOR);
        if self.sizes != [size] {
            self.sizes.push(size);
        }
        (self.is_resizing, self.resized) = (false, now);
        let fresh = || Sector(vec![Version::new(vec![0], Some(0))]);
        self.sectors.resize_with(self.sectors.len().max(size), fresh);
        let found = contents.chunks(SECTOR).chain(cut_off.chunks(SECTOR));
        for (number, (bytes, sector)) in found.zip(&mut self.sectors).enumerate() {
            let stamps = vec![stamp(bytes, number as u64).expect("contents of this disk")];
            if !matches!(&sector.0[..], [Version { stamps: only, .. }] if *only == stamps) {
                sector.0.push(Version::new(stamps, Some(now)));
            }
        }
        self
    }

    /// Checks the contents after a power cut.
    pub(crate) fn check_cut(&self, bytes: &[u8]) -> Result<(), String> {
        self.check_size(bytes)?;
        check(0, bytes, self.sectors.iter().map(|sector| &sector.0[..]), false)
    }

    /// Checks the contents after a kill.
    pub(crate) fn check_kill(&self, bytes: &[u8]) -> Result<(), String> {
        self.check_size(bytes)?;
        self.check_read(0, bytes)
    }

    fn check_size(&self, bytes: &[u8]) -> Result<(), String> {
        match self.sizes.iter().any(|size| size * SECTOR == bytes.len()) {
            true => Ok(()),
            false => Err(format!("a disk of {} bytes, not {:?} sectors", bytes.len(), self.sizes)),
        }
    }
}

fn check<'a>(
    first: usize,
    bytes: &[u8],
    sectors: impl Iterator<Item = &'a [Version]>,
    killed: bool,
) -> Result<(), String> {
    for ((number, bytes), versions) in (first..).zip(bytes.chunks(SECTOR)).zip(sectors) {
        let found = stamp(bytes, number as u64);
        let allowed = |version: &Version| found.is_some_and(|found| version.allows(found, killed));
        if !versions.iter().any(allowed) {
            let found = match found {
                Some(stamp) if stamp != NOISE => format!("write {stamp}"),
                _ => format!("something foreign, {:02x?}…", &bytes[..24]),
            };
            return Err(format!("sector {number} has {found}, not one of {versions:?}"));
        }
    }
    Ok(())
}
