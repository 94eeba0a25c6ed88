//! What the kernel has, asked by tests themselves: the sandbox could be wrong about it.

#![allow(unsafe_code)]

use std::ptr;

/// The version of Landlock; 0: none, or not enabled at boot.
pub(crate) fn landlock_of_the_kernel() -> i32 {
    // linux/landlock.h
    const LANDLOCK_CREATE_RULESET_VERSION: u32 = 1;
    let flags = LANDLOCK_CREATE_RULESET_VERSION;
    // SAFETY: with this flag nothing is read and nothing made.
    let version = unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, ptr::null::<u8>(), 0usize, flags)
    };
    i32::try_from(version).unwrap_or(0).max(0)
}
