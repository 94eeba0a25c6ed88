//! Making the file longer ahead of its use.
//!
//! With `O_DIRECT`, a write that makes a file longer waits for all others. So zeroes are written behind what is in
//! use, many clusters at once. Meanwhile nothing finds room there.

use std::ops::Range;

use super::{Engine, Stop};

impl Engine {
    /// Whether there are less than a quarter of so many clusters left in the file.
    fn lacks(&self, clusters: u64) -> bool {
        self.fresh + clusters / 4 >= self.prepared
    }

    /// Begins to make the file longer by so many clusters, if it is time for that. Returns the bytes that are to
    /// become zeroes.
    pub(in super::super) fn begin_ahead(&mut self, clusters: u64) -> Option<Range<u64>> {
        let start = self.fresh.max(self.prepared);
        let end = start.checked_add(clusters).filter(|end| *end < self.most_clusters())?;
        if !self.ahead.is_empty() || !self.lacks(clusters) {
            return None;
        }
        // In a damaged image, metadata may lie beyond the end.
        self.check_is_data(start..end).ok()?;
        self.ahead = start..end;
        Some(start << self.format.cluster_bits..end << self.format.cluster_bits)
    }

    /// The file is longer, or that has failed.
    pub(in super::super) fn end_ahead(&mut self, is_done: bool) {
        let ahead = std::mem::take(&mut self.ahead);
        if is_done {
            self.prepared = ahead.end;
        }
    }

    /// Zeroes may be written there still: the clusters are not used before they are [settled](Self::settle).
    pub(in super::super) fn abandon_ahead(&mut self) {
        let ahead = std::mem::take(&mut self.ahead);
        self.fresh = self.fresh.max(ahead.end);
        self.prepared = self.fresh;
        self.held.insert(ahead.clone());
        self.give_up(ahead);
    }

    /// Checks that clusters which count as free may be used: the file is not made longer there at present, and they
    /// hold no metadata.
    pub(super) fn check_is_free(&self, clusters: &Range<u64>) -> Result<(), Stop> {
        self.check_is_data(clusters.clone())?;
        match clusters.start < self.ahead.end && self.ahead.start < clusters.end {
            true => Err(Stop::Busy),
            false => Ok(()),
        }
    }
}
