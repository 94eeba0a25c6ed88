//! Orders to a job and its progress, shared by the control plane and the job's worker.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::copy::Failure;
use super::mirror::End;
use super::worker::OnError;

/// Orders to a job and its progress, for all threads.
///
/// Each order takes effect within 0.1 s.
#[derive(Debug, Default)]
pub struct Control {
    speed: AtomicU64,
    paused: AtomicBool,
    cancelled: AtomicBool,
    complete: AtomicBool,
    busy: AtomicBool,
    copied: AtomicU64,
}

impl Control {
    /// Returns the control of a job that copies at most `speed` bytes per second.
    ///
    /// 0: unlimited.
    pub fn new(speed: u64) -> Control {
        Control { speed: AtomicU64::new(speed), ..Control::default() }
    }

    /// Changes the speed: bytes per second; 0: unlimited.
    pub fn set_speed(&self, speed: u64) {
        self.speed.store(speed, Ordering::Relaxed);
    }

    pub(super) fn speed(&self) -> u64 {
        self.speed.load(Ordering::Relaxed)
    }

    /// Pauses or resumes the job.
    pub fn set_paused(&self, paused: bool) {
        self.paused.store(paused, Ordering::SeqCst);
    }

    /// Returns whether the job is paused, by an order or by an error.
    pub fn is_paused(&self) -> bool {
        self.paused.load(Ordering::SeqCst)
    }

    /// Ends the job after the requests that it has begun.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Returns whether the job was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// Ends a mirror that is ready, as soon as both sides are nearly the same.
    pub fn complete(&self) {
        self.complete.store(true, Ordering::Relaxed);
    }

    /// Returns whether [`complete`](Self::complete) was called.
    pub fn is_completing(&self) -> bool {
        self.complete.load(Ordering::Relaxed)
    }

    /// Returns whether the job has requests in flight. A paused job still finishes those that it has begun.
    pub fn is_busy(&self) -> bool {
        self.busy.load(Ordering::SeqCst)
    }

    pub(super) fn set_busy(&self, busy: bool) {
        self.busy.store(busy, Ordering::SeqCst);
    }

    /// Returns the number of bytes that a mirror has copied so far.
    ///
    /// Bytes that were copied twice count twice.
    pub fn copied(&self) -> u64 {
        self.copied.load(Ordering::Relaxed)
    }

    pub(super) fn add_copied(&self, bytes: u64) {
        self.copied.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// A report of a running job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Report {
    /// Both sides are the same, except for writes in flight.
    Ready,
    /// A request has failed, with the action that was taken.
    Error(Failure, OnError),
    /// Copying has ended: the reason, or the failed request. `Err(None)`: a write that could not be copied
    /// first went on.
    Ended(Result<End, Option<Failure>>),
}
