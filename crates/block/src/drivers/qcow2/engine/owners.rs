//! Which clusters of the file hold metadata, so that nothing else is written there.
//!
//! In an intact image no entry of an L2 table leads to such a cluster, and each of them counts as used. In a
//! damaged image both happen. A write or a discard there would destroy the tables.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

use super::Stop;

/// The kind of metadata in a cluster. Displayed in QEMU's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Owner {
    /// The header with its extensions.
    Header,
    /// The L1 table of the disk.
    ActiveL1,
    /// An L2 table of the disk.
    ActiveL2,
    /// The refcount table.
    RefcountTable,
    /// A refcount block.
    RefcountBlock,
    /// The table of internal snapshots.
    SnapshotTable,
    /// The L1 table of an internal snapshot.
    InactiveL1,
    /// The directory of persistent dirty bitmaps.
    BitmapDirectory,
    /// The LUKS header.
    LuksHeader,
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Owner::Header => "qcow2_header",
            Owner::ActiveL1 => "active L1 table",
            Owner::ActiveL2 => "active L2 table",
            Owner::RefcountTable => "refcount table",
            Owner::RefcountBlock => "refcount block",
            Owner::SnapshotTable => "snapshot table",
            Owner::InactiveL1 => "inactive L1 table",
            Owner::BitmapDirectory => "bitmap directory",
            Owner::LuksHeader => "encryption header",
        })
    }
}

/// The owners of clusters, each cluster by its number.
#[derive(Debug, Default)]
pub(super) struct Owners {
    /// Metadata of several clusters: sorted, without overlaps.
    ranges: Vec<(Range<u64>, Owner)>,
    /// L2 tables and refcount blocks: a cluster each.
    tables: HashMap<u64, Owner>,
    /// The first cluster that two kinds of metadata claim, and one of the kinds.
    conflict: Option<(u64, Owner)>,
}

impl Owners {
    /// The owner of a cluster. `None`: it holds no metadata.
    pub(super) fn of(&self, cluster: u64) -> Option<Owner> {
        let after = self.ranges.partition_point(|(range, _)| range.start <= cluster);
        let before = after.checked_sub(1).and_then(|at| self.ranges.get(at));
        match before {
            Some((range, owner)) if cluster < range.end => Some(*owner),
            _ => self.tables.get(&cluster).copied(),
        }
    }

    /// The first cluster of a range that holds metadata.
    pub(super) fn first_in(&self, range: Range<u64>) -> Option<(u64, Owner)> {
        range.into_iter().find_map(|cluster| Some((cluster, self.of(cluster)?)))
    }

    /// Checks that no cluster of the metadata is claimed twice. Otherwise a change of one table destroys another.
    pub(super) fn check(&self) -> Result<(), Stop> {
        match self.conflict {
            None => Ok(()),
            Some((cluster, owner)) => Err(Stop::Overlap { clusters: cluster..cluster + 1, owner }),
        }
    }

    /// Adds metadata that is always in one piece.
    pub(super) fn add_range(&mut self, range: Range<u64>, owner: Owner) {
        if range.is_empty() {
            return;
        }
        let overlaps =
            |(other, _): &&(Range<u64>, Owner)| other.start < range.end && range.start < other.end;
        let overlapped =
            self.ranges.iter().find(overlaps).map(|(other, kind)| (other.start, *kind));
        if let Some((start, other)) = overlapped {
            // Two snapshots may share an L1 table.
            if other != owner {
                self.conflict.get_or_insert((start.max(range.start), other));
            }
            return;
        }
        let at = self.ranges.partition_point(|(other, _)| other.start < range.start);
        self.ranges.insert(at, (range, owner));
    }

    /// Removes what [`add_range`](Self::add_range) has added for a range that begins there.
    pub(super) fn remove_range(&mut self, start: u64, owner: Owner) {
        self.ranges.retain(|(range, other)| range.start != start || *other != owner);
    }

    /// Replaces all tables that an [internal snapshot](super::switch) may move. `tables` gets the old ones of one cluster.
    pub(super) fn switch(&mut self, tables: &mut HashMap<u64, Owner>) {
        std::mem::swap(&mut self.tables, tables);
        self.ranges.retain(|(_, owner)| match owner {
            Owner::Header | Owner::BitmapDirectory | Owner::LuksHeader => true,
            Owner::ActiveL1
            | Owner::ActiveL2
            | Owner::RefcountTable
            | Owner::RefcountBlock
            | Owner::SnapshotTable
            | Owner::InactiveL1 => false,
        });
    }

    /// Adds a table of one cluster.
    pub(super) fn add_table(&mut self, cluster: u64, owner: Owner) {
        match self.of(cluster) {
            // Also of the same kind: each of the two has a copy in memory, and the later write-out wins.
            Some(other) => {
                self.conflict.get_or_insert((cluster, other));
            }
            None => {
                self.tables.insert(cluster, owner);
            }
        }
    }

    /// Removes a table of one cluster.
    pub(super) fn remove_table(&mut self, cluster: u64) {
        self.tables.remove(&cluster);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cluster_of_metadata_has_its_owner() {
        let mut owners = Owners::default();
        owners.add_range(0..1, Owner::Header);
        owners.add_range(8..12, Owner::ActiveL1);
        owners.add_range(4..5, Owner::RefcountTable);
        owners.add_table(6, Owner::ActiveL2);
        let of = |cluster| owners.of(cluster);
        assert!([0, 4, 6].map(of).iter().all(Option::is_some));
        assert_eq!([8, 11].map(of), [Some(Owner::ActiveL1); 2]);
        assert_eq!([1, 3, 5, 7, 12].map(of), [None; 5]);
        assert_eq!(owners.first_in(7..20), Some((8, Owner::ActiveL1)));
        assert_eq!(owners.first_in(12..20), None);
        assert!(owners.check().is_ok());
        owners.remove_range(8, Owner::ActiveL1);
        owners.remove_table(6);
        assert_eq!(owners.first_in(5..20), None);
    }

    #[test]
    fn metadata_that_two_claim_is_a_conflict() {
        let mut owners = Owners::default();
        owners.add_range(8..12, Owner::InactiveL1);
        owners.add_range(8..12, Owner::InactiveL1);
        owners.add_table(6, Owner::ActiveL2);
        assert!(owners.check().is_ok());
        owners.add_table(11, Owner::ActiveL2);
        let conflict = owners.check();
        assert!(
            matches!(conflict, Err(Stop::Overlap { ref clusters, owner: Owner::InactiveL1 }) if *clusters == (11..12)),
            "{conflict:?}"
        );
    }
}
