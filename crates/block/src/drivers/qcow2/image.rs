//! An opened image: the state that all loops share.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use event_loop::sync::lock;
use event_loop::take_turns;
use nix::errno::Errno;
use tokio::sync::Mutex;

use super::bitmaps::KeptBitmaps;
use super::compression::Compression;
use super::context::Channels;
use super::core::Core;
use super::damage::Found;
use super::engine::Engine;
use super::extend;
use super::inflated::Inflated;
use super::marker::{self, Mark};
use super::metadata::Metadata;
use super::rooms::Rooms;
use super::snapshots::Snapshots;
use super::steps::write;
use super::storage::{self, Shared};

/// Metadata in memory that is written without waiting for a flush, in bytes. The limit also counts runs of
/// clusters that are to be freed.
const MOST_KEPT: usize = 32 << 20;
const MOST_GIVEN_UP: usize = 1 << 16;

/// An opened image.
pub(super) struct Image {
    /// The metadata, and the ranges claimed by requests.
    pub(super) core: std::sync::Mutex<Core>,
    pub(super) shared: Arc<Shared>,
    /// Size of a cluster in bytes.
    pub(super) cluster: u64,
    /// Bytes that are mapped as a whole: a subcluster, or a cluster.
    pub(super) unit: u64,
    pub(super) version: u32,
    pub(super) compression: Compression,
    /// Compressed clusters that were read lately.
    pub(super) inflated: Arc<Inflated>,
    /// The internal snapshots.
    pub(super) snapshots: std::sync::Mutex<Snapshots>,
    /// Clusters without data may show an image behind, now or once the image is opened as its header says.
    pub(super) has_backing: bool,
    /// The data file by itself has the disk's bytes, also where the image has zeroes.
    pub(super) is_raw: bool,
    pub(super) read_only: bool,
    /// Size of the disk in bytes.
    size: AtomicU64,
    /// Held during a resize.
    pub(super) resizing: Mutex<()>,
    /// Requests that write to new clusters at present.
    pub(super) allocating: AtomicUsize,
    /// Number of changes of the metadata, and the number of the last one that is in the file and
    /// on stable storage.
    changes: AtomicU64,
    flushed: AtomicU64,
    /// The files were flushed since the image was opened. Before that, metadata of a killed process may not be on
    /// stable storage.
    was_flushed: AtomicBool,
    /// Number of the last change that survives a kill of this process.
    committed: AtomicU64,
    /// Held while metadata is written to the file.
    pub(super) flushing: Mutex<()>,
    /// Held during a commit to the journal, or a change of the image's mark. Taken after `flushing`.
    pub(super) committing: Mutex<()>,
    /// Held while the file is extended.
    pub(super) extending: Mutex<()>,
    /// Held while the header's extensions or its backing file's name change. Taken before `flushing`.
    pub(super) changing_header: Mutex<()>,
    /// Held while clusters get blocks for metadata. Whether a task has ended meanwhile: its zeroes may be in flight.
    pub(super) backing: Mutex<bool>,
    /// Clusters by which the file is extended ahead of use. 0: only writes extend it.
    pub(super) ahead: AtomicU64,
    /// Damage found in the metadata.
    pub(super) damage: Found,
    /// Dirty bitmaps that survive a kill of this process.
    pub(super) kept: KeptBitmaps,
}

impl Image {
    pub(super) fn new(
        engine: Engine,
        shared: Arc<Shared>,
        header: &super::header::Header,
        has_backing: bool,
        read_only: bool,
    ) -> Image {
        Image {
            core: std::sync::Mutex::new(Core::new(engine)),
            shared,
            cluster: header.cluster,
            unit: header.unit(),
            version: header.version,
            compression: header.compression,
            inflated: Arc::new(Inflated::new(header.cluster)),
            snapshots: std::sync::Mutex::default(),
            size: AtomicU64::new(header.size),
            resizing: Mutex::default(),
            has_backing,
            // Encrypted bytes are not the disk's.
            is_raw: header.data_file_raw && header.luks.is_none(),
            read_only,
            damage: Found::default(),
            kept: KeptBitmaps::default(),
            allocating: AtomicUsize::new(0),
            changes: AtomicU64::new(0),
            flushed: AtomicU64::new(0),
            was_flushed: AtomicBool::new(false),
            committed: AtomicU64::new(0),
            flushing: Mutex::default(),
            committing: Mutex::default(),
            extending: Mutex::default(),
            changing_header: Mutex::default(),
            backing: Mutex::default(),
            ahead: AtomicU64::new(0),
        }
    }

    /// Extends the file ahead of its use from now on ([`extend`]).
    pub(super) fn extend_ahead(&mut self) {
        *self.ahead.get_mut() = extend::clusters(self.size(), self.cluster);
    }

    /// Size of the disk in bytes.
    pub(super) fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Sets the size of the disk. The caller has claimed the last cluster alone.
    pub(super) fn set_size(&self, size: u64) {
        self.size.store(size, Ordering::Release);
    }

    /// The end of a range in the file: the last cluster of the disk counts as complete.
    pub(super) fn end(&self, end: u64) -> u64 {
        match end == self.size() {
            true => end.next_multiple_of(self.cluster),
            false => end,
        }
    }

    /// Extends the tables to a disk of that size. After a failure they are as they were, or larger than need be.
    pub(super) async fn grow_tables(&self, channels: &Channels, size: u64) -> Result<(), Errno> {
        let clusters = self.engine(channels, |engine| engine.l1_clusters(size)).await?;
        let unused = lock(&self.core).engine.unused_l1();
        if clusters == 0 && !unused.is_empty() {
            // The file may end within the table's last cluster, or have a hole there.
            self.back_unused(channels, unused).await?;
        }
        let mut rooms = Rooms::new(self, channels);
        let taken = async {
            let place = rooms.take(clusters).await?;
            rooms.write_zeroes(place, clusters).await?;
            rooms.count().await?;
            Ok(place)
        };
        let place = match taken.await {
            Ok(place) => place,
            Err(errno) => {
                rooms.give_back(&rooms.counted).await;
                return Err(errno);
            }
        };
        // No write-out may run: changes of the table at its old place must not reach the file, where they could lead to
        // tables that are not there yet.
        let _turn = self.flushing.lock().await;
        let grown = self.engine(channels, |engine| {
            let old = engine.grow_l1(size, place)?;
            self.shared.metadata.iter().for_each(|metadata| metadata.forget(old.clone()));
            Ok(())
        });
        if let Err(errno) = grown.await {
            rooms.give_back(&rooms.counted).await;
            return Err(errno);
        }
        self.write_metadata(channels).await.map(drop)
    }

    /// Writes the disk's size to the header with the next flush.
    pub(super) async fn set_header_size(
        &self,
        channels: &Channels,
        size: u64,
    ) -> Result<(), Errno> {
        self.engine(channels, |engine| {
            self.shared.metadata.iter().for_each(|metadata| metadata.set_size(size));
            engine.set_size(size);
            Ok(())
        })
        .await
    }

    /// The clusters that contain a range.
    pub(super) fn clusters(&self, range: Range<u64>) -> Range<u64> {
        // The limit of the disk's size rules out an overflow.
        range.start - range.start % self.cluster..range.end.next_multiple_of(self.cluster)
    }

    /// Counts a change of the metadata, before any request depends on it.
    pub(super) fn changed(&self) {
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// Whether all metadata is on stable storage, including that of earlier processes.
    pub(super) fn is_stable(&self) -> bool {
        self.is_clean() && self.was_flushed.load(Ordering::Acquire)
    }

    /// Whether all changes of the metadata are on stable storage.
    pub(super) fn is_clean(&self) -> bool {
        self.flushed.load(Ordering::Acquire) == self.changes.load(Ordering::Acquire)
    }

    /// Whether all changes of the metadata survive a kill of this process.
    pub(super) fn is_committed(&self) -> bool {
        self.committed.load(Ordering::Acquire) >= self.changes.load(Ordering::Acquire)
    }

    /// Makes all answered requests durable.
    pub(super) async fn flush(&self, channels: &Channels) -> Result<(), Errno> {
        if self.is_clean() {
            self.shared.sync(channels).await?;
        } else {
            let _turn = self.flushing.lock().await;
            let changes = self.write_metadata(channels).await?;
            self.shared.sync(channels).await?;
            self.flushed.fetch_max(changes, Ordering::Release);
        }
        self.was_flushed.store(true, Ordering::Release);
        Ok(())
    }

    /// Makes all changes so far survive a kill of this process. No write that may depend on a change is answered
    /// before. Without a journal, the changes have to be in the file.
    pub(super) async fn commit(&self, channels: &Channels) -> Result<(), Errno> {
        let wanted = self.changes.load(Ordering::Acquire);
        let is_done = || self.committed.load(Ordering::Acquire) >= wanted;
        if is_done() {
            return Ok(());
        }
        if self.has_journal() {
            if self.allocating.load(Ordering::Relaxed) > 0 {
                // Let other tasks join: one commit serves all of them.
                take_turns().await;
                if is_done() {
                    return Ok(());
                }
            }
            let _turn = self.committing.lock().await;
            // Another task may have committed for all waiting ones.
            if is_done() || self.keep_changed(channels).await {
                return Ok(());
            }
        }
        let _turn = self.flushing.lock().await;
        if !is_done() {
            self.write_metadata(channels).await?;
        }
        Ok(())
    }

    /// Writes all changed metadata to the file. The caller holds `flushing`. Returns the number of the last
    /// written change.
    async fn write_metadata(&self, channels: &Channels) -> Result<u64, Errno> {
        let Some(metadata) = &self.shared.metadata else {
            return Ok(self.changes.load(Ordering::Acquire));
        };
        if self.damage.is_cut_off() {
            return Err(Errno::EIO);
        }
        let (write_out, changes, age) = {
            let _turn = self.committing.lock().await;
            self.make_marked(channels, metadata).await;
            // All sectors are taken under one lock, so they are consistent.
            let mut core = lock(&self.core);
            let changes = self.changes.load(Ordering::Acquire);
            let (write_out, committed) = metadata.begin();
            self.note_commit(metadata, committed, changes);
            (write_out, changes, core.engine.seal())
        };
        write_out.carry_out(channels).await?;
        self.committed.fetch_max(changes, Ordering::Release);
        if self.has_given_up() {
            // Writes of tasks that have ended may still be in flight to the same places.
            self.shared.settle_writes().await;
            lock(&self.core).engine.settle(age);
        }
        if !self.has_journal() {
            self.kept.give_up();
            self.unmark(channels).await?;
        }
        Ok(changes)
    }

    /// Puts all changed metadata into the journal. The caller holds `committing`. `false`: there is no journal.
    async fn keep_changed(&self, channels: &Channels) -> bool {
        let Some(metadata) = &self.shared.metadata else { return false };
        self.make_marked(channels, metadata).await;
        let changes = self.changes.load(Ordering::Acquire);
        self.note_commit(metadata, metadata.commit(), changes)
    }

    /// Makes all changes so far survive a kill of this process, unless that takes a write-out. `false`: they may not survive.
    pub(super) async fn commit_to_journal(&self, channels: &Channels) -> bool {
        let _turn = self.committing.lock().await;
        self.has_journal() && self.keep_changed(channels).await
    }

    /// Marks the image, so that the next process finds the journal and the bitmaps beside it.
    pub(super) async fn mark_now(&self, channels: &Channels) {
        let Some(metadata) = &self.shared.metadata else { return };
        let _turn = self.committing.lock().await;
        self.make_marked(channels, metadata).await;
    }

    /// Marks the image before the first commit. The caller holds `committing`.
    async fn make_marked(&self, channels: &Channels, metadata: &Metadata) {
        if let Err(errno) = self.mark(channels, metadata).await {
            self.note_commit(metadata, Err(errno.into()), 0);
        }
    }

    /// Records the result of a commit of all changes up to `changes`. `false`: there is no journal.
    fn note_commit(&self, metadata: &Metadata, committed: io::Result<bool>, changes: u64) -> bool {
        match committed {
            Ok(true) => {
                self.committed.fetch_max(changes, Ordering::Release);
                true
            }
            Ok(false) => false,
            Err(error) => {
                log::error!(
                    "Could not keep qcow2 metadata for the case that this process is killed: {error}. \
                     From now on, writes to new clusters wait for the disk"
                );
                metadata.give_up_journal();
                self.kept.give_up();
                false
            }
        }
    }

    /// Writes a mark to the image that names the journal.
    async fn mark(&self, channels: &Channels, metadata: &Metadata) -> Result<(), Errno> {
        let (Some(mark), Some(at)) = (metadata.unmarked(), Mark::place(self.cluster)) else {
            return Ok(());
        };
        write(channels, at, &mark)?.await.0?;
        // The bit alone would mean that the image needs a repair.
        storage::sync(channels).await?;
        // Until the bit is set, a later process does not need the journal.
        metadata.set_named(true).map_err(errno_of)?;
        metadata.set_marked(true);
        marker::write_dirty(channels, true).await
    }

    /// Removes the mark from the image. The caller holds `flushing`, or owns the image.
    async fn unmark(&self, channels: &Channels) -> Result<(), Errno> {
        let Some(metadata) = &self.shared.metadata else { return Ok(()) };
        if metadata.is_marked() {
            metadata.set_marked(false);
            marker::unmark(channels, self.cluster).await?;
            metadata.set_named(false).map_err(errno_of)?;
            // Only now: after a failure, this is repeated, or the image is marked again.
            metadata.set_unmarked();
        }
        Ok(())
    }

    /// Whether there is a working journal.
    pub(super) fn has_journal(&self) -> bool {
        self.shared.metadata.as_ref().is_some_and(Metadata::has_journal)
    }

    /// Whether all changes are in the file and the image has no mark.
    pub(super) fn is_whole(&self) -> bool {
        self.is_clean() && !self.shared.metadata.as_ref().is_some_and(Metadata::is_marked)
    }

    /// Drops the journal of a complete image that is no longer used.
    pub(super) fn drop_journal(&self) {
        self.shared.metadata.iter().for_each(Metadata::drop_journal);
    }

    /// Leaves all changes to the process that takes over: in the journal, so that guests do not wait for the
    /// disk. Without a journal, in the file.
    pub(super) async fn release_for_handover(&self, channels: &Channels) -> Result<(), Errno> {
        // Without throttling, because the guests wait.
        channels.all().for_each(|channel| channel.drain_begin());
        let released = match self.leave_to_journal(channels).await {
            Ok(false) => self.close(channels).await,
            left => left.map(drop),
        };
        channels.all().for_each(|channel| channel.drain_end());
        released
    }

    /// `false`: the journal does not have all changes.
    async fn leave_to_journal(&self, channels: &Channels) -> Result<bool, Errno> {
        if self.damage.is_cut_off() {
            // It is not known which tables the other process would find.
            return Err(Errno::EIO);
        }
        if !self.has_journal() || self.is_whole() {
            return Ok(self.is_whole());
        }
        self.settle_backing().await;
        // The other process does not learn of released clusters that the file does not have as free.
        self.write_if(channels, || self.has_given_up()).await?;
        let _turn = self.flushing.lock().await;
        let _committing = self.committing.lock().await;
        Ok(self.keep_changed(channels).await && !self.has_given_up())
    }

    /// Writes all changes to the file, and removes the mark. If the image is changed meanwhile, the mark stays:
    /// `EBUSY`.
    pub(super) async fn close(&self, channels: &Channels) -> Result<(), Errno> {
        self.flush(channels).await?;
        self.settle_backing().await;
        let _turn = self.flushing.lock().await;
        // Later changes mark the image again.
        let _committing = self.committing.lock().await;
        match self.is_clean() {
            true => self.unmark(channels).await,
            false => Err(Errno::EBUSY),
        }
    }

    /// Whether there are released clusters that the file does not have as free.
    pub(super) fn has_given_up(&self) -> bool {
        lock(&self.core).engine.given_up() > 0
    }

    /// Writes the metadata if too much of it is in memory.
    pub(super) async fn limit(&self, channels: &Channels) -> Result<(), Errno> {
        let is_due = || {
            self.shared.metadata.as_ref().is_some_and(|metadata| metadata.len() > MOST_KEPT)
                || lock(&self.core).engine.given_up() > MOST_GIVEN_UP
        };
        self.write_if(channels, is_due).await
    }

    async fn write_if(&self, channels: &Channels, is_due: impl Fn() -> bool) -> Result<(), Errno> {
        if is_due() {
            let _turn = self.flushing.lock().await;
            // Another task may have done it meanwhile.
            if is_due() {
                self.write_metadata(channels).await?;
            }
        }
        Ok(())
    }

    /// Records new data in the file, to which no metadata in the file leads.
    pub(super) fn wrote_new_data(&self) {
        self.shared.metadata.iter().for_each(Metadata::wrote_new_data);
    }
}

/// The answer to a request after an error.
pub(super) fn errno_of(error: io::Error) -> Errno {
    match (error.raw_os_error(), error.kind()) {
        (Some(errno), _) => Errno::from_raw(errno),
        (None, io::ErrorKind::OutOfMemory) => Errno::ENOMEM,
        (None, io::ErrorKind::Unsupported) => Errno::EOPNOTSUPP,
        _ => Errno::EIO,
    }
}
