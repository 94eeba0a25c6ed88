//! Waits until udev has handled a block device: then its links, its owner and its mode are there.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::fs::inotify;

/// udev's daemon listens here.
const DAEMON: &str = "/run/udev/control";
/// What udev knows of devices, a file each.
const KNOWN: &str = "/run/udev/data";
/// How long udev may take. A device that udev does not handle can be used as well.
const PATIENCE: Duration = Duration::from_secs(10);

/// Returns the partitions of a disk, as names of devices.
pub(crate) fn partitions(device: &Path) -> Vec<PathBuf> {
    let Some(name) = device.file_name() else { return Vec::new() };
    let entries = fs::read_dir(Path::new("/sys/block").join(name)).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name());
    let prefix = [name.as_encoded_bytes(), b"p"].concat();
    let is_partition = |of: &std::ffi::OsString| of.as_encoded_bytes().starts_with(&prefix);
    let mut found: Vec<_> = names.filter(is_partition).collect();
    // By number.
    found.sort_by_key(|name| (name.len(), name.clone()));
    found.into_iter().map(|name| Path::new("/dev").join(name)).collect()
}

/// Waits for udev, if its daemon runs, to have handled a disk and its partitions.
pub(crate) fn wait_for(device: &Path) {
    if Path::new(DAEMON).exists() {
        // A device that udev does not handle can be used as well.
        let _ = wait(device, Instant::now() + PATIENCE);
    }
}

fn wait(device: &Path, deadline: Instant) -> io::Result<()> {
    let events = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
    let made = inotify::WatchFlags::CREATE | inotify::WatchFlags::MOVED_TO;
    inotify::add_watch(&events, KNOWN, made)?;
    loop {
        let all = partitions(device).into_iter().chain([device.to_owned()]);
        if all.filter_map(|device| number(&device)).all(|number| is_known(&number)) {
            return Ok(());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        let mut poll_fd = [PollFd::new(events.as_fd(), PollFlags::POLLIN)];
        if poll(&mut poll_fd, left)? == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut names = [0; 4096];
        while rustix::io::read(&events, &mut names).is_ok_and(|len| len > 0) {}
    }
}

/// The numbers of a block device, `MAJOR:MINOR`.
pub(crate) fn number(device: &Path) -> Option<String> {
    let name = device.file_name()?;
    let text = fs::read_to_string(Path::new("/sys/class/block").join(name).join("dev")).ok()?;
    Some(text.trim().to_owned())
}

fn is_known(number: &str) -> bool {
    Path::new(KNOWN).join(format!("b{number}")).exists()
}
