//! What a power cut leaves of an image, or a process that is killed, and that it is right.

use std::ops::Range;
use std::sync::Arc;

use event_loop::ring::sim::Unflushed;

use crate::guest::Disk;
use crate::journal::Folder;
use crate::kinds::{Kind, Start};
use crate::oracle::Image;

/// Where the header of a qcow2 image has the size of the disk.
const SIZE: Range<usize> = 24..32;

/// An image, and what is on the disk in it.
pub(crate) struct Left {
    pub(crate) image: Vec<u8>,
    pub(crate) contents: Vec<u8>,
    /// For who opens it: as a process has left it that was killed, or a new one. `None`: there is none.
    pub(crate) journals: Option<Arc<Folder>>,
    /// By a process that was killed, not by a power cut.
    pub(crate) is_killed: bool,
    /// By one that gives place to the next, which has its journal.
    pub(crate) is_handed_over: bool,
    /// A part of it was in a journal: all of it is stable once it has been opened.
    pub(crate) replayed: bool,
    /// What is on the disk without that.
    pub(crate) bare: Option<Vec<u8>>,
    /// What the metadata in the journal has past the end of a disk that has become smaller there, up to the size that
    /// the image has without the journal.
    pub(crate) cut_off: Vec<u8>,
    /// What a power cut may still take back of it. `None`: nothing.
    pub(crate) unflushed: Option<(Unflushed, Disk)>,
}

impl Left {
    /// Of the power: journals are gone, and what was not flushed may be.
    pub(crate) fn by_cut(
        kind: &Kind,
        start: &Start,
        image: &[u8],
        disk: &Disk,
        journals: Option<&Folder>,
    ) -> Result<Left, String> {
        let contents = contents(kind, start, image)?;
        disk.check_cut(&contents)?;
        let journals = journals.map(|_| Arc::new(Folder::new()));
        Ok(Left::with(contents, journals))
    }

    /// Of a process: nothing is lost that was answered, with the journal; without it, nothing that was flushed.
    /// `journals`: as it has left them.
    pub(crate) fn by_kill(
        kind: &Kind,
        start: &Start,
        image: &[u8],
        disk: &Disk,
        journals: Option<Folder>,
    ) -> Result<Left, String> {
        let (mut found, mut bare, mut cut_off) = (contents(kind, start, image)?, None, Vec::new());
        let checked = disk.check_cut(&found);
        checked.map_err(|error| format!("without a journal: {error}"))?;
        let mut whole = image.to_vec();
        let replayed =
            journals.as_ref().map_or(Ok(false), |journals| journals.replay(&mut whole))?;
        if replayed {
            let before = std::mem::replace(&mut found, contents(kind, start, &whole)?);
            if found.len() < before.len() {
                // L2 tables go to the image before the header, which has the size: in between, the disk is as large as
                // it was, and where the new tables have its data or nothing any more.
                whole[SIZE].copy_from_slice(&image[SIZE]);
                cut_off = contents(kind, start, &whole)?.split_off(found.len());
            }
            bare = Some(before);
        }
        disk.check_kill(&found)?;
        let journals = journals.map(Arc::new);
        Ok(Left { is_killed: true, replayed, bare, cut_off, ..Left::with(found, journals) })
    }

    /// Nothing of it can be lost. The image is the caller's.
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
        }
    }

    /// The disk as its next user has it, before it has been opened.
    pub(crate) fn disk(&self) -> Disk {
        let disk = match (&self.unflushed, &self.bare) {
            (Some((_, disk)), _) => disk.clone(),
            (None, Some(bare)) => Disk::new(bare),
            (None, None) => return Disk::new(&self.contents),
        };
        disk.after_kill(&self.contents, &self.cut_off)
    }
}

/// What is on the disk in an image, which has to be whole.
pub(crate) fn contents(kind: &Kind, start: &Start, image: &[u8]) -> Result<Vec<u8>, String> {
    match kind.is_qcow2() {
        true => Image::read(image, &start.behind),
        false => Ok(image.to_vec()),
    }
}

/// An image that is wrong is kept where somebody has asked for it.
pub(crate) fn keep(image: &[u8]) {
    if let Some(folder) = std::env::var_os("RINGMILL_POWER_KEEP") {
        std::fs::write(std::path::Path::new(&folder).join("left.img"), image).unwrap();
    }
}
