//! Making, deleting and applying internal snapshots of an image in use.
//!
//! All requests of all loops wait: the whole disk is claimed. All metadata is written to the file. What the change needs is
//! [prepared](engine::prepare) beside the tables in use, then one sector of the header leads to it. A kill or a power cut leaves
//! the image before the change or after it. What a deleted snapshot had is given back to the node below after that.

use std::ops::Range;
use std::time::SystemTime;

use event_loop::sync::lock;
use event_loop::{AlignedBuf, take_turns};
use nix::errno::Errno;

use super::{MAX_NAME, MAX_SNAPSHOTS, MAX_TABLE, Snapshot, places};
use crate::drivers::qcow2::context::{Channels, Transfer};
use crate::drivers::qcow2::core::Reserved;
use crate::drivers::qcow2::engine::{
    self, Applied, Room, Roots, SnapshotChange, SwitchError, SwitchRooms, TableFile,
};
use crate::drivers::qcow2::image::Image;
use crate::drivers::qcow2::rooms::Rooms;
use crate::drivers::qcow2::steps::{ENTRY, SECTOR, read};
use crate::drivers::qcow2::storage::sync;
use crate::node::{InternalSnapshot, SnapshotError};
use crate::request::Part;

/// Clusters that are reserved until other tasks have their turn.
const AT_ONCE: u64 = 1024;
/// Counts that are looked at in a unit of the meter.
const IN_UNIT: u64 = 32;

/// The snapshots of an image in use.
#[derive(Debug, Default)]
pub(in super::super) struct Snapshots {
    pub(in super::super) all: Vec<Snapshot>,
    /// Their table in the file, bytes.
    pub(in super::super) table: Range<u64>,
}

/// The file of an image that nothing else changes.
struct File<'a> {
    image: &'a Image,
    channels: &'a Channels,
    /// Counts that were looked at since they were charged for.
    looked: u64,
}

impl TableFile for File<'_> {
    async fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
        read(self.channels, offset, len).await
    }

    async fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        let mut bufs = AlignedBuf::io_bufs(bytes.len(), 4096).ok_or(Errno::ENOMEM)?;
        bufs.copy_in(0, bytes);
        let ticket = self.image.shared.begin_write();
        Transfer::start_part_write(self.channels, Part::Other, offset, bufs, ticket).await.0
    }

    async fn look(&mut self) {
        self.looked += 1;
        if self.looked.is_multiple_of(IN_UNIT) {
            self.channels.meter.charge(1);
            self.channels.meter.turn().await;
        }
    }
}

impl Rooms<'_> {
    /// Takes clusters, until there are so many.
    async fn take_ones(&mut self, all: &mut Vec<u64>, count: u64) -> Result<(), Errno> {
        while (all.len() as u64) < count {
            let room = self.reserve((count - all.len() as u64).min(AT_ONCE)).await?;
            all.extend((0..room.clusters).map(|nth| room.host + nth * self.image.cluster));
            take_turns().await;
        }
        Ok(())
    }
}

/// From the first change of the header on until the tables in memory are those that it leads to. Dropped before, the image
/// is [cut off](Image::cut_off), while the claim of the disk, the reserved clusters and the locks are still held.
struct Switching<'a> {
    image: &'a Image,
    is_over: bool,
}

impl Drop for Switching<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.image.cut_off("changing its snapshots was cut short".to_owned());
        }
    }
}

impl Image {
    /// The internal snapshots, as QMP shows them.
    pub(in super::super) fn list_snapshots(&self) -> Vec<InternalSnapshot> {
        lock(&self.snapshots).all.iter().map(|snapshot| snapshot.told.clone()).collect()
    }

    /// Whether there are internal snapshots.
    pub(in super::super) fn has_snapshots(&self) -> bool {
        !lock(&self.snapshots).all.is_empty()
    }

    /// Makes a snapshot of the disk with all requests that were answered. On stable storage on return.
    ///
    /// # Errors
    ///
    /// `EINVAL`: the reference counts have too few bits. `EFBIG`: there are too many snapshots. `EOVERFLOW`: no id is above
    /// those in use.
    pub(in super::super) async fn make_snapshot(
        &self,
        channels: &Channels,
        name: &str,
    ) -> Result<(), SnapshotError> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let mut told = InternalSnapshot {
            id: String::new(),
            name: cut(name).to_owned(),
            vm_state_size: 0,
            date: now,
            vm_clock: now,
            icount: None,
        };
        let _turn = self.resizing.lock().await;
        let _all = self.claim(0..self.size(), true).await;
        let mut all = lock(&self.snapshots).all.clone();
        let ids = all.iter().filter_map(|snapshot| snapshot.told.id.parse::<u64>().ok());
        told.id = next_id(ids)?.to_string();
        if all.len() >= MAX_SNAPSHOTS {
            return Err(Errno::EFBIG.into());
        }
        let (l1_len, _) = lock(&self.core).engine.lens();
        let size = self.size();
        self.change(channels, l1_len, |made| {
            all.push(Snapshot::new(told, made..made + l1_len, size));
            (SnapshotChange::Make(made), all)
        })
        .await
        .map(drop)
    }

    /// Deletes a snapshot. On stable storage on return. `pass`: the node below gets a discard of what becomes free.
    ///
    /// # Errors
    ///
    /// `ENOENT`: there is none with that id.
    pub(in super::super) async fn delete_snapshot(
        &self,
        channels: &Channels,
        id: &str,
        pass: bool,
    ) -> Result<(), SnapshotError> {
        let _turn = self.resizing.lock().await;
        let claim = self.claim(0..self.size(), true).await;
        let mut all = lock(&self.snapshots).all.clone();
        let at = all.iter().position(|snapshot| snapshot.told.id == id);
        let deleted = all.remove(at.ok_or(Errno::ENOENT)?);
        if let Some(why) = deleted.fault {
            return Err(SnapshotError::OfSnapshot(why.to_owned()));
        }
        let (l1_len, _) = lock(&self.core).engine.lens();
        let delete = SnapshotChange::Delete(deleted.l1);
        let freed = self.change(channels, l1_len, |_| (delete, all)).await?;
        drop(claim);
        if pass {
            self.punch_free(channels, freed).await;
        }
        Ok(())
    }

    /// The disk becomes what it was at a snapshot, with the size of then. On stable storage on return. `pass`: as of
    /// [`delete_snapshot`](Self::delete_snapshot).
    ///
    /// # Errors
    ///
    /// `ENOENT`: there is none with that id. `EINVAL`: as of [`make_snapshot`](Self::make_snapshot).
    pub(in super::super) async fn apply_snapshot(
        &self,
        channels: &Channels,
        id: &str,
        pass: bool,
    ) -> Result<(), SnapshotError> {
        let _turn = self.resizing.lock().await;
        let claim = self.claim(0..self.size(), true).await;
        let all = lock(&self.snapshots).all.clone();
        let found = all.iter().find(|snapshot| snapshot.told.id == id).ok_or(Errno::ENOENT)?;
        if let Some(why) = found.fault {
            return Err(SnapshotError::OfSnapshot(why.to_owned()));
        }
        let (l1, size) = (found.l1.clone(), found.disk_size.unwrap_or(self.size()));
        let entries = size.div_ceil(self.reach());
        if !size.is_multiple_of(SECTOR as u64) || entries * ENTRY as u64 > l1.end - l1.start {
            return Err(SnapshotError::OfSnapshot("L1 table is too small".to_owned()));
        }
        let (l1_len, _) = lock(&self.core).engine.lens();
        let l1_len = l1_len.max(entries * ENTRY as u64);
        let applied = SnapshotChange::Apply(Applied { l1, entries: entries as usize, size });
        let freed = self.change(channels, l1_len, |_| (applied, all)).await?;
        self.set_size(size);
        drop(claim);
        if pass {
            self.punch_free(channels, freed).await;
        }
        Ok(())
    }

    /// The node below may give back clusters, as far as they are still free. They are reserved meanwhile.
    async fn punch_free(&self, channels: &Channels, runs: Vec<Range<u64>>) {
        for Range { start: mut at, end } in runs {
            while at < end && !self.damage.is_damaged() {
                let found = self.engine(channels, |engine| engine.reserve_within(at..end)).await;
                // What cannot be looked up stays as it is: the image uses the clusters again.
                let Ok(Some(room)) = found else { break };
                let Room { host, clusters, .. } = room.clone();
                let mut reserved = Reserved::new(self, room);
                reserved.is_writing = true;
                self.punch(channels, host, clusters * self.cluster).await;
                reserved.is_writing = false;
                at = host / self.cluster + clusters;
            }
            take_turns().await;
        }
    }

    /// Changes the snapshots. The caller has claimed the whole disk. `change` gets the place for an L1 table of `l1_len`
    /// bytes. Returns the clusters that have become free.
    async fn change(
        &self,
        channels: &Channels,
        l1_len: u64,
        change: impl FnOnce(u64) -> (SnapshotChange, Vec<Snapshot>),
    ) -> Result<Vec<Range<u64>>, SnapshotError> {
        if self.damage.is_damaged() {
            return Err(Errno::EIO.into());
        }
        // Of tasks that have ended.
        self.shared.settle_writes().await;
        lock(&self.core).engine.release_coming();
        let mut rooms = Rooms::new(self, channels);
        let changed = self.try_change(channels, &mut rooms, l1_len, change).await;
        // They are in use if the header may lead to them.
        if changed.is_err() && !self.damage.is_damaged() {
            rooms.give_back(&rooms.counted).await;
        }
        if let Err(SnapshotError::Damaged(why)) = &changed {
            self.damaged(why.clone(), None);
        }
        changed
    }

    async fn try_change(
        &self,
        channels: &Channels,
        rooms: &mut Rooms<'_>,
        l1_len: u64,
        change: impl FnOnce(u64) -> (SnapshotChange, Vec<Snapshot>),
    ) -> Result<Vec<Range<u64>>, SnapshotError> {
        let clusters = |len: u64| len.div_ceil(self.cluster);
        let made = rooms.take(clusters(l1_len)).await?;
        let (change, all) = change(made);
        let table: Vec<u8> = all.iter().flat_map(|snapshot| &snapshot.bytes).copied().collect();
        if table.len() as u64 > MAX_TABLE {
            return Err(Errno::EFBIG.into());
        }
        let mut taken = SwitchRooms {
            l1: match change {
                SnapshotChange::Make(_) => rooms.take(clusters(l1_len)).await?,
                // A snapshot that is deleted, or stays, needs none.
                SnapshotChange::Delete(_) | SnapshotChange::Apply(_) => made,
            },
            snapshots: rooms.take(clusters(table.len() as u64)).await?,
            ..SwitchRooms::default()
        };
        let (l2, _) = lock(&self.core).engine.tables();
        rooms.take_ones(&mut taken.l2, l2).await?;
        // Each room that is taken may add blocks, and have their table grow.
        let (mut len, before) = (0, rooms.counted.len());
        loop {
            let ((_, blocks), (_, now)) = {
                let core = lock(&self.core);
                (core.engine.tables(), core.engine.lens())
            };
            if taken.blocks.len() as u64 == blocks && len == now {
                break;
            }
            if len != now {
                let smaller = rooms.counted.split_off(before);
                rooms.give_back(&smaller).await;
                (taken.refcounts, len) = (rooms.take(clusters(now)).await?, now);
            }
            rooms.take_ones(&mut taken.blocks, blocks).await?;
        }
        // From here on the tables in the file are those in memory.
        self.flush(channels).await?;
        let _turn = self.flushing.lock().await;
        // A mark would be lost that another task writes to the same sector.
        let _committing = self.committing.lock().await;
        let is_in_file = self.shared.metadata.as_ref().is_some_and(|metadata| metadata.len() == 0);
        if !self.is_clean() || !is_in_file {
            return Err(Errno::EBUSY.into());
        }
        let old = lock(&self.core).engine.roots();
        let mut file = File { image: self, channels, looked: 0 };
        let old_table = lock(&self.snapshots).table.clone();
        // Dropped meanwhile, they are free only after the writes to them.
        rooms.set_writing(true);
        let prepared = engine::prepare(&mut file, &old, &change, (old_table, &table), &taken).await;
        rooms.set_writing(false);
        let (mut roots, free) = prepared.map_err(|error| match error {
            SwitchError::Os(errno) => SnapshotError::from(errno),
            SwitchError::Damaged(why) => SnapshotError::Damaged(why),
            SwitchError::OfSnapshot(why) => SnapshotError::OfSnapshot(why),
        })?;
        let table = taken.snapshots..taken.snapshots + table.len() as u64;
        roots.snapshots = (all.len() as u32, table.start);
        roots.places = places(&all, table.clone());
        sync(channels).await?;
        self.switch(&mut file, roots, free.all).await?;
        *lock(&self.snapshots) = Snapshots { all, table };
        Ok(free.runs)
    }

    /// Has the header lead to other tables.
    async fn switch(
        &self,
        file: &mut File<'_>,
        roots: Roots,
        free: Option<Range<u64>>,
    ) -> Result<(), Errno> {
        let channels = file.channels;
        let before = read(channels, 0, SECTOR).await?;
        let before: [u8; SECTOR] = *before.first_chunk().ok_or(Errno::EIO)?;
        let mut after = before;
        roots.put_into(&mut after);
        let mut switching = Switching { image: self, is_over: false };
        let written = file.write(0, &after).await;
        let is_refused = written == Err(Errno::ENOSPC);
        let written = match written {
            Ok(()) => sync(channels).await,
            written => written,
        };
        if let Err(errno) = written {
            // Nothing of the new tables is used if the old header is on stable storage.
            switching.is_over = match put_header(file, &before).await {
                Ok(()) => true,
                // A full store refuses the way back, too. That is not needed if the store kept the old header.
                Err(Errno::ENOSPC) if is_refused => {
                    read(channels, 0, SECTOR).await.is_ok_and(|sector| sector == before)
                }
                Err(_) => false,
            };
            return Err(errno);
        }
        self.shared.metadata.iter().for_each(|metadata| metadata.switch(&roots));
        let mut tables = roots.collect(free);
        lock(&self.core).engine.switch(&mut tables);
        switching.is_over = true;
        Ok(())
    }
}

/// An id above those in use. The highest one has none above it.
fn next_id(ids: impl Iterator<Item = u64>) -> Result<u64, Errno> {
    ids.max().unwrap_or_default().checked_add(1).ok_or(Errno::EOVERFLOW)
}

/// As much of a name as an image takes. The rest is cut off, as in QEMU.
fn cut(name: &str) -> &str {
    let most = (0..=MAX_NAME.min(name.len())).rev().find(|at| name.is_char_boundary(*at));
    &name[..most.unwrap_or_default()]
}

/// Writes the first sector of the header. On stable storage on return.
async fn put_header(file: &mut File<'_>, sector: &[u8; SECTOR]) -> Result<(), Errno> {
    file.write(0, sector).await?;
    sync(file.channels).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_id_is_given_twice() {
        assert_eq!(next_id([].into_iter()), Ok(1));
        assert_eq!(next_id([7, 2].into_iter()), Ok(8));
        assert_eq!(next_id([1, u64::MAX].into_iter()), Err(Errno::EOVERFLOW));
    }
}
