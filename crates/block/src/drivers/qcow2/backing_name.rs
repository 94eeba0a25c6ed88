//! The name of the backing file in the header, changed while the image is in use.
//!
//! One sector decides: the new name is on stable storage, at a place that nothing refers to, before the first sector of
//! the header refers to it. A kill or a power cut leaves the one name or the other.

use event_loop::sync::lock;
use nix::errno::Errno;

use super::context::Channels;
use super::engine::Engine;
use super::header::{BACKING_FORMAT, END, FEATURE_NAMES, MAX_NAME, V2_LEN};
use super::image::Image;
use super::steps::{SECTOR, read, write};
use super::storage::sync;
use crate::node::BackingName;

/// Bytes from the image's beginning that are looked at: a larger cluster has nothing of the header behind them, as a
/// rule, and if it has, the name is not changed.
const LOOKED_AT: usize = 4096;
/// Where names are put that do not fit into the first sector. They end before the mark of a journal.
const PLACES: [usize; 3] = [512, 1536, 2560];

/// A header with another name.
#[derive(Debug, PartialEq, Eq)]
struct Renamed {
    header: [u8; SECTOR],
    /// Sectors of the name, if they are not in the header's.
    name: Option<(u64, Vec<u8>)>,
}

fn number(bytes: &[u8], at: usize, len: usize) -> Option<u64> {
    let bytes = bytes.get(at..)?.get(..len)?;
    Some(bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

/// Header extensions, without the end, and where they end.
type Extensions<'a> = (Vec<(u32, &'a [u8])>, usize);

/// The extensions of a header whose first bytes these are. `None`: they go on behind.
fn extensions(first: &[u8], mut at: usize, end: usize) -> Option<Extensions<'_>> {
    let mut found = Vec::new();
    loop {
        if at + 8 > end {
            return Some((found, at));
        }
        let (kind, len) = (number(first, at, 4)? as u32, number(first, at + 4, 4)? as usize);
        if kind == END {
            return Some((found, at + 8));
        }
        found.push((kind, first.get(at + 8..)?.get(..len)?));
        at += 8 + len.next_multiple_of(8);
    }
}

/// The header with another name of the backing file, or none. `None`: there is no room for it.
fn renamed(first: &[u8], cluster: u64, name: Option<&BackingName>) -> Option<Renamed> {
    let version = number(first, 4, 4)?;
    let header_len = if version == 2 { V2_LEN } else { number(first, 100, 4)? as usize };
    let old_name = number(first, 8, 8)? as usize
        ..number(first, 8, 8)? as usize + number(first, 16, 4)? as usize;
    let end = match (version, old_name.start) {
        (2, start @ 1..) => start,
        _ => first.len(),
    };
    let (all, old_end) = extensions(first, header_len, end)?;
    let format = name.and_then(|name| name.format.as_deref());
    let lay_out = |keep: fn(u32) -> bool| {
        let kept = all.iter().filter(|(kind, _)| *kind != BACKING_FORMAT && keep(*kind));
        let format = format.map(|format| (BACKING_FORMAT, format.as_bytes()));
        let mut header = first.get(..header_len)?.to_vec();
        for (kind, data) in format.into_iter().chain(kept.copied()) {
            header.extend(kind.to_be_bytes());
            header.extend((data.len() as u32).to_be_bytes());
            header.extend(data);
            header.resize(header.len().next_multiple_of(8), 0);
        }
        header.extend([0; 8]);
        (header.len() <= SECTOR).then_some(header)
    };
    // The names of features are for error messages only.
    let mut header = lay_out(|_| true).or_else(|| lay_out(|kind| kind != FEATURE_NAMES))?;
    let text = name.map_or(&[][..], |name| name.filename.as_bytes());
    let (at, apart) = match (text.len(), header.len()) {
        (0, _) => (0, None),
        (len, _) if len > MAX_NAME => return None,
        (len, at) if at + len <= SECTOR => {
            header.extend(text);
            (at, None)
        }
        (len, _) => {
            let padded = len.next_multiple_of(SECTOR);
            let is_free = |place: &&usize| {
                let end = **place + padded;
                let old = old_name.start.max(SECTOR)..old_name.end;
                **place >= old_end
                    && (old.is_empty() || end <= old.start || **place >= old.end)
                    && end as u64 + SECTOR as u64 <= cluster
            };
            let at = *PLACES.iter().find(is_free)?;
            let mut sectors = text.to_vec();
            sectors.resize(padded, 0);
            (at, Some((at as u64, sectors)))
        }
    };
    header.resize(SECTOR, 0);
    header[8..16].copy_from_slice(&(at as u64).to_be_bytes());
    header[16..20].copy_from_slice(&(text.len() as u32).to_be_bytes());
    Some(Renamed { header: *header.first_chunk()?, name: apart })
}

impl Image {
    /// Has the header name another backing file. On stable storage on return.
    ///
    /// # Errors
    ///
    /// `EFBIG`: there is no room for the name in the header's cluster. Or those of the node below.
    pub(super) async fn set_backing_name(
        &self,
        channels: &Channels,
        name: Option<&BackingName>,
    ) -> Result<(), Errno> {
        {
            // One name is changed at a time.
            let _turn = self.flushing.lock().await;
            if self.shared.metadata.is_none() {
                return Err(Errno::EROFS);
            }
            let len = LOOKED_AT.min(self.cluster as usize);
            let mut first = read(channels, 0, len).await?;
            let rename = |engine: &Engine, first: &mut [u8]| {
                first.get_mut(..SECTOR)?.copy_from_slice(&engine.header());
                renamed(first, self.cluster, name)
            };
            let apart = rename(&lock(&self.core).engine, &mut first).ok_or(Errno::EFBIG)?.name;
            if let Some((at, sectors)) = apart {
                write(channels, at, &sectors)?.await.0?;
                sync(channels).await?;
            }
            // Meanwhile the header may have changed, but for its extensions: the name's place is the same.
            let changed = self.engine(channels, |engine| {
                let renamed = rename(engine, &mut first);
                Ok(renamed.map(|renamed| engine.set_header(renamed.header)))
            });
            changed.await?.ok_or(Errno::EFBIG)?;
        }
        self.flush(channels).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drivers::qcow2::header::Header;

    fn name(filename: &str, format: Option<&str>) -> BackingName {
        BackingName { filename: filename.to_owned(), format: format.map(str::to_owned) }
    }

    /// A header of version 3 with a table of features' names as QEMU makes it, and another extension.
    fn image() -> Vec<u8> {
        let mut first = vec![0; LOOKED_AT];
        first[..4].copy_from_slice(b"QFI\xfb");
        first[7] = 3;
        first[23] = 16;
        first[24..32].copy_from_slice(&(1u64 << 20).to_be_bytes());
        first[39] = 1;
        (first[45], first[53], first[59]) = (3, 1, 1);
        (first[99], first[103]) = (4, 112);
        let mut at = 112;
        for (kind, len) in [(FEATURE_NAMES, 7usize * 48), (0x1234_5678, 4)] {
            first[at..at + 4].copy_from_slice(&kind.to_be_bytes());
            first[at + 7] = len as u8;
            first[at + 6] = (len >> 8) as u8;
            at += 8 + len.next_multiple_of(8);
        }
        first
    }

    /// What a kill leaves: the name without the header, then both.
    fn apply(first: &mut [u8], new: &Renamed) {
        let before = Header::parse(first, true).unwrap();
        if let Some((at, sectors)) = &new.name {
            first[*at as usize..][..sectors.len()].copy_from_slice(sectors);
            assert_eq!(Header::parse(first, true).unwrap(), before);
        }
        first[..SECTOR].copy_from_slice(&new.header);
    }

    #[test]
    fn each_step_leaves_the_one_name_or_the_other() {
        let mut first = image();
        let long = "x".repeat(MAX_NAME);
        let names = [
            Some(name("a", None)),
            Some(name(&long, Some("qcow2"))),
            Some(name("base.qcow2", Some("raw"))),
            Some(name(&long.replace('x', "y"), Some("raw"))),
            Some(name(&long.replace('x', "z"), None)),
            None,
            Some(name("b", Some("qcow2"))),
        ];
        for new in &names {
            let changed = renamed(&first, 65536, new.as_ref()).unwrap();
            apply(&mut first, &changed);
            let backing = Header::parse(&first, true).unwrap().backing;
            let found =
                backing.map(|found| BackingName { filename: found.filename, format: found.format });
            assert_eq!(found, *new);
            let other = 0x1234_5678u32.to_be_bytes();
            assert!(first[..SECTOR].windows(4).any(|window| window == other));
        }
    }

    #[test]
    fn a_name_without_room_is_refused() {
        let first = image();
        assert_eq!(renamed(&first, 65536, Some(&name(&"x".repeat(1024), None))), None);
        assert_eq!(renamed(&first[..512], 512, Some(&name(&"x".repeat(300), None))), None);
        let mut garbage = first;
        garbage[112 + 4..112 + 8].fill(0xff);
        assert_eq!(renamed(&garbage, 65536, None), None);
    }
}
