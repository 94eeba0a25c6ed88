//! Counters of a queue, or of a thread's connections. They are collected and published per batch, and are
//! readable from any thread.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use event_loop::sync::lock;
use event_loop::{Counter, Latencies, LatencyCounters};
use nix::errno::Errno;

use crate::bins::{Bins, BinsOf};
use crate::failures::Failures;

/// The kind under which a request is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A read.
    Read,
    /// A write.
    Write,
    /// A flush.
    Flush,
    /// A discard of one or more ranges.
    Discard,
    /// A write of zeroes to one or more ranges.
    WriteZeroes,
    /// Any other request.
    Other,
}

impl Kind {
    /// All kinds, in the order of their numbers.
    pub const ALL: [Kind; 6] =
        [Kind::Read, Kind::Write, Kind::Flush, Kind::Discard, Kind::WriteZeroes, Kind::Other];

    /// Returns the kind's name in statistics.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Read => "read",
            Kind::Write => "write",
            Kind::Flush => "flush",
            Kind::Discard => "discard",
            Kind::WriteZeroes => "write-zeroes",
            Kind::Other => "other",
        }
    }
}

/// Counters of a queue since the export was created.
///
/// Only the queue's thread writes them. The counters of two queues share neither a cache line nor a pair of lines
/// that is prefetched together.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct QueueStats {
    /// By [`Kind`].
    kinds: [KindStats; Kind::ALL.len()],
    /// Requests taken, including those in flight.
    pub taken: Counter,
    /// Batches of answers published.
    pub batches: Counter,
    /// Signals sent to the guest: at most one per batch.
    pub signals: Counter,
    /// When the last batch was published, loop time.
    answered_at_ns: Counter,
    /// Histograms set by the user, and how often they were changed.
    bins: Mutex<BinsOf>,
    bins_version: AtomicU32,
    /// Receives failures. Unset: failures are not reported.
    failures: OnceLock<Arc<Failures>>,
}

#[derive(Debug, Default)]
struct KindStats {
    done: Counter,
    failed: Counter,
    invalid: Counter,
    bytes: Counter,
    total_ns: Counter,
    /// Allocated with the first request of the kind, as most queues see two or three kinds.
    latencies: OnceLock<Box<LatencyCounters>>,
}

/// A snapshot of a queue's counters, or the sum of several.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QueueNumbers {
    /// By [`Kind`], in the order of [`Kind::ALL`].
    pub kinds: [KindNumbers; Kind::ALL.len()],
    /// Requests taken, including those in flight.
    pub taken: u64,
    /// Batches of answers published.
    pub batches: u64,
    /// Signals sent to the guest.
    pub signals: u64,
    /// When the last batch was published, loop time in nanoseconds; 0: never.
    pub answered_at_ns: u64,
}

/// Counters of one kind of request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KindNumbers {
    /// Requests answered with success.
    pub done: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Requests refused without an attempt.
    pub invalid: u64,
    /// Bytes of successful requests; 0 for flushes.
    pub bytes: u64,
    /// Sum of the latencies of all requests except refused ones, nanoseconds. A latency is the time from the
    /// batch that took the request to the batch that answered it.
    pub total_ns: u64,
    /// The distribution of these latencies.
    pub latencies: Latencies,
    /// The histogram set by the user.
    pub bins: Option<Bins>,
}

impl QueueStats {
    /// Takes a snapshot.
    pub fn get(&self) -> QueueNumbers {
        let bins = lock(&self.bins).clone();
        // Read answers first: requests in flight may seem too many, but not negative.
        let kinds = Kind::ALL.map(|kind| {
            let stats = self.kind(kind);
            KindNumbers {
                done: stats.done.get(),
                failed: stats.failed.get(),
                invalid: stats.invalid.get(),
                bytes: stats.bytes.get(),
                total_ns: stats.total_ns.get(),
                latencies: stats.latencies.get().map(|all| all.get()).unwrap_or_default(),
                bins: bins.of(kind).map(|counters| counters.get()),
            }
        });
        QueueNumbers {
            kinds,
            taken: self.taken.get(),
            batches: self.batches.get(),
            signals: self.signals.get(),
            answered_at_ns: self.answered_at_ns.get(),
        }
    }

    /// Sets where failures are reported. Only the first call takes effect.
    pub fn watch(&self, failures: Arc<Failures>) {
        let _ = self.failures.set(failures);
    }

    /// Reports a request, or a part of one, that failed in the block layer.
    ///
    /// `unit`: the number of the logical unit of virtio-scsi, else 0. `offset`: the request's first byte on the
    /// disk.
    ///
    /// `unit`: the logical unit of virtio-scsi, else 0.
    #[cold]
    pub fn node_failed(&self, unit: u16, kind: Kind, offset: u64, errno: Errno) {
        if let Some(failures) = self.failures.get() {
            failures.add(unit, kind, offset, errno);
        }
    }

    /// Returns the number of requests of a kind that were answered with success.
    pub fn done(&self, kind: Kind) -> u64 {
        self.kind(kind).done.get()
    }

    /// Returns the number of requests in flight.
    pub fn in_flight(&self) -> u64 {
        let answered = |kind: &KindStats| kind.done.get() + kind.failed.get() + kind.invalid.get();
        let answered = self.kinds.iter().map(answered).sum();
        self.taken.get().saturating_sub(answered)
    }

    /// Returns the number of requests that failed or were refused.
    pub fn errors(&self) -> u64 {
        self.kinds.iter().map(|kind| kind.failed.get() + kind.invalid.get()).sum()
    }

    /// Starts a histogram of reads, writes or flushes. `None` removes it.
    ///
    /// The boundaries are latencies in nanoseconds, ascending.
    pub fn count_in_bins(&self, kind: Kind, boundaries: Option<Vec<u64>>) {
        lock(&self.bins).set(kind, boundaries);
        self.bins_version.fetch_add(1, Ordering::Relaxed);
    }

    fn kind(&self, kind: Kind) -> &KindStats {
        &self.kinds[kind as usize]
    }
}

impl QueueNumbers {
    /// Returns the counters of one kind.
    pub fn kind(&self, kind: Kind) -> &KindNumbers {
        &self.kinds[kind as usize]
    }

    /// Returns the number of requests in flight.
    pub fn in_flight(&self) -> u64 {
        let answered = |kind: &KindNumbers| kind.done + kind.failed + kind.invalid;
        self.taken.saturating_sub(self.kinds.iter().map(answered).sum())
    }

    /// Adds the counters of `other`.
    pub fn add(&mut self, other: &QueueNumbers) {
        for (mine, other) in self.kinds.iter_mut().zip(&other.kinds) {
            mine.add(other);
        }
        self.taken += other.taken;
        self.batches += other.batches;
        self.signals += other.signals;
        self.answered_at_ns = self.answered_at_ns.max(other.answered_at_ns);
    }
}

impl KindNumbers {
    /// Adds the counters of `other`.
    pub fn add(&mut self, other: &KindNumbers) {
        self.done += other.done;
        self.failed += other.failed;
        self.invalid += other.invalid;
        self.bytes += other.bytes;
        self.total_ns += other.total_ns;
        self.latencies.add(&other.latencies);
        match (&mut self.bins, &other.bins) {
            (Some(mine), Some(other)) => mine.add(other),
            (mine, other) => *mine = mine.take().or_else(|| other.clone()),
        }
    }
}

/// Counters of the current batch.
///
/// Requests taken together are mostly answered together, so requests of one kind and latency are counted at once, as
/// a run.
#[derive(Debug, Default)]
pub struct Batch {
    /// By [`Kind`].
    runs: [Run; Kind::ALL.len()],
    /// A bit for each kind with a run.
    begun: Cell<u8>,
    /// When the last run began, loop time.
    at_ns: Cell<u64>,
    /// The user's histograms, and their version.
    bins: RefCell<BinsOf>,
    bins_version: Cell<u32>,
}

/// Requests of the same kind and latency.
#[derive(Debug)]
struct Run {
    latency_ns: Cell<u64>,
    bytes: Cell<u64>,
    count: Cell<u64>,
}

/// The latency of a kind without a run.
const NOT_BEGUN: u64 = u64::MAX;

impl Default for Run {
    fn default() -> Self {
        Run { latency_ns: Cell::new(NOT_BEGUN), bytes: Cell::new(0), count: Cell::new(0) }
    }
}

impl Batch {
    /// Counts a successful request of `bytes` bytes. Times are loop times, nanoseconds.
    #[inline(always)]
    pub fn done(&self, stats: &QueueStats, kind: Kind, bytes: u64, started_ns: u64, now_ns: u64) {
        let run = &self.runs[kind as usize];
        let latency_ns = now_ns.saturating_sub(started_ns);
        let before_ns = run.latency_ns.get();
        if before_ns != latency_ns {
            if before_ns != NOT_BEGUN {
                self.end_run_early(stats, kind);
            }
            run.latency_ns.set(latency_ns);
            self.begun.set(self.begun.get() | 1 << kind as u8);
            self.at_ns.set(now_ns);
        }
        run.bytes.update(|sum| sum + bytes);
        run.count.update(|count| count + 1);
    }

    /// Counts a failed request. Times are loop times, in nanoseconds.
    #[cold]
    pub fn failed(&self, stats: &QueueStats, kind: Kind, started_ns: u64, now_ns: u64) {
        stats.kind(kind).failed.add(1);
        self.at_ns.set(now_ns);
        self.took(stats, kind, now_ns.saturating_sub(started_ns), 1);
    }

    /// Counts a refused request.
    #[cold]
    pub fn invalid(&self, stats: &QueueStats, kind: Kind) {
        stats.kind(kind).invalid.add(1);
    }

    /// Drops an unanswered request. The next process that serves the queue counts it.
    #[cold]
    pub fn left(&self, stats: &QueueStats) {
        stats.taken.set(stats.taken.get().saturating_sub(1));
    }

    /// Publishes the batch.
    #[inline]
    pub fn publish(&self, stats: &QueueStats, signalled: bool) {
        let mut begun = self.begun.take();
        while let Some(kind) = Kind::ALL.get(begun.trailing_zeros() as usize) {
            begun &= begun - 1;
            self.end_run(stats, *kind);
        }
        stats.batches.add(1);
        stats.signals.add(signalled.into());
        stats.answered_at_ns.set(self.at_ns.get());
    }

    /// Ends the run of a kind and begins one with another latency.
    #[inline(never)]
    fn end_run_early(&self, stats: &QueueStats, kind: Kind) {
        self.end_run(stats, kind);
    }

    /// Adds a run to the counters.
    #[inline]
    fn end_run(&self, stats: &QueueStats, kind: Kind) {
        let run = &self.runs[kind as usize];
        let latency_ns = run.latency_ns.replace(NOT_BEGUN);
        if latency_ns != NOT_BEGUN {
            let (count, of_kind) = (run.count.take(), stats.kind(kind));
            of_kind.done.add(count);
            of_kind.bytes.add(run.bytes.take());
            self.took(stats, kind, latency_ns, count);
        }
    }

    /// Adds `count` requests of one latency.
    #[inline]
    fn took(&self, stats: &QueueStats, kind: Kind, latency_ns: u64, count: u64) {
        let of_kind = stats.kind(kind);
        of_kind.total_ns.add(latency_ns * count);
        of_kind.latencies.get_or_init(Box::default).add(latency_ns, count);
        let version = stats.bins_version.load(Ordering::Relaxed);
        if version > 0 {
            self.count_in_bins(stats, version, kind, latency_ns, count);
        }
    }

    /// Adds latencies to the user's histograms.
    #[cold]
    fn count_in_bins(
        &self,
        stats: &QueueStats,
        version: u32,
        kind: Kind,
        latency_ns: u64,
        count: u64,
    ) {
        if self.bins_version.replace(version) != version {
            self.bins.replace(lock(&stats.bins).clone());
        }
        if let Some(counters) = self.bins.borrow().of(kind) {
            counters.add(latency_ns, count);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn queues_of_two_threads_write_to_no_common_cache_line() {
        const LINES: usize = 128;
        let stats: Vec<Arc<QueueStats>> = (0..8).map(|_| Arc::default()).collect();
        let first_line = |stats: &Arc<QueueStats>| (&raw const **stats).addr() / LINES;
        let last_line = |stats| first_line(stats) + (size_of::<QueueStats>() - 1) / LINES;
        for (n, one) in stats.iter().enumerate() {
            assert!((&raw const **one).addr().is_multiple_of(LINES));
            // Include the counts of the `Arc`, which precede the value.
            let counts = |stats| first_line(stats) - 1;
            for other in &stats[n + 1..] {
                assert!(last_line(one) < counts(other) || last_line(other) < counts(one));
            }
        }
    }

    #[test]
    fn each_answer_is_counted_once_under_its_kind_and_latency() {
        let (stats, batch) = (QueueStats::default(), Batch::default());
        stats.taken.add(8);
        for latency in [1000, 1000, 3000] {
            batch.done(&stats, Kind::Read, 4096, 7000 - latency, 7000);
        }
        batch.done(&stats, Kind::Write, 512, 4000, 7000);
        batch.done(&stats, Kind::Flush, 0, 7000, 7000);
        batch.failed(&stats, Kind::Write, 0, 9000);
        batch.invalid(&stats, Kind::Discard);
        batch.publish(&stats, true);
        batch.publish(&stats, false);
        let numbers = stats.get();
        assert_eq!(numbers.in_flight(), 1);
        assert_eq!((numbers.batches, numbers.signals, numbers.answered_at_ns), (2, 1, 9000));
        let of = |kind| {
            let KindNumbers { done, failed, invalid, bytes, total_ns, latencies, .. } =
                numbers.kind(kind);
            assert_eq!(latencies.count(), done + failed);
            [*done, *failed, *invalid, *bytes, *total_ns]
        };
        assert_eq!(of(Kind::Read), [3, 0, 0, 12288, 5000]);
        assert_eq!(of(Kind::Write), [1, 1, 0, 512, 12000]);
        assert_eq!(of(Kind::Flush), [1, 0, 0, 0, 0]);
        assert_eq!(of(Kind::Discard), [0, 0, 1, 0, 0]);
        assert_eq!(of(Kind::Other), [0; 5]);
        assert_eq!(numbers.kind(Kind::Read).latencies.below(1024), 2);
    }

    #[test]
    fn bins_count_while_enabled() {
        let (stats, batch) = (QueueStats::default(), Batch::default());
        let done = |latency| {
            batch.done(&stats, Kind::Read, 0, 0, latency);
            batch.publish(&stats, false);
        };
        let counts = || stats.get().kind(Kind::Read).bins.clone().map(|bins| bins.counts);
        done(5);
        stats.count_in_bins(Kind::Read, Some(vec![10, 20]));
        assert_eq!(counts(), Some(vec![0, 0, 0]));
        [9, 10, 19, 20, 1000].into_iter().for_each(done);
        assert_eq!(counts(), Some(vec![1, 2, 2]));
        assert_eq!(stats.get().kind(Kind::Write).bins, None);
        stats.count_in_bins(Kind::Read, Some(vec![7]));
        done(7);
        assert_eq!(counts(), Some(vec![0, 1]));
        stats.count_in_bins(Kind::Read, None);
        done(7);
        assert_eq!(counts(), None);
    }
}
