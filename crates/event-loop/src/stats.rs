//! Counters of a loop, readable from any thread.

use std::sync::atomic::{AtomicU64, Ordering};

/// What a loop has done since it was created.
///
/// Each number only grows, but for the window.
///
/// Written by the loop's thread alone (but for `wakes`), with plain stores; a reader may see one a
/// little older than another. They have cache lines of their own: two, as processors fetch them in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct LoopStats {
    /// Iterations.
    pub iterations: Counter,
    /// Calls of io_uring_enter (or epoll_pwait2): at most one per iteration (one-call contract).
    pub enters: Counter,
    /// Calls of io_submit, of Linux AIO: at most one per iteration, unless more was queued than
    /// [`LoopConfig::entries`](crate::LoopConfig::entries).
    pub aio_submits: Counter,
    /// Enters that were allowed to sleep.
    pub sleeps: Counter,
    /// Sleeps that were announced and cancelled, as a message came in between.
    pub sleeps_called_off: Counter,
    /// Wake-ups of the loop by another thread: at most one per announced sleep, cancelled ones included (wake-up
    /// contract).
    pub wakes: Counter,
    /// Operations submitted.
    pub submitted: Counter,
    /// Operations completed (accounting contract: submitted = completed + in flight).
    pub completed: Counter,
    /// Busy polls that found something.
    pub poll_hits: Counter,
    /// Busy polls that found nothing in their window.
    pub poll_misses: Counter,
    /// Nanoseconds spent in busy polls, of either outcome.
    pub polled_ns: Counter,
    /// The poll window, nanoseconds.
    pub poll_window_ns: Counter,
    /// Measured time from an event until the sleeping thread runs, nanoseconds. 0: not measured.
    pub sleep_late_ns: Counter,
    /// Measured CPU time of a sleep, nanoseconds. 0: not measured.
    pub sleep_cpu_ns: Counter,
}

/// A number that one thread writes, as a rule, and any thread reads.
///
/// Wraps around at 2^64.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Returns the value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds `n`.
    ///
    /// Only the owning thread may: it is a load and a store, not a locked addition.
    pub fn add(&self, n: u64) {
        self.0.store(self.get().wrapping_add(n), Ordering::Relaxed);
    }

    /// Adds `n` to a number that several threads write.
    pub fn add_from_any_thread(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Sets the value. Only the owning thread may.
    pub fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }
}
