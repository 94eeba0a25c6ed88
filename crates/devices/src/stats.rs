//! A queue's counters: gathered per batch, published once per batch, readable from any thread.

use std::cell::Cell;

use event_loop::Counter;

/// What a queue has done since the export was created. Only its thread writes; the counters of two
/// queues share no cache line, nor two that are fetched as a pair.
#[derive(Debug, Default)]
#[repr(align(128))]
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
    /// By [`Kind`].
    requests: [Cell<u32>; 5],
    errors: Cell<u32>,
    bytes_read: Cell<u64>,
    bytes_written: Cell<u64>,
    latency_ns: Cell<u64>,
    any: Cell<bool>,
}

impl Batch {
    pub(crate) fn add(&self, kind: Kind, ok: bool, bytes: u32, latency_ns: u64) {
        let n = self;
        n.any.set(true);
        n.latency_ns.update(|sum| sum + latency_ns);
        if ok {
            n.requests[kind as usize].update(|sum| sum + 1);
            match kind {
                Kind::Read => n.bytes_read.update(|sum| sum + u64::from(bytes)),
                Kind::Write => n.bytes_written.update(|sum| sum + u64::from(bytes)),
                Kind::Flush | Kind::Ranges | Kind::Other => {}
            }
        } else {
            n.errors.update(|sum| sum + 1);
        }
    }

    /// Whether nothing was answered since the last publishing.
    pub(crate) fn is_empty(&self) -> bool {
        !self.any.get()
    }

    /// Adds the batch to the counters.
    pub(crate) fn publish(&self, stats: &QueueStats, signalled: bool) {
        let n = self;
        n.any.set(false);
        let [reads, writes, flushes, ranges, other] = &n.requests;
        other.set(0);
        let pairs = [
            (&stats.reads, reads.take().into()),
            (&stats.writes, writes.take().into()),
            (&stats.flushes, flushes.take().into()),
            (&stats.ranges, ranges.take().into()),
            (&stats.errors, n.errors.take().into()),
            (&stats.bytes_read, n.bytes_read.take()),
            (&stats.bytes_written, n.bytes_written.take()),
            (&stats.latency_ns, n.latency_ns.take()),
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
            // The counts of the `Arc` as well: they lie before the value.
            let counts = |stats| first_line(stats) - 1;
            for other in &stats[n + 1..] {
                assert!(last_line(one) < counts(other) || last_line(other) < counts(one));
            }
        }
    }
}
