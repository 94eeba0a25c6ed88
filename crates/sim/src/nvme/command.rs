//! I/O commands as a driver makes them (NVM Express 1.4, section 6).

use std::rc::Rc;

use guest_memory::MemoryView;

use super::memory::{DATA_PAGES, LIST_PAGES, PAGE, slot};
use super::rings::SUBMISSION;
use crate::model::{SECTOR, Ticket};
use crate::random::Random;

/// Maximum sectors of a command.
pub(super) const MOST_SECTORS: u32 = 32;

/// Status codes and types, without DNR.
pub(super) const SUCCESS: u16 = 0;
const INVALID_OPCODE: u16 = 0x01;
pub(super) const DATA_TRANSFER_ERROR: u16 = 0x04;
const INTERNAL_ERROR: u16 = 0x06;
pub(super) const ABORT_REQUESTED: u16 = 0x07;
const LBA_OUT_OF_RANGE: u16 = 0x80;
const CAPACITY_EXCEEDED: u16 = 0x81;
const WRITE_FAULT: u16 = 0x280;
const READ_ERROR: u16 = 0x281;
const COMPARE_FAILURE: u16 = 0x285;

/// Of failed operations.
const FAILURES: &[u16] = &[INTERNAL_ERROR, CAPACITY_EXCEEDED, WRITE_FAULT, READ_ERROR];

/// The kind of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write {
        fua: bool,
    },
    Flush,
    Zeroes {
        may_unmap: bool,
        fua: bool,
    },
    /// Dataset Management, with the range in so many parts.
    Deallocate {
        ranges: u32,
    },
    /// With data that was never written.
    Compare,
    Verify,
    /// Reads beyond the end of the namespace.
    OutOfRange,
    /// An operation code that does not exist.
    Unknown,
}

impl Kind {
    /// A random command, mostly a read or a write.
    pub(super) fn any(random: &Random) -> Kind {
        let fua = random.one_in(8);
        match random.below(200) {
            0..92 => Kind::Read,
            92..176 => Kind::Write { fua },
            176..184 => Kind::Flush,
            184..190 => Kind::Zeroes { may_unmap: random.one_in(2), fua },
            190..194 => Kind::Deallocate { ranges: random.between(1, 3) as u32 },
            194 | 195 => Kind::Compare,
            196 | 197 => Kind::Verify,
            198 => Kind::OutOfRange,
            _ => Kind::Unknown,
        }
    }

    /// Whether the command changes the disk.
    pub(super) fn writes(self) -> bool {
        matches!(self, Kind::Write { .. } | Kind::Zeroes { .. } | Kind::Deallocate { .. })
    }

    /// Whether the answered change is stable without a flush.
    pub(super) fn is_stable(self) -> bool {
        matches!(self, Kind::Write { fua: true } | Kind::Zeroes { fua: true, .. })
    }

    /// Whether the controller has to refuse the command.
    pub(super) fn is_refused(self) -> bool {
        matches!(self, Kind::OutOfRange | Kind::Unknown)
    }

    /// Bytes of data in guest memory.
    pub(super) fn data_len(self, count: u32) -> usize {
        match self {
            Kind::Read | Kind::Write { .. } | Kind::Compare => count as usize * SECTOR,
            Kind::OutOfRange => SECTOR,
            Kind::Deallocate { ranges } => ranges as usize * 16,
            Kind::Flush | Kind::Zeroes { .. } | Kind::Verify | Kind::Unknown => 0,
        }
    }

    /// Whether `status` is a permitted answer. `may_fail`: whether operations have failed.
    pub(super) fn may_get(self, status: u16, may_fail: impl Fn() -> bool) -> bool {
        let expected = match self {
            Kind::OutOfRange => LBA_OUT_OF_RANGE,
            Kind::Unknown => INVALID_OPCODE,
            Kind::Compare => COMPARE_FAILURE,
            _ => SUCCESS,
        };
        status == expected || !self.is_refused() && FAILURES.contains(&status) && may_fail()
    }
}

/// A command under way.
#[derive(Debug)]
pub(super) struct Command {
    pub(super) kind: Kind,
    /// The change of the model, if the command reads or writes.
    pub(super) ticket: Option<Ticket>,
    pub(super) data: Data,
    /// The step since which the write cache was off when the command was offered.
    pub(super) write_through: Option<u64>,
    /// The driver tries to abort it.
    pub(super) is_aborting: bool,
    /// Its data was not memory for a while.
    pub(super) was_unplugged: bool,
    pub(super) offered_ns: u64,
}

/// Where a command's data is: in pages of its slot, in any order.
#[derive(Debug, Clone)]
pub(super) struct Data {
    /// Addresses.
    pages: Vec<u64>,
    /// In the first page.
    offset: u64,
    pub(super) len: usize,
}

impl Data {
    pub(super) fn new(random: &Random, number: u16, len: usize) -> Self {
        let offset = match random.one_in(2) {
            true => 0,
            false => random.below(PAGE / 4) * 4,
        };
        let first = slot(number) + LIST_PAGES * PAGE;
        let mut left: Vec<_> = (0..DATA_PAGES).map(|page| first + page * PAGE).collect();
        let count = (offset + len as u64).div_ceil(PAGE);
        let mut take = |_: u64| left.swap_remove(random.below(left.len() as u64) as usize);
        Data { pages: (0..count).map(&mut take).collect(), offset, len }
    }

    /// Addresses and lengths of the pieces.
    fn pieces(&self) -> impl Iterator<Item = (u64, usize)> {
        let (mut left, mut offset) = (self.len, self.offset);
        self.pages.iter().map(move |page| {
            let at = page + offset;
            let len = left.min((PAGE - offset) as usize);
            (left, offset) = (left - len, 0);
            (at, len)
        })
    }

    pub(super) fn write(&self, view: &MemoryView, bytes: &[u8]) {
        let mut rest = bytes;
        for (at, len) in self.pieces() {
            let (piece, tail) = rest.split_at(len);
            view.write_bytes(at, piece).expect("memory");
            rest = tail;
        }
    }

    pub(super) fn read(&self, view: &MemoryView, bytes: &mut [u8]) {
        let mut rest = bytes;
        for (at, len) in self.pieces() {
            let (piece, tail) = rest.split_at_mut(len);
            view.read_bytes(at, piece).expect("memory");
            rest = tail;
        }
    }

    /// PRP entries 1 and 2. Writes the lists, and returns their number as well (section 4.3).
    fn prps(&self, random: &Random, view: &MemoryView, number: u16) -> ([u64; 2], u64) {
        let Some((first, rest)) = self.pages.split_first() else { return ([0; 2], 0) };
        let first = first + self.offset;
        match rest {
            [] => ([first, 0], 0),
            [second] => ([first, *second], 0),
            rest => {
                let write = |at, prps: &[u64]| {
                    let bytes: Vec<u8> = prps.iter().flat_map(|prp| prp.to_le_bytes()).collect();
                    view.write_bytes(at, &bytes).expect("memory");
                };
                let (page, next) = (slot(number), slot(number) + PAGE);
                // Entries up to the end of the page, the last of which may name the next list.
                let room = match random.one_in(2) {
                    true => (PAGE / 8) as usize,
                    false => random.between(2, rest.len() as u64) as usize,
                };
                let list = page + PAGE - 8 * room as u64;
                if rest.len() <= room {
                    write(list, rest);
                    return ([first, list], 1);
                }
                let (here, there) = rest.split_at(room - 1);
                write(list, &[here, &[next]].concat());
                write(next, there);
                ([first, list], 2)
            }
        }
    }
}

/// The entry of a command, and the number of its PRP lists.
pub(super) fn entry(
    random: &Random,
    view: &Rc<MemoryView>,
    (number, cid): (u16, u16),
    kind: Kind,
    (first, count): (u32, u32),
    data: &Data,
) -> ([u8; SUBMISSION], u64) {
    let blocks = count.wrapping_sub(1);
    let at = [first, 0, blocks];
    let flag = |is_set: bool, bit: u32| u32::from(is_set) << bit;
    let (opcode, dwords) = match kind {
        Kind::Flush => (0x00, [0; 3]),
        Kind::Write { fua } => (0x01, [first, 0, blocks | flag(fua, 30)]),
        Kind::Read => (0x02, at),
        Kind::Compare => (0x05, at),
        Kind::Zeroes { may_unmap, fua } => {
            (0x08, [first, 0, blocks | flag(may_unmap, 25) | flag(fua, 30)])
        }
        Kind::Deallocate { ranges } => {
            data.write(view, &parts(random, ranges, first, count));
            (0x09, [ranges - 1, 1 << 2, 0])
        }
        Kind::Verify => (0x0c, at),
        // Beyond the end of any disk, grown disks included.
        Kind::OutOfRange => (0x02, [0, 1, 0]),
        Kind::Unknown => (0x7f, [0; 3]),
    };
    let (prps, lists) = data.prps(random, view, number);
    (submission(opcode, cid, 1, prps, dwords), lists)
}

/// A submission queue entry with command dwords 10 to 12.
pub(super) fn submission(
    opcode: u8,
    cid: u16,
    nsid: u32,
    prps: [u64; 2],
    dwords: [u32; 3],
) -> [u8; SUBMISSION] {
    let mut bytes = [0; SUBMISSION];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(0, &(u32::from(opcode) | u32::from(cid) << 16).to_le_bytes());
    put(4, &nsid.to_le_bytes());
    put(24, &prps[0].to_le_bytes());
    put(32, &prps[1].to_le_bytes());
    for (at, dword) in dwords.iter().enumerate() {
        put(40 + 4 * at, &dword.to_le_bytes());
    }
    bytes
}

/// A range in so many parts, for Dataset Management.
fn parts(random: &Random, ranges: u32, first: u32, count: u32) -> Vec<u8> {
    let (mut at, mut left, mut bytes) = (first, count, Vec::new());
    for number in (0..ranges).rev() {
        let len = if number == 0 { left } else { random.below(u64::from(left) + 1) as u32 };
        bytes.extend([0; 4]);
        bytes.extend(len.to_le_bytes());
        bytes.extend(u64::from(at).to_le_bytes());
        (at, left) = (at + len, left - len);
    }
    bytes
}
