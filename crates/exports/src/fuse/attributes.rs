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

/// The file's attributes. Each is read and written on its own.
#[derive(Debug)]
pub struct FileAttributes {
    size: AtomicU64,
    mode: AtomicU32,
    uid: AtomicU32,
    gid: AtomicU32,
    /// Number of open file descriptors.
    opens: AtomicU64,
    time_s: u64,
    block_size: u32,
    /// Whether the file can be written.
    pub writable: bool,
    /// Whether a write past the end makes the file longer.
    pub growable: bool,
    /// Whether users other than the daemon's have access.
    pub allow_other: bool,
}

impl FileAttributes {
    /// Returns the attributes of a new file.
    ///
    /// The file has `size` bytes, and requests of `block_size` bytes are preferred. The file
    /// belongs to the user of this process. Other users have no access.
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

    /// Returns the size in bytes.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Records a new size of the node in bytes.
    pub fn set_size(&self, size: u64) {
        self.size.store(size, Ordering::Release);
    }

    /// Returns mode, owner and group, which survive an upgrade.
    pub fn owner(&self) -> [u32; 3] {
        [&self.mode, &self.uid, &self.gid].map(|member| member.load(Ordering::Relaxed))
    }

    /// Sets the result of an earlier [`owner`](Self::owner).
    pub fn set_owner(&self, [mode, uid, gid]: [u32; 3]) {
        self.mode.store(mode & ALL, Ordering::Relaxed);
        self.uid.store(uid, Ordering::Relaxed);
        self.gid.store(gid, Ordering::Relaxed);
    }

    /// Returns the number of open file descriptors.
    pub fn opens(&self) -> u64 {
        self.opens.load(Ordering::Relaxed)
    }

    /// Sets the number of open file descriptors, as counted by the previous process.
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

    /// Returns the attributes of a file whose node has `allocated` bytes.
    ///
    /// As in QSD, a node that does not know them, or has none, counts as full.
    pub fn get(&self, allocated: Option<u64>) -> Attributes {
        let ([mode, uid, gid], size) = (self.owner(), self.size());
        Attributes {
            size,
            allocated: allocated.filter(|bytes| *bytes > 0).unwrap_or(size),
            time_s: self.time_s,
            mode: libc::S_IFREG | mode,
            uid,
            gid,
            block_size: self.block_size,
        }
    }

    /// Checks a change before it is made.
    ///
    /// # Errors
    ///
    /// The file does not have the attribute, or not that value of it.
    pub(super) fn check(&self, change: &SetAttributes) -> Result<(), Errno> {
        let mode = change.mode.unwrap_or(0) & ALL;
        let has_owner = change.uid.is_some() || change.gid.is_some();
        match () {
            () if change.size.is_some() && !self.writable => Err(Errno::EACCES),
            // Without allow-other, other users cannot reach the file at all.
            () if !self.allow_other && (has_owner || mode & NOT_OWNER != 0) => Err(Errno::EPERM),
            () if !self.writable && mode & WRITE != 0 => Err(Errno::EROFS),
            () if change.other => Err(Errno::EOPNOTSUPP),
            () => Ok(()),
        }
    }

    /// Makes a checked change, except for the size.
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
