//! Room for metadata where the file may have no blocks yet.
//!
//! Metadata is written out after the requests that changed it were answered. On a file system that is full by then, a hole
//! in the file could not be filled, and no flush would succeed. So clusters are made zeroes before they become metadata: a
//! call that needs such a cluster [stops](Stop::Unbacked), and is called again once the cluster has blocks.
//!
//! Two kinds of clusters are meant. Those held for L2 tables are in `unbacked`. Refcount blocks and refcount tables
//! have their places where no block counts yet. Nothing else takes a cluster there; those with blocks are in `ready`.

use std::ops::Range;

use super::{Engine, Stop};

impl Engine {
    /// A table is to be in that cluster, to which nothing was ever written if it `is_fresh`.
    pub(super) fn note_table(&mut self, cluster: u64, is_fresh: bool) {
        // Where the file was made longer, it has blocks.
        if !is_fresh || cluster >= self.prepared {
            self.unbacked.insert(cluster..cluster + 1);
        }
    }

    /// Checks that clusters which no block counts have blocks in the file, and that no zeroes are written to what so many
    /// new refcount blocks count: it can be used for data afterwards.
    pub(super) fn check_is_backed(&self, clusters: &Range<u64>, blocks: usize) -> Result<(), Stop> {
        let counted = clusters.start + ((blocks as u64) << self.format.block_bits());
        let is_written = self.backing.start < counted && clusters.start < self.backing.end;
        let is_prepared = clusters.start >= self.fresh && clusters.end <= self.prepared;
        let is_ready = || clusters.clone().all(|cluster| self.ready.end_of(cluster).is_some());
        match !is_written && (is_prepared || is_ready()) {
            true => Ok(()),
            false => Err(Stop::Unbacked(clusters.clone())),
        }
    }

    /// The same for a cluster that is held for a table.
    pub(super) fn check_held(&self, cluster: u64) -> Result<(), Stop> {
        match self.unbacked.end_of(cluster) {
            None => Ok(()),
            Some(_) => Err(Stop::Unbacked(cluster..cluster + 1)),
        }
    }

    /// Whether clusters are made zeroes at present, or were by a task that has ended.
    pub(super) fn is_backing(&self, cluster: u64) -> bool {
        self.backing.contains(&cluster)
    }

    /// Whether a task that has ended may have left a write to clusters which no block counts: one that was to make the file
    /// [longer](Self::abandon_ahead).
    pub(in super::super) fn may_be_written(&self, clusters: &Range<u64>) -> bool {
        let is_left = |cluster| !self.has_block(cluster) && self.held.end_of(cluster).is_some();
        clusters.clone().any(is_left)
    }

    fn has_block(&self, cluster: u64) -> bool {
        let index = (cluster >> self.format.block_bits()) as usize;
        self.refcounts.get(index).is_some_and(|block| *block != 0)
    }

    /// Begins to make the clusters of [`Stop::Unbacked`] zeroes. Returns their bytes in the file. `None`: another task has
    /// done so.
    pub(in super::super) fn begin_backing(&mut self, clusters: Range<u64>) -> Option<Range<u64>> {
        let is_due = |cluster: u64| {
            self.unbacked.end_of(cluster).is_some()
                || !self.has_block(cluster) && self.ready.end_of(cluster).is_none()
        };
        // Some may be ready.
        let start = clusters.clone().find(|cluster| is_due(*cluster))?;
        let end = (start..clusters.end).find(|cluster| !is_due(*cluster)).unwrap_or(clusters.end);
        self.backing = start..end;
        let bits = self.format.cluster_bits;
        Some(start << bits..end << bits)
    }

    /// They are zeroes, or that has failed: then those that were held for tables are free.
    pub(in super::super) fn end_backing(&mut self, is_done: bool) {
        for cluster in std::mem::take(&mut self.backing) {
            let is_held = self.unbacked.end_of(cluster).is_some();
            match (is_held, is_done) {
                (true, true) => self.unbacked.remove(cluster..cluster + 1),
                (false, true) => self.ready.insert(cluster..cluster + 1),
                (true, false) => {
                    self.coming.retain(|_, coming| *coming != cluster);
                    self.release_room(cluster << self.format.cluster_bits, 1);
                }
                (false, false) => {}
            }
        }
    }
}
