//! The folder for journals of qcow2 images. A journal has changes that are answered and not yet written, for
//! the next process after a kill.
//!
//! The folder is in memory, so that no request waits for a disk, and outlives the process. It is the runtime
//! folder of the service, or a private folder where POSIX shared memory lies, shm_overview(7).

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use block::{NodeRegistry, private_folder};
use nix::unistd::Uid;
use sandbox::Identity;

/// Where POSIX shared memory lies.
const SHARED: &str = "/dev/shm";
/// The folder's name in the runtime folder of a service.
const FOLDER: &str = "journals";

/// The folder and its owner.
pub(crate) struct Home {
    pub(crate) folder: PathBuf,
    user: Uid,
    /// Other daemons' folders. `None`: all of this host.
    besides: Option<Vec<PathBuf>>,
}

/// Returns the folder of journals of a daemon, and the daemon's user.
///
/// The daemon is one that runs as this process' user, with the same environment.
pub fn journal_folder() -> (PathBuf, u32) {
    let home = Home::of(None);
    (home.folder, home.user.as_raw())
}

/// Returns the folders in which daemons of this host may have journals: those of users, of services of the system, and of
/// users' services.
///
/// Such as `/dev/shm/ringmill-0`, or `/dev/shm/ringmill-0-PID` if another user has taken that name, `/run/ringmill/a/journals`
/// and `/run/user/1000/ringmill/journals`. Folders that this process may not look into are left out, but not what is known to
/// be in them.
pub fn journal_folders() -> Vec<PathBuf> {
    let below = |folder: &Path| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        folders.map(|entry| entry.path()).collect::<Vec<_>>()
    };
    let is_users = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        let user = name.and_then(|name| name.strip_prefix("ringmill-"));
        user.is_some_and(|user| user.split('-').all(|number| number.parse::<u32>().is_ok()))
    };
    let services = below(Path::new("/run"));
    let instances: Vec<_> = services.iter().flat_map(|service| below(service)).collect();
    let users = below(Path::new("/run/user"));
    let of_users = users.iter().flat_map(|user| below(user));
    let of_services = services.iter().chain(&instances).cloned().chain(of_users);
    let of_services = of_services.map(|service| service.join(FOLDER)).filter(|path| path.is_dir());
    let mut folders: Vec<_> = below(Path::new(SHARED)).into_iter().filter(is_users).collect();
    folders.extend(of_services);
    folders.push(Home::of(None).folder);
    folders.sort();
    folders.dedup();
    folders
}

impl Home {
    /// The folder of a daemon that changes to `identity` before it serves, or keeps its user.
    pub(crate) fn of(identity: Option<&Identity>) -> Home {
        let user = identity.map_or_else(Uid::effective, |identity| Uid::from_raw(identity.uid));
        // systemd.exec(5): colons separate several folders.
        let given = std::env::var_os("RUNTIME_DIRECTORY");
        let first = given.as_ref().and_then(|given| std::env::split_paths(given).next());
        let folder = match first {
            Some(given) if given.is_absolute() => given.join(FOLDER),
            _ => private_folder(Path::new(SHARED), &format!("ringmill-{user}"), user.as_raw()),
        };
        Home { folder, user, besides: None }
    }

    /// This folder, beside those of other daemons, for a daemon as in [`of`](Self::of).
    pub(crate) fn at(folder: PathBuf, besides: Vec<PathBuf>, identity: Option<&Identity>) -> Home {
        Home { folder, besides: Some(besides), ..Home::of(identity) }
    }

    /// A registry of nodes with journals in this folder, if possible.
    pub(crate) fn registry(&self) -> NodeRegistry {
        let made = NodeRegistry::new().with_journals_of(&self.folder, self.user.as_raw());
        // The sandbox may forbid to look for folders later.
        let known = self.besides.clone().unwrap_or_else(journal_folders);
        let looks = self.besides.is_none();
        let made = made.map(|registry| {
            registry.with_journals_besides(move || {
                let now = if looks { journal_folders() } else { Vec::new() };
                let mut all: Vec<_> = known.iter().cloned().chain(now).collect();
                all.sort();
                all.dedup();
                all
            })
        });
        made.unwrap_or_else(|error| {
            let folder = self.folder.display();
            let what =
                "no journals of qcow2 images, whose writes to new clusters wait for the disk";
            match error.kind() {
                ErrorKind::AlreadyExists => log::warn!("{folder}: {what}: {error}"),
                _ => log::info!("{folder}: {what}: {error}"),
            }
            NodeRegistry::new()
        })
    }
}
