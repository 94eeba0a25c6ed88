//! `ringmill detach DEVICE|IMAGE`: removes the block device of an attached image, and waits until the image is closed.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use block::options::is_url;
use control::{CtlSocket, DetachOptions, HostDevice as Kind, SERVED_NODE};
use daemon::DaemonError;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::{Map, Value as Json, json};

use crate::attachments::identity::{self, Identity, Image};
use crate::attachments::lock::{Lock, Wait};
use crate::attachments::{self, Attached, KILLED_MS, has_ended_within};
use crate::check::print;
use crate::ctl::client::{Client, ClientError};
use crate::daemonize::{self, Role};
use crate::host_device::HostDevice;
use crate::kernel_nbd::{disconnect, disconnect_unused, is_of};
use crate::udev;

/// Time between two attempts with a device that is open, but not mounted: nothing reports its closing.
const AGAIN_MS: u16 = 1000;
/// How long `--force` waits for other commands, and for the end of a daemon that was killed.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long `--force` waits for each answer of the daemon, before the daemon is killed.
const FORCED: Duration = Duration::from_secs(5);
/// The same while the image is closed, which writes.
const FORCED_CLOSING: Duration = Duration::from_secs(60);

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
                print(&said);
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
        let lock = lock(&attached, options.force)?;
        match attempt(&attached, options.force)? {
            Outcome::Detached => break,
            Outcome::InUse if options.lazy => {
                drop(lock);
                if let Some(daemon) = child.take() {
                    let users = users(&attached.device);
                    print(&format!("{device} is {users}, and is detached when it is not in use\n"));
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

/// Locks a record against other commands.
fn lock(attached: &Attached, force: bool) -> Result<Lock, DaemonError> {
    let device = attached.device.display();
    let wait = if force { Wait::Within(PATIENCE) } else { Wait::Ever };
    let Some(lock) = attached.lock(wait)? else {
        let error = DaemonError::new(format!(
            "{device}: another 'ringmill attach' or 'ringmill detach' is at work with it"
        ));
        return Err(error.with_hint("Wait for its end, or end it."));
    };
    if !attached.is_recorded() || attached.clear_under(&lock) {
        return Err(DaemonError::new(format!("{device}: not attached any more")));
    }
    Ok(lock)
}

/// Finds what is attached by its device or its image, which may have been removed.
fn find(what: &Path) -> Result<Attached, DaemonError> {
    let real = identity::absolute(what).unwrap_or_else(|_| what.to_owned());
    let url = what.to_str().filter(|what| is_url(what));
    let identity = match url {
        Some(url) => Some(Identity::Url(url.to_owned())),
        None => Identity::of(&real).ok(),
    };
    let wanted = Image { name: real.display().to_string(), identity, base: None };
    let is_wanted = |attached: &Attached| {
        let image = &attached.image;
        let is_base = url.is_some() && image.base.as_deref() == url;
        attached.device == real || attached.images().any(|own| own.concerns(&wanted)) || is_base
    };
    let mut all = attachments::all()?;
    all.retain(is_wanted);
    // It may be the image of another device.
    if all.iter().any(|attached| attached.device == real) {
        all.retain(|attached| attached.device == real);
    }
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
    let (device, image) = (attached.device.display(), &attached.image.name);
    let is_stopped = is_stopped(pid);
    if is_stopped && !force {
        let what = format!("{device}: its daemon, process {pid}, is stopped by a signal");
        return Err(DaemonError::new(what).with_hint(&format!("Have it go on: kill -CONT {pid}")));
    }
    let mut hard = force;
    if let Some(HostDevice { kind: Kind::Nbd, number }) = attached.host_device()
        && is_of(number, &attached.id)
    {
        let gone =
            if force { disconnect(number).map(|()| true) } else { disconnect_unused(number, true) };
        match gone {
            Ok(true) => {}
            Ok(false) => return Ok(Outcome::InUse),
            Err(error) => return Err(DaemonError::new(format!("{device}: {error}"))),
        }
        // The export may not have noticed that its client has left.
        hard = true;
    }
    let ended = if is_stopped { Ok(None) } else { end(attached, hard, force) };
    let closed = match ended {
        Ok(Some(closed)) => closed,
        Ok(None) | Err(_) if force => {
            kill(attached)?;
            return left();
        }
        Ok(None) => return Ok(Outcome::InUse),
        // It was killed at this moment.
        Err(ClientError::Socket(_) | ClientError::Connect(..))
            if has_ended_within(pid, KILLED_MS.into()) =>
        {
            return left();
        }
        Err(error) => return Err(DaemonError::new(format!("{device}: {error}"))),
    };
    let limit = match force {
        true => PollTimeout::try_from(FORCED_CLOSING).unwrap_or(PollTimeout::MAX),
        false => PollTimeout::NONE,
    };
    if !has_ended_within(pid, limit) {
        kill(attached)?;
    }
    attached.forget();
    match closed {
        Ok(()) => Ok(Outcome::Detached),
        Err(error) => Err(DaemonError::new(format!(
            "{device} is detached, and closing {image} failed: {error}"
        ))),
    }
}

/// Returns whether a process is stopped, by SIGSTOP or a debugger.
fn is_stopped(pid: i32) -> bool {
    // proc_pid_stat(5): the state follows the name in brackets.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['T', 't']))
}

/// Kills a daemon that does not do what it is asked for. What is answered and not in the image stays in its journal.
fn kill(attached: &Attached) -> Result<(), DaemonError> {
    let Some(pid) = attached.daemon().and_then(Pid::from_raw) else { return Ok(()) };
    let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { return Ok(()) };
    // The number may have become another process' before that.
    if attached.daemon() == Some(pid.as_raw_nonzero().get()) {
        // Fails if the process has ended.
        let _ = pidfd_send_signal(&process, Signal::KILL);
    }
    let limit = PollTimeout::try_from(PATIENCE).unwrap_or(PollTimeout::MAX);
    let mut poll_fd = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
    match poll(&mut poll_fd, limit) {
        Ok(ready) if ready > 0 => Ok(()),
        _ => Err(DaemonError::new(format!(
            "{}: its daemon, process {pid}, was killed, and has not ended within {} s",
            attached.device.display(),
            PATIENCE.as_secs()
        ))
        .with_hint("The kernel waits for the storage of the image. Then try again.")),
    }
}

/// Has the daemon remove the device, close the image, and end. Returns whether the image was closed as it should;
/// `None`: the device is in use, which `hard` ignores. With `force`, each step has a time limit.
fn end(
    attached: &Attached,
    hard: bool,
    force: bool,
) -> Result<Option<Result<(), ClientError>>, ClientError> {
    let mut client = Client::connect(&CtlSocket::Unix(attached.file("qmp")))?;
    if force {
        client.set_patience(Some(FORCED))?;
    }
    // Commands may have moved the disk to another node.
    let exports = client.execute("query-block-exports", Map::new())?;
    let own = |export: &&Json| export["id"] == *attached.id;
    let node = exports.as_array().and_then(|all| all.iter().find(own)?["node-name"].as_str());
    let node = node.or(attached.moved().map(|moved| &*moved.node)).unwrap_or(SERVED_NODE);
    let mode = if hard { "hard" } else { "safe" };
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
    if force {
        client.set_patience(Some(FORCED_CLOSING))?;
    }
    // Closes the image, and reports what could not be written.
    let closed = client.execute("blockdev-del", members(&[("node-name", node)]));
    if let (Err(ClientError::Socket(_)), true) = (&closed, force) {
        return closed.map(|_| None);
    }
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
pub(crate) fn users(device: &Path) -> String {
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
