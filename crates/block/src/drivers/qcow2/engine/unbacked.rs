//! New tables that lie where the file may have no blocks yet.
//!
//! Tables are written out after the writes that they map were answered. On a file system that is full by then, a hole in
//! the file could not be filled. So tables get their blocks before anything is mapped in them.

use std::ops::Range;

use super::Engine;
use super::held::Intervals;

impl Engine {
    /// A table is, or is to be, in that cluster, to which nothing was ever written if it `is_fresh`.
    pub(super) fn note_table(&mut self, cluster: u64, is_fresh: bool) {
        // Where the file was made longer, it has blocks.
        if !is_fresh || cluster >= self.prepared {
            self.unbacked.insert(cluster..cluster + 1);
        }
    }

    /// Bytes of the file that are to become zeroes, so that they have blocks, while nothing is written out.
    pub(in super::super) fn unbacked(&self) -> Option<Range<u64>> {
        let first = self.unbacked.first()?;
        Some(first.start << self.format.cluster_bits..first.end << self.format.cluster_bits)
    }

    /// They are zeroes.
    pub(in super::super) fn back(&mut self, bytes: Range<u64>) {
        let bits = self.format.cluster_bits;
        self.unbacked.remove(bytes.start >> bits..bytes.end >> bits);
    }

    /// The tables without blocks that a write-out writes, for [`end_write_out`](Self::end_write_out).
    pub(in super::super) fn unbacked_tables(&self) -> Intervals {
        let mut tables = self.unbacked.clone();
        self.coming.values().for_each(|cluster| tables.remove(*cluster..cluster + 1));
        tables
    }

    /// These tables have been written out.
    pub(in super::super) fn end_write_out(&mut self, tables: &Intervals) {
        tables.iter().for_each(|clusters| self.unbacked.remove(clusters));
    }
}
