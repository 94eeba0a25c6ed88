//! Images whose data file by itself has the disk's bytes (`data_file_raw`), so that it can be read as a raw image.
//!
//! A cluster that is mapped has its data at its own offset. One that is not reads as zeroes, and the data file has zeroes
//! there. So zeroes are written to the data file, and what the metadata say stays: no order of writes on stable storage
//! makes the two differ in what was flushed.

use std::ops::Range;

use event_loop::{AlignedBuf, IoBufs};
use nix::errno::Errno;

use super::access::Place;
use super::context::{Channels, Transfer};
use super::image::Image;
use super::zero::Discarding;
use crate::request::Op;

/// A disk's size is a multiple of this.
const SECTOR: u64 = 512;

impl Image {
    /// Has a range of the data file read as zeroes. The caller has claimed the range.
    pub(super) async fn zero_raw(
        &self,
        channels: &Channels,
        range: Range<u64>,
        may_unmap: bool,
        no_fallback: bool,
    ) -> Result<(), Errno> {
        let len = range.end - range.start;
        let ticket = self.shared.begin_write();
        let op = Op::WriteZeroes { may_unmap, no_fallback, fua: false };
        let (to, bufs) = (channels.data(), IoBufs::new());
        Transfer::start_write(to, op, range.start, len, bufs, ticket).await.0
    }

    /// Passes a discard to the data file, where that has data.
    pub(super) async fn discard_raw(
        &self,
        channels: &Channels,
        range: Range<u64>,
        discarding: Discarding,
    ) -> Result<(), Errno> {
        let mut at = range.start;
        while discarding.pass && at < range.end {
            let (place, found) = self.find_to_change(channels, at..range.end).await?;
            if let Place::Data { at: host, own: true } = place {
                self.punch(channels, host, found).await;
            }
            at += found;
        }
        Ok(())
    }

    /// The data file is as long as the disk is to be, with zeroes from `old` on, and the disk's new clusters are mapped:
    /// what is written to the data file alone is the disk's.
    pub(super) async fn grow_raw(
        &self,
        channels: &Channels,
        old: u64,
        size: u64,
    ) -> Result<(), Errno> {
        self.zero_raw(channels, old..size, true, false).await?;
        let last = AlignedBuf::io_bufs(SECTOR as usize, 4096).ok_or(Errno::ENOMEM)?;
        let (to, op) = (channels.data(), Op::Write { fua: false });
        let ticket = self.shared.begin_write();
        Transfer::start_write(to, op, size - SECTOR, SECTOR, last, ticket).await.0?;
        let mut at = old - old % self.cluster;
        while at < size {
            self.limit(channels).await?;
            self.make_table(channels, at).await?;
            let room = self.engine(channels, |engine| engine.room(at..size)).await?;
            let mapped = self.engine(channels, |engine| {
                self.wrote_new_data();
                engine.map(room.written.clone(), room.host)
            });
            at += mapped.await? * self.cluster;
        }
        Ok(())
    }
}
