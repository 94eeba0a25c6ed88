//! The table of events. Messages and documentation are derived from its rows.

use super::reply::{Member, Reply};
use crate::shape::Shape;

/// An event: a row of the table.
#[derive(Debug)]
pub struct EventRow {
    /// Its name.
    pub name: &'static str,
    /// The documentation: when the event is sent, in one sentence.
    pub(crate) help: &'static str,
    /// The members of its data.
    pub(crate) data: &'static [Member],
    /// What it can say, as JSON.
    pub(crate) example: &'static str,
}

/// All events.
pub(crate) static EVENTS: &[&EventRow] = &[
    &BLOCK_EXPORT_DELETED,
    &BLOCK_IMAGE_CORRUPTED,
    &BLOCK_IO_ERROR,
    &BLOCK_WRITE_THRESHOLD,
    &JOB_STATUS_CHANGE,
    &BLOCK_JOB_READY,
    &BLOCK_JOB_PENDING,
    &BLOCK_JOB_ERROR,
    &BLOCK_JOB_COMPLETED,
    &BLOCK_JOB_CANCELLED,
];

/// An export has ended, whatever ended it.
pub static BLOCK_EXPORT_DELETED: EventRow = EventRow {
    name: "BLOCK_EXPORT_DELETED",
    help: "an export has ended, and what it used can be removed",
    data: &[Member::new("id", Reply::Text, "the export's name")],
    example: r#"{"id": "e0"}"#,
};

/// Sent when an image is found damaged.
pub static BLOCK_IMAGE_CORRUPTED: EventRow = EventRow {
    name: "BLOCK_IMAGE_CORRUPTED",
    help: "the metadata of a qcow2 image in use is damaged; sent once for each image",
    data: &[
        Member::new("device", Reply::Text, "empty: a node is no device"),
        Member::optional("node-name", Reply::Text, "the image's node"),
        Member::new("msg", Reply::Text, "what was found, for people"),
        Member::optional(
            "offset",
            Reply::Int,
            "the part of the image's file that a write was prevented to, bytes",
        ),
        Member::optional("size", Reply::Int, "bytes of that part"),
        Member::new(
            "fatal",
            Reply::Bool,
            "the image was being written: it is marked as corrupt, and all further requests fail",
        ),
    ],
    example: r#"{"device": "", "node-name": "disk0", "msg": "Unaligned L2 table", "fatal": true}"#,
};

/// A request of an export with a policy has failed.
pub static BLOCK_IO_ERROR: EventRow = EventRow {
    name: "BLOCK_IO_ERROR",
    help: "a request of an export has failed; at most one event a second for errors that do not stop the export",
    data: &[
        Member::new("qom-path", Reply::Text, "empty: an export is no object"),
        Member::new("device", Reply::Text, "the export's name"),
        Member::optional("node-name", Reply::Text, "the block node that it offers"),
        Member::new("operation", Reply::Word(&["read", "write"]), "of the request"),
        Member::new(
            "action",
            Reply::Word(&["ignore", "report", "stop"]),
            "what was done; after stop, requests are held until x-block-export-resume",
        ),
        Member::optional("nospace", Reply::Bool, "there is no space left"),
        Member::new("reason", Reply::Text, "why it failed, for people"),
    ],
    example: r#"{"qom-path": "", "device": "e0", "node-name": "disk0", "operation": "write",
        "action": "stop", "nospace": true, "reason": "No space left on device"}"#,
};

/// A write has gone beyond a node's threshold.
pub static BLOCK_WRITE_THRESHOLD: EventRow = EventRow {
    name: "BLOCK_WRITE_THRESHOLD",
    help: "a write to a node ended beyond the threshold of block-set-write-threshold, which is removed",
    data: &[
        Member::new("node-name", Reply::Text, "the node"),
        Member::new("amount-exceeded", Reply::Int, "how far beyond it the write ends, in bytes"),
        Member::new("write-threshold", Reply::Int, "the threshold, in bytes"),
    ],
    example: r#"{"node-name": "disk0", "amount-exceeded": 65536, "write-threshold": 17179869184}"#,
};

/// What a job is at.
pub const JOB_STATUS: Reply = Reply::Word(&[
    "undefined",
    "created",
    "running",
    "paused",
    "ready",
    "standby",
    "waiting",
    "pending",
    "aborting",
    "concluded",
    "null",
]);

/// What kinds of jobs there are.
pub const JOB_TYPE: Reply =
    Reply::Word(&["create", "amend", "backup", "mirror", "stream", "commit"]);

const JOB_DEVICE: Member = Member::new("device", Reply::Text, "the job's name");
const JOB_KIND: Member = Member::new("type", JOB_TYPE, "what it does");
const JOB_LEN: Member = Member::new("len", Reply::Int, "how much work there is, in bytes");
const JOB_OFFSET: Member = Member::new("offset", Reply::Int, "how much of it is done, in bytes");
const JOB_SPEED: Member = Member::new("speed", Reply::Int, "bytes a second at most; 0: no limit");

/// A job has entered a status.
pub static JOB_STATUS_CHANGE: EventRow = EventRow {
    name: "JOB_STATUS_CHANGE",
    help: "a job has entered a status",
    data: &[
        Member::new("id", Reply::Text, "the job's name"),
        Member::new("status", JOB_STATUS, "its status"),
    ],
    example: r#"{"id": "j0", "status": "running"}"#,
};

/// A mirror or commit may complete.
pub static BLOCK_JOB_READY: EventRow = EventRow {
    name: "BLOCK_JOB_READY",
    help: "the target of a mirror, or of a commit of the topmost image, is equal to its source from now on",
    data: &[JOB_DEVICE, JOB_KIND, JOB_LEN, JOB_OFFSET, JOB_SPEED],
    example: r#"{"device": "j0", "type": "mirror", "len": 1048576, "offset": 1048576, "speed": 0}"#,
};

/// A job waits for `job-finalize`.
pub static BLOCK_JOB_PENDING: EventRow = EventRow {
    name: "BLOCK_JOB_PENDING",
    help: "a job that was started with auto-finalize=false waits for job-finalize",
    data: &[Member::new("id", Reply::Text, "the job's name"), JOB_KIND],
    example: r#"{"id": "j0", "type": "mirror"}"#,
};

/// A request of a job has failed.
pub static BLOCK_JOB_ERROR: EventRow = EventRow {
    name: "BLOCK_JOB_ERROR",
    help: "a request of a job has failed",
    data: &[
        JOB_DEVICE,
        Member::new(
            "operation",
            Reply::Word(&["read", "write"]),
            "of the source, or of the target",
        ),
        Member::new(
            "action",
            Reply::Word(&["ignore", "report", "stop"]),
            "what the job does after the error",
        ),
    ],
    example: r#"{"device": "j0", "operation": "write", "action": "stop"}"#,
};

/// A job that copies has ended, well or not.
pub static BLOCK_JOB_COMPLETED: EventRow = EventRow {
    name: "BLOCK_JOB_COMPLETED",
    help: "a copying job has ended, with success or an error",
    data: &[
        JOB_DEVICE,
        JOB_KIND,
        JOB_LEN,
        JOB_OFFSET,
        JOB_SPEED,
        Member::optional("error", Reply::Text, "why it failed"),
    ],
    example: r#"{"device": "j0", "type": "mirror", "len": 1048576, "offset": 1048576, "speed": 0}"#,
};

/// A job that copies was cancelled.
pub static BLOCK_JOB_CANCELLED: EventRow = EventRow {
    name: "BLOCK_JOB_CANCELLED",
    help: "a copying job was cancelled",
    data: &[JOB_DEVICE, JOB_KIND, JOB_LEN, JOB_OFFSET, JOB_SPEED],
    example: r#"{"device": "j0", "type": "backup", "len": 1048576, "offset": 65536, "speed": 0}"#,
};

impl EventRow {
    /// What it says, as a type.
    pub(crate) fn shape(&self) -> Shape {
        Shape::Object(self.data.iter().map(Member::shape).collect())
    }
}

impl PartialEq for EventRow {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}
