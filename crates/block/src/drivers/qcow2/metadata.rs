//! Metadata on its way to the file: kept in memory as [`imago`] writes it.
//!
//! `imago` writes a table as it changes or is evicted, and some pointers at once, before the reference
//! counts of what they lead to. A process that is killed between the two leaves an image that is damaged.
//! So what it writes stays here until a flush. By then all of it fits together, and it goes to the file
//! in [steps](super::steps).
//!
//! Before a write is answered, what it has changed is also in the [journal](super::journal), for who opens
//! the image after this process, should that be killed.

use std::collections::{BTreeSet, HashSet};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use event_loop::sync::lock;
use nix::errno::Errno;

use super::context::Channels;
use super::header::{BACKING, Header};
use super::journal::Journal;
use super::marker::{set_corrupt, set_dirty};
use super::steps::{Layout, SECTOR, SIZE, Sectors, number, numbers, read};
use crate::inherited::OpenImage;

/// The metadata of an image that is not in its file yet.
#[derive(Debug)]
pub(super) struct Metadata {
    state: Mutex<State>,
    /// How often clusters were given up, and as of which time the file says so: no data may be written
    /// to them before.
    given_up: AtomicU64,
    free: AtomicU64,
    /// The guest's data has been written where metadata will lead to.
    new_data: AtomicBool,
}

/// Metadata that is being written. What was not, for an error or because this was dropped, is to be
/// written again.
pub(super) struct WriteOut<'a> {
    metadata: &'a Metadata,
    /// Up to when it says what was given up.
    given_up: u64,
    /// With data that it leads to.
    data: bool,
    /// The refcount blocks, once what they count is in the file, raised.
    counted: Option<HashSet<u64>>,
    is_done: bool,
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
    /// It is not to say so any more, and the file may.
    unmarking: bool,
    /// The header is to have the corrupt bit.
    corrupt: bool,
    /// Where the header is to say that the backing file's name lies, if that has changed.
    backing: Option<[u8; BACKING.end - BACKING.start]>,
}

impl Metadata {
    /// Of an image with that header, and that refcount table.
    pub(super) fn new(header: &Header, refcount_table: &[u8]) -> Metadata {
        let layout = Layout::new(header, refcount_table);
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
            unmarking: false,
            corrupt: false,
            backing: None,
        };
        Metadata {
            state: Mutex::new(state),
            given_up: AtomicU64::new(0),
            free: AtomicU64::new(0),
            new_data: AtomicBool::new(false),
        }
    }

    /// Has sectors that another process has kept.
    pub(super) fn with_left(self, sectors: Sectors) -> Metadata {
        {
            let mut state = lock(&self.state);
            if let Some(header) = sectors.get(&0) {
                state.size = number(&header[SIZE]);
            }
            state.dirty = sectors;
        }
        // Of what they lead to nobody knows whether it is on stable storage.
        self.new_data.store(true, Ordering::Release);
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

    /// Sets the corrupt bit in the header, and in every header that is written later.
    pub(super) fn set_corrupt(&self) {
        let mut state = lock(&self.state);
        state.corrupt = true;
        if let Some(header) = state.dirty.get_mut(&0) {
            set_corrupt(header, true);
        }
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

    /// Has the header's first sector replaced by this one. Nobody changes any metadata meanwhile.
    pub(super) fn set_header(&self, header: &[u8; SECTOR]) {
        let mut state = lock(&self.state);
        state.backing = header[BACKING].try_into().ok();
        state.insert(0, Box::new(*header));
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

    /// New data is in the file, at a place that no metadata in the file leads to.
    pub(super) fn wrote_new_data(&self) {
        self.new_data.store(true, Ordering::Release);
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

    pub(super) fn has_failed(&self) -> bool {
        lock(&self.state).failed
    }

    /// All counts are on stable storage, raised, and the next steps write what is newer than a journal that has
    /// failed: nothing is to be found there any more.
    pub(super) fn make_failed_void(&self) {
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
    pub(super) fn mark_of_commit(&self) -> Option<[u8; SECTOR]> {
        let state = lock(&self.state);
        let journal = state.journal.as_ref().filter(|_| state.marked && !state.failed)?;
        Some(journal.mark().sector(state.commit))
    }

    /// From now on the header is to say that the image has to be repaired; or not any more.
    pub(super) fn set_marked(&self, marked: bool) {
        let mut state = lock(&self.state);
        (state.marked, state.unmarking) = (marked, !marked);
        if let Some(header) = state.dirty.remove(&0) {
            state.insert(0, header);
        }
    }

    /// Nor does the file, and there is no mark.
    pub(super) fn set_unmarked(&self) {
        lock(&self.state).unmarking = false;
    }

    /// Whether the image names the journal, from now on.
    pub(super) fn set_named(&self, named: bool) -> io::Result<()> {
        lock(&self.state).journal.as_ref().map_or(Ok(()), |journal| journal.set_named(named))
    }

    /// Whether there is one, and it has not failed.
    pub(super) fn has_journal(&self) -> bool {
        let state = lock(&self.state);
        state.journal.is_some() && !state.failed
    }

    /// Whether the header says so, or may.
    pub(super) fn is_marked(&self) -> bool {
        let state = lock(&self.state);
        state.marked || state.unmarking
    }

    /// The journal's file, for a process that goes on with it. `None`: there is none, or it has failed.
    pub(super) fn journal(&self) -> Option<OpenImage<Arc<OwnedFd>>> {
        let state = lock(&self.state);
        let journal = state.journal.as_ref().filter(|_| !state.failed)?;
        // Without it, the other process finds the journal in use.
        journal.file().inspect_err(|error| log::warn!("qcow2 journal: {error}")).ok()
    }

    /// There is no journal any more. Not on threads that may remove no file.
    pub(super) fn drop_journal(&self) {
        if let Some(journal) = lock(&self.state).journal.take() {
            journal.remove();
        }
    }

    /// All that is kept is to be written, and was committed before. It fits together: nobody is changing any of it. Nobody
    /// else begins before this is over.
    pub(super) fn begin(&self) -> WriteOut<'_> {
        let mut state = lock(&self.state);
        state.writing = Arc::new(std::mem::take(&mut state.dirty));
        state.commit = state.journal.as_ref().map_or(0, Journal::committed);
        WriteOut {
            metadata: self,
            given_up: self.given_up.load(Ordering::Acquire),
            data: self.new_data.swap(false, Ordering::AcqRel),
            counted: None,
            is_done: false,
        }
    }
}

impl WriteOut<'_> {
    /// Writes it.
    pub(super) async fn carry_out(mut self, channels: &Channels) -> Result<(), Errno> {
        let metadata = self.metadata;
        let (sectors, before) = {
            let state = lock(&metadata.state);
            (state.writing.clone(), state.layout.clone())
        };
        let mut layout = before.clone();
        let steps = layout.sort(&sectors);
        drop(sectors);
        let counted = || self.counted = Some(layout.refcount_blocks.clone());
        steps.write(channels, &before, self.data, metadata, counted).await?;
        self.is_done = true;
        let mut state = lock(&metadata.state);
        state.writing = Arc::default();
        state.layout = layout;
        state.written();
        metadata.free.fetch_max(self.given_up, Ordering::Release);
        Ok(())
    }
}

impl Drop for WriteOut<'_> {
    fn drop(&mut self) {
        if self.is_done {
            return;
        }
        // Some of it may be in the file, and not on stable storage: what is read back from there does
        // not tell.
        self.metadata.wrote_new_data();
        let state = &mut *lock(&self.metadata.state);
        if let Some(blocks) = self.counted.take() {
            // The file may lead to new blocks by now, and use what they count.
            state.layout.refcount_blocks = blocks;
        }
        for (number, sector) in Arc::unwrap_or_clone(std::mem::take(&mut state.writing)) {
            // What came later is newer.
            state.dirty.entry(number).or_insert(sector);
        }
    }
}

impl State {
    fn insert(&mut self, number: u64, mut sector: Box<[u8; SECTOR]>) {
        if number == 0 {
            // `imago`'s may be ahead, or behind.
            sector[SIZE].copy_from_slice(&self.size.to_be_bytes());
            set_dirty(&mut sector, self.marked);
            set_corrupt(&mut sector, self.corrupt);
            if let Some(backing) = &self.backing {
                sector[BACKING].copy_from_slice(backing);
            }
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
            has_autoclear: false,
            bitmaps: None,
        };
        let metadata = Metadata::new(&header, &[]);
        metadata.write(0, &[0xff; 2 * SECTOR]);
        let kept = metadata.kept(0..2 * SECTOR as u64);
        assert_eq!(super::super::steps::number(&kept[0].1[SIZE]), 1 << 20);
        assert_eq!((kept[0].1[23], kept[0].1[32]), (0xff, 0xff));
        assert_eq!(kept[1].1, [0xff; SECTOR]);
    }
}
