//! Requests and their permitted answers, in terms of virtio-blk, whatever the device.

use crate::model::{SECTOR, Ticket};
use crate::random::Random;

/// The status byte before the device writes it.
pub(super) const UNANSWERED: u8 = 0xff;
pub(super) const OK: u8 = 0;
pub(super) const IO_ERROR: u8 = 1;
pub(super) const UNSUPPORTED: u8 = 2;
/// SCSI only: not carried out, since a unit attention is to be reported first.
pub(super) const UNIT_ATTENTION: u8 = 3;
/// SCSI only: ended by task management, carried out or not.
pub(super) const ENDED: u8 = 4;

/// Maximum sectors of a request: 16 KiB.
pub(super) const MOST_SECTORS: u32 = 32;

/// The kind of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write,
    Flush,
    GetId,
    Discard,
    /// May unmap.
    Zeroes(bool),
    /// Reads beyond the end of the disk.
    OutOfRange,
    /// A request type that does not exist.
    Unknown,
}

/// The parts of a request, except the data of a write.
pub(super) struct Parts {
    pub(super) header: Vec<u8>,
    /// Parameters after the header.
    pub(super) parameters: Vec<u8>,
    /// Bytes of data that the device may write.
    pub(super) from_device: u32,
    /// Forced unit access: the data is stable once answered.
    pub(super) fua: bool,
}

impl Kind {
    /// Whether the request causes operations, which may fail.
    pub(super) fn moves_data(self) -> bool {
        !matches!(self, Kind::GetId | Kind::OutOfRange | Kind::Unknown)
    }

    /// A random request, mostly a read or a write.
    pub(super) fn any(random: &Random, ranges: bool) -> Kind {
        match random.below(100) {
            0..45 => Kind::Read,
            45..86 => Kind::Write,
            86..91 => Kind::Flush,
            91..93 if ranges => Kind::Discard,
            93..97 if ranges => Kind::Zeroes(random.one_in(2)),
            97 => Kind::GetId,
            98 => Kind::OutOfRange,
            99 => Kind::Unknown,
            _ => Kind::Read,
        }
    }

    /// Whether the request changes the disk.
    pub(super) fn writes(self) -> bool {
        matches!(self, Kind::Write | Kind::Discard | Kind::Zeroes(_))
    }
}

/// A request under way.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) kind: Kind,
    /// The change of the model, if the request reads or writes.
    pub(super) ticket: Option<Ticket>,
    /// Its slot in guest memory.
    pub(super) slot: u16,
    /// Offset of the data in the slot.
    pub(super) data: u64,
    /// Bytes that the device may write, besides the status.
    pub(super) writable: u32,
    /// Forced unit access: the data is stable once answered.
    pub(super) fua: bool,
    /// The step since which the write cache was off when the request was offered. If the cache was on in between,
    /// the device may have begun the request then.
    pub(super) write_through: Option<u64>,
    pub(super) offered_ns: u64,
}

impl Request {
    /// Identifies the request: its slot, and when it was offered.
    pub(super) fn task(&self) -> (u16, u64) {
        (self.slot, self.offered_ns)
    }

    /// Bytes of data.
    pub(super) fn len(&self) -> usize {
        self.ticket.as_ref().map_or(0, |ticket| ticket.count as usize * SECTOR)
    }

    /// Whether `status` is a permitted answer. `may_fail`: whether operations have failed.
    pub(super) fn may_get(&self, status: u8, may_fail: impl Fn() -> bool) -> bool {
        match self.kind {
            Kind::OutOfRange => status == IO_ERROR,
            Kind::Unknown => status == UNSUPPORTED,
            Kind::GetId => status == OK,
            _ => status == OK || status == IO_ERROR && may_fail(),
        }
    }
}
