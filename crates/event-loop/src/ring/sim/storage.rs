//! What a power cut leaves: files on storage with a volatile write cache.
//!
//! A completed write is in a cache until a flush. The rules are those that disks, file systems and Linux
//! document, and no more than these:
//!
//! - A sector of [`SECTOR`] bytes is written whole or not at all. Larger writes may be torn between sectors.
//! - Each unflushed change may survive or not, independently and in any order. A sector has its flushed
//!   contents, or those after one of the later changes to it.
//! - A successful fsync(2) or fdatasync(2) makes all changes stable that had *completed* when it was
//!   submitted. Changes in flight at that time may be covered or not.
//! - A successful write with `RWF_DSYNC` is stable, and so is the file's size if the write extends the file.
//!   Other sectors are not covered.
//! - A discard or zeroing is a change like any other: until it is flushed, the range may have its old
//!   contents or zeroes. A change of size is one too, even outside of the ring. It is noticed with the next
//!   operation on the file, or the next query.
//! - An operation in flight at the cut may have happened, in part, or not, whatever its result would have
//!   been.
//! - After a failed flush of a file that the kernel caches, later flushes do not make its changes stable,
//!   since the kernel believes its pages clean (fsync(2), "ERRORS").
//!
//! Changes made on other threads (`aio=threads`, ioctls) are not tracked, except changes of size.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

use nix::sys::stat::fstat;

use super::random::Random;
use crate::sync::lock;

/// Bytes that are written atomically.
pub const SECTOR: usize = 512;

type Sector = [u8; SECTOR];

/// The files of a simulation, with their stable and unstable contents.
///
/// Clones are handles to the same storage, so worlds of several loops can share files.
#[derive(Clone, Default)]
pub struct Storage(Arc<Mutex<HashMap<Id, Disk>>>);

/// Identifies a file behind any descriptor: device and inode.
type Id = (u64, u64);

struct Disk {
    /// The storage's own descriptor.
    file: File,
    /// The stable contents, in whole sectors, at least as many as `stable_size` needs.
    stable: Vec<u8>,
    stable_size: u64,
    /// Later contents of sectors by number, oldest first. Never empty.
    sectors: BTreeMap<u64, Vec<Version>>,
    /// Later sizes of the file, oldest first: the number of the change, and bytes.
    sizes: Vec<(u64, u64)>,
    /// Present size, bytes.
    size: u64,
    /// Number of changes so far.
    changes: u64,
}

/// The unflushed state of a file for another process: [`Storage::unflushed`].
pub struct Unflushed(Disk);

/// A sector's contents after a change.
#[derive(Clone)]
struct Version {
    change: u64,
    bytes: Box<Sector>,
    /// A flush of this version has failed.
    lost: bool,
}

/// A write in flight at the cut: the first byte, and the bytes or a number of zeroes.
pub(super) type InFlight = (u64, Result<Vec<u8>, u64>);

impl Storage {
    /// Creates a storage without files.
    pub fn new() -> Storage {
        Storage::default()
    }

    /// Starts to track a file. Its contents count as stable.
    ///
    /// # Errors
    ///
    /// Those of dup(2), fstat(2) and read(2).
    pub fn add(&self, fd: &OwnedFd) -> io::Result<()> {
        let file = File::from(fd.try_clone()?);
        let size = file.metadata()?.len();
        let mut stable = vec![0; padded(size)];
        file.read_exact_at(&mut stable[..size as usize], 0)?;
        let id = id_of(fd.as_fd()).ok_or_else(io::Error::last_os_error)?;
        let disk = Disk {
            file,
            stable,
            stable_size: size,
            sectors: BTreeMap::new(),
            sizes: Vec::new(),
            size,
            changes: 0,
        };
        lock(&self.0).insert(id, disk);
        Ok(())
    }

    /// Returns the unflushed state of a file, for [`replace`](Self::replace).
    ///
    /// `None` if it is not tracked.
    pub fn unflushed(&self, fd: &OwnedFd) -> Option<Unflushed> {
        self.with(fd.as_fd(), |disk| disk.copy(&disk.file).ok().map(Unflushed))?
    }

    /// Starts to track a file that replaces the file of a killed process.
    ///
    /// Unflushed changes of that file may still be lost, and so may all differences between the two.
    ///
    /// # Errors
    ///
    /// Those of dup(2) and fstat(2).
    pub fn replace(&self, fd: &OwnedFd, unflushed: &Unflushed) -> io::Result<()> {
        let disk = unflushed.0.copy(&File::from(fd.try_clone()?))?;
        let id = id_of(fd.as_fd()).ok_or_else(io::Error::last_os_error)?;
        lock(&self.0).insert(id, disk);
        self.look(fd);
        Ok(())
    }

    /// Notes unflushed changes made outside of the ring.
    pub fn look(&self, fd: &OwnedFd) {
        self.with(fd.as_fd(), Disk::look);
    }

    /// Returns the storage's own descriptor of a file. `None` if the file is not tracked.
    pub fn descriptor(&self, fd: &OwnedFd) -> Option<RawFd> {
        self.with(fd.as_fd(), |disk| disk.file.as_raw_fd())
    }

    /// Stops tracking a file.
    pub fn remove(&self, fd: &OwnedFd) {
        id_of(fd.as_fd()).map(|id| lock(&self.0).remove(&id));
    }

    /// Returns the stable contents of a file: the minimum that a power cut leaves.
    ///
    /// `None` if the file is not tracked.
    pub fn stable(&self, fd: &OwnedFd) -> Option<Vec<u8>> {
        self.with(fd.as_fd(), |disk| disk.stable[..disk.stable_size as usize].to_vec())
    }

    /// Returns the number of sectors with unflushed changes.
    pub fn unstable_sectors(&self, fd: &OwnedFd) -> usize {
        self.with(fd.as_fd(), |disk| disk.sectors.len()).unwrap_or(0)
    }

    /// Returns what a power cut now leaves of a file.
    ///
    /// Equal seeds give equal results. The storage continues unchanged. `None` if the file is not tracked.
    ///
    /// Operations in flight have no effect here; [`Sim::cut`](super::Sim::cut) includes them.
    pub fn cut(&self, fd: &OwnedFd, seed: u64) -> Option<Vec<u8>> {
        self.cut_with(fd.as_fd(), seed, Vec::new())
    }

    /// Restores power: the file gets `contents`, as stable contents.
    ///
    /// `contents` are those that [`cut`](Self::cut) returned.
    ///
    /// # Errors
    ///
    /// Those of ftruncate(2) and write(2). `ENOENT`: the file is not tracked.
    pub fn restore(&self, fd: &OwnedFd, contents: Vec<u8>) -> io::Result<()> {
        self.with(fd.as_fd(), |disk| disk.restore(contents)).ok_or(io::ErrorKind::NotFound)?
    }

    pub(super) fn cut_with(
        &self,
        fd: BorrowedFd<'_>,
        seed: u64,
        in_flight: Vec<InFlight>,
    ) -> Option<Vec<u8>> {
        self.with(fd, |disk| disk.cut(&Random::new(seed), in_flight))
    }

    pub(super) fn killed_with(
        &self,
        fd: BorrowedFd<'_>,
        seed: u64,
        in_flight: Vec<InFlight>,
    ) -> Option<Vec<u8>> {
        self.with(fd, |disk| disk.killed(&Random::new(seed), in_flight))
    }

    /// Records a completed write or zeroing of a range. `dsync`: the range is stable.
    pub(super) fn changed(&self, fd: BorrowedFd<'_>, offset: u64, len: u64, dsync: bool) {
        self.with(fd, |disk| disk.changed(offset, len, dsync));
    }

    /// Records the submission of a flush. Returns the number of changes that it covers.
    pub(super) fn begin_flush(&self, fd: BorrowedFd<'_>) -> u64 {
        self.with(fd, |disk| disk.changes).unwrap_or(0)
    }

    /// Records the success of a flush that covers `until` changes.
    pub(super) fn flushed(&self, fd: BorrowedFd<'_>, until: u64) {
        self.with(fd, |disk| disk.flushed(until));
    }

    /// Records the failure of a flush that covers `until` changes.
    pub(super) fn flush_failed(&self, fd: BorrowedFd<'_>, until: u64) {
        self.with(fd, |disk| {
            let unflushed = disk.sectors.values_mut().flatten();
            unflushed.filter(|version| version.change <= until).for_each(|v| v.lost = true);
        });
    }

    fn with<T>(&self, fd: BorrowedFd<'_>, call: impl FnOnce(&mut Disk) -> T) -> Option<T> {
        let mut disks = lock(&self.0);
        if disks.is_empty() {
            return None;
        }
        let stat = fstat(fd).ok()?;
        let disk = disks.get_mut(&(stat.st_dev, stat.st_ino))?;
        // ftruncate(2) does not use the ring.
        disk.look_at_size(stat.st_size.cast_unsigned());
        Some(call(disk))
    }
}

pub(super) fn id_of(fd: BorrowedFd<'_>) -> Option<Id> {
    fstat(fd).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

/// Number of bytes in whole sectors.
fn padded(size: u64) -> usize {
    (size as usize).next_multiple_of(SECTOR)
}

impl Disk {
    /// The same state for another file.
    fn copy(&self, file: &File) -> io::Result<Disk> {
        let file = file.try_clone()?;
        let (stable, sectors, sizes) =
            (self.stable.clone(), self.sectors.clone(), self.sizes.clone());
        Ok(Disk { file, stable, sectors, sizes, ..*self })
    }

    /// Reads the present contents of the file, in whole sectors.
    fn read(&self) -> Vec<u8> {
        let (mut all, mut done) = (vec![0; padded(self.size)], 0);
        while let Ok(n @ 1..) = self.file.read_at(&mut all[done..], done as u64) {
            done += n;
        }
        all
    }

    fn look(&mut self) {
        self.changes += 1;
        for (number, bytes) in (0..).zip(self.read().as_chunks::<SECTOR>().0) {
            let newest = self.sectors.get(&number).and_then(|versions| versions.last());
            let stable = self.stable.as_chunks::<SECTOR>().0.get(number as usize);
            let before = newest.map(|version| &*version.bytes).or(stable).unwrap_or(&[0; SECTOR]);
            if before != bytes {
                let bytes = Box::new(*bytes);
                let version = Version { change: self.changes, bytes, lost: false };
                self.sectors.entry(number).or_default().push(version);
            }
        }
    }

    /// Records the present contents of these sectors as a version.
    fn remember(&mut self, sectors: Range<u64>) {
        let mut all = vec![[0; SECTOR]; (sectors.end - sectors.start) as usize];
        let (bytes, mut done) = (all.as_flattened_mut(), 0);
        // Past the end there are zeroes.
        let start = sectors.start * SECTOR as u64;
        while let Ok(n @ 1..) = self.file.read_at(&mut bytes[done..], start + done as u64) {
            done += n;
        }
        for (number, bytes) in sectors.zip(all) {
            let version = Version { change: self.changes, bytes: Box::new(bytes), lost: false };
            self.sectors.entry(number).or_default().push(version);
        }
    }

    fn restore(&mut self, contents: Vec<u8>) -> io::Result<()> {
        self.file.set_len(contents.len() as u64)?;
        let present = self.read();
        let is_same = |at: usize, sector: &[u8]| {
            present.get(at..at + sector.len()).is_some_and(|present| present == sector)
        };
        let (mut at, mut sectors) = (0, contents.chunks(SECTOR).peekable());
        while let Some(sector) = sectors.next() {
            let (start, mut end) = (at, at + sector.len());
            at = end;
            if is_same(start, sector) {
                continue;
            }
            // All that differ in a row are written at once.
            while let Some(sector) = sectors.next_if(|sector| !is_same(end, sector)) {
                end += sector.len();
                at = end;
            }
            self.file.write_all_at(contents.get(start..end).unwrap_or_default(), start as u64)?;
        }
        (self.size, self.stable_size) = (contents.len() as u64, contents.len() as u64);
        self.stable = contents;
        self.stable.resize(padded(self.size), 0);
        self.sectors.clear();
        self.sizes.clear();
        Ok(())
    }

    fn look_at_size(&mut self, size: u64) {
        if size == self.size {
            return;
        }
        self.changes += 1;
        if size < self.size {
            // The cut part reads as zeroes if the file grows again.
            self.remember(size / SECTOR as u64..self.size.div_ceil(SECTOR as u64));
        }
        self.size = size;
        self.sizes.push((self.changes, size));
    }

    fn changed(&mut self, offset: u64, len: u64, dsync: bool) {
        // A discard may extend past the end.
        let end = offset.saturating_add(len).min(self.size);
        if offset >= end {
            return;
        }
        self.changes += 1;
        let sectors = offset / SECTOR as u64..end.div_ceil(SECTOR as u64);
        self.remember(sectors.clone());
        if !dsync {
            return;
        }
        for number in sectors {
            let versions = self.sectors.remove(&number).unwrap_or_default();
            if let Some(newest) = versions.last() {
                self.make_stable(number, &newest.bytes);
            }
        }
        // Sizes that cover the range are stable with it.
        self.sizes.retain(|(_, size)| *size >= end);
        if self.stable_size < end {
            self.sizes.clear();
            self.set_stable_size(self.size);
        }
    }

    fn flushed(&mut self, until: u64) {
        for (number, mut versions) in std::mem::take(&mut self.sectors) {
            let covered =
                versions.iter().rposition(|version| version.change <= until && !version.lost);
            if let Some(newest) = covered {
                self.make_stable(number, &versions[newest].bytes);
                versions.drain(..=newest);
            }
            if !versions.is_empty() {
                self.sectors.insert(number, versions);
            }
        }
        let covered = self.sizes.iter().rposition(|(change, _)| *change <= until);
        if let Some(newest) = covered {
            let size = self.sizes[newest].1;
            self.sizes.drain(..=newest);
            self.set_stable_size(size);
        }
    }

    fn make_stable(&mut self, number: u64, bytes: &Sector) {
        let at = number as usize * SECTOR;
        if self.stable.len() < at + SECTOR {
            self.stable.resize(at + SECTOR, 0);
        }
        self.stable[at..at + SECTOR].copy_from_slice(bytes);
    }

    fn set_stable_size(&mut self, size: u64) {
        self.stable_size = size;
        if self.stable.len() < padded(size) {
            self.stable.resize(padded(size), 0);
        }
    }

    fn cut(&self, random: &Random, in_flight: Vec<InFlight>) -> Vec<u8> {
        let style = Style::pick(random, self.changes);
        let fates: HashMap<u64, Fate> = {
            let sectors = self.sectors.values().flatten().map(|version| version.change);
            let mut changes: Vec<u64> =
                sectors.chain(self.sizes.iter().map(|size| size.0)).collect();
            changes.sort_unstable();
            changes.dedup();
            changes.into_iter().map(|change| (change, style.fate(random, change))).collect()
        };
        let mut left = self.stable.clone();
        for (number, versions) in &self.sectors {
            let survives = |version: &&Version| fates[&version.change].spares(random);
            if let Some(newest) = versions.iter().rev().find(survives) {
                put(&mut left, number * SECTOR as u64, &newest.bytes[..]);
            }
        }
        let sizes = self.sizes.iter().rev();
        let newest = sizes.clone().find(|(change, _)| fates[change].spares(random));
        let size = newest.map_or(self.stable_size, |(_, size)| *size);
        self.land(left, size, in_flight, &style, random)
    }

    fn killed(&self, random: &Random, in_flight: Vec<InFlight>) -> Vec<u8> {
        self.land(self.read(), self.size, in_flight, &Style::Some(50), random)
    }

    /// Returns the contents with `size` bytes after operations in flight were carried out, in part or not at
    /// all.
    fn land(
        &self,
        mut left: Vec<u8>,
        mut size: u64,
        mut in_flight: Vec<InFlight>,
        style: &Style,
        random: &Random,
    ) -> Vec<u8> {
        // In any order, with sector granularity.
        while !in_flight.is_empty() {
            let (offset, bytes) =
                in_flight.swap_remove(random.below(in_flight.len() as u64) as usize);
            let fate = style.fate(random, u64::MAX);
            let bytes = match bytes {
                Ok(bytes) => bytes,
                // Past the end there are zeroes already.
                Err(len) => vec![0; len.min(self.size.saturating_sub(offset)) as usize],
            };
            let mut at = 0;
            while at < bytes.len() {
                let start = offset + at as u64;
                let len = (SECTOR - start as usize % SECTOR).min(bytes.len() - at);
                if fate.spares(random) {
                    put(&mut left, start, &bytes[at..at + len]);
                    // Only a write past the end changes the size.
                    if start + len as u64 > self.size && random.percent(50) {
                        size = size.max(start + len as u64);
                    }
                }
                at += len;
            }
        }
        left.resize(size as usize, 0);
        left
    }
}

fn put(left: &mut Vec<u8>, at: u64, bytes: &[u8]) {
    let (at, end) = (at as usize, at as usize + bytes.len());
    if left.len() < end {
        left.resize(end, 0);
    }
    left[at..end].copy_from_slice(bytes);
}

/// How much a cut loses. Each style finds other mistakes.
enum Style {
    Everything,
    Nothing,
    /// Loses all changes after this number.
    Later(u64),
    /// Keeps whole changes with this chance in percent, and sometimes a part of one.
    Some(u8),
    /// Keeps sectors with this chance in percent.
    Sectors(u8),
}

/// The fate of a change.
#[derive(Clone, Copy)]
enum Fate {
    Kept,
    Dropped,
    /// Each sector survives with this chance in percent.
    Torn(u8),
}

impl Style {
    fn pick(random: &Random, changes: u64) -> Style {
        match random.below(8) {
            0 => Style::Everything,
            1 => Style::Nothing,
            2 => Style::Later(random.below(changes + 1)),
            3..6 => Style::Some([10, 50, 90][random.below(3) as usize]),
            _ => Style::Sectors([10, 50, 90][random.below(3) as usize]),
        }
    }

    fn fate(&self, random: &Random, change: u64) -> Fate {
        match *self {
            Style::Everything => Fate::Dropped,
            Style::Nothing => Fate::Kept,
            Style::Later(until) if change <= until => Fate::Kept,
            Style::Later(_) => Fate::Dropped,
            Style::Some(chance) => match random.percent(chance) {
                _ if random.percent(15) => Fate::Torn(50),
                true => Fate::Kept,
                false => Fate::Dropped,
            },
            Style::Sectors(chance) => Fate::Torn(chance),
        }
    }
}

impl Fate {
    fn spares(self, random: &Random) -> bool {
        match self {
            Fate::Kept => true,
            Fate::Dropped => false,
            Fate::Torn(chance) => random.percent(chance),
        }
    }
}
