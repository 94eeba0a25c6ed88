//! Journals in other folders: a daemon of another user or of another service had the image open.
//!
//! The mark of an image does not name a folder. Where a journal is missing, the folders of other daemons on this host are
//! looked into.

use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{OFlags, fstat, lstat};
use rustix::io::Errno;

use super::folder::{FILE, Found, Journals, PART, check_owner, lock, name};
use super::kept;
use crate::drivers::qcow2::marker::Mark;
use crate::image_place::ImagePlace;

/// The folders in which daemons of this host may have journals, at a moment.
#[derive(Clone, Default)]
pub(super) struct OtherFolders(pub(super) Option<Arc<dyn Fn() -> Vec<PathBuf> + Send + Sync>>);

impl fmt::Debug for OtherFolders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OtherFolders").finish_non_exhaustive()
    }
}

/// What other folders have of a journal.
#[derive(Debug)]
pub(in crate::drivers::qcow2) enum Elsewhere {
    /// None has it.
    Nowhere,
    /// This folder has it.
    Found(PathBuf, Found),
    /// This folder has it, or may have it, and this process must not use it: the reason.
    Refused(PathBuf, String),
}

impl Journals {
    /// Sets what returns the folders in which other daemons may have journals.
    #[must_use]
    pub(crate) fn besides(self, folders: Arc<dyn Fn() -> Vec<PathBuf> + Send + Sync>) -> Journals {
        Journals(self.0, OtherFolders(Some(folders)))
    }

    /// Finds a journal, as [`find`](Self::find), that is not in this folder. Unless it is `for_a_look`, it is moved to this
    /// folder.
    ///
    /// # Errors
    ///
    /// It cannot be read or moved.
    pub(in crate::drivers::qcow2) fn find_elsewhere(
        &self,
        mark: &Mark,
        as_of: u64,
        place: Option<&ImagePlace>,
        for_a_look: bool,
    ) -> io::Result<Elsewhere> {
        let folders = self.1.0.as_ref().map_or_else(Vec::new, |folders| folders());
        let own = fstat(self.0.fd())?;
        // The name of a folder that no look is possible into.
        let mut unknown = None;
        for path in folders {
            match lstat(&path) {
                Ok(found) if (found.st_dev, found.st_ino) != (own.st_dev, own.st_ino) => {}
                _ => continue,
            }
            match lstat(path.join(name(mark))) {
                Ok(_) => {}
                Err(Errno::NOENT | Errno::NOTDIR) => continue,
                Err(errno) => {
                    let why = format!("whether it is there is unknown: {}", io::Error::from(errno));
                    unknown.get_or_insert((path, why));
                    continue;
                }
            }
            let other = match self.neighbour(&path) {
                Ok(other) => other,
                Err(error) => return Ok(Elsewhere::Refused(path, error.to_string())),
            };
            match other.find(mark, as_of, place, true)? {
                Found::Nothing => continue,
                Found::Left(..) if !for_a_look => {}
                found => return Ok(Elsewhere::Found(path, found)),
            }
            return match self.take_from(&other, mark)? {
                true => Ok(Elsewhere::Found(path, self.find(mark, as_of, place, false)?)),
                false => Ok(Elsewhere::Found(path, Found::InUse)),
            };
        }
        Ok(unknown.map_or(Elsewhere::Nowhere, |(path, why)| Elsewhere::Refused(path, why)))
    }

    /// The journals in another folder. What it has is written to images, so the folder has to be the user's alone.
    fn neighbour(&self, path: &Path) -> io::Result<Journals> {
        check_owner(&lstat(path)?, self.0.user())?;
        Journals::existing(path, self.0.user())
    }

    /// Moves a journal and its files of bitmaps here. `false`: a process has it.
    ///
    /// A kill meanwhile leaves the journal there, or here and there, with the same contents.
    fn take_from(&self, other: &Journals, mark: &Mark) -> io::Result<bool> {
        let journal = name(mark);
        // Others neither use the journal nor remove its files as long as this holds the lock. Never are both turns held:
        // two processes could wait for one another.
        let there = {
            let _turn = other.turn()?;
            let there = other.0.open(&*journal, OFlags::RDWR | FILE)?;
            if !lock(&there)? {
                return Ok(false);
            }
            there
        };
        let bitmaps = other.0.named(&kept::prefix(mark))?;
        {
            let _turn = self.turn()?;
            for bitmap in &bitmaps {
                self.copy(bitmap, other.0.open(&**bitmap, OFlags::RDONLY | FILE)?)?;
            }
            // The last, as it makes the others valid.
            self.copy(&journal, there.try_clone()?)?;
        }
        for file in bitmaps.iter().chain([&journal]) {
            match other.0.remove(&**file) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(errno) => log::warn!(
                    "{}: could not be removed: {errno}",
                    other.0.path.join(file).display()
                ),
            }
        }
        Ok(true)
    }

    /// Makes a copy of a file. A copy that a killed process has left makes room.
    fn copy(&self, name: &str, mut from: File) -> io::Result<()> {
        let part = format!("{PART}{name}");
        match self.0.remove(&*part) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno.into()),
        }
        let mut copy = self.0.create(&part)?.ok_or(ErrorKind::AlreadyExists)?;
        // Not io::copy: the sandbox refuses its sendfile(2).
        let mut data = vec![0; 64 << 10];
        loop {
            match from.read(&mut data)? {
                0 => break,
                len => copy.write_all(&data[..len])?,
            }
        }
        match self.0.rename(&part, name)? {
            true => Ok(()),
            // The same contents: see above.
            false => Ok(self.0.remove(&*part)?),
        }
    }
}
