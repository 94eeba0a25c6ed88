//! The folder where journals lie.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::unistd::geteuid;
use rustix::fs::{
    AtFlags, Dir, FileType, FlockOperation, Mode, OFlags, Uid, chownat, fchown, flock, fstat,
    mkdir, open, openat, unlinkat,
};
use rustix::io::Errno;
use rustix::path::Arg;

use super::slots::Slots;
use super::{COMMITS, INODE, Journal, MAGIC, MOST_COMMITS, NAMED, SLOTS, invalid, number};
use crate::drivers::qcow2::marker::Mark;
use crate::drivers::qcow2::steps::Sectors;

/// How a folder is opened, and a file in it.
const FOLDER: OFlags =
    OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC).union(OFlags::RDONLY);
const FILE: OFlags = OFlags::NOFOLLOW.union(OFlags::NONBLOCK).union(OFlags::CLOEXEC);

/// Where journals lie.
#[derive(Debug, Clone)]
pub(crate) struct Journals(Arc<Folder>);

/// What was found to be a user's alone, wherever its path leads later: that user may have it lead elsewhere, and
/// this process be a mightier one still.
#[derive(Debug)]
pub(super) struct Folder {
    pub(super) path: PathBuf,
    fd: OwnedFd,
    user: u32,
}

impl Journals {
    /// Those in that folder, which is of that user and for nobody else: who this process is, or becomes, which
    /// only root does.
    ///
    /// # Errors
    ///
    /// There is none, and it cannot be made; or it is somebody else's.
    pub(crate) fn in_folder(path: &Path, user: u32) -> io::Result<Journals> {
        match mkdir(path, Mode::RWXU) {
            Err(Errno::EXIST) => {}
            made => made?,
        }
        let folder = Folder { path: path.to_owned(), fd: open(path, FOLDER, Mode::empty())?, user };
        let found = fstat(&folder.fd)?;
        if found.st_mode & 0o77 != 0 || ![user, geteuid().as_raw()].contains(&found.st_uid) {
            return Err(io::Error::other(format!("it is not the folder of user {user} alone")));
        }
        if found.st_uid != user {
            folder.give()?;
        }
        let journals = Journals(Arc::new(folder));
        journals.sweep()?;
        Ok(journals)
    }

    /// Others neither make journals nor remove those of nobody while it is held.
    fn turn(&self) -> io::Result<OwnedFd> {
        let folder = openat(&self.0.fd, ".", FOLDER, Mode::empty())?;
        flock(&folder, FlockOperation::LockExclusive)?;
        Ok(folder)
    }

    /// Removes what processes that are gone have left and no image is marked with.
    fn sweep(&self) -> io::Result<()> {
        let turn = self.turn()?;
        for entry in Dir::new(turn.try_clone()?)? {
            let entry = entry?;
            // Others may be gone by now.
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

    /// A new journal, for the image in the file with that inode.
    pub(in crate::drivers::qcow2) fn create(&self, inode: Option<u64>) -> io::Result<Journal> {
        let _turn = self.turn()?;
        let mark = Mark::new()?;
        let file = self.0.open(name(&mark), OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | FILE)?;
        if fstat(&file)?.st_uid != self.0.user {
            fchown(&file, Some(Uid::from_raw(self.0.user)), None)?;
        }
        let journal = Journal {
            file,
            folder: self.0.clone(),
            mark,
            slots: Slots::default(),
            committed: 0,
            written: 0,
        };
        if !lock(&journal.file)? {
            return Err(io::Error::other("another process has the new journal"));
        }
        journal.file.write_all_at(MAGIC, 0)?;
        journal.file.write_all_at(&journal.mark.bytes(), MAGIC.len() as u64)?;
        journal.write_commits()?;
        journal.set_named(false)?;
        journal.file.write_all_at(&inode.unwrap_or(0).to_ne_bytes(), INODE)?;
        Ok(journal)
    }

    /// What a process that was killed has left of an image with that mark, which is as of that commit, in the file
    /// with that inode; and the journal, unless it is `for_a_look`.
    ///
    /// # Errors
    ///
    /// It cannot be read.
    pub(in crate::drivers::qcow2) fn find(
        &self,
        mark: &Mark,
        as_of: u64,
        inode: Option<u64>,
        for_a_look: bool,
    ) -> io::Result<Found> {
        let _turn = self.turn()?;
        let file = match self.0.open(name(mark), OFlags::RDWR | FILE) {
            Err(Errno::NOENT) => return Ok(Found::Nothing),
            opened => opened?,
        };
        self.look_into(file, mark, as_of, inode, for_a_look)
    }

    /// The same, in the file of the journal.
    pub(in crate::drivers::qcow2) fn look_into(
        &self,
        file: File,
        mark: &Mark,
        as_of: u64,
        inode: Option<u64>,
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
        // Before a journal is made void, its image is marked as of the next commit.
        if !(written..=committed.saturating_add(1)).contains(&as_of) {
            return Ok(Found::Nothing);
        }
        if let (Some(of), Some(inode)) = (number(&bytes, INODE as usize), inode)
            && ![0, inode].contains(&of)
        {
            return Ok(Found::OfAnother);
        }
        let slots = bytes.get(SLOTS..).unwrap_or_default();
        let (slots, sectors) = Slots::read(slots, written, committed)?;
        let (folder, mark) = (self.0.clone(), mark.clone());
        // Who only looks has had it for no longer than his turn, and nobody has found it in use.
        let journal =
            (!for_a_look).then_some(Journal { file, folder, mark, slots, committed, written });
        Ok(Found::Left(journal, sectors))
    }
}

impl Folder {
    /// Opens a file in it. One that is no file, and may keep whoever reads it waiting, is none: `EINVAL`.
    fn open(&self, name: impl Arg, flags: OFlags) -> rustix::io::Result<File> {
        let file = openat(&self.fd, name, flags, Mode::RUSR | Mode::WUSR)?.into();
        check_is_file(&file)?;
        Ok(file)
    }

    pub(super) fn remove(&self, name: impl Arg) -> rustix::io::Result<()> {
        unlinkat(&self.fd, name, AtFlags::empty())
    }

    /// Gives a folder that is this process' user's alone, so that nobody else has put anything there, to the user
    /// that it becomes.
    fn give(&self) -> io::Result<()> {
        let user = Some(Uid::from_raw(self.user));
        for entry in Dir::new(openat(&self.fd, ".", FOLDER, Mode::empty())?)? {
            let entry = entry?;
            // Of the folder's own names, its parent's is not to be given.
            if !entry.file_name().to_bytes().starts_with(b".") {
                chownat(&self.fd, entry.file_name(), user, None, AtFlags::SYMLINK_NOFOLLOW)?;
            }
        }
        Ok(fchown(&self.fd, user, None)?)
    }
}

pub(in crate::drivers::qcow2) fn name(mark: &Mark) -> String {
    format!("qcow2-{mark}")
}

/// What is there of a journal that an image names.
#[derive(Debug)]
pub(in crate::drivers::qcow2) enum Found {
    /// It is not there, or not that of the image as it is now.
    Nothing,
    /// Another process has it.
    InUse,
    /// The image is a copy of the one that it was left for.
    OfAnother,
    /// What was left.
    Left(Option<Journal>, Sectors),
}

fn check_is_file(file: &File) -> rustix::io::Result<()> {
    match FileType::from_raw_mode(fstat(file)?.st_mode) {
        FileType::RegularFile => Ok(()),
        _ => Err(Errno::INVAL),
    }
}

/// All of it, wherever whoever else has the file open has read to.
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

/// One owner at a time, which may be two processes of which one gives place to the other. `false`: there is another.
fn lock(file: &File) -> io::Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Ok(false),
        locked => Ok(locked.map(|()| true)?),
    }
}
