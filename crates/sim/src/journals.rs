//! Folders of a world: that of journals of qcow2 images, and that of the operator's images.
//!
//! The folder of journals survives the kill of a daemon. A power cut empties it.

use std::fs;
use std::path::{Path, PathBuf};

/// The folder of journals.
pub(crate) struct Journals(PathBuf);

impl Journals {
    pub(crate) fn new(seed: u64) -> Self {
        Journals(named(seed, "journals"))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// The number of journals with changes that are missing in the image.
    pub(crate) fn filled(&self) -> usize {
        let Ok(files) = fs::read_dir(&self.0) else { return 0 };
        let journals = files.filter_map(|entry| {
            let entry = entry.ok()?;
            // Others are files of dirty bitmaps.
            let is_journal = entry.file_name().to_string_lossy().starts_with("qcow2-");
            is_journal.then(|| fs::read(entry.path()).ok())?
        });
        // The last commit, and the last one that is in the image.
        journals.filter(|bytes| bytes.get(64..72) != bytes.get(72..80)).count()
    }

    pub(crate) fn remove(&self) {
        let _ = fs::remove_dir_all(&self.0);
    }
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
