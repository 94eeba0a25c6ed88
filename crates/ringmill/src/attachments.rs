//! The folder in which attached images are recorded, for `detach` and the next `attach`.
//!
//! | file | contents |
//! |---|---|
//! | `ID.json` | the record: the image and its device. It is there before the device |
//! | `ID.qmp` | the socket of the daemon's monitor |
//! | `ID.nbd` | the socket of its NBD server, of which the kernel is a client |
//! | `ID.pid` | the daemon's pid file, which is locked while the daemon lives |
//! | `ID.kept/state` | the [state](kept) of the daemon: the nodes as the monitor's commands have left them |
//! | `lock` | [locks](lock): of the choice of a number, and of each record while a command attaches or detaches it |

pub(crate) mod identity;
pub(crate) mod kept;
pub(crate) mod lock;

use std::ffi::OsStr;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use identity::{Identity, Image};
use kept::Kept;
use lock::{Lock, Wait};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::{Value as Json, json};

use crate::host_device::HostDevice;
use crate::upgrade::running_daemon;
use daemon::DaemonError;

/// The folder. Only root has access to it.
const FOLDER: &str = "/run/ringmill-attach";
/// Most characters of an image's name within an id: the path of a socket has at most 107 bytes.
const MAX_NAME: usize = 32;
/// How long a process may not show yet that it was killed, milliseconds.
pub(crate) const KILLED_MS: u16 = 500;

/// What happens to writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// They go to the image.
    Write,
    /// There are none.
    ReadOnly,
    /// They go to a temporary file.
    Snapshot,
}

impl Mode {
    const ALL: [Mode; 3] = [Mode::Write, Mode::ReadOnly, Mode::Snapshot];

    /// Returns the word for it in records and messages.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Mode::Write => "writable",
            Mode::ReadOnly => "read-only",
            Mode::Snapshot => "snapshot",
        }
    }
}

/// An image that is attached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Attached {
    /// The name of its export, and of its files.
    pub(crate) id: String,
    pub(crate) image: Image,
    pub(crate) mode: Mode,
    /// The block device.
    pub(crate) device: PathBuf,
    /// The command line that attaches it, with the program's name.
    pub(crate) command: Vec<String>,
    /// The state of its daemon; `None`: the daemon keeps none, or has none yet.
    pub(crate) kept: Option<Kept>,
}

impl Attached {
    /// Returns the image that its disk has now, and the image that it was made of.
    pub(crate) fn images(&self) -> impl Iterator<Item = &Image> {
        let now = self.moved().and_then(|moved| moved.image.as_ref());
        now.into_iter().chain([&self.image])
    }

    /// Returns the state, if commands of the monitor have changed the configuration.
    pub(crate) fn moved(&self) -> Option<&Kept> {
        self.kept.as_ref().filter(|kept| kept.is_changed)
    }

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
        self.host_device().is_some_and(HostDevice::is_there)
    }

    /// Returns the kind and the number of its device.
    pub(crate) fn host_device(&self) -> Option<HostDevice> {
        HostDevice::of(&self.device)
    }

    /// Locks its record; `None`: another command attaches or detaches it.
    pub(crate) fn lock(&self, wait: Wait) -> Result<Option<Lock>, DaemonError> {
        Lock::of_record(&self.id, wait)
    }

    /// Records it.
    pub(crate) fn record(&self) -> Result<(), DaemonError> {
        let Attached {
            id: _,
            image: Image { name, identity, base },
            mode,
            device,
            command,
            kept: _,
        } = self;
        let text = json!({
            "image": name,
            "identity": identity.as_ref().map(Identity::to_json),
            "base": base,
            "mode": mode.word(),
            "device": device,
            "command": command,
        });
        let path = self.file("json");
        let written = || {
            let new = path.with_extension("new");
            fs::write(&new, text.to_string())?;
            fs::rename(&new, &path)
        };
        written().map_err(|error: io::Error| failed(&path, &error))
    }

    /// Returns whether it is recorded: another command may have detached it.
    pub(crate) fn is_recorded(&self) -> bool {
        self.file("json").exists()
    }

    /// Removes what is left of it, once its daemon has ended.
    pub(crate) fn forget(&self) {
        kept::forget(&self.file("kept"));
        for extension in ["qmp", "nbd", "pid", "new", "json"] {
            // The daemon has removed most of it.
            let _ = fs::remove_file(self.file(extension));
        }
    }

    /// Removes its device, which no daemon serves. Requests fail.
    pub(crate) fn remove_device(&self) -> Result<(), Errno> {
        self.host_device().map_or(Ok(()), |device| device.remove(&self.id))
    }

    /// Clears away what a daemon has left that was killed, if its block device has gone, too. Returns whether it has. What
    /// another command attaches or detaches stays.
    pub(crate) fn clear_if_ended(&self) -> bool {
        let lock = self.lock(Wait::No);
        lock.is_ok_and(|lock| lock.is_some_and(|lock| self.clear_under(&lock)))
    }

    /// The same under the record's lock.
    pub(crate) fn clear_under(&self, _lock: &Lock) -> bool {
        let has_ended = self.daemon().is_none() && !self.has_own_device();
        if has_ended {
            // The kernel leaves the device's own file, and its number.
            let _ = self.remove_device();
            self.forget();
        }
        has_ended
    }

    /// Returns whether its device is there, and not another one of that number.
    fn has_own_device(&self) -> bool {
        self.host_device().is_some_and(|device| device.is_of(&self.id))
    }

    fn read(path: &Path) -> Option<Attached> {
        let id = path.file_stem()?.to_str()?.to_owned();
        let json: Json = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
        let words = json["command"].as_array()?.iter();
        let mode = json["mode"].as_str()?;
        let kept = Kept::read(&file(&id, "kept"), &id);
        Some(Attached {
            id,
            kept,
            image: Image {
                name: json["image"].as_str()?.to_owned(),
                identity: Identity::from_json(&json["identity"]),
                base: json["base"].as_str().map(str::to_owned),
            },
            mode: Mode::ALL.into_iter().find(|known| known.word() == mode)?,
            device: json["device"].as_str()?.into(),
            command: words.map(|word| word.as_str().map(str::to_owned)).collect::<Option<_>>()?,
        })
    }
}

/// Returns a file of the attached image of this name.
pub(crate) fn file(id: &str, extension: &str) -> PathBuf {
    Path::new(FOLDER).join(format!("{id}.{extension}"))
}

/// Returns a name for the export of an image, and for the files of its record. `manner` tells apart the exports of one image.
pub(crate) fn id_of(image: &str, manner: &str) -> String {
    let name = Path::new(image).file_name().and_then(OsStr::to_str).unwrap_or_default();
    let is_allowed = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    let name: String = name.chars().filter(is_allowed).take(MAX_NAME).collect();
    format!("attach-{name}-{:016x}", hash(&format!("{manner}\0{image}")))
}

/// FNV-1a.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
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
