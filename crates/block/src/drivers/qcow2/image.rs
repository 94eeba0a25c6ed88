//! An opened image: what all loops share.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use imago::format::PreallocateMode;
use imago::format::drivers::FormatDriverInstance;
use imago::qcow2::Qcow2;
use imago::storage::drivers::{CommonStorageHelper, RangeBlockedGuard};
use nix::errno::Errno;
use tokio::sync::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard, Semaphore};

use super::context::Channels;
use super::damage::Found;
use super::marker::{self, Mark};
use super::metadata::{Metadata, WriteOut};
use super::steps::write;
use super::storage::{self, NodeStorage, Shared};

/// Requests that find room for data, or give it up, at once. Each holds on to a table, of which
/// [`imago`] has 128 in memory.
const ALLOCATING: usize = 64;
/// Bytes of metadata in memory from which on they are written without a flush.
const MOST_KEPT: usize = 32 << 20;

/// An opened image.
pub(super) struct Image {
    /// The metadata. It has locks of its own.
    pub(super) qcow2: Qcow2<NodeStorage>,
    pub(super) shared: Arc<Shared>,
    /// Bytes of a cluster.
    pub(super) cluster: u64,
    pub(super) version: u32,
    pub(super) has_snapshots: bool,
    pub(super) has_backing: bool,
    pub(super) read_only: bool,
    pub(super) has_data_file: bool,
    /// Bytes of the disk, as its users know them. [`imago`]'s own is this or more.
    size: AtomicU64,
    /// Held by who changes the size.
    pub(super) resizing: Mutex<()>,
    /// Requests at work on the disk: those that use the mapping of their clusters, side by side, and
    /// those that change it, alone.
    ranges: CommonStorageHelper,
    allocating: Semaphore,
    /// How often the metadata has changed, and as of which of these changes they are in the file and
    /// on stable storage.
    changes: AtomicU64,
    flushed: AtomicU64,
    /// The files were flushed since the image was opened: who had it before may have been killed, and have left
    /// metadata that is not on stable storage.
    was_flushed: AtomicBool,
    /// As of which of them they outlast this process, should it be killed.
    committed: AtomicU64,
    /// Held by who writes metadata to the file.
    pub(super) flushing: Mutex<()>,
    /// Damage that was found in the metadata.
    pub(super) damage: Found,
    /// Held by requests that change metadata, side by side; alone by who takes all of it to be written.
    changing: RwLock<()>,
}

impl Image {
    pub(super) fn new(
        qcow2: Qcow2<NodeStorage>,
        shared: Arc<Shared>,
        header: &super::header::Header,
        has_backing: bool,
        read_only: bool,
    ) -> Image {
        Image {
            qcow2,
            shared,
            cluster: header.cluster,
            version: header.version,
            has_snapshots: header.has_snapshots,
            size: AtomicU64::new(header.size),
            resizing: Mutex::default(),
            has_backing,
            read_only,
            damage: Found::default(),
            has_data_file: header.data_file.is_some(),
            ranges: CommonStorageHelper::default(),
            allocating: Semaphore::new(ALLOCATING),
            changes: AtomicU64::new(0),
            flushed: AtomicU64::new(0),
            was_flushed: AtomicBool::new(false),
            committed: AtomicU64::new(0),
            flushing: Mutex::default(),
            changing: RwLock::default(),
        }
    }

    /// Bytes of the disk.
    pub(super) fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// The disk has another size from now on. Who calls it has the last cluster to himself.
    pub(super) fn set_size(&self, size: u64) {
        self.size.store(size, Ordering::Release);
    }

    /// Where a range ends for [`imago`]: with the disk ends the cluster too, as far as `imago` lets it.
    pub(super) fn end(&self, end: u64) -> u64 {
        match end == self.size() {
            true => end.next_multiple_of(self.cluster).min(self.qcow2.size()),
            false => end,
        }
    }

    /// Has the tables reach as far as a disk of that size.
    pub(super) async fn grow_tables(&self, channels: &Channels, size: u64) -> Result<(), Errno> {
        let _turn = self.flushing.lock().await;
        let alone = self.changing.write().await;
        // What has changed before belongs to the L1 table where the file has it, and is there first.
        let changed = self.take_changed(channels, &alone).await?;
        self.write_taken(channels, changed).await?;
        let grown = self.qcow2.resize_grow(size, PreallocateMode::None).await;
        self.changed();
        // Its old place is free for other tables, which must not be written there before the file says
        // so.
        self.write_changed(channels, alone).await?;
        grown.map_err(|error| self.failed(error))
    }

    /// Has the header say that size with the next flush.
    pub(super) async fn set_header_size(
        &self,
        channels: &Channels,
        size: u64,
    ) -> Result<(), Errno> {
        let _alone = self.changing.write().await;
        if let Some(metadata) = &self.shared.metadata {
            metadata.set_size(channels, size).await?;
        }
        self.changed();
        Ok(())
    }

    /// While it is held, nobody changes metadata.
    pub(super) async fn change_alone(&self) -> RwLockWriteGuard<'_, ()> {
        self.changing.write().await
    }

    /// The clusters that a range touches, all of each.
    pub(super) fn clusters(&self, range: Range<u64>) -> Range<u64> {
        // The disk's size leaves room for that.
        range.start - range.start % self.cluster..range.end.next_multiple_of(self.cluster)
    }

    /// While it is held, the clusters of the range stay where they are.
    pub(super) async fn use_mapping(&self, range: Range<u64>) -> RangeBlockedGuard<'_> {
        self.ranges.weak_write_blocker(self.clusters(range)).await
    }

    /// While it is held, nobody else reads or writes the clusters of the range.
    pub(super) async fn change_mapping(&self, range: Range<u64>) -> Result<Change<'_>, Errno> {
        // In this order everywhere: who waits for a range holds up nobody who has one.
        let permit = self.allocating.acquire().await.map_err(|_| Errno::EIO)?;
        let range = self.ranges.strong_write_blocker(self.clusters(range)).await;
        Ok(Change { _range: range, _permit: permit })
    }

    /// Takes note that metadata has changed, before anybody learns of it.
    pub(super) fn changed(&self) {
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// Whether all metadata is on stable storage, what was there before the image was opened too.
    pub(super) fn is_stable(&self) -> bool {
        self.is_clean() && self.was_flushed.load(Ordering::Acquire)
    }

    /// Whether all that was changed of the metadata is on stable storage.
    pub(super) fn is_clean(&self) -> bool {
        self.flushed.load(Ordering::Acquire) == self.changes.load(Ordering::Acquire)
    }

    /// Has all that was answered before on stable storage.
    pub(super) async fn flush(&self, channels: &Channels) -> Result<(), Errno> {
        if self.is_clean() {
            storage::sync(channels).await?;
        } else {
            let _turn = self.flushing.lock().await;
            let changes = self.write_metadata(channels).await?;
            storage::sync(channels).await?;
            self.flushed.fetch_max(changes, Ordering::Release);
        }
        self.was_flushed.store(true, Ordering::Release);
        Ok(())
    }

    /// Has what was changed so far outlast this process. Before it does, no write is answered that may
    /// depend on it. Without a journal, it has to be in the file.
    pub(super) async fn commit(&self, channels: &Channels) -> Result<(), Errno> {
        let wanted = self.changes.load(Ordering::Acquire);
        let is_done = || self.committed.load(Ordering::Acquire) >= wanted;
        if is_done() {
            return Ok(());
        }
        if self.has_journal() {
            let alone = self.changing.write().await;
            // Somebody else may have done it for all who waited.
            if is_done() || self.keep_changed(channels, &alone).await? {
                return Ok(());
            }
        }
        let _turn = self.flushing.lock().await;
        if !is_done() {
            self.write_metadata(channels).await?;
        }
        Ok(())
    }

    /// Writes all metadata there is now to the file. Who calls it has `flushing`. Returns up to which
    /// change that is.
    async fn write_metadata(&self, channels: &Channels) -> Result<u64, Errno> {
        let alone = self.changing.write().await;
        self.write_changed(channels, alone).await
    }

    /// The same. `alone`: no metadata has changed since the caller has it.
    async fn write_changed(
        &self,
        channels: &Channels,
        alone: RwLockWriteGuard<'_, ()>,
    ) -> Result<u64, Errno> {
        let changed = self.take_changed(channels, &alone).await?;
        drop(alone);
        self.write_taken(channels, changed).await
    }

    /// Puts all metadata that has changed into the journal. Nobody changes any meanwhile. `false`: there is
    /// none.
    async fn keep_changed(
        &self,
        channels: &Channels,
        _alone: &RwLockWriteGuard<'_, ()>,
    ) -> Result<bool, Errno> {
        let changes = self.changes.load(Ordering::Acquire);
        let Some(metadata) = &self.shared.metadata else { return Ok(false) };
        self.qcow2.flush().await.map_err(|error| self.failed(error))?;
        let kept = match self.mark(channels, metadata).await {
            Ok(()) => metadata.commit(),
            Err(errno) => Err(errno.into()),
        };
        match kept {
            Ok(true) => self.committed.fetch_max(changes, Ordering::Release),
            Ok(false) => return Ok(false),
            Err(error) => {
                log::error!(
                    "Could not keep qcow2 metadata for the case that this process is killed: {error}. \
                     From now on, writes to new clusters wait for the disk"
                );
                metadata.give_up_journal();
                return Ok(false);
            }
        };
        Ok(true)
    }

    /// Has the image say that there is a journal.
    async fn mark(&self, channels: &Channels, metadata: &Metadata) -> Result<(), Errno> {
        let (Some(mark), Some(at)) = (metadata.unmarked(), Mark::place(self.cluster)) else {
            return Ok(());
        };
        metadata.set_named(true).map_err(errno_of)?;
        write(channels, at, &mark)?.await.0?;
        // With the bit alone it would be an image that has to be repaired.
        storage::sync(channels).await?;
        metadata.set_marked(true);
        marker::write_dirty(channels, true).await
    }

    /// Has the image say that nothing is missing. Who calls it has `flushing`, or the image.
    async fn unmark(&self, channels: &Channels) -> Result<(), Errno> {
        let Some(metadata) = &self.shared.metadata else { return Ok(()) };
        if metadata.is_marked() {
            metadata.set_marked(false);
            marker::unmark(channels, self.cluster).await?;
            metadata.set_named(false).map_err(errno_of)?;
            // Not before: if it fails, it is to be tried again, or the image to be marked again.
            metadata.set_unmarked();
        }
        Ok(())
    }

    /// Whether there is a journal, and it has not failed.
    fn has_journal(&self) -> bool {
        self.shared.metadata.as_ref().is_some_and(Metadata::has_journal)
    }

    /// Whether the image has all of it, and says that nothing is missing.
    pub(super) fn is_whole(&self) -> bool {
        self.is_clean() && !self.shared.metadata.as_ref().is_some_and(Metadata::is_marked)
    }

    /// Has nothing left elsewhere of one that is whole. Nobody uses it any more.
    pub(super) fn drop_journal(&self) {
        self.shared.metadata.iter().for_each(Metadata::drop_journal);
    }

    /// Has all of it where another process finds it that has the journal from this one: there, so that guests do not
    /// wait for the disk. Without a journal, in the file.
    pub(super) async fn let_go(&self, channels: &Channels) -> Result<(), Errno> {
        // Limits are for guests, and somebody waits.
        channels.all().for_each(|channel| channel.drain_begin());
        let let_go = match self.leave_to_journal(channels).await {
            Ok(false) => self.close(channels).await,
            left => left.map(drop),
        };
        channels.all().for_each(|channel| channel.drain_end());
        let_go
    }

    /// `false`: the journal does not have all of it.
    async fn leave_to_journal(&self, channels: &Channels) -> Result<bool, Errno> {
        if !self.has_journal() || self.is_whole() {
            return Ok(self.is_whole());
        }
        // The other process does not know which clusters were given up, and are not in the file as free.
        self.write_what_is_due(channels).await?;
        let _turn = self.flushing.lock().await;
        let alone = self.changing.write().await;
        Ok(self.keep_changed(channels, &alone).await? && self.is_free())
    }

    /// Has all of it in the file, and the image say that nothing is missing. Where somebody changes it all the same, as
    /// nobody has waited for the disk, it says so or is marked still: `EBUSY`.
    pub(super) async fn close(&self, channels: &Channels) -> Result<(), Errno> {
        self.flush(channels).await?;
        let _turn = self.flushing.lock().await;
        // What is changed from here on is marked for again.
        let _alone = self.changing.write().await;
        match self.is_clean() {
            true => self.unmark(channels).await,
            false => Err(Errno::EBUSY),
        }
    }

    /// Takes all metadata that there is now, to be written. Nobody changes any meanwhile.
    async fn take_changed(
        &self,
        channels: &Channels,
        alone: &RwLockWriteGuard<'_, ()>,
    ) -> Result<Changed<'_>, Errno> {
        let changes = self.changes.load(Ordering::Acquire);
        let Some(metadata) = &self.shared.metadata else { return Ok(Changed::default()) };
        // While it is being written, the journal has all of it, or nothing.
        self.keep_changed(channels, alone).await?;
        Ok(Changed { changes, metadata: Some(metadata.begin()) })
    }

    /// Writes what was taken.
    async fn write_taken(&self, channels: &Channels, changed: Changed<'_>) -> Result<u64, Errno> {
        let Some(metadata) = changed.metadata else { return Ok(0) };
        metadata.carry_out(channels).await?;
        self.committed.fetch_max(changed.changes, Ordering::Release);
        if !self.has_journal() {
            self.unmark(channels).await?;
        }
        Ok(changed.changes)
    }

    /// The right to change metadata, beside others, and to find room. What was written to the file
    /// before is not too far behind, and it says of all clusters that are free that they are.
    ///
    /// Else a new table could be written to a cluster that the file still has as somebody's data.
    pub(super) async fn change_metadata(
        &self,
        channels: &Channels,
    ) -> Result<RwLockReadGuard<'_, ()>, Errno> {
        loop {
            self.write_what_is_due(channels).await?;
            let changing = self.changing.read().await;
            if self.is_free() {
                return Ok(changing);
            }
        }
    }

    /// The right to change metadata and to give clusters up, alone: nobody finds room meanwhile, so
    /// nobody finds it in these clusters. `finds_room`: the caller may, before that.
    pub(super) async fn give_up_alone(
        &self,
        channels: &Channels,
        finds_room: bool,
    ) -> Result<RwLockWriteGuard<'_, ()>, Errno> {
        loop {
            if finds_room || self.is_much() {
                self.write_what_is_due(channels).await?;
            }
            let alone = self.changing.write().await;
            if !finds_room || self.is_free() {
                return Ok(alone);
            }
        }
    }

    /// Whether the file says of all clusters that are free that they are.
    pub(super) fn is_free(&self) -> bool {
        self.shared.metadata.as_ref().is_none_or(Metadata::is_free)
    }

    /// Whether so much of the metadata is in memory that it is to be written.
    fn is_much(&self) -> bool {
        self.shared.metadata.as_ref().is_some_and(|metadata| metadata.len() > MOST_KEPT)
    }

    async fn write_what_is_due(&self, channels: &Channels) -> Result<(), Errno> {
        let is_due = || self.is_much() || !self.is_free();
        if is_due() {
            let _turn = self.flushing.lock().await;
            // Somebody else may have done it meanwhile.
            if is_due() {
                self.write_metadata(channels).await?;
            }
        }
        Ok(())
    }

    /// Waits until metadata that is being written is in the file.
    pub(super) async fn wait_for_metadata(&self) {
        drop(self.flushing.lock().await);
    }

    /// Clusters will be given up.
    pub(super) fn give_up(&self) {
        self.shared.metadata.iter().for_each(Metadata::give_up);
    }

    /// New data is in the file, at a place that no metadata in the file leads to.
    pub(super) fn wrote_new_data(&self) {
        self.shared.metadata.iter().for_each(Metadata::wrote_new_data);
    }
}

/// Metadata that is to be written.
#[derive(Default)]
struct Changed<'a> {
    /// Up to which change.
    changes: u64,
    metadata: Option<WriteOut<'a>>,
}

/// The right to change the mapping of clusters.
pub(super) struct Change<'a> {
    _range: RangeBlockedGuard<'a>,
    _permit: tokio::sync::SemaphorePermit<'a>,
}

/// What a request is answered with for an error of [`imago`]'s.
pub(super) fn errno_of(error: io::Error) -> Errno {
    match (error.raw_os_error(), error.kind()) {
        (Some(errno), _) => Errno::from_raw(errno),
        (None, io::ErrorKind::OutOfMemory) => Errno::ENOMEM,
        (None, io::ErrorKind::Unsupported) => Errno::EOPNOTSUPP,
        _ => Errno::EIO,
    }
}
