//! Gives the file of an image room ahead of its use: where a write beyond its end is slow, and for new tables, which are
//! written late.

use std::sync::atomic::Ordering;

use event_loop::IoBufs;
use event_loop::sync::lock;
use nix::errno::Errno;

use super::context::{Channels, Transfer};
use super::image::Image;
use crate::request::Op;

/// Most bytes at once, and the fraction of the disk's size.
const MOST: u64 = 16 << 20;
const PART: u64 = 64;
/// Fewest clusters at once.
const LEAST: u64 = 4;

/// The number of clusters at once, for a disk of that size.
pub(super) fn clusters(size: u64, cluster: u64) -> u64 {
    ((size / PART).min(MOST) / cluster).max(LEAST)
}

/// An extension of the file in progress.
struct Ahead<'a> {
    image: &'a Image,
    is_over: bool,
}

impl Drop for Ahead<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            lock(&self.image.core).engine.abandon_ahead();
        }
    }
}

impl Image {
    /// Extends the file if that is due and no other task does it.
    pub(super) async fn extend(&self, channels: &Channels) {
        let clusters = self.ahead.load(Ordering::Relaxed);
        if clusters == 0 {
            return;
        }
        let Ok(_turn) = self.extending.try_lock() else { return };
        let Some(range) = lock(&self.core).engine.begin_ahead(clusters) else { return };
        let mut ahead = Ahead { image: self, is_over: false };
        let op = Op::WriteZeroes { may_unmap: false, no_fallback: true, fua: false };
        let len = range.end - range.start;
        let ticket = self.shared.begin_write();
        let to = &channels.file;
        let written =
            Transfer::start_write(to, op, range.start, len, IoBufs::new(), ticket).await.0;
        lock(&self.core).engine.end_ahead(written.is_ok());
        ahead.is_over = true;
        if written.is_err() {
            // Writes extend it.
            self.ahead.store(0, Ordering::Relaxed);
        }
    }

    /// Has a table with room in the file for what changes at that byte of the disk.
    ///
    /// # Errors
    ///
    /// As of [`back_tables`](Self::back_tables).
    pub(super) async fn make_table(&self, channels: &Channels, at: u64) -> Result<(), Errno> {
        self.engine(channels, |engine| engine.hold_l2(at / self.cluster)).await?;
        self.back_tables(channels).await
    }

    /// Has room for new tables even if the file system is full when they are written out. Call it before anything is mapped
    /// in a table.
    ///
    /// # Errors
    ///
    /// It is full.
    pub(super) async fn back_tables(&self, channels: &Channels) -> Result<(), Errno> {
        let next = || lock(&self.core).engine.unbacked();
        if next().is_none() {
            return Ok(());
        }
        // Zeroes over a table that is written out at the same time would destroy it.
        let _turn = self.flushing.lock().await;
        while let Some(range) = next() {
            let op = Op::WriteZeroes { may_unmap: false, no_fallback: false, fua: false };
            let (len, ticket) = (range.end - range.start, self.shared.begin_write());
            let to = &channels.file;
            Transfer::start_write(to, op, range.start, len, IoBufs::new(), ticket).await.0?;
            lock(&self.core).engine.back(range);
        }
        Ok(())
    }
}
