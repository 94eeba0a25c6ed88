//! Prepares the C library for threads that may not open files.

#![allow(unsafe_code)]

/// Heaps per CPU of glibc's malloc, by default. Further threads share them.
#[cfg(target_env = "gnu")]
const HEAPS_PER_CPU: usize = 8;

/// Sets the number of heaps that glibc would choose by itself. Otherwise glibc counts the CPUs by a file of
/// /sys when a thread first needs a heap.
#[cfg(target_env = "gnu")]
pub(crate) fn prepare() {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let heaps = i32::try_from(cpus * HEAPS_PER_CPU).unwrap_or(i32::MAX);
    // SAFETY: mallopt(3) takes numbers; there are no other threads that allocate.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, heaps) };
}

/// Other C libraries need no preparation.
#[cfg(not(target_env = "gnu"))]
pub(crate) fn prepare() {}
