//! A mirror: the target becomes the same as the source, and stays so.

use std::ops::Range;
use std::sync::Arc;

use super::bitmap::Bitmap;
use super::control::Report;
use super::copy::{Failure, copy, flush, mark};
use super::worker::{CHUNK, Copies, Worker};

/// Bytes that are looked at by one request.
const FOUND_AT_ONCE: u64 = 1 << 30;
/// Bytes that may differ when the source's users are stopped for the rest to be copied.
const REST: u64 = 4 << 20;

/// A mirror's state, shared by its filters and its worker.
pub struct Mirror {
    worker: Worker,
    dirty: Arc<Bitmap>,
    /// Where to look next: round and round, so that no part waits for ever.
    next: u64,
}

/// How a job's copying ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// All is copied, or, of a mirror that was told to complete, nearly all.
    Copied,
    /// It was cancelled.
    Cancelled,
}

impl Mirror {
    /// A mirror that copies what is in `dirty`.
    pub fn new(worker: Worker, dirty: Arc<Bitmap>) -> Mirror {
        Mirror { worker, dirty, next: 0 }
    }

    /// Finds what is to be copied: what is in images above the one of that depth. The rest of a commit is that of a
    /// mirror.
    pub async fn find(&mut self, depth: u32) {
        let Some(mut buffer) = self.worker.buffers.pop() else { return };
        let (source, size) = (self.worker.source.clone(), self.dirty.size());
        let mut at = 0;
        while at < size && !self.worker.control.is_cancelled() {
            // At once as much as a status may take without holding up others for long.
            let range = at..size.min(at + FOUND_AT_ONCE);
            at = mark(&source, range, depth, &self.dirty, &mut buffer).await;
        }
        self.worker.buffers.push(buffer);
    }

    /// Copies until it is told to complete and little is left, or to end, or a request fails and that is
    /// not to be ignored. Reports when both sides have become the same, and how it ended.
    pub async fn run(&mut self) {
        let end = self.copy_while(true).await;
        self.worker.report(Report::Ended(end.map_err(Some)));
    }

    /// Copies what is left and flushes the target, when nobody writes to the source any more. Heeds no
    /// orders.
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
                            // What fails may go on failing: others are to get their turn.
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

    /// Takes some parts that lie together out of those to be copied. None that is being copied: what
    /// is read now must not be written before what was read earlier.
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
