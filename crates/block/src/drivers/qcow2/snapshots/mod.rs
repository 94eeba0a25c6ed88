//! Internal snapshots: the table that lists them. [`change`] makes and deletes them.
//!
//! The fields are those of the specification, docs/interop/qcow2.rst in QEMU's sources.

mod change;

pub(super) use self::change::Snapshots;

use std::io;
use std::ops::Range;
use std::time::Duration;

use nix::errno::Errno;

use super::context::Channels;
use super::engine::{Owner, Places};
use super::header::{Header, MAX_L1};
use super::steps::{ENTRY, number, read_up_to};
use crate::node::InternalSnapshot;

/// Most bytes of the snapshot table, and most snapshots, as in QEMU.
const MAX_TABLE: u64 = 64 << 20;
const MAX_SNAPSHOTS: usize = 65536;
/// Bytes of an entry before its extra data, the snapshot's id and its name.
const FIXED: usize = 40;
/// Bytes of extra data that a snapshot of version 3 has at least.
const EXTRA: u64 = 16;
/// Bytes of extra data with the number of instructions, and what stands for none.
const EXTRA_ICOUNT: u64 = 24;
const NO_ICOUNT: u64 = u64::MAX;
/// Most bytes of extra data, as in QEMU.
const MOST_EXTRA: u64 = 1024;
/// Most bytes of a name, as in QEMU.
const MAX_NAME: usize = 255;
/// Bytes that are read at once.
const CHUNK: usize = 64 << 10;

/// An entry of the snapshot table.
#[derive(Debug, Clone)]
pub(super) struct Snapshot {
    /// What QMP shows of it.
    pub(super) told: InternalSnapshot,
    /// The bytes of its L1 table in the file, as its entry has them.
    l1: Range<u64>,
    /// The entry as the table has it, with extra data that is not known here.
    bytes: Vec<u8>,
    /// Bytes of its extra data.
    extra: u64,
    /// Bytes of the disk, if its entry has them.
    disk_size: Option<u64>,
    /// Why its L1 table is not used.
    fault: Option<&'static str>,
}

/// Bytes of an entry that begins with these.
fn len(fixed: &[u8; FIXED]) -> u64 {
    let (id, name) = (number(&fixed[12..14]), number(&fixed[14..16]));
    (FIXED as u64 + extra(fixed) + id + name).next_multiple_of(8)
}

/// Bytes of extra data of an entry that begins with these.
fn extra(fixed: &[u8; FIXED]) -> u64 {
    number(&fixed[36..40])
}

impl Snapshot {
    /// Parses a whole entry.
    fn parse(bytes: &[u8]) -> Option<Snapshot> {
        let fixed: &[u8; FIXED] = bytes.first_chunk()?;
        let at = |range: Range<usize>| number(&fixed[range]);
        let (l1_at, l1_len, extra) = (at(0..8), at(8..12) * ENTRY as u64, extra(fixed));
        let id_at = FIXED + extra as usize;
        let name_at = id_at + at(12..14) as usize;
        let text = |range: Range<usize>| Some(String::from_utf8_lossy(bytes.get(range)?).into());
        let in_extra = |nth: usize| {
            let first = FIXED + nth * 8;
            let is_there = nth as u64 * 8 + 8 <= extra;
            is_there.then(|| bytes.get(first..first + 8).map(number))?
        };
        Some(Snapshot {
            told: InternalSnapshot {
                id: text(id_at..name_at)?,
                name: text(name_at..name_at + at(14..16) as usize)?,
                vm_state_size: in_extra(0).unwrap_or(at(32..36)),
                date: Duration::new(at(16..20), (at(20..24) as u32).min(999_999_999)),
                vm_clock: Duration::from_nanos(at(24..32)),
                icount: in_extra(2).filter(|icount| *icount != NO_ICOUNT),
            },
            l1: l1_at..l1_at.saturating_add(l1_len),
            bytes: bytes.to_vec(),
            extra,
            disk_size: in_extra(1),
            fault: None,
        })
    }

    /// The entry with all extra data that is known here. `disk_size`: that of a snapshot without a size.
    fn completed(&self, disk_size: u64) -> Vec<u8> {
        if self.extra >= EXTRA_ICOUNT {
            return self.bytes.clone();
        }
        let (fixed, rest) = self.bytes.split_at(FIXED);
        let (before, rest) = rest.split_at(self.extra as usize);
        let texts = number(&fixed[12..14]) + number(&fixed[14..16]);
        let mut extra = [self.told.vm_state_size, disk_size, NO_ICOUNT].map(u64::to_be_bytes);
        let known = before.len() / 8 * 8;
        extra.as_flattened_mut()[..known].copy_from_slice(&before[..known]);
        let mut bytes = fixed.to_vec();
        bytes[36..40].copy_from_slice(&(EXTRA_ICOUNT as u32).to_be_bytes());
        bytes.extend(extra.as_flattened());
        bytes.extend(&rest[..texts as usize]);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    }

    /// Why its L1 table cannot be where the entry has it, in a file with such clusters and such an end.
    fn fault(&self, cluster: u64, file_end: u64) -> Option<&'static str> {
        let Range { start, end } = self.l1;
        match end - start > MAX_L1 {
            true => Some("Snapshot L1 table too large"),
            false => (!start.is_multiple_of(cluster) || end > file_end)
                .then_some("Snapshot L1 table offset invalid"),
        }
    }

    /// An entry for the disk as it is now. `l1`: its L1 table in the file.
    fn new(told: InternalSnapshot, l1: Range<u64>, disk_size: u64) -> Snapshot {
        let mut bytes = l1.start.to_be_bytes().to_vec();
        bytes.extend((((l1.end - l1.start) / ENTRY as u64) as u32).to_be_bytes());
        bytes.extend((told.id.len() as u16).to_be_bytes());
        bytes.extend((told.name.len() as u16).to_be_bytes());
        bytes.extend((told.date.as_secs() as u32).to_be_bytes());
        bytes.extend(told.date.subsec_nanos().to_be_bytes());
        bytes.extend((told.vm_clock.as_nanos() as u64).to_be_bytes());
        // There is no state of a virtual machine.
        bytes.extend(0u32.to_be_bytes());
        bytes.extend((EXTRA_ICOUNT as u32).to_be_bytes());
        bytes.extend([0, disk_size, NO_ICOUNT].map(u64::to_be_bytes).as_flattened());
        bytes.extend(told.id.as_bytes());
        bytes.extend(told.name.as_bytes());
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        Snapshot { told, l1, bytes, extra: EXTRA_ICOUNT, disk_size: Some(disk_size), fault: None }
    }
}

/// The header of the disk at a snapshot, which an id or else a name tells, in a file that ends at `file_end`.
///
/// # Errors
///
/// There is no such snapshot, or it is damaged.
pub(super) async fn header_at(
    channels: &Channels,
    header: &Header,
    file_end: u64,
    wanted: &str,
) -> io::Result<Header> {
    let (all, _) = read_all(channels, header, file_end).await?;
    let by_id = all.iter().find(|snapshot| snapshot.told.id == wanted);
    let found = by_id.or_else(|| all.iter().find(|snapshot| snapshot.told.name == wanted));
    let missing =
        || io::Error::new(io::ErrorKind::NotFound, format!("Can't find snapshot '{wanted}'"));
    let found = found.ok_or_else(missing)?;
    let damaged = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
    if let Some(why) = found.fault {
        return Err(damaged(why.to_owned()));
    }
    let size = found.disk_size.unwrap_or(header.size);
    header.at(size, found.l1.clone()).map_err(|error| damaged(error.to_string()))
}

/// Adds the places of internal snapshots of a file that ends at `file_end`, for a check.
///
/// # Errors
///
/// The snapshot table is damaged, or cannot be read.
pub(super) async fn list(
    channels: &Channels,
    header: &Header,
    file_end: u64,
    places: &mut Places,
) -> io::Result<()> {
    let (snapshots, table) = read_all(channels, header, file_end).await?;
    for (index, snapshot) in snapshots.iter().enumerate() {
        if header.version > 2 && snapshot.extra < EXTRA {
            places.incomplete.push(index);
        }
        let Range { start, end } = snapshot.l1;
        places.snapshots.push((index.to_string(), start, (end - start) / ENTRY as u64));
    }
    places.snapshot_table = table;
    if !places.incomplete.is_empty() {
        places.completed_table =
            snapshots.iter().flat_map(|snapshot| snapshot.completed(header.size)).collect();
        if places.completed_table.len() as u64 > MAX_TABLE {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "Snapshot table too large"));
        }
    }
    Ok(())
}

/// The places of the snapshot table and of the snapshots' L1 tables, in bytes of the file.
pub(super) fn places(snapshots: &[Snapshot], table: Range<u64>) -> Vec<(Range<u64>, Owner)> {
    let sound = snapshots.iter().filter(|snapshot| snapshot.fault.is_none());
    let l1_tables = sound.map(|snapshot| (snapshot.l1.clone(), Owner::InactiveL1));
    l1_tables.chain([(table, Owner::SnapshotTable)]).collect()
}

/// The snapshots of a file that ends at `file_end`, and the bytes of their table.
///
/// # Errors
///
/// The snapshot table is damaged, or cannot be read.
pub(super) async fn read_all(
    channels: &Channels,
    header: &Header,
    file_end: u64,
) -> io::Result<(Vec<Snapshot>, Range<u64>)> {
    let damaged = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why);
    let (start, count) = header.snapshots;
    if count as usize > MAX_SNAPSHOTS {
        return Err(damaged("Snapshot table too large"));
    }
    if count > 0 && (!start.is_multiple_of(header.cluster) || i64::try_from(start).is_err()) {
        return Err(damaged("Snapshot table offset invalid"));
    }
    let mut snapshots = Vec::new();
    // The bytes from `at` on.
    let (mut at, mut bytes) = (start, Vec::new());
    for index in 0..count {
        if bytes.len() < FIXED {
            bytes = read_up_to(channels, file_end, at, CHUNK).await?;
        }
        let fixed = bytes.first_chunk().ok_or(Errno::EIO)?;
        if extra(fixed) > MOST_EXTRA {
            let why = format!(
                "Too much extra metadata in snapshot table entry {index}: qemu-img check -r all removes it"
            );
            return Err(damaged(&why));
        }
        let len = len(fixed) as usize;
        if bytes.len() < len {
            bytes = read_up_to(channels, file_end, at, CHUNK.max(len)).await?;
        }
        let snapshot = bytes.get(..len).and_then(Snapshot::parse).ok_or(Errno::EIO)?;
        let fault = snapshot.fault(header.cluster, file_end);
        snapshots.push(Snapshot { fault, ..snapshot });
        at += len as u64;
        if at - start > MAX_TABLE {
            return Err(damaged("Snapshot table too large"));
        }
        bytes.drain(..len);
    }
    Ok((snapshots, start..at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_read_as_it_was_written() {
        let told = InternalSnapshot {
            id: "12".to_owned(),
            name: "before the upgrade".to_owned(),
            vm_state_size: 0,
            date: Duration::new(1_700_000_000, 123_456_789),
            vm_clock: Duration::from_nanos(99_000_000_123),
            icount: None,
        };
        let new = Snapshot::new(told.clone(), 0x30000..0x30010, 1 << 30);
        assert_eq!(new.bytes.len() % 8, 0);
        assert_eq!(new.bytes.first_chunk().map(len), Some(new.bytes.len() as u64));
        let parsed = Snapshot::parse(&new.bytes).unwrap();
        assert_eq!((parsed.told, parsed.l1, parsed.extra), (told, 0x30000..0x30010, 24));
        assert_eq!(number(&new.bytes[FIXED + 8..FIXED + 16]), 1 << 30);
        assert!(Snapshot::parse(&new.bytes[..FIXED + 30]).is_none());
        // Of version 2, without extra data: the size of the state is in the fixed part.
        let mut old = new.bytes[..FIXED].to_vec();
        old[35] = 7;
        old[36..40].fill(0);
        old.extend(b"12");
        old.extend(b"before the upgrade");
        let told = Snapshot::parse(&old).unwrap().told;
        assert_eq!((told.vm_state_size, told.icount, &*told.id), (7, None, "12"));
    }
}
