//! Reading and writing: the guest's memory goes to, and comes from, where the image maps the data.

use std::ops::Range;
use std::sync::atomic::Ordering;

use event_loop::{AlignedBuf, IoBufs};
use nix::errno::Errno;

use super::context::{Channels, Transfer};
use super::core::Reserved;
use super::image::Image;
use crate::request::Op;

/// Segments of a part of a request's memory; the file driver takes as many as there are.
const SEGMENTS: usize = usize::MAX;
/// Of memory of ours, bytes.
const ALIGN: usize = 4096;
/// Most bytes that are read although they are overwritten, where one read then replaces two.
const READ_OVER: usize = 16 << 10;

/// Where a part of the disk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// In the data's file, from that byte on. `own`: it may be overwritten there.
    Data { at: u64, own: bool },
    /// Nowhere, so the backing image shows, or zeroes where there is none.
    Nowhere,
    /// Nowhere: it reads as zeroes, whatever lies behind.
    Zeroes,
    /// Compressed.
    Compressed,
}

impl Image {
    /// Where the range begins to be, and how many of its bytes are there. Not empty, and within the disk.
    pub(super) async fn find(
        &self,
        channels: &Channels,
        range: Range<u64>,
    ) -> Result<(Place, u64), Errno> {
        let len = range.end - range.start;
        match self.engine(channels, |engine| engine.find(range.start, len)).await? {
            (_, 0) => Err(Errno::EIO),
            found => Ok(found),
        }
    }

    /// As [`find`](Self::find), for a request that changes the bytes where they are. Damaged metadata that leads to
    /// other metadata fails it.
    pub(super) async fn find_to_change(
        &self,
        channels: &Channels,
        range: Range<u64>,
    ) -> Result<(Place, u64), Errno> {
        let len = range.end - range.start;
        match self.engine(channels, |engine| engine.find_to_change(range.start, len)).await? {
            (_, 0) => Err(Errno::EIO),
            found => Ok(found),
        }
    }

    /// Fills `bufs` from the disk's bytes from `offset` on. Who calls it keeps the mapping in place.
    pub(super) async fn read(
        &self,
        channels: &Channels,
        offset: u64,
        bufs: &mut IoBufs,
    ) -> Result<(), Errno> {
        let mut transfers = Vec::new();
        let found = self.read_parts(channels, offset, bufs, &mut transfers).await;
        // Whatever came of it, the memory is ours until all of them are done.
        found.and(all(transfers).await)
    }

    /// Begins reads into the parts of `bufs`, and fills those that need none.
    async fn read_parts(
        &self,
        channels: &Channels,
        offset: u64,
        bufs: &mut IoBufs,
        transfers: &mut Vec<Transfer>,
    ) -> Result<(), Errno> {
        let len = bufs.len();
        let mut at = 0;
        while at < len {
            let start = offset + at as u64;
            let (place, found) = self.find(channels, start..offset + len as u64).await?;
            // No more than what is left of the memory.
            let found = found as usize;
            match place {
                Place::Data { at: host, .. } if found == len => {
                    // All of it, as nearly always.
                    let whole = std::mem::take(bufs);
                    let read = Transfer::start(channels.data(), Op::Read, host, len as u64, whole);
                    let (result, whole) = read.await;
                    *bufs = whole;
                    return result;
                }
                Place::Data { at: host, .. } => {
                    let part = part(bufs, at, found);
                    let read = Transfer::start(channels.data(), Op::Read, host, found as u64, part);
                    transfers.push(read);
                }
                Place::Nowhere => {
                    transfers.extend(self.read_behind(channels, start, bufs, at, found))
                }
                Place::Zeroes => bufs.zero(at, found),
                Place::Compressed => self.read_compressed(channels, start, bufs, at, found).await?,
            }
            at += found;
        }
        Ok(())
    }

    /// Reads what lies behind the image, zeroes past its end.
    fn read_behind(
        &self,
        channels: &Channels,
        start: u64,
        bufs: &mut IoBufs,
        at: usize,
        len: usize,
    ) -> Option<Transfer> {
        let Some((backing, size)) = &channels.backing else {
            bufs.zero(at, len);
            return None;
        };
        let there = size.saturating_sub(start).min(len as u64) as usize;
        bufs.zero(at + there, len - there);
        let read = |part| Transfer::start(backing, Op::Read, start, there as u64, part);
        (there > 0).then(|| read(part(bufs, at, there)))
    }

    /// Writes `bufs` over the disk's bytes from `offset` on.
    pub(super) async fn write(
        &self,
        channels: &Channels,
        offset: u64,
        bufs: &mut IoBufs,
        fua: bool,
    ) -> Result<(), Errno> {
        let end = offset + bufs.len() as u64;
        {
            let _mapping = self.claim(offset..end, false).await;
            // What the metadata say has to be on stable storage too.
            let at_once = fua && self.is_stable();
            if self.overwrite(channels, offset, bufs, at_once).await? {
                if fua && !at_once {
                    self.flush(channels).await?;
                }
                return self.commit(channels).await;
            }
        }
        let _change = self.claim(offset..end, true).await;
        self.write_anew(channels, offset, bufs).await?;
        if fua {
            self.flush(channels).await?;
        }
        self.commit(channels).await
    }

    /// Writes where the data is already. `false`: not all of it may be overwritten, nothing is done.
    async fn overwrite(
        &self,
        channels: &Channels,
        offset: u64,
        bufs: &mut IoBufs,
        fua: bool,
    ) -> Result<bool, Errno> {
        let len = bufs.len();
        let op = Op::Write { fua };
        let mut places = Vec::new();
        let mut at = 0;
        while at < len {
            let (place, found) =
                self.find_to_change(channels, offset + at as u64..offset + len as u64).await?;
            let Place::Data { at: host, own: true } = place else { return Ok(false) };
            if found as usize == len {
                let whole = std::mem::take(bufs);
                let (result, whole) = self.store(channels, op, host, whole).await;
                *bufs = whole;
                return result.map(|()| true);
            }
            places.push((host, at, found as usize));
            at += found as usize;
        }
        let parts = places.into_iter().map(|(host, at, len)| (host, part(bufs, at, len)));
        all(parts.map(|(host, part)| self.store(channels, op, host, part)).collect()).await?;
        Ok(true)
    }

    /// A write to the data's file that begins now.
    fn store(&self, channels: &Channels, op: Op, host: u64, bufs: IoBufs) -> Transfer {
        let ticket = self.shared.begin_write();
        Transfer::start_write(channels.data(), op, host, bufs.len() as u64, bufs, ticket)
    }

    /// Writes where there is no room yet, too. Who calls it has the clusters to himself.
    pub(super) async fn write_anew(
        &self,
        channels: &Channels,
        offset: u64,
        bufs: &IoBufs,
    ) -> Result<(), Errno> {
        let len = bufs.len();
        let op = Op::Write { fua: false };
        let mut at = 0;
        while at < len {
            let start = offset + at as u64;
            let (place, found) = self.find_to_change(channels, start..offset + len as u64).await?;
            let memory = part(bufs, at, found as usize);
            match place {
                Place::Data { at: host, own: true } => {
                    self.store(channels, op, host, memory).await.0?;
                }
                Place::Data { .. } | Place::Nowhere | Place::Zeroes | Place::Compressed => {
                    let _allocating = Allocating::new(self);
                    self.allocate(channels, start, &memory, place).await?;
                }
            }
            at += found as usize;
        }
        Ok(())
    }

    /// Writes to new clusters, as many at once as follow each other in the file.
    async fn allocate(
        &self,
        channels: &Channels,
        start: u64,
        memory: &IoBufs,
        place: Place,
    ) -> Result<(), Errno> {
        self.limit(channels).await?;
        let end = start + memory.len() as u64;
        let mut at = start;
        while at < end {
            let room = self.engine(channels, |engine| engine.room(at..end)).await?;
            let (there, is_fresh) = (room.written.clone(), room.is_fresh);
            let mut reserved = Reserved::new(self, room);
            if is_fresh {
                self.extend(channels).await;
            }
            let part_end = end.min(there.end);
            let data = part(memory, (at - start) as usize, (part_end - at) as usize);
            let is_zero = match place {
                Place::Nowhere => !shows_behind(channels, there.start),
                Place::Zeroes => true,
                Place::Data { .. } | Place::Compressed => false,
            };
            // Around the data there are zeroes in the file already, or nothing yet. Encrypted, zeroes are noise.
            let (first, data) = match is_zero && is_fresh && !channels.is_encrypted {
                true => (at, data),
                false => (there.start, self.fill(channels, there.clone(), at, data).await?),
            };
            let host = reserved.room.host + first % self.cluster;
            reserved.is_writing = true;
            let (written, _) = self.store(channels, Op::Write { fua: false }, host, data).await;
            reserved.is_writing = false;
            written?;
            let mut next = there.start;
            while reserved.room.clusters > 0 {
                let host = reserved.room.host;
                let mapped = self.engine(channels, |engine| {
                    // With the engine, so that who writes out the metadata knows.
                    self.wrote_new_data();
                    engine.map(next..there.end, host)
                });
                let mapped = mapped.await?;
                reserved.advance(mapped);
                next += mapped * self.cluster - next % self.cluster;
            }
            at = part_end;
        }
        Ok(())
    }

    /// The data at `at`, and what was around it before in `whole`.
    async fn fill(
        &self,
        channels: &Channels,
        whole: Range<u64>,
        at: u64,
        data: IoBufs,
    ) -> Result<IoBufs, Errno> {
        let end = at + data.len() as u64;
        // Nothing is asked of what lies past the disk's end, and zeroes are written there.
        let last = whole.end.min(self.size()).max(end);
        let (before, after) = (whole.start..at, end..last);
        let all = match data.len() <= READ_OVER && !before.is_empty() && !after.is_empty() {
            // If it fails: only the overwritten part may be unreadable.
            true => self.around(channels, whole.start..last).await.ok(),
            false => None,
        };
        let (mut filled, behind) = match all {
            Some(all) => {
                let gap = (end - whole.start) as usize;
                let behind = part(&all, gap, all.len() - gap);
                (part(&all, 0, (at - whole.start) as usize), behind)
            }
            None => (self.around(channels, before).await?, self.around(channels, after).await?),
        };
        filled.append(&data);
        filled.append(&behind);
        let rest = (whole.end - last) as usize;
        filled.append(&AlignedBuf::io_bufs(rest, ALIGN).ok_or(Errno::ENOMEM)?);
        Ok(filled)
    }

    /// What the disk has in a range beside what is written.
    async fn around(&self, channels: &Channels, range: Range<u64>) -> Result<IoBufs, Errno> {
        let len = (range.end - range.start) as usize;
        let mut bufs = channels.scratch.take(len).ok_or(Errno::ENOMEM)?;
        self.read(channels, range.start, &mut bufs).await?;
        Ok(bufs)
    }
}

/// Whether the image behind has anything from that byte on.
fn shows_behind(channels: &Channels, at: u64) -> bool {
    channels.backing.as_ref().is_some_and(|(_, size)| at < *size)
}

/// A request that writes to new clusters.
pub(super) struct Allocating<'a>(&'a Image);

impl<'a> Allocating<'a> {
    pub(super) fn new(image: &'a Image) -> Allocating<'a> {
        image.allocating.fetch_add(1, Ordering::Relaxed);
        Allocating(image)
    }
}

impl Drop for Allocating<'_> {
    fn drop(&mut self) {
        self.0.allocating.fetch_sub(1, Ordering::Relaxed);
    }
}

pub(super) fn part(bufs: &IoBufs, at: usize, len: usize) -> IoBufs {
    let mut part = IoBufs::new();
    part.set_part(bufs, at, len, SEGMENTS);
    part
}

/// Waits for all, and for the rest also when one has failed.
async fn all(transfers: Vec<Transfer>) -> Result<(), Errno> {
    let mut result = Ok(());
    for transfer in transfers {
        result = result.and(transfer.await.0);
    }
    result
}
