//! What jobs are started with.

use std::path::PathBuf;

pub use block::job::{OnCbwError, OnError};
use block::options::RbdOptions;

/// What all jobs have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobOptions {
    /// `job-id`.
    pub id: String,
    /// `auto-finalize`: whether it makes its changes as soon as it can.
    pub auto_finalize: bool,
    /// `auto-dismiss`: whether it goes when it has ended.
    pub auto_dismiss: bool,
}

impl Default for JobOptions {
    fn default() -> Self {
        JobOptions { id: String::new(), auto_finalize: true, auto_dismiss: true }
    }
}

/// What jobs that copy a node have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CopyOptions {
    /// The job's own.
    pub job: JobOptions,
    /// `device`: the source's name.
    pub device: String,
    /// `target`: its name.
    pub target: String,
    /// `sync`.
    pub sync: Sync,
    /// `speed`, bytes a second; 0: as fast as it goes.
    pub speed: i64,
    /// `on-source-error`.
    pub on_source_error: OnError,
    /// `on-target-error`.
    pub on_target_error: OnError,
    /// `filter-node-name`: of the node that is put above the source.
    pub filter_node_name: Option<String>,
}

/// `sync`: what is copied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Sync {
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
pub enum BitmapMode {
    /// Cleared if the job succeeds.
    OnSuccess,
    /// They stay.
    Never,
    /// Cleared of what was copied, also if the job fails.
    Always,
}

/// `blockdev-mirror`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MirrorOptions {
    /// As of each copy.
    pub copy: CopyOptions,
    /// `replaces`: the node whose place the target takes; `None`: the source.
    pub replaces: Option<String>,
    /// `granularity`, bytes: what is copied again when a byte of it is written.
    pub granularity: u64,
    /// `buf-size`, bytes of memory for what is being copied.
    pub buf_size: u64,
}

/// `blockdev-backup`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BackupOptions {
    /// As of each copy.
    pub copy: CopyOptions,
    /// `on-cbw-error`.
    pub on_cbw_error: OnCbwError,
    /// `bitmap`.
    pub bitmap: Option<String>,
    /// `bitmap-mode`.
    pub bitmap_mode: Option<BitmapMode>,
}

/// `blockdev-create`: an image to be made.
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
pub enum Preallocation {
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
pub enum JobVerb {
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
