//! Latency histograms with boundaries set by the user (`block-latency-histogram-set`).

use std::sync::Arc;

use event_loop::Counter;

use crate::queue::Kind;

/// Histograms of a queue's reads, writes and flushes.
#[derive(Debug, Clone, Default)]
pub(crate) struct BinsOf {
    read: Option<Arc<BinCounters>>,
    write: Option<Arc<BinCounters>>,
    flush: Option<Arc<BinCounters>>,
}

impl BinsOf {
    /// Replaces the histogram of a kind, or removes it.
    pub(crate) fn set(&mut self, kind: Kind, boundaries: Option<Vec<u64>>) {
        let counters = boundaries.map(|boundaries| Arc::new(BinCounters::new(boundaries)));
        match kind {
            Kind::Read => self.read = counters,
            Kind::Write => self.write = counters,
            Kind::Flush => self.flush = counters,
            Kind::Discard | Kind::WriteZeroes | Kind::Other => {}
        }
    }

    pub(crate) fn of(&self, kind: Kind) -> Option<&BinCounters> {
        match kind {
            Kind::Read => self.read.as_deref(),
            Kind::Write => self.write.as_deref(),
            Kind::Flush => self.flush.as_deref(),
            Kind::Discard | Kind::WriteZeroes | Kind::Other => None,
        }
    }
}

#[derive(Debug)]
pub(crate) struct BinCounters {
    boundaries: Vec<u64>,
    /// One more than boundaries.
    counts: Vec<Counter>,
}

impl BinCounters {
    fn new(boundaries: Vec<u64>) -> Self {
        let counts = (0..=boundaries.len()).map(|_| Counter::default()).collect();
        BinCounters { boundaries, counts }
    }

    /// Adds `count` latencies. Only the queue's thread may call this.
    pub(crate) fn add(&self, latency_ns: u64, count: u64) {
        let bin = self.boundaries.partition_point(|boundary| *boundary <= latency_ns);
        if let Some(counter) = self.counts.get(bin) {
            counter.add(count);
        }
    }

    pub(crate) fn get(&self) -> Bins {
        let counts = self.counts.iter().map(Counter::get).collect();
        Bins { boundaries: self.boundaries.clone(), counts }
    }
}

/// A latency histogram.
///
/// Bin `i` counts latencies from boundary `i - 1`, or 0, to below boundary `i`. The last bin counts all from the
/// last boundary on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bins {
    /// Boundaries in nanoseconds, ascending.
    pub boundaries: Vec<u64>,
    /// Counts, one more than boundaries.
    pub counts: Vec<u64>,
}

impl Bins {
    /// Adds `other`, if it has the same boundaries.
    pub(crate) fn add(&mut self, other: &Bins) {
        if self.boundaries == other.boundaries {
            for (mine, other) in self.counts.iter_mut().zip(&other.counts) {
                *mine += other;
            }
        }
    }
}
