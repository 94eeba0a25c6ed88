//! Requests as a driver of virtio-blk makes them (virtio 1.3, 5.2.6), and what is right as an answer.

use crate::model::{SECTOR, Ticket};
use crate::random::Random;

/// What a status byte holds before the device has written it.
pub(super) const UNANSWERED: u8 = 0xff;
pub(super) const OK: u8 = 0;
pub(super) const IO_ERROR: u8 = 1;
pub(super) const UNSUPPORTED: u8 = 2;

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

impl Kind {
    /// The type in the header.
    pub(super) fn number(self) -> u32 {
        match self {
            Kind::Read | Kind::OutOfRange => 0,
            Kind::Write => 1,
            Kind::Flush => 4,
            Kind::GetId => 8,
            Kind::Discard => 11,
            Kind::Zeroes(_) => 13,
            Kind::Unknown => 77,
        }
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
    /// Offered while the write cache was off.
    pub(super) write_through: bool,
    pub(super) offered_ns: u64,
}

impl Request {
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
