//! The sandbox of commands that look at images of strangers.

use std::path::{Path, PathBuf};

use daemon::DaemonError;
use nix::sys::resource::{Resource, setrlimit};
use sandbox::{Beneath, Capabilities, Config, Mode, Purpose, Reach, Sandbox};

/// Address space of a process that reads headers, bytes. Lists of a hostile image need less than 64 MiB.
const ADDRESS_SPACE: u64 = 1 << 30;
/// CPU time of such a process, seconds.
const CPU_TIME: u64 = 20;

/// What a command that reads images reaches.
pub(super) struct Reads<'a> {
    /// Images, as the user has named them.
    pub(super) images: &'a [&'a str],
    /// Files that headers name, too.
    pub(super) follows: bool,
}

/// Confines the process to the images that it reads: no other file, and no network unless an image is there.
pub(super) fn confine(reads: &Reads<'_>) -> Result<(), DaemonError> {
    let mut files = vec![Beneath { path: "/proc".into(), purpose: Purpose::Read }];
    let (journals, _) = daemon::journal_folder();
    files.push(Beneath { path: journals, purpose: Purpose::Read });
    let paths: Option<Vec<PathBuf>> = reads.images.iter().map(|name| path_of(name)).collect();
    let is_local = paths.is_some();
    files.extend(paths.into_iter().flatten().map(|path| Beneath { path, purpose: Purpose::Read }));
    let reach = Reach {
        files: (is_local && !reads.follows).then_some(files),
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
    Ok(())
}

/// Bounds the memory and the CPU time of the process, whatever an image says.
pub(super) fn bound() {
    for (resource, limit) in
        [(Resource::RLIMIT_AS, ADDRESS_SPACE), (Resource::RLIMIT_CPU, CPU_TIME)]
    {
        // A smaller limit stays.
        let _ = setrlimit(resource, limit, limit);
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
