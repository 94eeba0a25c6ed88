//! An opened image: what all loops share.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use imago::format::drivers::FormatDriverInstance;
use imago::qcow2::Qcow2;
use imago::storage::drivers::{CommonStorageHelper, RangeBlockedGuard};
use nix::errno::Errno;
use tokio::sync::{Mutex, Semaphore};

use super::context::Channels;
use super::storage::{self, NodeStorage, Shared};

/// Requests that find room for data, or give it up, at once. Each holds on to a table, of which
/// [`imago`] has 128 in memory.
const ALLOCATING: usize = 64;

/// An opened image.
pub(super) struct Image {
    /// The metadata. It has locks of its own.
    pub(super) qcow2: Qcow2<NodeStorage>,
    pub(super) shared: Arc<Shared>,
    /// Bytes of a cluster.
    pub(super) cluster: u64,
    pub(super) version: u32,
    pub(super) has_backing: bool,
    /// Requests at work on the disk: those that use the mapping of their clusters, side by side, and
    /// those that change it, alone.
    ranges: CommonStorageHelper,
    allocating: Semaphore,
    /// How often the metadata has changed, and as of which of these changes they are in the file and
    /// on stable storage.
    changes: AtomicU64,
    flushed: AtomicU64,
    flushing: Mutex<()>,
}

impl Image {
    pub(super) fn new(
        qcow2: Qcow2<NodeStorage>,
        shared: Arc<Shared>,
        header: &super::header::Header,
        has_backing: bool,
    ) -> Image {
        Image {
            qcow2,
            shared,
            cluster: header.cluster,
            version: header.version,
            has_backing,
            ranges: CommonStorageHelper::default(),
            allocating: Semaphore::new(ALLOCATING),
            changes: AtomicU64::new(0),
            flushed: AtomicU64::new(0),
            flushing: Mutex::default(),
        }
    }

    /// Bytes of the disk.
    pub(super) fn size(&self) -> u64 {
        self.qcow2.size()
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

    /// Whether all metadata is on stable storage.
    pub(super) fn is_clean(&self) -> bool {
        self.flushed.load(Ordering::Acquire) == self.changes.load(Ordering::Acquire)
    }

    /// Has all that was answered before on stable storage.
    pub(super) async fn flush(&self, channels: &Channels) -> Result<(), Errno> {
        if self.is_clean() {
            return storage::sync(channels).await;
        }
        let _turn = self.flushing.lock().await;
        let changes = self.changes.load(Ordering::Acquire);
        self.qcow2.flush().await.map_err(errno_of)?;
        storage::sync(channels).await?;
        self.flushed.fetch_max(changes, Ordering::Release);
        Ok(())
    }
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
