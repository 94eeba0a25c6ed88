//! Metadata on its way to the file: kept in memory as [`imago`] writes it, and written in an order in
//! which the image is whole after each step.
//!
//! `imago` writes a table as it changes or is evicted, and some pointers at once, before the reference
//! counts of what they lead to. A process that is killed between the two leaves an image that is damaged.
//! So what it writes stays here until a flush. By then all of it fits together, and it goes to the file
//! in this order:
//!
//! 1. reference counts, each as high as it was or is to be, and the guest's data;
//! 2. the refcount table, and where it is;
//! 3. L2 tables;
//! 4. the L1 table, and where it is;
//! 5. reference counts as they are.
//!
//! Each step is on stable storage before the next. What is cut off leaves clusters that nobody uses, as
//! QEMU's own order does, and never one that is used and not counted.
//!
//! Before a write is answered, what it has changed is also in the [journal](super::journal), for who opens
//! the image after this process, should that be killed.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use event_loop::{AlignedBuf, IoBufs, sync::lock};
use nix::errno::Errno;

use super::context::{Channels, Transfer};
use super::header::{DIRTY_AT, DIRTY_BIT, Header};
use super::journal::Journal;
use super::marker::Mark;
use super::storage::sync;
use crate::request::Op;

/// What is kept track of, bytes: what `imago` writes is made of whole ones.
pub(super) const SECTOR: usize = 512;
/// Bytes written at once.
const RUN: usize = 1 << 20;
/// Bytes of an entry of a table.
const ENTRY: usize = 8;
/// Where a header has the disk's size, the L1 table's entries and offset, and the refcount table's offset and clusters.
const SIZE: Range<usize> = 24..32;
const L1_ENTRIES: Range<usize> = 36..40;
const L1_OFFSET: Range<usize> = 40..48;
const REFCOUNT_TABLE: Range<usize> = 48..60;

/// By number.
pub(super) type Sectors = BTreeMap<u64, Box<[u8; SECTOR]>>;

/// The metadata of an image that is not in its file yet.
#[derive(Debug)]
pub(super) struct Metadata {
    state: Mutex<State>,
    /// How often clusters were given up, and as of which time the file says so: no data may be written
    /// to them before.
    given_up: AtomicU64,
    free: AtomicU64,
}

#[derive(Debug)]
struct State {
    /// By number.
    dirty: Sectors,
    /// Those that are being written.
    writing: Arc<Sectors>,
    layout: Layout,
    /// Bytes of the disk, as the header is to say.
    size: u64,
    /// Numbers of those that have changed and are not in the journal.
    uncommitted: BTreeSet<u64>,
    journal: Option<Journal>,
    /// A commit has failed, and there will be no more.
    failed: bool,
    /// The last commit whose sectors are being written.
    commit: u64,
    /// The header says, or is to say, that the image has to be repaired.
    marked: bool,
}

/// Where the file has which metadata.
#[derive(Debug, Clone)]
struct Layout {
    cluster: u64,
    refcount_bits: u32,
    l1: Range<u64>,
    refcount_table: Range<u64>,
    /// First bytes of the refcount blocks.
    refcount_blocks: HashSet<u64>,
}

/// What is to be written, by step.
#[derive(Default)]
struct Steps {
    counts: Sectors,
    refcount_table: Sectors,
    l2: Sectors,
    l1: Sectors,
    header: Sectors,
}

impl Metadata {
    /// Of an image with that header, and that refcount table.
    pub(super) fn new(header: &Header, refcount_table: &[u8]) -> Metadata {
        let (offset, len) = header.refcount_table;
        let mut layout = Layout {
            cluster: header.cluster,
            refcount_bits: header.refcount_bits,
            l1: header.l1_table.0..header.l1_table.0 + header.l1_table.1,
            refcount_table: offset..offset + len,
            refcount_blocks: HashSet::new(),
        };
        layout.add_refcount_blocks(refcount_table);
        let state = State {
            dirty: Sectors::new(),
            writing: Arc::default(),
            layout,
            size: header.size,
            uncommitted: BTreeSet::new(),
            journal: None,
            failed: false,
            commit: 0,
            marked: false,
        };
        Metadata { state: Mutex::new(state), given_up: AtomicU64::new(0), free: AtomicU64::new(0) }
    }

    /// Has sectors that another process has kept.
    pub(super) fn with_left(self, sectors: Sectors) -> Metadata {
        lock(&self.state).dirty = sectors;
        self
    }

    /// Has a journal. `marked`: the header has said so since before.
    pub(super) fn with_journal(self, journal: Option<Journal>, marked: bool) -> Metadata {
        {
            let mut state = lock(&self.state);
            (state.journal, state.marked) = (journal, marked);
        }
        self
    }

    /// Bytes kept.
    pub(super) fn len(&self) -> usize {
        lock(&self.state).dirty.len() * SECTOR
    }

    /// Keeps what was written. `bytes` are whole sectors.
    pub(super) fn write(&self, offset: u64, bytes: &[u8]) {
        if offset == 0 {
            // A table has moved.
            self.give_up();
        }
        let mut state = lock(&self.state);
        let (sectors, _) = bytes.as_chunks::<SECTOR>();
        for (number, sector) in (offset / SECTOR as u64..).zip(sectors) {
            let newest = state.dirty.get(&number).or_else(|| state.writing.get(&number));
            // Tables come whole, whatever has changed in them.
            if newest.is_some_and(|newest| **newest == *sector) {
                continue;
            }
            state.insert(number, Box::new(*sector));
        }
    }

    /// Has the header say that the disk has so many bytes. Nobody changes any metadata meanwhile.
    pub(super) async fn set_size(&self, channels: &Channels, size: u64) -> Result<(), Errno> {
        let kept = self.kept(0..SECTOR as u64);
        let mut header = read(channels, 0, SECTOR).await?;
        if let Some((_, newest)) = kept.last() {
            header.copy_from_slice(newest);
        }
        header[SIZE].copy_from_slice(&size.to_be_bytes());
        let mut state = lock(&self.state);
        state.size = size;
        let (sectors, _) = header.as_chunks::<SECTOR>();
        sectors.iter().for_each(|header| state.insert(0, Box::new(*header)));
        Ok(())
    }

    /// What is kept of a range. To be asked before the file is read: what is written to it meanwhile
    /// is here still.
    pub(super) fn kept(&self, range: Range<u64>) -> Vec<(u64, [u8; SECTOR])> {
        let numbers = numbers(&range);
        let state = lock(&self.state);
        let kept = [&*state.writing, &state.dirty].into_iter();
        // What is to be written after what is being written.
        kept.flat_map(|kept| kept.range(numbers.clone()))
            .map(|(number, sector)| (number * SECTOR as u64, **sector))
            .collect()
    }

    /// Forgets a range that is the guest's data from now on. `false`: it is being written.
    pub(super) fn forget(&self, range: Range<u64>) -> bool {
        let numbers = numbers(&range);
        let mut state = lock(&self.state);
        if state.writing.range(numbers.clone()).next().is_some() {
            return false;
        }
        let gone: Vec<u64> = state.dirty.range(numbers).map(|(number, _)| *number).collect();
        for number in gone {
            state.dirty.remove(&number);
            state.uncommitted.insert(number);
        }
        true
    }

    /// Clusters will be given up.
    pub(super) fn give_up(&self) {
        self.given_up.fetch_add(1, Ordering::AcqRel);
    }

    /// Whether data may be written to any cluster that is free.
    pub(super) fn is_free(&self) -> bool {
        self.free.load(Ordering::Acquire) == self.given_up.load(Ordering::Acquire)
    }

    /// Has what is kept outlast this process. `false`: there is no journal. It fits together: nobody is
    /// changing any of it.
    ///
    /// # Errors
    ///
    /// Those of the journal, which is not used any more. What it has stays until it is in the image.
    pub(super) fn commit(&self) -> io::Result<bool> {
        let state = &mut *lock(&self.state);
        let changed = std::mem::take(&mut state.uncommitted);
        let Some(journal) = state.journal.as_mut().filter(|_| !state.failed) else {
            return Ok(false);
        };
        let sectors = changed.iter().map(|number| (*number, state.dirty.get(number).map(|s| &**s)));
        let committed = journal.commit(sectors);
        state.failed = committed.is_err();
        committed.map(|()| true)
    }

    /// There are no more commits.
    pub(super) fn give_up_journal(&self) {
        lock(&self.state).failed = true;
    }

    fn has_failed(&self) -> bool {
        lock(&self.state).failed
    }

    /// All counts are on stable storage, raised, and the next steps write what is newer than a journal that has
    /// failed: nothing is to be found there any more.
    fn make_failed_void(&self) {
        let state = &mut *lock(&self.state);
        if let Some(journal) = state.journal.as_mut().filter(|_| state.failed)
            && let Err(error) = journal.make_void()
        {
            log::error!("qcow2 journal: {error}");
        }
    }

    /// What the image is to be marked with before the first commit. `None`: it is, or there is no journal.
    pub(super) fn unmarked(&self) -> Option<[u8; SECTOR]> {
        let state = lock(&self.state);
        let journal = state.journal.as_ref().filter(|_| !state.marked && !state.failed)?;
        Some(journal.mark().sector(journal.committed()))
    }

    /// As of which commit the image is once what is being written is in it, as its mark is to say.
    fn mark_of_commit(&self) -> Option<[u8; SECTOR]> {
        let state = lock(&self.state);
        let journal = state.journal.as_ref().filter(|_| state.marked && !state.failed)?;
        Some(journal.mark().sector(state.commit))
    }

    /// From now on the header says that the image is to be repaired; or does not any more.
    pub(super) fn set_marked(&self, marked: bool) {
        let mut state = lock(&self.state);
        state.marked = marked;
        if let Some(header) = state.dirty.remove(&0) {
            state.insert(0, header);
        }
    }

    /// Whether the image names the journal, from now on.
    pub(super) fn set_named(&self, named: bool) -> io::Result<()> {
        lock(&self.state).journal.as_ref().map_or(Ok(()), |journal| journal.set_named(named))
    }

    /// Whether nothing is left to be cleared away.
    pub(super) fn is_closed(&self) -> bool {
        let state = lock(&self.state);
        state.journal.is_none() && !state.marked
    }

    /// Whether there is one, and it has not failed.
    pub(super) fn has_journal(&self) -> bool {
        let state = lock(&self.state);
        state.journal.is_some() && !state.failed
    }

    /// Whether the header says so.
    pub(super) fn is_marked(&self) -> bool {
        lock(&self.state).marked
    }

    /// There is no journal any more. Not on threads that may remove no file.
    pub(super) fn drop_journal(&self) {
        if let Some(journal) = lock(&self.state).journal.take() {
            journal.remove();
        }
    }

    /// All that is kept is to be written, and was committed before. It fits together: nobody is changing any of it. Returns up to
    /// when that says what was given up.
    pub(super) fn begin(&self) -> u64 {
        let mut state = lock(&self.state);
        state.writing = Arc::new(std::mem::take(&mut state.dirty));
        state.commit = state.journal.as_ref().map_or(0, Journal::committed);
        self.given_up.load(Ordering::Acquire)
    }

    /// Writes what [`begin`](Self::begin) has found. `data`: so has the guest, to places that these
    /// metadata lead to. If it fails, all of it is to be written again.
    pub(super) async fn write_out(
        &self,
        channels: &Channels,
        given_up: u64,
        data: bool,
    ) -> Result<(), Errno> {
        let (sectors, before) = {
            let state = lock(&self.state);
            (state.writing.clone(), state.layout.clone())
        };
        let mut layout = before.clone();
        let steps = layout.sort(&sectors);
        let mut counted = false;
        let written = steps.write(channels, &before, data, self, &mut counted).await;
        let mut state = lock(&self.state);
        let kept = Arc::unwrap_or_clone(std::mem::take(&mut state.writing));
        match written {
            Ok(()) => {
                state.layout = layout;
                state.written();
                self.free.fetch_max(given_up, Ordering::Release);
            }
            Err(_) => {
                if counted {
                    // The file may lead to new blocks by now, and use what they count.
                    state.layout.refcount_blocks = layout.refcount_blocks;
                }
                for (number, sector) in kept {
                    // What came later is newer.
                    state.dirty.entry(number).or_insert(sector);
                }
            }
        }
        written
    }
}

impl State {
    fn insert(&mut self, number: u64, mut sector: Box<[u8; SECTOR]>) {
        if number == 0 {
            // `imago`'s may be ahead, or behind.
            sector[SIZE].copy_from_slice(&self.size.to_be_bytes());
            set_dirty(&mut sector, self.marked);
        }
        self.dirty.insert(number, sector);
        if self.journal.is_some() {
            self.uncommitted.insert(number);
        }
    }

    fn written(&mut self) {
        let commit = self.commit;
        if let Some(journal) = &mut self.journal
            && let Err(error) = journal.written(commit)
        {
            log::error!("qcow2 journal: {error}");
            self.failed = true;
        }
    }
}

/// Has a header of version 3 say whether the image is to be repaired.
pub(super) fn set_dirty(header: &mut [u8; SECTOR], dirty: bool) {
    if header[4..8] == 3u32.to_be_bytes() {
        header[DIRTY_AT] = header[DIRTY_AT] & !DIRTY_BIT | if dirty { DIRTY_BIT } else { 0 };
    }
}

/// Has the header of a file of version 3 say whether the image is to be repaired.
pub(super) async fn write_dirty(channels: &Channels, dirty: bool) -> Result<(), Errno> {
    let bytes = read(channels, 0, SECTOR).await?;
    let mut header = *bytes.first_chunk::<SECTOR>().ok_or(Errno::EIO)?;
    set_dirty(&mut header, dirty);
    write(channels, 0, &header)?.await.0
}

/// Has an image with such clusters say that nothing is missing, and name no journal.
pub(super) async fn unmark(channels: &Channels, cluster: u64) -> Result<(), Errno> {
    write_dirty(channels, false).await?;
    // A mark that is gone and a bit that is not would be an image that has to be repaired.
    sync(channels).await?;
    if let Some(at) = Mark::place(cluster) {
        write(channels, at, &[0; SECTOR])?.await.0?;
        sync(channels).await?;
    }
    Ok(())
}

/// The sectors of a range, all of each.
fn numbers(range: &Range<u64>) -> Range<u64> {
    range.start / SECTOR as u64..range.end.div_ceil(SECTOR as u64)
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

impl Layout {
    fn add_refcount_blocks(&mut self, entries: &[u8]) {
        let (entries, _) = entries.as_chunks::<ENTRY>();
        let blocks = entries.iter().map(|entry| number(entry)).filter(|block| *block != 0);
        self.refcount_blocks.extend(blocks);
    }

    /// Says which sector belongs to which step, and takes note of what has moved.
    fn sort(&mut self, sectors: &Sectors) -> Steps {
        if let Some(header) = sectors.get(&0) {
            let l1 = number(&header[L1_OFFSET]);
            self.l1 = l1..l1 + number(&header[L1_ENTRIES]) * ENTRY as u64;
            let table = number(&header[REFCOUNT_TABLE][..8]);
            let clusters = number(&header[REFCOUNT_TABLE][8..]);
            self.refcount_table = table..table + clusters * self.cluster;
        }
        for sector in sectors.range(numbers(&self.refcount_table)) {
            self.add_refcount_blocks(&sector.1[..]);
        }
        let (l1, table) = (numbers(&self.l1), numbers(&self.refcount_table));
        let mut steps = Steps::default();
        for (number, sector) in sectors {
            let at = number * SECTOR as u64;
            let step = match number {
                _ if at < self.cluster => &mut steps.header,
                _ if self.refcount_blocks.contains(&(at - at % self.cluster)) => &mut steps.counts,
                number if table.contains(number) => &mut steps.refcount_table,
                number if l1.contains(number) => &mut steps.l1,
                _ => &mut steps.l2,
            };
            step.insert(*number, sector.clone());
        }
        steps
    }
}

impl Steps {
    /// `counted` becomes true when all counts are in the file, raised.
    async fn write(
        self,
        channels: &Channels,
        before: &Layout,
        data: bool,
        metadata: &Metadata,
        counted: &mut bool,
    ) -> Result<(), Errno> {
        let Steps { counts, refcount_table, l2, l1, header } = self;
        let (highest, lower) = highest(channels, counts, before).await?;
        let mut unsynced = data;
        let mut order = Order { channels, unsynced: &mut unsynced };
        order.write(&highest).await?;
        *counted = true;
        if metadata.has_failed() {
            order.sync().await?;
            metadata.make_failed_void();
        }
        order.then(&refcount_table).await?;
        if let Some(new) = header.get(&0)
            && !refcount_table.is_empty()
        {
            // Where the refcount table is, but the L1 table where it was.
            let mut moved = new.clone();
            let in_file = read(channels, 0, SECTOR).await?;
            moved.copy_from_slice(&in_file);
            moved[REFCOUNT_TABLE].copy_from_slice(&new[REFCOUNT_TABLE]);
            order.then(&Sectors::from([(0, moved)])).await?;
        }
        order.then(&l2).await?;
        order.then(&l1).await?;
        order.then(&header).await?;
        if let (Some(mark), Some(at)) = (metadata.mark_of_commit(), Mark::place(before.cluster)) {
            write(channels, at, &mark)?.await.0?;
        }
        order.then(&lower).await
    }
}

/// Writes that follow each other.
struct Order<'a> {
    channels: &'a Channels,
    /// Something was written that is not on stable storage.
    unsynced: &'a mut bool,
}

impl Order<'_> {
    async fn sync(&mut self) -> Result<(), Errno> {
        match std::mem::take(self.unsynced) {
            true => sync(self.channels).await,
            false => Ok(()),
        }
    }

    /// Writes, once all that was written before is on stable storage.
    async fn then(&mut self, sectors: &Sectors) -> Result<(), Errno> {
        if !sectors.is_empty() {
            self.sync().await?;
        }
        self.write(sectors).await
    }

    async fn write(&mut self, sectors: &Sectors) -> Result<(), Errno> {
        let mut transfers = Vec::new();
        for (first, run) in runs(sectors) {
            transfers.push(write(self.channels, first * SECTOR as u64, &run)?);
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
    let mut bufs = memory(bytes.len())?;
    bufs.copy_in(0, bytes);
    let op = Op::Write { fua: false };
    Ok(Transfer::start(&channels.file, op, offset, bytes.len() as u64, bufs))
}

fn memory(len: usize) -> Result<IoBufs, Errno> {
    AlignedBuf::io_bufs(len, 4096).ok_or(Errno::ENOMEM)
}

pub(super) async fn read(channels: &Channels, offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
    let read = Transfer::start(&channels.file, Op::Read, offset, len as u64, memory(len)?);
    let (result, bufs) = read.await;
    result?;
    let mut bytes = vec![0; len];
    bufs.copy_out(0, &mut bytes);
    Ok(bytes)
}

/// Sectors that follow each other: the first one's number, and the bytes.
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

/// Of each reference count the higher of what is in the file and what is to be there, and then those
/// that are lower in the end. What the file has in a block that is new to it says nothing.
async fn highest(
    channels: &Channels,
    counts: Sectors,
    before: &Layout,
) -> Result<(Sectors, Sectors), Errno> {
    let is_new = |number: &u64| {
        let at = number * SECTOR as u64;
        !before.refcount_blocks.contains(&(at - at % before.cluster))
    };
    let (mut highest, old): (Sectors, Sectors) =
        counts.into_iter().partition(|(number, _)| is_new(number));
    let mut lower = Sectors::new();
    for (first, run) in runs(&old) {
        let in_file = read(channels, first * SECTOR as u64, run.len()).await?;
        let (new, _) = run.as_chunks::<SECTOR>();
        let (in_file, _) = in_file.as_chunks::<SECTOR>();
        for ((number, new), in_file) in (first..).zip(new).zip(in_file) {
            let mut raised = *new;
            raise(&mut raised, in_file, before.refcount_bits);
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

/// Makes each count at least what it is in `other`.
fn raise(counts: &mut [u8; SECTOR], other: &[u8; SECTOR], bits: u32) {
    if bits >= 8 {
        let len = bits as usize / 8;
        // The higher byte comes first, so they compare as numbers do.
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

    #[test]
    fn the_header_says_the_size_that_it_is_told() {
        let header = Header {
            version: 3,
            cluster: 65536,
            size: 1 << 20,
            backing: None,
            data_file: None,
            refcount_bits: 16,
            has_snapshots: false,
            l1_table: (3 << 16, 8),
            refcount_table: (1 << 16, 1 << 16),
            mark: None,
            is_dirty: false,
            has_room: true,
        };
        let metadata = Metadata::new(&header, &[]);
        metadata.write(0, &[0xff; 2 * SECTOR]);
        let kept = metadata.kept(0..2 * SECTOR as u64);
        assert_eq!(number(&kept[0].1[SIZE]), 1 << 20);
        assert_eq!((kept[0].1[23], kept[0].1[32]), (0xff, 0xff));
        assert_eq!(kept[1].1, [0xff; SECTOR]);
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
