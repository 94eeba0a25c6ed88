//! The sandbox of commands on images, whose headers strangers may have written.

use std::path::{Path, PathBuf};

use control::ImgCommon;
use daemon::DaemonError;
use nix::sys::resource::{Resource, setrlimit};
use sandbox::{Beneath, Capabilities, Config, Mode, Purpose, Reach, Sandbox};

/// Address space of a process that reads metadata, bytes. That of a hostile image needs less than 128 MiB.
const MEMORY: (Resource, u64) = (Resource::RLIMIT_AS, 1 << 30);
/// CPU time of a process that reads headers, seconds.
const TIME: (Resource, u64) = (Resource::RLIMIT_CPU, 20);

/// The files that a command reaches.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Files<'a> {
    /// Reads this image alone.
    Read(&'a str),
    /// Reads this file alone.
    Check(&'a Path),
    /// Reads and writes this file alone.
    Repair(&'a Path),
    /// Reads these images, and the files that their headers name.
    Follow(&'a [&'a str]),
    /// The same, and makes a new image.
    Copy {
        /// The images that are read.
        from: &'a [&'a str],
        /// The new one.
        to: &'a str,
    },
    /// Reads and writes these images, and the files that their headers name.
    Change(&'a [&'a str]),
    /// Options of nodes name the images: there may be files and servers in any place.
    Any,
}

/// Confines the process to the files of a command. It has no network, unless an image is there.
pub(crate) fn confine(common: &ImgCommon, files: Files<'_>) -> Result<(), DaemonError> {
    let files = if common.image_opts { Files::Any } else { files };
    let is_local = files.are_local();
    let reach = Reach {
        files: files.beneath().filter(|_| is_local),
        connect: is_local.then(Vec::new),
        abstract_sockets: !is_local,
        vsock: !is_local,
    };
    let config = Config {
        mode: Mode::On,
        identity: None,
        keep: Capabilities::DAC_OVERRIDE,
        library: Some(reach.clone()).filter(|_| !is_local),
        reach,
    };
    let sandbox = Sandbox::begin(config).map_err(DaemonError::new)?;
    sandbox.serve(false).map_err(DaemonError::new)?;
    match files {
        Files::Read(_) => bound(&[MEMORY, TIME]),
        // The time for a list of a disk's parts depends on the disk.
        Files::Follow(_) if is_local => bound(&[MEMORY]),
        Files::Follow(_)
        | Files::Check(_)
        | Files::Repair(_)
        | Files::Copy { .. }
        | Files::Change(_)
        | Files::Any => {}
    }
    Ok(())
}

impl Files<'_> {
    /// Whether no image is on a server.
    fn are_local(&self) -> bool {
        let are_paths = |names: &[&str]| names.iter().all(|name| path_of(name).is_some());
        match *self {
            Files::Read(name) => are_paths(&[name]),
            Files::Check(_) | Files::Repair(_) => true,
            Files::Follow(names) | Files::Change(names) => are_paths(names),
            Files::Copy { from, to } => are_paths(from) && are_paths(&[to]),
            Files::Any => false,
        }
    }

    /// The paths. `None`: any.
    fn beneath(&self) -> Option<Vec<Beneath>> {
        let read = |path: &Path| Beneath { path: path.to_owned(), purpose: Purpose::Read };
        let written = |path: &Path| Beneath { path: path.to_owned(), purpose: Purpose::Use };
        let (proc, whole) = (read("/proc".as_ref()), read("/".as_ref()));
        let [one, other] = match *self {
            Files::Read(name) => [proc, read(&path_of(name)?)],
            Files::Check(path) => [proc, read(path)],
            Files::Repair(path) => [proc, written(path)],
            Files::Follow(_) => [proc, whole],
            Files::Copy { to, .. } => [whole, written(&place_of(&path_of(to)?)?)],
            Files::Change(_) | Files::Any => return None,
        };
        // A process that reads the journal of a killed daemon locks it.
        let (journals, _) = daemon::journal_folder();
        Some(vec![one, other, written(&journals)])
    }
}

/// Bounds what the process takes, whatever an image says.
fn bound(limits: &[(Resource, u64)]) {
    for (resource, limit) in limits {
        // A smaller limit stays.
        let _ = setrlimit(*resource, *limit, *limit);
    }
}

/// The file that a name stands for. `None`: it is a URL or options.
fn path_of(name: &str) -> Option<PathBuf> {
    match name.split_once(':').filter(|(before, _)| !before.contains('/')) {
        None => Some(Path::new(name).to_owned()),
        Some(("file" | "host_device", path)) => Some(path.into()),
        Some(_) => None,
    }
}

/// Whether options of a new image name other files, or servers: its backing file or its data file.
pub(super) fn names_more(options: &[String]) -> bool {
    options.iter().any(|text| text.contains("_file"))
}

/// Where a new image is written: its file, or the folder that gets the file. `None`: a symbolic link leads to a file that is not
/// there yet.
fn place_of(path: &Path) -> Option<PathBuf> {
    if path.exists() {
        return Some(path.to_owned());
    }
    if path.is_symlink() {
        return None;
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    Some(folder.unwrap_or(Path::new(".")).to_owned())
}
