//! An opened image: what all loops share.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use event_loop::sync::lock;
use event_loop::take_turns;
use nix::errno::Errno;
use tokio::sync::Mutex;

use super::context::Channels;
use super::core::Core;
use super::damage::Found;
use super::engine::Engine;
use super::extend;
use super::marker::{self, Mark};
use super::metadata::Metadata;
use super::steps::write;
use super::storage::{self, Shared};

/// Bytes of metadata in memory from which on they are written without a flush, and runs of clusters that wait to
/// be free.
const MOST_KEPT: usize = 32 << 20;
const MOST_GIVEN_UP: usize = 1 << 16;

/// An opened image.
pub(super) struct Image {
    /// The metadata, and which requests are at work where.
    pub(super) core: std::sync::Mutex<Core>,
    pub(super) shared: Arc<Shared>,
    /// Bytes of a cluster.
    pub(super) cluster: u64,
    pub(super) version: u32,
    pub(super) has_snapshots: bool,
    pub(super) has_backing: bool,
    pub(super) read_only: bool,
    /// Bytes of the disk.
    size: AtomicU64,
    /// Held by who changes the size.
    pub(super) resizing: Mutex<()>,
    /// Requests that write to new clusters now.
    pub(super) allocating: AtomicUsize,
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
    /// Held by who commits to the journal, or marks the image. Taken after `flushing`.
    committing: Mutex<()>,
    /// Held by who makes the file longer.
    pub(super) extending: Mutex<()>,
    /// Clusters that the file is made longer by at once. 0: it becomes longer by being written to.
    pub(super) ahead: AtomicU64,
    /// Damage that was found in the metadata.
    pub(super) damage: Found,
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
            version: header.version,
            has_snapshots: header.has_snapshots,
            size: AtomicU64::new(header.size),
            resizing: Mutex::default(),
            has_backing,
            read_only,
            damage: Found::default(),
            allocating: AtomicUsize::new(0),
            changes: AtomicU64::new(0),
            flushed: AtomicU64::new(0),
            was_flushed: AtomicBool::new(false),
            committed: AtomicU64::new(0),
            flushing: Mutex::default(),
            committing: Mutex::default(),
            extending: Mutex::default(),
            ahead: AtomicU64::new(0),
        }
    }

    /// Has the file made longer ahead of its use ([`extend`]).
    pub(super) fn extend_ahead(&mut self) {
        *self.ahead.get_mut() = extend::clusters(self.size(), self.cluster);
    }

    /// Bytes of the disk.
    pub(super) fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// The disk has another size from now on. Who calls it has the last cluster to himself.
    pub(super) fn set_size(&self, size: u64) {
        self.size.store(size, Ordering::Release);
    }

    /// Where a range ends: with the disk ends the cluster too.
    pub(super) fn end(&self, end: u64) -> u64 {
        match end == self.size() {
            true => end.next_multiple_of(self.cluster),
            false => end,
        }
    }

    /// Has the tables reach as far as a disk of that size.
    pub(super) async fn grow_tables(&self, channels: &Channels, size: u64) -> Result<(), Errno> {
        // Nothing is being written: what has changed of the table in its old place is not to be, or it could lead to
        // tables that are not there yet.
        let _turn = self.flushing.lock().await;
        self.engine(channels, |engine| {
            let old = engine.grow_l1(size)?;
            self.shared.metadata.iter().for_each(|metadata| metadata.forget(old.clone()));
            Ok(())
        })
        .await?;
        self.write_metadata(channels).await.map(drop)
    }

    /// Has the header say that size with the next flush.
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

    /// The clusters that a range touches, all of each.
    pub(super) fn clusters(&self, range: Range<u64>) -> Range<u64> {
        // The disk's size leaves room for that.
        range.start - range.start % self.cluster..range.end.next_multiple_of(self.cluster)
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

    /// Whether all that was changed of the metadata outlasts this process.
    pub(super) fn is_committed(&self) -> bool {
        self.committed.load(Ordering::Acquire) >= self.changes.load(Ordering::Acquire)
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
            if self.allocating.load(Ordering::Relaxed) > 0 {
                // Others are about to commit too: one commit is for all of them.
                take_turns().await;
                if is_done() {
                    return Ok(());
                }
            }
            let _turn = self.committing.lock().await;
            // Somebody else may have done it for all who waited.
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

    /// Writes all metadata there is now to the file. Who calls it has `flushing`. Returns up to which
    /// change that is.
    async fn write_metadata(&self, channels: &Channels) -> Result<u64, Errno> {
        let Some(metadata) = &self.shared.metadata else {
            return Ok(self.changes.load(Ordering::Acquire));
        };
        let (write_out, changes, age) = {
            let _turn = self.committing.lock().await;
            self.make_marked(channels, metadata).await;
            // All that is taken fits together, and is of one age.
            let mut core = lock(&self.core);
            let changes = self.changes.load(Ordering::Acquire);
            let (write_out, committed) = metadata.begin();
            self.note_commit(metadata, committed, changes);
            (write_out, changes, core.engine.seal())
        };
        write_out.carry_out(channels).await?;
        self.committed.fetch_max(changes, Ordering::Release);
        if self.has_given_up() {
            // What a task has begun that has ended since may be written there still.
            self.shared.settle_writes().await;
            lock(&self.core).engine.settle(age);
        }
        if !self.has_journal() {
            self.unmark(channels).await?;
        }
        Ok(changes)
    }

    /// Puts all metadata that has changed into the journal. Who calls it has `committing`. `false`: there is none.
    async fn keep_changed(&self, channels: &Channels) -> bool {
        let Some(metadata) = &self.shared.metadata else { return false };
        self.make_marked(channels, metadata).await;
        let changes = self.changes.load(Ordering::Acquire);
        self.note_commit(metadata, metadata.commit(), changes)
    }

    /// Has the image marked before the first commit. Who calls it has `committing`.
    async fn make_marked(&self, channels: &Channels, metadata: &Metadata) {
        if let Err(errno) = self.mark(channels, metadata).await {
            self.note_commit(metadata, Err(errno.into()), 0);
        }
    }

    /// Takes note of what came of a commit of all changes up to `changes`. `false`: there is no journal.
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
                false
            }
        }
    }

    /// Has the image say that there is a journal.
    async fn mark(&self, channels: &Channels, metadata: &Metadata) -> Result<(), Errno> {
        let (Some(mark), Some(at)) = (metadata.unmarked(), Mark::place(self.cluster)) else {
            return Ok(());
        };
        write(channels, at, &mark)?.await.0?;
        // With the bit alone it would be an image that has to be repaired.
        storage::sync(channels).await?;
        // Until the bit is there, the journal of a process that is killed is not needed.
        metadata.set_named(true).map_err(errno_of)?;
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
        self.write_if(channels, || self.has_given_up()).await?;
        let _turn = self.flushing.lock().await;
        let _committing = self.committing.lock().await;
        Ok(self.keep_changed(channels).await && !self.has_given_up())
    }

    /// Has all of it in the file, and the image say that nothing is missing. Where somebody changes it all the same, as
    /// nobody has waited for the disk, it says so or is marked still: `EBUSY`.
    pub(super) async fn close(&self, channels: &Channels) -> Result<(), Errno> {
        self.flush(channels).await?;
        let _turn = self.flushing.lock().await;
        // What is changed from here on is marked for again.
        let _committing = self.committing.lock().await;
        match self.is_clean() {
            true => self.unmark(channels).await,
            false => Err(Errno::EBUSY),
        }
    }

    /// Whether clusters were given up that the file does not have as free.
    pub(super) fn has_given_up(&self) -> bool {
        lock(&self.core).engine.given_up() > 0
    }

    /// Writes the metadata if there is too much of it in memory.
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
            // Somebody else may have done it meanwhile.
            if is_due() {
                self.write_metadata(channels).await?;
            }
        }
        Ok(())
    }

    /// New data is in the file, at a place that no metadata in the file leads to.
    pub(super) fn wrote_new_data(&self) {
        self.shared.metadata.iter().for_each(Metadata::wrote_new_data);
    }
}

/// What a request is answered with for an error.
pub(super) fn errno_of(error: io::Error) -> Errno {
    match (error.raw_os_error(), error.kind()) {
        (Some(errno), _) => Errno::from_raw(errno),
        (None, io::ErrorKind::OutOfMemory) => Errno::ENOMEM,
        (None, io::ErrorKind::Unsupported) => Errno::EOPNOTSUPP,
        _ => Errno::EIO,
    }
}
