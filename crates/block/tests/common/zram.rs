//! A block device of our own, in memory: `/dev/zram0`, whose blocks are 4096 bytes, for the tests of
//! one process at a time.

use std::fs::{File, OpenOptions};
use std::path::Path;

use nix::fcntl::{Flock, FlockArg};
use nix::unistd::geteuid;
use test_requirements::{Needs, untested};

const DEVICE: &str = "/dev/zram0";

/// The device, empty, `size` bytes; for one test at a time, until it is dropped.
pub struct Zram {
    _lock: Flock<File>,
}

impl Zram {
    /// Waits for its turn. `None`, and says so, on a machine that has no such device or does not let
    /// us use it.
    pub fn new(size: u64) -> Option<Zram> {
        // One lock file per user: another user's file could not be opened.
        let name = format!("ringmill-test-zram-{}.lock", geteuid());
        let lock = std::env::temp_dir().join(name);
        let lock = OpenOptions::new().create(true).append(true).open(lock).unwrap();
        let lock = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, errno)| errno).unwrap();
        if let Err(error) = Self::reset().and_then(|()| Self::set("disksize", &size.to_string())) {
            let why = "as root, `modprobe zram` gives one";
            untested(Needs::Zram, format_args!("there is no {DEVICE} to use here: {error}; {why}"));
            return None;
        }
        Some(Zram { _lock: lock })
    }

    pub fn path(&self) -> &Path {
        Path::new(DEVICE)
    }

    fn set(attribute: &str, value: &str) -> std::io::Result<()> {
        // The kernel answers EBUSY if another process uses the device, which must not be disturbed.
        std::fs::write(format!("/sys/block/zram0/{attribute}"), value)
    }

    fn reset() -> std::io::Result<()> {
        Self::set("reset", "1")
    }
}

impl Drop for Zram {
    fn drop(&mut self) {
        let _ = Self::reset();
    }
}
