//! What the kernel has, asked by tests themselves: the sandbox could be wrong about it.

#![allow(unsafe_code)]

use std::ptr;

/// What the sandbox asks of Landlock is all there from this version on.
const ALL: i32 = 6;

/// The version of Landlock; 0: none, or not enabled at boot. Says so where there is less than the sandbox asks for.
pub(crate) fn landlock_of_the_kernel() -> i32 {
    // linux/landlock.h
    const LANDLOCK_CREATE_RULESET_VERSION: u32 = 1;
    let flags = LANDLOCK_CREATE_RULESET_VERSION;
    // SAFETY: with this flag nothing is read and nothing made.
    let version = unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, ptr::null::<u8>(), 0usize, flags)
    };
    let version = i32::try_from(version).unwrap_or(0).max(0);
    if version < ALL {
        test_requirements::untested(
            test_requirements::Needs::Landlock,
            format_args!("the kernel's is of version {version}, not {ALL}"),
        );
    }
    version
}
