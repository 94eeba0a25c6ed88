//! Unmaps the guests' memory of a killed daemon, as the kernel does for a killed process.

#![allow(unsafe_code)]

use std::collections::BTreeSet;

/// Files of memory that belongs to a guest, or that a guest keeps.
const NAMES: &[&str] = &["/memfd:sim-guest", "/memfd:ringmill-inflight"];

/// Unmaps all such memory, except mappings that begin at an address in `kept`.
pub(crate) fn unmap_others(kept: &BTreeSet<usize>) {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("a list of mappings");
    for line in maps.lines().filter(|line| NAMES.iter().any(|name| line.contains(name))) {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let parse = |text| usize::from_str_radix(text, 16).ok();
        let Some((start, end)) = range.and_then(|(a, b)| Some((parse(a)?, parse(b)?))) else {
            continue;
        };
        if !kept.contains(&start) {
            // SAFETY: only a killed daemon had this mapped, and its code never runs again.
            unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(start), end - start) };
        }
    }
}
