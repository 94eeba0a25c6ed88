//! Metadata on its way to the file: sectors that the [engine](super::engine) has changed.
//!
//! The changes of each call of the engine are stored here at once, so the stored sectors are consistent at
//! any time. They stay until a flush, which writes them to the file in [steps](super::steps).
//!
//! Before a write is answered, its changes are also in the [journal](super::journal). If this process is
//! killed, the process that opens the image next finds them there.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use event_loop::sync::lock;
use nix::errno::Errno;

use super::context::Channels;
use super::engine::{Engine, Roots};
use super::header::Header;
use super::journal::Journal;
use super::marker::{set_corrupt, set_dirty};
use super::steps::{Layout, SECTOR, SIZE, Sectors, number, numbers};
use crate::inherited::OpenImage;

/// The metadata of an image that is not in its file yet.
#[derive(Debug)]
pub(super) struct Metadata {
    state: Mutex<MetadataState>,
    /// Sectors kept, as of the last change.
    kept: AtomicUsize,
    /// The guest's data has been written where metadata will lead to.
    new_data: AtomicBool,
}

/// Metadata that is being written. What was not, for an error or because this was dropped, is to be
/// written again.
pub(super) struct WriteOut<'a> {
    metadata: &'a Metadata,
    /// With data that it leads to.
    data: bool,
    /// The refcount blocks, once what they count is in the file, raised.
    counted: Option<HashMap<u64, u64>>,
    is_done: bool,
}

#[derive(Debug)]
struct MetadataState {
    /// By number.
    dirty: Sectors,
    /// Those that are being written.
    writing: Arc<Sectors>,
    layout: Layout,
    /// Bytes of the disk, as the header is to say.
    size: u64,
    /// Numbers of the sectors that have changed and are not in the journal.
    uncommitted: BTreeSet<u64>,
    journal: Option<Journal>,
    /// A commit has failed, and there will be no more.
    failed: bool,
    /// The last commit whose sectors are being written.
    last: u64,
    /// The header has, or is to get, the mark that the image has to be repaired.
    marked: bool,
    /// The mark is to be removed, and may still be in the file.
    unmarking: bool,
    /// The header is to have the corrupt bit.
    corrupt: bool,
}

impl Metadata {
    /// Of an image with that header, and that refcount table.
    pub(super) fn new(header: &Header, refcount_table: &[u8]) -> Metadata {
        let layout = Layout::new(header, refcount_table);
        let state = MetadataState {
            dirty: Sectors::new(),
            writing: Arc::default(),
            layout,
            size: header.size,
            uncommitted: BTreeSet::new(),
            journal: None,
            failed: false,
            last: 0,
            marked: false,
            unmarking: false,
            corrupt: false,
        };
        Metadata {
            state: Mutex::new(state),
            kept: AtomicUsize::new(0),
            new_data: AtomicBool::new(false),
        }
    }

    /// Takes over sectors that another process has stored in a journal.
    pub(super) fn with_left(self, sectors: Sectors) -> Metadata {
        {
            let mut state = lock(&self.state);
            if let Some(header) = sectors.get(&0) {
                state.size = number(&header[SIZE]);
            }
            self.kept.store(sectors.len(), Ordering::Relaxed);
            state.dirty = sectors;
        }
        // The data that these sectors refer to may not be on stable storage.
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
        self.kept.load(Ordering::Relaxed) * SECTOR
    }

    /// The end of what is kept, as a byte of the file.
    pub(super) fn end(&self) -> u64 {
        let last = lock(&self.state).dirty.last_key_value().map(|(number, _)| *number);
        last.map_or(0, |last| (last + 1) * SECTOR as u64)
    }

    /// Sets the corrupt bit in the header, and in every header that is written later.
    pub(super) fn set_corrupt(&self) {
        let mut state = lock(&self.state);
        state.corrupt = true;
        if let Some(header) = state.dirty.get_mut(&0) {
            set_corrupt(header, true);
        }
    }

    /// Keeps what a call of the engine has changed.
    pub(super) fn keep(&self, engine: &mut Engine) {
        let mut state = lock(&self.state);
        engine.take_changed(|number, sector| state.insert(number, sector));
        self.kept.store(state.dirty.len(), Ordering::Relaxed);
    }

    /// The header leads to other tables from now on. Nothing is kept.
    pub(super) fn switch(&self, roots: &Roots) {
        let mut state = lock(&self.state);
        state.layout.switch(roots);
        state.size = roots.size.unwrap_or(state.size);
    }

    /// From now on the header is to say that the disk has so many bytes, whatever the engine has it say.
    pub(super) fn set_size(&self, size: u64) {
        lock(&self.state).size = size;
    }

    /// Returns the stored sectors of a range. Call it before reading the file: a sector that is written to
    /// the file meanwhile is still returned here.
    pub(super) fn kept(&self, range: Range<u64>) -> Vec<(u64, [u8; SECTOR])> {
        let numbers = numbers(&range);
        let state = lock(&self.state);
        let kept = [&*state.writing, &state.dirty].into_iter();
        // Sectors to be written come after older versions that are being written.
        kept.flat_map(|kept| kept.range(numbers.clone()))
            .map(|(number, sector)| (number * SECTOR as u64, **sector))
            .collect()
    }

    /// Forgets a range that is not metadata any more. Nothing is being written.
    pub(super) fn forget(&self, range: Range<u64>) {
        let state = &mut *lock(&self.state);
        let gone: Vec<u64> =
            state.dirty.range(numbers(&range)).map(|(number, _)| *number).collect();
        for number in gone {
            state.dirty.remove(&number);
            state.uncommitted.insert(number);
        }
    }

    /// New data is in the file, at a place that no metadata in the file leads to.
    pub(super) fn wrote_new_data(&self) {
        self.new_data.store(true, Ordering::Release);
    }

    /// Commits the stored sectors to the journal, so that they survive this process. `false`: there is no
    /// journal. The sectors must be consistent: no call may be changing them.
    ///
    /// # Errors
    ///
    /// Errors of the journal, which gets no more commits. Its contents stay until they are in the image.
    pub(super) fn commit(&self) -> io::Result<bool> {
        lock(&self.state).commit()
    }

    /// Stops the use of the journal: there are no more commits.
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
        Some(journal.mark().sector(state.last))
    }

    /// From now on the header is to say that the image has to be repaired; or not any more.
    pub(super) fn set_marked(&self, marked: bool) {
        let mut state = lock(&self.state);
        (state.marked, state.unmarking) = (marked, !marked);
        if let Some(header) = state.dirty.get(&0).map(|header| **header) {
            state.insert(0, &header);
        }
    }

    /// Records that the mark is gone from the file as well.
    pub(super) fn set_unmarked(&self) {
        lock(&self.state).unmarking = false;
    }

    /// Whether the image names the journal, from now on.
    pub(super) fn set_named(&self, named: bool) -> io::Result<()> {
        lock(&self.state).journal.as_mut().map_or(Ok(()), |journal| journal.set_named(named))
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

    /// Returns the journal's file, for the process that takes it over. `None`: there is no journal, or it has
    /// failed.
    pub(super) fn journal(&self) -> Option<OpenImage<Arc<OwnedFd>>> {
        let state = lock(&self.state);
        let journal = state.journal.as_ref().filter(|_| !state.failed)?;
        // Without it, the other process finds the journal in use.
        journal.file().inspect_err(|error| log::warn!("qcow2 journal: {error}")).ok()
    }

    /// There is no journal any more.
    pub(super) fn drop_journal(&self) {
        if let Some(journal) = lock(&self.state).journal.take() {
            journal.remove();
        }
    }

    /// All that is kept is to be written. It is committed first, if it can be: while it is being written, the journal
    /// has all of it. Nobody else begins before this is over.
    pub(super) fn begin(&self) -> (WriteOut<'_>, io::Result<bool>) {
        let mut state = lock(&self.state);
        let committed = state.commit();
        state.writing = Arc::new(std::mem::take(&mut state.dirty));
        state.last = state.journal.as_ref().map_or(0, Journal::committed);
        self.kept.store(0, Ordering::Relaxed);
        let write_out = WriteOut {
            metadata: self,
            data: self.new_data.swap(false, Ordering::AcqRel),
            counted: None,
            is_done: false,
        };
        (write_out, committed)
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

impl MetadataState {
    fn insert(&mut self, number: u64, sector: &[u8; SECTOR]) {
        let kept = self.dirty.entry(number).or_insert_with(|| Box::new([0; SECTOR]));
        **kept = *sector;
        if number == 0 {
            // The engine's header has the size that the disk is to have, and no such bits.
            kept[SIZE].copy_from_slice(&self.size.to_be_bytes());
            set_dirty(kept, self.marked);
            set_corrupt(kept, self.corrupt);
        }
        if self.journal.is_some() {
            self.uncommitted.insert(number);
        }
    }

    fn commit(&mut self) -> io::Result<bool> {
        let changed = std::mem::take(&mut self.uncommitted);
        let Some(journal) = self.journal.as_mut().filter(|_| !self.failed) else {
            return Ok(false);
        };
        let sectors = changed.iter().map(|number| (*number, self.dirty.get(number).map(|s| &**s)));
        let committed = journal.commit(sectors);
        self.failed = committed.is_err();
        committed.map(|()| true)
    }

    fn written(&mut self) {
        let commit = self.last;
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
            compression: crate::drivers::qcow2::compression::Compression::Zlib,
            cluster: 65536,
            size: 1 << 20,
            backing: None,
            data_file: None,
            data_file_raw: false,
            refcount_bits: 16,
            snapshots: (0, 0),
            l1_table: (3 << 16, 8),
            refcount_table: (1 << 16, 1 << 16),
            mark: None,
            is_dirty: false,
            extended_l2: false,
            has_room: true,
            loses_autoclear: false,
            bitmaps: None,
            has_stale_bitmaps: false,
            luks: None,
            origin: None,
        };
        let metadata = Metadata::new(&header, &[]);
        lock(&metadata.state).insert(0, &[0xff; SECTOR]);
        let kept = metadata.kept(0..2 * SECTOR as u64);
        assert_eq!(super::super::steps::number(&kept[0].1[SIZE]), 1 << 20);
        assert_eq!((kept[0].1[23], kept[0].1[32]), (0xff, 0xff));
    }
}
