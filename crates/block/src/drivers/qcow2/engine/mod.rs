//! The metadata of an image in memory, and what requests do to it.
//!
//! A pure core: no I/O, no waiting, no clock. Each call either does all that it says, in memory, or
//! [stops](Stop) at a table that has to be read first and is called again. What a call has changed is taken
//! with [`Engine::take_changed`], sector by sector, before anything else happens: at that time all metadata
//! fits together, as in an image that was closed.
//!
//! New clusters are [reserved](Engine::reserve) before data is written to them, in memory only. They are
//! counted and mapped at once when the data is there ([`Engine::map`]), so a process that is killed in between
//! leaves nothing behind. Clusters that are given up are not used again until the file says that they are
//! free ([`Engine::seal`], [`Engine::settle`]).

mod ahead;
mod change;
mod check;
mod cost;
mod counts;
mod entry;
mod held;
mod l1;
mod owners;
mod packed;
mod snapshot;
mod switch;
mod tables;
mod unbacked;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

pub(super) use self::check::{Check, CheckError, CheckedFile, Places};
pub use self::check::{Checked, Repair};
use self::cost::Cost;
pub(super) use self::counts::{count, set_count};
pub(super) use self::entry::{COPIED, compressed_clusters};
use self::entry::{Entry, Raw, SUBCLUSTER_BITS};
use self::held::Intervals;
use self::l1::L1;
pub(super) use self::owners::Owner;
use self::owners::Owners;
use self::packed::Packing;
pub(super) use self::packed::{Packed, UNIT};
pub(super) use self::snapshot::{
    Applied, SnapshotChange, SwitchError, SwitchRooms, TableFile, prepare,
};
pub(super) use self::switch::Roots;
use self::tables::Tables;
use super::access::Place;
use super::caches::CacheSizes;
use super::header::Header;
use super::steps::{ENTRY, SECTOR, SIZE};

/// L2 tables, and refcount blocks, that are in memory at least: a call may need several at once.
const LEAST_L2: u64 = 2;
const LEAST_BLOCKS: u64 = 8;
/// Most clusters with data that a call finds for a change, each of which is looked up among the metadata.
const MOST_CHECKED: u64 = 1024;

/// What the header says of the tables' form.
#[derive(Debug, Clone, Copy)]
pub(super) struct Format {
    /// Bits of an offset in a cluster.
    cluster_bits: u32,
    /// A reference count has two to the power of this many bits.
    refcount_order: u32,
    version: u32,
    has_data_file: bool,
    /// Entries of L2 tables have a bitmap of subclusters.
    is_extended: bool,
}

impl Format {
    fn new(header: &Header) -> Format {
        Format {
            cluster_bits: header.cluster.trailing_zeros(),
            refcount_order: header.refcount_bits.trailing_zeros(),
            version: header.version,
            has_data_file: header.data_file.is_some(),
            is_extended: header.extended_l2,
        }
    }

    fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Bits of an index in an L2 table.
    fn l2_bits(&self) -> u32 {
        self.cluster_bits - 3 - u32::from(self.is_extended)
    }

    /// Bytes of an entry of an L2 table.
    fn l2_entry(&self) -> usize {
        ENTRY << u32::from(self.is_extended)
    }

    /// Bits of an offset in a unit: what is mapped as a whole, a subcluster or a cluster.
    fn unit_bits(&self) -> u32 {
        self.cluster_bits - if self.is_extended { SUBCLUSTER_BITS } else { 0 }
    }

    /// Bits of an index in a refcount block.
    fn block_bits(&self) -> u32 {
        self.cluster_bits + 3 - self.refcount_order
    }
}

/// A table that a call needs: its index in the table above it, and its first byte in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Table {
    /// An L2 table.
    L2(usize, u64),
    /// A refcount block.
    Block(usize, u64),
}

impl Table {
    /// Its first byte in the file.
    pub(super) fn offset(self) -> u64 {
        match self {
            Table::L2(_, offset) | Table::Block(_, offset) => offset,
        }
    }
}

/// Why a call has done nothing.
#[derive(Debug)]
pub(super) enum Stop {
    /// This table has to be read first.
    Read(Table),
    /// The metadata is damaged.
    Damaged(String),
    /// The metadata is damaged: a write to these clusters of the file would destroy metadata.
    Overlap { clusters: Range<u64>, owner: Owner },
    /// The file cannot become any longer.
    Full,
    /// The file is [made longer](Engine::begin_ahead) just where room is needed.
    Busy,
    /// The call has done a part of its work, and is to be repeated once others have had their turn.
    Again,
    /// These clusters of the file are to be made zeroes first ([`Engine::begin_backing`]), so that they have blocks.
    Unbacked(Range<u64>),
}

impl Stop {
    fn damaged(why: fmt::Arguments<'_>) -> Stop {
        Stop::Damaged(why.to_string())
    }

    /// Why the metadata is damaged. `None`: of other stops.
    pub(super) fn damage(self) -> Option<String> {
        match self {
            Stop::Damaged(why) => Some(why),
            Stop::Read(_)
            | Stop::Overlap { .. }
            | Stop::Full
            | Stop::Busy
            | Stop::Again
            | Stop::Unbacked(_) => None,
        }
    }
}

/// Room for data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Room {
    /// Its first byte in the data's file.
    pub(super) host: u64,
    /// How many clusters.
    pub(super) clusters: u64,
    /// Nothing was ever written there, nor beyond: it reads as zeroes.
    pub(super) is_fresh: bool,
    /// It was found, and is to be mapped or given up.
    pub(super) is_reserved: bool,
    /// Bytes of the disk that have to be there before they are [mapped](Engine::map): the data, and what is around it in
    /// its units.
    pub(super) written: Range<u64>,
}

/// What clusters read as that lose their data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Zeroing {
    /// Zeroes. They keep their place.
    Keep,
    /// Zeroes. Their place is given up.
    Free,
    /// What lies behind. Their place is given up.
    Uncover,
}

/// A sector that a call has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Changed {
    Header,
    L1(usize),
    Refcounts(usize),
    L2(usize, usize),
    Block(usize, usize),
}

/// The metadata of an image.
#[derive(Debug)]
pub(super) struct Engine {
    format: Format,
    header: [u8; SECTOR],
    /// The L1 table, and its first byte in the file.
    l1: L1,
    l1_at: u64,
    l2: Tables,
    /// The refcount table, and its first byte in the file.
    refcounts: Vec<u64>,
    refcounts_at: u64,
    blocks: Tables,
    /// Clusters that nothing in memory refers to and that are in use all the same: reserved, or given up
    /// while the file does not say so.
    held: Intervals,
    /// Clusters held for L2 tables that writes to come need, by the table's index.
    coming: BTreeMap<usize, u64>,
    /// Clusters held for L2 tables that have no blocks in the file yet.
    unbacked: Intervals,
    /// Clusters that no block counts, and that are zeroes in the file for metadata to come.
    ready: Intervals,
    /// Clusters that are made zeroes now.
    backing: Range<u64>,
    /// Those given up: when, and which.
    given_up: Vec<(u64, Range<u64>)>,
    /// Now, for what is given up.
    age: u64,
    /// There is no room before this cluster.
    first_free: u64,
    /// From this cluster on nothing was ever written.
    fresh: u64,
    /// The file is as long as that, clusters, or longer.
    prepared: u64,
    /// Clusters that the file is made longer by now.
    ahead: Range<u64>,
    owners: Owners,
    packing: Packing,
    changed: Vec<Changed>,
    cost: Cost,
}

/// What an engine is made of.
pub(super) struct Contents<'a> {
    /// The first sector of the file.
    pub(super) start: [u8; SECTOR],
    pub(super) header: &'a Header,
    /// The L1 table's bytes.
    pub(super) l1: &'a [u8],
    /// The refcount table's bytes.
    pub(super) refcounts: &'a [u8],
    /// Metadata that the engine does not change: its bytes in the file.
    pub(super) others: &'a [(Range<u64>, Owner)],
    /// Memory for tables.
    pub(super) caches: CacheSizes,
    /// The end of the file: nothing was ever written from there on.
    pub(super) end: u64,
    /// The image is open for reading only. Then damage of the L1 table is found when an entry is used.
    pub(super) read_only: bool,
}

fn entries(table: &[u8]) -> Vec<u64> {
    let (entries, _) = table.as_chunks::<ENTRY>();
    entries.iter().map(|entry| u64::from_be_bytes(*entry)).collect()
}

fn entry_at(table: &[u8], index: usize) -> u64 {
    table.as_chunks::<ENTRY>().0.get(index).map_or(0, |entry| u64::from_be_bytes(*entry))
}

impl Engine {
    /// # Errors
    ///
    /// An entry of the L1 table is damaged, and the image is open for writing.
    pub(super) fn new(contents: &Contents<'_>) -> Result<Engine, Stop> {
        let Contents { start, header, l1, refcounts, others, caches, end, read_only } = *contents;
        let format = Format::new(header);
        let (l1, refcounts) = (entries(l1), entries(refcounts));
        let mut owners = Owners::default();
        let mut own = |bytes: Range<u64>, owner| {
            let bits = format.cluster_bits;
            owners.add_range(bytes.start >> bits..bytes.end.div_ceil(format.cluster()), owner);
        };
        own(0..format.cluster(), Owner::Header);
        own(header.l1_table.0..header.l1_table.0 + header.l1_table.1, Owner::ActiveL1);
        let (at, len) = header.refcount_table;
        own(at..at + len, Owner::RefcountTable);
        others.iter().for_each(|(bytes, owner)| own(bytes.clone(), *owner));
        for entry in &l1 {
            match entry::table(*entry, &format) {
                Ok(Some((at, _))) => owners.add_table(at >> format.cluster_bits, Owner::ActiveL2),
                Ok(None) => {}
                // A request for what the table maps finds the damage.
                Err(_) if read_only => {}
                Err(damaged) => return Err(damaged),
            }
        }
        for block in refcounts.iter().filter(|block| **block != 0) {
            owners.add_table(block >> format.cluster_bits, Owner::RefcountBlock);
        }
        let all_l2 = (l1.len() as u64) << format.cluster_bits;
        let (l2_bytes, block_bytes) = caches.bytes(all_l2, format.cluster());
        let tables = |indices, bytes: u64, least| {
            Tables::new(indices, (bytes >> format.cluster_bits).max(least) as usize)
        };
        Ok(Engine {
            format,
            header: start,
            l2: tables(l1.len(), l2_bytes, LEAST_L2),
            blocks: tables(refcounts.len(), block_bytes, LEAST_BLOCKS),
            l1: L1::new(l1),
            l1_at: header.l1_table.0,
            refcounts,
            refcounts_at: header.refcount_table.0,
            held: Intervals::default(),
            coming: BTreeMap::new(),
            unbacked: Intervals::default(),
            ready: Intervals::default(),
            backing: 0..0,
            given_up: Vec::new(),
            age: 0,
            first_free: 1,
            fresh: end.div_ceil(format.cluster()),
            prepared: end.div_ceil(format.cluster()),
            ahead: 0..0,
            owners,
            packing: Packing::default(),
            changed: Vec::new(),
            cost: Cost::default(),
        })
    }

    /// What all calls so far have cost, in thousandths of a unit of the meter.
    pub(super) fn cost(&self) -> u64 {
        self.cost.total()
    }

    /// Bytes of the disk that the L1 table reaches.
    pub(super) fn reach(&self) -> u64 {
        (self.l1.len() as u64) << (self.format.l2_bits() + self.format.cluster_bits)
    }

    /// Drops the tables that were not used since the last call.
    pub(super) fn forget_unused(&mut self) {
        self.l2.forget_unused();
        self.blocks.forget_unused();
    }

    /// Takes a table that was read. `false`: it is not in use any more.
    pub(super) fn insert(&mut self, table: Table, bytes: Box<[u8]>) {
        match table {
            Table::L2(index, offset) => {
                let entry =
                    self.l1.get(index).and_then(|raw| entry::table(*raw, &self.format).ok());
                if entry.flatten().is_some_and(|(at, _)| at == offset) {
                    self.l2.insert(index, bytes);
                }
            }
            Table::Block(index, offset) => {
                if self.refcounts.get(index) == Some(&offset) {
                    self.blocks.insert(index, bytes);
                }
            }
        }
    }

    /// Where a range of the disk begins to be, and how many of its bytes are there. Not empty.
    pub(super) fn find(&mut self, offset: u64, len: u64) -> Result<(Place, u64), Stop> {
        let format = self.format;
        let cluster = offset >> format.cluster_bits;
        let (index, first) = self.split(cluster);
        let in_cluster = offset & (format.cluster() - 1);
        let in_table = (1 << format.l2_bits()) - first as u64;
        let most = len.min((in_table << format.cluster_bits) - in_cluster);
        let Some(slot) = self.l2_slot(index)? else {
            let end = self.gap_end(index, format.l2_bits() + format.cluster_bits);
            return Ok((Place::Nowhere, len.min(end - offset)));
        };
        let before_all = self.cost.total();
        let (part, mut found) = self.entry(slot, first)?.part(in_cluster, &format);
        let (mut at, mut before) = (first, part);
        // As long as it goes on in the next cluster.
        while found < most
            && (in_cluster + found) & (format.cluster() - 1) == 0
            && !self.cost.is_much(before_all)
        {
            at += 1;
            let Ok(next) = self.entry(slot, at) else { break };
            let (next, more) = next.part(0, &format);
            if !next.follows(before, &format) {
                break;
            }
            before = next;
            found += more;
        }
        let place = match part {
            // A part is never mixed.
            Entry::Nowhere | Entry::Mixed { .. } => Place::Nowhere,
            Entry::Zeroes { .. } => Place::Zeroes,
            Entry::Data { host, .. } if format.has_data_file && host != offset - in_cluster => {
                let wanted = offset - in_cluster;
                return Err(Stop::damaged(format_args!(
                    "External data file host cluster offset {host:#x} does not match guest cluster offset: {wanted:#x}"
                )));
            }
            Entry::Data { host, own } => Place::Data { at: host + in_cluster, own },
            Entry::Compressed { .. } => Place::Compressed,
        };
        Ok((place, found.min(most)))
    }

    /// Where the tables that are missing from `index` on end, if a table reaches two to the power of `reach`.
    fn gap_end(&self, index: usize, reach: u32) -> u64 {
        self.l1.first_used(index + 1).map_or(u64::MAX, |next| (next as u64) << reach)
    }

    /// As [`find`](Self::find), for a request that changes the bytes where they are.
    pub(super) fn find_to_change(&mut self, offset: u64, len: u64) -> Result<(Place, u64), Stop> {
        let (place, mut found) = self.find(offset, len)?;
        if let Place::Data { at, own: true } = place
            && !self.format.has_data_file
        {
            let bits = self.format.cluster_bits;
            let most = (MOST_CHECKED << bits) - (at & (self.format.cluster() - 1));
            found = found.min(most);
            self.check_is_data(at >> bits..((at + found - 1) >> bits) + 1)?;
        }
        Ok((place, found))
    }

    /// Checks that tables can change, before data is given up that they lead to.
    pub(super) fn check_tables(&self) -> Result<(), Stop> {
        self.owners.check()
    }

    /// Checks that clusters hold no metadata, before they are written or given up.
    fn check_is_data(&self, clusters: Range<u64>) -> Result<(), Stop> {
        self.cost.add((clusters.end - clusters.start) * cost::OWNER);
        match self.owners.first_in(clusters.clone()) {
            None => Ok(()),
            Some((_, owner)) => Err(Stop::Overlap { clusters, owner }),
        }
    }

    /// Where the bytes of a compressed cluster are, the first and how many, at most. `None`: it is not compressed.
    pub(super) fn find_compressed(&mut self, offset: u64) -> Result<Option<(u64, u64)>, Stop> {
        let (index, at) = self.split(offset >> self.format.cluster_bits);
        let Some(slot) = self.l2_slot(index)? else { return Ok(None) };
        match self.entry(slot, at)? {
            Entry::Compressed { host, len } => Ok(Some((host, len))),
            Entry::Nowhere | Entry::Zeroes { .. } | Entry::Data { .. } | Entry::Mixed { .. } => {
                Ok(None)
            }
        }
    }

    /// What has changed since the last call: numbers of sectors, and what they have now.
    pub(super) fn take_changed(&mut self, mut each: impl FnMut(u64, &[u8; SECTOR])) {
        let changed = std::mem::take(&mut self.changed);
        for changed in &changed {
            match *changed {
                Changed::Header => each(0, &self.header),
                Changed::L1(sector) => {
                    each(self.l1_at / SECTOR as u64 + sector as u64, &sector_of(&self.l1, sector))
                }
                Changed::Refcounts(sector) => each(
                    self.refcounts_at / SECTOR as u64 + sector as u64,
                    &sector_of(&self.refcounts, sector),
                ),
                Changed::L2(index, sector) => {
                    let at =
                        self.l1.get(index).and_then(|raw| entry::table(*raw, &self.format).ok());
                    let slot = self.l2.slot(index);
                    if let (Some(Some((at, _))), Some(slot)) = (at, slot)
                        && let Some(bytes) = self.l2.bytes(slot).as_chunks().0.get(sector)
                    {
                        each(at / SECTOR as u64 + sector as u64, bytes);
                    }
                }
                Changed::Block(index, sector) => {
                    if let (Some(at), Some(slot)) =
                        (self.refcounts.get(index).copied(), self.blocks.slot(index))
                        && let Some(bytes) = self.blocks.bytes(slot).as_chunks().0.get(sector)
                    {
                        each(at / SECTOR as u64 + sector as u64, bytes);
                    }
                }
            }
        }
        // The memory is used again.
        self.changed = changed;
        self.changed.clear();
    }

    /// Whether a call has changed anything since.
    pub(super) fn has_changed(&self) -> bool {
        !self.changed.is_empty()
    }

    /// Has the header say that the disk has so many bytes.
    pub(super) fn set_size(&mut self, size: u64) {
        self.header[SIZE].copy_from_slice(&size.to_be_bytes());
        self.note(Changed::Header);
    }

    /// The header's first sector.
    pub(super) fn header(&self) -> [u8; SECTOR] {
        self.header
    }

    /// Replaces the header's first sector.
    pub(super) fn set_header(&mut self, header: [u8; SECTOR]) {
        self.header = header;
        self.note(Changed::Header);
    }

    fn note(&mut self, changed: Changed) {
        if !self.changed.ends_with(&[changed]) {
            self.cost.add(cost::SECTOR_CHANGED);
            self.changed.push(changed);
        }
    }

    /// The index in the L1 table and that in the L2 table of a cluster of the disk.
    fn split(&self, cluster: u64) -> (usize, usize) {
        let bits = self.format.l2_bits();
        ((cluster >> bits) as usize, (cluster & ((1 << bits) - 1)) as usize)
    }

    /// An entry of an L2 table.
    fn entry(&self, slot: usize, at: usize) -> Result<Entry, Stop> {
        self.cost.add(cost::LOOK);
        let table = self.l2.bytes(slot);
        let raw = match self.format.is_extended {
            false => Raw { descriptor: entry_at(table, at), bitmap: 0 },
            true => {
                Raw { descriptor: entry_at(table, 2 * at), bitmap: entry_at(table, 2 * at + 1) }
            }
        };
        Entry::parse(raw, &self.format)
    }

    /// The L2 table of an index. `None`: there is none.
    fn l2_slot(&mut self, index: usize) -> Result<Option<usize>, Stop> {
        let Some(raw) = self.l1.get(index) else {
            return Err(Stop::damaged(format_args!("no L1 entry {index}")));
        };
        let Some((offset, _)) = entry::table(*raw, &self.format)? else { return Ok(None) };
        match self.l2.slot(index) {
            Some(slot) => Ok(Some(slot)),
            None => Err(Stop::Read(Table::L2(index, offset))),
        }
    }
}

/// A sector of a table that is in memory as numbers. What lies past its end is zero.
fn sector_of(table: &[u64], sector: usize) -> [u8; SECTOR] {
    let mut bytes = [0; SECTOR];
    let first = sector * (SECTOR / ENTRY);
    let entries = table.get(first..).unwrap_or_default();
    for (bytes, entry) in bytes.as_chunks_mut::<ENTRY>().0.iter_mut().zip(entries) {
        *bytes = entry.to_be_bytes();
    }
    bytes
}

#[cfg(test)]
mod tests;
