//! `--pidfile`: the process's id in a file, which is locked for as long as the process lives.
//!
//! As in QEMU, a record lock covers the whole file. A file left behind by a killed process is taken over; the
//! file of a living process is refused.
//!
//! The lock belongs to the open file, so the process can hand it over. It conflicts with QEMU's locks, too.
//!
//! The file appears at its path when it has the id and the daemon serves, so that programs can wait for it. Until
//! then it has another name in the same directory: it is created before the process confines itself. It is removed
//! at the end.
//!
//! A daemon that becomes another user may rename the file if the directory is that user's. In another directory,
//! the file appears with the id right before the daemon becomes that user, when the whole command line has been
//! carried out. A file that was there before, in a directory that cannot be written to, is empty until the daemon
//! serves.

use std::cell::OnceCell;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, FcntlArg, RenameFlags, fcntl, renameat2};
use nix::libc;

use crate::DaemonError;

/// A pid file of this process. Removed when dropped.
#[derive(Debug)]
pub struct Pidfile {
    /// Absolute, links followed: the working directory may change meanwhile.
    path: PathBuf,
    /// Holds the lock.
    file: File,
    /// Where the file is until it is filled, if not at `path`.
    hidden: Option<PathBuf>,
}

/// Whether a pid file may be renamed once the process is confined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renaming {
    /// By the user that the process has by then, and the sandbox knows of the file.
    Possible,
    /// Not by the user that the process becomes.
    Impossible,
}

impl Pidfile {
    /// Creates and locks the file. A file that a killed process has left at the path is removed.
    ///
    /// # Errors
    ///
    /// If the file cannot be created, or a living process has locked it. The message is QEMU's.
    pub fn create(path: &Path) -> Result<Self, String> {
        Self::try_create(path).map_err(|why| format!("cannot create PID file: {why}"))
    }

    /// Writes the process's id into the file, once the daemon has started, and has the file appear at its path.
    ///
    /// # Errors
    ///
    /// If the file cannot be written, or another process has taken the path meanwhile. The message is QEMU's.
    pub fn fill(&mut self) -> Result<(), String> {
        let failed = |error| could_not("cannot create PID file: Failed to write pid file", error);
        self.write().map_err(failed)?;
        let Some(hidden) = &self.hidden else { return Ok(()) };
        let rename = |flags| renameat2(AT_FDCWD, hidden, AT_FDCWD, &self.path, flags);
        let renamed = match rename(RenameFlags::RENAME_NOREPLACE) {
            // A file system without this flag.
            Err(Errno::EINVAL) => rename(RenameFlags::empty()),
            renamed => renamed,
        };
        match renamed {
            Ok(()) => {
                self.hidden = None;
                Ok(())
            }
            Err(Errno::EEXIST) => {
                let why = could_not_lock(&self.path, Errno::EAGAIN);
                Err(format!("cannot create PID file: {why}"))
            }
            Err(errno) => Err(failed(errno.into())),
        }
    }

    /// [Creates](Self::create) the file if there is a path, and fills it if it cannot be renamed later.
    ///
    /// # Errors
    ///
    /// See [`create`](Self::create) and [`fill`](Self::fill).
    pub fn create_if(path: Option<&Path>, renaming: Renaming) -> Result<Option<Self>, DaemonError> {
        let Some(path) = path else { return Ok(None) };
        let mut created = Self::create(path).map_err(DaemonError::new)?;
        if renaming == Renaming::Impossible {
            created.fill().map_err(DaemonError::new)?;
        }
        Ok(Some(created))
    }

    /// [Fills](Self::fill) a created file, and stores it in `kept`.
    ///
    /// # Errors
    ///
    /// See [`fill`](Self::fill).
    pub fn fill_if(created: Option<Self>, kept: &OnceCell<Self>) -> Result<(), DaemonError> {
        let Some(mut created) = created else { return Ok(()) };
        created.fill().map_err(DaemonError::new)?;
        let _ = kept.set(created);
        Ok(())
    }

    fn try_create(path: &Path) -> Result<Self, String> {
        let create = |error| could_not(&format!("Could not create '{}'", path.display()), error);
        // Links are followed, also one that leads to no file yet.
        let target = follow(path).map_err(create)?;
        let removed = loop {
            match OpenOptions::new().write(true).open(&target) {
                Ok(left) => {
                    lock(&left).map_err(|errno| could_not_lock(path, errno))?;
                    // Its last owner may have removed it meanwhile, and another made a new one.
                    if is_at(&left, &target) {
                        let is_file = left.metadata().is_ok_and(|left| left.is_file());
                        break is_file && fs::remove_file(&target).is_ok();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => break true,
                Err(error) => return Err(create(error)),
            }
        };
        if removed {
            let hidden = beside(&target);
            // One of a killed process that had the same id.
            let _ = fs::remove_file(&hidden);
            let file = open_new(&hidden).map_err(create)?;
            let created = Self { path: target, file, hidden: Some(hidden) };
            lock(&created.file).map_err(|errno| could_not_lock(path, errno))?;
            return Ok(created);
        }
        loop {
            let file = OpenOptions::new()
                .create(true)
                .truncate(false)
                .write(true)
                .mode(0o600)
                .open(path)
                .map_err(create)?;
            lock(&file).map_err(|errno| could_not_lock(path, errno))?;
            // Its last owner may have removed it between our opening and our locking.
            if !is_at(&file, path) {
                continue;
            }
            let path = fs::canonicalize(path).map_err(create)?;
            // A killed process may have left its id in the file.
            let emptied = file.set_len(0);
            emptied.map_err(|error| could_not("Failed to truncate pid file", error))?;
            return Ok(Self { path, file, hidden: None });
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
        let pidfile = Self { path, file: file.into(), hidden: None };
        if let Err(error) = pidfile.write() {
            log::error!("cannot write PID file {}: {error}", pidfile.path.display());
        }
        pidfile
    }

    fn write(&self) -> io::Result<()> {
        let id = format!("{}\n", std::process::id());
        // A file that is at its path already is never seen empty.
        self.file.write_all_at(id.as_bytes(), 0)?;
        self.file.set_len(id.len() as u64)
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
        let path = self.hidden.as_ref().unwrap_or(&self.path);
        // Another program may have replaced the file.
        if is_at(&self.file, path)
            && let Err(error) = fs::remove_file(path)
        {
            log::warn!("cannot remove PID file {}: {error}", path.display());
        }
    }
}

fn could_not(what: &str, error: io::Error) -> String {
    // The system's message, without the number that Rust appends.
    let why = error.to_string();
    format!("{what}: {}", why.split(" (os error").next().unwrap_or_default())
}

/// The folder in which the file at `path` is renamed.
pub(crate) fn folder(path: &Path) -> Option<PathBuf> {
    follow(path).ok()?.parent().map(Path::to_owned)
}

/// Returns QEMU's message, with the file and the process that has written its id into it.
fn could_not_lock(path: &Path, errno: Errno) -> String {
    let name = path.display();
    let why = could_not(&format!("Cannot lock pid file '{name}'"), errno.into());
    match fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<u32>().ok()) {
        Some(pid) => format!("{why}: process {pid} has it"),
        None => why,
    }
}

/// Returns the absolute path that `path` leads to, whether or not there is a file.
fn follow(path: &Path) -> io::Result<PathBuf> {
    let mut path = std::path::absolute(path)?;
    // The kernel follows as many links.
    for _ in 0..40 {
        let target = match fs::read_link(&path) {
            Ok(target) => target,
            // Not a link, or not there.
            Err(_) => break,
        };
        path = path.parent().unwrap_or(Path::new("/")).join(target);
    }
    let name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?;
    Ok(fs::canonicalize(path.parent().unwrap_or(Path::new("/")))?.join(name))
}

/// Returns the name that the file has until it is filled.
fn beside(path: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}", std::process::id()));
    path.with_file_name(name)
}

fn open_new(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
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

    /// The error for a file of a living process.
    fn taken(path: &Path, pid: u32) -> String {
        format!(
            "cannot create PID file: Cannot lock pid file '{}': Resource temporarily unavailable: process {pid} has it",
            path.display()
        )
    }

    #[test]
    fn holds_the_pid_and_goes_with_its_owner() {
        let directory = Directory::new("holds");
        let path = directory.0.join("a.pid");
        fs::write(&path, "left behind by another, longer").expect("a file");
        let created = Pidfile::create_if(Some(&path), Renaming::Impossible).expect("a pid file");
        let text = || fs::read_to_string(&path).expect("it can be read");
        assert_eq!(text(), format!("{}\n", std::process::id()), "from the beginning");
        let kept = OnceCell::new();
        Pidfile::fill_if(created, &kept).expect("it can be written");
        assert_eq!(text(), format!("{}\n", std::process::id()));
        drop(kept);
        assert!(!path.exists());
    }

    #[test]
    fn appears_with_its_contents() {
        let directory = Directory::new("appears");
        let path = directory.0.join("a.pid");
        fs::write(&path, "left behind by another, longer").expect("a file");
        let mut pidfile = Pidfile::create(&path).expect("a pid file");
        assert!(!path.exists(), "programs wait for it");
        pidfile.fill().expect("it can be written");
        let text = fs::read_to_string(&path).expect("it can be read");
        assert_eq!(text, format!("{}\n", std::process::id()));
        let names = fs::read_dir(&directory.0).expect("a directory").count();
        assert_eq!(names, 1, "the first name is gone");
        let other = Pidfile::create(&path).map(drop);
        assert_eq!(other.expect_err("it is in use"), taken(&path, std::process::id()));
        drop(pidfile);
        assert!(!path.exists());
    }

    #[test]
    fn goes_if_it_was_never_filled() {
        let directory = Directory::new("never");
        let pidfile = Pidfile::create(&directory.0.join("a.pid"));
        drop(pidfile.expect("a pid file"));
        assert_eq!(fs::read_dir(&directory.0).expect("a directory").count(), 0);
    }

    #[test]
    fn leaves_the_file_of_one_that_was_faster() {
        let directory = Directory::new("faster");
        let path = directory.0.join("a.pid");
        let mut pidfile = Pidfile::create(&path).expect("a pid file");
        fs::write(&path, "1\n").expect("another file");
        assert_eq!(pidfile.fill().expect_err("the path is taken"), taken(&path, 1));
        drop(pidfile);
        assert_eq!(fs::read_to_string(&path).expect("it is there"), "1\n");
    }

    #[test]
    fn follows_links_and_removes_what_they_lead_to() {
        let directory = Directory::new("links");
        let (link, target) = (directory.0.join("link"), directory.0.join("target"));
        std::os::unix::fs::symlink(&target, &link).expect("a link");
        let mut pidfile = Pidfile::create(&link).expect("a pid file");
        assert!(!target.exists());
        pidfile.fill().expect("it can be written");
        assert!(target.exists() && link.is_symlink());
        drop(pidfile);
        assert!(!target.exists() && link.is_symlink());
    }

    #[test]
    fn leaves_a_file_that_has_replaced_it() {
        let directory = Directory::new("leaves");
        let path = directory.0.join("a.pid");
        let mut pidfile = Pidfile::create(&path).expect("a pid file");
        pidfile.fill().expect("it can be written");
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
