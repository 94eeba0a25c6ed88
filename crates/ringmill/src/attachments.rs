//! The folder in which attached images are recorded, for `detach` and the next `attach`.
//!
//! | file | contents |
//! |---|---|
//! | `ID.json` | the image and its device |
//! | `ID.qmp` | the socket of the daemon's monitor |
//! | `ID.pid` | the daemon's pid file, which is locked while the daemon lives |
//! | `lock` | is locked while an `attach` chooses a number, until its device is there |

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use daemon::ublk::control::{self as ublk, Order};
use daemon::ublk::wire::{Command, owner};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::{Value as Json, json};

use crate::upgrade::running_daemon;
use daemon::DaemonError;

/// The folder. Only root has access to it.
const FOLDER: &str = "/run/ringmill-attach";
/// Most characters of an image's name within an id: the path of a socket has at most 107 bytes.
const MAX_NAME: usize = 32;
/// How long a process may not show yet that it was killed, milliseconds.
pub(crate) const KILLED_MS: u16 = 500;

/// An image that is attached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Attached {
    /// The name of its export, and of its files.
    pub(crate) id: String,
    /// The absolute path of the image, or its URL.
    pub(crate) image: String,
    /// The block device.
    pub(crate) device: PathBuf,
    /// The command line that attaches it, with the program's name.
    pub(crate) command: Vec<String>,
}

impl Attached {
    /// Returns one of its files.
    pub(crate) fn file(&self, extension: &str) -> PathBuf {
        file(&self.id, extension)
    }

    /// Returns the process that serves it; `None`: it has ended.
    pub(crate) fn daemon(&self) -> Option<i32> {
        running_daemon(&self.file("pid")).ok()
    }

    /// Returns whether its device is there.
    pub(crate) fn has_device(&self) -> bool {
        self.device.exists()
    }

    /// Records it.
    pub(crate) fn record(&self) -> Result<(), DaemonError> {
        let Attached { id: _, image, device, command } = self;
        let text = json!({"image": image, "device": device, "command": command}).to_string();
        let path = self.file("json");
        let written = || {
            let new = path.with_extension("new");
            fs::write(&new, text)?;
            fs::rename(&new, &path)
        };
        written().map_err(|error: io::Error| failed(&path, &error))
    }

    /// Removes what is left of it, once its daemon has ended.
    pub(crate) fn forget(&self) {
        for extension in ["json", "qmp", "pid"] {
            // The daemon has removed most of it.
            let _ = fs::remove_file(self.file(extension));
        }
    }

    /// Removes its device, which no daemon serves. Requests fail.
    pub(crate) fn remove_device(&self) -> Result<(), Errno> {
        let mut devices = ublk::devices().map_err(ublk::Failed::errno)?;
        devices.retain(|found| found.owner == owner(&self.id));
        for found in devices {
            let order = |command| Order { command, id: found.id, data: 0, memory: Vec::new() };
            for command in [Command::Stop, Command::DeleteLater] {
                ublk::carry_out(order(command)).map_err(ublk::Failed::errno)?;
            }
        }
        Ok(())
    }

    /// Clears away what a daemon has left that was killed, if its block device has gone, too. Returns whether it has.
    pub(crate) fn clear_if_ended(&self) -> bool {
        let has_ended = self.daemon().is_none() && !self.has_device();
        if has_ended {
            // The kernel leaves the device's own file, and its number.
            let _ = self.remove_device();
            self.forget();
        }
        has_ended
    }

    fn read(path: &Path) -> Option<Attached> {
        let id = path.file_stem()?.to_str()?.to_owned();
        let json: Json = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
        let words = json["command"].as_array()?.iter();
        Some(Attached {
            id,
            image: json["image"].as_str()?.to_owned(),
            device: json["device"].as_str()?.into(),
            command: words.map(|word| word.as_str().map(str::to_owned)).collect::<Option<_>>()?,
        })
    }
}

/// Returns a file of the attached image of this name.
pub(crate) fn file(id: &str, extension: &str) -> PathBuf {
    Path::new(FOLDER).join(format!("{id}.{extension}"))
}

/// Returns the name of an image's export: the same for each way to the same file. `manner` tells apart what may be there
/// at the same time.
pub(crate) fn id_of(image: &str, manner: &str) -> String {
    let name = Path::new(image).file_name().and_then(OsStr::to_str).unwrap_or_default();
    let is_allowed = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    let name: String = name.chars().filter(is_allowed).take(MAX_NAME).collect();
    // FNV-1a.
    let hash = manner
        .bytes()
        .chain([0])
        .chain(image.bytes())
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
    format!("attach-{name}-{hash:016x}")
}

/// Makes the folder, and waits for other commands that attach an image. They wait while the result lives.
pub(crate) fn lock() -> Result<Flock<File>, DaemonError> {
    let folder = Path::new(FOLDER);
    let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(|error| failed(folder, &error))?;
    let path = folder.join("lock");
    let file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path);
    let file = file.map_err(|error| failed(&path, &error))?;
    Flock::lock(file, FlockArg::LockExclusive)
        .map_err(|(_, errno)| failed(&path, &io::Error::from(errno)))
}

/// Returns all that is recorded, by device.
pub(crate) fn all() -> Result<Vec<Attached>, DaemonError> {
    let entries = match fs::read_dir(FOLDER) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(Path::new(FOLDER), &error)),
    };
    let paths = entries.flatten().map(|entry| entry.path());
    let records = paths.filter(|path| path.extension() == Some(OsStr::new("json")));
    let mut all: Vec<Attached> = records.filter_map(|path| Attached::read(&path)).collect();
    all.sort_by(|one, other| one.device.cmp(&other.device));
    Ok(all)
}

/// Waits for the end of a process. Returns whether it has ended.
pub(crate) fn has_ended_within(pid: i32, limit: PollTimeout) -> bool {
    let process = Pid::from_raw(pid).map(|pid| pidfd_open(pid, PidfdFlags::empty()));
    // There is none by now.
    let Some(Ok(process)) = process else { return true };
    let mut poll_fd = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
    poll(&mut poll_fd, limit).is_ok_and(|ready| ready > 0)
}

fn failed(path: &Path, error: &io::Error) -> DaemonError {
    let error = DaemonError::new(format!("{}: {error}", path.display()));
    error.with_hint("Attached images belong to root.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_identifiers_and_tell_images_apart() {
        let long = format!("/srv/{}", "ü x,".repeat(100));
        let images = ["/srv/a.qcow2", "/srv/b/a.qcow2", "https://host/a.qcow2", "/", &long];
        let mut ids: Vec<_> = images.iter().map(|image| id_of(image, "")).collect();
        ids.push(id_of("/srv/a.qcow2", "read-only"));
        assert!(ids[0].starts_with("attach-a.qcow2-"), "{ids:?}");
        for id in &ids {
            assert!(control::is_identifier(id), "{id}");
            assert!(file(id, "qmp").as_os_str().len() <= 107, "{id}");
        }
        let count = ids.len();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), count);
    }
}
