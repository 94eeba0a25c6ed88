//! Latencies counted by boundaries that somebody has asked for (`block-latency-histogram-set`).

use std::sync::Arc;

use event_loop::Counter;

use crate::queue::Kind;

/// Where the latencies of a queue's reads, writes and flushes are counted.
#[derive(Debug, Clone, Default)]
pub(crate) struct BinsOf {
    read: Option<Arc<BinCounters>>,
    write: Option<Arc<BinCounters>>,
    flush: Option<Arc<BinCounters>>,
}

impl BinsOf {
    /// New counters of a kind, or none.
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
    /// One more than there are boundaries.
    counts: Vec<Counter>,
}

impl BinCounters {
    fn new(boundaries: Vec<u64>) -> Self {
        let counts = (0..=boundaries.len()).map(|_| Counter::default()).collect();
        BinCounters { boundaries, counts }
    }

    /// Only the queue's thread may.
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

/// Latencies, counted: bin `i` has those from boundary `i - 1`, or 0, to below boundary `i`, the last
/// all from the last boundary on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bins {
    /// Nanoseconds, rising.
    pub boundaries: Vec<u64>,
    /// One more than there are boundaries.
    pub counts: Vec<u64>,
}

impl Bins {
    /// Those of both, if they have the same boundaries.
    pub(crate) fn add(&mut self, other: &Bins) {
        if self.boundaries == other.boundaries {
            for (mine, other) in self.counts.iter_mut().zip(&other.counts) {
                *mine += other;
            }
        }
    }
}
