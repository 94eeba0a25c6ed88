//! Options of jobs.

use std::path::PathBuf;

pub use block::job::{OnCbwError, OnError};

/// Options common to all jobs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobOptions {
    /// `job-id`.
    pub id: String,
    /// `auto-finalize`: whether the job makes its changes as soon as it can.
    pub auto_finalize: bool,
    /// `auto-dismiss`: whether the job is removed when it has ended.
    pub auto_dismiss: bool,
}

impl Default for JobOptions {
    fn default() -> Self {
        JobOptions { id: String::new(), auto_finalize: true, auto_dismiss: true }
    }
}

/// Options common to jobs that copy a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CopyOptions {
    /// Options common to all jobs.
    pub job: JobOptions,
    /// `device`: the source node.
    pub device: String,
    /// `target`: the target node.
    pub target: String,
    /// `sync`.
    pub sync: Sync,
    /// `speed`, bytes per second; 0: no limit.
    pub speed: i64,
    /// `on-source-error`.
    pub on_source_error: OnError,
    /// `on-target-error`.
    pub on_target_error: OnError,
    /// `filter-node-name`: the name of the filter above the source.
    pub filter_node_name: Option<String>,
}

/// `sync`: what is copied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Sync {
    /// Everything.
    #[default]
    Full,
    /// Data in the source's topmost image.
    Top,
    /// Data written from now on. For a backup: data overwritten from now on.
    None,
    /// Data marked in a bitmap, which is cleared if the job succeeds.
    Incremental,
    /// Data marked in a bitmap.
    Bitmap,
}

/// `bitmap-mode`: how the bitmap's bits for copied data change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BitmapMode {
    /// Cleared if the job succeeds.
    OnSuccess,
    /// Unchanged.
    Never,
    /// Cleared for copied data, also if the job fails.
    Always,
}

/// `blockdev-mirror`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MirrorOptions {
    /// Options of copying jobs.
    pub copy: CopyOptions,
    /// `replaces`: the node that the target replaces; `None`: the source.
    pub replaces: Option<String>,
    /// `granularity`, bytes: the unit that is copied again after a write to a part of it.
    pub granularity: u64,
    /// `buf-size`, bytes of memory for data being copied.
    pub buf_size: u64,
}

/// `blockdev-backup`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BackupOptions {
    /// Options of copying jobs.
    pub copy: CopyOptions,
    /// `on-cbw-error`.
    pub on_cbw_error: OnCbwError,
    /// `bitmap`.
    pub bitmap: Option<String>,
    /// `bitmap-mode`.
    pub bitmap_mode: Option<BitmapMode>,
}

/// `blockdev-create`: the image to be created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CreateOptions {
    /// `file`.
    File {
        /// `filename`.
        filename: PathBuf,
        /// `size`, bytes.
        size: u64,
        /// `preallocation`.
        preallocation: Preallocation,
    },
}

/// `preallocation` of a file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Preallocation {
    /// Sparse.
    #[default]
    Off,
    /// Allocated.
    Falloc,
    /// Written with zeroes.
    Full,
}

/// A request to a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobVerb {
    /// `cancel`.
    Cancel {
        /// End at once. Without this, a ready mirror ends with a consistent copy.
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

/// A command about jobs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JobCommand {
    /// `blockdev-create`.
    Create(JobOptions, CreateOptions),
    /// `blockdev-backup`.
    Backup(BackupOptions),
    /// `blockdev-mirror`.
    Mirror(MirrorOptions),
    /// `query-jobs`.
    Query,
    /// `query-block-jobs`.
    QueryBlock,
    /// `job-cancel` and the like.
    Tell(String, JobVerb),
    /// `block-job-cancel` and the like.
    TellBlock(String, JobVerb),
}
