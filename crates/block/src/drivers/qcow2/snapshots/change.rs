//! Making and deleting internal snapshots of an image in use.
//!
//! All requests of all loops wait: the whole disk is claimed. All metadata is written to the file. What the change needs is
//! [prepared](engine::prepare) beside the tables in use, then one sector of the header leads to it. A kill or a power cut leaves
//! the image before the change or after it, besides clusters that are counted and not used.

use std::ops::Range;
use std::time::SystemTime;

use event_loop::sync::lock;
use event_loop::{AlignedBuf, IoBufs, take_turns};
use nix::errno::Errno;

use super::{MAX_NAME, MAX_SNAPSHOTS, MAX_TABLE, Snapshot, places};
use crate::drivers::qcow2::context::{Channels, Transfer};
use crate::drivers::qcow2::core::Reserved;
use crate::drivers::qcow2::engine::{
    self, Roots, SnapshotChange, SwitchError, SwitchRooms, TableFile,
};
use crate::drivers::qcow2::image::Image;
use crate::drivers::qcow2::steps::{SECTOR, read};
use crate::drivers::qcow2::storage::sync;
use crate::node::{InternalSnapshot, SnapshotError};
use crate::request::Op;

/// Tries to find neighbouring clusters among those that are free.
const TRIES: usize = 16;
/// Clusters that are taken or given back until other tasks have their turn.
const AT_ONCE: usize = 256;

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
}

impl TableFile for File<'_> {
    async fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
        read(self.channels, offset, len).await
    }

    async fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        let mut bufs = AlignedBuf::io_bufs(bytes.len(), 4096).ok_or(Errno::ENOMEM)?;
        bufs.copy_in(0, bytes);
        self.send(Op::Write { fua: false }, offset, bytes.len() as u64, bufs).await
    }
}

impl File<'_> {
    async fn send(&self, op: Op, offset: u64, len: u64, bufs: IoBufs) -> Result<(), Errno> {
        let ticket = self.image.shared.begin_write();
        Transfer::start_write(&self.channels.file, op, offset, len, bufs, ticket).await.0
    }
}

/// Clusters that are counted and that nothing leads to.
struct Rooms<'a> {
    image: &'a Image,
    channels: &'a Channels,
    counted: Vec<u64>,
}

impl Rooms<'_> {
    /// Takes clusters that follow each other. Returns the first byte.
    async fn take(&mut self, clusters: u64) -> Result<u64, Errno> {
        let (image, channels) = (self.image, self.channels);
        if clusters == 0 {
            return Ok(0);
        }
        // Too small ones are held, so that they are not found again.
        let mut small = Vec::new();
        for _ in 0..TRIES {
            let room = image.engine(channels, |engine| engine.reserve(clusters)).await?;
            let (host, found) = (room.host, room.clusters);
            let mut reserved = Reserved::new(image, room);
            if found < clusters {
                small.push(reserved);
                continue;
            }
            while reserved.room.clusters > 0 {
                let host = reserved.room.host;
                image.engine(channels, |engine| engine.use_reserved(host)).await?;
                reserved.advance(1);
                self.counted.push(host);
            }
            return Ok(host);
        }
        let host = image.engine(channels, |engine| engine.take(clusters)).await?;
        self.counted.extend((0..clusters).map(|nth| host + nth * image.cluster));
        Ok(host)
    }

    async fn take_ones(&mut self, all: &mut Vec<u64>, count: u64) -> Result<(), Errno> {
        while (all.len() as u64) < count {
            all.push(self.take(1).await?);
            if all.len().is_multiple_of(AT_ONCE) {
                self.image.limit(self.channels).await?;
                take_turns().await;
            }
        }
        Ok(())
    }

    async fn give_back(self) {
        for (nth, host) in self.counted.into_iter().enumerate() {
            if nth % AT_ONCE == AT_ONCE - 1 {
                take_turns().await;
            }
            // What is not given back is lost until the image is checked.
            let _ = self.image.engine(self.channels, |engine| engine.give_back(host)).await;
        }
    }
}

/// From the first change of the header on until the tables in memory are those that it leads to. Dropped before: nothing
/// must be written with the old tables.
struct Switching<'a> {
    image: &'a Image,
    is_over: bool,
}

impl Drop for Switching<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.image.damaged("changing its snapshots was cut short".to_owned(), None);
        }
    }
}

impl Image {
    /// The internal snapshots, as QMP tells of them.
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
    /// `EINVAL`: the reference counts have too few bits. `EFBIG`: there are too many snapshots.
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
        told.id = ids.max().unwrap_or_default().saturating_add(1).to_string();
        if all.len() >= MAX_SNAPSHOTS {
            return Err(Errno::EFBIG.into());
        }
        let (l1_len, _) = lock(&self.core).engine.lens();
        let size = self.size();
        self.change(channels, |l1| {
            let made = l1.unwrap_or_default();
            all.push(Snapshot::new(told, made..made + l1_len, size));
            (SnapshotChange::Make(made), all)
        })
        .await
    }

    /// Deletes a snapshot. On stable storage on return.
    ///
    /// # Errors
    ///
    /// `ENOENT`: there is none with that id.
    pub(in super::super) async fn delete_snapshot(
        &self,
        channels: &Channels,
        id: &str,
    ) -> Result<(), SnapshotError> {
        let _turn = self.resizing.lock().await;
        let _all = self.claim(0..self.size(), true).await;
        let mut all = lock(&self.snapshots).all.clone();
        let at = all.iter().position(|snapshot| snapshot.told.id == id);
        let deleted = all.remove(at.ok_or(Errno::ENOENT)?);
        self.change(channels, |_| (SnapshotChange::Delete(deleted.l1), all)).await
    }

    /// Changes the snapshots. The caller has claimed the whole disk. `change` gets the place for an L1 table.
    async fn change(
        &self,
        channels: &Channels,
        change: impl FnOnce(Option<u64>) -> (SnapshotChange, Vec<Snapshot>),
    ) -> Result<(), SnapshotError> {
        if self.damage.is_damaged() {
            return Err(Errno::EIO.into());
        }
        // Of tasks that have ended.
        self.shared.settle_writes().await;
        lock(&self.core).engine.release_coming();
        let mut rooms = Rooms { image: self, channels, counted: Vec::new() };
        match self.try_change(channels, &mut rooms, change).await {
            Ok(()) => Ok(()),
            Err(error) => {
                // They are in use if the header may lead to them.
                if !self.damage.is_damaged() {
                    rooms.give_back().await;
                }
                Err(error)
            }
        }
    }

    async fn try_change(
        &self,
        channels: &Channels,
        rooms: &mut Rooms<'_>,
        change: impl FnOnce(Option<u64>) -> (SnapshotChange, Vec<Snapshot>),
    ) -> Result<(), SnapshotError> {
        let (l1_len, _) = lock(&self.core).engine.lens();
        let clusters = |len: u64| len.div_ceil(self.cluster);
        let made = rooms.take(clusters(l1_len)).await?;
        let (change, all) = change(Some(made));
        let table: Vec<u8> = all.iter().flat_map(|snapshot| &snapshot.bytes).copied().collect();
        if table.len() as u64 > MAX_TABLE {
            return Err(Errno::EFBIG.into());
        }
        let mut taken = SwitchRooms {
            // Of a snapshot that is deleted, none is needed.
            l1: match change {
                SnapshotChange::Make(_) => rooms.take(clusters(l1_len)).await?,
                SnapshotChange::Delete(_) => made,
            },
            snapshots: rooms.take(clusters(table.len() as u64)).await?,
            ..SwitchRooms::default()
        };
        let (l2, _) = lock(&self.core).engine.tables();
        rooms.take_ones(&mut taken.l2, l2).await?;
        // Each room that is taken may add blocks, and have their table grow.
        let mut len = 0;
        loop {
            let ((_, blocks), (_, now)) = {
                let core = lock(&self.core);
                (core.engine.tables(), core.engine.lens())
            };
            if taken.blocks.len() as u64 == blocks && len == now {
                break;
            }
            if len != now {
                // What is too small is as good as any other room.
                taken.l2.extend((0..clusters(len)).map(|nth| taken.refcounts + nth * self.cluster));
                (taken.refcounts, len) = (rooms.take(clusters(now)).await?, now);
            }
            rooms.take_ones(&mut taken.blocks, blocks).await?;
        }
        // From here on the tables in the file are those in memory.
        self.flush(channels).await?;
        let _turn = self.flushing.lock().await;
        let is_in_file = self.shared.metadata.as_ref().is_some_and(|metadata| metadata.len() == 0);
        if !self.is_clean() || !is_in_file {
            return Err(Errno::EBUSY.into());
        }
        let old = lock(&self.core).engine.roots();
        let mut file = File { image: self, channels };
        let old_table = lock(&self.snapshots).table.clone();
        let prepared = engine::prepare(&mut file, &old, &change, (old_table, &table), &taken).await;
        let (mut roots, free) = prepared.map_err(|error| match error {
            SwitchError::Os(errno) => SnapshotError::from(errno),
            SwitchError::Damaged(why) => SnapshotError::Damaged(why),
        })?;
        let table = taken.snapshots..taken.snapshots + table.len() as u64;
        roots.snapshots = (all.len() as u32, table.start);
        roots.places = places(&all, table.clone());
        sync(channels).await?;
        self.switch(&file, roots, free).await?;
        *lock(&self.snapshots) = Snapshots { all, table };
        Ok(())
    }

    /// Has the header lead to other tables.
    async fn switch(&self, file: &File<'_>, roots: Roots, free: u64) -> Result<(), Errno> {
        let channels = file.channels;
        let before = read(channels, 0, SECTOR).await?;
        let before: [u8; SECTOR] = *before.first_chunk().ok_or(Errno::EIO)?;
        let mut after = before;
        roots.put_into(&mut after);
        let mut switching = Switching { image: self, is_over: false };
        let written = put_header(file, &after).await;
        if let Err(errno) = written {
            // Nothing of the new tables is used if the old header is on stable storage.
            switching.is_over = put_header(file, &before).await.is_ok();
            return Err(errno);
        }
        self.shared.metadata.iter().for_each(|metadata| metadata.switch(&roots));
        let mut tables = roots.collect(free);
        lock(&self.core).engine.switch(&mut tables);
        switching.is_over = true;
        Ok(())
    }
}

/// As much of a name as an image takes. The rest is cut off, as in QEMU.
fn cut(name: &str) -> &str {
    let most = (0..=MAX_NAME.min(name.len())).rev().find(|at| name.is_char_boundary(*at));
    &name[..most.unwrap_or_default()]
}

/// Writes the first sector of the header. On stable storage on return.
async fn put_header(file: &File<'_>, sector: &[u8; SECTOR]) -> Result<(), Errno> {
    let mut bufs = AlignedBuf::io_bufs(SECTOR, 4096).ok_or(Errno::ENOMEM)?;
    bufs.copy_in(0, sector);
    file.send(Op::Write { fua: false }, 0, SECTOR as u64, bufs).await?;
    sync(file.channels).await
}
