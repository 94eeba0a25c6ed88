//! Pages that describe the drive: IDENTIFY DEVICE (ATA8-ACS, 7.16) and the log pages (annex A).

use super::ata::{MULTIPLE, TRIM_BLOCKS};
use super::config::DriveInfo;
use super::fis::TaskFile;

pub(crate) const PAGE_SIZE: usize = 512;

/// A queued command that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QueuedError {
    pub(crate) tag: u8,
    pub(crate) task_file: TaskFile,
}

/// A page of little-endian words.
struct Words([u8; PAGE_SIZE]);

impl Words {
    fn set(&mut self, word: usize, value: u16) {
        self.0[word * 2..word * 2 + 2].copy_from_slice(&value.to_le_bytes());
    }

    /// Stores text, padded with spaces, with the first character of each pair in the upper byte.
    fn text(&mut self, words: std::ops::Range<usize>, text: &str) {
        let bytes = &mut self.0[words.start * 2..words.end * 2];
        bytes.fill(b' ');
        let printable = text.bytes().map(|c| if (0x20..0x7f).contains(&c) { c } else { b'?' });
        for (at, c) in printable.take(bytes.len()).enumerate() {
            bytes[at ^ 1] = c;
        }
    }

    fn number(&mut self, word: usize, value: u64, words: usize) {
        self.0[word * 2..(word + words) * 2].copy_from_slice(&value.to_le_bytes()[..words * 2]);
    }
}

/// The IDENTIFY DEVICE data.
pub(crate) fn identify(drive: &DriveInfo, write_cache: bool) -> [u8; PAGE_SIZE] {
    let mut w = Words([0; PAGE_SIZE]);
    w.set(0, 0x0040); // ATA, fixed
    // Cylinders, heads, sectors per track: obsolete, but read by old firmware.
    w.set(1, (drive.sectors / (16 * 63)).min(16383) as u16);
    w.set(3, 16);
    w.set(6, 63);
    w.text(10..20, &drive.serial);
    w.text(23..27, env!("CARGO_PKG_VERSION"));
    w.text(27..47, &drive.model);
    w.set(47, 0x8000 | MULTIPLE);
    w.set(48, 0x4000); // no trusted computing
    w.set(49, 0x0f00); // IORDY, LBA, DMA
    w.set(50, 0x4000);
    w.set(53, 0x0006); // words 64 to 70 and 88 are valid
    w.set(59, 0x0100 | MULTIPLE);
    w.number(60, drive.sectors.min(0x0fff_ffff), 2);
    w.set(63, 0x0007); // multiword DMA 0 to 2
    w.set(64, 0x0003); // PIO 3 and 4
    for cycle_time in 65..=68 {
        w.set(cycle_time, 120);
    }
    w.set(75, 31); // queue depth, counted from 0
    w.set(76, 0x010e); // NCQ; generations 1 to 3
    w.set(80, 0x01f0); // ATA/ATAPI-4 to ATA8-ACS
    w.set(82, 0x4068); // NOP; look-ahead, write cache, power management
    w.set(83, 0x7400); // FLUSH CACHE (EXT), 48-bit addresses
    w.set(84, 0x4060); // WRITE DMA (and MULTIPLE) FUA EXT, general purpose logs
    w.set(85, 0x4048 | if write_cache { 0x20 } else { 0 });
    w.set(86, 0xb400); // as 83, and words 119 and 120 are valid
    w.set(87, 0x4060);
    w.set(88, 0x407f); // Ultra DMA 0 to 6, 6 chosen
    w.number(100, drive.sectors, 4);
    if !drive.read_only {
        w.set(105, TRIM_BLOCKS);
        w.set(169, 0x0001); // TRIM
    }
    let exponent = (drive.physical_block_size / 512).checked_ilog2().unwrap_or(0) as u16;
    w.set(106, 0x4000 | if exponent > 0 { 0x2000 | exponent.min(15) } else { 0 });
    w.set(119, 0x4000);
    w.set(120, 0x4000);
    w.set(217, 0x0001); // does not rotate
    w.set(222, 0x103f); // serial, SATA up to 3.0
    w.0[510] = 0xa5;
    checksum(w.0)
}

/// The log directory: the number of pages of each log.
pub(crate) fn log_directory() -> [u8; PAGE_SIZE] {
    let mut w = Words([0; PAGE_SIZE]);
    w.set(0, 1);
    w.set(0x10, 1);
    w.0
}

/// Log 10h.
pub(crate) fn queued_error(error: Option<&QueuedError>) -> [u8; PAGE_SIZE] {
    let mut page = [0; PAGE_SIZE];
    match error {
        Some(QueuedError { tag, task_file }) => {
            // Bytes 2 to 13 are as in a device's Register FIS.
            page[..14].copy_from_slice(&task_file.reg_d2h(false)[..14]);
            page[0] = *tag;
            page[1] = 0;
        }
        // No queued command failed.
        None => page[0] = 0x80,
    }
    checksum(page)
}

/// Sets the last byte so that all bytes add up to 0.
fn checksum(mut page: [u8; PAGE_SIZE]) -> [u8; PAGE_SIZE] {
    let sum = page[..511].iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    page[511] = sum.wrapping_neg();
    page
}
