//! Image locks as QEMU takes them, so that QEMU, qemu-img and ringmill respect each other.
//!
//! Each user of an image states the permissions that it uses and the ones that it does not share. Both
//! are read locks on single bytes: byte 100 + p while permission p is in use, byte 200 + p while p is not
//! shared. After it has set its own bytes, a user tests the opposite bytes: 200 + p for each permission
//! in use, 100 + p for each permission that it does not share. The locks belong to the
//! open file description (`F_OFD_SETLK`, fcntl_locking(2)), so they end when it is closed, also by
//! a crash. Learned from `strace` of QEMU 10.0's tools; `docs/interop` of QEMU has no page on it.

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use event_loop::sync::lock;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

use crate::error::{LockedBy, OpenError};
use crate::options::Locking;

/// First byte for permissions in use.
const IN_USE: i64 = 100;
/// First byte for permissions that are not shared.
const NOT_SHARED: i64 = 200;

/// A way to use an image. The numbers are the byte offsets of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i64)]
pub(crate) enum Permission {
    /// Reads of a consistent disk. A half-copied image cannot give that.
    ConsistentRead = 0,
    /// Writes.
    Write = 1,
    /// Changes of size.
    Resize = 3,
}

impl fmt::Display for Permission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Permission::ConsistentRead => "consistent read",
            Permission::Write => "write",
            Permission::Resize => "resize",
        })
    }
}

/// Permissions in use and permissions not shared.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Claims {
    in_use: &'static [Permission],
    not_shared: &'static [Permission],
}

impl Claims {
    /// The claims of a node that serves a disk: it reads (and writes) the image, and excludes other
    /// writers and resizes.
    pub(crate) fn of_disk(read_only: bool) -> Self {
        use Permission::{ConsistentRead, Resize, Write};
        Claims {
            in_use: if read_only { &[ConsistentRead] } else { &[ConsistentRead, Write] },
            not_shared: &[Write, Resize],
        }
    }

    /// The same, but others may write to the image and resize it, if `all` is to be shared.
    pub(crate) fn sharing(self, all: bool) -> Self {
        if all { Claims { not_shared: &[], ..self } } else { self }
    }

    /// No claims: the image is not used for now.
    pub(crate) fn none() -> Self {
        Claims { in_use: &[], not_shared: &[] }
    }

    /// The claims while an image is created.
    fn of_maker() -> Self {
        use Permission::{Resize, Write};
        Claims { in_use: &[Write, Resize], not_shared: &[Write, Resize] }
    }

    /// Whether there are no claims.
    pub(crate) fn is_none(self) -> bool {
        self.in_use.is_empty() && self.not_shared.is_empty()
    }

    /// Whether the claims include writing.
    pub(crate) fn writes(self) -> bool {
        self.in_use.contains(&Permission::Write)
    }

    fn bytes(self) -> impl Iterator<Item = i64> {
        let in_use = self.in_use.iter().map(|&p| IN_USE + p as i64);
        in_use.chain(self.not_shared.iter().map(|&p| NOT_SHARED + p as i64))
    }
}

/// The lock of an image that is being created. It excludes all other users.
#[derive(Debug)]
pub(super) struct CreationLock(
    #[expect(dead_code, reason = "held for its drop")] Option<ImageLock>,
);

impl CreationLock {
    /// Locks a file before it is emptied and created again.
    ///
    /// # Errors
    ///
    /// The file is in use; the hint names the process.
    pub(super) fn take(file: &fs::File, path: &Path) -> Result<CreationLock, OpenError> {
        let fd = file.try_clone().map_err(|_| {
            OpenError::os(format!("Could not lock '{}'", path.display()), Errno::last())
        })?;
        let fd = Arc::new(OwnedFd::from(fd));
        ImageLock::take(&fd, path, Locking::Auto, Claims::of_maker(), None).map(CreationLock)
    }
}

/// The locks of an image; dropping it releases them.
#[derive(Debug)]
pub(crate) struct ImageLock {
    fd: Arc<OwnedFd>,
    path: PathBuf,
    claims: Mutex<Claims>,
    /// Readers share the image with writers.
    force_share: bool,
    /// The descriptor that claims a block device for writing (`O_EXCL`, open(2)). Kept as long as the lock.
    claim: OnceLock<Arc<OwnedFd>>,
    /// Whether this process owns the locks and may release them; `None`: always.
    owned: Option<Arc<AtomicBool>>,
}

impl ImageLock {
    /// Locks the image open at `fd`. The error names the process in conflict.
    ///
    /// `None` when there is nothing to hold: locking is off, or `auto` on a file system that has no
    /// open file description locks. `owned`: see [`Inherited::owned`](crate::inherited::Inherited::owned).
    pub(crate) fn take(
        fd: &Arc<OwnedFd>,
        path: &Path,
        locking: Locking,
        claims: Claims,
        owned: Option<Arc<AtomicBool>>,
    ) -> Result<Option<ImageLock>, OpenError> {
        if locking == Locking::Off {
            return Ok(None);
        }
        // From here on an early return gives back what was locked so far.
        let (path_buf, fd_of_lock) = (path.to_owned(), fd.clone());
        let image_lock = ImageLock {
            fd: fd_of_lock,
            path: path_buf,
            claims: Mutex::new(claims),
            force_share: false,
            claim: OnceLock::new(),
            owned,
        };
        for byte in claims.bytes() {
            match set(fd, byte, libc::F_RDLCK) {
                Ok(()) => {}
                Err(errno) if locking == Locking::Auto && unsupported(errno) => {
                    log::warn!(
                        "{}: image locking is not supported here ({}), going without",
                        path.display(),
                        errno.desc()
                    );
                    return Ok(None);
                }
                Err(errno) => {
                    return Err(OpenError::os(
                        format!("Failed to lock byte {byte} of '{}'", path.display()),
                        errno,
                    )
                    .with_hint("locking=off goes without image locks"));
                }
            }
        }
        look_for_others(fd, path, claims)?;
        Ok(Some(image_lock))
    }

    /// Takes the locks again after a failed handover, since the other process may have released them.
    pub(crate) fn retake(&self) {
        for byte in self.claims().bytes() {
            if let Err(errno) = set(&self.fd, byte, libc::F_RDLCK) {
                log::error!("{}: locking it again failed: {}", self.path.display(), errno.desc());
            }
        }
    }

    /// The descriptor that holds the locks.
    pub(crate) fn fd(&self) -> &Arc<OwnedFd> {
        &self.fd
    }

    /// Keeps the claim of a device opened with `O_EXCL`, also across reopens.
    pub(crate) fn keep_claim(&self, fd: &Arc<OwnedFd>) {
        // The first descriptor stays.
        let _ = self.claim.set(fd.clone());
    }

    /// Has readers share the image with writers.
    pub(crate) fn sharing(mut self, force_share: bool) -> ImageLock {
        self.force_share = force_share;
        self
    }

    /// Locks an image that is only read, for its first user.
    ///
    /// # Errors
    ///
    /// As of [`change`](Self::change).
    pub(crate) fn change_for_reader(&self) -> Result<(), OpenError> {
        self.change(Claims::of_disk(true).sharing(self.force_share))
    }

    /// The present claims.
    pub(crate) fn claims(&self) -> Claims {
        *lock(&self.claims)
    }

    /// Changes the claims.
    ///
    /// # Errors
    ///
    /// The new claims conflict with another user; then the old claims stay.
    pub(crate) fn change(&self, wanted: Claims) -> Result<(), OpenError> {
        let mut claims = lock(&self.claims);
        let (before, after): (Vec<_>, Vec<_>) =
            (claims.bytes().collect(), wanted.bytes().collect());
        let give_up = |bytes: &[i64], keep: &[i64]| {
            for &byte in bytes.iter().filter(|byte| !keep.contains(byte)) {
                let _ = set(&self.fd, byte, libc::F_UNLCK);
            }
        };
        for &byte in after.iter().filter(|byte| !before.contains(byte)) {
            if let Err(errno) = set(&self.fd, byte, libc::F_RDLCK) {
                give_up(&after, &before);
                let message = format!("Failed to lock byte {byte} of '{}'", self.path.display());
                return Err(OpenError::os(message, errno));
            }
        }
        if let Err(error) = look_for_others(&self.fd, &self.path, wanted) {
            give_up(&after, &before);
            return Err(error);
        }
        give_up(&before, &after);
        *claims = wanted;
        Ok(())
    }

    /// Checks that `fd` is the locked file: the path may name another file by now.
    pub(crate) fn check_is_of(&self, fd: &OwnedFd, path: &Path) -> Result<(), OpenError> {
        let inode = |fd: &OwnedFd| {
            let stat = nix::sys::stat::fstat(fd.as_fd());
            stat.map(|stat| (stat.st_dev, stat.st_ino)).map_err(|errno| {
                OpenError::os(format!("Could not stat '{}'", path.display()), errno)
            })
        };
        match inode(fd)? == inode(&self.fd)? {
            true => Ok(()),
            false => {
                let message = format!("'{}' is not the file any more that it was", path.display());
                Err(OpenError::new(message))
            }
        }
    }
}

/// Tests the bytes of other users for a conflict with `claims`.
fn look_for_others(fd: &OwnedFd, path: &Path, claims: Claims) -> Result<(), OpenError> {
    for &p in claims.in_use {
        if is_locked(fd, path, NOT_SHARED + p as i64)? {
            let message = format!("Failed to get \"{p}\" lock");
            return Err(conflict(fd, path, message, NOT_SHARED + p as i64, p));
        }
    }
    for &p in claims.not_shared {
        if is_locked(fd, path, IN_USE + p as i64)? {
            let message = format!("Failed to get shared \"{p}\" lock");
            return Err(conflict(fd, path, message, IN_USE + p as i64, p));
        }
    }
    Ok(())
}

impl Drop for ImageLock {
    fn drop(&mut self) {
        // The process that hands over shares the open file description, and keeps the locks unless
        // this process takes the image over.
        if self.owned.as_ref().is_some_and(|owned| !owned.load(Ordering::Relaxed)) {
            return;
        }
        for byte in self.claims().bytes() {
            // A close of the last descriptor would release them too, but another process may hold one longer.
            let _ = set(&self.fd, byte, libc::F_UNLCK);
        }
    }
}

fn flock(byte: i64, kind: i32) -> libc::flock {
    libc::flock {
        // The constants are c_int, the field is c_short; they are 0, 1 and 2.
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    }
}

fn set(fd: &OwnedFd, byte: i64, kind: i32) -> Result<(), Errno> {
    loop {
        match fcntl(fd.as_fd(), FcntlArg::F_OFD_SETLK(&flock(byte, kind))) {
            Err(Errno::EINTR) => {}
            done => return done.map(drop),
        }
    }
}

/// Whether another open file description holds a lock on the byte.
fn is_locked(fd: &OwnedFd, path: &Path, byte: i64) -> Result<bool, OpenError> {
    // A write lock would conflict with the read locks of all users.
    let mut lock = flock(byte, libc::F_WRLCK);
    fcntl(fd.as_fd(), FcntlArg::F_OFD_GETLK(&mut lock)).map_err(|errno| {
        OpenError::os(
            format!("Failed to test the lock on byte {byte} of '{}'", path.display()),
            errno,
        )
    })?;
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

fn unsupported(errno: Errno) -> bool {
    matches!(errno, Errno::EINVAL | Errno::ENOLCK | Errno::ENOSYS | Errno::EOPNOTSUPP)
}

fn conflict(fd: &OwnedFd, path: &Path, message: String, byte: i64, p: Permission) -> OpenError {
    let mut hint = format!("Is another process using the image [{}]?", path.display());
    let holder = holder(fd, byte);
    let who = match &holder {
        Ok(Holder { pid, .. }) if *pid == std::process::id() => {
            "Another node of this process".to_owned()
        }
        Ok(Holder { pid, name }) => format!("{name} (pid {pid})"),
        Err(LockedBy::Nobody) => "Its user".to_owned(),
        Err(LockedBy::Unknown) => "Its user (unknown: not all of /proc may be read)".to_owned(),
    };
    hint.push_str(&match (byte >= NOT_SHARED, p) {
        (true, Permission::ConsistentRead) => format!("\n{who} does not let others read it now."),
        (true, _) => {
            // A reader shares the image with readers only.
            let is_written = is_locked(fd, path, IN_USE + Permission::Write as i64);
            let advice = match is_written {
                Ok(false) => "read-only=on may be shared; else stop it first.",
                Ok(true) | Err(_) => "Stop it first.",
            };
            format!("\n{who} does not share \"{p}\". {advice}")
        }
        (false, _) => {
            format!("\n{who} holds \"{p}\" on it, which this node cannot share. Stop it first.")
        }
    });
    let error = OpenError::new(message).with_hint(hint).with_hint_everywhere();
    match holder {
        Ok(_) => error,
        Err(by) => error.locked_by(by),
    }
}

struct Holder {
    pid: u32,
    name: String,
}

/// Finds the process whose descriptor holds the lock. Open file description locks have no process ID
/// (`l_pid` is -1), but `/proc/PID/fdinfo/FD` lists the locks of each descriptor. Only processes that
/// this one may inspect are found: those of the same user, and under Landlock only those in the same
/// domain.
fn holder(fd: &OwnedFd, byte: i64) -> Result<Holder, LockedBy> {
    let stat = nix::sys::stat::fstat(fd.as_fd()).map_err(|_| LockedBy::Unknown)?;
    let (major, minor) = (nix::sys::stat::major(stat.st_dev), nix::sys::stat::minor(stat.st_dev));
    let inode = format!("{major:02x}:{minor:02x}:{}", stat.st_ino);
    let own = std::os::fd::AsRawFd::as_raw_fd(fd).to_string();
    let mut otherwise = if shows_all("/proc") { LockedBy::Nobody } else { LockedBy::Unknown };
    let mut refused = |error: io::Error| {
        // Otherwise the process has ended.
        if error.kind() == io::ErrorKind::PermissionDenied {
            otherwise = LockedBy::Unknown;
        }
    };
    for process in fs::read_dir("/proc").map_err(|_| LockedBy::Unknown)?.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok())
        else {
            continue;
        };
        let fds = fs::read_dir(process.path().join("fdinfo")).map_err(&mut refused);
        for info in fds.into_iter().flatten().flatten() {
            if pid == std::process::id() && info.file_name().to_str() == Some(own.as_str()) {
                continue;
            }
            let Ok(text) = fs::read_to_string(info.path()).map_err(&mut refused) else { continue };
            if text.lines().any(|line| is_lock_on(line, &inode, byte)) {
                let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
                return Ok(Holder { pid, name: name.trim_end().to_owned() });
            }
        }
    }
    Err(otherwise)
}

/// Whether /proc shows all processes of the machine. With `hidepid=2` the processes of other users are
/// missing, PID 1 among them; in a PID namespace those outside of it are missing.
fn shows_all(proc: &str) -> bool {
    // `PROC_PID_INIT_INO`: the inode of the initial PID namespace in all kernels.
    let first = Path::new("pid:[4026531836]");
    let own = fs::read_link(format!("{proc}/self/ns/pid"));
    own.is_ok_and(|own| own == first) && Path::new(&format!("{proc}/1")).exists()
}

/// Whether a line of fdinfo, such as `lock: 1: OFDLCK  ADVISORY  READ -1 fe:00:1234 100 101`, is an
/// open file description lock of that inode and byte.
fn is_lock_on(line: &str, inode: &str, byte: i64) -> bool {
    let mut words = line.split_ascii_whitespace();
    let mut next = || words.next().unwrap_or("");
    if next() != "lock:" {
        return false;
    }
    let (_number, kind, _advisory, _read, _pid, file) =
        (next(), next(), next(), next(), next(), next());
    let (first, last) = (next().parse::<i64>(), next());
    kind == "OFDLCK"
        && file == inode
        && first.is_ok_and(|first| first <= byte)
        && (last == "EOF" || last.parse::<i64>().is_ok_and(|last| byte <= last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proc_that_hides_the_first_process_does_not_show_all() {
        let folder = std::env::temp_dir().join(format!("locks-{}", std::process::id()));
        let proc = folder.to_str().unwrap();
        let link = folder.join("self/ns/pid");
        fs::create_dir_all(folder.join("self/ns")).unwrap();
        std::os::unix::fs::symlink("pid:[4026531836]", &link).unwrap();
        let hidden = shows_all(proc);
        fs::create_dir(folder.join("1")).unwrap();
        let shown = shows_all(proc);
        fs::remove_file(&link).unwrap();
        std::os::unix::fs::symlink("pid:[4026532257]", &link).unwrap();
        let elsewhere = shows_all(proc);
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!((hidden, shown, elsewhere), (false, true, false));
    }

    #[test]
    fn lines_of_fdinfo() {
        let line = "lock:\t1: OFDLCK  ADVISORY  READ -1 fe:00:10069138 100 101";
        assert!(is_lock_on(line, "fe:00:10069138", 100));
        assert!(is_lock_on(line, "fe:00:10069138", 101));
        assert!(!is_lock_on(line, "fe:00:10069138", 102));
        assert!(!is_lock_on(line, "fe:00:10069139", 100));
        assert!(!is_lock_on(&line.replace("OFDLCK", "POSIX"), "fe:00:10069138", 100));
        assert!(is_lock_on(&line.replace("101", "EOF"), "fe:00:10069138", 5000));
        assert!(!is_lock_on("flags:\t02", "fe:00:10069138", 100));
    }
}
