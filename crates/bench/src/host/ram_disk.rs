//! A block device in memory: a loop device over a file in tmpfs, written from end to end.
//!
//! The kernel's other disks in memory (zram, brd) can only complete requests by blocking, so io_uring uses a thread for each.
//! A loop device completes them later, as a disk does, within 10 us.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::host::data_file;

/// A loop device, detached when dropped.
#[derive(Debug)]
pub struct RamDisk {
    device: PathBuf,
}

/// A tmpfs on every Linux.
pub const MEMORY: &str = "/dev/shm";

impl RamDisk {
    /// A new device of `size` bytes, filled with random data. Needs root.
    pub fn new(size: u64) -> Result<Self> {
        let file = Path::new(MEMORY).join(format!("bench-ram-disk-{}", std::process::id()));
        let attached = fill(&file, size).and_then(|()| attach(&file));
        // The device keeps the file open.
        let _ = fs::remove_file(&file);
        attached
    }

    /// Its device node.
    pub fn path(&self) -> PathBuf {
        self.device.clone()
    }
}

fn fill(path: &Path, size: u64) -> Result<()> {
    let file = OpenOptions::new().write(true).create(true).truncate(true).open(path);
    let context = || format!("writing {} ({} MiB)", path.display(), size >> 20);
    data_file::fill(&mut file.with_context(context)?, size).with_context(context)
}

fn attach(file: &Path) -> Result<RamDisk> {
    let output = Command::new("losetup")
        .args(["--find", "--show"])
        .arg(file)
        .output()
        .context("running losetup (Debian: mount)")?;
    ensure!(output.status.success(), "losetup: {}", String::from_utf8_lossy(&output.stderr).trim());
    let device = String::from_utf8(output.stdout).context("what losetup printed")?;
    Ok(RamDisk { device: device.trim().into() })
}

impl Drop for RamDisk {
    fn drop(&mut self) {
        // A device in use is detached once it is closed. A failure cannot be reported here.
        let _ = Command::new("losetup").arg("--detach").arg(&self.device).status();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn a_ram_disk_holds_data_and_goes_away() {
        if !nix::unistd::geteuid().is_root() {
            return test_requirements::untested(
                test_requirements::Needs::Loop,
                "attaching a loop device takes root",
            );
        }
        let disk = RamDisk::new(1 << 20).unwrap();
        let path = disk.path();
        let mut data = Vec::new();
        fs::File::open(&path).unwrap().read_to_end(&mut data).unwrap();
        assert_eq!(data.len(), 1 << 20);
        assert!(data.chunks(4096).all(|block| block.iter().any(|&byte| byte != 0)));
        drop(disk);
        let data = fs::read(&path).unwrap_or_default();
        assert!(data.is_empty(), "{} is still attached", path.display());
    }
}
