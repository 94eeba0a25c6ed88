//! Requests, whatever the device, and what is right as an answer: in terms of virtio-blk.

use crate::model::{SECTOR, Ticket};
use crate::random::Random;

/// What a status byte holds before the device has written it.
pub(super) const UNANSWERED: u8 = 0xff;
pub(super) const OK: u8 = 0;
pub(super) const IO_ERROR: u8 = 1;
pub(super) const UNSUPPORTED: u8 = 2;
/// Not done, since something else is to be told first; of SCSI alone.
pub(super) const UNIT_ATTENTION: u8 = 3;
/// Ended by task management, done or not; of SCSI alone.
pub(super) const ENDED: u8 = 4;

/// Most sectors of a request: 16 KiB.
pub(super) const MOST_SECTORS: u32 = 32;

/// What a request asks for.
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
    /// Is of a type that there is not.
    Unknown,
}

/// What a request is made of, but for the data of a write.
pub(super) struct Parts {
    pub(super) header: Vec<u8>,
    /// Follow the header.
    pub(super) parameters: Vec<u8>,
    /// Bytes of data that the device may write.
    pub(super) from_device: u32,
    /// What is written is stable once this is answered.
    pub(super) fua: bool,
}

impl Kind {
    /// Whether it comes to operations, which may fail.
    pub(super) fn moves_data(self) -> bool {
        !matches!(self, Kind::GetId | Kind::OutOfRange | Kind::Unknown)
    }

    /// Reads and writes, mostly.
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

    /// Whether it changes what a disk holds.
    pub(super) fn writes(self) -> bool {
        matches!(self, Kind::Write | Kind::Discard | Kind::Zeroes(_))
    }
}

/// A request under way.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) kind: Kind,
    /// What it does to the disk, if anything.
    pub(super) ticket: Option<Ticket>,
    /// Its place in the guest's memory.
    pub(super) slot: u16,
    /// Where its data begin, in that place.
    pub(super) data: u64,
    /// Bytes that the device may write, besides the status.
    pub(super) writable: u32,
    /// What it writes is stable once it is answered.
    pub(super) fua: bool,
    /// Offered while the write cache was off, since that step. If it was on in between, the device may have
    /// begun with it then.
    pub(super) write_through: Option<u64>,
    pub(super) offered_ns: u64,
}

impl Request {
    /// What tells it from others: its place, and when it was offered.
    pub(super) fn task(&self) -> (u16, u64) {
        (self.slot, self.offered_ns)
    }

    /// Bytes of data.
    pub(super) fn len(&self) -> usize {
        self.ticket.as_ref().map_or(0, |ticket| ticket.count as usize * SECTOR)
    }

    /// Whether it may be answered so; `may_fail`: operations have failed.
    pub(super) fn may_get(&self, status: u8, may_fail: impl Fn() -> bool) -> bool {
        match self.kind {
            Kind::OutOfRange => status == IO_ERROR,
            Kind::Unknown => status == UNSUPPORTED,
            Kind::GetId => status == OK,
            _ => status == OK || status == IO_ERROR && may_fail(),
        }
    }
}
