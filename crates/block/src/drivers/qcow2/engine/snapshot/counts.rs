//! Reference counts for tables that are not in use yet: new refcount blocks beside the old ones.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use nix::errno::Errno;

use super::super::counts::{count, set_count};
use super::super::{Format, Stop};
use super::{SwitchError, TableFile};

/// Runs of free clusters that are noted: 16 MiB.
const MOST_RUNS: usize = 1 << 20;
/// Bytes of blocks in memory, and blocks at least.
const MEMORY: u64 = 8 << 20;
const LEAST: usize = 4;

/// New refcount blocks, each in a new place. A block begins as a copy of the old one.
pub(super) struct Counts {
    format: Format,
    /// The old places.
    old: Vec<u64>,
    /// The new places.
    pub(super) new: Vec<u64>,
    /// Blocks that have been written to their new places.
    is_written: Vec<bool>,
    loaded: HashMap<usize, Loaded>,
    /// The loaded blocks, the next to go first.
    queue: VecDeque<usize>,
    most: usize,
    pub(super) free: Freed,
}

/// Clusters that become free when the header leads to the new tables.
#[derive(Debug, Default)]
pub(in crate::drivers::qcow2) struct Freed {
    /// From the lowest one to the highest one.
    pub(in crate::drivers::qcow2) all: Option<Range<u64>>,
    /// Those that follow each other. Of a file with too many runs, the first [`MOST_RUNS`].
    pub(in crate::drivers::qcow2) runs: Vec<Range<u64>>,
}

impl Freed {
    fn add(&mut self, cluster: u64) {
        let all = self.all.get_or_insert(cluster..cluster + 1);
        *all = all.start.min(cluster)..all.end.max(cluster + 1);
        let has_room = self.runs.len() < MOST_RUNS;
        match self.runs.last_mut() {
            Some(last) if last.end == cluster => last.end += 1,
            _ if has_room => self.runs.push(cluster..cluster + 1),
            _ => {}
        }
    }
}

struct Loaded {
    bytes: Vec<u8>,
    was_used: bool,
}

impl Counts {
    /// `places`: one for each block.
    ///
    /// # Errors
    ///
    /// `EBUSY`: a block was added meanwhile, which has no place.
    pub(super) fn new(format: Format, old: &[u64], places: &[u64]) -> Result<Counts, Errno> {
        let mut places = places.iter();
        let place = |old: &u64| match old {
            0 => Ok(0),
            _ => places.next().copied().ok_or(Errno::EBUSY),
        };
        Ok(Counts {
            format,
            old: old.to_vec(),
            new: old.iter().map(place).collect::<Result<_, _>>()?,
            is_written: vec![false; old.len()],
            loaded: HashMap::new(),
            queue: VecDeque::new(),
            most: LEAST.max((MEMORY >> format.cluster_bits) as usize),
            free: Freed::default(),
        })
    }

    /// As few blocks in memory as possible.
    #[cfg(test)]
    pub(super) fn with_least_memory(self) -> Counts {
        Counts { most: 1, ..self }
    }

    async fn load<F: TableFile>(
        &mut self,
        file: &mut F,
        index: usize,
    ) -> Result<&mut Vec<u8>, SwitchError> {
        if !self.loaded.contains_key(&index) {
            while self.loaded.len() >= self.most {
                self.drop_one(file).await?;
            }
            let places = if self.is_written[index] { &self.new } else { &self.old };
            let bytes = file.read(places[index], self.format.cluster() as usize).await?;
            self.loaded.insert(index, Loaded { bytes, was_used: true });
            self.queue.push_back(index);
        }
        let loaded = self.loaded.get_mut(&index).ok_or(Errno::EIO)?;
        loaded.was_used = true;
        Ok(&mut loaded.bytes)
    }

    /// Writes a block that was not used lately, and drops it.
    async fn drop_one<F: TableFile>(&mut self, file: &mut F) -> Result<(), SwitchError> {
        while let Some(index) = self.queue.pop_front() {
            let Some(loaded) = self.loaded.get_mut(&index) else { continue };
            if std::mem::take(&mut loaded.was_used) {
                self.queue.push_back(index);
                continue;
            }
            return self.put(file, index).await;
        }
        Ok(())
    }

    /// The block that counts a cluster, and the count's index.
    async fn block_of<F: TableFile>(
        &mut self,
        file: &mut F,
        cluster: u64,
    ) -> Result<(&mut Vec<u8>, usize), SwitchError> {
        file.look().await;
        let bits = self.format.block_bits();
        let index = (cluster >> bits) as usize;
        if matches!(self.new.get(index), None | Some(0)) {
            return Err(uncounted(cluster));
        }
        Ok((self.load(file, index).await?, (cluster & ((1 << bits) - 1)) as usize))
    }

    /// Writes a block to its new place, and drops it.
    async fn put<F: TableFile>(&mut self, file: &mut F, index: usize) -> Result<(), SwitchError> {
        if let Some(Loaded { bytes, .. }) = self.loaded.remove(&index) {
            file.write(self.new[index], &bytes).await?;
            self.is_written[index] = true;
        }
        Ok(())
    }

    /// The count of a cluster that is in use.
    pub(super) async fn of<F: TableFile>(
        &mut self,
        file: &mut F,
        cluster: u64,
    ) -> Result<u64, SwitchError> {
        let order = self.format.refcount_order;
        let (block, at) = self.block_of(file, cluster).await?;
        match count(block, at, order) {
            0 => Err(uncounted(cluster)),
            count => Ok(count),
        }
    }

    /// Counts a cluster that is in use once more.
    ///
    /// # Errors
    ///
    /// `EINVAL`, as QEMU: there is no larger count.
    pub(super) async fn raise<F: TableFile>(
        &mut self,
        file: &mut F,
        cluster: u64,
    ) -> Result<(), SwitchError> {
        let order = self.format.refcount_order;
        let (block, at) = self.block_of(file, cluster).await?;
        match count(block, at, order) {
            0 => Err(uncounted(cluster)),
            count if count == u64::MAX >> (64 - (1 << order)) => Err(Errno::EINVAL.into()),
            count => {
                set_count(block, at, order, count + 1);
                Ok(())
            }
        }
    }

    /// Counts a cluster as used once that nothing has led to.
    pub(super) async fn take<F: TableFile>(
        &mut self,
        file: &mut F,
        cluster: u64,
    ) -> Result<(), SwitchError> {
        let order = self.format.refcount_order;
        let (block, at) = self.block_of(file, cluster).await?;
        match count(block, at, order) {
            // Counted beforehand, where free clusters did not follow each other.
            0 | 1 => set_count(block, at, order, 1),
            _ => return Err(Stop::damaged(format_args!("cluster {cluster:#x} is used")).into()),
        }
        Ok(())
    }

    /// Counts a cluster that is in use once less. Returns the count.
    pub(super) async fn lower<F: TableFile>(
        &mut self,
        file: &mut F,
        cluster: u64,
    ) -> Result<u64, SwitchError> {
        let order = self.format.refcount_order;
        let (block, at) = self.block_of(file, cluster).await?;
        let less = count(block, at, order).checked_sub(1).ok_or_else(|| uncounted(cluster))?;
        set_count(block, at, order, less);
        if less == 0 {
            self.free.add(cluster);
        }
        Ok(less)
    }

    /// Writes all blocks to their new places.
    pub(super) async fn write<F: TableFile>(&mut self, file: &mut F) -> Result<(), SwitchError> {
        for index in 0..self.new.len() {
            let is_there = self.is_written[index] && !self.loaded.contains_key(&index);
            if self.new[index] == 0 || is_there {
                continue;
            }
            self.load(file, index).await?;
            self.put(file, index).await?;
        }
        Ok(())
    }
}

pub(super) fn uncounted(cluster: u64) -> SwitchError {
    Stop::damaged(format_args!("cluster {cluster:#x} is used and not counted")).into()
}
