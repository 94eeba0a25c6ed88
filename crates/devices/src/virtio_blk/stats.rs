//! A queue's counters: gathered per batch, published once per batch, readable from any thread.

use std::cell::Cell;

use event_loop::Counter;

/// What a queue has done since the export was created. Only its thread writes.
#[derive(Debug, Default)]
pub struct QueueStats {
    /// Requests answered with OK: reads.
    pub reads: Counter,
    /// Writes.
    pub writes: Counter,
    /// Flushes.
    pub flushes: Counter,
    /// Discards and write-zeroes.
    pub ranges: Counter,
    /// Requests answered with another status, of any kind.
    pub errors: Counter,
    /// Bytes read.
    pub bytes_read: Counter,
    /// Bytes written.
    pub bytes_written: Counter,
    /// Nanoseconds from the batch a request was taken in to the batch it was answered in, all
    /// requests together.
    pub latency_ns: Counter,
    /// Batches of answers published.
    pub batches: Counter,
    /// Signals sent to the guest: at most one per batch.
    pub signals: Counter,
}

/// What a request is counted as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    Flush,
    Ranges,
    Other,
}

/// The counters of the batch under way.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    numbers: Cell<Numbers>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Numbers {
    requests: [u32; 5],
    errors: u32,
    bytes_read: u64,
    bytes_written: u64,
    latency_ns: u64,
}

impl Batch {
    pub(crate) fn add(&self, kind: Kind, ok: bool, bytes: u32, latency_ns: u64) {
        let mut n = self.numbers.get();
        n.latency_ns += latency_ns;
        if ok {
            n.requests[kind as usize] += 1;
            match kind {
                Kind::Read => n.bytes_read += u64::from(bytes),
                Kind::Write => n.bytes_written += u64::from(bytes),
                Kind::Flush | Kind::Ranges | Kind::Other => {}
            }
        } else {
            n.errors += 1;
        }
        self.numbers.set(n);
    }

    /// Whether nothing was answered since the last publishing.
    pub(crate) fn is_empty(&self) -> bool {
        let n = self.numbers.get();
        n.errors == 0 && n.requests == [0; 5]
    }

    /// Adds the batch to the counters.
    pub(crate) fn publish(&self, stats: &QueueStats, signalled: bool) {
        let n = self.numbers.take();
        let [reads, writes, flushes, ranges, _] = n.requests;
        let pairs = [
            (&stats.reads, reads.into()),
            (&stats.writes, writes.into()),
            (&stats.flushes, flushes.into()),
            (&stats.ranges, ranges.into()),
            (&stats.errors, n.errors.into()),
            (&stats.bytes_read, n.bytes_read),
            (&stats.bytes_written, n.bytes_written),
            (&stats.latency_ns, n.latency_ns),
            (&stats.batches, 1),
            (&stats.signals, signalled.into()),
        ];
        for (counter, n) in pairs {
            if n > 0 {
                counter.add(n);
            }
        }
    }
}
