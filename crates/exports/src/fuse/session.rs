//! The action for a request, from the file's present attributes. No I/O.

#![forbid(unsafe_code)]

use block::request::Op;
use nix::errno::Errno;
use nix::libc;
use stats::Kind;

use super::FileAttributes;
use super::wire::{Answer, Request, SetAttributes};

/// `FALLOC_FL_*`.
const KEEP_SIZE: u32 = libc::FALLOC_FL_KEEP_SIZE.cast_unsigned();
const PUNCH_HOLE: u32 = libc::FALLOC_FL_PUNCH_HOLE.cast_unsigned();
const ZERO_RANGE: u32 = libc::FALLOC_FL_ZERO_RANGE.cast_unsigned();

/// Sizes of nodes are multiples of this, bytes.
const SECTOR: u64 = 512;

/// An action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Todo {
    /// Answer at once.
    Answer(Answer),
    /// Send no answer.
    Nothing,
    /// Send a request to the node, then the answer.
    Node {
        /// The operation.
        op: Op,
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// The answer after success.
        then: Answer,
    },
    /// Search for data or a hole between `offset` and `end`.
    Seek {
        /// Search for a hole, not for data.
        hole: bool,
        /// First byte.
        offset: u64,
        /// The file's end.
        end: u64,
    },
    /// Answer with the file's attributes.
    Describe,
    /// Resize the node, then judge the request again.
    Grow(u64),
    /// Resize the node, and change the attributes.
    Truncate(u64, SetAttributes),
}

/// Returns the action for a request.
///
/// `through`: written data is durable before the answer. `grown`: the node was just resized for
/// this request and must not be resized again.
pub fn judge(request: Request, file: &FileAttributes, through: bool, grown: bool) -> Todo {
    let error = |errno| Todo::Answer(Answer::Error(errno));
    let flush = Todo::Node { op: Op::Flush, offset: 0, len: 0, then: Answer::Done };
    match request {
        Request::Init(kernel) if !kernel.is_served() => error(Errno::EPROTO),
        // As QSD 11.1. QSD 10.0 keeps the size of growable disks, too.
        Request::Init(kernel) => {
            Todo::Answer(Answer::Init { kernel, keeps_size: !file.growable || !file.writable })
        }
        Request::GetAttributes => Todo::Describe,
        Request::SetAttributes(change) => match (file.check(&change), change.size) {
            (Err(errno), _) => error(errno),
            (Ok(()), Some(size)) => match size.checked_next_multiple_of(SECTOR) {
                Some(size) => Todo::Truncate(size, change),
                None => error(Errno::EFBIG),
            },
            (Ok(()), None) => {
                file.change(&change);
                Todo::Describe
            }
        },
        Request::Open => {
            file.opened();
            Todo::Answer(Answer::Opened)
        }
        // `connection` does the counting.
        Request::Release => Todo::Answer(Answer::Done),
        Request::Read { offset, len } => {
            let len = u64::from(len).min(file.size().saturating_sub(offset));
            match u32::try_from(len) {
                Ok(bytes) if bytes > 0 => {
                    Todo::Node { op: Op::Read, offset, len, then: Answer::Data(bytes) }
                }
                _ => Todo::Answer(Answer::Data(0)),
            }
        }
        Request::Write { .. } | Request::Fallocate { .. } if !file.writable => error(Errno::EACCES),
        Request::Write { len: 0, .. } => Todo::Answer(Answer::Written(0)),
        Request::Write { offset, len, sync } => {
            let size = file.size();
            let Some(end) = end_of(offset, len.into()) else { return error(Errno::EFBIG) };
            if end > size && file.growable && !grown {
                return Todo::Grow(end.next_multiple_of(SECTOR));
            }
            let len = u64::from(len).min(size.saturating_sub(offset));
            let op = Op::Write { fua: sync || through };
            match u32::try_from(len) {
                Ok(bytes) if bytes > 0 => {
                    Todo::Node { op, offset, len, then: Answer::Written(bytes) }
                }
                // As for a block device: after a count of 0, programs would repeat the write for ever.
                _ => error(Errno::ENOSPC),
            }
        }
        Request::Flush if !file.writable => Todo::Answer(Answer::Done),
        Request::Fsync if !file.writable => Todo::Answer(Answer::Done),
        Request::Flush | Request::Fsync => flush,
        Request::Fallocate { offset, len, mode } => {
            fallocate((offset, len, mode), file, through, grown)
        }
        Request::Seek { offset, whence } => seek(offset, whence, file.size()),
        Request::FileSystem => Todo::Answer(Answer::FileSystem),
        Request::Forget => Todo::Nothing,
        Request::Destroy => Todo::Answer(Answer::Done),
        // Among these are INTERRUPT, after which the kernel sends no more of them and waits for the answers,
        // and POLL, after which it considers the file always ready.
        Request::Unknown(_) => error(Errno::ENOSYS),
    }
}

/// The end of a range, if a file can have it.
fn end_of(offset: u64, len: u64) -> Option<u64> {
    let end = offset.checked_add(len)?.checked_next_multiple_of(SECTOR)?;
    i64::try_from(end).ok()?;
    offset.checked_add(len)
}

fn fallocate(
    (offset, len, mode): (u64, u64, u32),
    file: &FileAttributes,
    through: bool,
    grown: bool,
) -> Todo {
    let error = |errno| Todo::Answer(Answer::Error(errno));
    let size = file.size();
    let Some(end) = end_of(offset, len) else { return error(Errno::EFBIG) };
    let grow = Todo::Grow(end.next_multiple_of(SECTOR));
    let may_unmap = match mode {
        // Only growth at the end: no request of a node allocates space and keeps the data.
        0 if grown => return Todo::Answer(Answer::Done),
        0 if len > 0 && offset >= size => return grow,
        ZERO_RANGE if end > size && !grown => return grow,
        ZERO_RANGE => false,
        mode if mode == ZERO_RANGE | KEEP_SIZE => false,
        mode if mode == PUNCH_HOLE | KEEP_SIZE => true,
        _ => return error(Errno::EOPNOTSUPP),
    };
    let len = len.min(size.saturating_sub(offset));
    if len == 0 {
        return Todo::Answer(Answer::Done);
    }
    let op = Op::WriteZeroes { may_unmap, no_fallback: false, fua: through };
    Todo::Node { op, offset, len, then: Answer::Done }
}

fn seek(offset: u64, whence: u32, size: u64) -> Todo {
    let hole = match whence.cast_signed() {
        libc::SEEK_DATA => false,
        libc::SEEK_HOLE => true,
        _ => return Todo::Answer(Answer::Error(Errno::EINVAL)),
    };
    match () {
        () if offset < size => Todo::Seek { hole, offset, end: size },
        // Every file ends with an implicit hole.
        () if hole && offset == size => Todo::Answer(Answer::Position(size)),
        () => Todo::Answer(Answer::Error(Errno::ENXIO)),
    }
}

/// The kind and range of a request for the statistics.
pub(super) fn counted(request: &Request) -> (Kind, u64, u64) {
    match *request {
        Request::Read { offset, len } => (Kind::Read, offset, len.into()),
        Request::Write { offset, len, .. } => (Kind::Write, offset, len.into()),
        Request::Flush | Request::Fsync => (Kind::Flush, 0, 0),
        Request::Fallocate { offset, len, .. } => (Kind::WriteZeroes, offset, len),
        Request::Init(_)
        | Request::GetAttributes
        | Request::SetAttributes(_)
        | Request::Open
        | Request::Release
        | Request::Seek { .. }
        | Request::FileSystem
        | Request::Forget
        | Request::Destroy
        | Request::Unknown(_) => (Kind::Other, 0, 0),
    }
}
