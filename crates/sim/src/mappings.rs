//! What of guests' memory a process had mapped that was killed: it is unmapped, as the kernel does it.

#![allow(unsafe_code)]

use std::collections::BTreeSet;

/// Memory that is a guest's, or kept by one, by the names of its files.
const NAMES: &[&str] = &["/memfd:sim-guest", "/memfd:ringmill-inflight"];

/// Unmaps all such memory but what begins at one of these addresses.
pub(crate) fn unmap_others(kept: &BTreeSet<usize>) {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("a list of mappings");
    for line in maps.lines().filter(|line| NAMES.iter().any(|name| line.contains(name))) {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let parse = |text| usize::from_str_radix(text, 16).ok();
        let Some((start, end)) = range.and_then(|(a, b)| Some((parse(a)?, parse(b)?))) else {
            continue;
        };
        if !kept.contains(&start) {
            // SAFETY: only a daemon that was killed had this mapped, and none of its code runs again.
            unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(start), end - start) };
        }
    }
}
