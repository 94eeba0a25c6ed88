//! The C library's heap.

#![allow(unsafe_code)]

#[cfg(all(target_env = "gnu", not(miri)))]
mod limits {
    /// Bytes at the end of each thread's heap that are kept for the next allocations.
    pub(super) const KEPT: i32 = 4 << 20;

    /// Allocations of at least so many bytes are separate mappings, given back when they are freed.
    pub(super) const MAPPED: i32 = 4 << 20;
}

/// Bounds what the heap keeps for the next allocations.
///
/// By default the C library raises both limits, up to 32 and 64 MiB, with each large allocation that is freed. Without
/// effect on C libraries other than glibc.
pub fn bound_heap() {
    #[cfg(all(target_env = "gnu", not(miri)))]
    // SAFETY: takes no pointer.
    unsafe {
        libc::mallopt(libc::M_TRIM_THRESHOLD, limits::KEPT);
        libc::mallopt(libc::M_MMAP_THRESHOLD, limits::MAPPED);
    }
}

/// Returns unused pages of the heap to the system, which may take milliseconds.
///
/// After many allocations were freed: the C library keeps the pages between those that remain. Other threads wait for
/// their allocations meanwhile. Without effect on C libraries other than glibc.
pub fn trim_heap() {
    #[cfg(all(target_env = "gnu", not(miri)))]
    // SAFETY: takes no pointer, and changes no allocation.
    unsafe {
        libc::malloc_trim(0);
    }
}
