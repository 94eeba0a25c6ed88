//! `--state`: the file that keeps the configuration.
//!
//! The file itself is never changed. A complete new file, on stable storage, replaces it by rename(2).
//!
//! The daemon holds a lock on the current file, as on a [pid file](crate::pidfile), so a second daemon is
//! refused. The lock belongs to the open file, so the process can hand it over.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use control::SavedState;
use event_loop::sync::lock;
use nix::errno::Errno;
use nix::libc;

use crate::DaemonError;
use crate::errno::words;
use crate::pidfile;

/// Longest file that is read, bytes.
const MAX_LEN: u64 = 64 << 20;
/// Most attempts to open the file while other processes replace it.
const TRIES: usize = 100;

/// A state file, locked.
#[derive(Debug)]
pub struct StateFile {
    /// Absolute, links followed: the working directory may change meanwhile.
    path: PathBuf,
    /// The folder of the file, for fsync(2) after a rename.
    folder: File,
    /// Locked while the file is being replaced.
    current: Mutex<Current>,
}

/// The current file.
#[derive(Debug)]
struct Current {
    /// Holds the lock.
    file: File,
    /// The content; empty if the content may not be on stable storage.
    text: String,
}

impl StateFile {
    /// Opens and locks the file, and returns its content.
    ///
    /// Makes an empty configuration if there is no file. Besides root and this process' user, `user` may own the
    /// file.
    ///
    /// # Errors
    ///
    /// If the file cannot be opened, a living process has locked it, others may write to it, or it is no state
    /// file. An existing file stays as it is.
    pub fn open(path: &Path, user: Option<u32>) -> Result<(Self, SavedState), DaemonError> {
        let of = |why: String| DaemonError::new(format!("state file '{}': {why}", path.display()));
        let (file, text) = Self::try_open(path, user).map_err(of)?;
        let state = SavedState::parse(&text).map_err(|error| {
            of(error.message).with_hint(
                "The file was left as it is. Move it away to start from the command line alone.",
            )
        })?;
        Ok((file, state))
    }

    fn try_open(path: &Path, user: Option<u32>) -> Result<(Self, String), String> {
        let failed = |what: &str, error: &io::Error| format!("{what} failed: {}", words(error));
        for _ in 0..TRIES {
            let path = real(path).map_err(|error| failed("looking it up", &error))?;
            let folder = path.parent().unwrap_or(Path::new("/"));
            let folder =
                File::open(folder).map_err(|error| failed("opening its folder", &error))?;
            let opened = OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
                .open(&path);
            let file = match opened {
                Ok(file) => file,
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    make_new(&path).map_err(|error| failed("making it", &error))?;
                    continue;
                }
                Err(error) => return Err(failed("opening it", &error)),
            };
            let metadata = file.metadata().map_err(|error| failed("fstat", &error))?;
            if !metadata.is_file() {
                return Err("not a regular file".into());
            }
            match pidfile::lock(&file) {
                Ok(()) => {}
                Err(Errno::EAGAIN | Errno::EACCES) => return Err("another process uses it".into()),
                Err(errno) => return Err(failed("locking it", &errno.into())),
            }
            // The process that held the lock may have replaced the file since.
            if !is_at(&file, &path) {
                continue;
            }
            let owners = [Some(0), Some(nix::unistd::geteuid().as_raw()), user];
            if metadata.mode() & 0o022 != 0 || !owners.contains(&Some(metadata.uid())) {
                return Err(format!(
                    "others may write to it (owner {}, mode {:03o}), and so have any file opened",
                    metadata.uid(),
                    metadata.mode() & 0o777
                ));
            }
            let text = content(&file).map_err(|error| failed("reading it", &error))?;
            let current = Mutex::new(Current { file, text: text.clone() });
            return Ok((StateFile { path, folder, current }, text));
        }
        Err("other processes put new files in its place all the time".into())
    }

    /// Takes over another process' locked file, and returns its content.
    ///
    /// # Errors
    ///
    /// If the folder cannot be opened, the file cannot be read, or it is no state file.
    pub fn take_over(path: PathBuf, file: OwnedFd) -> Result<(Self, SavedState), DaemonError> {
        let of = |why: String| DaemonError::new(format!("state file '{}': {why}", path.display()));
        let file = File::from(file);
        let folder = path.parent().unwrap_or(Path::new("/"));
        let folder = File::open(folder).map_err(|error| of(words(&error)))?;
        let text = content(&file).map_err(|error| of(words(&error)))?;
        let state = SavedState::parse(&text).map_err(|error| of(error.message))?;
        let current = Mutex::new(Current { file, text });
        Ok((StateFile { path, folder, current }, state))
    }

    /// Returns the path and a descriptor of the file, for the process that takes over.
    ///
    /// # Errors
    ///
    /// See fcntl(2).
    pub(crate) fn hand_over(&self) -> io::Result<(&Path, OwnedFd)> {
        Ok((&self.path, lock(&self.current).file.try_clone()?.into()))
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Checks that this process may make files in the folder, as [`replace`](Self::replace) does. Other failures,
    /// such as a full disk, may pass.
    ///
    /// # Errors
    ///
    /// If it may not.
    pub(crate) fn check_access(&self) -> Result<(), String> {
        let new = self.new_path();
        let made = unlink(&new).and_then(|()| create(&new).map(drop));
        let _ = fs::remove_file(&new);
        match made {
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem
                ) =>
            {
                let (path, why) = (self.path.display(), words(&error));
                Err(format!("state file '{path}': making files in its folder failed: {why}"))
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Whether the file has this text. `false` also while another is being written.
    pub(crate) fn has(&self, text: &str) -> bool {
        self.current.try_lock().is_ok_and(|current| current.text == text)
    }

    fn new_path(&self) -> PathBuf {
        let mut new = self.path.as_os_str().to_owned();
        new.push(".new");
        PathBuf::from(new)
    }

    /// Replaces the file by one with this text. Blocks until the text is on stable storage.
    ///
    /// # Errors
    ///
    /// If a step failed. Then the file at the path is unchanged. If only the fsync of the folder failed, the
    /// new file is in place, and a power cut may bring the previous file back.
    pub(crate) fn replace(&self, text: &str) -> Result<(), String> {
        let mut current = lock(&self.current);
        let path = self.path.display();
        let failed = |what: &str, error: &io::Error| {
            format!("state file '{path}': {what} failed: {}", words(error))
        };
        if !is_at(&current.file, &self.path) && fs::symlink_metadata(&self.path).is_ok() {
            return Err(format!("state file '{path}': another file is in its place"));
        }
        let new = self.new_path();
        let made = write_new(&new, text).map_err(|(what, error)| failed(what, &error));
        let file = made.inspect_err(|_| drop(fs::remove_file(&new)))?;
        fs::rename(&new, &self.path).map_err(|error| {
            let _ = fs::remove_file(&new);
            failed("rename", &error)
        })?;
        *current = Current { file, text: String::new() };
        self.folder.sync_all().map_err(|error| failed("fsync of its folder", &error))?;
        text.clone_into(&mut current.text);
        Ok(())
    }
}

/// Returns the absolute path, with links followed. The file itself need not exist.
fn real(path: &Path) -> io::Result<PathBuf> {
    match fs::canonicalize(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let path = std::path::absolute(path)?;
            let name = path.file_name().ok_or(ErrorKind::IsADirectory)?;
            Ok(fs::canonicalize(path.parent().unwrap_or(Path::new("/")))?.join(name))
        }
        found => found,
    }
}

fn content(file: &File) -> io::Result<String> {
    let len = file.metadata()?.len();
    if len > MAX_LEN {
        return Err(ErrorKind::FileTooLarge.into());
    }
    // Independent of the file position, which another process may share.
    let mut bytes = vec![0; len as usize];
    file.read_exact_at(&mut bytes, 0)?;
    String::from_utf8(bytes).map_err(|_| io::Error::other("not UTF-8"))
}

/// Makes a locked file with this text, on stable storage. Removes a file that a killed process has left at
/// `path`.
fn write_new(path: &Path, text: &str) -> Result<File, (&'static str, io::Error)> {
    unlink(path).map_err(|error| ("unlink", error))?;
    let mut file = create(path).map_err(|error| ("making the new one", error))?;
    file.write_all(text.as_bytes()).map_err(|error| ("writing the new one", error))?;
    file.sync_all().map_err(|error| ("fsync of the new one", error))?;
    pidfile::lock(&file).map_err(|errno| ("locking the new one", errno.into()))?;
    Ok(file)
}

fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)
}

/// Removes a file, if there is one.
fn unlink(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Makes a file with an empty configuration, unless another process does so at the same time.
fn make_new(path: &Path) -> io::Result<()> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}-{}", std::process::id(), since.as_nanos()));
    let new = PathBuf::from(name);
    let made = write_new(&new, &SavedState::text(&[], &[])).map_err(|(_, error)| error);
    // Unlike rename(2), link(2) replaces no existing file.
    let linked = made.and_then(|_| fs::hard_link(&new, path));
    let _ = fs::remove_file(&new);
    match linked {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// Whether `path` names the open `file`.
fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::symlink_metadata(path)) {
        (Ok(ours), Ok(found)) => (ours.dev(), ours.ino()) == (found.dev(), found.ino()),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn directory(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("state-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        path
    }

    fn refused(path: &Path) -> String {
        StateFile::open(path, None).unwrap_err().to_string()
    }

    #[test]
    fn a_file_is_made_locked_and_replaced() {
        let directory = directory("made");
        let path = directory.join("a.state");
        let (file, state) = StateFile::open(&path, None).unwrap();
        assert_eq!(state, SavedState::default());
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert!(refused(&path).ends_with("another process uses it"));
        let text = SavedState::text(&[], &["--object iothread,id=a".to_owned()]);
        // A link left by a killed process does not matter, and its target stays as it is.
        let elsewhere = directory.join("elsewhere");
        fs::write(&elsewhere, "kept").unwrap();
        std::os::unix::fs::symlink(&elsewhere, directory.join("a.state.new")).unwrap();
        assert!(!file.has(&text));
        file.replace(&text).unwrap();
        assert!(file.has(&text) && !file.has(""));
        assert_eq!(fs::read_to_string(&elsewhere).unwrap(), "kept");
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        assert!(refused(&path).ends_with("another process uses it"));
        let (_, handed) = file.hand_over().unwrap();
        drop(file);
        // The handed-over descriptor still holds the lock.
        assert!(refused(&path).ends_with("another process uses it"));
        let (_, state) = StateFile::take_over(path.clone(), handed).unwrap();
        assert_eq!(state.options.len(), 1);
        assert!(StateFile::open(&path, None).is_ok());
        let names = fs::read_dir(&directory).unwrap().count();
        assert_eq!(names, 2, "something was left behind");
        fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn other_files_are_not_overwritten() {
        let directory = directory("damaged");
        let path = directory.join("a.state");
        let whole = SavedState::text(&[], &["--object iothread,id=a".to_owned()]);
        let newer = whole.replace(r#""ringmill-state": 1"#, r#""ringmill-state": 2"#);
        for (text, why) in [
            ("", "JSON parse error"),
            (&whole[..whole.len() / 2], "JSON parse error"),
            (r#"{"some": "thing"}"#, "not a state file"),
            (&newer, "the format has version 2, and this program knows version 1"),
            (&whole.replace("iothread,id=a", "frob,id=a"), "'frob'"),
            (&whole.replace("--object iothread,id=a", "--pidfile /etc/passwd"), "not an option"),
            (&whole.replace("--object iothread,id=a", "--chardev stdio,id=a"), "no configuration"),
            (&whole.replace("--object iothread,id=a", "--help"), "not an option"),
        ] {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
            let error = refused(&path);
            assert!(error.contains(why) && error.contains("left as it is"), "{text}: {error}");
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        fs::write(&path, &whole).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o620)).unwrap();
        assert!(refused(&path).contains("others may write to it"));
        assert!(refused(&directory).contains("Is a directory"));
        assert!(refused(Path::new("/dev/null")).contains("not a regular file"));
        std::os::unix::fs::symlink("nowhere", directory.join("link")).unwrap();
        assert!(!refused(&directory.join("link")).is_empty());
        fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn a_file_that_another_has_put_there_is_left() {
        let directory = directory("other");
        let path = directory.join("a.state");
        let (file, _) = StateFile::open(&path, None).unwrap();
        fs::rename(directory.join("a.state"), directory.join("b.state")).unwrap();
        fs::write(&path, "mine").unwrap();
        assert!(file.replace("\n").unwrap_err().contains("another file is in its place"));
        assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
        fs::remove_file(&path).unwrap();
        // A removed file is made again from the running configuration.
        file.replace("text").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "text");
        fs::remove_dir_all(directory).unwrap();
    }
}
