//! What the libraries would look for later, from threads that may not.

#![allow(unsafe_code)]

/// How many heaps glibc's malloc has per CPU, before it shares them out among the threads.
#[cfg(target_env = "gnu")]
const HEAPS_PER_CPU: usize = 8;

/// glibc opens a file of /sys to count the CPUs, as soon as a thread wants a heap of its own, unless it is
/// told how many heaps there may be: here as many as it would find.
#[cfg(target_env = "gnu")]
pub(crate) fn prepare() {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let heaps = i32::try_from(cpus * HEAPS_PER_CPU).unwrap_or(i32::MAX);
    // SAFETY: mallopt(3) takes numbers; there are no other threads that allocate.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, heaps) };
}

/// Nothing.
#[cfg(not(target_env = "gnu"))]
pub(crate) fn prepare() {}
