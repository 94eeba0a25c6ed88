//! Decoding of a command's task file (ATA8-ACS, section 7), with the drive's limits checked.

use std::ffi::CStr;

use super::config::DriveInfo;
use super::fis::{DEVICE_LBA, ERROR_ABRT, ERROR_IDNF, RegH2d};
use stats::Kind;

/// Bytes of a logical sector.
pub(crate) const SECTOR: u64 = 512;
/// Most blocks of ranges in one DATA SET MANAGEMENT command: IDENTIFY DEVICE word 105.
pub(crate) const TRIM_BLOCKS: u16 = 8;
/// Most sectors per interrupt of READ MULTIPLE and WRITE MULTIPLE.
pub(crate) const MULTIPLE: u16 = 16;

/// A decoded command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Data of the disk, from byte `offset` on.
    Read {
        offset: u64,
        len: u64,
        how: Transfer,
    },
    Write {
        offset: u64,
        len: u64,
        fua: bool,
        how: Transfer,
    },
    /// Flush the write cache to stable storage.
    Flush,
    /// DATA SET MANAGEMENT with TRIM: `len` bytes of ranges.
    Trim {
        len: u64,
    },
    /// A page of 512 bytes, repeated as often as the command requests.
    Page {
        page: Page,
        len: u64,
        how: Transfer,
    },
    /// CHECK POWER MODE.
    CheckPower,
    /// READ NATIVE MAX ADDRESS, by 28 bits or (EXT) by 48.
    NativeMax {
        ext: bool,
    },
    SetWriteCache(bool),
    /// EXECUTE DEVICE DIAGNOSTIC.
    Diagnostic,
    /// Succeeds without an effect.
    Nothing,
    /// The control register: software reset set, or cleared.
    Control {
        reset: bool,
    },
    /// Refused with these error bits.
    Refused {
        error: u8,
        queued: bool,
    },
    /// The command did not reach the device.
    Broken(Broken),
}

/// The protocol of data and status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transfer {
    Pio,
    Dma,
    /// Native command queuing.
    Queued,
}

/// A page of information about the drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Page {
    Identify,
    LogDirectory,
    /// Log 10h: the queued command that failed, and its task file.
    QueuedError,
}

/// Why a command did not reach the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Broken {
    /// Its structures are not in guest memory: HBFS.
    NotMemory,
    /// Not a frame type that a disk accepts: IFS.
    Frame,
}

mod opcode {
    pub(super) const DATA_SET_MANAGEMENT: u8 = 0x06;
    pub(super) const READ_SECTORS: u8 = 0x20;
    pub(super) const READ_SECTORS_EXT: u8 = 0x24;
    pub(super) const READ_DMA_EXT: u8 = 0x25;
    pub(super) const READ_NATIVE_MAX_EXT: u8 = 0x27;
    pub(super) const READ_MULTIPLE_EXT: u8 = 0x29;
    pub(super) const READ_LOG_EXT: u8 = 0x2f;
    pub(super) const WRITE_SECTORS: u8 = 0x30;
    pub(super) const WRITE_SECTORS_EXT: u8 = 0x34;
    pub(super) const WRITE_DMA_EXT: u8 = 0x35;
    pub(super) const WRITE_MULTIPLE_EXT: u8 = 0x39;
    pub(super) const WRITE_DMA_FUA_EXT: u8 = 0x3d;
    pub(super) const READ_VERIFY: u8 = 0x40;
    pub(super) const READ_VERIFY_EXT: u8 = 0x42;
    pub(super) const READ_FPDMA_QUEUED: u8 = 0x60;
    pub(super) const WRITE_FPDMA_QUEUED: u8 = 0x61;
    pub(super) const EXECUTE_DEVICE_DIAGNOSTIC: u8 = 0x90;
    pub(super) const INITIALIZE_DEVICE_PARAMETERS: u8 = 0x91;
    pub(super) const READ_MULTIPLE: u8 = 0xc4;
    pub(super) const WRITE_MULTIPLE: u8 = 0xc5;
    pub(super) const SET_MULTIPLE_MODE: u8 = 0xc6;
    pub(super) const READ_DMA: u8 = 0xc8;
    pub(super) const WRITE_DMA: u8 = 0xca;
    pub(super) const WRITE_MULTIPLE_FUA_EXT: u8 = 0xce;
    pub(super) const STANDBY_IMMEDIATE: u8 = 0xe0;
    pub(super) const IDLE_IMMEDIATE: u8 = 0xe1;
    pub(super) const STANDBY: u8 = 0xe2;
    pub(super) const IDLE: u8 = 0xe3;
    pub(super) const CHECK_POWER_MODE: u8 = 0xe5;
    pub(super) const SLEEP: u8 = 0xe6;
    pub(super) const FLUSH_CACHE: u8 = 0xe7;
    pub(super) const FLUSH_CACHE_EXT: u8 = 0xea;
    pub(super) const IDENTIFY_DEVICE: u8 = 0xec;
    pub(super) const SET_FEATURES: u8 = 0xef;
    pub(super) const READ_NATIVE_MAX: u8 = 0xf8;
}

/// DEVICE bit 7 of a queued command: forced unit access.
const DEVICE_FUA: u8 = 1 << 7;
/// FEATURES of DATA SET MANAGEMENT.
const DSM_TRIM: u16 = 1;

const ABORTED: Action = Action::Refused { error: ERROR_ABRT, queued: false };

/// Decodes the command in slot `slot` for `drive`.
pub(crate) fn decode(fis: &RegH2d, slot: u8, drive: &DriveInfo) -> Action {
    use opcode::*;
    if !fis.is_command {
        return Action::Control { reset: fis.is_reset() };
    }
    match fis.command {
        READ_FPDMA_QUEUED | WRITE_FPDMA_QUEUED => {
            let range = Range { lba: fis.lba, sectors: sectors_ext(fis.features) };
            let tag = fis.count >> 3 & 0x1f;
            if tag != u16::from(slot) || fis.device & DEVICE_LBA == 0 {
                return Action::Refused { error: ERROR_ABRT, queued: true };
            }
            let write = fis.command == WRITE_FPDMA_QUEUED;
            transfer(range, write, fis.device & DEVICE_FUA != 0, Transfer::Queued, drive)
        }
        READ_DMA | WRITE_DMA => {
            let write = fis.command == WRITE_DMA;
            short(fis).map_or(ABORTED, |range| transfer(range, write, false, Transfer::Dma, drive))
        }
        READ_SECTORS | READ_MULTIPLE | WRITE_SECTORS | WRITE_MULTIPLE => {
            let write = matches!(fis.command, WRITE_SECTORS | WRITE_MULTIPLE);
            short(fis).map_or(ABORTED, |range| transfer(range, write, false, Transfer::Pio, drive))
        }
        READ_DMA_EXT => transfer(long(fis), false, false, Transfer::Dma, drive),
        WRITE_DMA_EXT => transfer(long(fis), true, false, Transfer::Dma, drive),
        WRITE_DMA_FUA_EXT => transfer(long(fis), true, true, Transfer::Dma, drive),
        WRITE_MULTIPLE_FUA_EXT => transfer(long(fis), true, true, Transfer::Pio, drive),
        READ_SECTORS_EXT | READ_MULTIPLE_EXT => {
            transfer(long(fis), false, false, Transfer::Pio, drive)
        }
        WRITE_SECTORS_EXT | WRITE_MULTIPLE_EXT => {
            transfer(long(fis), true, false, Transfer::Pio, drive)
        }
        READ_VERIFY => short(fis).map_or(ABORTED, |range| verify(range, drive)),
        READ_VERIFY_EXT => verify(long(fis), drive),
        FLUSH_CACHE | FLUSH_CACHE_EXT => Action::Flush,
        DATA_SET_MANAGEMENT if drive.read_only || fis.features != DSM_TRIM => ABORTED,
        DATA_SET_MANAGEMENT if !(1..=TRIM_BLOCKS).contains(&fis.count) => ABORTED,
        DATA_SET_MANAGEMENT => Action::Trim { len: u64::from(fis.count) * SECTOR },
        IDENTIFY_DEVICE => Action::Page { page: Page::Identify, len: SECTOR, how: Transfer::Pio },
        READ_LOG_EXT => read_log(fis),
        SET_FEATURES => set_features(fis),
        SET_MULTIPLE_MODE => match fis.count & 0xff {
            n @ 1..=MULTIPLE if n.is_power_of_two() => Action::Nothing,
            _ => ABORTED,
        },
        CHECK_POWER_MODE => Action::CheckPower,
        READ_NATIVE_MAX => Action::NativeMax { ext: false },
        READ_NATIVE_MAX_EXT => Action::NativeMax { ext: true },
        // No spin-down: the drive only flushes.
        STANDBY_IMMEDIATE | STANDBY | SLEEP => Action::Flush,
        IDLE_IMMEDIATE | IDLE | INITIALIZE_DEVICE_PARAMETERS => Action::Nothing,
        EXECUTE_DEVICE_DIAGNOSTIC => Action::Diagnostic,
        _ => ABORTED,
    }
}

/// A range of sectors, as encoded in a command.
#[derive(Debug, Clone, Copy)]
struct Range {
    lba: u64,
    sectors: u64,
}

/// 28-bit commands: a count of 0 means 256 sectors; the LBA has 24 bits, and 4 more in DEVICE. Returns `None`
/// for cylinder addressing, which this drive lacks.
fn short(fis: &RegH2d) -> Option<Range> {
    let lba = fis.lba & 0xff_ffff | u64::from(fis.device & 0xf) << 24;
    let sectors = match fis.count & 0xff {
        0 => 256,
        n => n.into(),
    };
    (fis.device & DEVICE_LBA != 0).then_some(Range { lba, sectors })
}

fn long(fis: &RegH2d) -> Range {
    Range { lba: fis.lba, sectors: sectors_ext(fis.count) }
}

/// 48-bit commands: a count of 0 means 65536 sectors.
fn sectors_ext(count: u16) -> u64 {
    if count == 0 { 65536 } else { count.into() }
}

impl Range {
    fn is_on(&self, drive: &DriveInfo) -> bool {
        self.lba.checked_add(self.sectors).is_some_and(|end| end <= drive.sectors)
    }
}

fn transfer(range: Range, write: bool, fua: bool, how: Transfer, drive: &DriveInfo) -> Action {
    let queued = how == Transfer::Queued;
    if write && drive.read_only {
        return Action::Refused { error: ERROR_ABRT, queued };
    }
    if !range.is_on(drive) {
        return Action::Refused { error: ERROR_IDNF, queued };
    }
    let (offset, len) = (range.lba * SECTOR, range.sectors * SECTOR);
    if write { Action::Write { offset, len, fua, how } } else { Action::Read { offset, len, how } }
}

fn verify(range: Range, drive: &DriveInfo) -> Action {
    if range.is_on(drive) {
        Action::Nothing
    } else {
        Action::Refused { error: ERROR_IDNF, queued: false }
    }
}

/// Logs: the directory and the queued error log, one page each.
fn read_log(fis: &RegH2d) -> Action {
    let page_number = fis.lba >> 8 & 0xff | fis.lba >> 24 & 0xff00;
    let page = match (fis.lba & 0xff, page_number, fis.count) {
        (0x00, 0, 1) => Page::LogDirectory,
        (0x10, 0, 1) => Page::QueuedError,
        _ => return ABORTED,
    };
    Action::Page { page, len: SECTOR, how: Transfer::Pio }
}

fn set_features(fis: &RegH2d) -> Action {
    match (fis.features & 0xff, fis.count & 0xff) {
        (0x02, _) => Action::SetWriteCache(true),
        (0x82, _) => Action::SetWriteCache(false),
        // Transfer mode: PIO default, PIO flow control 0 to 4, multiword DMA 0 to 2, Ultra DMA 0 to 6.
        (0x03, 0x00 | 0x01 | 0x08..=0x0c | 0x20..=0x22 | 0x40..=0x46) => Action::Nothing,
        // Look-ahead off and on; keep or lose settings over a software reset.
        (0x55 | 0xaa | 0x66 | 0xcc, _) => Action::Nothing,
        _ => ABORTED,
    }
}

impl Action {
    /// The protocol of data and status. Commands without data follow the DMA protocol.
    pub(crate) fn transfer(&self) -> Transfer {
        match *self {
            Action::Read { how, .. } | Action::Write { how, .. } | Action::Page { how, .. } => how,
            Action::Refused { queued: true, .. } => Transfer::Queued,
            _ => Transfer::Dma,
        }
    }

    pub(crate) fn is_queued(&self) -> bool {
        self.transfer() == Transfer::Queued
    }

    /// Whether the drive accepts the command during its reset, or while log 10h is unread.
    pub(crate) fn ends_halt(&self) -> bool {
        matches!(self, Action::Control { .. } | Action::Page { page: Page::QueuedError, .. })
    }

    /// Bytes transferred between drive and memory.
    pub(crate) fn data_len(&self) -> u64 {
        match *self {
            Action::Read { len, .. }
            | Action::Write { len, .. }
            | Action::Trim { len }
            | Action::Page { len, .. } => len,
            _ => 0,
        }
    }

    /// The operation's name in trace events.
    pub(crate) fn trace_op(&self) -> &'static CStr {
        match self {
            Action::Read { .. } => c"read",
            Action::Write { .. } => c"write",
            Action::Flush => c"flush",
            Action::Trim { .. } => c"trim",
            Action::Page { .. } => c"page",
            Action::Refused { .. } => c"refused",
            Action::Broken(_) => c"broken",
            Action::CheckPower
            | Action::NativeMax { .. }
            | Action::SetWriteCache(_)
            | Action::Diagnostic
            | Action::Nothing
            | Action::Control { .. } => c"control",
        }
    }

    /// The kind under which statistics count the command.
    pub(crate) fn kind(&self) -> Kind {
        match self {
            Action::Read { .. } => Kind::Read,
            Action::Write { .. } => Kind::Write,
            Action::Flush => Kind::Flush,
            Action::Trim { .. } => Kind::Discard,
            Action::Page { .. }
            | Action::CheckPower
            | Action::NativeMax { .. }
            | Action::SetWriteCache(_)
            | Action::Diagnostic
            | Action::Nothing
            | Action::Control { .. }
            | Action::Refused { .. }
            | Action::Broken(_) => Kind::Other,
        }
    }

    /// First byte on the disk, for trace events.
    pub(crate) fn trace_offset(&self) -> u64 {
        self.lba() * SECTOR
    }

    /// First sector, for the report of an error.
    pub(crate) fn lba(&self) -> u64 {
        match *self {
            Action::Read { offset, .. } | Action::Write { offset, .. } => offset / SECTOR,
            _ => 0,
        }
    }
}
