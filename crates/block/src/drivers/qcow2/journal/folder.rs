//! The folder of journals.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use event_loop::sync::lock as locked;
use nix::unistd::geteuid;
use rustix::fs::{
    AtFlags, Dir, FileType, FlockOperation, Mode, OFlags, RenameFlags, Stat, Uid, chownat, fchown,
    flock, fstat, lstat, mkdir, open, openat, renameat_with, statat, unlinkat,
};
use rustix::io::Errno;
use rustix::path::Arg;

use super::elsewhere::OtherFolders;
use super::of_image::{self, is_copy};
use super::slots::Slots;
use super::{
    AGAIN, COMMITS, INODE, Journal, MAGIC, MOST_COMMITS, NAMED, SLOTS, invalid, kept, number,
};
use crate::drivers::qcow2::marker::Mark;
use crate::drivers::qcow2::steps::Sectors;
use crate::image_place::ImagePlace;

/// Flags to open the folder, and a file in it.
const FOLDER: OFlags =
    OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC).union(OFlags::RDONLY);
pub(super) const FILE: OFlags = OFlags::NOFOLLOW.union(OFlags::NONBLOCK).union(OFlags::CLOEXEC);

/// The folder of journals.
#[derive(Debug, Clone)]
pub(crate) struct Journals(pub(super) Arc<Folder>, pub(super) OtherFolders);

/// A folder that was checked to be a user's alone. Kept open, because that user may change its path, and
/// this process may have more privileges.
#[derive(Debug)]
pub(super) struct Folder {
    pub(super) path: PathBuf,
    fd: OwnedFd,
    user: u32,
    /// The thread that opened the folder. The sandbox may forbid other threads to remove files.
    home: ThreadId,
    /// Files without use that other threads have left to `home`.
    left: Mutex<Vec<String>>,
    /// The images of journals, by the names of the journals' files. Each header is read once.
    pub(super) places: Mutex<HashMap<String, ImagePlace>>,
}

/// Checks that a folder is one of `user` or of this process, without access for others.
pub(super) fn check_owner(found: &Stat, user: u32) -> io::Result<()> {
    let (owner, mode) = (found.st_uid, found.st_mode & 0o7777);
    let why = if FileType::from_raw_mode(found.st_mode) != FileType::Directory {
        format!("user {owner} has something there that is no folder; remove it")
    } else if ![user, geteuid().as_raw()].contains(&owner) {
        format!("the folder belongs to user {owner}, not to user {user}; remove or rename it")
    } else if mode & 0o77 != 0 {
        format!(
            "other users than {owner} have access to the folder (mode {mode:04o}); chmod 0700 ends that"
        )
    } else {
        return Ok(());
    };
    Err(io::Error::new(io::ErrorKind::AlreadyExists, why))
}

/// Returns the path of a user's own folder in a folder where all users make theirs, such as `/dev/shm`.
///
/// The folder is called `name`. Another user may have taken that name, to keep this one out: then it is called `name-PID`,
/// by the process that made it. A folder counts if it is the user's, or this process', and without access for others. If
/// there is none, the path is that of one to be made.
#[must_use]
pub fn private_folder(parent: &Path, name: &str, user: u32) -> PathBuf {
    let is_own = |path: &PathBuf| lstat(path).is_ok_and(|found| check_owner(&found, user).is_ok());
    let first = parent.join(name);
    if is_own(&first) {
        return first;
    }
    let prefix = format!("{name}-");
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    let others = entries.filter(|entry| {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix(&prefix));
        number.is_some_and(|number| number.parse::<u32>().is_ok())
    });
    let free = || match lstat(&first) {
        Err(Errno::NOENT) => first.clone(),
        _ => parent.join(format!("{prefix}{}", std::process::id())),
    };
    others.map(|entry| entry.path()).filter(is_own).min().unwrap_or_else(free)
}

impl Journals {
    /// The journals in that folder, which belongs to that user alone: the user of this process, or the one that
    /// this process, as root, will change to.
    ///
    /// # Errors
    ///
    /// The folder does not exist and cannot be created. `AlreadyExists`: it is not that user's alone.
    pub(crate) fn in_folder(path: &Path, user: u32) -> io::Result<Journals> {
        match mkdir(path, Mode::RWXU) {
            // Looked at first: a stranger's folder may not even be opened.
            Err(Errno::EXIST) => check_owner(&lstat(path)?, user)?,
            made => made?,
        }
        let journals = Journals::existing(path, user)?;
        if fstat(&journals.0.fd)?.st_uid != user {
            journals.0.give()?;
        }
        journals.sweep()?;
        Ok(journals)
    }

    /// The journals in a folder of that user or of this process' user alone. Nothing is changed.
    ///
    /// # Errors
    ///
    /// As of open(2). `AlreadyExists`: it is not that user's alone.
    pub(super) fn existing(path: &Path, user: u32) -> io::Result<Journals> {
        let folder = Folder {
            path: path.to_owned(),
            fd: open(path, FOLDER, Mode::empty())?,
            user,
            home: thread::current().id(),
            left: Mutex::default(),
            places: Mutex::default(),
        };
        check_owner(&fstat(&folder.fd)?, user)?;
        Ok(Journals(Arc::new(folder), OtherFolders::default()))
    }

    /// Removes files that other threads have left to this one, which opened the folder.
    pub(crate) fn remove_left(&self) {
        self.0.remove_left();
    }

    /// A lock: while it is held, no other process creates journals or removes unused ones.
    pub(super) fn turn(&self) -> io::Result<OwnedFd> {
        let folder = openat(&self.0.fd, ".", FOLDER, Mode::empty())?;
        flock(&folder, FlockOperation::LockExclusive)?;
        Ok(folder)
    }

    /// Removes journals of ended processes that no image has the mark of.
    fn sweep(&self) -> io::Result<()> {
        let turn = self.turn()?;
        for entry in Dir::new(turn.try_clone()?)? {
            let entry = entry?;
            if let Some(journal) = kept::journal_of(entry.file_name()) {
                if !self.0.has(&journal)? {
                    self.0.remove(entry.file_name())?;
                }
                continue;
            }
            if entry.file_name().to_bytes().starts_with(PART.as_bytes()) {
                self.0.remove(entry.file_name())?;
                continue;
            }
            // Other processes may remove files too.
            let opened = self.0.open(entry.file_name(), OFlags::RDONLY | FILE);
            let Ok(file) = opened else { continue };
            if !lock(&file)? {
                continue;
            }
            let mut named = [0; 8];
            if file.read_exact_at(&mut named, NAMED).is_err() || named == [0; 8] {
                self.0.remove(entry.file_name())?;
            }
        }
        Ok(())
    }

    /// Creates a journal for the image at that place, if that is known.
    pub(in crate::drivers::qcow2) fn create(
        &self,
        place: Option<&ImagePlace>,
    ) -> io::Result<Journal> {
        let _turn = self.turn()?;
        let mark = Mark::new()?;
        let file = self.0.create(&name(&mark))?.ok_or(Errno::EXIST)?;
        let journal = Journal {
            file,
            folder: self.0.clone(),
            mark,
            slots: Slots::default(),
            committed: 0,
            written: 0,
            named: false,
            inode: place.map_or(0, |place| place.inode),
            knows_bitmaps: true,
        };
        if !lock(&journal.file)? {
            return Err(io::Error::other("another process has the new journal"));
        }
        journal.file.write_all_at(MAGIC, 0)?;
        journal.file.write_all_at(&journal.mark.bytes(), MAGIC.len() as u64)?;
        journal.write_commits()?;
        Ok(journal)
    }

    /// Finds what a killed process has left for an image with that mark and commit number, at that place. Returns also the
    /// journal, unless it is `for_a_look`.
    ///
    /// # Errors
    ///
    /// It cannot be read.
    pub(in crate::drivers::qcow2) fn find(
        &self,
        mark: &Mark,
        as_of: u64,
        place: Option<&ImagePlace>,
        for_a_look: bool,
    ) -> io::Result<Found> {
        let _turn = self.turn()?;
        let file = match self.0.open(name(mark), OFlags::RDWR | FILE) {
            Err(Errno::NOENT) => return Ok(Found::Nothing),
            opened => opened?,
        };
        self.look_into(file, mark, as_of, place, for_a_look)
    }

    /// The same for an open journal.
    pub(in crate::drivers::qcow2) fn look_into(
        &self,
        file: File,
        mark: &Mark,
        as_of: u64,
        place: Option<&ImagePlace>,
        for_a_look: bool,
    ) -> io::Result<Found> {
        check_is_file(&file)?;
        if !lock(&file)? {
            return Ok(Found::InUse);
        }
        let bytes = read(&file)?;
        let begins = bytes.strip_prefix(MAGIC).is_some_and(|rest| rest.starts_with(&mark.bytes()));
        let commits = (number(&bytes, COMMITS as usize), number(&bytes, COMMITS as usize + 8));
        let (true, (Some(committed), Some(written))) = (begins, commits) else {
            return Err(invalid("it is no journal of the image"));
        };
        if committed > MOST_COMMITS {
            return Err(invalid("more commits than there can have been"));
        }
        // Before a journal is made void, its image gets the number of the next commit.
        if !(written..=committed.saturating_add(1)).contains(&as_of) {
            return Ok(Found::Nothing);
        }
        let of = number(&bytes, INODE as usize).unwrap_or(0);
        let was = of_image::place(&bytes);
        if place.is_some_and(|here| is_copy(mark, of, was.as_ref(), here)) {
            return Ok(Found::OfAnother(was.map(|was| was.path)));
        }
        let again = (number(&bytes, AGAIN as usize), number(&bytes, AGAIN as usize + 8));
        let slots = bytes.get(SLOTS..).unwrap_or_default();
        let (slots, sectors) = Slots::read(slots, written, committed)?;
        let (folder, mark) = (self.0.clone(), mark.clone());
        // A mere look holds the lock only within this turn, so that no other process finds the journal in use.
        let journal = Journal {
            file,
            folder,
            mark,
            slots,
            committed,
            written,
            named: number(&bytes, NAMED as usize) != Some(0),
            inode: place.map_or(of, |place| place.inode),
            knows_bitmaps: again == commits,
        };
        let journal = (!for_a_look).then_some(journal);
        Ok(Found::Left(journal, sectors))
    }
}

impl Folder {
    pub(super) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// The user that the folder belongs to, or is given to.
    pub(super) fn user(&self) -> u32 {
        self.user
    }

    /// Opens a file in the folder. A special file, which could block a reader, is refused: `EINVAL`.
    pub(super) fn open(&self, name: impl Arg, flags: OFlags) -> rustix::io::Result<File> {
        let file = openat(&self.fd, name, flags, Mode::RUSR | Mode::WUSR)?.into();
        check_is_file(&file)?;
        Ok(file)
    }

    /// Creates a file that no other process has open. `None`: there is one of that name.
    pub(super) fn create(&self, name: &str) -> io::Result<Option<File>> {
        match self.open(name, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | FILE) {
            Err(Errno::EXIST) => Ok(None),
            file => {
                let file = file?;
                self.own(&file)?;
                Ok(Some(file))
            }
        }
    }

    /// Gives a new file to the folder's user.
    fn own(&self, file: &File) -> rustix::io::Result<()> {
        match fstat(file)?.st_uid == self.user {
            true => Ok(()),
            false => fchown(file, Some(Uid::from_raw(self.user)), None),
        }
    }

    /// Whether there is a file of that name.
    fn has(&self, name: &str) -> rustix::io::Result<bool> {
        match statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Ok(false),
            found => found.map(|_| true),
        }
    }

    /// The names of files that begin like this.
    pub(super) fn named(&self, prefix: &str) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in Dir::new(openat(&self.fd, ".", FOLDER, Mode::empty())?)? {
            let entry = entry?;
            let name = entry.file_name().to_str().ok().filter(|name| name.starts_with(prefix));
            names.extend(name.map(str::to_owned));
        }
        // The oldest first, so that bitmaps keep their order.
        names.sort_unstable_by_key(|name| (name.len(), name.clone()));
        Ok(names)
    }

    /// Gives a file another name. `false`: there is a file of that name.
    pub(super) fn rename(&self, name: &str, to: &str) -> rustix::io::Result<bool> {
        match renameat_with(&self.fd, name, &self.fd, to, RenameFlags::NOREPLACE) {
            Err(Errno::EXIST) => Ok(false),
            renamed => renamed.map(|()| true),
        }
    }

    pub(super) fn remove(&self, name: impl Arg) -> rustix::io::Result<()> {
        unlinkat(&self.fd, name, AtFlags::empty())
    }

    /// Removes a file without use. Another thread than the folder's leaves that to the folder's thread.
    pub(super) fn discard(&self, name: String) {
        match thread::current().id() == self.home {
            true => self.remove_unused(&name),
            false => locked(&self.left).push(name),
        }
    }

    fn remove_left(&self) {
        let left = std::mem::take(&mut *locked(&self.left));
        left.iter().for_each(|name| self.remove_unused(name));
    }

    fn remove_unused(&self, name: &str) {
        match self.remove(name) {
            // Another process removes files without use, too.
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => {
                log::warn!("{}: could not be removed: {errno}", self.path.join(name).display());
            }
        }
    }

    /// Gives a folder of this process' user alone, which therefore has no files of other users, to the user
    /// that the process changes to.
    fn give(&self) -> io::Result<()> {
        let user = Some(Uid::from_raw(self.user));
        for entry in Dir::new(openat(&self.fd, ".", FOLDER, Mode::empty())?)? {
            let entry = entry?;
            // Without the entry of its parent folder.
            if !entry.file_name().to_bytes().starts_with(b".") {
                chownat(&self.fd, entry.file_name(), user, None, AtFlags::SYMLINK_NOFOLLOW)?;
            }
        }
        Ok(fchown(&self.fd, user, None)?)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        self.remove_left();
    }
}

/// Names of unfinished copies begin like this. They are made while the [turn](Journals::turn) is held.
pub(super) const PART: &str = "part-";

/// Names of journals begin like this.
pub(super) const PREFIX: &str = "qcow2-";

pub(in crate::drivers::qcow2) fn name(mark: &Mark) -> String {
    format!("{PREFIX}{mark}")
}

/// The state of a journal that an image names.
#[derive(Debug)]
pub(in crate::drivers::qcow2) enum Found {
    /// It is missing, or does not fit the present image.
    Nothing,
    /// Another process uses it.
    InUse,
    /// The image is a copy of the journal's image: the path of that, if it is known.
    OfAnother(Option<PathBuf>),
    /// Its contents.
    Left(Option<Journal>, Sectors),
}

fn check_is_file(file: &File) -> rustix::io::Result<()> {
    match FileType::from_raw_mode(fstat(file)?.st_mode) {
        FileType::RegularFile => Ok(()),
        _ => Err(Errno::INVAL),
    }
}

/// Reads a whole file, regardless of the shared file position.
fn read(file: &File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut chunk = vec![0; 1 << 20];
    loop {
        match file.read_at(&mut chunk, bytes.len() as u64)? {
            0 => return Ok(bytes),
            len => bytes.extend_from_slice(&chunk[..len]),
        }
    }
}

/// Locks a journal for one owner, or for two processes of an upgrade. `false`: there is another owner.
pub(super) fn lock(file: &File) -> io::Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Ok(false),
        locked => Ok(locked.map(|()| true)?),
    }
}
