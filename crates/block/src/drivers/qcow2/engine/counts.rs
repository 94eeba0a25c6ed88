//! Reference counts: how often each cluster of the file is used, and which are free.

use std::ops::Range;

use super::{Changed, Engine, Owner, Room, Stop, Table, cost};
use crate::drivers::qcow2::header::MAX_REFCOUNT_TABLE;
use crate::drivers::qcow2::steps::{ENTRY, SECTOR};

/// No cluster begins here or later: the offsets of entries have that many bits.
const END: u64 = 1 << 56;
/// In the header: offset and clusters of the refcount table.
pub(super) const REFCOUNTS_AT: Range<usize> = 48..56;
pub(super) const REFCOUNTS_CLUSTERS: Range<usize> = 56..60;

/// A count in a refcount block.
pub(in super::super) fn count(block: &[u8], at: usize, order: u32) -> u64 {
    if order < 3 {
        let (bits, per_byte) = (1 << order, 8 >> order);
        let byte = block.get(at / per_byte).copied().unwrap_or(u8::MAX);
        return u64::from(byte >> (at % per_byte * bits)) & ((1 << bits) - 1);
    }
    let len = 1 << (order - 3);
    let bytes = block.get(at * len..).and_then(|rest| rest.get(..len)).unwrap_or(&[u8::MAX]);
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Sets a count in refcount blocks that follow each other.
pub(in super::super) fn set_count(block: &mut [u8], at: usize, order: u32, to: u64) {
    if order < 3 {
        let (bits, per_byte) = (1 << order, 8 >> order);
        if let Some(byte) = block.get_mut(at / per_byte) {
            let shift = at % per_byte * bits;
            let mask = ((1 << bits) - 1) << shift;
            *byte = *byte & !(mask as u8) | (to << shift) as u8 & mask as u8;
        }
        return;
    }
    let len = 1 << (order - 3);
    if let Some(bytes) = block.get_mut(at * len..).and_then(|rest| rest.get_mut(..len)) {
        bytes.copy_from_slice(&to.to_be_bytes()[ENTRY - len..]);
    }
}

impl Engine {
    /// Finds free clusters that follow each other, and holds them: one or more, at most `most`. They are not
    /// counted.
    pub(in super::super) fn reserve(&mut self, most: u64) -> Result<Room, Stop> {
        let bits = self.format.block_bits();
        let before = self.cost.total();
        loop {
            if self.cost.is_much(before) {
                return Err(Stop::Again);
            }
            if self.first_free >= self.most_clusters() {
                return Err(Stop::Full);
            }
            let index = (self.first_free >> bits) as usize;
            match self.refcounts.get(index) {
                None => self.grow_refcounts(index + 1)?,
                Some(0) => self.add_block(index)?,
                Some(_) => {
                    let slot = self.block_slot(index)?;
                    let Some(mut found) = self.find_free(slot, index, self.first_free, most) else {
                        self.first_free = (index as u64 + 1) << bits;
                        continue;
                    };
                    if !self.ahead.is_empty() && found.start < self.ahead.start {
                        found.end = found.end.min(self.ahead.start);
                    }
                    self.check_is_free(&found)?;
                    self.first_free = found.end;
                    self.held.insert(found.clone());
                    let is_fresh = found.start >= self.fresh;
                    self.fresh = self.fresh.max(found.end);
                    return Ok(Room {
                        host: found.start << self.format.cluster_bits,
                        clusters: found.end - found.start,
                        is_fresh,
                        is_reserved: true,
                        written: 0..0,
                    });
                }
            }
        }
    }

    /// Reserves the first clusters of a range that are free and follow each other. `None`: none is.
    pub(in super::super) fn reserve_within(
        &mut self,
        range: Range<u64>,
    ) -> Result<Option<Room>, Stop> {
        let Range { start: mut at, mut end } = range;
        if !self.ahead.is_empty() {
            end = end.min(self.ahead.start);
        }
        while at < end {
            if let Some((slot, _)) = self.count_slot(at)? {
                let index = (at >> self.format.block_bits()) as usize;
                let found = self.find_free(slot, index, at, end - at);
                if let Some(found) = found.map(|found| found.start..found.end.min(end))
                    && !found.is_empty()
                {
                    self.check_is_free(&found)?;
                    self.held.insert(found.clone());
                    return Ok(Some(Room {
                        host: found.start << self.format.cluster_bits,
                        clusters: found.end - found.start,
                        is_fresh: found.start >= self.fresh,
                        is_reserved: true,
                        written: 0..0,
                    }));
                }
            }
            at = ((at >> self.format.block_bits()) + 1) << self.format.block_bits();
        }
        Ok(None)
    }

    /// So many clusters a file can have.
    pub(super) fn most_clusters(&self) -> u64 {
        END >> self.format.cluster_bits
    }

    /// Free clusters that a block counts, from the first that may be on.
    fn find_free(&self, slot: usize, index: usize, from: u64, most: u64) -> Option<Range<u64>> {
        let (bits, order) = (self.format.block_bits(), self.format.refcount_order);
        let block = self.blocks.bytes(slot);
        let first = (index as u64) << bits;
        let end = first + (1 << bits);
        let is_counted = |at: u64| {
            self.cost.add(cost::LOOK);
            count(block, (at - first) as usize, order) != 0
        };
        let mut at = from;
        while at < end {
            if is_counted(at) {
                at += 1;
            } else if let Some(held) = self.held.end_of(at) {
                at = held;
            } else {
                let mut last = at + 1;
                while last < end
                    && last - at < most
                    && !is_counted(last)
                    && self.held.end_of(last).is_none()
                {
                    last += 1;
                }
                return Some(at..last);
            }
        }
        None
    }

    /// Free clusters that follow each other, after all that is counted, with blocks of their own. Each counts as used
    /// once.
    pub(in super::super) fn take(&mut self, clusters: u64) -> Result<u64, Stop> {
        let blocks = self.blocks_for(clusters);
        if self.end_of_blocks() + blocks > self.refcounts.len() {
            self.grow_refcounts(self.end_of_blocks() + blocks)?;
            // The new table has blocks of its own.
            if self.end_of_blocks() + blocks > self.refcounts.len() {
                return Err(Stop::Full);
            }
        }
        let first = (self.end_of_blocks() as u64) << self.format.block_bits();
        self.check_is_free(&(first..first + blocks as u64 + clusters))?;
        self.check_is_backed(&(first..first + blocks as u64), blocks)?;
        Ok(self.place_at_end(blocks, clusters) << self.format.cluster_bits)
    }

    /// From which index on there are no blocks.
    pub(super) fn end_of_blocks(&self) -> usize {
        self.refcounts.iter().rposition(|block| *block != 0).map_or(0, |last| last + 1)
    }

    /// Blocks that count themselves and so many more clusters.
    fn blocks_for(&self, clusters: u64) -> usize {
        let reach = 1 << self.format.block_bits();
        let mut blocks = 1;
        while blocks * reach < clusters + blocks {
            blocks += 1;
        }
        blocks as usize
    }

    /// Puts blocks, and clusters that they count, after all that is counted. Returns the first of the clusters.
    fn place_at_end(&mut self, blocks: usize, clusters: u64) -> u64 {
        let index = self.end_of_blocks();
        let first = (index as u64) << self.format.block_bits();
        let all = blocks as u64 + clusters;
        let reach = 1u64 << self.format.block_bits();
        for nth in 0..blocks {
            let used = all.saturating_sub(nth as u64 * reach).min(reach);
            self.put_block(index + nth, first + nth as u64, used);
        }
        self.ready.remove(first..first + all);
        self.fresh = self.fresh.max(first + all);
        first + blocks as u64
    }

    /// A new block, in the first of the clusters that it counts.
    fn add_block(&mut self, index: usize) -> Result<(), Stop> {
        let cluster = (index as u64) << self.format.block_bits();
        self.check_is_free(&(cluster..cluster + 1))?;
        self.check_is_backed(&(cluster..cluster + 1), 1)?;
        self.put_block(index, cluster, 1);
        self.ready.remove(cluster..cluster + 1);
        self.fresh = self.fresh.max(cluster + 1);
        Ok(())
    }

    /// A new block in a cluster, of whose clusters the first `used` are in use.
    fn put_block(&mut self, index: usize, cluster: u64, used: u64) {
        let mut block = vec![0; self.format.cluster() as usize].into_boxed_slice();
        for at in 0..used {
            set_count(&mut block, at as usize, self.format.refcount_order, 1);
        }
        self.owners.add_table(cluster, Owner::RefcountBlock);
        self.blocks.add(index, block);
        if let Some(entry) = self.refcounts.get_mut(index) {
            *entry = cluster << self.format.cluster_bits;
        }
        (0..self.format.cluster() as usize / SECTOR)
            .for_each(|at| self.note(Changed::Block(index, at)));
        self.note(Changed::Refcounts(index * ENTRY / SECTOR));
    }

    /// A larger refcount table, in another place, of `least` entries or more.
    fn grow_refcounts(&mut self, least: usize) -> Result<(), Stop> {
        let per_cluster = self.format.cluster() as usize / ENTRY;
        let old = self.refcounts.len();
        let index = self.end_of_blocks();
        let mut entries = least.max(old + old / 2).next_multiple_of(per_cluster);
        let (clusters, blocks) = loop {
            let clusters = (entries / per_cluster) as u64;
            let blocks = self.blocks_for(clusters);
            if index + blocks < entries && least + blocks <= entries {
                break (clusters, blocks);
            }
            entries += per_cluster;
        };
        let first = (index as u64) << self.format.block_bits();
        let end = first + blocks as u64 + clusters;
        self.check_is_free(&(first..end))?;
        let is_too_large = (entries * ENTRY) as u64 > MAX_REFCOUNT_TABLE;
        if is_too_large || end >= self.most_clusters() {
            return Err(Stop::Full);
        }
        let at = self.refcounts_at >> self.format.cluster_bits;
        let before = at..at + (old / per_cluster) as u64;
        before.clone().try_for_each(|cluster| self.count_slot(cluster).map(drop))?;
        self.check_is_backed(&(first..end), blocks)?;
        self.refcounts.resize(entries, 0);
        self.blocks.grow(entries);
        let place = self.place_at_end(blocks, clusters);
        self.refcounts_at = place << self.format.cluster_bits;
        self.owners.remove_range(at, Owner::RefcountTable);
        self.owners.add_range(place..place + clusters, Owner::RefcountTable);
        (0..entries * ENTRY / SECTOR).for_each(|at| self.note(Changed::Refcounts(at)));
        self.header[REFCOUNTS_AT].copy_from_slice(&self.refcounts_at.to_be_bytes());
        self.header[REFCOUNTS_CLUSTERS].copy_from_slice(&(clusters as u32).to_be_bytes());
        self.note(Changed::Header);
        before.for_each(|cluster| self.lower(cluster));
        Ok(())
    }

    /// The block that counts a cluster, and the count's index. `None`: there is none, so it counts as free.
    pub(super) fn count_slot(&mut self, cluster: u64) -> Result<Option<(usize, usize)>, Stop> {
        self.owners.check()?;
        self.cost.add(2 * cost::LOOK);
        let bits = self.format.block_bits();
        let index = (cluster >> bits) as usize;
        if self.refcounts.get(index).is_none_or(|block| *block == 0) {
            return Ok(None);
        }
        let slot = self.block_slot(index)?;
        Ok(Some((slot, (cluster & ((1 << bits) - 1)) as usize)))
    }

    fn block_slot(&mut self, index: usize) -> Result<usize, Stop> {
        let offset = self.refcounts.get(index).copied().unwrap_or_default();
        self.blocks.slot(index).ok_or(Stop::Read(Table::Block(index, offset)))
    }

    /// Counts a cluster that is free as used once. Its block is in memory.
    pub(super) fn raise(&mut self, cluster: u64) -> Result<(), Stop> {
        let order = self.format.refcount_order;
        let Some((slot, at)) = self.count_slot(cluster)? else {
            return Err(Stop::damaged(format_args!("cluster {cluster:#x} has no count")));
        };
        set_count(self.blocks.bytes_mut(slot), at, order, 1);
        self.note_count(cluster, at);
        Ok(())
    }

    /// Counts a cluster as used once less. It is given up with the last. Its block is in memory.
    pub(super) fn lower(&mut self, cluster: u64) {
        let order = self.format.refcount_order;
        let Ok(Some((slot, at))) = self.count_slot(cluster) else { return };
        let block = self.blocks.bytes_mut(slot);
        let Some(less) = count(block, at, order).checked_sub(1) else {
            // What was not counted is not given up: something else may have it.
            return;
        };
        set_count(block, at, order, less);
        self.note_count(cluster, at);
        // It may lie behind what the file had when it was opened.
        self.fresh = self.fresh.max(cluster + 1);
        // Compressed clusters that are still to be mapped there give it up.
        let is_pending = self.packing.close(cluster, self.format.cluster_bits);
        if less == 0 {
            self.cost.add(cost::SECTOR_CHANGED);
            self.held.insert(cluster..cluster + 1);
            if !is_pending {
                self.give_up(cluster..cluster + 1);
            }
        }
    }

    /// A cluster that was [reserved](Self::reserve) is in use: by something that no table here leads to.
    pub(in super::super) fn use_reserved(&mut self, host: u64) -> Result<(), Stop> {
        let cluster = host >> self.format.cluster_bits;
        self.raise(cluster)?;
        self.held.remove(cluster..cluster + 1);
        Ok(())
    }

    /// A cluster that something else than a table here led to is not in use any more.
    pub(in super::super) fn give_back(&mut self, host: u64) -> Result<(), Stop> {
        let cluster = host >> self.format.cluster_bits;
        self.owners.remove_range(cluster, Owner::BitmapDirectory);
        self.check_is_data(cluster..cluster + 1)?;
        self.count_slot(cluster)?;
        self.lower(cluster);
        Ok(())
    }

    pub(super) fn note_count(&mut self, cluster: u64, at: usize) {
        let index = (cluster >> self.format.block_bits()) as usize;
        let bit = at << self.format.refcount_order;
        self.note(Changed::Block(index, bit / 8 / SECTOR));
    }

    pub(super) fn give_up(&mut self, range: Range<u64>) {
        match self.given_up.last_mut() {
            Some((age, last)) if *age == self.age && last.end == range.start => {
                last.end = range.end
            }
            _ => self.given_up.push((self.age, range)),
        }
    }

    /// Frees at once what was reserved and not mapped, `clusters` from `host` on. It may have been written to, and
    /// no write to it is in flight.
    pub(in super::super) fn release_room(&mut self, host: u64, clusters: u64) {
        let first = host >> self.format.cluster_bits;
        self.held.remove(first..first + clusters);
        self.unbacked.remove(first..first + clusters);
        self.first_free = self.first_free.min(first);
    }

    /// Gives up what was reserved and not mapped, `clusters` from `host` on. It may have been written to, and
    /// may be written to still.
    pub(in super::super) fn give_up_room(&mut self, host: u64, clusters: u64) {
        let first = host >> self.format.cluster_bits;
        self.give_up(first..first + clusters);
    }

    /// What is given up from now on is another matter: the metadata that there is now is to be written.
    /// Returns what [`settle`](Self::settle) takes once it is.
    pub(in super::super) fn seal(&mut self) -> u64 {
        self.age += 1;
        self.age - 1
    }

    /// All that was given up up to that age may be used again: the file says so, and nothing is written to it
    /// any more.
    pub(in super::super) fn settle(&mut self, age: u64) {
        let given_up = std::mem::take(&mut self.given_up);
        let (free, kept) = given_up.into_iter().partition::<Vec<_>, _>(|(at, _)| *at <= age);
        self.given_up = kept;
        for (_, range) in free {
            self.first_free = self.first_free.min(range.start);
            self.held.remove(range);
        }
    }

    /// Runs of clusters that wait for [`settle`](Self::settle).
    pub(in super::super) fn given_up(&self) -> usize {
        self.given_up.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_each_width_are_where_the_format_has_them() {
        let mut block = [0; 64];
        set_count(&mut block, 3, 0, 1);
        set_count(&mut block, 5, 2, 9);
        assert_eq!((block[0], block[2]), (0b1000, 0x90));
        set_count(&mut block, 4, 4, 0x102);
        assert_eq!(block[8..10], [1, 2]);
        set_count(&mut block, 2, 6, 7);
        assert_eq!(block[23], 7);
        let counts = [(3, 0), (5, 2), (4, 4), (2, 6)].map(|(at, order)| count(&block, at, order));
        assert_eq!(counts, [1, 9, 0x102, 7]);
        set_count(&mut block, 5, 2, 2);
        assert_eq!(block[2], 0x20);
        // Past the end, everything is in use.
        assert_ne!(count(&block, 64, 3), 0);
    }
}
