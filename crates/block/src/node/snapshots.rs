//! Internal snapshots of an image.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use event_loop::EventLoop;
use nix::errno::Errno;

/// The internal snapshots of an image whose format has such.
pub trait InternalSnapshots: Send + Sync {
    /// Returns all. `None`: this image has no room for any.
    fn list(&self) -> Option<Vec<InternalSnapshot>>;

    /// Makes a snapshot of the disk, with all answered writes, deletes one, or goes back to one.
    ///
    /// Requests in flight are answered first, later ones wait. When the future completes, the change is on stable
    /// storage. A kill leaves the image as it was, or as it is to be. The work runs on `event_loop`, which also awaits
    /// the future.
    ///
    /// # Errors
    ///
    /// `ENOTSUP`: there is no room for snapshots. `EROFS`: the node was opened for reading. `EINVAL`: the image cannot count
    /// so many users of a cluster. The image is unchanged.
    fn change(self: Arc<Self>, change: SnapshotChange, event_loop: &EventLoop)
    -> ChangingSnapshots;
}

/// An internal snapshot of an image: the disk as it was at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InternalSnapshot {
    /// Its id, unique in the image.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Bytes of the state of a virtual machine.
    pub vm_state_size: u64,
    /// When it was made, since the beginning of 1970.
    pub date: Duration,
    /// What the clock of the virtual machine showed.
    pub vm_clock: Duration,
    /// The number of the instructions of the virtual machine, if they were counted.
    pub icount: Option<u64>,
}

/// A change of the internal snapshots of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SnapshotChange {
    /// Makes one with this name.
    Make(String),
    /// Deletes the one with this id.
    Delete(String),
    /// The disk becomes what it was at the one with this id, and may get another size. Nothing else uses the node.
    Apply(String),
}

/// Why internal snapshots were not changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SnapshotError {
    /// An error of a node below, or of the image.
    Os(Errno),
    /// The image's metadata is damaged.
    Damaged(String),
    /// The metadata of the snapshot that was to be deleted, or applied, is damaged. Nothing has changed.
    OfSnapshot(String),
}

impl From<Errno> for SnapshotError {
    fn from(errno: Errno) -> SnapshotError {
        SnapshotError::Os(errno)
    }
}

impl fmt::Display for SnapshotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SnapshotError::Os(errno) => f.write_str(errno.desc()),
            SnapshotError::Damaged(why) => write!(f, "the image is damaged: {why}"),
            SnapshotError::OfSnapshot(why) => write!(f, "the snapshot is damaged: {why}"),
        }
    }
}

/// Completes with the result of [`InternalSnapshots::change`].
pub type ChangingSnapshots = Pin<Box<dyn Future<Output = Result<(), SnapshotError>>>>;
