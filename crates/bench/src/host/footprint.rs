//! What a process tree takes of the machine's memory and descriptors.

use std::fs;

use anyhow::{Context, Result};
use nix::unistd::Pid;

use super::process::{threads, tree};

/// What a process tree has, at a moment.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Footprint {
    /// Resident memory that is no file's and not shared, KiB: `RssAnon` of proc_pid_status(5), the same
    /// number as `Anonymous` in `smaps_rollup`. What a front end shares is in a file, so not in here.
    pub(crate) anonymous: u64,
    /// Page tables, KiB: `VmPTE`. Those for the front ends' memory are the larger part.
    pub(crate) page_tables: u64,
    /// Open descriptors.
    pub(crate) descriptors: u64,
    /// Threads, those included that the kernel has for it.
    pub(crate) threads: u64,
}

impl Footprint {
    /// Of the tree whose root is `root`.
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

/// The machine's kernel memory in objects (`Slab` of proc_meminfo(5)), KiB.
pub(crate) fn slab() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo").context("reading /proc/meminfo")?;
    field(&text, "Slab:").context("no Slab in /proc/meminfo")
}

/// The number after `name` at the beginning of a line.
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
        // Other tests run beside this one.
        assert!(after.anonymous >= before.anonymous + (24 << 10), "{before:?} {after:?}");
        assert!(after.descriptors >= before.descriptors + 80, "{before:?} {after:?}");
        assert!(after.threads > 0 && after.page_tables > 0 && slab().unwrap() > 0);
    }
}
