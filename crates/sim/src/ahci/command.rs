//! AHCI commands as a driver issues them (ATA8-ACS).

use vcpu::ahci::{Command, LBA, ata};

use crate::model::{SECTOR, Ticket};
use crate::random::Random;

/// The kind of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write {
        fua: bool,
    },
    Flush,
    Trim,
    Identify,
    WriteCache(bool),
    /// Reads beyond the end of the disk.
    OutOfRange,
    /// An operation code that does not exist.
    Unknown,
}

impl Kind {
    /// A random command, mostly a read or a write. Queued commands are only reads and writes.
    pub(super) fn any(random: &Random, queued: bool) -> Kind {
        let fua = random.one_in(8);
        match random.below(1000) {
            0..2 => Kind::OutOfRange,
            2..500 => Kind::Read,
            500.. if queued => Kind::Write { fua },
            500..880 => Kind::Write { fua },
            880..950 => Kind::Flush,
            950..970 => Kind::Trim,
            970..985 => Kind::Identify,
            985..997 => Kind::WriteCache(random.one_in(2)),
            _ => Kind::Unknown,
        }
    }

    /// Whether the command changes the disk.
    pub(super) fn writes(self) -> bool {
        matches!(self, Kind::Write { .. } | Kind::Trim)
    }

    /// Whether the drive has to refuse the command.
    pub(super) fn is_refused(self) -> bool {
        matches!(self, Kind::OutOfRange | Kind::Unknown)
    }
}

/// A command under way.
#[derive(Debug)]
pub(super) struct Issued {
    pub(super) kind: Kind,
    pub(super) queued: bool,
    /// The change of the model, if the command reads or writes.
    pub(super) ticket: Option<Ticket>,
    /// Issued while the write cache was off.
    pub(super) write_through: bool,
    /// Its data was not memory for a while.
    pub(super) was_unplugged: bool,
    pub(super) issued_ns: u64,
}

/// FUA of a queued write, in DEVICE.
const FUA: u8 = 1 << 7;

/// The command, and how many bytes of data it has.
pub(super) fn command(
    random: &Random,
    kind: Kind,
    slot: u8,
    queued: bool,
    first: u32,
    count: u32,
) -> (Command, u32) {
    let (offset, len) = (u64::from(first) * SECTOR as u64, count * SECTOR as u32);
    let plain = |command| Command { command, device: LBA, ..Command::default() };
    let transfer = |write| match queued {
        true => Command::queued(slot, write, offset, len),
        false => Command::dma(write, offset, len),
    };
    match kind {
        Kind::Read if !queued && random.one_in(4) => {
            // READ SECTOR(S) EXT.
            (Command { command: 0x24, ..transfer(false) }, len)
        }
        Kind::Read => (transfer(false), len),
        Kind::Write { fua: true } if queued => {
            (Command { device: LBA | FUA, ..transfer(true) }, len)
        }
        // WRITE DMA FUA EXT.
        Kind::Write { fua: true } => (Command { command: 0x3d, ..transfer(true) }, len),
        // WRITE SECTOR(S) EXT.
        Kind::Write { .. } if !queued && random.one_in(4) => {
            (Command { command: 0x34, ..transfer(true) }, len)
        }
        Kind::Write { .. } => (transfer(true), len),
        Kind::Flush => (plain(ata::FLUSH_CACHE_EXT), 0),
        // DATA SET MANAGEMENT.
        Kind::Trim => {
            (Command { features: 1, count: 1, write: true, ..plain(0x06) }, SECTOR as u32)
        }
        Kind::Identify => (plain(ata::IDENTIFY_DEVICE), SECTOR as u32),
        // SET FEATURES.
        Kind::WriteCache(on) => {
            (Command { features: if on { 0x02 } else { 0x82 }, ..plain(0xef) }, 0)
        }
        // Beyond the end of any disk, grown disks included.
        Kind::OutOfRange => (Command { lba: 1 << 40, ..transfer(false) }, len),
        Kind::Unknown => (plain(0xff), 0),
    }
}
