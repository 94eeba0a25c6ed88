//! `block-set-write-threshold`: a report when a write goes beyond a byte of the node.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use event_loop::mailbox;

/// A write has gone beyond a node's threshold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exceeded {
    /// The node.
    pub node_name: String,
    /// The threshold, in bytes. It is removed from the node.
    pub threshold: u64,
    /// How many bytes beyond it the write ends.
    pub amount: u64,
}

/// Where exceeded thresholds are reported.
pub(crate) type ThresholdSender = Arc<mailbox::Sender<Exceeded>>;

/// A node's write threshold; for all threads.
pub struct Threshold {
    node_name: String,
    /// Bytes; [`NONE`] without a threshold.
    bytes: AtomicU64,
    reports: Option<ThresholdSender>,
}

const NONE: u64 = u64::MAX;

impl Threshold {
    pub(super) fn new(node_name: &str, reports: Option<ThresholdSender>) -> Threshold {
        Threshold { node_name: node_name.to_owned(), bytes: AtomicU64::new(NONE), reports }
    }

    /// Sets the threshold, in bytes from the node's beginning; 0 removes it.
    pub fn set(&self, bytes: u64) {
        self.bytes.store(if bytes == 0 { NONE } else { bytes }, Ordering::Relaxed);
    }

    /// Returns the threshold, bytes; 0 if there is none.
    pub fn get(&self) -> u64 {
        match self.bytes.load(Ordering::Relaxed) {
            NONE => 0,
            bytes => bytes,
        }
    }

    /// Looks at a write that ends before byte `end`. The first one beyond the threshold removes it.
    #[inline]
    pub(super) fn check(&self, end: u64) {
        let threshold = self.bytes.load(Ordering::Relaxed);
        if end > threshold {
            self.exceed(threshold, end);
        }
    }

    #[cold]
    fn exceed(&self, threshold: u64, end: u64) {
        // Another thread may have reported it, or an operator changed it.
        let removed =
            self.bytes.compare_exchange(threshold, NONE, Ordering::Relaxed, Ordering::Relaxed);
        if removed.is_ok()
            && let Some(reports) = &self.reports
        {
            let (node_name, amount) = (self.node_name.clone(), end - threshold);
            // Nobody listens any more when the daemon ends.
            let _ = reports.send(Exceeded { node_name, threshold, amount });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_write_beyond_it_removes_a_threshold() {
        let threshold = Threshold::new("n", None);
        threshold.check(u64::MAX - 1);
        threshold.set(4096);
        threshold.check(4096);
        assert_eq!(threshold.get(), 4096);
        threshold.check(4097);
        assert_eq!(threshold.get(), 0);
    }
}
