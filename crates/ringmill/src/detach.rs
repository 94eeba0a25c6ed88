//! `ringmill detach DEVICE|IMAGE`: removes the block device of an attached image, and waits until the image is closed.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;

use control::{CtlSocket, DetachOptions, SERVED_NODE};
use daemon::DaemonError;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde_json::{Map, Value as Json, json};

use crate::attachments::{self, Attached, KILLED_MS, has_ended_within};
use crate::ctl::client::{Client, ClientError};
use crate::daemonize::{self, Role};
use crate::udev;

/// Time between two attempts with a device that is open, but not mounted: nothing reports its closing.
const AGAIN_MS: u16 = 1000;

/// What an attempt has come to.
enum Outcome {
    /// The device is gone, and the image closed.
    Detached,
    /// The device is in use.
    InUse,
}

/// Detaches a device.
pub(crate) fn run(options: &DetachOptions) -> Result<ExitCode, DaemonError> {
    let mut child = None;
    if options.lazy {
        match daemonize::split() {
            Ok(Role::Parent { code, said }) => {
                print!("{said}");
                return Ok(ExitCode::from(code));
            }
            Ok(Role::Child(daemon)) => child = Some(daemon),
            Err(error) => {
                return Err(DaemonError::new(format!("cannot go to the background: {error}")));
            }
        }
    }
    let attached = find(&options.what)?;
    let device = attached.device.display();
    let failed = |error: io::Error| DaemonError::new(format!("{device}: {error}"));
    // Opened before the first attempt, so that no change is missed.
    let mounts = File::open("/proc/self/mountinfo").map_err(failed)?;
    loop {
        match attempt(&attached, options.force)? {
            Outcome::Detached => break,
            Outcome::InUse if options.lazy => {
                if let Some(daemon) = child.take() {
                    let users = users(&attached.device);
                    println!("{device} is {users}, and is detached when it is not in use");
                    daemon.detach().and_then(daemonize::Detached::ready).map_err(failed)?;
                }
                let mut poll_fd = [PollFd::new(mounts.as_fd(), PollFlags::POLLPRI)];
                poll(&mut poll_fd, PollTimeout::from(AGAIN_MS))
                    .map_err(|errno| failed(errno.into()))?;
            }
            Outcome::InUse => {
                let error = DaemonError::new(format!("{device} is {}", users(&attached.device)));
                return Err(error.with_hint(
                    "Unmount it, or detach it as soon as it is not in use: ringmill detach --lazy",
                ));
            }
        }
    }
    if let Some(daemon) = child {
        daemon.detach().and_then(daemonize::Detached::ready).map_err(failed)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Finds what is attached by its device or its image.
fn find(what: &Path) -> Result<Attached, DaemonError> {
    let real = fs::canonicalize(what).unwrap_or_else(|_| what.to_owned());
    let name = real.display().to_string();
    let mut all = attachments::all()?;
    all.retain(|attached| attached.device == real || attached.image == name);
    let shown = what.display();
    let one = match &*all {
        [one] => one.clone(),
        [] => {
            let error = DaemonError::new(format!("{shown}: not attached by 'ringmill attach'"));
            return Err(error.with_hint(
                "The exports of a storage-daemon are removed by its monitor: block-export-del",
            ));
        }
        several => {
            let devices: Vec<_> =
                several.iter().map(|attached| attached.device.display().to_string()).collect();
            let error = DaemonError::new(format!("{shown} is attached several times"));
            return Err(error.with_hint(&format!("Name the device: {}", devices.join(", "))));
        }
    };
    if one.clear_if_ended() {
        return Err(DaemonError::new(format!("{shown}: not attached any more")));
    }
    Ok(one)
}

/// Tries to detach a device.
fn attempt(attached: &Attached, force: bool) -> Result<Outcome, DaemonError> {
    let left = || remove_left(attached, force).map(|()| Outcome::Detached);
    let Some(pid) = attached.daemon() else { return left() };
    let (device, image) = (attached.device.display(), &attached.image);
    let closed = match end(attached, force) {
        Ok(Some(closed)) => closed,
        Ok(None) => return Ok(Outcome::InUse),
        // It was killed at this moment.
        Err(ClientError::Socket(_) | ClientError::Connect(..))
            if has_ended_within(pid, KILLED_MS.into()) =>
        {
            return left();
        }
        Err(error) => return Err(DaemonError::new(format!("{device}: {error}"))),
    };
    has_ended_within(pid, PollTimeout::NONE);
    attached.forget();
    match closed {
        Ok(()) => Ok(Outcome::Detached),
        Err(error) => Err(DaemonError::new(format!(
            "{device} is detached, and closing {image} failed: {error}"
        ))),
    }
}

/// Has the daemon remove the device, close the image, and end. Returns whether the image was closed as it should;
/// `None`: the device is in use.
fn end(attached: &Attached, force: bool) -> Result<Option<Result<(), ClientError>>, ClientError> {
    let mut client = Client::connect(&CtlSocket::Unix(attached.file("qmp")))?;
    let mode = if force { "hard" } else { "safe" };
    let of_export = members(&[("id", &attached.id), ("mode", mode)]);
    match client.execute("block-export-del", of_export) {
        // An earlier attempt was interrupted after this.
        Err(ClientError::Refused(why)) if why.contains("is not found") => {}
        Err(ClientError::Refused(why)) if why.contains("already shutting down") => {}
        Err(ClientError::Refused(why)) if why.contains("still in use") => return Ok(None),
        deleted => drop(deleted?),
    }
    // The answer to the command comes earlier than the end of an export that takes its time.
    while client
        .execute("query-block-exports", Map::new())?
        .as_array()
        .is_some_and(|all| all.iter().any(|export| export["id"] == *attached.id))
    {
        let is_deleted = |event: &Json| event["event"] == "BLOCK_EXPORT_DELETED";
        while client.next_event()?.is_some_and(|event| !is_deleted(&event)) {}
    }
    // Closes the image, and reports what could not be written.
    let closed = client.execute("blockdev-del", members(&[("node-name", SERVED_NODE)]));
    match client.execute("quit", Map::new()) {
        // The process may end before its answer is read.
        Ok(_) | Err(ClientError::Socket(_)) => Ok(Some(closed.map(drop))),
        Err(error) => Ok(Some(Err(error))),
    }
}

fn members(members: &[(&str, &str)]) -> Map<String, Json> {
    members.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect()
}

/// Removes the device of a daemon that was killed, if that is the user's will: what it has not written is lost.
fn remove_left(attached: &Attached, force: bool) -> Result<(), DaemonError> {
    let device = attached.device.display();
    if !force {
        let error = DaemonError::new(format!("{device} waits: its daemon was killed"));
        return Err(error.with_hint(&format!(
            "Go on with it, and detach it then: {}",
            attached.command.join(" ")
        )));
    }
    attached
        .remove_device()
        .map_err(|errno| DaemonError::new(format!("removing {device} failed: {}", errno.desc())))?;
    attached.forget();
    Ok(())
}

/// Says what uses a device.
fn users(device: &Path) -> String {
    let all: Vec<_> = udev::partitions(device).into_iter().chain([device.to_owned()]).collect();
    let numbers: Vec<_> = all.iter().filter_map(|device| udev::number(device)).collect();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    // proc_pid_mountinfo(5): the device is the third field, the mount point the fifth.
    let mounted = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(2);
        let number = fields.next()?;
        let place = fields.nth(1)?;
        numbers.iter().any(|own| own == number).then(|| format!("mounted on {place}"))
    });
    let holders = all.iter().filter_map(|device| {
        let folder = Path::new("/sys/class/block").join(device.file_name()?).join("holders");
        Some(fs::read_dir(folder).ok()?.flatten())
    });
    let held = holders.flatten().map(|entry| {
        let name = entry.file_name();
        format!("part of {}", name.to_string_lossy())
    });
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let swaps: Vec<&str> =
        swaps.lines().filter_map(|line| line.split_whitespace().next()).collect();
    let swapped = all.iter().filter(|device| swaps.iter().any(|swap| Path::new(swap) == **device));
    let swapped = swapped.map(|_| "used for swap".to_owned());
    let found: Vec<String> = mounted.chain(held).chain(swapped).collect();
    match found.is_empty() {
        true => "open".into(),
        false => found.join(", "),
    }
}
