//! Operations as trace points tell of them.

use std::ffi::CStr;

use event_loop::IoOp;

/// The name of an operation, after the system call where it is one.
pub(super) fn name(op: IoOp) -> &'static CStr {
    match op {
        IoOp::Read { .. } => c"read",
        IoOp::Write { .. } => c"write",
        IoOp::Fsync { data_only: false } => c"fsync",
        IoOp::Fsync { data_only: true } => c"fdatasync",
        IoOp::Fallocate { .. } => c"fallocate",
        IoOp::Extents { .. } => c"lseek",
        IoOp::BlkDiscard { .. } => c"BLKDISCARD",
        IoOp::BlkZeroOut { .. } => c"BLKZEROOUT",
    }
}

/// Its first byte, and how many there are, `len` of a read or write; of an fsync neither.
pub(super) fn range(op: IoOp, len: u64) -> (u64, u64) {
    match op {
        IoOp::Read { offset } | IoOp::Write { offset, .. } => (offset, len),
        IoOp::Fsync { .. } => (0, 0),
        IoOp::Fallocate { offset, len, .. }
        | IoOp::Extents { offset, len }
        | IoOp::BlkDiscard { offset, len }
        | IoOp::BlkZeroOut { offset, len } => (offset, len),
    }
}
