//! Mounting and unmounting, for a process with the right to do so: as root, or with `fusermount3`.
//!
//! The daemon is confined while it serves, so it asks an unconfined process. That process checks the
//! request here, since a guest may have compromised the daemon.

#![allow(unsafe_code)]

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};
use nix::libc;
use nix::mount::{MntFlags, MsFlags, mount as sys_mount, umount2};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

use super::wire::MAX_DATA;
use crate::vhost_user::fd_passing::receive;

/// The kernel's device.
const DEVICE: &str = "/dev/fuse";
/// Name of the mount in lists of mounts.
const SOURCE: &str = "ringmill";
/// Program that mounts for unprivileged users.
const FUSERMOUNT: &str = "fusermount3";

mod ioctl {
    nix::ioctl_read! {
        /// `FUSE_DEV_IOC_CLONE`: attaches a new descriptor to a mount.
        clone, 229, 0, u32
    }
}

/// `allow-other`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AllowOther {
    /// Only the daemon's user has access.
    Off,
    /// All users have access according to the file's mode.
    On,
    /// As `On` where that is allowed, otherwise as `Off`.
    Auto,
}

/// A request to mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountOptions {
    /// A regular file.
    pub mountpoint: PathBuf,
    /// Whether the file may be written.
    pub writable: bool,
    /// Access of other users.
    pub allow_other: AllowOther,
    /// Number of descriptors.
    pub devices: usize,
}

/// A mounted file.
#[derive(Debug)]
pub struct Mounted {
    /// Descriptors of the mount, non-blocking.
    pub devices: Vec<OwnedFd>,
    /// Whether other users have access.
    pub allow_other: bool,
}

/// Places where mounting is allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Allowed {
    /// Anywhere.
    Anywhere,
    /// These files, and files in these folders.
    Only(Vec<PathBuf>),
}

impl Allowed {
    /// Collects files and folders, with their real paths.
    ///
    /// Those that do not exist yet count by their absolute names.
    pub fn only<'a>(paths: impl Iterator<Item = &'a Path>) -> Self {
        let real = |path: &Path| {
            fs::canonicalize(path)
                .or_else(|_| std::path::absolute(path))
                .unwrap_or_else(|_| path.to_owned())
        };
        Allowed::Only(paths.map(real).collect())
    }

    fn check(&self, path: &Path) -> Result<(), String> {
        match self {
            Allowed::Only(paths) if !paths.iter().any(|allowed| path.starts_with(allowed)) => {
                Err(format!(
                    "'{}' is neither a mount point on the command line nor beneath --sandbox paths",
                    path.display()
                ))
            }
            Allowed::Only(_) | Allowed::Anywhere => Ok(()),
        }
    }
}

/// Mounts a file. Removes the mount of a killed daemon first.
///
/// # Errors
///
/// A sentence.
pub fn mount(options: &MountOptions, allowed: &Allowed) -> Result<Mounted, String> {
    let name = options.mountpoint.display();
    // Not by path again, since the path may lead elsewhere now.
    let (place, real) = find(&options.mountpoint)?;
    allowed.check(&real)?;
    let stat = |place: &File| place.metadata();
    let (place, metadata) = match stat(&place) {
        Err(error) if error.raw_os_error() == Some(libc::ENOTCONN) => {
            drop(place);
            unmount(&real, allowed).map_err(|why| {
                format!("'{name}' has the mount of a process that is gone, which stays: {why}")
            })?;
            let (place, again) = find(&options.mountpoint)?;
            allowed.check(&again)?;
            let metadata = stat(&place);
            (place, metadata)
        }
        metadata => (place, metadata),
    };
    let metadata = metadata.map_err(|error| stat_failed(&options.mountpoint, &error))?;
    if metadata.mode() & libc::S_IFMT != libc::S_IFREG {
        return Err(format!("'{name}' is not a regular file"));
    }
    if is_mounted(&real) {
        return Err(format!("'{name}' is mounted on already"));
    }
    let target = PathBuf::from(format!("/proc/self/fd/{}", place.as_raw_fd()));
    let others: &[bool] = match options.allow_other {
        AllowOther::Off => &[false],
        AllowOther::On => &[true],
        AllowOther::Auto => &[true, false],
    };
    let mut refused = String::new();
    for &allow_other in others {
        let first = match by_mount(&target, options.writable, allow_other) {
            Err(Errno::EPERM | Errno::EACCES) => {
                by_fusermount(&real, options.writable, allow_other)
            }
            mounted => mounted.map_err(|errno| errno.desc().to_owned()),
        };
        match first {
            Ok(first) => {
                let devices = clones(first, options.devices).map_err(|error| {
                    let _ = unmount(&real, allowed);
                    format!("duplicating {DEVICE} failed: {error}")
                })?;
                return Ok(Mounted { devices, allow_other });
            }
            Err(why) => refused = why,
        }
    }
    Err(format!("mounting on '{name}' failed: {refused}"))
}

/// Unmounts a file.
///
/// Open descriptors work until the descriptors of the mount are closed.
///
/// # Errors
///
/// A sentence.
pub fn unmount(path: &Path, allowed: &Allowed) -> Result<(), String> {
    let (_, real) = find(path)?;
    allowed.check(&real)?;
    if !is_mounted(&real) {
        // Another process has unmounted it.
        return Ok(());
    }
    let failed = |why: String| format!("unmounting '{}' failed: {why}", real.display());
    match umount2(&real, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
        Ok(()) | Err(Errno::EINVAL) => Ok(()),
        Err(Errno::EPERM) => {
            let mut command = Command::new(FUSERMOUNT);
            command.args(["-u", "-z", "--"]).arg(&real);
            run(command).map_err(failed)
        }
        Err(errno) => Err(failed(errno.desc().into())),
    }
}

/// Opens a place in the file system with O_PATH. Returns its real path too.
fn find(path: &Path) -> Result<(File, PathBuf), String> {
    let failed = |error: io::Error| stat_failed(path, &error);
    let flags = libc::O_PATH | libc::O_CLOEXEC;
    let place = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(failed)?;
    let real = fs::read_link(format!("/proc/self/fd/{}", place.as_raw_fd())).map_err(failed)?;
    Ok((place, real))
}

/// An error in QSD's words.
fn stat_failed(path: &Path, error: &io::Error) -> String {
    let why = error
        .raw_os_error()
        .map_or_else(|| error.to_string(), |errno| Errno::from_raw(errno).desc().to_owned());
    format!("Failed to stat '{}': {why}", path.display())
}

/// Whether the path is a mount point of a FUSE file system.
fn is_mounted(path: &Path) -> bool {
    // proc_pid_mountinfo(5): the fifth field is the mount point with octal escapes; the type follows " - ".
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    mounts.lines().any(|line| {
        let Some((left, right)) = line.split_once(" - ") else { return false };
        let place = left.split(' ').nth(4).map(plain);
        right.starts_with("fuse") && place.as_deref() == path.to_str()
    })
}

/// Decodes octal escapes.
fn plain(escaped: &str) -> String {
    let codes = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    codes.iter().fold(escaped.to_owned(), |text, (code, char)| text.replace(code, char))
}

fn open_device() -> io::Result<OwnedFd> {
    let flags = libc::O_NONBLOCK | libc::O_CLOEXEC;
    let device = OpenOptions::new().read(true).write(true).custom_flags(flags).open(DEVICE)?;
    Ok(device.into())
}

fn by_mount(target: &Path, writable: bool, allow_other: bool) -> Result<OwnedFd, Errno> {
    let errno = |error: io::Error| error.raw_os_error().map_or(Errno::EIO, Errno::from_raw);
    let device = open_device().map_err(errno)?;
    let mut flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOATIME;
    if !writable {
        flags |= MsFlags::MS_RDONLY;
    }
    let (uid, gid) = (nix::unistd::geteuid(), nix::unistd::getegid());
    let fd = device.as_raw_fd();
    let mut data = format!(
        "fd={fd},rootmode=100000,user_id={uid},group_id={gid},max_read={MAX_DATA},default_permissions"
    );
    if allow_other {
        data += ",allow_other";
    }
    sys_mount(Some(SOURCE), target, Some("fuse"), flags, Some(data.as_str()))?;
    Ok(device)
}

fn by_fusermount(path: &Path, writable: bool, allow_other: bool) -> Result<OwnedFd, String> {
    let text = |errno: Errno| errno.desc().to_owned();
    let flags = SockFlag::SOCK_CLOEXEC;
    let (ours, theirs) =
        socketpair(AddressFamily::Unix, SockType::Stream, None, flags).map_err(text)?;
    fcntl(&theirs, FcntlArg::F_SETFD(FdFlag::empty())).map_err(text)?;
    let mut options =
        format!("fsname={SOURCE},nosuid,nodev,noatime,max_read={MAX_DATA},default_permissions");
    if allow_other {
        options += ",allow_other";
    }
    if !writable {
        options += ",ro";
    }
    let mut command = Command::new(FUSERMOUNT);
    command.args(["-o", &options, "--"]).arg(path);
    command.env("_FUSE_COMMFD", theirs.as_raw_fd().to_string());
    run(command)?;
    drop(theirs);
    let received = receive(std::os::fd::AsFd::as_fd(&ours), &mut [0; 8]).map_err(text)?;
    let device = received.fds.into_iter().next();
    let device = device.ok_or_else(|| format!("{FUSERMOUNT} has sent no descriptor"))?;
    let flags = fcntl(&device, FcntlArg::F_GETFL).map_err(text)?;
    let flags = OFlag::from_bits_truncate(flags) | OFlag::O_NONBLOCK;
    fcntl(&device, FcntlArg::F_SETFL(flags)).map_err(text)?;
    Ok(device)
}

fn run(mut command: Command) -> Result<(), String> {
    let output = command.output().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            format!("{FUSERMOUNT} is not installed, and without privileges it is needed")
        }
        _ => format!("starting {FUSERMOUNT} failed: {error}"),
    })?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("{FUSERMOUNT} says: {}", said.trim().replace('\n', "; ")))
}

fn clones(first: OwnedFd, count: usize) -> io::Result<Vec<OwnedFd>> {
    let mut devices = vec![first];
    while devices.len() < count {
        let device = match open_device() {
            // Threads can share a descriptor too, although they then wait for each other.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                devices.push(devices[0].try_clone()?);
                continue;
            }
            device => device?,
        };
        let mut number = devices[0].as_raw_fd().cast_unsigned();
        // SAFETY: the kernel reads one u32 at the address, of a variable that outlives the call.
        unsafe { ioctl::clone(device.as_raw_fd(), &raw mut number)? };
        devices.push(device);
    }
    Ok(devices)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_allowed_paths_are_mounted() {
        let folder = std::env::temp_dir().join(format!("fuse-mount-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (own, other) = (folder.join("own"), folder.join("other"));
        fs::write(&own, "").unwrap();
        fs::write(&other, "").unwrap();
        let allowed = Allowed::only([own.as_path()].into_iter());
        let options = |mountpoint: &Path| MountOptions {
            mountpoint: mountpoint.to_owned(),
            writable: false,
            allow_other: AllowOther::Auto,
            devices: 1,
        };
        let refused = mount(&options(&other), &allowed).unwrap_err();
        assert!(refused.contains("other' is neither a mount point"), "{refused}");
        // A link to a file is the file.
        let link = folder.join("link");
        std::os::unix::fs::symlink(&other, &link).unwrap();
        let refused = mount(&options(&link), &allowed).unwrap_err();
        assert!(refused.contains("other' is neither a mount point"), "{refused}");
        let refused = mount(&options(&folder), &Allowed::Anywhere).unwrap_err();
        assert!(refused.ends_with("is not a regular file"), "{refused}");
        let refused = mount(&options(&folder.join("none")), &Allowed::Anywhere).unwrap_err();
        assert!(refused.ends_with("none': No such file or directory"), "{refused}");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn places_with_spaces_are_found_in_lists() {
        assert_eq!(plain("/a\\040b\\134c"), "/a b\\c");
    }
}
