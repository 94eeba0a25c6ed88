//! The ranges of DATA SET MANAGEMENT with TRIM (ATA8-ACS, 7.10.3).

use guest_memory::{AccessError, MemoryView};

use super::ata::{SECTOR, TRIM_BLOCKS};
use super::command::Command;
use super::config::DriveInfo;

/// Bytes of a range: 48 bits of LBA, 16 bits of sectors, of which there may be none.
pub(crate) const RANGE_SIZE: usize = 8;
const MAX_BYTES: usize = TRIM_BLOCKS as usize * SECTOR as usize;

/// Byte ranges `(offset, length)`, each on the disk.
#[derive(Debug, Default)]
pub(crate) struct Ranges(Vec<(u64, u64)>);

impl Ranges {
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn get(&self, nth: usize) -> (u64, u64) {
        self.0.get(nth).copied().unwrap_or_default()
    }

    /// Drivers cut long ranges up, since one has at most 65535 sectors.
    fn add(&mut self, offset: u64, len: u64) {
        match self.0.last_mut() {
            Some((last, last_len)) if *last + *last_len == offset => *last_len += len,
            _ => self.0.push((offset, len)),
        }
    }
}

/// Reads the ranges of `command` into `ranges`. `false`: one is not on the disk, and nothing is to be
/// done.
pub(crate) fn read_ranges(
    command: &Command,
    memory: &MemoryView,
    drive: &DriveInfo,
    ranges: &mut Ranges,
) -> Result<bool, AccessError> {
    ranges.0.clear();
    let mut bytes = [0; MAX_BYTES];
    let mut filled = 0;
    for segment in &command.segments {
        let end = (filled + segment.len as usize).min(MAX_BYTES);
        memory.read_bytes(segment.addr, &mut bytes[filled..end])?;
        filled = end;
    }
    for entry in bytes[..filled].chunks_exact(RANGE_SIZE) {
        let [l0, l1, l2, l3, l4, l5, c0, c1] = *entry else { continue };
        let lba = u64::from_le_bytes([l0, l1, l2, l3, l4, l5, 0, 0]);
        let sectors = u64::from(u16::from_le_bytes([c0, c1]));
        if sectors == 0 {
            continue;
        }
        if lba + sectors > drive.sectors {
            return Ok(false);
        }
        ranges.add(lba * SECTOR, sectors * SECTOR);
    }
    Ok(true)
}
