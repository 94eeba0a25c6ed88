//! Making, deleting and applying an internal snapshot, beside the tables in use.
//!
//! Nothing that the header leads to is changed. New refcount blocks, L2 tables and L1 tables are written to reserved clusters,
//! which the file has as free. The new counts have them, and not the old tables that the change frees. Then one
//! sector of the header leads to the new tables. So at any time the file has the state before or the state after, and
//! each of them is complete.
//!
//! The disk and its new snapshot share all L2 tables. Entries of shared tables lack the [mark](COPIED) of clusters that may be
//! overwritten. A write to such a cluster, or a change of such a table, makes a copy, as in an image that was opened with a
//! snapshot.
//!
//! One L2 table is in memory at a time.

mod counts;
#[cfg(test)]
mod tests;

use std::ops::Range;

use nix::errno::Errno;

pub(in super::super) use self::counts::Freed;
use self::counts::{Counts, uncounted};
use super::entry::{COPIED, Entry, Raw, table};
use super::{Format, Roots, Stop, entry_at};
use crate::drivers::qcow2::steps::ENTRY;

/// The file of an image, in which only the change happens.
pub(in super::super) trait TableFile {
    /// Reads bytes; zeroes past the end of the file.
    async fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, Errno>;
    /// Writes bytes.
    async fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Errno>;

    /// A count is about to be looked at. Others may have their turn before.
    async fn look(&mut self) {}
}

/// Why a change did not succeed. Nothing leads to what it has written.
#[derive(Debug)]
pub(in super::super) enum SwitchError {
    /// An error of the file, or `EINVAL`: a count would become too large.
    Os(Errno),
    /// The metadata is damaged.
    Damaged(String),
    /// That of the snapshot that was to be deleted, or applied, is.
    OfSnapshot(String),
}

impl SwitchError {
    /// Damage on the way through the tables of a snapshot.
    fn of_snapshot(self) -> SwitchError {
        match self {
            SwitchError::Damaged(why) => SwitchError::OfSnapshot(why),
            SwitchError::Os(_) | SwitchError::OfSnapshot(_) => self,
        }
    }
}

impl From<Errno> for SwitchError {
    fn from(errno: Errno) -> SwitchError {
        SwitchError::Os(errno)
    }
}

impl From<Stop> for SwitchError {
    fn from(stop: Stop) -> SwitchError {
        stop.damage().map_or(SwitchError::Os(Errno::EIO), SwitchError::Damaged)
    }
}

/// [Reserved](super::Engine::reserve) clusters: the first byte of each, or of several that follow each other. The new counts
/// have those that are used.
#[derive(Debug, Default, Clone)]
pub(in super::super) struct SwitchRooms {
    /// One for each refcount block.
    pub(in super::super) blocks: Vec<u64>,
    /// For the refcount table.
    pub(in super::super) refcounts: u64,
    /// For the L1 table.
    pub(in super::super) l1: u64,
    /// One for each L2 table that may change.
    pub(in super::super) l2: Vec<u64>,
    /// For the table of snapshots.
    pub(in super::super) snapshots: u64,
}

/// What becomes of the snapshots.
#[derive(Debug)]
pub(in super::super) enum SnapshotChange {
    /// A snapshot is made. Its L1 table gets this place.
    Make(u64),
    /// The snapshot with this L1 table is deleted: bytes of the file.
    Delete(Range<u64>),
    /// The disk becomes that of the snapshot with this L1 table.
    Apply(Applied),
}

/// A snapshot that a disk goes back to.
#[derive(Debug, Clone)]
pub(in super::super) struct Applied {
    /// Its L1 table, bytes of the file.
    pub(in super::super) l1: Range<u64>,
    /// Entries of the table that map the disk. Those behind have the state of a virtual machine.
    pub(in super::super) entries: usize,
    /// Bytes of the disk.
    pub(in super::super) size: u64,
}

/// Makes the new tables. Returns them, and the clusters that become free when the header leads to them.
///
/// `table`: the table of snapshots before, in bytes of the file, and its bytes after.
///
/// # Errors
///
/// The file has what nothing leads to.
pub(in super::super) async fn prepare<F: TableFile>(
    file: &mut F,
    old: &Roots,
    change: &SnapshotChange,
    table: (Range<u64>, &[u8]),
    rooms: &SwitchRooms,
) -> Result<(Roots, Freed), SwitchError> {
    let counts = Counts::new(old.format, &old.refcounts, &rooms.blocks)?;
    prepare_with(counts, file, old, change, table, rooms).await
}

async fn prepare_with<F: TableFile>(
    counts: Counts,
    file: &mut F,
    old: &Roots,
    change: &SnapshotChange,
    (old_table, table): (Range<u64>, &[u8]),
    rooms: &SwitchRooms,
) -> Result<(Roots, Freed), SwitchError> {
    let mut work = Work { file, format: old.format, counts, l2_rooms: rooms.l2.iter() };
    for block in &rooms.blocks {
        work.take(*block..*block + 1).await?;
    }
    let l1 = match change {
        SnapshotChange::Make(_) => work.share(&old.l1).await?,
        SnapshotChange::Delete(snapshot) => {
            work.give_up_snapshot(snapshot.clone()).await?;
            work.own(&old.l1).await?
        }
        SnapshotChange::Apply(snapshot) => {
            let mut l1 = work.share_snapshot(snapshot).await.map_err(SwitchError::of_snapshot)?;
            l1.resize(l1.len().max(old.l1.len()), 0);
            // After that, or clusters of both would seem to be free in between.
            if let Some(cluster) = work.lower_tables(&old.l1).await? {
                return Err(uncounted(cluster));
            }
            l1
        }
    };
    let len = |entries: &[u64]| (entries.len() * ENTRY) as u64;
    work.lower_all(old.l1_at..old.l1_at + len(&old.l1)).await?;
    work.lower_all(old.refcounts_at..old.refcounts_at + len(&old.refcounts)).await?;
    work.lower_all(old_table).await?;
    for block in old.refcounts.iter().filter(|block| **block != 0) {
        work.lower(*block).await?;
    }
    work.put_table(rooms.l1, &bytes(&l1)).await?;
    if let SnapshotChange::Make(place) = change {
        work.put_table(*place, &bytes(&l1)).await?;
    }
    work.put_table(rooms.snapshots, table).await?;
    let refcounts = bytes(&work.counts.new);
    work.put_table(rooms.refcounts, &refcounts).await?;
    work.counts.write(work.file).await?;
    let Counts { new, free, .. } = work.counts;
    let size = match change {
        SnapshotChange::Apply(snapshot) => Some(snapshot.size),
        SnapshotChange::Make(_) | SnapshotChange::Delete(_) => None,
    };
    let (l1_at, refcounts_at) = (rooms.l1, rooms.refcounts);
    let roots = Roots { l1, l1_at, refcounts: new, refcounts_at, size, ..old.clone() };
    Ok((roots, free))
}

fn bytes(entries: &[u64]) -> Vec<u8> {
    entries.iter().flat_map(|entry| entry.to_be_bytes()).collect()
}

/// A change on its way.
struct Work<'a, F> {
    file: &'a mut F,
    format: Format,
    counts: Counts,
    l2_rooms: std::slice::Iter<'a, u64>,
}

impl<F: TableFile> Work<'_, F> {
    async fn lower(&mut self, offset: u64) -> Result<u64, SwitchError> {
        self.counts.lower(self.file, offset >> self.format.cluster_bits).await
    }

    /// Counts all clusters of a table as used once less.
    async fn lower_all(&mut self, bytes: Range<u64>) -> Result<(), SwitchError> {
        for cluster in self.clusters(bytes) {
            self.counts.lower(self.file, cluster).await?;
        }
        Ok(())
    }

    fn clusters(&self, bytes: Range<u64>) -> Range<u64> {
        match bytes.is_empty() {
            true => 0..0,
            false => {
                let bits = self.format.cluster_bits;
                bytes.start >> bits..bytes.end.div_ceil(1 << bits)
            }
        }
    }

    /// Counts reserved clusters as used.
    async fn take(&mut self, bytes: Range<u64>) -> Result<(), SwitchError> {
        for cluster in self.clusters(bytes) {
            self.counts.take(self.file, cluster).await?;
        }
        Ok(())
    }

    /// Writes a table to reserved clusters, and zeroes behind it in the last one.
    async fn put_table(&mut self, at: u64, table: &[u8]) -> Result<(), SwitchError> {
        const RUN: usize = 1 << 20;
        self.take(at..at + table.len() as u64).await?;
        let mut at = at;
        let cluster = self.format.cluster() as usize;
        for run in table.chunks(RUN.max(cluster)) {
            let mut run = run.to_vec();
            run.resize(run.len().next_multiple_of(cluster), 0);
            self.file.write(at, &run).await?;
            at += run.len() as u64;
        }
        Ok(())
    }

    async fn read_l2(&mut self, at: u64) -> Result<Vec<u8>, SwitchError> {
        Ok(self.file.read(at, self.format.cluster() as usize).await?)
    }

    /// The entries of an L2 table: the first byte of each in the table, and the entry.
    fn entries<'t>(
        &self,
        l2: &'t [u8],
    ) -> impl Iterator<Item = Result<(usize, Entry), Stop>> + use<'t, F> {
        let format = self.format;
        let step = format.l2_entry();
        (0..l2.len() / step).filter_map(move |nth| {
            let at = nth * step;
            let bitmap = if format.is_extended { entry_at(l2, at / ENTRY + 1) } else { 0 };
            let raw = Raw { descriptor: entry_at(l2, at / ENTRY), bitmap };
            (raw.descriptor != 0).then(|| Entry::parse(raw, &format).map(|entry| (at, entry)))
        })
    }

    /// The disk's tables and data get another user. Returns the L1 table of both.
    async fn share(&mut self, l1: &[u64]) -> Result<Vec<u64>, SwitchError> {
        let mut shared = l1.to_vec();
        for entry in &mut shared {
            let Some((at, _)) = table(*entry, &self.format)? else { continue };
            let mut l2 = self.read_l2(at).await?;
            let mut marked = Vec::new();
            let old = l2.clone();
            for found in self.entries(&old) {
                let (place, entry) = found?;
                for cluster in entry.clusters(&self.format) {
                    self.counts.raise(self.file, cluster).await?;
                }
                let (_, is_own, ..) = entry.parts();
                marked.extend(is_own.then_some(place));
            }
            let new = match marked.is_empty() {
                true => at,
                false => {
                    marked.into_iter().for_each(|place| set_mark(&mut l2, place, false));
                    self.move_l2(at, &l2).await?
                }
            };
            self.counts.raise(self.file, new >> self.format.cluster_bits).await?;
            *entry = new;
        }
        Ok(shared)
    }

    /// Writes an L2 table to another place. The old one has a user less.
    async fn move_l2(&mut self, old: u64, table: &[u8]) -> Result<u64, SwitchError> {
        let new = *self.l2_rooms.next().ok_or(Errno::EIO)?;
        self.take(new..new + 1).await?;
        self.file.write(new, table).await?;
        self.lower(old).await?;
        Ok(new)
    }

    /// The tables and data of a snapshot get one user less.
    async fn give_up_snapshot(&mut self, l1: Range<u64>) -> Result<(), SwitchError> {
        match self.lower_snapshot(l1).await.map_err(SwitchError::of_snapshot)? {
            Some(cluster) => Err(uncounted(cluster)),
            None => Ok(()),
        }
    }

    /// Lowers the counts of a snapshot's tables and data. Returns a cluster that has no users left and is used all the
    /// same, if there is one.
    async fn lower_snapshot(&mut self, l1: Range<u64>) -> Result<Option<u64>, SwitchError> {
        let entries = self.read_l1(&l1).await?;
        let uncounted = self.lower_tables(&entries).await?;
        self.lower_all(l1).await?;
        Ok(uncounted)
    }

    async fn read_l1(&mut self, l1: &Range<u64>) -> Result<Vec<u64>, SwitchError> {
        let bytes = self.file.read(l1.start, (l1.end - l1.start) as usize).await?;
        Ok((0..bytes.len() / ENTRY).map(|nth| entry_at(&bytes, nth)).collect())
    }

    /// Lowers the counts of L2 tables and of the data behind them, and returns what [`lower_snapshot`](Self::lower_snapshot)
    /// does.
    async fn lower_tables(&mut self, l1: &[u64]) -> Result<Option<u64>, SwitchError> {
        for entry in l1 {
            let Some((at, _)) = table(*entry, &self.format)? else { continue };
            let l2 = self.read_l2(at).await?;
            // What other users of the table lead to stays in use too.
            let is_used = self.lower(at).await? > 0;
            for found in self.entries(&l2) {
                let (_, entry) = found?;
                for cluster in entry.clusters(&self.format) {
                    let left = self.counts.lower(self.file, cluster).await?;
                    if is_used && left == 0 {
                        return Ok(Some(cluster));
                    }
                }
            }
        }
        Ok(None)
    }

    /// The tables and data of a snapshot get another user, the disk. Returns the L1 table for that.
    async fn share_snapshot(&mut self, snapshot: &Applied) -> Result<Vec<u64>, SwitchError> {
        let mut l1 = self.read_l1(&snapshot.l1).await?;
        l1.resize(snapshot.entries, 0);
        for entry in &mut l1 {
            let Some((at, _)) = table(*entry, &self.format)? else { continue };
            let l2 = self.read_l2(at).await?;
            for found in self.entries(&l2) {
                let (_, entry) = found?;
                // The mark has gone with the making of the snapshot. A write would change both.
                if let (Some(host), true, ..) = entry.parts() {
                    let what = format_args!("cluster {host:#x} of a snapshot may be overwritten");
                    return Err(Stop::damaged(what).into());
                }
                for cluster in entry.clusters(&self.format) {
                    self.counts.raise(self.file, cluster).await?;
                }
            }
            self.counts.raise(self.file, at >> self.format.cluster_bits).await?;
            *entry = at;
        }
        Ok(l1)
    }

    /// Marks what only the disk uses from now on, and checks that all of it is counted. Returns the new L1 table.
    async fn own(&mut self, l1: &[u64]) -> Result<Vec<u64>, SwitchError> {
        let mut own = l1.to_vec();
        for entry in &mut own {
            let Some((at, _)) = table(*entry, &self.format)? else { continue };
            if self.counts.of(self.file, at >> self.format.cluster_bits).await? > 1 {
                // All clusters behind a shared table are shared.
                *entry = at;
                continue;
            }
            let mut l2 = self.read_l2(at).await?;
            let old = l2.clone();
            for found in self.entries(&old) {
                let (place, entry) = found?;
                let mut is_single = true;
                for cluster in entry.clusters(&self.format) {
                    is_single &= self.counts.of(self.file, cluster).await? == 1;
                }
                if let (Some(_), false, ..) = entry.parts()
                    && is_single
                {
                    set_mark(&mut l2, place, true);
                }
            }
            let new = if l2 == old { at } else { self.move_l2(at, &l2).await? };
            *entry = new | COPIED;
        }
        Ok(own)
    }
}

/// Marks the cluster of an entry, which begins at that byte of the table, as one that may be overwritten, or not.
fn set_mark(l2: &mut [u8], at: usize, is_own: bool) {
    let raw = entry_at(l2, at / ENTRY) & !COPIED | if is_own { COPIED } else { 0 };
    if let Some(descriptor) = l2.get_mut(at..at + ENTRY) {
        descriptor.copy_from_slice(&raw.to_be_bytes());
    }
}
