//! Operations in trace points.

use std::ffi::CStr;

use event_loop::IoOp;

/// The name of an operation: its system call, if there is one.
pub(super) fn name(op: IoOp) -> &'static CStr {
    match op {
        IoOp::Read { .. } => c"read",
        IoOp::Write { .. } => c"write",
        IoOp::Fsync { data_only: false } => c"fsync",
        IoOp::Fsync { data_only: true } => c"fdatasync",
        IoOp::Fallocate { .. } => c"fallocate",
        IoOp::Call { call, .. } => call.name,
        IoOp::Command { .. } => c"command",
        IoOp::Poll { .. } => c"poll",
    }
}

/// Offset and length of an operation; `len` is that of a read or write. Both are 0 for an fsync.
pub(super) fn range(op: IoOp, len: u64) -> (u64, u64) {
    match op {
        IoOp::Read { offset } | IoOp::Write { offset, .. } => (offset, len),
        IoOp::Fsync { .. } | IoOp::Command { .. } | IoOp::Poll { .. } => (0, 0),
        IoOp::Fallocate { offset, len, .. } | IoOp::Call { offset, len, .. } => (offset, len),
    }
}
