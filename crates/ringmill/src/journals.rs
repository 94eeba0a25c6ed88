//! Where the daemon keeps, of qcow2 images, what it has answered and not written yet: for the next one, should it
//! be killed.
//!
//! That has to be in memory, so that nobody waits for a disk, and outlast the process: the folder that a service
//! manager has made for the service, or else one of the user's own where POSIX shared memory lies, shm_overview(7).

use std::path::PathBuf;

use block::NodeRegistry;
use nix::unistd::Uid;

/// The folder, for a daemon of that user.
pub(crate) fn folder(user: Uid) -> PathBuf {
    // systemd.exec(5): several are separated by colons.
    let given = std::env::var_os("RUNTIME_DIRECTORY");
    let first = given.as_ref().and_then(|given| std::env::split_paths(given).next());
    match first {
        Some(given) if given.is_absolute() => given.join("journals"),
        _ => format!("/dev/shm/ringmill-{user}").into(),
    }
}

/// A registry of nodes that keeps its journals there, if it can.
pub(crate) fn registry() -> NodeRegistry {
    let folder = folder(Uid::effective());
    NodeRegistry::new().with_journals(&folder).unwrap_or_else(|error| {
        let folder = folder.display();
        log::info!("{folder}: no folder for journals of qcow2 images: {error}. Their writes to new clusters wait for the disk");
        NodeRegistry::new()
    })
}
