//! `--check`: opens what a command line names, for reading only, beside a daemon that may run.

use std::path::Path;

use block::options::{BlockdevOptions, BlockdevRef};
use control::{Action, NbdAddr, Step};
use event_loop::{EventLoop, LoopConfig};
use exports::ublk::UblkError;
use exports::vduse::VduseError;
use nix::unistd::{AccessFlags, access};

use super::state::check_path;
use super::{Daemon, DaemonError, Environment, raise_limit};

/// Drivers that write to a node below them, and therefore cannot be opened for reading.
const WRITERS: [&str; 2] = ["copy-before-write", "preallocate"];

/// Carries out steps as far as that changes nothing. Returns all errors.
///
/// Objects are made. Nodes are opened for reading, with `force-share`: another process may use their images. Sockets and
/// mount points are looked at. `with_state`: there is a state file, with which paths are absolute. The steps fit together: what one refers to, an earlier one defines.
///
/// # Errors
///
/// There can be no event loop.
pub fn check(
    steps: Vec<Step>,
    with_state: bool,
    environment: Environment,
) -> Result<Vec<DaemonError>, DaemonError> {
    raise_limit();
    let config = LoopConfig { name: "control".into(), ..LoopConfig::default() };
    let control = EventLoop::new(config).map_err(DaemonError::new)?;
    let mut daemon = Daemon::new(&control, environment);
    let checked = async move {
        let (mut errors, mut unopened) = (Vec::new(), Vec::new());
        for step in &steps {
            if with_state && let Err(error) = check_path(&step.action) {
                errors.push(error.of(&step.shown()));
            }
            let looked = match &step.action {
                Action::Object(_) => daemon.add(step).await,
                Action::Blockdev(options) if lacks(options, &unopened) => {
                    unopened.extend(options.node_name.clone());
                    continue;
                }
                Action::Blockdev(options) => {
                    let step = Step::of_node(for_reading(options.clone()));
                    let opened = daemon.add(&step).await;
                    // An error is reported once, and not for each node above it.
                    unopened.extend(options.node_name.clone().filter(|_| opened.is_err()));
                    opened
                }
                Action::Export(options) => {
                    let needs = options.kind.needs();
                    let socket = needs.socket.map_or(Ok(()), folder_of);
                    let mountpoint = || needs.mountpoint.map_or(Ok(()), exists);
                    let vduse = || if needs.vduse { check_vduse() } else { Ok(()) };
                    socket.and_then(|()| mountpoint()).and_then(|()| vduse()).and_then(|()| {
                        match needs.ublk {
                            Some(_) => check_ublk(),
                            None => Ok(()),
                        }
                    })
                }
                Action::NbdServer(options) => match &options.addr {
                    NbdAddr::Unix { path } => folder_of(path),
                    _ => Ok(()),
                },
                Action::Chardev(_) | Action::Monitor(_) | Action::Metrics(_) => Ok(()),
            };
            errors.extend(looked.err().map(|error| error.of(&step.shown())));
        }
        daemon.take_down(None, std::rc::Rc::default()).await;
        errors
    };
    let checked = control.block_on(checked);
    // Threads of I/O have ended with the daemon. There is nothing to write.
    let _ = control.shut_down();
    checked.map_err(|error| super::control_failed(&error))
}

/// Whether a node cannot be opened for a look: because of its driver, or because a node below was not opened.
fn lacks(options: &BlockdevOptions, unopened: &[String]) -> bool {
    WRITERS.contains(&options.driver.kind().name)
        || options.driver.children().iter().any(|child| match child.node {
            BlockdevRef::Name(name) => unopened.contains(name),
            BlockdevRef::Inline(below) => lacks(below, unopened),
        })
}

/// The options that open the same image for reading, whoever else uses the image.
fn for_reading(mut options: BlockdevOptions) -> BlockdevOptions {
    let children: Vec<_> = options
        .driver
        .children()
        .into_iter()
        .filter_map(|child| match child.node {
            BlockdevRef::Inline(below) => Some((child.role, (**below).clone())),
            BlockdevRef::Name(_) => None,
        })
        .collect();
    for (role, below) in children {
        options.driver.set_child(role, BlockdevRef::Inline(Box::new(for_reading(below))));
    }
    BlockdevOptions { read_only: true, stays_read_only: true, force_share: true, ..options }
}

/// Whether a socket can be made in its folder.
fn folder_of(socket: &Path) -> Result<(), DaemonError> {
    let folder = socket.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    let may = access(folder, AccessFlags::W_OK | AccessFlags::X_OK);
    may.map_err(|errno| {
        let (socket, folder) = (socket.display(), folder.display());
        DaemonError::new(format!("no socket '{socket}' can be made in {folder}: {}", errno.desc()))
    })
}

/// Whether this process can make ublk devices.
///
/// # Errors
///
/// The kernel has no ublk, or this process may not use it.
pub fn check_ublk() -> Result<(), DaemonError> {
    Ok(UblkError::check_host()?)
}

/// Whether this process can make VDUSE devices.
///
/// # Errors
///
/// The kernel has no VDUSE, or this process may not use it.
pub fn check_vduse() -> Result<(), DaemonError> {
    Ok(VduseError::check_host()?)
}

fn exists(mountpoint: &Path) -> Result<(), DaemonError> {
    access(mountpoint, AccessFlags::F_OK).map_err(|errno| {
        DaemonError::new(format!("mount point '{}': {}", mountpoint.display(), errno.desc()))
    })
}
