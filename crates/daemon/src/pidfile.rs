//! `--pidfile`: the process's id in a file, which is locked for as long as the process lives.
//!
//! As in QEMU, a record lock covers the whole file. A file left behind by a killed process is taken over; the
//! file of a living process is refused.
//!
//! The lock belongs to the open file, so the process can hand it over. It conflicts with QEMU's locks, too.
//!
//! The file is created before the process confines itself. It is filled once nothing is left that could fail,
//! and removed at the end.

use std::cell::OnceCell;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

use crate::DaemonError;

/// A pid file of this process. Removed when dropped.
#[derive(Debug)]
pub struct Pidfile {
    /// Absolute, links followed: the working directory may change meanwhile.
    path: PathBuf,
    /// Holds the lock.
    file: File,
}

impl Pidfile {
    /// Creates and locks the file, and empties it.
    ///
    /// # Errors
    ///
    /// If the file cannot be created, or a living process has locked it. The message is QEMU's.
    pub fn create(path: &Path) -> Result<Self, String> {
        Self::try_create(path).map_err(|why| format!("cannot create PID file: {why}"))
    }

    /// Writes the process's id into the file, once the daemon has started.
    ///
    /// # Errors
    ///
    /// If the file cannot be written. The message is QEMU's.
    pub fn fill(&self) -> Result<(), String> {
        let why = |error| could_not("cannot create PID file: Failed to write pid file", error);
        self.write().map_err(why)
    }

    /// [Creates](Self::create) the file if there is a path.
    ///
    /// # Errors
    ///
    /// See [`create`](Self::create).
    pub fn create_if(path: Option<&Path>) -> Result<Option<Self>, DaemonError> {
        path.map(Self::create).transpose().map_err(DaemonError::new)
    }

    /// [Fills](Self::fill) a created file, and stores it in `kept`.
    ///
    /// # Errors
    ///
    /// See [`fill`](Self::fill).
    pub fn fill_if(created: Option<Self>, kept: &OnceCell<Self>) -> Result<(), DaemonError> {
        let Some(created) = created else { return Ok(()) };
        created.fill().map_err(DaemonError::new)?;
        let _ = kept.set(created);
        Ok(())
    }

    fn try_create(path: &Path) -> Result<Self, String> {
        let create = || could_not_create(path);
        loop {
            let file = OpenOptions::new()
                .create(true)
                .truncate(false)
                .write(true)
                .mode(0o600)
                .open(path)
                .map_err(|error| could_not(&create(), error))?;
            lock(&file).map_err(|errno| could_not("Cannot lock pid file", errno.into()))?;
            // Its last owner may have removed it between our opening and our locking.
            if !is_at(&file, path) {
                continue;
            }
            let path = fs::canonicalize(path).map_err(|error| could_not(&create(), error))?;
            // A killed process may have left its id in the file.
            let emptied = file.set_len(0);
            emptied.map_err(|error| could_not("Failed to truncate pid file", error))?;
            return Ok(Self { path, file });
        }
    }

    /// The file, with its path, for the process that takes over.
    ///
    /// # Errors
    ///
    /// As of fcntl(2).
    pub(crate) fn hand_over(&self) -> io::Result<(PathBuf, File)> {
        Ok((self.path.clone(), self.file.try_clone()?))
    }

    /// Takes over another process' file with its lock, and writes this one's ID.
    pub fn take_over(path: PathBuf, file: OwnedFd) -> Self {
        let pidfile = Self { path, file: file.into() };
        if let Err(error) = pidfile.write() {
            log::error!("cannot write PID file {}: {error}", pidfile.path.display());
        }
        pidfile
    }

    fn write(&self) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.write_all_at(format!("{}\n", std::process::id()).as_bytes(), 0)
    }
}

impl Drop for Pidfile {
    fn drop(&mut self) {
        self.remove();
    }
}

impl Pidfile {
    /// Removes the file, which dropping does as well.
    pub(crate) fn remove(&self) {
        // Another program may have replaced the file.
        if is_at(&self.file, &self.path)
            && let Err(error) = fs::remove_file(&self.path)
        {
            log::warn!("cannot remove PID file {}: {error}", self.path.display());
        }
    }
}

fn could_not(what: &str, error: io::Error) -> String {
    // The system's message, without the number that Rust appends.
    let why = error.to_string();
    format!("{what}: {}", why.split(" (os error").next().unwrap_or_default())
}

fn could_not_create(path: &Path) -> String {
    format!("Could not create '{}'", path.display())
}

/// Locks the whole file, or fails at once. `file` must be open for writing. Closing its last descriptor unlocks
/// it.
pub(crate) fn lock(file: &File) -> Result<(), Errno> {
    let lock = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    fcntl(file, FcntlArg::F_OFD_SETLK(&lock)).map(drop)
}

/// Whether `file` is what is found at `path`.
fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(ours), Ok(found)) => (ours.dev(), ours.ino()) == (found.dev(), found.ino()),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Directory(PathBuf);

    impl Directory {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("pidfile-{}-{name}", std::process::id()));
            fs::create_dir(&path).expect("a directory");
            Self(path)
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn holds_the_pid_and_goes_with_its_owner() {
        let directory = Directory::new("holds");
        let path = directory.0.join("a.pid");
        fs::write(&path, "left behind by another, longer").expect("a file");
        let pidfile = Pidfile::create(&path).expect("a pid file");
        assert_eq!(fs::read_to_string(&path).expect("it can be read"), "");
        pidfile.fill().expect("it can be written");
        let text = fs::read_to_string(&path).expect("it can be read");
        assert_eq!(text, format!("{}\n", std::process::id()));
        drop(pidfile);
        assert!(!path.exists());
    }

    #[test]
    fn follows_links_and_removes_what_they_lead_to() {
        let directory = Directory::new("links");
        let (link, target) = (directory.0.join("link"), directory.0.join("target"));
        std::os::unix::fs::symlink(&target, &link).expect("a link");
        let pidfile = Pidfile::create(&link).expect("a pid file");
        assert!(target.exists());
        drop(pidfile);
        assert!(!target.exists() && link.is_symlink());
    }

    #[test]
    fn leaves_a_file_that_has_replaced_it() {
        let directory = Directory::new("leaves");
        let path = directory.0.join("a.pid");
        let pidfile = Pidfile::create(&path).expect("a pid file");
        fs::remove_file(&path).expect("it goes");
        fs::write(&path, "1\n").expect("another file");
        drop(pidfile);
        assert_eq!(fs::read_to_string(&path).expect("it is there"), "1\n");
    }

    #[test]
    fn errors_are_worded_as_in_qemu() {
        let missing = Path::new("/nonexistent/a.pid");
        assert_eq!(
            Pidfile::create(missing).expect_err("there is no directory"),
            "cannot create PID file: Could not create '/nonexistent/a.pid': \
             No such file or directory"
        );
    }
}
