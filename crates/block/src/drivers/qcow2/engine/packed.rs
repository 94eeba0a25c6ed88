//! Room for compressed clusters. Several of them share a cluster of the file, one after the other.
//!
//! The reference count of a shared cluster is the number of compressed clusters in it. A cluster gets no more of them
//! after its count has fallen, so its count never exceeds the number that it has room for
//! ([`steps`](crate::drivers::qcow2::steps) relies on this).

use std::collections::BTreeMap;
use std::ops::Range;

use super::counts::{count, set_count};
use super::entry::{Entry, most_compressed};
use super::{Engine, Stop};

/// Compressed clusters begin at, and take, multiples of so many bytes.
pub(in super::super) const UNIT: u64 = 512;

/// Where compressed clusters are put.
#[derive(Debug, Default)]
pub(super) struct Packing {
    /// The first free byte of a cluster that has others before it.
    next: Option<u64>,
    /// Clusters with room that was taken and is not mapped yet: how often.
    pending: BTreeMap<u64, u64>,
}

impl Packing {
    /// Puts nothing more into a cluster. Returns whether something is still to be mapped there.
    pub(super) fn close(&mut self, cluster: u64, cluster_bits: u32) -> bool {
        if self.next.is_some_and(|next| next >> cluster_bits == cluster) {
            self.next = None;
        }
        self.pending.contains_key(&cluster)
    }

    /// Puts nothing more into clusters that have others before.
    pub(super) fn forget(&mut self) {
        self.next = None;
    }

    /// Ends what was pending in a cluster. Returns whether nothing else is.
    fn end(&mut self, cluster: u64) -> bool {
        let Some(pending) = self.pending.get_mut(&cluster) else { return true };
        *pending -= 1;
        let is_last = *pending == 0;
        if is_last {
            self.pending.remove(&cluster);
        }
        is_last
    }
}

/// Room for a compressed cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct Packed {
    /// Its first byte in the file, a multiple of [`UNIT`].
    pub(in super::super) host: u64,
    /// Its bytes, a multiple of [`UNIT`].
    pub(in super::super) len: u64,
    /// Nothing was ever written to its last cluster.
    pub(in super::super) is_fresh: bool,
}

impl Engine {
    /// Takes room for a compressed cluster of `len` bytes, a multiple of [`UNIT`] and less than a cluster. It is to be
    /// [mapped](Self::map_packed) or [given up](Self::give_up_packed). `None`: an entry cannot lead that far.
    pub(in super::super) fn pack(&mut self, len: u64) -> Result<Option<Packed>, Stop> {
        let bits = self.format.cluster_bits;
        if let Some(at) = self.packing.next
            && self.takes_one_more(at >> bits)?
        {
            let last = (at + len - 1) >> bits;
            if last == at >> bits {
                return Ok(Some(self.put(at, len, false)));
            }
            if self.is_free(last)? {
                self.held.insert(last..last + 1);
                let is_fresh = last >= self.fresh;
                self.fresh = self.fresh.max(last + 1);
                return Ok(Some(self.put(at, len, is_fresh)));
            }
        }
        let room = self.reserve(1)?;
        if room.host + len > most_compressed(bits) {
            self.release_room(room.host, 1);
            return Ok(None);
        }
        Ok(Some(self.put(room.host, len, room.is_fresh)))
    }

    fn put(&mut self, host: u64, len: u64, is_fresh: bool) -> Packed {
        let packed = Packed { host, len, is_fresh };
        for cluster in self.clusters_of(packed) {
            *self.packing.pending.entry(cluster).or_default() += 1;
        }
        let end = host + len;
        self.packing.next = (!end.is_multiple_of(self.format.cluster())).then_some(end);
        packed
    }

    fn clusters_of(&self, packed: Packed) -> Range<u64> {
        let Packed { host, len, .. } = packed;
        Entry::Compressed { host, len }.clusters(&self.format)
    }

    /// Whether a cluster's count has room for one more than those that are to be mapped.
    fn takes_one_more(&mut self, cluster: u64) -> Result<bool, Stop> {
        let order = self.format.refcount_order;
        let Some((slot, at)) = self.count_slot(cluster)? else { return Ok(false) };
        let pending = self.packing.pending.get(&cluster).copied().unwrap_or_default();
        let most = u64::MAX >> (64 - (1 << order));
        let now = count(self.blocks.bytes(slot), at, order);
        Ok(now.checked_add(pending).is_some_and(|users| users < most))
    }

    /// Whether that very cluster is free.
    fn is_free(&mut self, cluster: u64) -> Result<bool, Stop> {
        let order = self.format.refcount_order;
        if cluster >= self.most_clusters() || self.held.end_of(cluster).is_some() {
            return Ok(false);
        }
        let Some((slot, at)) = self.count_slot(cluster)? else { return Ok(false) };
        if count(self.blocks.bytes(slot), at, order) != 0 {
            return Ok(false);
        }
        match self.check_is_free(&(cluster..cluster + 1)) {
            Ok(()) => Ok(true),
            Err(Stop::Busy) => Ok(false),
            Err(stop) => Err(stop),
        }
    }

    /// A cluster of the disk is compressed, and where its data is, from now on. What it had is given up.
    pub(in super::super) fn map_packed(&mut self, guest: u64, packed: Packed) -> Result<(), Stop> {
        let (index, at) = self.split(guest);
        let slot = self.own_l2(index)?;
        let old = self.entry(slot, at)?;
        let (given_up, taken) = (old.clusters(&self.format), self.clusters_of(packed));
        self.check_is_data(given_up.clone())?;
        given_up.clone().try_for_each(|old| self.count_slot(old).map(drop))?;
        taken.clone().try_for_each(|cluster| self.count_slot(cluster).map(drop))?;
        for cluster in taken {
            self.share(cluster)?;
            self.held.remove(cluster..cluster + 1);
            self.packing.end(cluster);
        }
        let Packed { host, len, .. } = packed;
        self.set_entry(index, slot, at, Entry::Compressed { host, len });
        given_up.for_each(|old| self.lower(old));
        Ok(())
    }

    /// Counts a cluster as used once more. Its block is in memory.
    fn share(&mut self, cluster: u64) -> Result<(), Stop> {
        let order = self.format.refcount_order;
        let Some((slot, at)) = self.count_slot(cluster)? else {
            return Err(Stop::damaged(format_args!("cluster {cluster:#x} has no count")));
        };
        let block = self.blocks.bytes_mut(slot);
        let more = count(block, at, order).saturating_add(1);
        set_count(block, at, order, more);
        self.note_count(cluster, at);
        Ok(())
    }

    /// Gives up room that is not mapped. It may have been written to. `is_writing`: a write to it may be in flight.
    pub(in super::super) fn give_up_packed(&mut self, packed: Packed, is_writing: bool) {
        let bits = self.format.cluster_bits;
        for cluster in self.clusters_of(packed) {
            // Held: it counts as free.
            if self.packing.end(cluster) && self.held.end_of(cluster).is_some() {
                self.packing.close(cluster, bits);
                match is_writing {
                    true => self.give_up(cluster..cluster + 1),
                    false => self.release_room(cluster << bits, 1),
                }
            }
        }
    }
}
