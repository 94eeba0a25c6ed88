//! The state of an image that all loops share: its metadata in memory, and the ranges claimed by requests.
//!
//! One lock, held for the length of a call in memory. No task waits under it.

use std::future::poll_fn;
use std::ops::Range;
use std::task::{Poll, Waker};

use event_loop::sync::lock;
use nix::errno::Errno;

use super::context::Channels;
use super::engine::{Engine, Room, Stop, Table};
use super::image::Image;
use super::locks::{Ranges, Taken};
use super::metadata::Metadata;
use super::steps::{SECTOR, read_part};
use crate::request::Part;

/// Bytes of a table that is read and copied in a unit of the meter.
const COPIED_IN_UNIT: u64 = 8192;

/// The state that all loops share.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) engine: Engine,
    pub(super) ranges: Ranges,
    /// Tables that are being read, and the other tasks that wait for them.
    reading: Vec<(Table, Vec<Waker>)>,
}

impl Core {
    pub(super) fn new(engine: Engine) -> Core {
        Core { engine, ranges: Ranges::default(), reading: Vec::new() }
    }
}

/// A part of the disk that is claimed for a request, until this is dropped.
pub(super) struct Claim<'a> {
    image: &'a Image,
    taken: Option<Taken>,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if let Some(taken) = self.taken.take() {
            self.image.give_back(taken);
        }
    }
}

/// A request that waits for its turn.
struct Turn<'a> {
    image: &'a Image,
    number: Option<u64>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            let wakers = lock(&self.image.core).ranges.stop_waiting(number);
            wakers.into_iter().for_each(Waker::wake);
        }
    }
}

/// A table that this task reads. Dropping it wakes the tasks that wait for the table.
struct Reading<'a> {
    image: &'a Image,
    table: Table,
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        let wakers = {
            let reading = &mut lock(&self.image.core).reading;
            let at = reading.iter().position(|(table, _)| *table == self.table);
            at.map(|at| reading.swap_remove(at).1)
        };
        wakers.into_iter().flatten().for_each(Waker::wake);
    }
}

/// Clusters for data that are not mapped yet. Unused ones are released when this is dropped.
pub(super) struct Reserved<'a> {
    image: &'a Image,
    pub(super) room: Room,
    /// A write to the clusters is in flight: dropped now, they are free only after that.
    pub(super) is_writing: bool,
}

impl<'a> Reserved<'a> {
    pub(super) fn new(image: &'a Image, room: Room) -> Reserved<'a> {
        Reserved { image, room, is_writing: false }
    }

    /// Records that the first clusters are mapped.
    pub(super) fn advance(&mut self, clusters: u64) {
        self.room.host += clusters * self.image.cluster;
        self.room.clusters -= clusters;
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        let Room { host, clusters, is_reserved, .. } = self.room;
        // The file may lead to the clusters of a change that was cut short.
        if is_reserved && clusters > 0 && !self.image.damage.is_cut_off() {
            let engine = &mut lock(&self.image.core).engine;
            match self.is_writing {
                true => engine.give_up_room(host, clusters),
                false => engine.release_room(host, clusters),
            }
        }
    }
}

impl Image {
    /// Waits for the clusters of a range, shared or exclusive.
    pub(super) async fn claim(&self, range: Range<u64>, is_alone: bool) -> Claim<'_> {
        let range = self.clusters(range);
        if range.is_empty() {
            return Claim { image: self, taken: None };
        }
        let mut turn = Turn { image: self, number: None };
        let taken =
            poll_fn(|cx| lock(&self.core).ranges.poll_take(&range, is_alone, &mut turn.number, cx));
        Claim { image: self, taken: Some(taken.await) }
    }

    pub(super) fn give_back(&self, taken: Taken) {
        let wakers = lock(&self.core).ranges.give_back(taken);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Calls the engine, and reads the tables that the call needs. Records changed sectors before any other
    /// task can call the engine.
    ///
    /// # Errors
    ///
    /// `EIO`: the metadata is damaged, or the image is [cut off](Image::cut_off).
    pub(super) async fn engine<T>(
        &self,
        channels: &Channels,
        mut call: impl FnMut(&mut Engine) -> Result<T, Stop>,
    ) -> Result<T, Errno> {
        loop {
            channels.meter.turn().await;
            let done = {
                let mut core = lock(&self.core);
                // Under the lock: a claim that a change of the snapshots gave back was given back after the mark.
                if self.damage.is_cut_off() {
                    return Err(Errno::EIO);
                }
                let before = core.engine.cost();
                let done = call(&mut core.engine);
                let cost = core.engine.cost().wrapping_sub(before);
                channels.meter.charge(1 + cost / 1000);
                self.keep(&mut core.engine);
                done
            };
            match done {
                Ok(done) => return Ok(done),
                Err(Stop::Read(table)) => self.read_table(channels, table).await?,
                Err(Stop::Full) => return Err(Errno::EFBIG),
                Err(Stop::Again) => {}
                Err(Stop::Busy) => drop(self.extending.lock().await),
                Err(Stop::Unbacked(clusters)) => self.back(channels, clusters).await?,
                Err(Stop::Damaged(why)) => return Err(self.damaged(why, None)),
                Err(Stop::Overlap { clusters, owner }) => {
                    return Err(self.overlapped(clusters, owner));
                }
            }
        }
    }

    /// Records the sectors that a call of the engine has changed.
    pub(super) fn keep(&self, engine: &mut Engine) {
        if engine.has_changed()
            && let Some(metadata) = &self.shared.metadata
        {
            metadata.keep(engine);
            self.changed();
        }
    }

    /// Reads a table, or waits until another task has read it.
    async fn read_table(&self, channels: &Channels, table: Table) -> Result<(), Errno> {
        let mut is_mine = false;
        let mut asked = false;
        poll_fn(|cx| {
            let reading = &mut lock(&self.core).reading;
            match reading.iter_mut().find(|(other, _)| *other == table) {
                Some((_, waiting)) => {
                    waiting.push(cx.waker().clone());
                    asked = true;
                    Poll::Pending
                }
                // The other task has read it or failed; the caller finds out.
                None if asked => Poll::Ready(()),
                None => {
                    reading.push((table, Vec::new()));
                    is_mine = true;
                    Poll::Ready(())
                }
            }
        })
        .await;
        if !is_mine {
            return Ok(());
        }
        let _reading = Reading { image: self, table };
        let metadata = self.shared.metadata.as_ref();
        let part = match table {
            Table::L2(..) => Part::L2,
            Table::Block(..) => Part::RefcountBlock,
        };
        let place = (part, table.offset());
        // Before the read, as the number of those that end in an iteration is then bounded, too.
        channels.meter.turn().await;
        channels.meter.charge(1 + self.cluster / COPIED_IN_UNIT);
        let bytes = read_kept(channels, metadata, place, self.cluster as usize).await?;
        lock(&self.core).engine.insert(table, bytes.into());
        Ok(())
    }
}

/// Reads a part of the file with the changes that were not written yet.
pub(super) async fn read_kept(
    channels: &Channels,
    metadata: Option<&Metadata>,
    (part, offset): (Part, u64),
    len: usize,
) -> Result<Vec<u8>, Errno> {
    // Taken before the file is read: a change that is written meanwhile is included here.
    let kept = metadata.map(|kept| kept.kept(offset..offset + len as u64));
    let mut bytes = read_part(channels, part, offset, len).await?;
    for (at, sector) in kept.into_iter().flatten() {
        let at = at.saturating_sub(offset) as usize;
        if let Some(bytes) = bytes.get_mut(at..) {
            let len = bytes.len().min(SECTOR);
            bytes[..len].copy_from_slice(&sector[..len]);
        }
    }
    Ok(bytes)
}
