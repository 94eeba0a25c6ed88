//! The change to other tables that are in the file already, all at once.
//!
//! [Internal snapshots](super::super::snapshots) are made, deleted and applied beside the tables in use. The header then leads to the
//! new tables.

use std::collections::HashMap;
use std::ops::Range;

use super::change::{L1_AT, L1_ENTRIES};
use super::counts::{REFCOUNTS_AT, REFCOUNTS_CLUSTERS};
use super::entry::table;
use super::held::Intervals;
use super::owners::Owner;
use super::{Engine, Format};
use crate::drivers::qcow2::steps::{ENTRY, SECTOR, SIZE};

/// In the header: number of internal snapshots, and the first byte of their table.
const SNAPSHOTS: Range<usize> = 60..64;
const SNAPSHOTS_AT: Range<usize> = 64..72;

/// The tables that are always in memory, and what the header says of them.
#[derive(Debug, Clone)]
pub(in super::super) struct Roots {
    pub(in super::super) format: Format,
    /// The L1 table, and its first byte in the file.
    pub(in super::super) l1: Vec<u64>,
    pub(in super::super) l1_at: u64,
    /// The refcount table, and its first byte in the file.
    pub(in super::super) refcounts: Vec<u64>,
    pub(in super::super) refcounts_at: u64,
    /// The number of internal snapshots, and the first byte of their table.
    pub(in super::super) snapshots: (u32, u64),
    /// Bytes of the disk, if they change.
    pub(in super::super) size: Option<u64>,
    /// Metadata of snapshots: its bytes in the file.
    pub(in super::super) places: Vec<(Range<u64>, Owner)>,
}

/// Tables to switch to.
#[derive(Debug)]
pub(in super::super) struct Switch {
    roots: Roots,
    /// The owners of clusters with L2 tables and refcount blocks. Afterwards the old ones.
    tables: HashMap<u64, Owner>,
    /// Some of these clusters have become free.
    free: Option<Range<u64>>,
}

impl Roots {
    /// Collects what a switch to these tables takes, outside of any lock. Some of the clusters `free` have become free.
    pub(in super::super) fn collect(self, free: Option<Range<u64>>) -> Switch {
        let (bits, format) = (self.format.cluster_bits, self.format);
        // The entries were parsed when the tables were made.
        let l2 = self.l1.iter().filter_map(|entry| table(*entry, &format).ok().flatten());
        let l2 = l2.map(|(at, _)| (at >> bits, Owner::ActiveL2));
        let blocks = self.refcounts.iter().filter(|block| **block != 0);
        let blocks = blocks.map(|block| (block >> bits, Owner::RefcountBlock));
        let tables = l2.chain(blocks).collect();
        Switch { roots: self, tables, free }
    }

    /// Has a header lead to these tables.
    pub(in super::super) fn put_into(&self, header: &mut [u8; SECTOR]) {
        let clusters = (self.refcounts.len() * ENTRY) as u64 >> self.format.cluster_bits;
        header[L1_ENTRIES].copy_from_slice(&(self.l1.len() as u32).to_be_bytes());
        header[L1_AT].copy_from_slice(&self.l1_at.to_be_bytes());
        header[REFCOUNTS_AT].copy_from_slice(&self.refcounts_at.to_be_bytes());
        header[REFCOUNTS_CLUSTERS].copy_from_slice(&(clusters as u32).to_be_bytes());
        header[SNAPSHOTS].copy_from_slice(&self.snapshots.0.to_be_bytes());
        header[SNAPSHOTS_AT].copy_from_slice(&self.snapshots.1.to_be_bytes());
        if let Some(size) = self.size {
            header[SIZE].copy_from_slice(&size.to_be_bytes());
        }
    }
}

impl Engine {
    /// The tables in use. They are those of the file once all that has changed is there.
    pub(in super::super) fn roots(&self) -> Roots {
        Roots {
            format: self.format,
            l1: self.l1.to_vec(),
            l1_at: self.l1_at,
            refcounts: self.refcounts.clone(),
            refcounts_at: self.refcounts_at,
            snapshots: (0, 0),
            size: None,
            places: Vec::new(),
        }
    }

    /// Bytes of the L1 table, and of the refcount table.
    pub(in super::super) fn lens(&self) -> (u64, u64) {
        let len = |table: &[u64]| (table.len() * ENTRY) as u64;
        (len(&self.l1), len(&self.refcounts))
    }

    /// L2 tables and refcount blocks that there are.
    pub(in super::super) fn tables(&self) -> (u64, u64) {
        let count = |table: &[u64]| table.iter().filter(|entry| **entry != 0).count() as u64;
        (count(&self.l1), count(&self.refcounts))
    }

    /// Releases the clusters held for L2 tables that writes to come need. No request is in flight.
    pub(in super::super) fn release_coming(&mut self) {
        for cluster in std::mem::take(&mut self.coming).into_values() {
            self.release_room(cluster << self.format.cluster_bits, 1);
        }
    }

    /// The tables in the file are these from now on: the header leads to them. Nothing has changed in memory since
    /// [`roots`](Self::roots), and no request is in flight.
    pub(in super::super) fn switch(&mut self, switch: &mut Switch) {
        let bits = self.format.cluster_bits;
        let Switch { roots, tables, free } = switch;
        let clusters = |bytes: Range<u64>| bytes.start >> bits..bytes.end.div_ceil(1 << bits);
        let len = |table: &[u64]| (table.len() * ENTRY) as u64;
        roots.put_into(&mut self.header);
        self.owners.switch(tables);
        let own = &mut self.owners;
        own.add_range(clusters(roots.l1_at..roots.l1_at + len(&roots.l1)), Owner::ActiveL1);
        let table = roots.refcounts_at..roots.refcounts_at + len(&roots.refcounts);
        own.add_range(clusters(table), Owner::RefcountTable);
        for (bytes, owner) in &roots.places {
            own.add_range(clusters(bytes.clone()), *owner);
        }
        self.l2.grow(roots.l1.len());
        roots.l1 = self.l1.replace(std::mem::take(&mut roots.l1));
        std::mem::swap(&mut self.refcounts, &mut roots.refcounts);
        (self.l1_at, self.refcounts_at) = (roots.l1_at, roots.refcounts_at);
        // All that is in memory of the old ones goes, with the marks of clusters that may be overwritten.
        self.l2.forget_all();
        self.blocks.forget_all();
        self.packing.forget();
        self.unbacked = Intervals::default();
        self.ready = Intervals::default();
        if let Some(free) = free {
            self.first_free = self.first_free.min(free.start).max(1);
            // They may lie behind what the file had when it was opened, and were written to since.
            self.fresh = self.fresh.max(free.end);
        }
    }
}
