//! Where internal snapshots have their metadata. Snapshots are neither read nor changed here: their tables must not
//! be written over.
//!
//! The fields are those of the specification, docs/interop/qcow2.rst in QEMU's sources.

use std::io;
use std::ops::Range;

use nix::errno::Errno;

use super::context::Channels;
use super::engine::{Owner, Places};
use super::header::{Header, MAX_L1};
use super::steps::{ENTRY, number, read};

/// Most bytes of the snapshot table, as in QEMU.
const MAX_TABLE: u64 = 64 << 20;
/// Bytes of an entry before its extra data, the snapshot's id and its name.
const FIXED: usize = 40;
/// Bytes of extra data that a snapshot of version 3 has at least.
const EXTRA: u64 = 16;
/// Bytes that are read at once.
const CHUNK: usize = 64 << 10;

/// An entry of the snapshot table.
struct Snapshot {
    /// The bytes of its L1 table in the file.
    l1: Range<u64>,
    /// Bytes of the entry.
    len: usize,
    /// Bytes of its extra data.
    extra: u64,
}

impl Snapshot {
    fn parse(fixed: &[u8; FIXED]) -> Option<Snapshot> {
        let (l1_at, l1_entries) = (number(&fixed[..8]), number(&fixed[8..12]));
        let (id, name) = (number(&fixed[12..14]), number(&fixed[14..16]));
        let extra = number(&fixed[36..40]);
        let l1_len = Some(l1_entries * ENTRY as u64).filter(|len| *len <= MAX_L1)?;
        let len = (FIXED as u64 + extra + id + name).next_multiple_of(8);
        Some(Snapshot { l1: l1_at..l1_at.checked_add(l1_len)?, len: len as usize, extra })
    }
}

/// Adds the places of internal snapshots, for a check.
///
/// # Errors
///
/// The snapshot table is damaged, or cannot be read.
pub(super) async fn list(
    channels: &Channels,
    header: &Header,
    places: &mut Places,
) -> io::Result<()> {
    let (snapshots, table) = read_all(channels, header).await?;
    for (index, snapshot) in snapshots.iter().enumerate() {
        if header.version > 2 && snapshot.extra < EXTRA {
            places.errors.push(format!("snapshot table entry {index} is incomplete"));
        }
        let Range { start, end } = snapshot.l1;
        places.snapshots.push((index.to_string(), start, (end - start) / ENTRY as u64));
    }
    places.snapshot_table = table;
    Ok(())
}

/// The places of the snapshot table and of the snapshots' L1 tables, in bytes of the file.
///
/// # Errors
///
/// The snapshot table is damaged, or cannot be read.
pub(super) async fn places(
    channels: &Channels,
    header: &Header,
) -> io::Result<Vec<(Range<u64>, Owner)>> {
    let (snapshots, table) = read_all(channels, header).await?;
    let mut places: Vec<_> =
        snapshots.into_iter().map(|snapshot| (snapshot.l1, Owner::InactiveL1)).collect();
    places.push((table, Owner::SnapshotTable));
    Ok(places)
}

/// The snapshots, and the bytes of their table.
async fn read_all(channels: &Channels, header: &Header) -> io::Result<(Vec<Snapshot>, Range<u64>)> {
    let damaged = || {
        let why = "the snapshot table is damaged: qemu-img check -r all repairs it";
        io::Error::new(io::ErrorKind::InvalidData, why)
    };
    let (start, count) = header.snapshots;
    let mut snapshots = Vec::new();
    // The bytes from `at` on.
    let (mut at, mut bytes) = (start, Vec::new());
    for _ in 0..count {
        if bytes.len() < FIXED {
            bytes = read(channels, at, CHUNK).await?;
        }
        let snapshot = bytes.first_chunk().and_then(Snapshot::parse).ok_or_else(damaged)?;
        at = at.checked_add(snapshot.len as u64).ok_or(Errno::EOVERFLOW)?;
        if at - start > MAX_TABLE {
            return Err(damaged());
        }
        bytes.drain(..snapshot.len.min(bytes.len()));
        snapshots.push(snapshot);
    }
    Ok((snapshots, start..at))
}
