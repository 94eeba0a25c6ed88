//! Journals that processes have left: a list for people, and their removal.
//!
//! A journal stays until the image is opened again, and for ever if the image never is.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirEntryExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{AtFlags, Mode, OFlags, lstat, open, statat};
use rustix::io::Errno;

use super::SLOTS;
use super::folder::{FILE, Journals, PREFIX, lock, name};
use super::kept;
use super::of_image::Described;
use crate::drivers::qcow2::header::{self, DIRTY_AT, DIRTY_BIT, is_qcow2};
use crate::drivers::qcow2::marker::Mark;
use crate::format::read_at;
use crate::image_place::ImagePlace;

/// A journal in a folder.
#[derive(Debug)]
pub struct LeftJournal {
    /// The name of its file.
    pub name: String,
    /// Where its image was when a process had it open. `None`: a version made it that does not tell, or the image is
    /// neither a file nor a block device.
    pub image: Option<PathBuf>,
    /// Memory that the journal and the files of its dirty bitmaps take up, bytes.
    pub size: u64,
    /// The last change.
    pub changed: SystemTime,
    /// Whether there is a use for it.
    pub state: JournalState,
    /// It has changes that its image lacked when a process last had it.
    pub has_changes: bool,
}

impl LeftJournal {
    /// Whether its removal may lose data. An image that is missing may have been moved, and is then opened elsewhere.
    pub fn may_be_needed(&self) -> bool {
        match self.state {
            JournalState::InUse | JournalState::Needed | JournalState::Unknown(_) => true,
            JournalState::Replaced | JournalState::Missing => self.has_changes,
            JournalState::Superseded | JournalState::EarlierBoot => false,
        }
    }
}

/// Whether there is a use for a journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JournalState {
    /// A process has the image open.
    InUse,
    /// The image names it: the next process that opens the image applies it.
    Needed,
    /// The image cannot be examined: the reason.
    Unknown(String),
    /// The image has been changed without it.
    Superseded,
    /// The image's path leads to another file.
    Replaced,
    /// The image's path leads nowhere.
    Missing,
    /// It is from before a restart of the machine.
    EarlierBoot,
}

/// Returns the journals in a folder, the oldest change first.
///
/// The folder may belong to another user, if this process may read it. Nothing is changed.
///
/// # Errors
///
/// The folder cannot be read, or others than its user have access to it.
pub fn left_journals(folder: &Path) -> io::Result<Vec<LeftJournal>> {
    let journals = Journals::of_its_user(folder)?;
    let _turn = journals.turn()?;
    let mut all = Vec::new();
    for name in journals.0.named(PREFIX)? {
        // Their processes remove journals meanwhile.
        if let Some((found, _file)) = journals.look_at(&name)? {
            all.push(found);
        }
    }
    all.sort_by_key(|journal| journal.changed);
    Ok(all)
}

/// Removes a journal and the files of its dirty bitmaps. `forced`: also if its image needs it.
///
/// # Errors
///
/// `NotFound`: there is no journal of that name. `ResourceBusy`: a process has it, or the image needs it. Others: the
/// folder cannot be read or changed.
pub fn remove_left_journal(folder: &Path, name: &str, forced: bool) -> io::Result<()> {
    let journals = Journals::of_its_user(folder)?;
    // Until the end: no process finds the journal meanwhile.
    let _turn = journals.turn()?;
    let known = name.strip_prefix(PREFIX).filter(|name| !name.contains('/'));
    let mark = known.ok_or(ErrorKind::NotFound)?;
    let (found, _file) = journals.look_at(name)?.ok_or(ErrorKind::NotFound)?;
    if found.state == JournalState::InUse || !forced && found.may_be_needed() {
        return Err(ErrorKind::ResourceBusy.into());
    }
    for bitmap in journals.0.named(&kept::prefix(mark))? {
        journals.0.remove(&*bitmap)?;
    }
    Ok(journals.0.remove(name)?)
}

impl Journals {
    /// The journals in a folder of any user's alone.
    fn of_its_user(folder: &Path) -> io::Result<Journals> {
        Journals::existing(folder, lstat(folder)?.st_uid)
    }

    /// Looks at a journal. The caller has the [turn](Self::turn), so that no process finds it locked by this one. `None`: it
    /// is gone, or no journal.
    fn look_at(&self, file: &str) -> io::Result<Option<(LeftJournal, File)>> {
        let journal = match self.0.open(file, OFlags::RDONLY | FILE) {
            Err(Errno::NOENT | Errno::INVAL | Errno::LOOP) => return Ok(None),
            opened => opened?,
        };
        let mut header = vec![0; SLOTS];
        // A journal without commits is shorter.
        read_at(&journal, &mut header, 0)?;
        let Some(of) = Described::read(&header).filter(|of| name(&of.mark) == file) else {
            return Ok(None);
        };
        let metadata = journal.metadata()?;
        let mut size = metadata.blocks() * 512;
        for bitmap in self.0.named(&kept::prefix(&of.mark))? {
            let found = statat(self.0.fd(), &*bitmap, AtFlags::SYMLINK_NOFOLLOW);
            size += found.map_or(0, |found| u64::try_from(found.st_blocks).unwrap_or(0) * 512);
        }
        let has_changes = of.is_needed;
        let state = match lock(&journal)? {
            false => JournalState::InUse,
            true => state(&of),
        };
        let found = LeftJournal {
            name: file.to_owned(),
            image: of.place.map(|place| place.path).filter(|path| !path.as_os_str().is_empty()),
            size,
            changed: metadata.modified()?,
            state,
            has_changes,
        };
        Ok(Some((found, journal)))
    }
}

/// The state of a journal that no process has.
fn state(of: &Described) -> JournalState {
    if !of.mark.is_of_this_boot() {
        return JournalState::EarlierBoot;
    }
    let unknown = |why: &str| JournalState::Unknown(why.to_owned());
    let Some(place) = &of.place else { return unknown("the journal does not name its image") };
    if !place.path.is_absolute() {
        return unknown("the journal does not have the image's path");
    }
    let gone = |state| may_be_elsewhere(place).map_or(state, unknown);
    let examined = match open_image(&place.path) {
        Err(Errno::NOENT | Errno::NOTDIR) if place.is_device => {
            return unknown("the device is not there now");
        }
        Err(Errno::NOENT | Errno::NOTDIR) => return gone(JournalState::Missing),
        Err(errno) => Err(errno.into()),
        Ok(None) => return gone(JournalState::Replaced),
        Ok(Some((found, Ok(file)))) => {
            first_bytes(&file).map(|bytes| (found.is_same(place), bytes))
        }
        Ok(Some((_, Err(errno)))) => Err(errno.into()),
    };
    match examined {
        Err(error) => JournalState::Unknown(error.to_string()),
        Ok((_, bytes)) if names(&bytes, &of.mark) => JournalState::Needed,
        Ok((true, bytes)) if is_qcow2(&bytes) => JournalState::Superseded,
        // Such as an image that begins later in the file, or is encrypted as a whole.
        Ok((true, _)) => unknown("the file does not begin with a qcow2 image"),
        Ok((false, _)) => gone(JournalState::Replaced),
    }
}

/// Why an image that is not at its path may still be there. `None`: it was removed, or moved to another folder.
fn may_be_elsewhere(place: &ImagePlace) -> Option<&'static str> {
    if place.is_device {
        return None;
    }
    let folder = place.path.parent()?;
    // Of a folder that was removed, the one that had it. Of a file system that was unmounted, the place where it was.
    let found = folder.ancestors().find_map(|folder| std::fs::metadata(folder).ok());
    if found.is_none_or(|found| found.dev() != place.device) {
        return Some("the file system with the image is not there now");
    }
    // A new name is a usual way to put an image aside.
    let entries = std::fs::read_dir(folder).ok().into_iter().flatten().flatten();
    let is_it = |entry: &std::fs::DirEntry| entry.ino() == place.inode;
    entries.filter(is_it).find_map(|entry| {
        let (found, _) = open_image(&entry.path()).ok()??;
        found.is_same_but_for_name(place).then_some("the image has another name now")
    })
}

/// Whether a path leads to an image that has to have the journal with that mark, as far as this process can tell.
pub(super) fn has_image(path: &Path, mark: &Mark) -> bool {
    match open_image(path) {
        Ok(Some((_, Ok(file)))) => first_bytes(&file).map_or(true, |bytes| names(&bytes, mark)),
        // Such as one that the sandbox does not permit.
        Ok(Some((_, Err(_)))) => true,
        Ok(None) | Err(_) => false,
    }
}

/// Finds an image, and opens it for reading. The path may be one that another user has chosen, so nothing but a file or
/// block device is opened. `None`: it is neither.
fn open_image(path: &Path) -> rustix::io::Result<Option<(ImagePlace, rustix::io::Result<File>)>> {
    let found = open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let Some(place) = ImagePlace::of(&found, path) else { return Ok(None) };
    let link = format!("/proc/self/fd/{}", found.as_raw_fd());
    let file = open(link, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty());
    Ok(Some((place, file.map(File::from))))
}

/// The bytes of a file that have the header and the mark, if it is an image.
fn first_bytes(file: &File) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; header::USUAL];
    loop {
        let len = read_at(file, &mut bytes, 0)?;
        let wanted = header::to_read(&bytes[..len]);
        if len < bytes.len() || wanted <= bytes.len() || !is_qcow2(&bytes) {
            bytes.truncate(len);
            return Ok(bytes);
        }
        bytes.resize(wanted, 0);
    }
}

/// Whether an image that begins with these bytes has to have the journal with that mark.
fn names(bytes: &[u8], mark: &Mark) -> bool {
    let is_dirty = bytes.get(DIRTY_AT).is_some_and(|byte| byte & DIRTY_BIT != 0);
    let cluster = header::to_read(bytes) as u64;
    is_qcow2(bytes)
        && is_dirty
        && Mark::find(bytes, cluster).is_some_and(|(found, _)| found == *mark)
}
