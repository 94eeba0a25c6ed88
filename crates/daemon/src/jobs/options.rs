//! Options of jobs, and the orders that jobs accept.

use block::job::{OnCbwError, OnError};
use control::Inventory;

/// Options of every job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct JobOptions {
    /// `job-id`.
    pub(crate) id: String,
    /// `auto-finalize`: the job applies its changes without `job-finalize`.
    pub(crate) auto_finalize: bool,
    /// `auto-dismiss`: an ended job disappears without `job-dismiss`.
    pub(crate) auto_dismiss: bool,
}

impl Default for JobOptions {
    fn default() -> Self {
        JobOptions { id: String::new(), auto_finalize: true, auto_dismiss: true }
    }
}

/// Options of every job that copies a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct CopyOptions {
    /// Options of every job.
    pub(crate) job: JobOptions,
    /// `device`: node name of the source.
    pub(crate) device: String,
    /// `target`: node name of the target.
    pub(crate) target: String,
    /// `sync`.
    pub(crate) sync: Sync,
    /// `speed`: bytes per second. 0: unlimited.
    pub(crate) speed: i64,
    /// `on-source-error`.
    pub(crate) on_source_error: OnError,
    /// `on-target-error`.
    pub(crate) on_target_error: OnError,
    /// `filter-node-name`: name of the filter above the source.
    pub(crate) filter_node_name: Option<String>,
    /// `discard-source`: what was copied is discarded in the source.
    pub(crate) discard_source: bool,
}

impl CopyOptions {
    /// Returns the name of the job's filter in the inventory.
    pub(crate) fn filter(&self) -> String {
        let name = self.filter_node_name.clone();
        name.unwrap_or_else(|| Inventory::unnamed_filter(&self.job.id))
    }
}

/// `sync`: the data that a job copies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Sync {
    /// The whole disk.
    #[default]
    Full,
    /// The data stored in the source's topmost image.
    Top,
    /// Data written after the start. A backup copies the old data before each write.
    None,
    /// The parts that a bitmap has set. Success clears their bits.
    Incremental,
    /// The parts that a bitmap has set.
    Bitmap,
}

/// `bitmap-mode`: the bits of copied parts after the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BitmapMode {
    /// Cleared on success.
    OnSuccess,
    /// Unchanged.
    Never,
    /// Cleared for all copied parts, also on failure.
    Always,
}

/// `blockdev-mirror`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MirrorOptions {
    /// As of each copy.
    pub(crate) copy: CopyOptions,
    /// `replaces`: the node that the target replaces. `None`: the source.
    pub(crate) replaces: Option<String>,
    /// `granularity`: bytes per bit of the dirty bitmap. A write to one byte makes all of them
    /// dirty. 0: as the target's clusters.
    pub(crate) granularity: u64,
    /// `buf-size`: bytes of memory for copies in flight.
    pub(crate) buf_size: u64,
    /// `copy-mode=write-blocking`: a write is answered when the target has it.
    pub(crate) blocking: bool,
    /// `target-is-zero`: the target reads as zeroes.
    pub(crate) target_is_zero: bool,
}

/// Default of `buf-size`.
const BUF_SIZE: u64 = 16 << 20;

impl Default for MirrorOptions {
    fn default() -> Self {
        MirrorOptions {
            copy: CopyOptions::default(),
            replaces: None,
            granularity: 0,
            buf_size: BUF_SIZE,
            blocking: false,
            target_is_zero: false,
        }
    }
}

/// `blockdev-backup`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct BackupOptions {
    /// As of each copy.
    pub(crate) copy: CopyOptions,
    /// `on-cbw-error`.
    pub(crate) on_cbw_error: OnCbwError,
    /// `bitmap`.
    pub(crate) bitmap: Option<String>,
    /// `bitmap-mode`.
    pub(crate) bitmap_mode: Option<BitmapMode>,
    /// `compress`.
    pub(crate) compress: bool,
    /// `x-perf`.
    pub(crate) perf: Perf,
}

/// `x-perf`: limits of a backup. `use-copy-range` has no effect: data passes through memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Perf {
    /// `max-workers`: concurrent copies.
    pub(crate) max_workers: i64,
    /// `max-chunk`: most bytes per copy. 0: unlimited.
    pub(crate) max_chunk: i64,
    /// `min-cluster-size`: fewest bytes per part.
    pub(crate) min_cluster_size: u64,
}

impl Default for Perf {
    fn default() -> Perf {
        Perf { max_workers: 64, max_chunk: 0, min_cluster_size: 0 }
    }
}

/// An order to a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JobVerb {
    /// `cancel`.
    Cancel {
        /// End at once. Without `force`, a mirror in status `ready` first makes its copy
        /// consistent.
        force: bool,
    },
    /// `pause`.
    Pause,
    /// `resume`.
    Resume,
    /// `complete`.
    Complete,
    /// `finalize`.
    Finalize,
    /// `dismiss`.
    Dismiss,
    /// `set-speed`: bytes per second.
    SetSpeed(i64),
    /// `change`, of a mirror.
    Change {
        /// Whether writes are to wait for the target. `None`: as before.
        blocking: Option<bool>,
    },
}
