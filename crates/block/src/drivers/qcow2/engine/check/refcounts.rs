//! The reference counts of the file: compared with what is in use, changed in place, and replaced.

use std::collections::BTreeMap;
use std::io;

use super::{Check, CheckError, CheckedFile, References, Repair, Shape};
use crate::drivers::qcow2::engine::counts::{REFCOUNTS_AT, REFCOUNTS_CLUSTERS, count, set_count};
use crate::drivers::qcow2::header::MAX_REFCOUNT_TABLE;
use crate::drivers::qcow2::steps::{ENTRY, SECTOR, number};

/// The reference counts of a file.
#[derive(Debug)]
pub(super) struct Refcounts {
    order: u32,
    /// Bits of an index in a block.
    bits: u32,
    /// By index in the refcount table.
    blocks: BTreeMap<u64, Block>,
}

#[derive(Debug)]
struct Block {
    at: u64,
    /// `None`: the entry of the refcount table does not lead to a block, or the block cannot be read.
    bytes: Option<Vec<u8>>,
    is_changed: bool,
}

impl Refcounts {
    /// Reads all blocks.
    pub(super) fn read(
        file: &mut dyn CheckedFile,
        shape: &Shape,
        (at, len): (u64, u64),
    ) -> io::Result<Refcounts> {
        let bits = shape.cluster_bits + 3 - shape.refcount_order;
        // Blocks beyond the end of the file count nothing that is there.
        let used = file.len().div_ceil(shape.cluster()).div_ceil(1 << bits);
        let table = file.read(at, len as usize)?;
        let mut blocks = BTreeMap::new();
        for (index, raw) in (0..used).zip(table.chunks_exact(ENTRY).map(number)) {
            let at = raw & !511;
            if at == 0 {
                continue;
            }
            let bytes = match shape.is_aligned(at) && i64::try_from(at).is_ok() {
                true => file.read(at, shape.cluster() as usize).ok(),
                false => None,
            };
            blocks.insert(index, Block { at, bytes, is_changed: false });
        }
        Ok(Refcounts { order: shape.refcount_order, bits, blocks })
    }

    /// The count of a cluster. `None`: it is unknown.
    pub(super) fn of(&self, cluster: u64) -> Option<u64> {
        let Some(block) = self.blocks.get(&(cluster >> self.bits)) else { return Some(0) };
        let at = cluster & ((1 << self.bits) - 1);
        block.bytes.as_ref().map(|bytes| count(bytes, at as usize, self.order))
    }

    /// The first of so many adjacent clusters, from `from` on, that are counted, and not in use. `None`: there are none.
    pub(super) fn unused(&self, from: u64, clusters: u64) -> Option<u64> {
        let (mut free, mut next) = (0, 0);
        let blocks = self.blocks.keys().map(|index| index << self.bits);
        let counted = blocks.flat_map(|first| first..first + (1 << self.bits));
        for cluster in counted.skip_while(|cluster| *cluster < from) {
            free = match self.of(cluster) {
                Some(0) if cluster == next => free + 1,
                Some(0) => 1,
                _ => 0,
            };
            if free == clusters {
                return Some(cluster + 1 - clusters);
            }
            next = cluster + 1;
        }
        None
    }

    /// The end of the last cluster that is in use, as a number of clusters.
    pub(super) fn end(&self) -> u64 {
        let last = self.blocks.keys().rev().flat_map(|index| {
            let first = index << self.bits;
            (first..first + (1 << self.bits)).rev()
        });
        let mut used = last.skip_while(|cluster| matches!(self.of(*cluster), Some(0) | None));
        used.next().map_or(0, |last| last + 1)
    }

    pub(super) fn set(&mut self, cluster: u64, to: u64) {
        let at = cluster & ((1 << self.bits) - 1);
        if let Some(block) = self.blocks.get_mut(&(cluster >> self.bits))
            && let Some(bytes) = &mut block.bytes
        {
            set_count(bytes, at as usize, self.order, to);
            block.is_changed = true;
        }
    }

    /// Writes changed blocks. Returns whether there were any.
    pub(super) fn store(&mut self, file: &mut dyn CheckedFile) -> io::Result<bool> {
        let mut any = false;
        for block in self.blocks.values_mut().filter(|block| block.is_changed) {
            if let Some(bytes) = &block.bytes {
                file.write(block.at, bytes)?;
            }
            (block.is_changed, any) = (false, true);
        }
        Ok(any)
    }
}

impl Check<'_> {
    /// Compares counts with references, and repairs counts in memory.
    pub(super) fn compare(
        &mut self,
        refcounts: &mut Refcounts,
        references: &References,
    ) -> Result<(), CheckError> {
        let mut end = 0;
        // A misaligned entry may lead to a cluster behind the end of the file.
        for cluster in 0..self.clusters().max(references.used()) {
            match (refcounts.of(cluster), references.of(cluster)) {
                (None, _) => {
                    (self.tell)(format_args!("Can't get refcount for cluster {cluster}"));
                    self.found.check_errors += 1;
                }
                (Some(0), 0) => {}
                (Some(count), _) => {
                    end = cluster + 1;
                    self.rebuild |= count == 0;
                }
            }
        }
        for cluster in 0..end {
            let references = references.of(cluster);
            let Some(count) = refcounts.of(cluster).filter(|count| *count != references) else {
                continue;
            };
            // A structure that is replaced is not repaired.
            let repaired = !self.rebuild
                && match count > references {
                    true => self.repair.leaks(),
                    false => self.repair.errors(),
                };
            let what = match (repaired, count > references) {
                (true, _) => "Repairing",
                (false, true) => "Leaked",
                (false, false) => "ERROR",
            };
            (self.tell)(format_args!(
                "{what} cluster {cluster} refcount={count} reference={references}"
            ));
            let (found, fixed) = match count > references {
                true => (&mut self.found.leaks, &mut self.found.leaks_fixed),
                false => (&mut self.found.corruptions, &mut self.found.corruptions_fixed),
            };
            match repaired {
                true => {
                    *fixed += 1;
                    refcounts.set(cluster, references);
                }
                false => *found += 1,
            }
        }
        self.found.image_end = end.max(1) << self.shape.cluster_bits;
        Ok(())
    }

    /// Writes new refcount structures into clusters that nothing refers to, and has the header lead to them.
    /// `references` has the old structures.
    pub(super) fn replace_refcounts(
        &mut self,
        references: References,
    ) -> Result<Refcounts, CheckError> {
        let shape = self.shape;
        let bits = shape.cluster_bits + 3 - shape.refcount_order;
        let mut counts = self.apart((0, 0)).references(Repair::None)?;
        let mut room = Room { used: references, next: 0 };
        // Room for the case that all new structures lie behind the present ones.
        let end = counts.end().max(self.clusters());
        let (mut entries, mut len) = (0, 0);
        while end + entries + len > entries << bits {
            entries = (end + entries + len).div_ceil(1 << bits);
            len = (entries * ENTRY as u64).div_ceil(shape.cluster());
        }
        if len << shape.cluster_bits > MAX_REFCOUNT_TABLE {
            return Err(CheckError::TooLarge);
        }
        let table = room.take(len);
        (table..table + len).for_each(|cluster| counts.add(cluster, 1));
        let mut blocks = BTreeMap::new();
        let mut index = 0;
        while index << bits < counts.end() {
            let mut clusters = index << bits..(index + 1) << bits;
            if blocks.contains_key(&index) || clusters.all(|at| counts.of(at) == 0) {
                index += 1;
                continue;
            }
            let block = room.take(1);
            counts.add(block, 1);
            blocks.insert(index, block);
            index = index.min(block >> bits);
        }
        self.write_refcounts(&counts, &blocks, (table, len), bits)
    }

    fn write_refcounts(
        &mut self,
        references: &References,
        blocks: &BTreeMap<u64, u64>,
        (at, len): (u64, u64),
        bits: u32,
    ) -> Result<Refcounts, CheckError> {
        let shape = self.shape;
        let cluster = shape.cluster() as usize;
        let mut table = vec![0; len as usize * cluster];
        let mut refcounts =
            Refcounts { order: shape.refcount_order, bits, blocks: BTreeMap::new() };
        for (index, block) in blocks {
            let mut bytes = vec![0; cluster];
            for nth in 0..1 << bits {
                let count = references.of((index << bits) + nth);
                if count > 0 {
                    set_count(&mut bytes, nth as usize, shape.refcount_order, count);
                }
            }
            let at = block << shape.cluster_bits;
            self.file.write(at, &bytes)?;
            let entry = *index as usize * ENTRY;
            table[entry..entry + ENTRY].copy_from_slice(&at.to_be_bytes());
            let block = Block { at, bytes: Some(bytes), is_changed: false };
            refcounts.blocks.insert(*index, block);
        }
        let at = at << shape.cluster_bits;
        self.file.write(at, &table)?;
        self.file.sync()?;
        let mut header = self.file.read(0, SECTOR)?;
        header[REFCOUNTS_AT].copy_from_slice(&at.to_be_bytes());
        header[REFCOUNTS_CLUSTERS].copy_from_slice(&(len as u32).to_be_bytes());
        self.file.write(0, &header)?;
        self.file.sync()?;
        self.refcount_table = (at, table.len() as u64);
        Ok(refcounts)
    }
}

/// Clusters for new structures.
struct Room {
    /// What is in use, the old structures included.
    used: References,
    /// No cluster before is free.
    next: u64,
}

impl Room {
    /// The first of so many adjacent free clusters.
    fn take(&mut self, clusters: u64) -> u64 {
        let (mut at, mut free) = (self.next, 0);
        while free < clusters {
            match self.used.of(at + free) {
                0 => free += 1,
                _ => (at, free) = (at + free + 1, 0),
            }
        }
        (at..at + clusters).for_each(|cluster| self.used.add(cluster, 1));
        if clusters == 1 {
            self.next = at + 1;
        }
        at
    }
}
