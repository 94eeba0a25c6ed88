//! Where daemons keep journals of qcow2 images: a folder that outlasts those that are killed, and not a
//! power cut.

use std::fs;
use std::path::{Path, PathBuf};

use block::NodeRegistry;

/// The folder of a world; gone with it.
pub(crate) struct Journals(PathBuf);

impl Journals {
    pub(crate) fn new(seed: u64) -> Self {
        let name = format!("ringmill-sim-{}-{seed}", std::process::id());
        Journals(Path::new("/dev/shm").join(name))
    }

    /// A registry of nodes for a daemon.
    pub(crate) fn registry(&self) -> NodeRegistry {
        NodeRegistry::new().with_journals(&self.0).expect("a folder in memory")
    }

    /// How many have something in them that is not in its image yet.
    pub(crate) fn filled(&self) -> usize {
        let Ok(files) = fs::read_dir(&self.0) else { return 0 };
        let journals = files.filter_map(|entry| fs::read(entry.ok()?.path()).ok());
        // The last commit, and the last one that is in the image.
        journals.filter(|bytes| bytes.get(64..72) != bytes.get(72..80)).count()
    }

    pub(crate) fn remove(&self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Drop for Journals {
    fn drop(&mut self) {
        self.remove();
    }
}
