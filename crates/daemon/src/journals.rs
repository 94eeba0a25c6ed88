//! The folder for journals of qcow2 images. A journal has changes that are answered and not yet written, for
//! the next process after a kill.
//!
//! The folder is in memory, so that no request waits for a disk, and outlives the process. It is the runtime
//! folder of the service, or a private folder where POSIX shared memory lies, shm_overview(7).

use std::io::ErrorKind;
use std::path::PathBuf;

use block::NodeRegistry;
use nix::unistd::Uid;
use sandbox::Identity;

/// The folder and its owner.
pub(crate) struct Home {
    pub(crate) folder: PathBuf,
    user: Uid,
}

/// Returns the folder of journals of a daemon, and the daemon's user.
///
/// The daemon is one that runs as this process' user, with the same environment.
pub fn journal_folder() -> (PathBuf, u32) {
    let home = Home::of(None);
    (home.folder, home.user.as_raw())
}

impl Home {
    /// The folder of a daemon that changes to `identity` before it serves, or keeps its user.
    pub(crate) fn of(identity: Option<&Identity>) -> Home {
        let user = identity.map_or_else(Uid::effective, |identity| Uid::from_raw(identity.uid));
        // systemd.exec(5): colons separate several folders.
        let given = std::env::var_os("RUNTIME_DIRECTORY");
        let first = given.as_ref().and_then(|given| std::env::split_paths(given).next());
        let folder = match first {
            Some(given) if given.is_absolute() => given.join("journals"),
            _ => format!("/dev/shm/ringmill-{user}").into(),
        };
        Home { folder, user }
    }

    /// This folder, for a daemon as in [`of`](Self::of).
    pub(crate) fn at(folder: PathBuf, identity: Option<&Identity>) -> Home {
        Home { folder, ..Home::of(identity) }
    }

    /// A registry of nodes with journals in this folder, if possible.
    pub(crate) fn registry(&self) -> NodeRegistry {
        let made = NodeRegistry::new().with_journals_of(&self.folder, self.user.as_raw());
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
