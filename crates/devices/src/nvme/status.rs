//! How a command ended (section 4.6.1).

use nix::errno::Errno;

use stats::Kind;

/// Status field of a completion, without the phase tag: status code, type, and DNR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Status(u16);

/// Do Not Retry: another attempt fails as well.
const DNR: u16 = 1 << 14;

/// Status code types.
const COMMAND: u16 = 1 << 8;
const MEDIA: u16 = 2 << 8;

impl Status {
    pub(crate) const SUCCESS: Status = Status(0);
    pub(crate) const INVALID_OPCODE: Status = Status(0x01 | DNR);
    pub(crate) const INVALID_FIELD: Status = Status(0x02 | DNR);
    pub(crate) const DATA_TRANSFER_ERROR: Status = Status(0x04 | DNR);
    pub(crate) const INTERNAL_ERROR: Status = Status(0x06 | DNR);
    /// Another attempt may succeed.
    pub(crate) const ABORT_REQUESTED: Status = Status(0x07);
    pub(crate) const INVALID_NAMESPACE: Status = Status(0x0b | DNR);
    pub(crate) const SEQUENCE_ERROR: Status = Status(0x0c | DNR);
    pub(crate) const INVALID_SGL_SEGMENT: Status = Status(0x0d | DNR);
    pub(crate) const INVALID_SGL_COUNT: Status = Status(0x0e | DNR);
    pub(crate) const INVALID_SGL_LENGTH: Status = Status(0x0f | DNR);
    pub(crate) const INVALID_SGL_TYPE: Status = Status(0x11 | DNR);
    pub(crate) const INVALID_PRP_OFFSET: Status = Status(0x13 | DNR);
    pub(crate) const LBA_OUT_OF_RANGE: Status = Status(0x80 | DNR);
    pub(crate) const CAPACITY_EXCEEDED: Status = Status(0x81 | DNR);

    pub(crate) const INVALID_COMPLETION_QUEUE: Status = Status(COMMAND | DNR);
    pub(crate) const INVALID_QUEUE_ID: Status = Status(COMMAND | 0x01 | DNR);
    pub(crate) const INVALID_QUEUE_SIZE: Status = Status(COMMAND | 0x02 | DNR);
    pub(crate) const TOO_MANY_EVENT_REQUESTS: Status = Status(COMMAND | 0x05 | DNR);
    pub(crate) const INVALID_VECTOR: Status = Status(COMMAND | 0x08 | DNR);
    pub(crate) const INVALID_LOG_PAGE: Status = Status(COMMAND | 0x09 | DNR);
    pub(crate) const INVALID_QUEUE_DELETION: Status = Status(COMMAND | 0x0c | DNR);
    pub(crate) const NOT_SAVEABLE: Status = Status(COMMAND | 0x0d | DNR);
    pub(crate) const NOT_CHANGEABLE: Status = Status(COMMAND | 0x0e | DNR);
    pub(crate) const READ_ONLY: Status = Status(COMMAND | 0x82 | DNR);

    pub(crate) const WRITE_FAULT: Status = Status(MEDIA | 0x80 | DNR);
    pub(crate) const READ_ERROR: Status = Status(MEDIA | 0x81 | DNR);
    pub(crate) const COMPARE_FAILURE: Status = Status(MEDIA | 0x85 | DNR);

    /// Returns the status for a request that the node has failed.
    pub(crate) fn of(errno: Errno, kind: Kind) -> Status {
        match (errno, kind) {
            (Errno::ENOSPC | Errno::EDQUOT, _) => Status::CAPACITY_EXCEEDED,
            (Errno::EPERM | Errno::EROFS, _) => Status::READ_ONLY,
            (Errno::EIO, Kind::Read) => Status::READ_ERROR,
            (Errno::EIO, Kind::Write | Kind::WriteZeroes) => Status::WRITE_FAULT,
            _ => Status::INTERNAL_ERROR,
        }
    }

    /// Status code and type, as trace events have them.
    pub(crate) fn code_and_type(self) -> u16 {
        self.0 & 0x7ff
    }

    /// The field with its phase tag, as it is in bits 31:16 of a completion's last word.
    pub(crate) fn with_phase(self, phase: bool) -> u16 {
        self.0 << 1 | u16::from(phase)
    }

    pub(crate) fn is_success(self) -> bool {
        self == Status::SUCCESS
    }

    /// Whether data was damaged or lost: what the SMART log counts.
    pub(crate) fn is_media_error(self) -> bool {
        self.0 >> 8 & 7 == 2 && self != Status::COMPARE_FAILURE
    }
}

/// A completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Answer {
    /// Dword 0.
    pub(crate) result: u32,
    pub(crate) status: Status,
}

impl From<Status> for Answer {
    fn from(status: Status) -> Self {
        Answer { result: 0, status }
    }
}
