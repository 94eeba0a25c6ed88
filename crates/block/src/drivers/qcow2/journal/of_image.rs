//! What a journal says of its image: where the image is, and what tells it from others.
//!
//! Another program that changes the image after a kill removes the image's mark, and the journal does not apply any
//! more. The image does not name that journal; the journal names the image.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use event_loop::sync::lock as locked;
use rustix::fs::OFlags;

use super::folder::{FILE, Folder, Journals, PREFIX, lock, name};
use super::left::has_image;
use super::{COMMITS, Journal, MAGIC, SLOTS, number};
use crate::drivers::qcow2::marker::Mark;
use crate::format::read_at;
use crate::image_place::ImagePlace;

/// Place in the header of: what tells the image from others, and the length of its path. The path follows, as far as the
/// header has room. All of it is 0 in journals of versions that do not write it.
pub(super) const PLACE: usize = 128;
const PATH_LEN: usize = PLACE + 32;
const PATH: usize = PATH_LEN + 8;

/// The header of a journal.
pub(in crate::drivers::qcow2) struct Described {
    pub(in crate::drivers::qcow2) mark: Mark,
    /// `None`: a version has made it that does not tell.
    pub(in crate::drivers::qcow2) place: Option<ImagePlace>,
    /// It has changes that its image lacks.
    pub(in crate::drivers::qcow2) is_needed: bool,
}

/// The bytes of the header that say where the image is.
pub(super) fn bytes(place: &ImagePlace) -> Vec<u8> {
    let path = place.path.as_os_str().as_bytes();
    // A path that is cut off would name another file.
    let path = if path.len() <= SLOTS - PATH { path } else { &[] };
    let words = [u64::from(place.is_device) + 1, place.device, place.inode, place.born];
    let words = words.into_iter().chain([path.len() as u64]);
    words.flat_map(u64::to_ne_bytes).chain(path.iter().copied()).collect()
}

impl Described {
    /// Reads the header of a journal. `None`: it is no journal.
    pub(super) fn read(header: &[u8]) -> Option<Described> {
        let (mark, _) = header.strip_prefix(MAGIC)?.split_first_chunk::<32>()?;
        let word = |at| number(header, at);
        let (committed, written) = (word(COMMITS as usize)?, word(COMMITS as usize + 8)?);
        let (mark, place) = (Mark::from_bytes(mark), place(header));
        Some(Described { mark, place, is_needed: committed > written })
    }
}

/// Returns where the image was, from the bytes of a journal.
pub(super) fn place(header: &[u8]) -> Option<ImagePlace> {
    let word = |at| number(header, at);
    let is_device = match word(PLACE)? {
        1 => false,
        2 => true,
        _ => return None,
    };
    let path = header.get(PATH..)?.get(..usize::try_from(word(PATH_LEN)?).ok()?)?;
    Some(ImagePlace {
        is_device,
        device: word(PLACE + 8)?,
        inode: word(PLACE + 16)?,
        born: word(PLACE + 24)?,
        path: PathBuf::from(OsStr::from_bytes(path)),
    })
}

/// Whether the image `here` is a copy of a journal's image, which was at `was`, in the file with that inode, or on a
/// device (0).
pub(super) fn is_copy(
    mark: &Mark,
    inode: u64,
    was: Option<&ImagePlace>,
    here: &ImagePlace,
) -> bool {
    match was {
        // A file keeps its inode when it is moved.
        _ if inode != 0 && !here.is_device => inode != here.inode,
        // A device that was inactive may have another number, and its number may be another device's.
        Some(was) => {
            let has_moved = was.path == here.path && was.is_device && here.is_device;
            !was.is_same_but_for_name(here) && !has_moved && has_image(&was.path, mark)
        }
        None => false,
    }
}

impl Journal {
    /// Records where the image is.
    pub(in crate::drivers::qcow2) fn set_place(&self, place: &ImagePlace) -> io::Result<()> {
        self.file.write_all_at(&bytes(place), PLACE as u64)
    }

    /// Whether it has changes that the image lacks.
    pub(in crate::drivers::qcow2) fn is_needed(&self) -> bool {
        self.committed > self.written
    }
}

/// A journal of an image that does not name it any more.
pub(in crate::drivers::qcow2) struct Superseded {
    pub(in crate::drivers::qcow2) mark: Mark,
    pub(in crate::drivers::qcow2) is_needed: bool,
    folder: Arc<Folder>,
}

impl Superseded {
    /// Removes the journal.
    pub(in crate::drivers::qcow2) fn remove(self) {
        self.folder.discard(name(&self.mark));
    }
}

impl Journals {
    /// Finds journals of an image that processes have left, except the one that the image names.
    pub(in crate::drivers::qcow2) fn superseded(
        &self,
        place: &ImagePlace,
        named: Option<&Mark>,
    ) -> io::Result<Vec<Superseded>> {
        let _turn = self.turn()?;
        let mut all = Vec::new();
        let files = self.0.named(PREFIX)?;
        let mut places = locked(&self.0.places);
        if places.len() > 2 * files.len() {
            places.retain(|file, _| files.contains(file));
        }
        for file in files {
            // With a thousand images, reading all headers takes 10 ms for each image that is opened.
            if places.get(&file).is_some_and(|of| !of.is_same(place)) {
                continue;
            }
            // Other processes may remove files too.
            let Ok(journal) = self.0.open(&*file, OFlags::RDONLY | FILE) else { continue };
            let mut header = vec![0; SLOTS];
            // A journal without commits is shorter.
            if read_at(&journal, &mut header, 0).is_err() {
                continue;
            }
            let Some(found) = Described::read(&header) else { continue };
            if let Some(of) = &found.place {
                places.insert(file.clone(), of.clone());
            }
            let is_of_image = found.place.as_ref().is_some_and(|of| of.is_same(place));
            let is_other = name(&found.mark) == file && Some(&found.mark) != named;
            // Its process has the lock as long as it lives.
            if is_of_image && is_other && lock(&journal)? {
                let folder = self.0.clone();
                all.push(Superseded { mark: found.mark, is_needed: found.is_needed, folder });
            }
        }
        Ok(all)
    }
}
