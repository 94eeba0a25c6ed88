//! A block device in RAM: as fast as one gets, so that the loops' own cost shows.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::load::offsets::SplitMix64;

/// A block device, removed when dropped if it was made here.
#[derive(Debug)]
pub(crate) struct RamDevice {
    /// Its node.
    pub(crate) path: PathBuf,
    /// Its number, of one that was made here.
    made: Option<u32>,
}

/// Where zram devices are made and removed (Linux, admin-guide/blockdev/zram).
const CONTROL: &str = "/sys/class/zram-control";

impl RamDevice {
    /// One that is there, to be read as it is.
    pub(crate) fn existing(path: &Path) -> Self {
        RamDevice { path: path.to_owned(), made: None }
    }

    /// A zram device of `size` bytes, all of them written with random data, which it does not
    /// compress. Needs root and the module zram.
    pub(crate) fn create(size: u64) -> Result<Self> {
        let add = format!("{CONTROL}/hot_add");
        let number = fs::read_to_string(&add).with_context(|| format!("reading {add}"))?;
        let number: u32 = number.trim().parse().with_context(|| format!("{add}: {number:?}"))?;
        let device = RamDevice { path: format!("/dev/zram{number}").into(), made: Some(number) };
        let disksize = format!("/sys/block/zram{number}/disksize");
        fs::write(&disksize, size.to_string()).with_context(|| format!("writing {disksize}"))?;
        device.fill(size).with_context(|| format!("filling {}", device.path.display()))?;
        Ok(device)
    }

    fn fill(&self, size: u64) -> Result<()> {
        // udev, where there is one, makes the node some time later.
        let begin = Instant::now();
        while !self.path.exists() {
            ensure!(begin.elapsed() < Duration::from_secs(5), "its node does not appear");
            std::thread::sleep(Duration::from_millis(10));
        }
        let mut device = File::options().write(true).open(&self.path)?;
        let mut random = SplitMix64(size);
        let mut chunk = vec![0u8; 1 << 20];
        for _ in 0..size / chunk.len() as u64 {
            for word in chunk.chunks_exact_mut(8) {
                word.copy_from_slice(&random.next().to_ne_bytes());
            }
            device.write_all(&chunk)?;
        }
        device.sync_all()?;
        Ok(())
    }
}

impl Drop for RamDevice {
    fn drop(&mut self) {
        let Some(number) = self.made else { return };
        let remove = format!("{CONTROL}/hot_remove");
        let begin = Instant::now();
        // For a moment after it was closed somebody else may still look at it, as udev does.
        while let Err(error) = fs::write(&remove, number.to_string()) {
            if begin.elapsed() > Duration::from_secs(2) {
                eprintln!("{} stays: writing {remove}: {error}", self.path.display());
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
