//! A block device in memory, written from end to end: the fastest disk that a kernel without
//! special modules has.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::host::data_file;

/// A zram device of our own; gone when dropped.
#[derive(Debug)]
pub(crate) struct RamDisk {
    number: String,
}

const CONTROL: &str = "/sys/class/zram-control";

impl RamDisk {
    /// A new device of `size` bytes, filled with random data, which zram stores as it is: reads
    /// copy, nothing is unpacked. Needs root.
    pub(crate) fn new(size: u64) -> Result<Self> {
        let number = fs::read_to_string(Path::new(CONTROL).join("hot_add"))
            .context("adding a zram device (needs root and a kernel with zram)")?;
        let disk = RamDisk { number: number.trim().into() };
        let file = disk.attribute("disksize");
        fs::write(&file, size.to_string())
            .with_context(|| format!("writing {}", file.display()))?;
        let path = disk.path();
        let mut device = OpenOptions::new()
            .write(true)
            .open(&path)
            .with_context(|| format!("opening {}", path.display()))?;
        data_file::fill(&mut device, size)
            .with_context(|| format!("writing {} ({} MiB)", path.display(), size >> 20))?;
        Ok(disk)
    }

    /// Its device node.
    pub(crate) fn path(&self) -> PathBuf {
        format!("/dev/zram{}", self.number).into()
    }

    fn attribute(&self, name: &str) -> PathBuf {
        format!("/sys/block/zram{}/{name}", self.number).into()
    }
}

impl Drop for RamDisk {
    fn drop(&mut self) {
        // One that is still open stays; there is nobody to tell.
        let _ = fs::write(self.attribute("reset"), "1");
        let _ = fs::write(Path::new(CONTROL).join("hot_remove"), &self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn a_ram_disk_holds_data_and_goes_away() {
        let disk = match RamDisk::new(1 << 20) {
            Ok(disk) => disk,
            Err(error) => return println!("NOT TESTED: {error:#}"),
        };
        let path = disk.path();
        let mut data = Vec::new();
        fs::File::open(&path).unwrap().read_to_end(&mut data).unwrap();
        assert_eq!(data.len(), 1 << 20);
        assert!(data.chunks(4096).all(|block| block.iter().any(|&byte| byte != 0)));
        drop(disk);
        assert!(!path.exists());
    }
}
