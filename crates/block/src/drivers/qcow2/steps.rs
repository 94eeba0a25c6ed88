//! The order in which metadata is written to the file. The image is consistent after each step.
//!
//! 1. reference counts, each as the higher of the old and the new number, and the guest's data;
//! 2. the refcount table and its place;
//! 3. L2 tables;
//! 4. the L1 table and its place;
//! 5. reference counts with their new numbers.
//!
//! Each step is on stable storage before the next. An interruption leaves unused clusters that are counted, as
//! in QEMU's own order, and never a used cluster that is not counted.
//!
//! Compressed clusters share clusters of the file, so a count can rise and fall before a write-out. In the middle of
//! step 3 the file may have the L2 entries of both the old user and the new one. So step 1 writes such
//! a count as the file's number plus the number of users in the L2 tables of step 3.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use event_loop::{AlignedBuf, IoBufs};
use nix::errno::Errno;

use super::context::{Channels, Transfer};
use super::engine::{Roots, compressed_clusters, count, set_count};
use super::header::Header;
use super::marker::Mark;
use super::metadata::Metadata;
use super::storage::sync;
use crate::request::{Op, Part};

/// The unit of changes in bytes.
pub(super) const SECTOR: usize = 512;
/// Most bytes per write.
const RUN: usize = 1 << 20;
/// Size of a table's entry in bytes.
pub(super) const ENTRY: usize = 8;
/// Places in a header: the disk's size, the L1 table's entries and offset, and the refcount table's offset and clusters.
pub(super) const SIZE: Range<usize> = 24..32;
const L1_ENTRIES: Range<usize> = 36..40;
const L1_OFFSET: Range<usize> = 40..48;
const REFCOUNT_TABLE: Range<usize> = 48..60;
/// Changed sectors by number.
pub(super) type Sectors = BTreeMap<u64, Box<[u8; SECTOR]>>;

/// The places of metadata in the file.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    cluster: u64,
    refcount_bits: u32,
    l1: Range<u64>,
    refcount_table: Range<u64>,
    /// The refcount blocks: the first byte of each, and its index in the refcount table.
    pub(super) refcount_blocks: HashMap<u64, u64>,
    /// Words of an entry of an L2 table.
    l2_words: usize,
}

/// The sectors of each step.
#[derive(Default)]
pub(super) struct Steps {
    counts: Sectors,
    refcount_table: Sectors,
    l2: Sectors,
    l1: Sectors,
    header: Sectors,
}

/// The numbers of the sectors that contain a range.
pub(super) fn numbers(range: &Range<u64>) -> Range<u64> {
    range.start / SECTOR as u64..range.end.div_ceil(SECTOR as u64)
}

pub(super) fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

impl Layout {
    /// The layout of an image with that header and refcount table.
    pub(super) fn new(header: &Header, refcount_table: &[u8]) -> Layout {
        let (offset, len) = header.refcount_table;
        let mut layout = Layout {
            cluster: header.cluster,
            refcount_bits: header.refcount_bits,
            l1: header.l1_table.0..header.l1_table.0 + header.l1_table.1,
            refcount_table: offset..offset + len,
            refcount_blocks: HashMap::new(),
            l2_words: if header.extended_l2 { 2 } else { 1 },
        };
        layout.add_refcount_blocks(0, refcount_table);
        layout
    }

    /// Adds the blocks of a part of the refcount table, which begins with the entry of index `first`.
    fn add_refcount_blocks(&mut self, first: u64, entries: &[u8]) {
        let (entries, _) = entries.as_chunks::<ENTRY>();
        let blocks = entries.iter().map(|entry| number(entry)).zip(first..);
        self.refcount_blocks.extend(blocks.filter(|(block, _)| *block != 0));
    }

    /// The header leads to other tables.
    pub(super) fn switch(&mut self, roots: &Roots) {
        let len = |table: &[u64]| (table.len() * ENTRY) as u64;
        self.l1 = roots.l1_at..roots.l1_at + len(&roots.l1);
        self.refcount_table = roots.refcounts_at..roots.refcounts_at + len(&roots.refcounts);
        let blocks = roots.refcounts.iter().copied().zip(0..);
        self.refcount_blocks = blocks.filter(|(block, _)| *block != 0).collect();
    }

    /// Assigns sectors to steps, and updates the places of moved tables.
    pub(super) fn sort(&mut self, sectors: &Sectors) -> Steps {
        if let Some(header) = sectors.get(&0) {
            let l1 = number(&header[L1_OFFSET]);
            self.l1 = l1..l1 + number(&header[L1_ENTRIES]) * ENTRY as u64;
            let table = number(&header[REFCOUNT_TABLE][..8]);
            let clusters = number(&header[REFCOUNT_TABLE][8..]);
            self.refcount_table = table..table + clusters * self.cluster;
        }
        let table = numbers(&self.refcount_table);
        for (number, sector) in sectors.range(table.clone()) {
            let first = (number - table.start) * (SECTOR / ENTRY) as u64;
            self.add_refcount_blocks(first, &sector[..]);
        }
        let (l1, table) = (numbers(&self.l1), numbers(&self.refcount_table));
        let mut steps = Steps::default();
        for (number, sector) in sectors {
            let at = number * SECTOR as u64;
            let step = match number {
                _ if at < self.cluster => &mut steps.header,
                _ if self.refcount_blocks.contains_key(&(at - at % self.cluster)) => {
                    &mut steps.counts
                }
                number if table.contains(number) => &mut steps.refcount_table,
                number if l1.contains(number) => &mut steps.l1,
                _ => &mut steps.l2,
            };
            step.insert(*number, sector.clone());
        }
        steps
    }
}

/// How often clusters of the file are used by compressed clusters.
type Users = BTreeMap<u64, u64>;

impl Layout {
    /// The users of clusters in these sectors of L2 tables.
    fn compressed_users(&self, l2: &Sectors) -> Users {
        let mut users = Users::new();
        for sector in l2.values() {
            let entries = sector.as_chunks::<ENTRY>().0.iter().step_by(self.l2_words);
            for raw in entries.map(|entry| u64::from_be_bytes(*entry)) {
                let clusters = compressed_clusters(raw, self.cluster.trailing_zeros());
                for cluster in clusters.into_iter().flatten() {
                    *users.entry(cluster).or_default() += 1;
                }
            }
        }
        users
    }

    /// Adds the users to the counts of a sector that `in_file` has at present. `raised` gets at least the sum.
    fn add_users(
        &self,
        number: u64,
        users: &Users,
        in_file: &[u8; SECTOR],
        raised: &mut [u8; SECTOR],
    ) {
        let at = number * SECTOR as u64;
        let in_block = at % self.cluster;
        let Some(index) = self.refcount_blocks.get(&(at - in_block)) else { return };
        let (bits, order) = (u64::from(self.refcount_bits), self.refcount_bits.trailing_zeros());
        let first = index * (self.cluster * 8 / bits) + in_block * 8 / bits;
        let most = u64::MAX >> (64 - bits);
        for (cluster, users) in users.range(first..first + SECTOR as u64 * 8 / bits) {
            let nth = (cluster - first) as usize;
            let sum = count(in_file, nth, order).saturating_add(*users).min(most);
            if count(raised, nth, order) < sum {
                set_count(raised, nth, order, sum);
            }
        }
    }
}

impl Steps {
    /// Writes the steps. `counted` is called when all counts are in the file, raised.
    pub(super) async fn write(
        self,
        channels: &Channels,
        before: &Layout,
        data: bool,
        metadata: &Metadata,
        counted: impl FnOnce(),
    ) -> Result<(), Errno> {
        let Steps { counts, refcount_table, l2, l1, header } = self;
        let users = before.compressed_users(&l2);
        let (highest, lower) = highest(channels, counts, before, &users).await?;
        let mut unsynced = data;
        let mut order = Order { channels, unsynced: &mut unsynced };
        order.write(Part::RefcountBlock, &highest).await?;
        counted();
        if metadata.has_failed() {
            order.sync().await?;
            metadata.make_failed_void();
        }
        order.then(Part::RefcountTable, &refcount_table).await?;
        if let Some(new) = header.get(&0)
            && !refcount_table.is_empty()
        {
            // The header with the new refcount table and the old L1 table.
            let mut moved = new.clone();
            let in_file = read(channels, 0, SECTOR).await?;
            moved.copy_from_slice(&in_file);
            moved[REFCOUNT_TABLE].copy_from_slice(&new[REFCOUNT_TABLE]);
            order.then(Part::Other, &Sectors::from([(0, moved)])).await?;
        }
        order.then(Part::L2, &l2).await?;
        order.then(Part::L1, &l1).await?;
        // A larger disk shows the area past its old end, which an L2 table declares as zeroes. An earlier write-out, even
        // of a killed process, may have put that table into the file without a sync.
        *order.unsynced |= !header.is_empty();
        order.then(Part::Other, &header).await?;
        if let (Some(mark), Some(at)) = (metadata.mark_of_commit(), Mark::place(before.cluster)) {
            write(channels, at, &mark)?.await.0?;
        }
        order.then(Part::RefcountBlock, &lower).await
    }
}

/// Writes in a fixed order.
struct Order<'a> {
    channels: &'a Channels,
    /// Something was written since the last sync.
    unsynced: &'a mut bool,
}

impl Order<'_> {
    async fn sync(&mut self) -> Result<(), Errno> {
        match std::mem::take(self.unsynced) {
            true => sync(self.channels).await,
            false => Ok(()),
        }
    }

    /// Writes, after all earlier writes are on stable storage.
    async fn then(&mut self, part: Part, sectors: &Sectors) -> Result<(), Errno> {
        if !sectors.is_empty() {
            self.sync().await?;
        }
        self.write(part, sectors).await
    }

    async fn write(&mut self, part: Part, sectors: &Sectors) -> Result<(), Errno> {
        let mut transfers = Vec::new();
        for (first, run) in runs(sectors) {
            transfers.push(write_part(self.channels, part, first * SECTOR as u64, &run)?);
            *self.unsynced = true;
        }
        let mut result = Ok(());
        for transfer in transfers {
            result = result.and(transfer.await.0);
        }
        result
    }
}

pub(super) fn write(channels: &Channels, offset: u64, bytes: &[u8]) -> Result<Transfer, Errno> {
    write_part(channels, Part::Other, offset, bytes)
}

fn write_part(
    channels: &Channels,
    part: Part,
    offset: u64,
    bytes: &[u8],
) -> Result<Transfer, Errno> {
    let mut bufs = memory(bytes.len())?;
    bufs.copy_in(0, bytes);
    Ok(Transfer::start_part(channels, part, Op::Write { fua: false }, offset, bufs))
}

fn memory(len: usize) -> Result<IoBufs, Errno> {
    AlignedBuf::io_bufs(len, 4096).ok_or(Errno::ENOMEM)
}

/// Reads metadata from the file; zeroes past its end.
pub(super) async fn read(channels: &Channels, offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
    read_part(channels, Part::Other, offset, len).await
}

/// The same, of that part of the image.
pub(super) async fn read_part(
    channels: &Channels,
    part: Part,
    offset: u64,
    len: usize,
) -> Result<Vec<u8>, Errno> {
    let read = Transfer::start_part(channels, part, Op::Read, offset, memory(len)?);
    let (result, bufs) = read.await;
    result?;
    let mut bytes = vec![0; len];
    bufs.copy_out(0, &mut bytes);
    Ok(bytes)
}

/// Reads from a file that ends at `end`, also if it is a device, which is not read past its end; zeroes from there on.
pub(super) async fn read_up_to(
    channels: &Channels,
    end: u64,
    offset: u64,
    len: usize,
) -> Result<Vec<u8>, Errno> {
    let there = end.saturating_sub(offset).min(len as u64) as usize;
    let mut bytes = if there == 0 { Vec::new() } else { read(channels, offset, there).await? };
    bytes.resize(len, 0);
    Ok(bytes)
}

/// Adjacent sectors: the first number, and the bytes.
fn runs(sectors: &Sectors) -> Vec<(u64, Vec<u8>)> {
    let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
    for (number, sector) in sectors {
        match runs.last_mut() {
            Some((first, run))
                if run.len() < RUN && *first + (run.len() / SECTOR) as u64 == *number =>
            {
                run.extend_from_slice(&sector[..]);
            }
            _ => runs.push((*number, sector.to_vec())),
        }
    }
    runs
}

/// Returns each reference count as the higher of the file's, with the `users` added, and the new number, and the sectors
/// of counts that are lower at the end. The old contents of a new refcount block do not count.
async fn highest(
    channels: &Channels,
    counts: Sectors,
    before: &Layout,
    users: &Users,
) -> Result<(Sectors, Sectors), Errno> {
    let is_new = |number: &u64| {
        let at = number * SECTOR as u64;
        !before.refcount_blocks.contains_key(&(at - at % before.cluster))
    };
    let (mut highest, old): (Sectors, Sectors) =
        counts.into_iter().partition(|(number, _)| is_new(number));
    let mut lower = Sectors::new();
    for (first, run) in runs(&old) {
        let at = first * SECTOR as u64;
        let in_file = read_part(channels, Part::RefcountBlock, at, run.len()).await?;
        let (new, _) = run.as_chunks::<SECTOR>();
        let (in_file, _) = in_file.as_chunks::<SECTOR>();
        for ((number, new), in_file) in (first..).zip(new).zip(in_file) {
            let mut raised = *new;
            raise(&mut raised, in_file, before.refcount_bits);
            before.add_users(number, users, in_file, &mut raised);
            if raised != *in_file {
                highest.insert(number, Box::new(raised));
            }
            if raised != *new {
                lower.insert(number, Box::new(*new));
            }
        }
    }
    Ok((highest, lower))
}

/// Raises each count to at least that in `other`.
fn raise(counts: &mut [u8; SECTOR], other: &[u8; SECTOR], bits: u32) {
    if bits >= 8 {
        let len = bits as usize / 8;
        // Big-endian, so the bytes compare as the numbers do.
        for (count, other) in counts.chunks_exact_mut(len).zip(other.chunks_exact(len)) {
            if *count < *other {
                count.copy_from_slice(other);
            }
        }
        return;
    }
    for (counts, other) in counts.iter_mut().zip(other) {
        for shift in (0..8).step_by(bits as usize) {
            let mask = (((1u16 << bits) - 1) << shift) as u8;
            if *counts & mask < *other & mask {
                *counts = *counts & !mask | *other & mask;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A count that has risen and fallen since the last write-out: the file has an old user of the cluster, and gets
    /// two new ones.
    #[test]
    fn counts_cover_the_old_users_and_the_new_ones() {
        let layout = |refcount_bits| Layout {
            cluster: 4096,
            refcount_bits,
            l1: 0..0,
            refcount_table: 0..0,
            // It counts the clusters from 2048 on.
            refcount_blocks: HashMap::from([(3 << 12, 1)]),
            l2_words: 1,
        };
        let cluster = 2048 + 300;
        let compressed = |at: u64| (1 << 62) | ((cluster << 12) + at);
        let mut l2 = Box::new([0; SECTOR]);
        l2[..8].copy_from_slice(&compressed(0).to_be_bytes());
        l2[64..72].copy_from_slice(&compressed(1024).to_be_bytes());
        l2[72..80].copy_from_slice(&(1u64 << 63 | cluster << 12).to_be_bytes());
        let sixteen = layout(16);
        let users = sixteen.compressed_users(&Sectors::from([(80, l2)]));
        assert_eq!(users, Users::from([(cluster, 2)]));
        let sector = (3 << 12) / SECTOR as u64 + 1;
        let (mut in_file, mut raised) = ([0; SECTOR], [0; SECTOR]);
        set_count(&mut in_file, 44, 4, 1);
        set_count(&mut raised, 44, 4, 2);
        sixteen.add_users(sector, &users, &in_file, &mut raised);
        assert_eq!(count(&raised, 44, 4), 3);
        // Never more than there is room for.
        let four = Layout { refcount_blocks: HashMap::from([(3 << 12, 0)]), ..layout(2) };
        let (mut in_file, mut raised) = ([0; SECTOR], [0; SECTOR]);
        set_count(&mut in_file, 300, 1, 2);
        four.add_users(sector - 1, &Users::from([(300, 2)]), &in_file, &mut raised);
        assert_eq!(count(&raised, 300, 1), 3);
    }

    #[test]
    fn counts_are_raised_each_by_itself() {
        let mut counts = [0; SECTOR];
        let mut other = [0; SECTOR];
        counts[..4].copy_from_slice(&[0, 2, 1, 0]);
        other[..4].copy_from_slice(&[0, 1, 1, 255]);
        let (mut sixteen, mut two) = (counts, counts);
        raise(&mut sixteen, &other, 16);
        assert_eq!(sixteen[..4], [0, 2, 1, 255]);
        two[0] = 0b01_10_00_11;
        other[0] = 0b10_01_01_00;
        raise(&mut two, &other, 2);
        assert_eq!(two[0], 0b10_10_01_11);
    }
}
