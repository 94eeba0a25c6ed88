//! Reads a command slot from guest memory and checks its limits: header, FIS, PRD table.
//!
//! Runs on the thread that writes the doorbell. Each byte is read once.

use guest_memory::{AccessError, GuestMemory};

use super::ata::{Action, Broken, decode};
use super::config::DriveInfo;
use super::fis::{REG_FIS_SIZE, RegH2d};
use super::trim::RANGE_SIZE;

/// Length of a command header, bytes (AHCI 1.3.1, 4.2.2), and offset of the PRD table in a command table
/// (4.2.3).
pub(crate) const HEADER_SIZE: usize = 32;
const PRDT_AT: u64 = 0x80;
/// Length of a PRD entry, bytes, and the number of entries per read.
const PRD_SIZE: usize = 16;
const PRD_CHUNK: usize = 64;
/// Maximum capacity of a segment list that a slot keeps for its next command.
const KEPT_SEGMENTS: usize = 4096;

/// A range of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) addr: u64,
    pub(crate) len: u32,
}

/// A command as read from its slot.
#[derive(Debug)]
pub(crate) struct Command {
    pub(crate) action: Action,
    /// Where the data is in memory. As long as the transfer, unless `short`.
    pub(crate) segments: Vec<Segment>,
    /// The PRD table describes less memory than the transfer needs.
    pub(crate) short: bool,
    /// A PRD entry requests an interrupt once its data is transferred.
    pub(crate) descriptor_interrupt: bool,
}

impl Default for Command {
    fn default() -> Self {
        Command {
            action: Action::Nothing,
            segments: Vec::new(),
            short: false,
            descriptor_interrupt: false,
        }
    }
}

/// What a port's commands are read with: memory, address, drive.
pub(crate) struct Source<'a> {
    pub(crate) memory: &'a GuestMemory,
    /// The command list.
    pub(crate) clb: u64,
    pub(crate) drive: &'a DriveInfo,
}

impl Command {
    /// Reads slot `slot`.
    pub(crate) fn parse(&mut self, source: &Source<'_>, slot: u8) {
        self.segments.clear();
        self.short = false;
        self.descriptor_interrupt = false;
        self.action = match self.read(source, slot) {
            Ok(action) => action,
            Err(AccessError { .. }) => Action::Broken(Broken::NotMemory),
        };
    }

    fn read(&mut self, source: &Source<'_>, slot: u8) -> Result<Action, AccessError> {
        let mut header = [0; HEADER_SIZE];
        let at = source.clb.wrapping_add(u64::from(slot) * HEADER_SIZE as u64);
        source.memory.read_bytes(at, &mut header)?;
        let [h0, _, h2, h3, ..] = header;
        let fis_len = usize::from(h0 & 0x1f) * 4;
        let prds = u16::from_le_bytes([h2, h3]);
        let table = read_u64(&header, 8) & !0x7f;

        if fis_len < REG_FIS_SIZE {
            return Ok(Action::Broken(Broken::Frame));
        }
        let mut fis = [0; REG_FIS_SIZE];
        source.memory.read_bytes(table, &mut fis)?;
        let Some(fis) = RegH2d::from_bytes(&fis) else {
            return Ok(Action::Broken(Broken::Frame));
        };
        let action = decode(&fis, slot, source.drive);
        if action.data_len() > 0 {
            self.read_prdt(source.memory, table.wrapping_add(PRDT_AT), prds, action.data_len())?;
        }
        Ok(action)
    }

    /// Reads PRD entries until their segments have `len` bytes.
    fn read_prdt(
        &mut self,
        memory: &GuestMemory,
        mut at: u64,
        prds: u16,
        len: u64,
    ) -> Result<(), AccessError> {
        let (mut entries, mut left) = (usize::from(prds), len);
        while entries > 0 && left > 0 {
            let mut chunk = [0; PRD_SIZE * PRD_CHUNK];
            let n = entries.min(PRD_CHUNK);
            let chunk = &mut chunk[..n * PRD_SIZE];
            memory.read_bytes(at, chunk)?;
            for entry in chunk.chunks_exact(PRD_SIZE) {
                if left == 0 {
                    break;
                }
                let flags = u32::from_le_bytes([entry[12], entry[13], entry[14], entry[15]]);
                // The count is one less than the length. A driver that clears bit 0, which must be 1, gets an odd length.
                let bytes = u64::from(flags & 0x3f_ffff) + 1;
                let take = bytes.min(left);
                let addr = read_u64(entry, 0) & !1;
                self.segments.push(Segment { addr, len: take as u32 });
                self.descriptor_interrupt |= flags >> 31 != 0;
                left -= take;
            }
            entries -= n;
            at = at.wrapping_add((n * PRD_SIZE) as u64);
        }
        self.short = left > 0;
        Ok(())
    }

    /// Ends the command: frees a list that is longer than usual.
    pub(crate) fn release(&mut self) {
        if self.segments.capacity() > KEPT_SEGMENTS {
            self.segments = Vec::new();
        }
    }

    /// The amount of work: number of segments, or of ranges to trim.
    pub(crate) fn pieces(&self) -> usize {
        match self.action {
            Action::Trim { len } => len as usize / RANGE_SIZE,
            _ => self.segments.len(),
        }
    }

    /// Whether the list of segments is short enough to be kept.
    pub(crate) fn is_ordinary(&self) -> bool {
        self.segments.len() <= KEPT_SEGMENTS
    }
}

fn read_u64(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}
