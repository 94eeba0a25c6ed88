//! What jobs are started with, and what they can be told.

use std::path::PathBuf;

use block::job::{OnCbwError, OnError};
use block::options::RbdOptions;

/// What all jobs have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct JobOptions {
    /// `job-id`.
    pub(crate) id: String,
    /// `auto-finalize`: whether it makes its changes as soon as it can.
    pub(crate) auto_finalize: bool,
    /// `auto-dismiss`: whether it goes when it has ended.
    pub(crate) auto_dismiss: bool,
}

impl Default for JobOptions {
    fn default() -> Self {
        JobOptions { id: String::new(), auto_finalize: true, auto_dismiss: true }
    }
}

/// What jobs that copy a node have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct CopyOptions {
    /// The job's own.
    pub(crate) job: JobOptions,
    /// `device`: the source's name.
    pub(crate) device: String,
    /// `target`: its name.
    pub(crate) target: String,
    /// `sync`.
    pub(crate) sync: Sync,
    /// `speed`, bytes a second; 0: as fast as it goes.
    pub(crate) speed: i64,
    /// `on-source-error`.
    pub(crate) on_source_error: OnError,
    /// `on-target-error`.
    pub(crate) on_target_error: OnError,
    /// `filter-node-name`: of the node that is put above the source.
    pub(crate) filter_node_name: Option<String>,
}

/// `sync`: what is copied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Sync {
    /// All.
    #[default]
    Full,
    /// What is in the source's topmost image.
    Top,
    /// What is written from now on; a backup: what is overwritten from now on.
    None,
    /// What a bitmap has set, which is cleared if the job succeeds.
    Incremental,
    /// What a bitmap has set.
    Bitmap,
}

/// `bitmap-mode`: what becomes of the bits of what is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BitmapMode {
    /// Cleared if the job succeeds.
    OnSuccess,
    /// They stay.
    Never,
    /// Cleared of what was copied, also if the job fails.
    Always,
}

/// `blockdev-mirror`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MirrorOptions {
    /// As of each copy.
    pub(crate) copy: CopyOptions,
    /// `replaces`: the node whose place the target takes; `None`: the source.
    pub(crate) replaces: Option<String>,
    /// `granularity`, bytes: what is copied again when a byte of it is written.
    pub(crate) granularity: u64,
    /// `buf-size`, bytes of memory for what is being copied.
    pub(crate) buf_size: u64,
}

/// `granularity` when none is given, as QEMU chooses it for a file.
const GRANULARITY: u64 = 64 << 10;
/// `buf-size` when none is given.
const BUF_SIZE: u64 = 16 << 20;

impl Default for MirrorOptions {
    fn default() -> Self {
        MirrorOptions {
            copy: CopyOptions::default(),
            replaces: None,
            granularity: GRANULARITY,
            buf_size: BUF_SIZE,
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
    /// `x-perf`.
    pub(crate) perf: Perf,
}

/// `x-perf`: how a backup copies. `use-copy-range` changes nothing: data passes through memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Perf {
    /// `max-workers`: copies at the same time.
    pub(crate) max_workers: i64,
    /// `max-chunk`: most bytes of one copy. 0: no limit.
    pub(crate) max_chunk: i64,
    /// `min-cluster-size`: bytes of a part, at least.
    pub(crate) min_cluster_size: u64,
}

impl Default for Perf {
    fn default() -> Perf {
        Perf { max_workers: 64, max_chunk: 0, min_cluster_size: 0 }
    }
}

/// `blockdev-create`: an image to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CreateOptions {
    /// `file`.
    File {
        /// `filename`.
        filename: PathBuf,
        /// `size`, bytes.
        size: u64,
        /// `preallocation`.
        preallocation: Preallocation,
    },
    /// `rbd`.
    Rbd {
        /// `location`.
        location: RbdOptions,
        /// `size`, bytes.
        size: u64,
        /// `cluster-size`: bytes of an object, a power of two. `None`: Ceph's default.
        object_size: Option<u64>,
    },
}

/// `preallocation` of a file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Preallocation {
    /// It is sparse.
    #[default]
    Off,
    /// Its space is reserved.
    Falloc,
    /// It is written.
    Full,
}

/// What a job can be told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JobVerb {
    /// `cancel`.
    Cancel {
        /// Give up at once, and do not end as a mirror that is ready may: with a copy that is whole.
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
    /// `set-speed`: bytes a second.
    SetSpeed(i64),
}
