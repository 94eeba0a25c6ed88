//! Settings of glibc's heap.

#![allow(unsafe_code)]

/// From this size on, bytes, an allocation has pages of its own.
const OWN_PAGES: libc::c_int = 1 << 20;
/// Free memory at the end of the heap that the process keeps, bytes.
const KEPT: libc::c_int = 64 << 20;

/// Keeps the buffers of jobs, 1 MiB each, out of the heap: fresh pages are zero, and most of a buffer is never touched.
/// glibc would move them to the heap after the first one, and clear each as a whole.
pub(crate) fn set_up() {
    for (setting, value) in [(libc::M_MMAP_THRESHOLD, OWN_PAGES), (libc::M_TRIM_THRESHOLD, KEPT)] {
        // SAFETY: no other thread allocates yet.
        let is_set = unsafe { libc::mallopt(setting, value) };
        assert_eq!(is_set, 1, "mallopt");
    }
}
