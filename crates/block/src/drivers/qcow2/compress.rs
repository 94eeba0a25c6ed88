//! Writes that are stored compressed.

use event_loop::sync::lock;
use event_loop::{AlignedBuf, EventLoop, IoBufs, oneshot};
use nix::errno::Errno;

use super::access::{Allocating, part};
use super::context::{Channels, Transfer};
use super::engine::Packed;
use super::image::Image;
use crate::request::Part;

/// A compressed cluster; `None` if it would not be smaller.
type Compressed = Option<Vec<u8>>;

/// Room for a compressed cluster that is not mapped yet. Unused room is released when this is dropped.
struct Room<'a> {
    image: &'a Image,
    packed: Packed,
    is_mapped: bool,
    /// A write to the room is in flight.
    is_writing: bool,
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        if !self.is_mapped {
            lock(&self.image.core).engine.give_up_packed(self.packed, self.is_writing);
        }
    }
}

impl Image {
    /// Writes `bufs` over the disk's bytes from `offset` on. Whole clusters are compressed on threads of the pool. A
    /// part of a cluster, and a cluster that does not become smaller, is stored as it is.
    pub(super) async fn write_compressed(
        &self,
        event_loop: &EventLoop,
        channels: &Channels,
        offset: u64,
        bufs: &IoBufs,
        fua: bool,
    ) -> Result<(), Errno> {
        let end = offset + bufs.len() as u64;
        let _change = self.claim(offset..end, true).await;
        // All of them first: they are compressed side by side.
        let mut parts = Vec::new();
        let mut at = offset;
        while at < end {
            let next = (at - at % self.cluster + self.cluster).min(end);
            let compressed = self.begin_to_compress(event_loop, at..next, offset, bufs)?;
            parts.push((at..next, compressed));
            at = next;
        }
        for (range, compressed) in parts {
            let compressed = match compressed {
                Some(compressed) => compressed.await.map_err(|_| Errno::ECANCELED)?,
                None => None,
            };
            let is_stored = match compressed {
                Some(data) => self.put(channels, range.start, &data).await?,
                None => false,
            };
            if !is_stored {
                let len = (range.end - range.start) as usize;
                let data = part(bufs, (range.start - offset) as usize, len);
                self.write_anew(channels, range.start, &data).await?;
            }
        }
        if fua {
            self.flush(channels).await?;
        }
        self.commit(channels).await
    }

    /// Has a whole cluster compressed; the last one of the disk ends with the disk. `None`: it is a part of a cluster.
    fn begin_to_compress(
        &self,
        event_loop: &EventLoop,
        range: std::ops::Range<u64>,
        offset: u64,
        bufs: &IoBufs,
    ) -> Result<Option<oneshot::Receiver<Compressed>>, Errno> {
        let is_whole = range.start.is_multiple_of(self.cluster)
            && self.end(range.end).is_multiple_of(self.cluster);
        if !is_whole {
            return Ok(None);
        }
        let mut data = vec![0; self.cluster as usize];
        let len = (range.end - range.start) as usize;
        bufs.copy_out((range.start - offset) as usize, &mut data[..len]);
        if bufs.is_lost() {
            return Err(Errno::EFAULT);
        }
        let compression = self.compression;
        Ok(Some(event_loop.compute(self.inflated.lane(), move || compression.compress(&data))))
    }

    /// Stores the compressed data of the cluster at `guest`. `false`: the file is too long for it.
    async fn put(&self, channels: &Channels, guest: u64, data: &[u8]) -> Result<bool, Errno> {
        let _allocating = Allocating::new(self);
        self.limit(channels).await?;
        let len = data.len() as u64;
        let packed = self.engine(channels, |engine| {
            engine.hold_l2(guest / self.cluster)?;
            engine.pack(len)
        });
        let packed = packed.await?;
        let Some(packed) = packed else { return Ok(false) };
        let mut room = Room { image: self, packed, is_mapped: false, is_writing: false };
        if packed.is_fresh {
            self.extend(channels).await;
        }
        let mut bufs = AlignedBuf::io_bufs(data.len(), 4096).ok_or(Errno::ENOMEM)?;
        bufs.copy_in(0, data);
        let ticket = self.shared.begin_write();
        room.is_writing = true;
        let write =
            Transfer::start_part_write(channels, Part::Compressed, packed.host, bufs, ticket);
        let (written, _) = write.await;
        room.is_writing = false;
        written?;
        self.engine(channels, |engine| {
            // With the engine, so that a write-out of the metadata knows.
            self.wrote_new_data();
            engine.map_packed(guest / self.cluster, packed)?;
            self.inflated.forget(packed.host..packed.host + packed.len);
            room.is_mapped = true;
            Ok(())
        })
        .await?;
        Ok(true)
    }
}
