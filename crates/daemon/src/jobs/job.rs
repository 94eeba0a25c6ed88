//! A job: its status, the requests that it accepts in each status, and its events.

use std::sync::Arc;

use block::graph::Drained;
use block::job::{Backup, Bitmap, Control, Failure, Side, Turns};
use block::node::{BackingName, BlockNode, NoWaiting};
use block::track::DirtyBitmap;
use control::qmp::QmpError;
use control::qmp::events::{EventRow, JOB_STATUS_CHANGE};
use event_loop::{mailbox, oneshot};
use serde_json::{Value as Json, json};

use super::super::DaemonError;
use super::super::errno::strerror;
use super::super::monitor::Clients;
use super::options::{BitmapMode, CopyOptions, JobOptions, JobVerb};
use super::worker::Order;

/// The status of a job: QEMU's `JobStatus`.
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

    /// Returns whether a job accepts the order in this status: QEMU's table of verbs.
    fn takes(self, verb: JobVerb) -> bool {
        use Status::{Created, Paused, Pending, Ready, Running, Standby, Waiting};
        match verb {
            JobVerb::Cancel { .. } => {
                matches!(self, Created | Running | Paused | Ready | Standby | Waiting | Pending)
            }
            JobVerb::Pause | JobVerb::Resume | JobVerb::SetSpeed(_) | JobVerb::Change { .. } => {
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
        JobVerb::Change { .. } => "change",
    }
}

/// Why a job fails.
#[derive(Debug)]
pub(super) struct Why {
    /// What failed, for the log: empty, or with a colon at its end.
    step: &'static str,
    /// The error that clients get.
    pub(super) error: String,
}

impl From<String> for Why {
    fn from(error: String) -> Why {
        Why { step: "", error }
    }
}

impl From<DaemonError> for Why {
    fn from(error: DaemonError) -> Why {
        error.message.into()
    }
}

impl From<Failure> for Why {
    fn from(failure: Failure) -> Why {
        let step = match failure.side {
            Side::Source => "reading the source: ",
            Side::Target => "writing the target: ",
        };
        Why { step, error: strerror(failure.errno) }
    }
}

/// Sends `JOB_STATUS_CHANGE` to all clients.
pub(super) fn tell_status(id: &str, status: Status, clients: &Clients) {
    clients.tell(&JOB_STATUS_CHANGE, json!({"status": status.name(), "id": id}));
}

/// A job.
pub(in super::super) struct Job {
    /// Unique among all jobs since the start. The name of an ended job may be reused.
    pub(super) serial: u64,
    pub(super) options: JobOptions,
    pub(super) status: Status,
    /// The reason of the failure.
    pub(super) error: Option<String>,
    /// It was cancelled, which is no failure to the events.
    pub(super) cancelled: bool,
    /// The jobs that end together with this one have the same number. `None`: it ends alone, or has ended.
    pub(super) group: Option<u64>,
    pub(super) work: Work,
}

/// The work of a job.
pub(super) enum Work {
    /// `blockdev-create` and `x-blockdev-amend`: the job's type, whether the work is done, and the nodes that are open only for
    /// it.
    Image { kind: &'static str, done: bool, own: Vec<String> },
    /// A job that copies a node.
    Copy(Box<Copying>),
}

/// The state of a job that copies a node to another node.
pub(super) struct Copying {
    pub(super) source: String,
    pub(super) target: String,
    pub(super) control: Arc<Control>,
    pub(super) how: How,
    /// `None` before the copy begins and after its end.
    pub(super) open: Option<Open>,
    pub(super) speed: i64,
    pub(super) user_paused: bool,
    /// QEMU's `io-status`: `ok`, or the kind of error that paused the job.
    pub(super) io_status: &'static str,
    /// It was cancelled: its requests do not wait for a server.
    pub(super) no_waiting: Option<NoWaiting>,
    /// The users of a mirror between the copy of the rest and the switch.
    pub(super) stopped: Option<Stopped>,
}

/// Users that have no requests in flight while a mirror's sides are the same.
pub(super) struct Stopped {
    /// The users of the mirror's filter.
    pub(super) users: Drained,
    /// The users of the node that is replaced, if that is not the source.
    pub(super) elsewhere: Option<Drained>,
}

impl Copying {
    /// Returns the state before the copy begins.
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
            no_waiting: None,
            stopped: None,
        }
    }
}

/// The filter and the worker of a job that copies.
pub(super) struct Open {
    /// The filter above the source, if the job needs one.
    pub(super) filter: Option<Arc<dyn BlockNode>>,
    pub(super) orders: mailbox::Sender<Order>,
    /// Completes when the worker has closed both nodes.
    pub(super) closed: oneshot::Receiver<()>,
}

/// How a job copies.
pub(super) enum How {
    /// Each part is copied once. The number is the total of bytes to copy.
    Parts(Parts, Backup, u64),
    Mirror {
        dirty: Arc<Bitmap>,
        /// Whether writes wait for the target: `copy-mode`.
        turns: Arc<Turns>,
        /// `mirror`, or `commit` of the topmost image.
        kind: &'static str,
        /// The node that the target replaces. `None`: no node is replaced.
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

/// The dirty bitmap of a backup.
pub(super) struct BitmapUse {
    bitmap: Arc<DirtyBitmap>,
    mode: BitmapMode,
    /// The bitmap selects the parts to copy.
    selects: bool,
    /// The bits at the start of the job.
    before: Option<Bitmap>,
}

impl BitmapUse {
    pub(super) fn new(bitmap: Arc<DirtyBitmap>, mode: BitmapMode, selects: bool) -> BitmapUse {
        BitmapUse { bitmap, mode, selects, before: None }
    }

    /// Takes the bits at the start of the job, while no request is in flight.
    ///
    /// Later writes set bits for the next job.
    pub(super) fn begin(&mut self, backup: &Backup) {
        let before = self.bitmap.lend();
        if self.selects {
            backup.add(&before);
        }
        self.before = Some(before);
    }

    /// Sets the taken bits again: the job never runs.
    pub(super) fn undo(&mut self) {
        if let Some(before) = self.before.take() {
            self.bitmap.bits().merge(&before);
        }
    }

    /// Keeps the taken bits cleared, or sets them again, by the mode and the job's result.
    pub(super) fn end(&mut self, backup: &Backup, succeeded: bool) {
        self.bitmap.end_loan();
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

/// The change that the end of a job makes to a chain of images.
pub(super) struct ChainEnd {
    /// The image that gets another backing image. `None`: the chain does not change.
    pub(super) overlay: Option<String>,
    /// The new backing image. `None`: the overlay gets no backing image.
    pub(super) base: Option<String>,
    /// The images between the overlay and the base. They leave the chain.
    pub(super) dropped: Vec<String>,
    /// The name of the base in the overlay's header.
    pub(super) name: Option<BackingName>,
    /// The node to make read-only after the job, if only the job writes to it.
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
            Work::Image { kind, .. } => kind,
            Work::Copy(copying) => copying.how.kind(),
        }
    }

    /// Logs the reason of its failure. A client may not wait for the job, or not ask why.
    pub(super) fn warn(&self, Why { step, error }: &Why) {
        let nodes = match self.copying() {
            None => String::new(),
            Some(Copying { source, target, .. }) => format!(" of node '{source}' to '{target}'"),
        };
        log::warn!("job '{}': {}{nodes} failed: {step}{error}", self.options.id, self.kind());
    }

    pub(super) fn copying(&self) -> Option<&Copying> {
        match &self.work {
            Work::Copy(copying) => Some(copying),
            Work::Image { .. } => None,
        }
    }

    pub(super) fn copying_mut(&mut self) -> Option<&mut Copying> {
        match &mut self.work {
            Work::Copy(copying) => Some(copying),
            Work::Image { .. } => None,
        }
    }

    /// Returns whether its copying was cancelled. The worker may report later.
    pub(super) fn is_cancelled(&self) -> bool {
        self.copying().is_some_and(|copying| copying.control.is_cancelled())
    }

    /// Enters a status and sends `JOB_STATUS_CHANGE` to all clients.
    pub(super) fn enter(&mut self, status: Status, clients: &Clients) {
        self.status = status;
        tell_status(&self.options.id, status, clients);
    }

    /// Checks that the job accepts the order in its current status.
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

    /// Returns the finished work and the total: in bytes, or of 1 for an image as a whole.
    pub(super) fn progress(&self) -> (u64, u64) {
        match &self.work {
            Work::Image { done, .. } => (u64::from(*done), 1),
            Work::Copy(copying) => match &copying.how {
                How::Parts(_, backup, size) => (backup.done(*size), *size),
                How::Mirror { dirty, .. } => {
                    let copied = copying.control.copied();
                    (copied, copied + dirty.bytes())
                }
            },
        }
    }

    /// Why its result is incomplete.
    fn error(&self) -> Option<&str> {
        self.error.as_deref().or(self.cancelled.then_some("Operation canceled"))
    }

    /// Returns QEMU's `JobInfo`.
    pub(super) fn info(&self) -> Json {
        let (current, total) = self.progress();
        let mut info = json!({
            "id": self.options.id,
            "type": self.kind(),
            "status": self.status.name(),
            "current-progress": current,
            "total-progress": total,
        });
        if let Some(error) = self.error() {
            info["error"] = error.into();
        }
        info
    }

    /// Returns QEMU's `BlockJobInfo`. `None`: the job does not copy.
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
            "busy": copying.control.is_busy(),
            "paused": copying.user_paused,
            "ready": matches!(self.status, Status::Ready | Status::Standby),
            "io-status": copying.io_status,
            "auto-finalize": self.options.auto_finalize,
            "auto-dismiss": self.options.auto_dismiss,
        });
        if let How::Mirror { kind: "mirror", dirty, turns, .. } = &copying.how {
            let is_ready = matches!(self.status, Status::Ready | Status::Standby);
            let is_synced = turns.is_blocking() && is_ready && dirty.bytes() == 0;
            info["actively-synced"] = is_synced.into();
        }
        if let Some(error) = self.error() {
            info["error"] = error.into();
        }
        Some(info)
    }

    /// Sends one of the events `BLOCK_JOB_*` to all clients, if the job copies.
    pub(super) fn tell(&self, event: &'static EventRow, clients: &Clients) {
        let Some(copying) = self.copying() else { return };
        let (offset, len) = self.progress();
        // In QSD's order, in which tests of QEMU compare the text.
        let mut data = json!({
            "device": self.options.id,
            "len": len,
            "offset": offset,
            "speed": copying.speed,
            "type": self.kind(),
        });
        if let Some(error) = &self.error {
            data["error"] = error.as_str().into();
        }
        clients.tell(event, data);
    }
}
