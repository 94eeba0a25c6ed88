//! Size, mode and owner of the file, which all I/O threads read without locks.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use nix::errno::Errno;
use nix::libc;
use nix::unistd::{getgid, getuid};

use super::wire::{Attributes, SetAttributes};

const ALL: u32 = 0o7777;
const WRITE: u32 = 0o222;
const NOT_OWNER: u32 = 0o077;

/// The file's attributes. Each is read and written by itself.
#[derive(Debug)]
pub struct FileAttributes {
    size: AtomicU64,
    mode: AtomicU32,
    uid: AtomicU32,
    gid: AtomicU32,
    /// File descriptors that are open.
    opens: AtomicU64,
    time_s: u64,
    block_size: u32,
    /// Whether the file can be written.
    pub writable: bool,
    /// Whether a write past the end makes the file longer.
    pub growable: bool,
    /// Whether other users than the daemon's reach the file.
    pub allow_other: bool,
}

impl FileAttributes {
    /// Returns the attributes of a new file: of this process's user, who alone has access.
    pub fn new(size: u64, block_size: u32, writable: bool, growable: bool, others: bool) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        FileAttributes {
            size: AtomicU64::new(size),
            mode: AtomicU32::new(if writable { 0o600 } else { 0o400 }),
            uid: AtomicU32::new(getuid().as_raw()),
            gid: AtomicU32::new(getgid().as_raw()),
            opens: AtomicU64::new(0),
            time_s: now.as_secs(),
            block_size,
            writable,
            growable,
            allow_other: others,
        }
    }

    /// The size, bytes.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// The node has another size now, bytes.
    pub fn set_size(&self, size: u64) {
        self.size.store(size, Ordering::Release);
    }

    /// Mode, owner and group, which outlive the process in an upgrade.
    pub fn owner(&self) -> [u32; 3] {
        [&self.mode, &self.uid, &self.gid].map(|member| member.load(Ordering::Relaxed))
    }

    /// Sets what [`owner`](Self::owner) has returned.
    pub fn set_owner(&self, [mode, uid, gid]: [u32; 3]) {
        self.mode.store(mode & ALL, Ordering::Relaxed);
        self.uid.store(uid, Ordering::Relaxed);
        self.gid.store(gid, Ordering::Relaxed);
    }

    /// How many file descriptors are open.
    pub fn opens(&self) -> u64 {
        self.opens.load(Ordering::Relaxed)
    }

    /// Sets the number of open file descriptors, which another process has counted.
    pub fn set_opens(&self, opens: u64) {
        self.opens.store(opens, Ordering::Relaxed);
    }

    pub(super) fn opened(&self) {
        self.opens.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether the last file descriptor was closed.
    pub(super) fn released(&self) -> bool {
        let less = |opens: u64| Some(opens.saturating_sub(1));
        let before = self.opens.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        before.is_ok_and(|opens| opens <= 1)
    }

    pub(super) fn get(&self) -> Attributes {
        let [mode, uid, gid] = self.owner();
        Attributes {
            size: self.size(),
            time_s: self.time_s,
            mode: libc::S_IFREG | mode,
            uid,
            gid,
            block_size: self.block_size,
        }
    }

    /// Checks a change, before any of it is made.
    ///
    /// # Errors
    ///
    /// The file has no such attribute, or cannot have that one.
    pub(super) fn check(&self, change: &SetAttributes) -> Result<(), Errno> {
        let mode = change.mode.unwrap_or(0) & ALL;
        let has_owner = change.uid.is_some() || change.gid.is_some();
        match () {
            () if change.size.is_some() && !self.writable => Err(Errno::EACCES),
            // Nobody else can reach the file at all.
            () if !self.allow_other && (has_owner || mode & NOT_OWNER != 0) => Err(Errno::EPERM),
            () if !self.writable && mode & WRITE != 0 => Err(Errno::EROFS),
            () if change.other => Err(Errno::EOPNOTSUPP),
            () => Ok(()),
        }
    }

    /// Makes a change that was checked, but for the size.
    pub(super) fn change(&self, change: &SetAttributes) {
        let set = |member: &AtomicU32, new: Option<u32>| {
            if let Some(new) = new {
                member.store(new, Ordering::Relaxed);
            }
        };
        set(&self.mode, change.mode.map(|mode| mode & ALL));
        set(&self.uid, change.uid);
        set(&self.gid, change.gid);
    }
}
