//! Files of dirty bitmaps beside a journal: [bits](crate::track::KeptBits) that survive a kill of the process.
//!
//! The files are named after the journal's mark. They belong to the image as the journal does: the process that opens
//! the image next takes them if it finds the mark and the journal. Nothing but the journal says so, which is why it also
//! says whether a version had it that does not know these files, and wrote to the image without setting bits.

use std::ffi::CStr;
use std::fmt::Display;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use rustix::fs::OFlags;

use super::Journal;
use super::folder::{FILE, Folder};
use crate::drivers::qcow2::marker::Mark;
use crate::track::{Described, KeptBits, Owner};

const PREFIX: &str = "bitmap-";

/// The names of files of bitmaps that belong to the journal with that mark begin like this.
pub(super) fn prefix(mark: impl Display) -> String {
    format!("{PREFIX}{mark}-")
}

/// The name of the journal that a file of a bitmap belongs to. `None`: it is no such file.
pub(super) fn journal_of(file: &CStr) -> Option<String> {
    let name = file.to_str().ok()?.strip_prefix(PREFIX)?;
    name.rsplit_once('-').map(|(mark, _)| format!("qcow2-{mark}"))
}

/// A bitmap's file.
pub(in crate::drivers::qcow2) struct KeptFile {
    folder: Arc<Folder>,
    name: String,
    pub(in crate::drivers::qcow2) bits: Arc<KeptBits>,
}

impl KeptFile {
    /// Gives its bits up, and removes it.
    pub(in crate::drivers::qcow2) fn remove(&self) {
        self.bits.give_up();
        self.folder.discard(self.name.clone());
    }
}

/// Makes files of bitmaps for an image with a journal.
pub(in crate::drivers::qcow2) struct Keeper {
    folder: Arc<Folder>,
    mark: Mark,
    owner: Owner,
    /// A file could not be made, and the log says so.
    has_failed: AtomicBool,
}

impl Keeper {
    /// Makes a file for a new bitmap of a node. `None`: there cannot be one. The first failure is logged.
    pub(in crate::drivers::qcow2) fn create(&self, node: &str, of: &Described) -> Option<KeptFile> {
        let warn = |error: &io::Error| {
            if !self.has_failed.swap(true, Ordering::Relaxed) {
                let name = &of.name;
                log::warn!(
                    "qcow2 image of node '{node}': dirty bitmap '{name}' cannot be kept in memory: {error}. A kill \
                     leaves it inconsistent"
                );
            }
        };
        self.try_create(of).inspect_err(warn).ok()
    }

    /// Makes a file another one's. `None`: it cannot be, and is removed.
    pub(in crate::drivers::qcow2) fn take(&self, mut file: KeptFile) -> Option<KeptFile> {
        let named = file.bits.set_owner(self.owner).and_then(|()| {
            Ok(self.new_name(|name| Ok(self.folder.rename(&file.name, name)?.then_some(())))?.0)
        });
        match named {
            Ok(name) => {
                file.name = name;
                Some(file)
            }
            Err(error) => {
                log::warn!("{}: {error}", file.name);
                file.remove();
                None
            }
        }
    }

    /// Finds a name for which `make` makes a file.
    fn new_name<T>(&self, make: impl Fn(&str) -> io::Result<Option<T>>) -> io::Result<(String, T)> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        loop {
            let name = format!("{}{}", prefix(&self.mark), NEXT.fetch_add(1, Ordering::Relaxed));
            // Another process may have had that number.
            if let Some(made) = make(&name)? {
                return Ok((name, made));
            }
        }
    }

    fn try_create(&self, of: &Described) -> io::Result<KeptFile> {
        let (name, file) = self.new_name(|name| self.folder.create(name))?;
        let made = KeptBits::create(file, self.owner, of);
        let bits = Arc::new(made.inspect_err(|_| self.folder.discard(name.clone()))?);
        Ok(KeptFile { folder: self.folder.clone(), name, bits })
    }
}

impl Journal {
    /// Makes files of bitmaps for the image, in a file on that device. `None`: the image and a copy of it could be
    /// confused.
    pub(in crate::drivers::qcow2) fn keeper(&self, device: Option<u64>) -> Option<Keeper> {
        let owner = Owner { mark: self.mark.bytes(), device: device.filter(|_| self.inode != 0)? };
        let (folder, mark) = (self.folder.clone(), self.mark.clone());
        Some(Keeper { folder, mark, owner, has_failed: AtomicBool::new(false) })
    }

    /// Finds the bitmaps that a killed process has left for the image, in a file on that device, or, with `lent`, one that
    /// hands the image over; the oldest first. Removes those that may lack writes.
    ///
    /// Before the journal is made void: then it looks as if a version had it that knows the files.
    pub(in crate::drivers::qcow2) fn find_kept(
        &self,
        device: Option<u64>,
        lent: bool,
    ) -> Vec<(Described, KeptFile)> {
        let keeper = self.keeper(device).filter(|_| self.knows_bitmaps);
        let names = self.folder.named(&prefix(&self.mark));
        let names = names.inspect_err(|error| log::warn!("files of dirty bitmaps: {error}"));
        let mut all: Vec<(Described, KeptFile)> = Vec::new();
        for name in names.unwrap_or_default() {
            let found = keeper.as_ref().and_then(|keeper| {
                let file = self.folder.open(&*name, OFlags::RDWR | FILE).map_err(io::Error::from);
                let found = file.and_then(|file| KeptBits::find(file, keeper.owner, lent));
                found.inspect_err(|error| log::warn!("{name}: {error}")).ok().flatten()
            });
            match found {
                Some((of, bits)) => {
                    let folder = self.folder.clone();
                    all.push((of, KeptFile { folder, name, bits: Arc::new(bits) }));
                }
                None => self.folder.discard(name),
            }
        }
        // With two of one name, it is unknown which is the newer.
        let names: Vec<String> = all.iter().map(|(of, _)| of.name.clone()).collect();
        let is_one = |(of, file): &(Described, KeptFile)| {
            let is_one = names.iter().filter(|name| **name == of.name).count() == 1;
            if !is_one {
                file.remove();
            }
            is_one
        };
        all.retain(is_one);
        all
    }
}
