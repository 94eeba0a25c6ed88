//! What requests change: where clusters of the disk are.

use std::ops::Range;

use super::entry::{COPIED, Entry, table};
use super::{Changed, Engine, Owner, Room, Stop, Zeroing, entry_at};
use crate::drivers::qcow2::header::MAX_L1;
use crate::drivers::qcow2::steps::{ENTRY, SECTOR};

/// In the header: entries and offset of the L1 table.
const L1_ENTRIES: Range<usize> = 36..40;
const L1_AT: Range<usize> = 40..48;

impl Engine {
    /// Room for data of clusters of the disk, as many as follow each other, at most `most`: the place that the
    /// first one keeps, or free clusters.
    pub(in super::super) fn room(&mut self, guest: u64, most: u64) -> Result<Room, Stop> {
        let (index, at) = self.split(guest);
        let most = most.min((1 << self.format.l2_bits()) - at as u64);
        if self.format.has_data_file {
            let host = guest << self.format.cluster_bits;
            return Ok(Room { host, clusters: most, is_fresh: false, is_reserved: false });
        }
        if let Some(slot) = self.l2_slot(index)?
            && let Entry::Zeroes { host: Some(host), own: true } =
                Entry::parse(entry_at(self.l2.bytes(slot), at), &self.format)?
        {
            let cluster = host >> self.format.cluster_bits;
            self.check_is_data(cluster..cluster + 1)?;
            return Ok(Room { host, clusters: 1, is_fresh: false, is_reserved: false });
        }
        self.reserve(most)
    }

    /// Clusters of the disk are at `host` from now on, where their data is. What they had is given up. Of one
    /// L2 table. Returns how many were changed, one or more.
    pub(in super::super) fn map(
        &mut self,
        guest: u64,
        host: u64,
        clusters: u64,
    ) -> Result<u64, Stop> {
        let (index, at) = self.split(guest);
        let slot = self.own_l2(index)?;
        self.each(clusters, |engine, nth| {
            let host = host + (nth << engine.format.cluster_bits);
            engine.map_one(index, slot, at + nth as usize, host)
        })
    }

    fn map_one(&mut self, index: usize, slot: usize, at: usize, host: u64) -> Result<(), Stop> {
        let old = Entry::parse(entry_at(self.l2.bytes(slot), at), &self.format)?;
        let given_up = old.clusters(&self.format);
        let cluster = host >> self.format.cluster_bits;
        let is_kept = given_up == (cluster..cluster + 1);
        if !self.format.has_data_file && !is_kept {
            self.check_is_data(given_up.clone())?;
            given_up.clone().try_for_each(|old| self.count_slot(old).map(drop))?;
            self.raise(cluster)?;
            self.held.remove(cluster..cluster + 1);
        }
        self.set_entry(index, slot, at, Entry::Data { host, own: true });
        if !is_kept {
            given_up.for_each(|old| self.lower(old));
        }
        Ok(())
    }

    /// Clusters of the disk lose their data. Of one L2 table. Returns how many were changed, one or more.
    pub(in super::super) fn zero(
        &mut self,
        guest: u64,
        clusters: u64,
        zeroing: Zeroing,
    ) -> Result<u64, Stop> {
        let (index, at) = self.split(guest);
        let clusters = clusters.min((1 << self.format.l2_bits()) - at as u64);
        if zeroing == Zeroing::Uncover && self.l2_slot(index)?.is_none() {
            return Ok(clusters);
        }
        let slot = self.own_l2(index)?;
        self.each(clusters, |engine, nth| engine.zero_one(index, slot, at + nth as usize, zeroing))
    }

    fn zero_one(
        &mut self,
        index: usize,
        slot: usize,
        at: usize,
        zeroing: Zeroing,
    ) -> Result<(), Stop> {
        let old = Entry::parse(entry_at(self.l2.bytes(slot), at), &self.format)?;
        let new = match (zeroing, old) {
            (Zeroing::Keep, Entry::Data { host, own }) => Entry::Zeroes { host: Some(host), own },
            (Zeroing::Keep, Entry::Zeroes { .. }) => old,
            (Zeroing::Keep, Entry::Nowhere | Entry::Compressed { .. }) | (Zeroing::Free, _) => {
                Entry::Zeroes { host: None, own: false }
            }
            (Zeroing::Uncover, _) => Entry::Nowhere,
        };
        if new == old {
            return Ok(());
        }
        let given_up = match new.clusters(&self.format).is_empty() {
            true => old.clusters(&self.format),
            false => 0..0,
        };
        self.check_is_data(given_up.clone())?;
        given_up.clone().try_for_each(|cluster| self.count_slot(cluster).map(drop))?;
        self.set_entry(index, slot, at, new);
        given_up.for_each(|cluster| self.lower(cluster));
        Ok(())
    }

    /// Changes one cluster after the other, until a table has to be read first.
    fn each(
        &mut self,
        clusters: u64,
        mut change: impl FnMut(&mut Engine, u64) -> Result<(), Stop>,
    ) -> Result<u64, Stop> {
        for nth in 0..clusters {
            match change(self, nth) {
                Ok(()) => {}
                Err(stop) if nth == 0 => return Err(stop),
                Err(_) => return Ok(nth),
            }
        }
        Ok(clusters)
    }

    fn set_entry(&mut self, index: usize, slot: usize, at: usize, entry: Entry) {
        let entries = self.l2.bytes_mut(slot).as_chunks_mut::<ENTRY>().0;
        if let Some(bytes) = entries.get_mut(at) {
            *bytes = entry.raw().to_be_bytes();
        }
        self.note(Changed::L2(index, at * ENTRY / SECTOR));
    }

    /// The L2 table of an index, to be changed: one of its own.
    fn own_l2(&mut self, index: usize) -> Result<usize, Stop> {
        self.owners.check()?;
        let raw = self.l1.get(index).copied().unwrap_or_default();
        let old = table(raw, &self.format)?;
        if let Some((_, true)) = old {
            let slot = self.l2_slot(index)?;
            return slot.ok_or_else(|| Stop::damaged(format_args!("no L1 entry {index}")));
        }
        let bytes = match (old, self.l2_slot(index)?) {
            (Some((offset, _)), Some(slot)) => {
                self.count_slot(offset >> self.format.cluster_bits)?;
                self.l2.bytes(slot).into()
            }
            _ => vec![0; self.format.cluster() as usize].into_boxed_slice(),
        };
        let sectors = bytes.len() / SECTOR;
        let offset = self.take(1)?;
        self.owners.add_table(offset >> self.format.cluster_bits, Owner::ActiveL2);
        let slot = self.l2.add(index, bytes);
        if let Some(entry) = self.l1.get_mut(index) {
            *entry = offset | COPIED;
        }
        (0..sectors).for_each(|at| self.note(Changed::L2(index, at)));
        self.note(Changed::L1(index * ENTRY / SECTOR));
        if let Some((old, _)) = old {
            self.owners.remove_table(old >> self.format.cluster_bits);
            self.lower(old >> self.format.cluster_bits);
        }
        Ok(slot)
    }

    /// Has the L1 table reach as far as a disk of that size, in another place. Returns where it was, in bytes of
    /// the file: what has changed there is not to be written any more.
    pub(in super::super) fn grow_l1(&mut self, size: u64) -> Result<Range<u64>, Stop> {
        let reach = self.format.l2_bits() + self.format.cluster_bits;
        let per_cluster = self.format.cluster() as usize / ENTRY;
        let entries = size.div_ceil(1 << reach).next_multiple_of(per_cluster as u64);
        if entries > MAX_L1 / ENTRY as u64 {
            return Err(Stop::Full);
        }
        let (entries, bits) = (entries as usize, self.format.cluster_bits);
        let clusters = self.l1.len().div_ceil(per_cluster) as u64;
        let old = self.l1_at >> bits..(self.l1_at >> bits) + clusters;
        old.clone().try_for_each(|cluster| self.count_slot(cluster).map(drop))?;
        let place = self.take((entries / per_cluster) as u64)?;
        self.l1.resize(entries, 0);
        self.l2.grow(entries);
        self.l1_at = place;
        let first = place >> bits;
        self.owners.remove_range(old.start, Owner::ActiveL1);
        self.owners.add_range(first..first + (entries / per_cluster) as u64, Owner::ActiveL1);
        (0..entries * ENTRY / SECTOR).for_each(|at| self.note(Changed::L1(at)));
        self.header[L1_ENTRIES].copy_from_slice(&(entries as u32).to_be_bytes());
        self.header[L1_AT].copy_from_slice(&place.to_be_bytes());
        self.note(Changed::Header);
        old.clone().for_each(|cluster| self.lower(cluster));
        Ok(old.start << bits..old.end << bits)
    }
}
