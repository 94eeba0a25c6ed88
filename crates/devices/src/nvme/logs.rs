//! Log pages (section 5.14.1).

use std::collections::VecDeque;

use super::events::{CHANGED_NAMESPACES, ERROR_LOG};
use super::features::TEMPERATURE;
use super::identify::{FIRMWARE, Page};
use super::status::Status;
use stats::{Kind, QueueStats};

/// Entries of the error log.
pub(crate) const ERRORS: usize = 64;

/// A log page that is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LogPage {
    Errors,
    Health,
    Firmware,
    ChangedNamespaces,
    Effects,
}

/// What Get Log Page asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) page: LogPage,
    /// Its number, for the events that it takes note of, unless they are to be retained.
    pub(crate) notes: Option<u8>,
    /// The bytes of the page.
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

impl LogPage {
    fn find(number: u8) -> Result<Self, Status> {
        match number {
            ERROR_LOG => Ok(LogPage::Errors),
            0x02 => Ok(LogPage::Health),
            0x03 => Ok(LogPage::Firmware),
            CHANGED_NAMESPACES => Ok(LogPage::ChangedNamespaces),
            0x05 => Ok(LogPage::Effects),
            _ => Err(Status::INVALID_LOG_PAGE),
        }
    }

    /// Bytes.
    fn size(self) -> usize {
        match self {
            LogPage::Errors => ERRORS * ERROR,
            LogPage::Health | LogPage::Firmware => 512,
            LogPage::ChangedNamespaces | LogPage::Effects => 4096,
        }
    }
}

impl Wanted {
    /// Reads dwords 10 to 13.
    ///
    /// # Errors
    ///
    /// The page is not known, or the offset is not in it.
    pub(crate) fn parse(dwords: &[u32; 6]) -> Result<Self, Status> {
        let [dword10, dword11, low, high, ..] = *dwords;
        let page = LogPage::find(dword10 as u8)?;
        let notes = (dword10 >> 15 & 1 == 0).then_some(dword10 as u8);
        let count = u64::from(dword11 as u16) << 16 | u64::from(dword10 >> 16);
        let offset = u64::from(low) | u64::from(high) << 32;
        let size = page.size() as u64;
        let left = size.checked_sub(offset).filter(|_| offset.is_multiple_of(4));
        let left = left.ok_or(Status::INVALID_FIELD)?;
        let len = ((count + 1) * 4).min(left);
        Ok(Wanted { page, notes, offset: offset as usize, len: len as usize })
    }
}

/// Bytes of an entry of the error log.
const ERROR: usize = 64;

/// A command that has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Failed {
    pub(crate) sqid: u16,
    pub(crate) cid: u16,
    pub(crate) status: Status,
    pub(crate) lba: u64,
    pub(crate) nsid: u32,
}

/// Commands that have failed, the latest first.
#[derive(Debug, Default)]
pub(crate) struct ErrorLog {
    latest: VecDeque<(u64, Failed)>,
    count: u64,
    media_errors: u64,
}

impl ErrorLog {
    pub(crate) fn add(&mut self, failed: Failed) {
        self.count += 1;
        self.media_errors += u64::from(failed.status.is_media_error());
        self.latest.truncate(ERRORS - 1);
        self.latest.push_front((self.count, failed));
    }

    pub(crate) fn page(&self) -> Page {
        let mut page = Page::new();
        for (at, (count, failed)) in (0..).step_by(ERROR).zip(&self.latest) {
            page.u64(at, *count);
            page.u16(at + 8, failed.sqid);
            page.u16(at + 10, failed.cid);
            page.u16(at + 12, failed.status.with_phase(false));
            // The parameter that was wrong is not told.
            page.u16(at + 14, 0xffff);
            page.u64(at + 16, failed.lba);
            page.u32(at + 24, failed.nsid);
        }
        page
    }
}

/// SMART / Health Information, from what the queues have done.
pub(crate) fn health<'a>(
    errors: &ErrorLog,
    queues: impl Iterator<Item = &'a QueueStats>,
    hours: u64,
) -> Page {
    let mut page = Page::new();
    page.u16(1, TEMPERATURE);
    // Spare, and where it is a warning, in percent.
    page.put(3, &[100, 10]);
    let (mut read, mut written) = ((0, 0), (0, 0));
    for numbers in queues.map(QueueStats::get) {
        let of = |kind: Kind| (numbers.kind(kind).bytes, numbers.kind(kind).done);
        let add =
            |sum: &mut (u64, u64), (bytes, commands)| *sum = (sum.0 + bytes, sum.1 + commands);
        add(&mut read, of(Kind::Read));
        add(&mut written, of(Kind::Write));
    }
    // In thousands of 512 bytes, rounded up.
    let units = |bytes: u64| bytes.div_ceil(512_000);
    page.u64(32, units(read.0));
    page.u64(48, units(written.0));
    page.u64(64, read.1);
    page.u64(80, written.1);
    page.u64(112, 1);
    page.u64(128, hours);
    page.u64(160, errors.media_errors);
    page.u64(176, errors.count);
    page
}

pub(crate) fn firmware() -> Page {
    let mut page = Page::new();
    page.u8(0, 1);
    let revision = FIRMWARE.bytes().chain(std::iter::repeat(b' '));
    for (at, byte) in (8..16).zip(revision) {
        page.u8(at, byte);
    }
    page
}

/// Numbers of namespaces.
pub(crate) fn changed_namespaces(changed: &[u32]) -> Page {
    let mut page = Page::new();
    for (at, nsid) in (0..).step_by(4).zip(changed) {
        page.u32(at, *nsid);
    }
    page
}

/// Opcodes that are supported: of the admin command set, and of the NVM command set with whether each changes data.
const ADMIN: [u8; 11] = [0x00, 0x01, 0x02, 0x04, 0x05, 0x06, 0x08, 0x09, 0x0a, 0x0c, 0x7c];
const NVM: [(u8, bool); 7] = [
    (0x00, false),
    (0x01, true),
    (0x02, false),
    (0x05, false),
    (0x08, true),
    (0x09, true),
    (0x0c, false),
];

/// Commands Supported and Effects.
pub(crate) fn effects() -> Page {
    const SUPPORTED: u32 = 1 << 0;
    const CHANGES_DATA: u32 = 1 << 1;
    let mut page = Page::new();
    for opcode in ADMIN {
        page.u32(usize::from(opcode) * 4, SUPPORTED);
    }
    for (opcode, changes) in NVM {
        let effects = SUPPORTED | if changes { CHANGES_DATA } else { 0 };
        page.u32(1024 + usize::from(opcode) * 4, effects);
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wanted_bytes_are_of_the_page() {
        let parse =
            |dwords: [u32; 4]| Wanted::parse(&[dwords[0], dwords[1], dwords[2], dwords[3], 0, 0]);
        let smart = Wanted { page: LogPage::Health, notes: Some(2), offset: 0, len: 512 };
        assert_eq!(parse([0x007f_0002, 0, 0, 0]), Ok(smart));
        let rest = Wanted { page: LogPage::Health, notes: None, offset: 508, len: 4 };
        assert_eq!(parse([0xffff_8002, 0xffff, 508, 0]), Ok(rest));
        assert_eq!(parse([2, 0, 516, 0]), Err(Status::INVALID_FIELD));
        assert_eq!(parse([2, 0, 2, 0]), Err(Status::INVALID_FIELD));
        assert_eq!(parse([0x7f, 0, 0, 0]), Err(Status::INVALID_LOG_PAGE));
    }

    #[test]
    fn the_latest_errors_come_first() {
        let mut log = ErrorLog::default();
        for cid in 0..100 {
            let status = Status::READ_ERROR;
            log.add(Failed { sqid: 1, cid, status, lba: 9, nsid: 1 });
        }
        let page = log.page();
        let at = |at: usize| page.bytes()[at];
        assert_eq!((at(0), at(10), at(64), at(63 * 64)), (100, 99, 99, 37));
        assert_eq!((log.count, log.media_errors), (100, 100));
    }
}
