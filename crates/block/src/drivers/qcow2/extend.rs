//! Gives the file of an image room ahead of its use: where a write beyond its end is slow, and for new tables, which are
//! written late.

use std::ops::Range;
use std::sync::atomic::Ordering;

use event_loop::IoBufs;
use event_loop::sync::lock;
use nix::errno::Errno;
use tokio::sync::MutexGuard;

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
    /// The file system is full.
    pub(super) async fn make_table(&self, channels: &Channels, at: u64) -> Result<(), Errno> {
        self.engine(channels, |engine| engine.hold_l2(at / self.cluster)).await
    }

    /// Has blocks in the file for metadata to come, which is written out when the file system may be full. `clusters`: those
    /// that a call of the engine has [stopped](super::engine::Stop::Unbacked) for.
    ///
    /// # Errors
    ///
    /// The file system is full. The clusters are not in use.
    pub(super) async fn back(
        &self,
        channels: &Channels,
        clusters: Range<u64>,
    ) -> Result<(), Errno> {
        let mut turn = self.backing_turn().await;
        if lock(&self.core).engine.may_be_written(&clusters) {
            self.shared.settle_writes().await;
        }
        let Some(range) = lock(&self.core).engine.begin_backing(clusters) else { return Ok(()) };
        let written = self.write_in_turn(channels, range, &mut turn).await;
        lock(&self.core).engine.end_backing(written.is_ok());
        written
    }

    /// Makes bytes of the file that are not in use zeroes, which have blocks.
    pub(super) async fn write_blocks(
        &self,
        channels: &Channels,
        bytes: Range<u64>,
    ) -> Result<(), Errno> {
        let op = Op::WriteZeroes { may_unmap: false, no_fallback: false, fua: false };
        let (to, len) = (&channels.file, bytes.end - bytes.start);
        let ticket = self.shared.begin_write();
        Transfer::start_write(to, op, bytes.start, len, IoBufs::new(), ticket).await.0
    }

    /// Has blocks in the file for bytes of a table's last cluster that the table does not have yet.
    ///
    /// # Errors
    ///
    /// The file system is full.
    pub(super) async fn back_unused(
        &self,
        channels: &Channels,
        bytes: Range<u64>,
    ) -> Result<(), Errno> {
        let mut turn = self.backing_turn().await;
        self.write_in_turn(channels, bytes, &mut turn).await
    }

    /// Waits for zeroes that a task which has ended has left in flight to clusters that are not in use.
    pub(super) async fn settle_backing(&self) {
        drop(self.backing_turn().await);
    }

    /// The turn to write zeroes to clusters that are not in use, with none in flight. It says whether a task that is dropped
    /// leaves some.
    async fn backing_turn(&self) -> MutexGuard<'_, bool> {
        let mut turn = self.backing.lock().await;
        self.settle_left(&mut turn).await;
        turn
    }

    /// Writes blocks, which stay in flight if the task is dropped meanwhile.
    async fn write_in_turn(
        &self,
        channels: &Channels,
        bytes: Range<u64>,
        was_left: &mut bool,
    ) -> Result<(), Errno> {
        *was_left = true;
        let written = self.write_blocks(channels, bytes).await;
        *was_left = false;
        written
    }

    async fn settle_left(&self, was_left: &mut bool) {
        if *was_left {
            // Over what is written there later, they would destroy it.
            self.shared.settle_writes().await;
            lock(&self.core).engine.end_backing(false);
            *was_left = false;
        }
    }
}
