//! Jobs that copy each part of a disk once.
//!
//! - backup: the target gets the contents that the source had when the backup began.
//! - stream: an image gets the data that it shows of the images behind it.
//! - commit: an image gets the data of the images above it.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use super::bitmap::Bitmap;
use super::copy::Failure;
use super::copy_before_write::CopyBeforeWrite;
use super::mirror::End;
use super::snapshot::{Clusters, Snapshot, What};
use super::worker::{CHUNK, Copies, OnError, Worker};
use crate::drivers::compress::Compressing;
use crate::graph::Edge;

/// Most bytes of one copy of a stream or a commit: as in QSD, a request that fails leaves these bytes uncounted.
const CHUNK_OF_CHAIN: u64 = 512 << 10;

/// What a guest's write does if the data that it overwrites cannot be copied first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnCbwError {
    /// The write fails.
    #[default]
    BreakGuestWrite,
    /// The write proceeds, and the backup fails.
    BreakSnapshot,
}

/// A job that copies each part once: the state of its filter and its worker.
#[derive(Clone)]
pub struct Backup {
    snapshot: Arc<Snapshot>,
    /// Most bytes of one copy.
    max_chunk: u64,
    /// The target stores the data compressed.
    compress: bool,
    /// What was copied is discarded in the source.
    discard: bool,
}

impl Backup {
    /// Returns a backup of a disk of `size` bytes.
    ///
    /// It copies in clusters of `cluster` bytes, a power of two.
    pub fn new(size: u64, cluster: u64, on_error: OnCbwError) -> Backup {
        Backup::of(Bitmap::new(size, cluster, true), on_error, What::All(1))
    }

    /// Creates a backup of a disk of `size` bytes that copies nothing yet.
    ///
    /// It copies in clusters of `cluster` bytes, a power of two. [`add`](Self::add) says what is copied.
    pub fn of_nothing(size: u64, cluster: u64, on_error: OnCbwError) -> Backup {
        Backup::of(Bitmap::new(size, cluster, false), on_error, What::All(1))
    }

    /// Copies at most `max_chunk` bytes at once, and at most [`CHUNK`].
    #[must_use]
    pub fn with_max_chunk(self, max_chunk: u64) -> Backup {
        Backup { max_chunk: max_chunk.min(CHUNK), ..self }
    }

    /// Has the target store the data compressed. Call this before the job begins.
    #[must_use]
    pub fn compressed(self) -> Backup {
        let unit = self.snapshot.left.granularity();
        let what = match self.snapshot.what {
            What::Top(clusters) => What::Top(Clusters { unit, ..clusters }),
            What::All(_) | What::Behind(_) | What::Above(_) => What::All(unit),
        };
        Backup { compress: true, ..self.copying(what) }
    }

    /// Copies only clusters that the source's topmost image stores. Call this before the job begins.
    #[must_use]
    pub fn of_top(self) -> Backup {
        let len = self.snapshot.left.granularity();
        self.copying(What::Top(Clusters { len, unit: 1 }))
    }

    /// Discards in the source what was copied.
    #[must_use]
    pub fn discarding(self) -> Backup {
        Backup { discard: true, ..self }
    }

    fn copying(self, what: What) -> Backup {
        let left = self.snapshot.left.take();
        let Backup { max_chunk, compress, discard, .. } = self;
        Backup { max_chunk, compress, discard, ..Backup::of(left, self.snapshot.on_error, what) }
    }

    /// Adds the parts that are set in a bitmap to those that are copied.
    ///
    /// Call this before the job begins, while nothing is written.
    pub fn add(&self, parts: &Bitmap) {
        self.snapshot.left.merge(parts);
    }

    /// Has all that is not copied yet set in a bitmap.
    pub fn note_left(&self, parts: &Bitmap) {
        parts.merge(&self.snapshot.left);
    }

    /// Returns a job that copies what an image shows of the images behind it.
    ///
    /// The image of `depth` (1 is the disk's own image) and those behind that one stay. The disk has `size` bytes,
    /// and clusters of `cluster` bytes. Writes are to pass the job's filter: a part comes to the image before it is
    /// written to.
    pub fn stream(size: u64, cluster: u64, depth: u32) -> Backup {
        let left = Bitmap::new(size, cluster, true);
        let stream = Backup::of(left, OnCbwError::BreakGuestWrite, What::Behind(depth));
        stream.with_max_chunk(CHUNK_OF_CHAIN)
    }

    /// Returns a job that copies to the target what images above one of them have.
    ///
    /// `depth` is that image's: 1 is the disk's own image. The disk has `size` bytes, clusters of `cluster` bytes,
    /// and is not written to.
    pub fn commit(size: u64, cluster: u64, depth: u32) -> Backup {
        let left = Bitmap::new(size, cluster, true);
        let commit = Backup::of(left, OnCbwError::BreakGuestWrite, What::Above(depth));
        commit.with_max_chunk(CHUNK_OF_CHAIN)
    }

    fn of(left: Bitmap, on_error: OnCbwError, what: What) -> Backup {
        let snapshot = Arc::new(Snapshot::new(left, on_error, what));
        Backup { snapshot, max_chunk: CHUNK, compress: false, discard: false }
    }

    /// Returns the filter to put between the source and its users.
    pub fn filter(&self, name: String, source: Arc<Edge>, target: Arc<Edge>) -> CopyBeforeWrite {
        CopyBeforeWrite::over(name, source, target, self.snapshot.clone(), self.compress)
    }

    /// Returns the number of bytes that are not in the target yet.
    pub fn left(&self) -> u64 {
        self.snapshot.left.bytes()
    }

    /// Returns the number of bytes that are done, of `total`.
    ///
    /// Of a stream and a commit, as in QSD, these are the bytes before the first part that is left.
    pub fn done(&self, total: u64) -> u64 {
        let left = &self.snapshot.left;
        match self.snapshot.what {
            What::All(_) | What::Top(_) => total.saturating_sub(left.bytes()),
            What::Behind(_) | What::Above(_) => {
                left.first_set(0).map_or(total, |part| left.bytes_of(&(part..part)).start)
            }
        }
    }

    /// Has users' requests proceed without copies, also those that wait for one. Call this when the job is
    /// cancelled or fails, but never for a stream: a write could be overtaken by old data.
    pub fn give_up(&self) {
        self.snapshot.giving_up.give_up();
    }

    /// Copies each part that the filter has not copied, and reports how the job ended.
    ///
    /// Ends when all is copied and flushed, when the job is cancelled, or at an error that is not ignored. A stream skips a
    /// part with an error that is ignored, and fails at its end. With `only_written`, the filter does all copying, and this only
    /// waits for the cancellation.
    pub async fn run(&self, worker: &mut Worker, only_written: bool) {
        let end = self.copy_all(worker, only_written).await;
        worker.report_end(end);
    }

    async fn copy_all(
        &self,
        worker: &mut Worker,
        only_written: bool,
    ) -> Result<End, Option<Failure>> {
        let source = worker.source.clone();
        let target = Compressing::if_asked(self.compress, worker.target.clone());
        let most = (self.max_chunk / self.snapshot.left.granularity()).max(1);
        let mut copies = Copies::default();
        // The first of the parts that failed since the last decision, and what a stream has skipped.
        let mut failed: Option<(Range<u64>, Failure)> = None;
        let mut skipped = None;
        let mut next = 0;
        // The speed limits copies. As in QSD, the end does not wait for it if this has copied the last part.
        let mut is_last = false;
        loop {
            let control = worker.control.clone();
            let ends = failed.is_some() || control.is_cancelled() || self.snapshot.is_broken();
            while !ends
                && !only_written
                && let Some(mut buffer) = worker.begin()
            {
                let (from, snapshot) = (next, &*self.snapshot);
                let claim = match snapshot.claim(from..u64::MAX, most) {
                    Ok(None) if from > 0 => snapshot.claim(0..from, most),
                    other => other,
                };
                let Ok(Some(claim)) = claim else {
                    worker.buffers.push(buffer);
                    break;
                };
                next = claim.parts.end;
                let range = snapshot.left.bytes_of(&claim.parts);
                let paced = worker.pace(range.end - range.start);
                let (source, target) = (Rc::clone(&source), Rc::clone(&target));
                let discards = self.discard;
                copies.push(async move {
                    let what = snapshot.what;
                    let result = what.copy(&source, &target, range.clone(), &mut buffer).await;
                    if result.is_ok() {
                        if discards && let Some(_discarding) = snapshot.begin_discard(&claim.parts)
                        {
                            what.discard(&source, range.clone(), &mut buffer).await;
                        }
                        claim.done();
                    }
                    (range, buffer, paced, result)
                });
            }
            if !copies.is_empty() {
                let (range, result) = worker.next(&mut copies).await;
                is_last = copies.is_empty() && self.snapshot.left.is_empty(next);
                if let Err(failure) = result
                    && failed.as_ref().is_none_or(|(first, _)| range.start < first.start)
                {
                    failed = Some((range, failure));
                }
                continue;
            }
            // Only now all before the part is done: a client that hears of the error sees how far the job is.
            if let Some((range, failure)) = failed.take() {
                control.set_busy(false);
                let parts = self.snapshot.left.parts(range.start, range.end - range.start);
                match worker.judge(failure).map_err(Some)? {
                    OnError::Ignore if matches!(self.snapshot.what, What::Behind(_)) => {
                        // Waits for the filter, which may be copying these parts.
                        self.snapshot.forget(parts).await;
                        skipped = skipped.or(Some(failure));
                        continue;
                    }
                    OnError::Stop => next = parts.start,
                    // A part that fails may fail again, so other parts get their turn first.
                    OnError::Ignore | OnError::Report | OnError::Enospc => {}
                }
                worker.idle().await;
                continue;
            }
            if self.snapshot.is_broken() {
                return Err(None);
            }
            if control.is_cancelled() {
                return Ok(End::Cancelled);
            }
            if !only_written
                && (is_last || !worker.is_early() && self.snapshot.left.is_empty(next))
                && worker.may_begin()
            {
                if skipped.is_some() {
                    return Err(skipped);
                }
                match worker.flush().await {
                    Ok(()) => return Ok(End::Copied),
                    Err(failure) => {
                        control.set_busy(false);
                        worker.judge(failure).map_err(Some)?;
                    }
                }
            }
            worker.idle().await;
        }
    }
}
