//! Reading the bitmaps of an image that is opened.

use std::io;
use std::sync::Arc;

use super::directory::{self, Entry, Extension};
use super::{Directory, Told, data_clusters, is_data, tell};
use crate::drivers::qcow2::context::Channels;
use crate::drivers::qcow2::engine::Places;
use crate::drivers::qcow2::header::Header;
use crate::drivers::qcow2::steps::{read, write};
use crate::drivers::qcow2::storage::sync;
use crate::track::{DirtyBitmap, Storage};

/// Most bits of all bitmaps of an image, 512 MiB of memory: more is an image that is made to take memory.
const MAX_BITS: u64 = 1 << 32;

/// Bits that must be 0 in an entry of a bitmap's table that leads to a cluster.
const DATA_RESERVED: u64 = 0xff00_0000_0000_01ff;

/// What an image has.
#[derive(Default)]
pub(in super::super) struct Loaded {
    pub(super) directory: Directory,
    pub(super) bitmaps: Vec<Arc<DirtyBitmap>>,
}

/// Most names in a log line.
const TOLD: usize = 8;

impl Loaded {
    /// Logs that the image's bitmaps do not survive a kill, and why.
    pub(in super::super) fn tell_not_kept(&self, node: &str, why: &str) {
        if self.bitmaps.iter().any(|bitmap| bitmap.storage() == Storage::Image) {
            log::warn!("dirty bitmaps of node '{node}' do not survive a kill: {why}");
        }
    }

    /// The names of inconsistent bitmaps, for a log line. `None`: there are none.
    pub(in super::super) fn inconsistent(&self) -> Option<String> {
        let all = self.bitmaps.iter();
        let all = all.filter(|bitmap| bitmap.storage() == Storage::Inconsistent);
        let names: Vec<_> = all.map(|bitmap| format!("{:?}", bitmap.name())).collect();
        let told = names.get(..TOLD).unwrap_or(&names).join(", ");
        match names.len() {
            0 => None,
            1..=TOLD => Some(told),
            more => Some(format!("{told} and {} more", more - TOLD)),
        }
    }
}

fn invalid(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{}: qemu-img check", why.into()))
}

/// Reads the bitmaps of an image. `end`: that of the file. `mark`: has the file say that they are in use, on stable
/// storage on return.
pub(in super::super) async fn load(
    channels: &Channels,
    header: &Header,
    extension: Extension,
    end: u64,
    read_only: bool,
    mark: bool,
) -> io::Result<Loaded> {
    let at @ (offset, len) = extension.directory;
    if offset + len > end {
        return Err(invalid("the bitmap directory is beyond the end of the file"));
    }
    let mut bytes = read(channels, offset, len as usize).await?;
    let parsed = directory::parse(&bytes, extension, header.cluster);
    let mut entries = parsed.map_err(invalid)?;
    let valid = entries.iter().filter(|entry| !entry.in_use);
    let bits = valid.map(|entry| header.size.div_ceil(entry.granularity()));
    if bits.fold(0, u64::saturating_add) > MAX_BITS {
        return Err(invalid(format!("the bitmaps have more than {MAX_BITS} bits")));
    }
    let mut bitmaps = Vec::new();
    for entry in &entries {
        let storage = match (entry.in_use, read_only) {
            (true, _) => Storage::Inconsistent,
            (false, true) => Storage::ReadOnlyImage,
            (false, false) => Storage::Image,
        };
        let of = |storage| {
            let (name, granularity) = (entry.name.clone(), entry.granularity());
            DirtyBitmap::new(name, header.size, granularity, entry.auto, storage)
        };
        let mut bitmap = of(storage);
        // A damaged bitmap does not keep the disk from being used.
        if !entry.in_use && !load_bits(channels, header, end, entry, &bitmap).await? {
            bitmap = of(Storage::Inconsistent);
        }
        bitmaps.push(Arc::new(bitmap));
    }
    if mark && !entries.is_empty() {
        if entries.iter().any(|entry| !entry.in_use) {
            directory::set_in_use(&mut bytes, &entries);
            write(channels, offset, &bytes)?.await.0?;
            entries.iter_mut().for_each(|entry| entry.in_use = true);
        }
        // Marks that were found may be of a process that was killed before its sync. Without one, a power cut would
        // take them back, and leave later writes whose bits no bitmap has.
        sync(channels).await?;
    }
    Ok(Loaded { directory: Directory { entries, at }, bitmaps })
}

/// Reads the directory alone, for a description. `end`: that of the file.
pub(in super::super) async fn describe(
    channels: &Channels,
    header: &Header,
    extension: Extension,
    end: u64,
) -> io::Result<(Vec<Told>, usize)> {
    let (offset, len) = extension.directory;
    if offset + len > end {
        return Err(invalid("the bitmap directory is beyond the end of the file"));
    }
    let bytes = read(channels, offset, len as usize).await?;
    let entries = directory::parse(&bytes, extension, header.cluster).map_err(invalid)?;
    Ok(tell(&entries))
}

/// Adds the places of an image's bitmaps, for a check. `end`: that of the file.
pub(in super::super) async fn list(
    channels: &Channels,
    header: &Header,
    extension: Extension,
    end: u64,
    places: &mut Places,
) -> io::Result<()> {
    let (offset, len) = extension.directory;
    places.bitmaps.push(offset..offset + len);
    let bytes = match offset + len <= end.next_multiple_of(header.cluster) {
        true => read(channels, offset, len as usize).await?,
        false => Vec::new(),
    };
    let entries = match directory::parse(&bytes, extension, header.cluster) {
        Ok(entries) => entries,
        Err(why) => {
            places.errors.push(format!("bitmaps: {why}"));
            return Err(invalid(why));
        }
    };
    for entry in &entries {
        let (at, count) = entry.table;
        places.bitmaps.push(at..at + u64::from(count) * 8);
        let damaged = || invalid(format!("bitmap '{}' is damaged", entry.name));
        for raw in data_clusters(channels, entry, end).await?.ok_or_else(damaged)? {
            // All bits are 0, or 1.
            if raw <= 1 {
                continue;
            }
            match raw & DATA_RESERVED == 0 && raw.is_multiple_of(header.cluster) {
                true => places.bitmaps.push(raw..raw + header.cluster),
                false => {
                    let name = &entry.name;
                    places.errors.push(format!("bitmap '{name}': table entry {raw:#x}"));
                }
            }
        }
    }
    Ok(())
}

/// Reads a bitmap's bits. Returns whether they were found: `false` if an entry of its table leads nowhere.
async fn load_bits(
    channels: &Channels,
    header: &Header,
    end: u64,
    entry: &Entry,
    bitmap: &DirtyBitmap,
) -> io::Result<bool> {
    let damaged = || invalid(format!("bitmap '{}' is damaged", entry.name));
    let bytes = bitmap.bits().byte_len();
    if u64::from(entry.table.1) != bytes.div_ceil(header.cluster) {
        return Err(damaged());
    }
    let ones = vec![0xff; header.cluster as usize];
    let table = data_clusters(channels, entry, end).await?.ok_or_else(damaged)?;
    for (raw, at) in table.into_iter().zip((0..bytes).step_by(header.cluster as usize)) {
        let len = header.cluster.min(bytes - at) as usize;
        match raw {
            0 => {}
            1 => bitmap.bits().set_bytes(at, &ones[..len]),
            offset if is_data(offset, header.cluster, end) => {
                let bits = read(channels, offset, len).await?;
                bitmap.bits().set_bytes(at, &bits);
            }
            _ => return Ok(false),
        }
    }
    Ok(true)
}
