//! How a range becomes zero without zeroes being written, and how space is given back.

use std::sync::atomic::AtomicBool;

use event_loop::IoOp;
use nix::errno::Errno;
use nix::libc::{FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE, FALLOC_FL_ZERO_RANGE};

use super::{Capabilities, FileNode, Kind, calls};
use crate::options::Discard;

/// A call that zeroes a range, best first. fallocate(2) works on block devices too (since Linux
/// 4.9), and there it is the call that goes through the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Method {
    /// `FALLOC_FL_PUNCH_HOLE`: gives the space back.
    Punch,
    /// `FALLOC_FL_ZERO_RANGE`: keeps it.
    ZeroRange,
    /// The ioctl of block devices.
    BlkZeroOut,
}

impl Method {
    /// The best one left; `None`: zeroes have to be written. `extends`: the file has to reach as far
    /// as the range afterwards, as with a write.
    pub(crate) fn best(node: &FileNode, may_unmap: bool, extends: bool) -> Option<Method> {
        let unmap = may_unmap && node.discard == Discard::Unmap && !extends;
        let is_there = |m: &Method| match m {
            Method::Punch if !unmap => false,
            Method::BlkZeroOut if node.kind != Kind::HostDevice => false,
            m => Capabilities::has(m.flag(node)),
        };
        [Method::Punch, Method::ZeroRange, Method::BlkZeroOut].into_iter().find(is_there)
    }

    fn flag(self, node: &FileNode) -> &AtomicBool {
        match self {
            Method::Punch => &node.capabilities.no_punch,
            Method::ZeroRange => &node.capabilities.no_zero_range,
            Method::BlkZeroOut => &node.capabilities.no_blk_zero_out,
        }
    }

    /// The operation for a range. `extends`: as of [`best`](Self::best).
    pub(crate) fn op(self, offset: u64, len: u64, extends: bool) -> IoOp {
        // Else the size of the file stays: what is past its end reads as zeroes in any case.
        match self {
            Method::ZeroRange if extends => {
                IoOp::Fallocate { mode: FALLOC_FL_ZERO_RANGE, offset, len }
            }
            Method::Punch => punch(offset, len),
            Method::ZeroRange => {
                let mode = FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE;
                IoOp::Fallocate { mode, offset, len }
            }
            Method::BlkZeroOut => IoOp::Call { call: &calls::ZERO_OUT, offset, len },
        }
    }

    /// Takes note of a failure. `true`: the method is not there at all, the next best is to be tried.
    pub(crate) fn failed(self, node: &FileNode, errno: Errno) -> bool {
        let gone = is_missing(errno);
        if gone {
            Capabilities::lost(self.flag(node));
        }
        gone
    }
}

/// The operation that gives a range of a node back; `None`: there is none.
pub(crate) fn discard_op(node: &FileNode, offset: u64, len: u64) -> Option<IoOp> {
    if node.discard != Discard::Unmap || !Capabilities::has(discard_flag(node)) {
        return None;
    }
    match node.kind {
        Kind::File => (len > 0).then(|| punch(offset, len)),
        Kind::HostDevice => {
            // Whole blocks of it; the rest need not be given back.
            let sector = node.limits.sector;
            let start = offset.next_multiple_of(sector);
            let end = (offset + len) / sector * sector;
            let len = end.saturating_sub(start);
            (len > 0).then_some(IoOp::Call { call: &calls::DISCARD, offset: start, len })
        }
    }
}

/// Takes note of a failed discard. `true`: there are no discards here, which is no failure.
pub(crate) fn discard_failed(node: &FileNode, errno: Errno) -> bool {
    let gone = is_missing(errno);
    if gone {
        Capabilities::lost(discard_flag(node));
    }
    gone
}

fn discard_flag(node: &FileNode) -> &AtomicBool {
    match node.kind {
        Kind::File => &node.capabilities.no_punch,
        Kind::HostDevice => &node.capabilities.no_blk_discard,
    }
}

fn punch(offset: u64, len: u64) -> IoOp {
    IoOp::Fallocate { mode: FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, len }
}

fn is_missing(errno: Errno) -> bool {
    matches!(errno, Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::ENOTTY)
}
