//! What a job is told and what it tells, between the control plane and its worker.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::copy::Failure;
use super::mirror::End;
use super::worker::OnError;

/// Orders to a job, and how far it is; for all threads. Each takes effect within a tenth of a second.
#[derive(Debug, Default)]
pub struct Control {
    speed: AtomicU64,
    paused: AtomicBool,
    cancelled: AtomicBool,
    complete: AtomicBool,
    copied: AtomicU64,
}

impl Control {
    /// Of a job that copies `speed` bytes a second at most; 0: as fast as it goes.
    pub fn new(speed: u64) -> Control {
        Control { speed: AtomicU64::new(speed), ..Control::default() }
    }

    /// Sets the speed from now on.
    pub fn set_speed(&self, speed: u64) {
        self.speed.store(speed, Ordering::Relaxed);
    }

    pub(super) fn speed(&self) -> u64 {
        self.speed.load(Ordering::Relaxed)
    }

    /// Stops for a while, or goes on.
    pub fn set_paused(&self, paused: bool) {
        self.paused.store(paused, Ordering::Relaxed);
    }

    /// Whether it has been stopped for a while, by an order or by an error.
    pub fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Relaxed)
    }

    /// Ends it as soon as what it has begun has been done.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Whether it was told to end.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// Has a mirror that is ready end, as soon as both sides are nearly the same.
    pub fn complete(&self) {
        self.complete.store(true, Ordering::Relaxed);
    }

    /// Whether it was told to complete.
    pub fn is_completing(&self) -> bool {
        self.complete.load(Ordering::Relaxed)
    }

    /// Bytes copied so far, those that were copied again included.
    pub fn copied(&self) -> u64 {
        self.copied.load(Ordering::Relaxed)
    }

    pub(super) fn add_copied(&self, bytes: u64) {
        self.copied.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// What a job tells while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Report {
    /// Both sides are the same, but for what is being written now.
    Ready,
    /// A request has failed, and this is done about it.
    Error(Failure, OnError),
    /// Copying has ended: why, or which request failed. Without one, a write went on that could not be
    /// copied before.
    Ended(Result<End, Option<Failure>>),
}
