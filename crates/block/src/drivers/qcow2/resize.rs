//! `block_resize`.
//!
//! The size that users know, and the header's, change at the end, once all else is done: cut off or
//! failed before, the disk is as it was.

use std::ops::Range;

use event_loop::AlignedBuf;
use event_loop::sync::lock;
use nix::errno::Errno;

use super::access::Place;
use super::context::{Channels, Transfer};
use super::header::{ENTRY, MAX_L1};
use super::image::Image;
use super::zero::Discarding;
use crate::node::ResizeError;
use crate::request::Op;

/// A disk's size is a multiple of this.
const SECTOR: u64 = 512;

/// What comes of an error of a node below.
pub(super) fn failed(errno: Errno) -> ResizeError {
    ResizeError::Os { what: "Could not resize image", errno }
}

impl Image {
    /// Gives the disk another size. `pass`: the node below gets a discard of the clusters that are given up. A caller
    /// that makes the disk smaller drains it before.
    pub(super) async fn resize(
        &self,
        channels: &Channels,
        size: u64,
        pass: bool,
    ) -> Result<(), ResizeError> {
        let _turn = self.resizing.lock().await;
        if self.damage.is_damaged() {
            return Err(failed(Errno::EIO));
        }
        let old = self.size();
        self.check_size(size)?;
        if size == old {
            return Ok(());
        }
        // The last cluster of the one and of the other, and what is between. No request that touches
        // it takes the one size for the other.
        let _change = self.claim(size.min(old)..size.max(old), true).await;
        match size > old {
            true => self.grow(channels, old, size).await?,
            false => self.shrink(channels, old, size, pass).await.map_err(failed)?,
        }
        let resized = match self.set_header_size(channels, size).await {
            Ok(()) => self.flush(channels).await,
            Err(errno) => Err(errno),
        };
        match resized {
            Ok(()) => self.set_size(size),
            // It has not reached the file, or will be written over.
            Err(_) => drop(self.set_header_size(channels, old).await),
        }
        resized.map_err(failed)
    }

    fn check_size(&self, size: u64) -> Result<(), ResizeError> {
        let entries = size.div_ceil(self.reach());
        match () {
            () if !size.is_multiple_of(SECTOR) => {
                Err(ResizeError::Format("The new size must be a multiple of 512"))
            }
            // Version 2 does not say how large the disk of a snapshot was.
            () if self.version < 3 && self.has_snapshots() => {
                Err(ResizeError::Format("Can't resize a v2 image which has snapshots"))
            }
            () if entries > MAX_L1 / ENTRY => {
                let what = "Failed to grow the L1 table";
                Err(ResizeError::Os { what, errno: Errno::EFBIG })
            }
            () => Ok(()),
        }
    }

    /// Bytes of the disk that an L2 table maps.
    pub(super) fn reach(&self) -> u64 {
        let entry = if self.unit < self.cluster { 2 * ENTRY } else { ENTRY };
        self.cluster * (self.cluster / entry)
    }

    async fn grow(&self, channels: &Channels, old: u64, size: u64) -> Result<(), ResizeError> {
        let behind = channels.backing.as_ref().map_or(0, |(_, behind)| *behind);
        let hidden = old.next_multiple_of(self.cluster)..size.min(behind);
        if !hidden.is_empty() && self.version < 3 {
            // There are no zeroes that hide what lies behind.
            let why = "Failed to zero out new clusters: Operation not supported";
            return Err(ResizeError::Format(why));
        }
        if size > lock(&self.core).engine.reach() {
            self.grow_tables(channels, size).await.map_err(failed)?;
        }
        self.zero_tail(channels, old, behind > old).await.map_err(failed)?;
        if self.is_raw {
            return self.grow_raw(channels, old, size).await.map_err(failed);
        }
        self.hide(channels, hidden).await.map_err(failed)
    }

    /// Has the part of the last cluster that is past the disk's end read as zeroes, whatever has been
    /// there. `shows`: that of the image behind would be seen.
    async fn zero_tail(&self, channels: &Channels, end: u64, shows: bool) -> Result<(), Errno> {
        self.zero_unit(channels, end, shows).await?;
        // Subclusters behind that one, of the same cluster.
        let rest = end.next_multiple_of(self.unit)..end.next_multiple_of(self.cluster);
        self.zero_part(channels, rest, false).await
    }

    /// The same, in the unit that the disk ends within.
    async fn zero_unit(&self, channels: &Channels, end: u64, shows: bool) -> Result<(), Errno> {
        let used = end % self.unit;
        if used == 0 {
            return Ok(());
        }
        match self.find_to_change(channels, end - used..end).await?.0 {
            Place::Zeroes => Ok(()),
            Place::Nowhere if !shows => Ok(()),
            Place::Data { at, own: true } => {
                let len = self.unit - used;
                let zeroes = AlignedBuf::io_bufs(len as usize, 4096).ok_or(Errno::ENOMEM)?;
                let (to, op) = (channels.data(), Op::Write { fua: false });
                let ticket = self.shared.begin_write();
                Transfer::start_write(to, op, at + used, len, zeroes, ticket).await.0?;
                self.wrote_new_data();
                Ok(())
            }
            // In a unit of its own it ends with zeroes.
            Place::Data { .. } | Place::Nowhere | Place::Compressed => {
                let len = SECTOR as usize;
                let mut last = AlignedBuf::io_bufs(len, 4096).ok_or(Errno::ENOMEM)?;
                self.read(channels, end - SECTOR, &mut last).await?;
                self.write_anew(channels, end - SECTOR, &last).await
            }
        }
    }

    /// Has clusters past the disk's end read as zeroes, table by table.
    async fn hide(&self, channels: &Channels, range: Range<u64>) -> Result<(), Errno> {
        let end = range.end.next_multiple_of(self.cluster);
        for part in self.tables(range.start..end) {
            self.change_to_zeroes(channels, part, false, &[]).await?;
        }
        Ok(())
    }

    async fn shrink(
        &self,
        channels: &Channels,
        old: u64,
        size: u64,
        pass: bool,
    ) -> Result<(), Errno> {
        if self.is_raw {
            self.zero_raw(channels, size..old, true, false).await?;
        } else {
            // QEMU shows what the last cluster has there, if it makes the disk larger.
            self.clear_data(channels, size..size.next_multiple_of(self.cluster)).await?;
        }
        for part in self.tables(size.next_multiple_of(self.cluster)..old) {
            self.drop_data(channels, part, Discarding { unref: true, pass }).await?;
        }
        Ok(())
    }

    /// The parts of a range that have an L2 table each.
    fn tables(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
        let (reach, Range { mut start, end }) = (self.reach(), range);
        std::iter::from_fn(move || {
            let part = start..end.min((start / reach + 1) * reach);
            start = part.end.max(start);
            (!part.is_empty()).then_some(part)
        })
    }
}
