//! Reading and writing: the guest's memory goes to, and comes from, where the image maps the data.

use std::ops::Range;

use event_loop::{AlignedBuf, IoBufs};
use imago::ShallowMapping;
use imago::format::drivers::FormatDriverInstance;
use nix::errno::Errno;

use super::context::{Channels, Transfer};
use super::image::Image;
use crate::request::Op;

/// Segments of a part of a request's memory; the file driver takes as many as there are.
const SEGMENTS: usize = usize::MAX;
/// Of memory of ours, bytes.
const ALIGN: usize = 4096;

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
    pub(super) async fn find(&self, range: Range<u64>) -> Result<(Place, u64), Errno> {
        let len = range.end - range.start;
        let found = self.qcow2.get_mapping(range.start, len).await;
        let (mapping, found) = found.map_err(|error| self.failed(error))?;
        let place = match mapping {
            ShallowMapping::Raw { offset, writable, .. } => {
                Place::Data { at: offset, own: writable }
            }
            ShallowMapping::Zero { explicit: true, .. } => Place::Zeroes,
            ShallowMapping::Zero { explicit: false, .. } => Place::Nowhere,
            ShallowMapping::Special { .. } => Place::Compressed,
            // The disk became shorter, or something that a qcow2 image has not.
            _ => return Err(Errno::EIO),
        };
        match found.min(len) {
            0 => Err(Errno::EIO),
            found => Ok((place, found)),
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
            let (place, found) = self.find(start..offset + len as u64).await?;
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
                Place::Compressed => self.read_compressed(start, bufs, at, found).await?,
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

    /// Decompresses a part of the disk, cluster by cluster.
    async fn read_compressed(
        &self,
        mut start: u64,
        bufs: &mut IoBufs,
        mut at: usize,
        len: usize,
    ) -> Result<(), Errno> {
        let end = at + len;
        while at < end {
            let left = (self.cluster - start % self.cluster) as usize;
            let mut data = vec![0; left.min(end - at)];
            let read = self.qcow2.readv_special((&mut data[..]).into(), start).await;
            read.map_err(|error| self.failed(error))?;
            bufs.copy_in(at, &data);
            at += data.len();
            start += data.len() as u64;
        }
        Ok(())
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
            let _mapping = self.use_mapping(offset..end).await;
            // What the metadata say has to be on stable storage too.
            let at_once = fua && self.is_stable();
            if self.overwrite(channels, offset, bufs, at_once).await? {
                if fua && !at_once {
                    self.flush(channels).await?;
                }
                return Ok(());
            }
        }
        let change = self.change_mapping(offset..end).await?;
        self.write_anew(channels, offset, bufs).await?;
        drop(change);
        if fua {
            self.flush(channels).await?;
        }
        Ok(())
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
            let (place, found) = self.find(offset + at as u64..offset + len as u64).await?;
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
            let (place, found) = self.find(start..offset + len as u64).await?;
            let memory = part(bufs, at, found as usize);
            match place {
                Place::Data { at: host, own: true } => {
                    self.store(channels, op, host, memory).await.0?;
                }
                _ => self.allocate(channels, start, memory, place).await?,
            }
            at += found as usize;
        }
        Ok(())
    }

    /// Writes to new clusters: all of each, with what was around the data before.
    async fn allocate(
        &self,
        channels: &Channels,
        start: u64,
        memory: IoBufs,
        place: Place,
    ) -> Result<(), Errno> {
        let end = start + memory.len() as u64;
        let clusters = self.clusters(start..end);
        // Nothing is asked of what lies past the disk's end, and zeroes are written there.
        let last = clusters.end.min(self.size());
        let mut whole = self.around(channels, clusters.start..start).await?;
        whole.append(&memory);
        whole.append(&self.around(channels, end..last).await?);
        let rest = (clusters.end - last) as usize;
        whole.append(&AlignedBuf::io_bufs(rest, ALIGN).ok_or(Errno::ENOMEM)?);
        let mut at = clusters.start;
        while at < last {
            // A cluster that reads as zeroes may have a place that it keeps, one by one.
            let most = if place == Place::Zeroes { self.cluster } else { u64::MAX };
            let end = last.min(at.saturating_add(most));
            at = self.allocate_some(channels, at..end, clusters.start, &whole, place).await?;
        }
        Ok(())
    }

    /// Writes to as many new clusters of the range as follow each other in the file; returns where the
    /// next one begins. `whole` is what is to be on the disk from `first` on.
    async fn allocate_some(
        &self,
        channels: &Channels,
        range: Range<u64>,
        first: u64,
        whole: &IoBufs,
        place: Place,
    ) -> Result<u64, Errno> {
        loop {
            // What a compressed cluster has is given up.
            let gives_up = place == Place::Compressed;
            let changing = match gives_up {
                false => (Some(self.change_metadata(channels).await?), None),
                true => (None, Some(self.give_up_alone(channels, true).await?)),
            };
            let len = self.end(range.end) - range.start;
            let prepared = self.qcow2.prepare_data_mapping(range.start, len, true).await;
            let prepared = prepared.map_err(|error| self.failed(error))?;
            let end = range.start + prepared.length().min(len);
            if end == range.start {
                return Err(Errno::EIO);
            }
            // All of the last one.
            let len = self.clusters(range.start..end).end - range.start;
            let host = prepared.offset();
            if !self.may_write(host..host + len) {
                drop((prepared, changing));
                self.wait_for_metadata().await;
                continue;
            }
            if gives_up {
                self.give_up();
            }
            let data = part(whole, (range.start - first) as usize, len as usize);
            self.store(channels, Op::Write { fua: false }, host, data).await.0?;
            self.wrote_new_data();
            self.qcow2.commit_data_mapping(prepared).await.map_err(|error| self.failed(error))?;
            self.changed();
            return Ok(end);
        }
    }

    /// Whether new clusters may be written to: nothing in the file says that they are somebody else's.
    fn may_write(&self, host: Range<u64>) -> bool {
        let Some(metadata) = &self.shared.metadata else { return true };
        // With a data file each cluster has its own place for ever.
        self.has_data_file || (metadata.is_free() && metadata.forget(host))
    }

    /// What the disk has in a range beside what is written.
    async fn around(&self, channels: &Channels, range: Range<u64>) -> Result<IoBufs, Errno> {
        let len = (range.end - range.start) as usize;
        let mut bufs = AlignedBuf::io_bufs(len, ALIGN).ok_or(Errno::ENOMEM)?;
        self.read(channels, range.start, &mut bufs).await?;
        Ok(bufs)
    }
}

fn part(bufs: &IoBufs, at: usize, len: usize) -> IoBufs {
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
