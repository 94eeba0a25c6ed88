//! Memory and descriptors of a process tree.

use std::fs;

use anyhow::{Context, Result};
use nix::unistd::Pid;

use super::process::{threads, tree};

/// The footprint of a process tree at a moment.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Footprint {
    /// Resident anonymous memory, KiB: `RssAnon` of proc_pid_status(5), equal to `Anonymous` in `smaps_rollup`. Excludes
    /// memory shared by front ends, which is in files.
    pub(crate) anonymous: u64,
    /// Page tables, KiB: `VmPTE`. Mostly those of the front ends' memory.
    pub(crate) page_tables: u64,
    /// Open descriptors.
    pub(crate) descriptors: u64,
    /// Threads, including the kernel's threads for it.
    pub(crate) threads: u64,
}

impl Footprint {
    /// Reads the footprint of the tree with root `root`.
    pub(crate) fn read(root: Pid) -> Result<Self> {
        let mut all = Self::default();
        for pid in tree(root) {
            let status = fs::read_to_string(format!("/proc/{pid}/status"))
                .with_context(|| format!("reading what process {pid} takes"))?;
            let kib =
                |name| field(&status, name).with_context(|| format!("no {name} of process {pid}"));
            all.anonymous += kib("RssAnon:")?;
            all.page_tables += kib("VmPTE:")?;
            let descriptors = fs::read_dir(format!("/proc/{pid}/fd"))
                .with_context(|| format!("counting the descriptors of process {pid}"))?;
            all.descriptors += descriptors.count() as u64;
            all.threads += threads(pid).count() as u64;
        }
        Ok(all)
    }
}

/// The machine's kernel objects (`Slab` of proc_meminfo(5)), KiB.
pub(crate) fn slab() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo").context("reading /proc/meminfo")?;
    field(&text, "Slab:").context("no Slab in /proc/meminfo")
}

/// The number after `name`, which begins a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let field = text.lines().find_map(|line| line.strip_prefix(name))?;
    field.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_and_descriptors_show_when_they_are_taken() {
        let before = Footprint::read(Pid::this()).unwrap();
        let memory = std::hint::black_box(vec![1u8; 32 << 20]);
        let files: Vec<_> = (0..100).map(|_| fs::File::open("/dev/null").unwrap()).collect();
        let after = Footprint::read(Pid::this()).unwrap();
        drop((memory, files));
        // Other tests run in parallel.
        assert!(after.anonymous >= before.anonymous + (24 << 10), "{before:?} {after:?}");
        assert!(after.descriptors >= before.descriptors + 80, "{before:?} {after:?}");
        assert!(after.threads > 0 && after.page_tables > 0 && slab().unwrap() > 0);
    }
}
