//! Mounts of this process' own FUSE exports, on which no node may open a file.
//!
//! An I/O thread would wait for an answer that only it can give, and no signal ends that.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use event_loop::sync::lock;
use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};

use crate::error::OpenError;

/// The mounts of this process' FUSE exports.
#[derive(Debug, Clone, Default)]
pub struct OwnMounts(Arc<Mutex<Vec<Arc<Mount>>>>);

/// The mount of one export, which counts until this is dropped.
#[derive(Debug)]
pub struct OwnMount {
    all: OwnMounts,
    mount: Arc<Mount>,
}

#[derive(Debug)]
struct Mount {
    export: String,
    path: PathBuf,
}

/// A file system: the major and minor number of its device.
type Device = (u32, u32);

impl OwnMounts {
    /// Adds the mount of an export with that `id`, also before the mount is made. `path` is absolute.
    #[must_use]
    pub fn add(&self, export: &str, path: &Path) -> OwnMount {
        let mount = Arc::new(Mount { export: export.to_owned(), path: path.to_owned() });
        lock(&self.0).push(mount.clone());
        OwnMount { all: self.clone(), mount }
    }

    /// Checks that a file is on none of the mounts, through whichever links.
    ///
    /// A file that is missing is on none.
    ///
    /// # Errors
    ///
    /// The file is on one.
    pub(crate) fn check(&self, file: &Path) -> Result<(), OpenError> {
        let mounts = lock(&self.0).clone();
        if mounts.is_empty() {
            return Ok(());
        }
        let Some(found) = device(file, false) else { return Ok(()) };
        match mounts.iter().find(|mount| device(&mount.path, true) == Some(found)) {
            None => Ok(()),
            Some(mount) => Err(OpenError::new(format!(
                "'{}' is on the mount of this daemon's own export '{}': the daemon would wait for itself; use the \
                 export's node, or another daemon",
                file.display(),
                mount.export
            ))),
        }
    }
}

impl Drop for OwnMount {
    fn drop(&mut self) {
        lock(&self.all.0).retain(|other| !Arc::ptr_eq(other, &self.mount));
    }
}

/// Returns the file system of a file. `mounted`: only if the path is a mount point.
///
/// Asks no server of a file system, such as this process, for the file's attributes.
fn device(path: &Path, mounted: bool) -> Option<Device> {
    let found = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::empty()).ok()?;
    let is_root = found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT);
    (is_root || !mounted).then_some((found.stx_dev_major, found.stx_dev_minor))
}
