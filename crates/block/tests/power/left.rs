//! The remains of an image after a power cut or a kill, with their check.

use std::ops::Range;
use std::sync::Arc;

use event_loop::ring::sim::Unflushed;

use crate::power::bitmaps::{Bitmaps, HandedOver};
use crate::power::guest::Disk;
use crate::power::journal::Folder;
use crate::power::kinds::{Kind, Start};
use crate::power::oracle::{Found, Image};

/// Where the header of a qcow2 image has the size of the disk.
const SIZE: Range<usize> = 24..32;

/// An image, and the contents of its disk.
pub(crate) struct Left {
    pub(crate) image: Vec<u8>,
    pub(crate) contents: Vec<u8>,
    /// The journals: those of a killed process, or an empty folder. `None`: without journals.
    pub(crate) journals: Option<Arc<Folder>>,
    /// After a kill, not after a power cut.
    pub(crate) is_killed: bool,
    /// After a handover to the next process, which has the journal.
    pub(crate) is_handed_over: bool,
    /// The journal had a part of it: everything is stable once the image has been opened.
    pub(crate) replayed: bool,
    /// The contents of the disk without the journal.
    pub(crate) bare: Option<Vec<u8>>,
    /// What the metadata in the journal has past the end of a disk that has become smaller there, up to the size that
    /// the image has without the journal.
    pub(crate) cut_off: Vec<u8>,
    /// Data that a power cut may still lose. `None`: none.
    pub(crate) unflushed: Option<(Unflushed, Disk)>,
    /// The image is encrypted.
    pub(crate) luks: bool,
    pub(crate) bitmaps: Bitmaps,
    /// The bitmaps that a process hands over.
    pub(crate) handed_over: Vec<HandedOver>,
    /// Bitmaps that claim to be right.
    pub(crate) right: usize,
    /// Bitmaps that are right only because their bits have survived a kill.
    pub(crate) kept: usize,
    /// Compressed clusters.
    pub(crate) compressed: usize,
    /// The contents of the internal snapshots.
    pub(crate) snapshots: Vec<Vec<u8>>,
}

impl Left {
    /// After a power cut: journals are lost, and unflushed data may be.
    pub(crate) fn by_cut(
        kind: &Kind,
        start: &Start,
        image: &[u8],
        disk: &Disk,
        journals: Option<&Folder>,
    ) -> Result<Left, String> {
        let Found { contents, bitmaps, compressed, snapshots } = read(kind, start, image)?;
        disk.check_cut(&contents)?;
        disk.snapshots.check(&snapshots)?;
        let (bitmaps, right) = disk.bitmaps.check(&bitmaps, &contents, true)?;
        let journals = journals.map(|_| Arc::new(Folder::new()));
        let luks = start.luks.is_some();
        let left = Left::with(contents, journals);
        Ok(Left { luks, bitmaps, right, compressed, snapshots, ..left })
    }

    /// After a kill: with the journal no answered request is lost, and without it no flushed one.
    /// `journals`: as the process has left them.
    pub(crate) fn by_kill(
        kind: &Kind,
        start: &Start,
        image: &[u8],
        disk: &Disk,
        journals: Option<Folder>,
    ) -> Result<Left, String> {
        let (mut bare, mut cut_off) = (None, Vec::new());
        let without = read(kind, start, image)?;
        let mut found = without.contents;
        let checked = disk.check_cut(&found);
        checked.map_err(|error| format!("without a journal: {error}"))?;
        let checked = disk.bitmaps.check(&without.bitmaps, &found, false);
        checked.map_err(|error| format!("without a journal: {error}"))?;
        let checked = disk.snapshots.check(&without.snapshots);
        checked.map_err(|error| format!("without a journal: {error}"))?;
        let (mut stored, mut snapshots) = (without.bitmaps, without.snapshots);
        let mut whole = image.to_vec();
        let replayed =
            journals.as_ref().map_or(Ok(false), |journals| journals.replay(&mut whole))?;
        if replayed {
            let with = read(kind, start, &whole)?;
            (stored, snapshots) = (with.bitmaps, with.snapshots);
            let before = std::mem::replace(&mut found, with.contents);
            if found.len() < before.len() {
                // L2 tables go to the image before the header, which has the size: in between, the disk is as large as
                // it was, and where the new tables have its data or nothing any more.
                whole[SIZE].copy_from_slice(&image[SIZE]);
                cut_off = contents(kind, start, &whole)?.split_off(found.len());
            }
            bare = Some(before);
        }
        disk.check_kill(&found)?;
        disk.snapshots.check(&snapshots)?;
        let mut kept = 0;
        if let Some(journals) = &journals {
            (stored, kept) = journals.with_kept(image, stored, found.len());
        }
        let (bitmaps, right) = disk.bitmaps.check(&stored, &found, false)?;
        let journals = journals.map(Arc::new);
        let left = Left::with(found, journals);
        let luks = start.luks.is_some();
        let left = Left { is_killed: true, replayed, bare, cut_off, luks, ..left };
        Ok(Left { bitmaps, right, kept, snapshots, ..left })
    }

    /// Stable remains, with the caller's image.
    pub(crate) fn with(contents: Vec<u8>, journals: Option<Arc<Folder>>) -> Left {
        let image = Vec::new();
        let (is_killed, is_handed_over, replayed) = (false, false, false);
        let (bare, cut_off, unflushed) = (None, Vec::new(), None);
        Left {
            image,
            contents,
            journals,
            is_killed,
            is_handed_over,
            replayed,
            bare,
            cut_off,
            unflushed,
            luks: false,
            bitmaps: Bitmaps::default(),
            handed_over: Vec::new(),
            right: 0,
            kept: 0,
            compressed: 0,
            snapshots: Vec::new(),
        }
    }

    /// The disk for its next user, before it is opened.
    pub(crate) fn disk(&self) -> Disk {
        let bitmaps = self.bitmaps.clone();
        let disk = match (&self.unflushed, &self.bare) {
            (Some((_, disk)), _) => disk.clone(),
            (None, Some(bare)) => Disk::new(bare, self.luks),
            (None, None) => return self.stable_disk(),
        };
        let disk = disk.after_kill(&self.contents, &self.cut_off).with_bitmaps(bitmaps);
        disk.with_snapshots(&self.snapshots)
    }

    /// The same, once everything in it is stable.
    pub(crate) fn stable_disk(&self) -> Disk {
        let disk = Disk::new(&self.contents, self.luks).with_bitmaps(self.bitmaps.clone());
        disk.with_snapshots(&self.snapshots)
    }
}

/// The contents of an image's disk. Checks that the image is consistent.
pub(crate) fn contents(kind: &Kind, start: &Start, image: &[u8]) -> Result<Vec<u8>, String> {
    Ok(read(kind, start, image)?.contents)
}

/// The same, with bitmaps.
pub(crate) fn read(kind: &Kind, start: &Start, image: &[u8]) -> Result<Found, String> {
    match kind.is_qcow2() {
        true => Image::read_all(image, &start.behind, start.luks.as_ref()),
        false => Ok(Found {
            contents: image.to_vec(),
            bitmaps: Vec::new(),
            compressed: 0,
            snapshots: Vec::new(),
        }),
    }
}

/// Stores a damaged image if the environment asks for that.
pub(crate) fn keep(image: &[u8]) {
    if let Some(folder) = std::env::var_os("RINGMILL_POWER_KEEP") {
        std::fs::write(std::path::Path::new(&folder).join("left.img"), image).unwrap();
    }
}
