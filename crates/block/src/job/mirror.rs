//! A mirror: makes the target the same as the source, and keeps it so.

use std::ops::Range;
use std::sync::Arc;

use super::bitmap::Bitmap;
use super::control::Report;
use super::copy::{Failure, copy, mark};
use super::turns::{Turn, Turns};
use super::worker::{Copies, OnError, Worker};

/// Bytes per request for the block status.
const FOUND_AT_ONCE: u64 = 1 << 30;
/// Bytes that may differ when the source's users are stopped for the rest of the copy.
const REST: u64 = 4 << 20;

/// A mirror's state, shared by its filters and its worker.
pub struct Mirror {
    worker: Worker,
    dirty: Arc<Bitmap>,
    turns: Arc<Turns>,
    /// Parts of the target that read as zeroes. `None`: unknown.
    zero: Option<Arc<Bitmap>>,
    /// The next position to search. The search is circular, so that every part is copied at some time.
    next: u64,
    /// Both sides have been equal once.
    ready: bool,
}

/// How a job's copying ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// All is copied, or nearly all for a mirror that has been asked to complete.
    Copied,
    /// It was cancelled.
    Cancelled,
}

impl Mirror {
    /// Returns a mirror that copies the ranges in `dirty`, in turn with its filter.
    ///
    /// Zeroes do not count for its speed, unless the target stores them as data.
    pub fn new(mut worker: Worker, dirty: Arc<Bitmap>, turns: Arc<Turns>) -> Mirror {
        let counts_zeroes = !worker.zeroes_fast;
        worker.buffers.iter_mut().for_each(|buffer| buffer.counts_zeroes = counts_zeroes);
        Mirror { worker, dirty, turns, zero: None, next: 0, ready: false }
    }

    /// Names the parts of the target that read as zeroes, whatever its block status says. The filter has the same.
    #[must_use]
    pub fn with_zero(self, zero: Option<Arc<Bitmap>>) -> Mirror {
        Mirror { zero, ..self }
    }

    /// Marks the ranges that are stored in images above the given depth.
    ///
    /// 1 is the source itself, 2 its backing image. A commit and a mirror with `sync=top` begin with this.
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

    /// Copies until the mirror ends. Reports when both sides are equal, and the end.
    ///
    /// The mirror ends when it is cancelled, or is asked to complete and little is left, or a request fails
    /// with an error that is not ignored. Call this again after a [`finish`](Self::finish) that failed.
    pub async fn run(&mut self) {
        let end = self.copy_while(true).await;
        self.worker.report_end(end.map_err(Some));
    }

    /// Copies the rest and flushes the target, after writes to the source have stopped.
    ///
    /// Ignores orders.
    ///
    /// # Errors
    ///
    /// A request failed. The reaction to that is [`OnError::Report`] if the job fails.
    pub async fn finish(&mut self) -> Result<(), (Failure, OnError)> {
        let copied = self.copy_while(false).await;
        let flushed = match copied {
            Ok(_) => self.worker.flush().await,
            Err(failure) => Err(failure),
        };
        flushed.map_err(|failure| {
            self.worker.control.set_busy(false);
            (failure, self.worker.react(failure))
        })
    }

    async fn copy_while(&mut self, heeds: bool) -> Result<End, Failure> {
        let (source, target) = (self.worker.source.clone(), self.worker.target.clone());
        let mut copies = Copies::default();
        let mut failed = None;
        // Told of only when nothing is in flight: the failures of other copies would undo what resumes the job.
        let mut stopped = None;
        loop {
            let control = self.worker.control.clone();
            let ends = failed.is_some() || stopped.is_some() || heeds && control.is_cancelled();
            while !ends
                && let Some(mut buffer) =
                    if heeds { self.worker.begin() } else { self.worker.buffers.pop() }
            {
                let Some((parts, turn)) = self.take() else {
                    self.worker.buffers.push(buffer);
                    break;
                };
                let range = self.dirty.bytes_of(&parts);
                let paced = self.worker.pace(range.end - range.start);
                let (source, target) = (source.clone(), target.clone());
                let (dirty, zero) = (self.dirty.clone(), self.zero.clone());
                copies.push(async move {
                    let zero = zero.as_deref();
                    let result = copy(&source, &target, range.clone(), &mut buffer, 1, zero).await;
                    if result.is_err() {
                        dirty.set(range.start, range.end - range.start);
                    }
                    drop(turn);
                    (range, buffer, paced, result)
                });
            }
            if !copies.is_empty() {
                let (range, result) = self.worker.next(&mut copies).await;
                let len = range.end - range.start;
                match result {
                    Ok(()) => control.add_copied(len),
                    Err(failure) if heeds && self.worker.reaction(failure) == OnError::Stop => {
                        stopped = stopped.or(Some(failure));
                    }
                    Err(failure) => {
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
            if let Some(failure) = stopped.take().filter(|_| !control.is_cancelled()) {
                control.set_busy(false);
                self.worker.judge(failure)?;
                self.worker.idle().await;
                continue;
            }
            if heeds && control.is_cancelled() {
                return Ok(End::Cancelled);
            }
            // The speed limits copies, so a mirror without any does not wait for it.
            if heeds && self.worker.is_early() && !self.dirty.is_empty(self.next) {
                self.worker.idle().await;
                continue;
            }
            let left = self.dirty.bytes();
            if left == 0 && !heeds {
                return Ok(End::Copied);
            }
            if left == 0 && !self.ready && self.worker.may_begin() {
                let flushed = self.worker.flush().await;
                control.set_busy(false);
                match flushed {
                    Ok(()) if control.is_cancelled() => continue,
                    Ok(()) => {
                        self.ready = true;
                        self.worker.report(Report::Ready);
                    }
                    Err(failure) => drop(self.worker.judge(failure)?),
                }
            }
            if heeds
                && self.ready
                && control.is_completing()
                && left <= REST
                && !control.is_paused()
            {
                return Ok(End::Copied);
            }
            if heeds {
                self.worker.idle().await;
            }
        }
    }

    /// Takes adjacent ranges out of the dirty ones. Leaves out ranges that are being copied: data read now
    /// must not be overwritten by data read earlier.
    fn take(&mut self) -> Option<(Range<u64>, Turn)> {
        let from = self.next;
        let found = self.first(from, u64::MAX).or_else(|| self.first(0, from))?;
        let most = (self.worker.chunk / self.dirty.granularity()).max(1);
        let is_free = |part: &u64| self.dirty.is_set(*part) && !self.turns.is_claimed(*part);
        let count = (found..found + most).take_while(is_free).count() as u64;
        let parts = found..found + count.max(1);
        // The filter may have been faster: it copies the parts then.
        let turn = self.turns.try_claim(&parts)?;
        self.dirty.clear(parts.clone());
        self.next = parts.end;
        Some((parts, turn))
    }

    fn first(&self, from: u64, before: u64) -> Option<u64> {
        let mut from = from;
        loop {
            let part = self.dirty.first_set(from).filter(|&part| part < before)?;
            if !self.turns.is_claimed(part) {
                return Some(part);
            }
            from = part + 1;
        }
    }
}
