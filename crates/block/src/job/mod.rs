//! Jobs: tasks that copy disks while they are in use.
//!
//! A job puts a filter between a node and its users ([`MirrorTop`], [`CopyBeforeWrite`]), which shares state
//! with a [`Worker`]: a task on a loop that copies. The control plane steers the job and reads its progress
//! by its [`Control`], and receives its [`Report`]s.

mod backup;
mod bitmap;
mod claims;
mod control;
mod copy;
mod copy_before_write;
mod giving_up;
mod mirror;
mod mirror_top;
mod snapshot;
mod summary;
mod turns;
mod worker;

pub use backup::{Backup, OnCbwError};
pub use bitmap::{Bitmap, MAX_PARTS};
pub use control::{Control, Report};
pub use copy::{Failure, Side};
pub use copy_before_write::CopyBeforeWrite;
pub(crate) use copy_before_write::{Before, CbwChannel};
pub use mirror::{End, Mirror};
pub use mirror_top::{CopiesTo, MirrorTop};
pub(crate) use snapshot::{CacheRoom, Place, Snapshot, What};
pub use turns::Turns;
pub use worker::{CHUNK, OnError, Worker, WorkerConfig};

use crate::node::{Geometry, ResizeError, Resized};

/// What a filter says to `resize`: its job copies a disk of the size that it had when the job began.
pub(crate) fn keep_size(geometry: Geometry, size: u64) -> Resized {
    let checked = ResizeError::check(size, geometry.read_only);
    Box::pin(async move { checked.and(Err(ResizeError::NotSupported)) })
}
