//! A job: its status, the requests that it accepts in each status, and its events.

use std::sync::Arc;

use block::job::{Backup, Bitmap, Control};
use block::node::{BackingName, BlockNode};
use block::track::DirtyBitmap;
use control::qmp::QmpError;
use control::qmp::events::{EventRow, JOB_STATUS_CHANGE};
use event_loop::{mailbox, oneshot};
use serde_json::{Value as Json, json};

use super::super::monitor::Clients;
use super::options::{BitmapMode, CopyOptions, JobOptions, JobVerb};
use super::worker::Order;

/// What a job is at: QEMU's `JobStatus`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    Created,
    Running,
    Paused,
    Ready,
    Standby,
    Waiting,
    Pending,
    Aborting,
    Concluded,
    Null,
}

impl Status {
    fn name(self) -> &'static str {
        match self {
            Status::Created => "created",
            Status::Running => "running",
            Status::Paused => "paused",
            Status::Ready => "ready",
            Status::Standby => "standby",
            Status::Waiting => "waiting",
            Status::Pending => "pending",
            Status::Aborting => "aborting",
            Status::Concluded => "concluded",
            Status::Null => "null",
        }
    }

    /// Whether a job that is at this takes the order: QEMU's table of verbs.
    fn takes(self, verb: JobVerb) -> bool {
        use Status::{Created, Paused, Pending, Ready, Running, Standby, Waiting};
        match verb {
            JobVerb::Cancel { .. } => {
                matches!(self, Created | Running | Paused | Ready | Standby | Waiting | Pending)
            }
            JobVerb::Pause | JobVerb::Resume | JobVerb::SetSpeed(_) => {
                matches!(self, Created | Running | Paused | Ready | Standby)
            }
            JobVerb::Complete => matches!(self, Ready | Standby),
            JobVerb::Finalize => self == Pending,
            JobVerb::Dismiss => self == Status::Concluded,
        }
    }
}

fn verb_name(verb: JobVerb) -> &'static str {
    match verb {
        JobVerb::Cancel { .. } => "cancel",
        JobVerb::Pause => "pause",
        JobVerb::Resume => "resume",
        JobVerb::Complete => "complete",
        JobVerb::Finalize => "finalize",
        JobVerb::Dismiss => "dismiss",
        JobVerb::SetSpeed(_) => "set-speed",
    }
}

/// A job.
pub(in super::super) struct Job {
    /// Of all jobs there ever were; another one may come to have the same name.
    pub(super) serial: u64,
    pub(super) options: JobOptions,
    pub(super) status: Status,
    /// Why it failed.
    pub(super) error: Option<String>,
    pub(super) work: Work,
}

/// What a job does.
pub(super) enum Work {
    /// `blockdev-create`.
    Create { done: bool },
    /// Those that copy.
    Copy(Box<Copying>),
}

/// A job that copies a node to another one.
pub(super) struct Copying {
    pub(super) source: String,
    pub(super) target: String,
    pub(super) control: Arc<Control>,
    pub(super) how: How,
    /// `None` once it has ended.
    pub(super) open: Option<Open>,
    pub(super) speed: i64,
    pub(super) user_paused: bool,
    /// Why it was paused, if by an error.
    pub(super) io_status: &'static str,
}

impl Copying {
    /// A job that has nothing open yet.
    pub(super) fn new(options: CopyOptions, how: How) -> Copying {
        Copying {
            source: options.device,
            target: options.target,
            control: Arc::new(Control::new(options.speed.unsigned_abs())),
            how,
            open: None,
            speed: options.speed,
            user_paused: false,
            io_status: "ok",
        }
    }
}

/// What a job that copies has open.
pub(super) struct Open {
    /// What lies above the source meanwhile, if anything does.
    pub(super) filter: Option<Arc<dyn BlockNode>>,
    pub(super) orders: mailbox::Sender<Order>,
    /// Completes when the worker has closed both nodes.
    pub(super) closed: oneshot::Receiver<()>,
}

/// How a job copies.
pub(super) enum How {
    /// A copy of each part, and the bytes of the disk.
    Parts(Parts, Backup, u64),
    Mirror {
        dirty: Arc<Bitmap>,
        /// `mirror`, or `commit` of the topmost image.
        kind: &'static str,
        /// The node whose place the target takes; `None`: it is left alone.
        replaces: Option<String>,
    },
}

/// A job that copies each part once.
pub(super) enum Parts {
    Backup(Option<BitmapUse>),
    Stream(ChainEnd),
    Commit(ChainEnd),
}

impl Parts {
    fn kind(&self) -> &'static str {
        match self {
            Parts::Backup(_) => "backup",
            Parts::Stream(_) => "stream",
            Parts::Commit(_) => "commit",
        }
    }
}

/// A dirty bitmap that a backup goes by.
pub(super) struct BitmapUse {
    bitmap: Arc<DirtyBitmap>,
    mode: BitmapMode,
    /// The bitmap says what is copied.
    selects: bool,
    /// The bits that it had when the job began.
    before: Option<Bitmap>,
}

impl BitmapUse {
    pub(super) fn new(bitmap: Arc<DirtyBitmap>, mode: BitmapMode, selects: bool) -> BitmapUse {
        BitmapUse { bitmap, mode, selects, before: None }
    }

    /// The job begins: no request is under way. Writes set bits for the next job from now on.
    pub(super) fn begin(&mut self, backup: &Backup) {
        self.bitmap.set_busy(true);
        let before = self.bitmap.bits().take();
        if self.selects {
            backup.add(&before);
        }
        self.before = Some(before);
    }

    /// The job has ended.
    pub(super) fn end(&mut self, backup: &Backup, succeeded: bool) {
        self.bitmap.set_busy(false);
        let Some(before) = self.before.take() else { return };
        match (self.mode, succeeded) {
            (BitmapMode::OnSuccess | BitmapMode::Always, true) => {}
            (BitmapMode::Always, false) => backup.note_left(self.bitmap.bits()),
            (BitmapMode::OnSuccess, false) | (BitmapMode::Never, _) => {
                self.bitmap.bits().merge(&before);
            }
        }
    }
}

/// What the end of a job changes in a chain of images.
pub(super) struct ChainEnd {
    /// The image that gets another one behind it. `None`: the chain stays as it is.
    pub(super) overlay: Option<String>,
    /// That one.
    pub(super) base: Option<String>,
    /// Those between.
    pub(super) dropped: Vec<String>,
    /// How the overlay's header is to name the base.
    pub(super) name: Option<BackingName>,
    /// A node that is only written to by the job.
    pub(super) read_only_again: Option<String>,
}

impl How {
    pub(super) fn kind(&self) -> &'static str {
        match self {
            How::Parts(parts, ..) => parts.kind(),
            How::Mirror { kind, .. } => kind,
        }
    }
}

impl Job {
    pub(super) fn kind(&self) -> &'static str {
        match &self.work {
            Work::Create { .. } => "create",
            Work::Copy(copying) => copying.how.kind(),
        }
    }

    pub(super) fn copying(&self) -> Option<&Copying> {
        match &self.work {
            Work::Copy(copying) => Some(copying),
            Work::Create { .. } => None,
        }
    }

    pub(super) fn copying_mut(&mut self) -> Option<&mut Copying> {
        match &mut self.work {
            Work::Copy(copying) => Some(copying),
            Work::Create { .. } => None,
        }
    }

    /// Enters a status and tells all clients.
    pub(super) fn enter(&mut self, status: Status, clients: &Clients) {
        self.status = status;
        let data = json!({"status": status.name(), "id": self.options.id});
        clients.tell(&JOB_STATUS_CHANGE, data);
    }

    /// Whether the order can be given now.
    pub(super) fn check(&self, verb: JobVerb) -> Result<(), QmpError> {
        if self.status.takes(verb) {
            return Ok(());
        }
        Err(QmpError::generic(format!(
            "Job '{}' in state '{}' cannot accept command verb '{}'",
            self.options.id,
            self.status.name(),
            verb_name(verb)
        )))
    }

    /// How much is done, and how much there is.
    fn progress(&self) -> (u64, u64) {
        match &self.work {
            Work::Create { done } => (u64::from(*done), 1),
            Work::Copy(copying) => match &copying.how {
                How::Parts(_, backup, size) => (size.saturating_sub(backup.left()), *size),
                How::Mirror { dirty, .. } => {
                    let copied = copying.control.copied();
                    (copied, copied + dirty.bytes())
                }
            },
        }
    }

    /// QEMU's `JobInfo`.
    pub(super) fn info(&self) -> Json {
        let (current, total) = self.progress();
        let mut info = json!({
            "id": self.options.id,
            "type": self.kind(),
            "status": self.status.name(),
            "current-progress": current,
            "total-progress": total,
        });
        if let Some(error) = &self.error {
            info["error"] = error.as_str().into();
        }
        info
    }

    /// QEMU's `BlockJobInfo`, of those that copy.
    pub(super) fn block_info(&self) -> Option<Json> {
        let copying = self.copying()?;
        let (offset, len) = self.progress();
        let mut info = json!({
            "device": self.options.id,
            "type": self.kind(),
            "status": self.status.name(),
            "len": len,
            "offset": offset,
            "speed": copying.speed,
            "busy": false,
            "paused": copying.user_paused,
            "ready": matches!(self.status, Status::Ready | Status::Standby),
            "io-status": copying.io_status,
            "auto-finalize": self.options.auto_finalize,
            "auto-dismiss": self.options.auto_dismiss,
        });
        if let How::Mirror { kind: "mirror", .. } = copying.how {
            info["actively-synced"] = false.into();
        }
        if let Some(error) = &self.error {
            info["error"] = error.as_str().into();
        }
        Some(info)
    }

    /// Tells all clients of a job that copies, by one of the events `BLOCK_JOB_*`.
    pub(super) fn tell(&self, event: &'static EventRow, clients: &Clients) {
        let Some(copying) = self.copying() else { return };
        let (offset, len) = self.progress();
        let mut data = json!({
            "device": self.options.id,
            "type": self.kind(),
            "len": len,
            "offset": offset,
            "speed": copying.speed,
        });
        if let Some(error) = &self.error {
            data["error"] = error.as_str().into();
        }
        clients.tell(event, data);
    }
}
