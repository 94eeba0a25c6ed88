//! Counts the references to each cluster: follows everything that the header leads to.

use std::io;
use std::ops::Range;

use super::{Check, CheckError, Checked, References, Repair};
use crate::drivers::qcow2::engine::entry::{COMPRESSED, COPIED, OFFSET, ZEROES};
use crate::drivers::qcow2::header::MAX_L1;
use crate::drivers::qcow2::steps::{ENTRY, number};

/// Bits that must be 0 in an L1 entry, in an L2 entry that is not compressed, and in an entry of the refcount table.
const L1_RESERVED: u64 = !(COPIED | OFFSET);
const L2_RESERVED: u64 = !(COPIED | COMPRESSED | OFFSET | ZEROES);
const BLOCK_RESERVED: u64 = 511;
/// The half of an extended entry's bitmap that says which subclusters have data.
const ALLOCATED: u64 = u32::MAX as u64;

/// Where an L2 entry leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leads {
    Nowhere,
    /// To a cluster, as the first byte. `zeroes`: the guest sees zeroes all the same.
    To {
        host: u64,
        zeroes: bool,
    },
    /// To compressed data: first byte and number of bytes.
    Compressed {
        host: u64,
        len: u64,
    },
}

/// An L2 table that several entries of L1 tables lead to. Each such table is walked three times at most, because an image
/// from a stranger may have millions of these entries.
#[derive(Debug, Default)]
pub(super) struct SharedTable {
    /// Walks that were left out. Their references are added in the end.
    left_out: u64,
    /// What a walk finds.
    found: Found,
}

/// What the walk of a table has added to the numbers of a check.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Found {
    corruptions: u64,
    allocated: u64,
    compressed: u64,
    fragmented: u64,
}

impl Found {
    pub(super) fn between(before: &Checked, after: &Checked) -> Found {
        Found {
            corruptions: after.corruptions.saturating_sub(before.corruptions),
            allocated: after.allocated - before.allocated,
            compressed: after.compressed - before.compressed,
            fragmented: after.fragmented - before.fragmented,
        }
    }

    pub(super) fn add_to(self, checked: &mut Checked) {
        checked.corruptions += self.corruptions;
        checked.allocated += self.allocated;
        checked.compressed += self.compressed;
        checked.fragmented += self.fragmented;
    }
}

impl Check<'_> {
    pub(super) fn leads(&self, raw: u64) -> Leads {
        let extended = self.shape.l2_entry > ENTRY;
        let host = raw & OFFSET;
        if raw & COMPRESSED != 0 {
            let bits = 62 - (self.shape.cluster_bits - 8);
            let host = raw & ((1 << bits) - 1);
            let units = ((raw & !(COPIED | COMPRESSED)) >> bits) + 1;
            return Leads::Compressed { host, len: units * 512 - host % 512 };
        }
        if raw & ZEROES != 0 && !extended {
            return if host == 0 { Leads::Nowhere } else { Leads::To { host, zeroes: true } };
        }
        // In a data file the first cluster is at 0.
        match host == 0 && !(self.shape.has_data_file && raw & COPIED != 0) {
            true => Leads::Nowhere,
            false => Leads::To { host, zeroes: false },
        }
    }

    /// Counts all references.
    pub(super) fn references(&mut self, repair: Repair) -> Result<References, CheckError> {
        let mut references = References::default();
        self.shared.clear();
        let places = self.places;
        self.refer(&mut references, 0..self.shape.cluster());
        self.walk_l1(&mut references, self.shape.l1, true, repair)?;
        for (name, at, entries) in &places.snapshots {
            let bytes = entries * ENTRY as u64;
            if !self.shape.is_aligned(*at) {
                let what = "L1 table is not cluster aligned; snapshot table entry corrupted";
                self.corruption(format_args!("snapshot {name} l1_offset={at:#x}: {what}"));
            } else if bytes > MAX_L1 {
                self.corruption(format_args!("snapshot {name}: L1 table is too large"));
            } else {
                self.walk_l1(&mut references, (*at, bytes), false, repair)?;
            }
        }
        for (at, table) in std::mem::take(&mut self.shared) {
            if table.left_out > 0 {
                self.refer_again(&mut references, at, table.left_out)?;
            }
        }
        self.refer(&mut references, places.snapshot_table.clone());
        for range in places.bitmaps.iter().chain(&places.luks) {
            self.refer(&mut references, range.clone());
        }
        self.walk_blocks(&mut references)?;
        Ok(references)
    }

    /// Adds a reference to each cluster of a range of the file.
    fn refer(&mut self, references: &mut References, bytes: Range<u64>) {
        self.refer_times(references, bytes, 1);
    }

    fn refer_times(&mut self, references: &mut References, bytes: Range<u64>, times: u64) {
        if bytes.is_empty() {
            return;
        }
        // The last cluster of a file may be shorter.
        if bytes.end >= self.file.len() + self.shape.cluster() {
            let (at, size) = (bytes.start, bytes.end - bytes.start);
            self.corruption(format_args!(
                "counting reference for region exceeding the end of the file by one cluster or more: offset {at:#x} size {size:#x}"
            ));
            return;
        }
        for cluster in self.shape.number(bytes.start)..=self.shape.number(bytes.end - 1) {
            let more = times.min(self.shape.most - references.of(cluster));
            if more < times {
                let at = cluster << self.shape.cluster_bits;
                self.corruption(format_args!("overflow cluster offset={at:#x}"));
                self.found.corruptions += times - more - 1;
            }
            if more > 0 {
                references.add(cluster, more);
            }
        }
    }

    pub(super) fn corruption(&mut self, what: std::fmt::Arguments<'_>) {
        self.found.corruptions += 1;
        (self.tell)(format_args!("ERROR {what}"));
    }

    fn walk_l1(
        &mut self,
        references: &mut References,
        (at, len): (u64, u64),
        is_active: bool,
        repair: Repair,
    ) -> Result<(), CheckError> {
        self.refer(references, at..at + len);
        let Ok(table) = self.file.read(at, len as usize) else {
            (self.tell)(format_args!("ERROR: I/O error in check_refcounts_l1"));
            self.found.check_errors += 1;
            return Err(CheckError::Io(io::ErrorKind::InvalidData.into()));
        };
        for raw in table.chunks_exact(ENTRY).map(number).filter(|raw| *raw != 0) {
            if raw & L1_RESERVED != 0 {
                self.corruption(format_args!("found L1 entry with reserved bits set: {raw:x}"));
            }
            let table = raw & OFFSET;
            self.refer(references, table..table + self.shape.cluster());
            if !self.shape.is_aligned(table) {
                self.corruption(format_args!(
                    "l2_offset={table:x}: Table is not cluster aligned; L1 entry corrupted"
                ));
            }
            // A table past the end of the file consists of zeroes.
            if table >= self.file.len() {
                continue;
            }
            if let Some(shared) = self.shared.get_mut(&table) {
                shared.left_out += 1;
                shared.found.add_to(&mut self.found);
                continue;
            }
            let before = self.found;
            self.walk_l2(references, table, is_active, repair)?;
            let is_shared = references.of(self.shape.number(table)) >= self.shape.most.min(2);
            if is_shared || !self.shape.is_aligned(table) {
                let found = Found::between(&before, &self.found);
                self.shared.insert(table, SharedTable { left_out: 0, found });
            }
        }
        Ok(())
    }

    /// Adds the references of a table that was walked before, `times` times.
    fn refer_again(
        &mut self,
        references: &mut References,
        at: u64,
        times: u64,
    ) -> Result<(), CheckError> {
        if self.shape.has_data_file {
            return Ok(());
        }
        let table = self.file.read(at, self.shape.cluster() as usize)?;
        for entry in table.chunks_exact(self.shape.l2_entry) {
            match self.leads(number(&entry[..ENTRY])) {
                Leads::Nowhere => {}
                Leads::Compressed { host, len } => {
                    self.refer_times(references, host..host + len, times);
                }
                Leads::To { host, .. } => {
                    let end = host + self.shape.cluster();
                    self.refer_times(references, host..end, times);
                }
            }
        }
        Ok(())
    }

    fn walk_l2(
        &mut self,
        references: &mut References,
        at: u64,
        is_active: bool,
        repair: Repair,
    ) -> Result<(), CheckError> {
        let mut table = self.file.read(at, self.shape.cluster() as usize)?;
        let mut is_changed = false;
        // Where the next cluster follows this one.
        let mut next = 0;
        for (index, entry) in table.chunks_exact_mut(self.shape.l2_entry).enumerate() {
            let raw = number(&entry[..ENTRY]);
            let bitmap = entry.get(ENTRY..).map_or(0, number);
            let leads = self.leads(raw);
            if raw & COMPRESSED == 0 && raw & L2_RESERVED != 0 {
                self.corruption(format_args!("found l2 entry with reserved bits set: {raw:x}"));
            }
            match leads {
                Leads::Nowhere if bitmap & ALLOCATED != 0 => {
                    self.corruption(format_args!(
                        "Unallocated cluster {index} has non-zero subcluster allocation map"
                    ));
                    if repair.errors() {
                        entry[ENTRY + 4..].fill(0);
                        self.fixed(&mut is_changed);
                    }
                }
                Leads::Nowhere => {}
                Leads::Compressed { host, len } => {
                    if raw & COPIED != 0 {
                        self.corruption(format_args!(
                            "coffset={host:#x}: copied flag must never be set for compressed clusters"
                        ));
                    }
                    if self.shape.has_data_file {
                        self.corruption(format_args!(
                            "compressed cluster {index} with data file, entry={raw:#x}"
                        ));
                        if repair.errors() {
                            self.zero(entry);
                            self.fixed(&mut is_changed);
                        }
                        continue;
                    }
                    if bitmap != 0 {
                        self.corruption(format_args!(
                            "compressed cluster {index} with non-zero subcluster allocation bitmap, entry={raw:#x}"
                        ));
                        if repair.errors() {
                            self.zero(entry);
                            self.fixed(&mut is_changed);
                            continue;
                        }
                    }
                    self.refer(references, host..host + len);
                    if is_active {
                        self.found.allocated += 1;
                        self.found.compressed += 1;
                        // What is compressed is in pieces by nature.
                        self.found.fragmented += 1;
                    }
                }
                Leads::To { host, zeroes } => {
                    if (bitmap >> 32) & bitmap & ALLOCATED != 0 {
                        self.corruption(format_args!(
                            "offset={host:x}: Allocated cluster has corrupted subcluster allocation bitmap"
                        ));
                        if repair.errors() {
                            self.zero(entry);
                            self.fixed(&mut is_changed);
                            continue;
                        }
                    }
                    if !self.shape.is_aligned(host) {
                        let zero =
                            zeroes || (self.shape.l2_entry > ENTRY && bitmap & ALLOCATED == 0);
                        if zero {
                            self.corruption(format_args!(
                                "offset={host:x}: Preallocated cluster is not properly aligned; L2 entry corrupted"
                            ));
                            if repair.errors() {
                                self.zero(entry);
                                self.fixed(&mut is_changed);
                                continue;
                            }
                        } else {
                            self.corruption(format_args!(
                                "offset={host:x}: Data cluster is not properly aligned; L2 entry corrupted"
                            ));
                        }
                    }
                    if is_active {
                        self.found.allocated += 1;
                        if next != 0 && host != next {
                            self.found.fragmented += 1;
                        }
                        next = host + self.shape.cluster();
                    }
                    if !self.shape.has_data_file {
                        self.refer(references, host..host + self.shape.cluster());
                    }
                }
            }
        }
        if is_changed {
            self.file.write(at, &table)?;
        }
        Ok(())
    }

    /// Has an entry say that the cluster reads as zeroes, and has no place.
    fn zero(&self, entry: &mut [u8]) {
        entry.fill(0);
        match entry.get_mut(ENTRY..ENTRY + 4) {
            Some(zeroes) => zeroes.fill(0xff),
            None => entry[ENTRY - 1] = ZEROES as u8,
        }
    }

    /// The corruption that was found last is repaired.
    fn fixed(&mut self, is_changed: &mut bool) {
        *is_changed = true;
        self.found.corruptions -= 1;
        self.found.corruptions_fixed += 1;
    }

    /// Follows the refcount table.
    fn walk_blocks(&mut self, references: &mut References) -> Result<(), CheckError> {
        let (at, len) = self.refcount_table;
        self.refer(references, at..at + len);
        let table = self.file.read(at, len as usize)?;
        for (index, raw) in table.chunks_exact(ENTRY).map(number).enumerate() {
            let block = raw & !BLOCK_RESERVED;
            if raw & BLOCK_RESERVED != 0 {
                self.corruption(format_args!(
                    "refcount table entry {index} has reserved bits set: {raw:x}"
                ));
                self.rebuild = true;
                continue;
            }
            if !self.shape.is_aligned(block) {
                self.corruption(format_args!(
                    "refcount block {index} is not cluster aligned; refcount table entry corrupted"
                ));
                self.rebuild = true;
                continue;
            }
            if block == 0 {
                continue;
            }
            let cluster = self.shape.number(block);
            if cluster >= self.clusters() {
                self.corruption(format_args!("refcount block {index} is outside image"));
                self.rebuild |= self.repair.errors();
                continue;
            }
            self.refer(references, block..block + self.shape.cluster());
            let count = references.of(cluster);
            if count != 1 {
                self.corruption(format_args!("refcount block {index} refcount={count}"));
                self.rebuild = true;
            }
        }
        Ok(())
    }
}
