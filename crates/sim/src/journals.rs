//! Folders of a world: those of journals of qcow2 images, and that of the operator's images.
//!
//! The folders of journals survive the kill of a daemon. A power cut empties them.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};

/// The folders of journals: that of the present daemon, and that of the one before or after it. In half of all worlds, each
/// daemon has another folder than the one before, as if it was another service's.
pub(crate) struct Journals {
    folders: [PathBuf; 2],
    alternate: bool,
    /// The present one is the second.
    second: Cell<bool>,
}

impl Journals {
    pub(crate) fn new(seed: u64) -> Self {
        let folders = ["journals", "journal2"].map(|what| named(seed, what));
        Journals { folders, alternate: seed % 2 == 1, second: Cell::new(false) }
    }

    /// The present daemon's folder.
    pub(crate) fn path(&self) -> &Path {
        &self.folders[usize::from(self.second.get())]
    }

    /// The folders of all daemons.
    pub(crate) fn known(&self) -> Vec<PathBuf> {
        self.folders[..1 + usize::from(self.alternate)].to_vec()
    }

    /// The next daemon is started. Returns the number of journals with changes that are missing in the image, and how many of
    /// these are not in its folder.
    pub(crate) fn begin(&self) -> (usize, usize) {
        let before = filled(self.path());
        if self.alternate {
            self.second.set(!self.second.get());
        }
        let now = filled(self.path());
        match self.alternate {
            true => (before + now, before),
            false => (now, 0),
        }
    }

    pub(crate) fn remove(&self) {
        for folder in &self.folders {
            let _ = fs::remove_dir_all(folder);
        }
    }
}

/// The number of journals in a folder with changes that are missing in the image.
fn filled(folder: &Path) -> usize {
    let Ok(files) = fs::read_dir(folder) else { return 0 };
    let journals = files.filter_map(|entry| {
        let entry = entry.ok()?;
        // Others are files of dirty bitmaps.
        let is_journal = entry.file_name().to_string_lossy().starts_with("qcow2-");
        is_journal.then(|| fs::read(entry.path()).ok())?
    });
    // The last commit, and the last one that is in the image.
    journals.filter(|bytes| bytes.get(64..72) != bytes.get(72..80)).count()
}

/// A folder for images.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(seed: u64) -> Self {
        let folder = named(seed, "images");
        fs::create_dir_all(&folder).expect("a folder in memory");
        Folder(folder)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Removes the folder and the images. No `drop` would: the stack of a killed actor keeps the world for ever.
    pub(crate) fn remove(&self) {
        fs::remove_dir_all(&self.0).expect("the folder of images");
    }
}

/// A path in memory. Of the same length for all processes, as a different length may change the course of events.
fn named(seed: u64, what: &str) -> PathBuf {
    let name = format!("ringmill-sim-{:010}-{seed:010}-{what}", std::process::id());
    Path::new("/dev/shm").join(name)
}
