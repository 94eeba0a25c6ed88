//! The places of a journal's sectors.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::{SLOTS, invalid, number};
use crate::drivers::qcow2::steps::{SECTOR, Sectors};

/// A slot: the number of its sector, that of the commit, and the sector.
pub(super) const SLOT: usize = 16 + SECTOR;
/// In the number of a sector: it is not metadata any more.
const FORGOTTEN: u64 = 1 << 63;
/// Numbers are less: those of bytes that a file can have.
const MOST: u64 = i64::MAX as u64 / SECTOR as u64;
/// Bytes written at once, at most.
const RUN: usize = 1 << 20;

/// Which slots are in use.
#[derive(Debug, Default)]
pub(super) struct Slots {
    /// The newest of each sector.
    pub(super) of: HashMap<u64, JournalSlot>,
    pub(super) free: Vec<usize>,
    /// How many there have been.
    pub(super) all: usize,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct JournalSlot {
    pub(super) slot: usize,
    pub(super) commit: u64,
}

impl Slots {
    pub(super) fn read(bytes: &[u8], written: u64, committed: u64) -> io::Result<(Slots, Sectors)> {
        let mut slots = Slots::default();
        let mut sectors = Sectors::new();
        let (all, _) = bytes.as_chunks::<SLOT>();
        slots.all = all.len();
        for (slot, bytes) in all.iter().enumerate() {
            let (Some(tagged), Some(commit)) = (number(bytes, 0), number(bytes, 8)) else {
                continue;
            };
            let found = JournalSlot { slot, commit };
            if commit <= written || commit > committed {
                slots.free.push(slot);
                continue;
            }
            let number = tagged & !FORGOTTEN;
            if number >= MOST {
                return Err(invalid("a sector beyond the end of any image"));
            }
            match slots.of.entry(number) {
                Entry::Occupied(other) if other.get().commit > commit => {
                    slots.free.push(slot);
                    continue;
                }
                Entry::Occupied(mut other) => slots.free.push(other.insert(found).slot),
                Entry::Vacant(entry) => drop(entry.insert(found)),
            }
            match bytes.last_chunk::<SECTOR>() {
                Some(sector) if tagged == number => drop(sectors.insert(number, Box::new(*sector))),
                _ => drop(sectors.remove(&number)),
            }
        }
        Ok((slots, sectors))
    }

    pub(super) fn take(&mut self) -> usize {
        self.free.pop().unwrap_or_else(|| {
            self.all += 1;
            self.all - 1
        })
    }

    /// Those up to a commit are free.
    pub(super) fn give_up(&mut self, commit: u64) {
        let free = &mut self.free;
        self.of.retain(|_, slot| {
            let stays = slot.commit > commit;
            if !stays {
                free.push(slot.slot);
            }
            stays
        });
        // The lowest first, so that those of a commit follow each other.
        free.sort_unstable_by(|one, other| other.cmp(one));
    }
}

/// Slots that follow each other, to be written at once.
#[derive(Default)]
pub(super) struct Run {
    first: usize,
    pub(super) bytes: Vec<u8>,
}

impl Run {
    pub(super) fn add(
        &mut self,
        file: &File,
        slot: usize,
        number: u64,
        commit: u64,
        sector: Option<&[u8; SECTOR]>,
    ) -> io::Result<()> {
        let next = self.first + self.bytes.len() / SLOT;
        if (slot != next || self.bytes.len() >= RUN) && !self.bytes.is_empty() {
            self.write(file)?;
            self.bytes.clear();
        }
        if self.bytes.is_empty() {
            self.first = slot;
        }
        let tag = if sector.is_some() { number } else { number | FORGOTTEN };
        self.bytes.extend_from_slice(&tag.to_ne_bytes());
        self.bytes.extend_from_slice(&commit.to_ne_bytes());
        self.bytes.extend_from_slice(sector.unwrap_or(&[0; SECTOR]));
        Ok(())
    }

    pub(super) fn write(&self, file: &File) -> io::Result<()> {
        file.write_all_at(&self.bytes, (SLOTS + self.first * SLOT) as u64)
    }
}
