//! Where the daemon keeps, of qcow2 images, what it has answered and not written yet: for the next one, should it
//! be killed.
//!
//! That has to be in memory, so that nobody waits for a disk, and outlast the process: the folder that a service
//! manager has made for the service, or else one of the user's own where POSIX shared memory lies, shm_overview(7).

use std::path::PathBuf;

use block::NodeRegistry;
use nix::unistd::Uid;
use sandbox::Identity;

/// The folder, and the user whose it is.
pub(crate) struct Home {
    pub(crate) folder: PathBuf,
    user: Uid,
}

impl Home {
    /// That of a daemon that becomes somebody before it serves; `None`: it stays who it is.
    pub(crate) fn of(identity: Option<&Identity>) -> Home {
        let user = identity.map_or_else(Uid::effective, |identity| Uid::from_raw(identity.uid));
        // systemd.exec(5): several are separated by colons.
        let given = std::env::var_os("RUNTIME_DIRECTORY");
        let first = given.as_ref().and_then(|given| std::env::split_paths(given).next());
        let folder = match first {
            Some(given) if given.is_absolute() => given.join("journals"),
            _ => format!("/dev/shm/ringmill-{user}").into(),
        };
        Home { folder, user }
    }

    /// A registry of nodes that keeps its journals there, if it can.
    pub(crate) fn registry(&self) -> NodeRegistry {
        let made = NodeRegistry::new().with_journals_of(&self.folder, self.user.as_raw());
        made.unwrap_or_else(|error| {
            let folder = self.folder.display();
            log::info!("{folder}: no folder for journals of qcow2 images: {error}. Their writes to new clusters wait for the disk");
            NodeRegistry::new()
        })
    }
}
