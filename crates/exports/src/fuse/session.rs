//! What a request asks of the node, by the file's attributes at this moment. Nothing here does I/O.

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

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Todo {
    /// Answer at once.
    Answer(Answer),
    /// There is no answer.
    Nothing,
    /// A request to the node; then the answer.
    Node {
        /// What.
        op: Op,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// If it succeeds.
        then: Answer,
    },
    /// Look for data, or a hole, from `offset` to `end`.
    Seek {
        /// A hole, not data.
        hole: bool,
        /// First byte.
        offset: u64,
        /// The file's end.
        end: u64,
    },
    /// Give the node this size, then look at the request again.
    Grow(u64),
    /// Give the node this size, and change the attributes.
    Truncate(u64, SetAttributes),
}

/// Returns what a request asks for. `through`: what is written is to be on stable storage before the answer.
/// `grown`: the node was just given another size for this request, and is not to be again.
pub fn judge(request: Request, file: &FileAttributes, through: bool, grown: bool) -> Todo {
    let error = |errno| Todo::Answer(Answer::Error(errno));
    let flush = Todo::Node { op: Op::Flush, offset: 0, len: 0, then: Answer::Done };
    match request {
        Request::Init(kernel) if !kernel.is_served() => error(Errno::EPROTO),
        Request::Init(kernel) => {
            Todo::Answer(Answer::Init { kernel, keeps_size: !file.growable || !file.writable })
        }
        Request::GetAttributes => Todo::Answer(Answer::Attributes(file.get())),
        Request::SetAttributes(change) => match (file.check(&change), change.size) {
            (Err(errno), _) => error(errno),
            (Ok(()), Some(size)) => match size.checked_next_multiple_of(SECTOR) {
                Some(size) => Todo::Truncate(size, change),
                None => error(Errno::EFBIG),
            },
            (Ok(()), None) => {
                file.change(&change);
                Todo::Answer(Answer::Attributes(file.get()))
            }
        },
        Request::Open => {
            file.opened();
            Todo::Answer(Answer::Opened)
        }
        // `connection` counts it.
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
                // As of a block device: a count of 0 has programs try again for ever.
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
        // INTERRUPT is among these: the kernel then sends no more, and waits for the answers themselves.
        // POLL as well: the kernel then takes the file for always ready.
        Request::Unknown(_) => error(Errno::ENOSYS),
    }
}

/// The end of a range that a file can have.
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
        // Room at the end only: the node has no request that keeps data and takes up space.
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
        // Every file ends with a hole.
        () if hole && offset == size => Todo::Answer(Answer::Position(size)),
        () => Todo::Answer(Answer::Error(Errno::ENXIO)),
    }
}

/// What a request is counted as, and its range.
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
