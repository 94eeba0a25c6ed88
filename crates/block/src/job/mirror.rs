//! A mirror: makes the target the same as the source, and keeps it so.

use std::ops::Range;
use std::sync::Arc;

use super::bitmap::Bitmap;
use super::control::Report;
use super::copy::{Failure, copy, flush, mark};
use super::worker::{CHUNK, Copies, Worker};

/// Bytes per request for the block status.
const FOUND_AT_ONCE: u64 = 1 << 30;
/// Bytes that may differ when the source's users are stopped for the rest of the copy.
const REST: u64 = 4 << 20;

/// A mirror's state, shared by its filters and its worker.
pub struct Mirror {
    worker: Worker,
    dirty: Arc<Bitmap>,
    /// The next position to search. The search is circular, so that every part is copied at some time.
    next: u64,
}

/// How a job's copying ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// All is copied, or nearly all for a mirror that was told to complete.
    Copied,
    /// It was cancelled.
    Cancelled,
}

impl Mirror {
    /// A mirror that copies the ranges marked in `dirty`.
    pub fn new(worker: Worker, dirty: Arc<Bitmap>) -> Mirror {
        Mirror { worker, dirty, next: 0 }
    }

    /// Marks the ranges that are stored in images above the given depth. With that, a commit is a mirror
    /// from here on.
    pub async fn find(&mut self, depth: u32) {
        let Some(mut buffer) = self.worker.buffers.pop() else { return };
        let (source, size) = (self.worker.source.clone(), self.dirty.size());
        let mut at = 0;
        while at < size && !self.worker.control.is_cancelled() {
            // As much at once as does not delay other requests for long.
            let range = at..size.min(at + FOUND_AT_ONCE);
            at = mark(&source, range, depth, &self.dirty, &mut buffer).await;
        }
        self.worker.buffers.push(buffer);
    }

    /// Copies until the mirror is cancelled, or is told to complete and little is left, or a request fails
    /// and its error is not ignored. Reports when both sides are the same, and the end.
    pub async fn run(&mut self) {
        let end = self.copy_while(true).await;
        self.worker.report(Report::Ended(end.map_err(Some)));
    }

    /// Copies the rest and flushes the target, after writes to the source have stopped. Ignores orders.
    ///
    /// # Errors
    ///
    /// A request failed.
    pub async fn finish(&mut self) -> Result<(), Failure> {
        self.copy_while(false).await?;
        flush(&self.worker.target).await
    }

    async fn copy_while(&mut self, heeds: bool) -> Result<End, Failure> {
        let (source, target) = (self.worker.source.clone(), self.worker.target.clone());
        let mut copies = Copies::default();
        let mut ready = !heeds;
        let mut failed = None;
        loop {
            let control = self.worker.control.clone();
            let ends = failed.is_some() || heeds && control.is_cancelled();
            while !ends
                && let Some(mut buffer) =
                    if heeds { self.worker.begin() } else { self.worker.buffers.pop() }
            {
                let Some(parts) = self.take(&copies) else {
                    self.worker.buffers.push(buffer);
                    break;
                };
                let range = self.dirty.bytes_of(&parts);
                self.worker.pace(range.end - range.start);
                let (source, target, key) = (source.clone(), target.clone(), range.clone());
                copies.push(key, async move {
                    let result = copy(&source, &target, range.clone(), &mut buffer).await;
                    (range, buffer, result)
                });
            }
            if !copies.is_empty() {
                let (range, buffer, result) = copies.next().await;
                self.worker.buffers.push(buffer);
                let len = range.end - range.start;
                match result {
                    Ok(()) => control.add_copied(len),
                    Err(failure) => {
                        self.dirty.set(range.start, len);
                        let judged = if heeds { self.worker.judge(failure) } else { Err(failure) };
                        failed = failed.or(judged.err());
                        if heeds && failed.is_none() {
                            // A failing range may continue to fail, so other ranges get their turn.
                            self.worker.wait().await;
                        }
                    }
                }
                continue;
            }
            if let Some(failure) = failed {
                return Err(failure);
            }
            if heeds && control.is_cancelled() {
                return Ok(End::Cancelled);
            }
            if heeds && self.worker.is_early() {
                self.worker.wait().await;
                continue;
            }
            let left = self.dirty.bytes();
            if left == 0 && !heeds {
                return Ok(End::Copied);
            }
            if left == 0 && !std::mem::replace(&mut ready, true) {
                self.worker.report(Report::Ready);
            }
            if heeds && ready && control.is_completing() && left <= REST && !control.is_paused() {
                return Ok(End::Copied);
            }
            if heeds {
                self.worker.wait().await;
            }
        }
    }

    /// Takes adjacent ranges out of the dirty ones. Leaves out ranges that are being copied: data read now
    /// must not be overwritten by data read earlier.
    fn take(&mut self, copies: &Copies<'_>) -> Option<Range<u64>> {
        let from = self.next;
        let found = self.first(from, u64::MAX, copies).or_else(|| self.first(0, from, copies))?;
        let most = (CHUNK / self.dirty.granularity()).max(1);
        let is_free = |part: &u64| {
            self.dirty.is_set(*part) && !copies.touch(&self.dirty.bytes_of(&(*part..*part + 1)))
        };
        let count = (found..found + most).take_while(is_free).count() as u64;
        let parts = found..found + count.max(1);
        self.dirty.clear(parts.clone());
        self.next = parts.end;
        Some(parts)
    }

    fn first(&self, from: u64, before: u64, copies: &Copies<'_>) -> Option<u64> {
        let mut from = from;
        loop {
            let part = self.dirty.first_set(from).filter(|&part| part < before)?;
            if !copies.touch(&self.dirty.bytes_of(&(part..part + 1))) {
                return Some(part);
            }
            from = part + 1;
        }
    }
}
