//! What follows the fixed part of the header, changed while the image is in use: the name of the backing file, the place of
//! the bitmap directory.
//!
//! One sector decides: a new name is on stable storage, at a place that nothing refers to, before the first sector of
//! the header refers to it. A kill or a power cut leaves the header as it was, or as it is to be.

use event_loop::sync::lock;
use nix::errno::Errno;

use super::bitmaps::Extension;
use super::context::Channels;
use super::engine::Engine;
use super::header::{
    AUTOCLEAR, BACKING_FORMAT, BITMAPS, BITMAPS_EXTENSION, END, FEATURE_NAMES, MAX_NAME,
    ORIGIN_EXTENSION, V2_LEN,
};
use super::image::Image;
use super::origin::DETACHED;
use super::steps::{SECTOR, read, write};
use super::storage::sync;
use crate::node::BackingName;

/// Bytes from the image's beginning that are looked at: a larger cluster has nothing of the header behind them, as a
/// rule, and if it has, the name is not changed.
const LOOKED_AT: usize = 4096;
/// Where names are put that do not fit into the first sector. They end before the mark of a journal.
const PLACES: [usize; 3] = [512, 1536, 2560];

/// What is to change. `None`: it stays.
#[derive(Debug, Default, Clone)]
pub(super) struct Change<'a> {
    /// The backing file, if there is one from now on.
    pub(super) backing: Option<Option<&'a BackingName>>,
    /// The bitmaps, if there are some from now on.
    pub(super) bitmaps: Option<Option<Extension>>,
    /// The content of the backing image. A backing file that changes takes the record of the former content along.
    pub(super) origin: Option<&'a str>,
    /// Room for bitmaps has to be left: closing the image stores some.
    pub(super) reserves_bitmaps: bool,
}

/// A header after a change.
#[derive(Debug, PartialEq, Eq)]
struct Changed {
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

/// The header after a change. `None`: there is no room for it.
fn changed(first: &[u8], cluster: u64, change: &Change<'_>) -> Option<Changed> {
    let version = number(first, 4, 4)?;
    let header_len = if version == 2 { V2_LEN } else { number(first, 100, 4)? as usize };
    let old_name = number(first, 8, 8)? as usize
        ..number(first, 8, 8)? as usize + number(first, 16, 4)? as usize;
    let end = match (version, old_name.start) {
        (2, start @ 1..) => start,
        _ => first.len(),
    };
    let (all, old_end) = extensions(first, header_len, end)?;
    let (text, format) = match change.backing {
        Some(name) => {
            let format = name.and_then(|name| name.format.as_deref()).map(str::as_bytes);
            (name.map_or(&[][..], |name| name.filename.as_bytes()), format)
        }
        None => {
            let format = all.iter().rfind(|(kind, _)| *kind == BACKING_FORMAT).map(|found| found.1);
            let name = old_name.start.max(1)..old_name.end;
            (if name.is_empty() { &[][..] } else { first.get(name)? }, format)
        }
    };
    let bitmaps = change.bitmaps.map(|bitmaps| bitmaps.map(Extension::bytes));
    let lay_out = |keep: fn(u32) -> bool| {
        let stays = |kind: u32| match kind {
            BACKING_FORMAT => false,
            BITMAPS_EXTENSION => bitmaps.is_none(),
            ORIGIN_EXTENSION => change.origin.is_none() && change.backing.is_none(),
            kind => keep(kind),
        };
        let kept = all.iter().filter(|(kind, _)| stays(*kind));
        let format = format.map(|format| (BACKING_FORMAT, format));
        let bitmaps = bitmaps.iter().flatten().map(|data| (BITMAPS_EXTENSION, &data[..]));
        let had_origin = all.iter().any(|(kind, _)| *kind == ORIGIN_EXTENSION);
        let origin = match (change.origin, change.backing) {
            (Some(origin), _) => Some(origin),
            (None, Some(None)) if had_origin => Some(DETACHED),
            (None, Some(_) | None) => None,
        };
        let origin = origin.map(|origin| (ORIGIN_EXTENSION, origin.as_bytes()));
        let mut header = first.get(..header_len)?.to_vec();
        for (kind, data) in format.into_iter().chain(kept.copied()).chain(bitmaps).chain(origin) {
            header.extend(kind.to_be_bytes());
            header.extend((data.len() as u32).to_be_bytes());
            header.extend(data);
            header.resize(header.len().next_multiple_of(8), 0);
        }
        header.extend([0; 8]);
        (header.len() <= SECTOR).then_some(header)
    };
    let with_name = |mut header: Vec<u8>| match (text.len(), header.len()) {
        (0, _) => Some((header, 0, None)),
        (len, _) if len > MAX_NAME => None,
        (len, at) if at + len <= SECTOR => {
            header.extend(text);
            Some((header, at, None))
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
            Some((header, at, Some((at as u64, sectors))))
        }
    };
    // The names of features are for error messages only.
    let (mut header, at, apart) = (lay_out(|_| true).and_then(with_name))
        .or_else(|| lay_out(|kind| kind != FEATURE_NAMES).and_then(with_name))?;
    header.resize(SECTOR, 0);
    header[8..16].copy_from_slice(&(at as u64).to_be_bytes());
    header[16..20].copy_from_slice(&(text.len() as u32).to_be_bytes());
    if let Some(bitmaps) = &bitmaps
        && version > 2
    {
        let bit = BITMAPS as u8;
        let features = header.get_mut(AUTOCLEAR)?.last_mut()?;
        *features = *features & !bit | if bitmaps.is_some() { bit } else { 0 };
    }
    Some(Changed { header: *header.first_chunk()?, name: apart })
}

/// Whether a change leaves room for bitmaps that are stored later.
fn leaves_room(first: &[u8], cluster: u64, changed: &Changed) -> bool {
    let mut first = first.to_vec();
    for (at, bytes) in changed.name.iter().map(|(at, bytes)| (*at as usize, &bytes[..])) {
        if let Some(place) = first.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    }
    if let Some(place) = first.first_chunk_mut() {
        *place = changed.header;
    }
    let bitmaps = Some(Some(Extension { count: 1, directory: (cluster, 0) }));
    self::changed(&first, cluster, &Change { bitmaps, ..Change::default() }).is_some()
}

/// Has a header name the backing file that another version of it names.
fn put_name(header: &mut [u8; SECTOR], of: &[u8; SECTOR]) {
    let len =
        if number(of, 4, 4) == Some(2) { V2_LEN } else { number(of, 100, 4).unwrap_or(0) as usize };
    header[8..20].copy_from_slice(&of[8..20]);
    if let (Some(header), Some(of)) = (header.get_mut(len.max(V2_LEN)..), of.get(len.max(V2_LEN)..))
    {
        header.copy_from_slice(of);
    }
}

/// The first sector is the engine's, which the file may not have yet.
fn with_engine(
    engine: &Engine,
    first: &mut [u8],
    cluster: u64,
    change: &Change<'_>,
) -> Option<Changed> {
    first.get_mut(..SECTOR)?.copy_from_slice(&engine.header());
    let changed = changed(first, cluster, change)?;
    (!change.reserves_bitmaps || leaves_room(first, cluster, &changed)).then_some(changed)
}

impl Image {
    /// Checks whether the header has room for a change.
    ///
    /// # Errors
    ///
    /// `EFBIG`: there is none. `EROFS`: the image is open for reading only. Or those of the node below.
    pub(super) async fn check_header_change(
        &self,
        channels: &Channels,
        change: &Change<'_>,
    ) -> Result<(), Errno> {
        if self.shared.metadata.is_none() {
            return Err(Errno::EROFS);
        }
        let mut first = read(channels, 0, LOOKED_AT.min(self.cluster as usize)).await?;
        let fits = with_engine(&lock(&self.core).engine, &mut first, self.cluster, change);
        fits.map(drop).ok_or(Errno::EFBIG)
    }

    /// Checks whether the header has room for the place of bitmaps.
    ///
    /// # Errors
    ///
    /// As of [`check_header_change`](Self::check_header_change).
    pub(super) async fn check_room_for_bitmaps(&self, channels: &Channels) -> Result<(), Errno> {
        let change = Change { reserves_bitmaps: true, ..Change::default() };
        self.check_header_change(channels, &change).await
    }

    /// Changes the header. On stable storage once the image is flushed.
    ///
    /// # Errors
    ///
    /// As of [`check_header_change`](Self::check_header_change).
    pub(super) async fn change_header(
        &self,
        channels: &Channels,
        change: &Change<'_>,
    ) -> Result<(), Errno> {
        let _change = self.changing_header.lock().await;
        self.change_header_alone(channels, change).await
    }

    /// The same. The caller holds `changing_header`.
    async fn change_header_alone(
        &self,
        channels: &Channels,
        change: &Change<'_>,
    ) -> Result<(), Errno> {
        let _turn = self.flushing.lock().await;
        if self.shared.metadata.is_none() {
            return Err(Errno::EROFS);
        }
        if self.damage.is_damaged() {
            return Err(Errno::EIO);
        }
        let mut first = read(channels, 0, LOOKED_AT.min(self.cluster as usize)).await?;
        let apart = with_engine(&lock(&self.core).engine, &mut first, self.cluster, change);
        if let Some((at, sectors)) = apart.ok_or(Errno::EFBIG)?.name {
            write(channels, at, &sectors)?.await.0?;
            sync(channels).await?;
        }
        // Meanwhile the header may have changed, but for its extensions: the name's place is the same.
        let done = self.engine(channels, |engine| {
            let changed = with_engine(engine, &mut first, self.cluster, change);
            Ok(changed.map(|changed| engine.set_header(changed.header)))
        });
        done.await?.ok_or(Errno::EFBIG)
    }

    /// Has the header name another backing file, and leaves room for bitmaps if some are to be stored. On stable storage on
    /// return.
    ///
    /// # Errors
    ///
    /// As of [`check_header_change`](Self::check_header_change).
    pub(super) async fn set_backing_name(
        &self,
        channels: &Channels,
        name: Option<&BackingName>,
        reserves_bitmaps: bool,
    ) -> Result<(), Errno> {
        let change = Change { backing: Some(name), reserves_bitmaps, ..Change::default() };
        // The way back replaces all extensions.
        let _change = self.changing_header.lock().await;
        let before = lock(&self.core).engine.header();
        self.change_header_alone(channels, &change).await?;
        let flushed = self.flush(channels).await;
        if flushed.is_err() {
            // The name before is in the file still, at its place.
            let back = self.engine(channels, |engine| {
                let mut header = engine.header();
                put_name(&mut header, &before);
                engine.set_header(header);
                Ok(())
            });
            // The same error as that of the flush, if the image is of no use.
            let _ = back.await;
        }
        flushed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drivers::qcow2::header::{Header, Purpose};

    fn name(filename: &str, format: Option<&str>) -> BackingName {
        BackingName { filename: filename.to_owned(), format: format.map(str::to_owned) }
    }

    fn backing(name: Option<&BackingName>) -> Change<'_> {
        Change { backing: Some(name), ..Change::default() }
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
    fn apply(first: &mut [u8], new: &Changed) {
        let before = Header::parse(first, Purpose::Read).unwrap();
        if let Some((at, sectors)) = &new.name {
            first[*at as usize..][..sectors.len()].copy_from_slice(sectors);
            assert_eq!(Header::parse(first, Purpose::Read).unwrap(), before);
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
            let new_header = changed(&first, 65536, &backing(new.as_ref())).unwrap();
            apply(&mut first, &new_header);
            let backing = Header::parse(&first, Purpose::Read).unwrap().backing;
            let found = backing.map(|found| BackingName {
                filename: found.filename.into_string().unwrap(),
                format: found.format,
            });
            assert_eq!(found, *new);
            let other = 0x1234_5678u32.to_be_bytes();
            assert!(first[..SECTOR].windows(4).any(|window| window == other));
        }
    }

    #[test]
    fn of_two_formats_the_last_one_stays() {
        let mut first = image();
        let named = name("base", Some("raw"));
        let new = changed(&first, 65536, &backing(Some(&named))).unwrap();
        apply(&mut first, &new);
        // Instead of the table of features' names, another format before the one that counts.
        let header_len = 112;
        let mut twice = BACKING_FORMAT.to_be_bytes().to_vec();
        twice.extend(b"\0\0\0\x05qcow2\0\0\0");
        twice.extend(&first[header_len..header_len + 16]);
        first[header_len..header_len + 32].copy_from_slice(&twice);
        first[header_len + 32..header_len + 40].fill(0);
        for extension in [Some(Extension { count: 1, directory: (5 << 16, 32) }), None] {
            let change = Change { bitmaps: Some(extension), ..Change::default() };
            let new = changed(&first, 65536, &change).unwrap();
            apply(&mut first, &new);
            let found = Header::parse(&first, Purpose::Read).unwrap().backing.unwrap();
            assert_eq!(
                (found.filename.to_str(), found.format.as_deref()),
                (Some("base"), Some("raw"))
            );
        }
    }

    #[test]
    fn a_name_without_room_is_refused() {
        let first = image();
        assert_eq!(changed(&first, 65536, &backing(Some(&name(&"x".repeat(1024), None)))), None);
        assert_eq!(
            changed(&first[..512], 512, &backing(Some(&name(&"x".repeat(400), None)))),
            None
        );
        let mut garbage = first;
        garbage[112 + 4..112 + 8].fill(0xff);
        assert_eq!(changed(&garbage, 65536, &backing(None)), None);
    }

    #[test]
    fn a_name_leaves_room_for_bitmaps() {
        let first = &image()[..1024];
        let fits = |len: usize, reserves_bitmaps: bool| {
            let name = name(&"x".repeat(len), Some("raw"));
            let change =
                Change { backing: Some(Some(&name)), reserves_bitmaps, ..Change::default() };
            let changed = changed(first, 1024, &change);
            changed.is_some_and(|changed| !reserves_bitmaps || leaves_room(first, 1024, &changed))
        };
        // Fixed part, other extension, format and end, 152 bytes; that of the bitmaps has 32 bytes.
        assert_eq!([328, 329, 360, 361].map(|len| fits(len, true)), [true, false, false, false]);
        assert_eq!([328, 329, 360, 361].map(|len| fits(len, false)), [true, true, true, false]);
    }

    #[test]
    fn bitmaps_come_and_go_and_leave_the_name() {
        let mut first = image();
        let long = name(&"x".repeat(MAX_NAME), Some("qcow2"));
        for named in [None, Some(name("base.qcow2", Some("raw"))), Some(long)] {
            let new = changed(&first, 65536, &backing(named.as_ref())).unwrap();
            apply(&mut first, &new);
            for extension in [
                Some(Extension { count: 1, directory: (5 << 16, 32) }),
                Some(Extension { count: 3, directory: (9 << 16, 96) }),
                None,
            ] {
                let change = Change { bitmaps: Some(extension), ..Change::default() };
                let new = changed(&first, 65536, &change).unwrap();
                apply(&mut first, &new);
                let header = Header::parse(&first, Purpose::Read).unwrap();
                assert_eq!((header.bitmaps, header.loses_autoclear), (extension, false));
                let found = header.backing;
                let found = found
                    .map(|found| name(found.filename.to_str().unwrap(), found.format.as_deref()));
                assert_eq!(found, named);
            }
        }
    }
}
