//! What requests change: where clusters of the disk are.

use std::ops::Range;

use super::entry::{ALL, COPIED, Entry, subclusters, table};
use super::{Changed, Engine, Owner, Room, Stop, Zeroing, cost};
use crate::drivers::qcow2::header::MAX_L1;
use crate::drivers::qcow2::steps::{ENTRY, SECTOR};

/// In the header: entries and offset of the L1 table.
pub(super) const L1_ENTRIES: Range<usize> = 36..40;
pub(super) const L1_AT: Range<usize> = 40..48;

/// Whether a write to a part of the cluster writes all of it, in another place.
fn moves_whole(entry: Entry) -> bool {
    match entry {
        Entry::Compressed { .. } | Entry::Data { own: false, .. } => true,
        Entry::Nowhere
        | Entry::Zeroes { .. }
        | Entry::Data { own: true, .. }
        | Entry::Mixed { .. } => false,
    }
}

impl Engine {
    /// Room for data of a range of the disk, which is in one place, or in none: what its first cluster keeps, or free
    /// clusters, as many as follow each other. Not for all of the range, as a rule.
    pub(in super::super) fn room(&mut self, range: Range<u64>) -> Result<Room, Stop> {
        let format = self.format;
        let (bits, unit) = (format.cluster_bits, 1 << format.unit_bits());
        let guest = range.start >> bits;
        let (index, at) = self.split(guest);
        let most =
            (range.end.div_ceil(format.cluster()) - guest).min((1 << format.l2_bits()) - at as u64);
        let slot = self.l2_slot(index)?;
        let entry = slot.map_or(Ok(Entry::Nowhere), |slot| self.entry(slot, at))?;
        let first = guest << bits;
        let written = range.start - range.start % unit..range.end.next_multiple_of(unit);
        // Within the clusters that there is room for.
        let written = |clusters: u64| written.start..written.end.min(first + (clusters << bits));
        let here = |host, clusters| Room {
            host,
            clusters,
            is_fresh: false,
            is_reserved: false,
            written: written(clusters),
        };
        if format.has_data_file {
            return Ok(here(first, most));
        }
        let moves = match entry.parts() {
            (Some(host), true, ..) => {
                let cluster = host >> bits;
                self.check_is_data(cluster..cluster + 1)?;
                return Ok(here(host, 1));
            }
            (Some(_), false, data, _) if data != 0 && data != ALL => {
                // Data of other subclusters moves along.
                self.hold_l2(guest)?;
                let room = self.reserve(1)?;
                let at = |subclusters: u32| first + (u64::from(subclusters) << format.unit_bits());
                let (begin, end) =
                    (at(data.trailing_zeros()), at(u32::BITS - data.leading_zeros()));
                let written = written(1);
                let written = written.start.min(begin)..written.end.max(end);
                return Ok(Room { is_fresh: false, written, ..room });
            }
            _ => moves_whole(entry),
        };
        let most = self.alike(slot, at, most, moves);
        self.hold_l2(guest)?;
        let room = self.reserve(most)?;
        let written = match moves {
            true => first..first + (room.clusters << bits),
            false => written(room.clusters),
        };
        Ok(Room { written, ..room })
    }

    /// Of so many clusters those from the first on that keep no place and no data, or whose data moves, all of it.
    fn alike(&self, slot: Option<usize>, at: usize, most: u64, moves: bool) -> u64 {
        let Some(slot) = slot else { return most };
        let is_alike = |nth: &u64| match self.entry(slot, at + *nth as usize) {
            Ok(entry) if moves => moves_whole(entry),
            Ok(entry) => !moves_whole(entry) && entry.parts().0.is_none(),
            Err(_) => false,
        };
        1 + (1..most).take_while(is_alike).count() as u64
    }

    /// A range of the disk is at `host` from now on, where its data is: whole units, as of a [room](Self::room), from the
    /// first cluster's beginning on. What they had is given up. Of one L2 table. Returns how many clusters were changed, one
    /// or more.
    pub(in super::super) fn map(&mut self, range: Range<u64>, host: u64) -> Result<u64, Stop> {
        let format = self.format;
        let guest = range.start >> format.cluster_bits;
        let clusters = range.end.div_ceil(format.cluster()) - guest;
        let (index, at) = self.split(guest);
        let slot = self.own_l2(index)?;
        self.each(clusters, |engine, nth| {
            let host = host + (nth << format.cluster_bits);
            let first = (guest + nth) << format.cluster_bits;
            let part =
                range.start.max(first) - first..range.end.min(first + format.cluster()) - first;
            engine.map_one(index, slot, at + nth as usize, host, subclusters(part, &format))
        })
    }

    fn map_one(
        &mut self,
        index: usize,
        slot: usize,
        at: usize,
        host: u64,
        parts: u32,
    ) -> Result<(), Stop> {
        let old = self.entry(slot, at)?;
        let given_up = old.clusters(&self.format);
        let cluster = host >> self.format.cluster_bits;
        let is_kept = self.format.has_data_file || given_up == (cluster..cluster + 1);
        if !is_kept {
            self.check_is_data(given_up.clone())?;
            given_up.clone().try_for_each(|old| self.count_slot(old).map(drop))?;
            self.raise(cluster)?;
            self.held.remove(cluster..cluster + 1);
        }
        let (_, _, data, zeroes) = old.parts();
        let data = if is_kept { data | parts } else { parts };
        self.set_entry(index, slot, at, Entry::of(Some(host), true, data, zeroes & !parts));
        if !is_kept {
            given_up.for_each(|old| self.lower(old));
        }
        Ok(())
    }

    /// Units of one cluster of the disk read as zeroes from now on. The cluster keeps its place. `false`: it is
    /// compressed, nothing is done.
    pub(in super::super) fn zero_part(&mut self, range: Range<u64>) -> Result<bool, Stop> {
        let format = self.format;
        let guest = range.start >> format.cluster_bits;
        let (index, at) = self.split(guest);
        let slot = self.own_l2(index)?;
        let old = self.entry(slot, at)?;
        if matches!(old, Entry::Compressed { .. }) {
            return Ok(false);
        }
        let first = guest << format.cluster_bits;
        let parts = subclusters(range.start - first..range.end - first, &format);
        let (host, own, data, zeroes) = old.parts();
        let new = Entry::of(host, own, data & !parts, zeroes | parts);
        if new != old {
            self.set_entry(index, slot, at, new);
        }
        Ok(true)
    }

    /// Clusters of the disk lose their data: of one L2 table, or of several that there are not. Returns how many, one or more.
    pub(in super::super) fn zero(
        &mut self,
        guest: u64,
        clusters: u64,
        zeroing: Zeroing,
    ) -> Result<u64, Stop> {
        let (index, at) = self.split(guest);
        let all = clusters;
        let clusters = clusters.min((1 << self.format.l2_bits()) - at as u64);
        if zeroing == Zeroing::Uncover && self.l2_slot(index)?.is_none() {
            return Ok(all.min(self.gap_end(index, self.format.l2_bits()) - guest));
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
        let old = self.entry(slot, at)?;
        let new = match zeroing {
            Zeroing::Keep => {
                let (host, own, ..) = old.parts();
                Entry::Zeroes { host, own }
            }
            Zeroing::Free => Entry::Zeroes { host: None, own: false },
            Zeroing::Uncover => Entry::Nowhere,
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

    /// Changes one cluster after the other, until a table has to be read first or the call has cost [enough](cost::MOST).
    fn each(
        &mut self,
        clusters: u64,
        mut change: impl FnMut(&mut Engine, u64) -> Result<(), Stop>,
    ) -> Result<u64, Stop> {
        let before = self.cost.total();
        for nth in 0..clusters {
            match change(self, nth) {
                Ok(()) if self.cost.is_much(before) => return Ok(nth + 1),
                Ok(()) => {}
                Err(stop) if nth == 0 => return Err(stop),
                Err(_) => return Ok(nth),
            }
        }
        Ok(clusters)
    }

    pub(super) fn set_entry(&mut self, index: usize, slot: usize, at: usize, entry: Entry) {
        self.cost.add(cost::SET);
        let raw = entry.raw(&self.format);
        let first = at * self.format.l2_entry();
        let table = self.l2.bytes_mut(slot);
        if let Some(descriptor) = table.get_mut(first..first + ENTRY) {
            descriptor.copy_from_slice(&raw.descriptor.to_be_bytes());
        }
        if self.format.is_extended
            && let Some(bitmap) = table.get_mut(first + ENTRY..first + 2 * ENTRY)
        {
            bitmap.copy_from_slice(&raw.bitmap.to_be_bytes());
        }
        self.note(Changed::L2(index, first / SECTOR));
    }

    /// Holds a cluster for the L2 table that is to map this cluster of the disk, if there is none to change. Room for data
    /// that is reserved next lies behind. So where the data could be written, there is room for the table: a file that is
    /// full does not keep metadata from being written out.
    pub(in super::super) fn hold_l2(&mut self, guest: u64) -> Result<(), Stop> {
        self.hold_table(self.split(guest).0)
    }

    fn hold_table(&mut self, index: usize) -> Result<(), Stop> {
        let raw = self.l1.get(index).copied().unwrap_or_default();
        if let Some((_, true)) = table(raw, &self.format)? {
            return Ok(());
        }
        let bits = self.format.cluster_bits;
        match self.coming.get(&index).copied() {
            Some(cluster) if cluster <= self.first_free || self.is_backing(cluster) => {
                return self.check_held(cluster);
            }
            // Room before that has become free.
            Some(cluster) => {
                self.coming.remove(&index);
                self.release_room(cluster << bits, 1);
            }
            None => {}
        }
        let room = self.reserve(1)?;
        self.note_table(room.host >> bits, room.is_fresh);
        self.coming.insert(index, room.host >> bits);
        self.check_held(room.host >> bits)
    }

    /// The L2 table of an index, to be changed: one of its own.
    pub(super) fn own_l2(&mut self, index: usize) -> Result<usize, Stop> {
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
        if !self.coming.contains_key(&index) {
            self.hold_table(index)?;
        }
        let cluster = self.coming.get(&index).copied().unwrap_or_default();
        self.check_held(cluster)?;
        self.raise(cluster)?;
        self.coming.remove(&index);
        self.held.remove(cluster..cluster + 1);
        let offset = cluster << self.format.cluster_bits;
        self.owners.add_table(offset >> self.format.cluster_bits, Owner::ActiveL2);
        let slot = self.l2.add(index, bytes);
        self.l1.set(index, offset | COPIED);
        (0..sectors).for_each(|at| self.note(Changed::L2(index, at)));
        self.note(Changed::L1(index * ENTRY / SECTOR));
        if let Some((old, _)) = old {
            self.owners.remove_table(old >> self.format.cluster_bits);
            self.lower(old >> self.format.cluster_bits);
        }
        Ok(slot)
    }

    /// Entries of an L1 table that reaches as far as a disk of that size: whole clusters.
    fn l1_entries(&self, size: u64) -> Result<usize, Stop> {
        let reach = self.format.l2_bits() + self.format.cluster_bits;
        let per_cluster = self.format.cluster() / ENTRY as u64;
        let entries = size.div_ceil(1 << reach).next_multiple_of(per_cluster);
        match entries > MAX_L1 / ENTRY as u64 {
            true => Err(Stop::Full),
            false => Ok(entries as usize),
        }
    }

    /// Clusters that [`grow_l1`](Self::grow_l1) needs. 0: those that the table has are enough.
    pub(in super::super) fn l1_clusters(&self, size: u64) -> Result<u64, Stop> {
        let per_cluster = self.format.cluster() as usize / ENTRY;
        let clusters = self.l1_entries(size)? / per_cluster;
        let is_more = clusters > self.l1.len().div_ceil(per_cluster);
        Ok(if is_more { clusters as u64 } else { 0 })
    }

    /// Bytes of the file, in whole sectors, from the L1 table's end to the end of its last cluster.
    pub(in super::super) fn unused_l1(&self) -> Range<u64> {
        let end = self.l1_at + (self.l1.len() * ENTRY) as u64;
        end.next_multiple_of(SECTOR as u64)..end.next_multiple_of(self.format.cluster())
    }

    /// Has the L1 table reach as far as a disk of that size. `place`: the first byte of [so many](Self::l1_clusters)
    /// clusters that are counted and have blocks. Returns where the table was, in bytes of the file, if it has moved: what
    /// has changed there is not to be written any more.
    pub(in super::super) fn grow_l1(&mut self, size: u64, place: u64) -> Result<Range<u64>, Stop> {
        let (entries, bits) = (self.l1_entries(size)?, self.format.cluster_bits);
        let per_cluster = self.format.cluster() as usize / ENTRY;
        if self.l1_clusters(size)? == 0 {
            self.l1.grow(entries);
            self.l2.grow(entries);
            (0..entries * ENTRY / SECTOR).for_each(|at| self.note(Changed::L1(at)));
            self.header[L1_ENTRIES].copy_from_slice(&(entries as u32).to_be_bytes());
            self.note(Changed::Header);
            return Ok(0..0);
        }
        let clusters = self.l1.len().div_ceil(per_cluster) as u64;
        let old = self.l1_at >> bits..(self.l1_at >> bits) + clusters;
        old.clone().try_for_each(|cluster| self.count_slot(cluster).map(drop))?;
        self.l1.grow(entries);
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
