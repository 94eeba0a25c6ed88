//! User, groups and capabilities of the calling thread.
//!
//! The kernel keeps all three per thread. This module uses the system calls directly: the C library's functions
//! would have all other threads make the same calls, which the filters of those threads refuse.

#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::ffi::{c_int, c_long, c_ulong};
use std::io;

/// A step of the confinement that failed.
#[derive(Debug)]
pub struct Failed {
    /// The system call, or what it was for.
    pub call: &'static str,
    /// Why it failed.
    pub error: io::Error,
}

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} failed: {}", self.call, self.error)
    }
}

impl std::error::Error for Failed {}

/// The most groups that a process can have (`NGROUPS_MAX`).
const GROUPS: usize = 1 << 16;

fn check(call: &'static str, result: c_long) -> Result<(), Failed> {
    if result < 0 { Err(Failed { call, error: io::Error::last_os_error() }) } else { Ok(()) }
}

/// User and groups of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The user's ID.
    pub uid: u32,
    /// The ID of the user's primary group.
    pub gid: u32,
    /// Its supplementary groups.
    pub groups: Vec<u32>,
}

impl Identity {
    /// Returns whether the calling thread has, or may change to, this user and these groups.
    ///
    /// # Errors
    ///
    /// The system call that failed, and its errno.
    pub fn is_possible(&self) -> Result<bool, Failed> {
        let needed = Capabilities::SETUID.and(Capabilities::SETGID);
        Ok(is(self)? || Capabilities::own()?.only(needed) == needed)
    }
}

/// Capabilities of capabilities(7), a bit each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Capabilities(u64);

impl Capabilities {
    /// None.
    pub const NONE: Capabilities = Capabilities(0);
    /// Opens files whatever their permissions.
    pub const DAC_OVERRIDE: Capabilities = Capabilities(1 << 1);
    /// Changes groups.
    const SETGID: Capabilities = Capabilities(1 << 6);
    /// Changes the user.
    const SETUID: Capabilities = Capabilities(1 << 7);
    /// Changes the bounding set.
    const SETPCAP: Capabilities = Capabilities(1 << 8);
    /// Listens on ports below 1024.
    pub const NET_BIND_SERVICE: Capabilities = Capabilities(1 << 10);
    /// Pins memory beyond `RLIMIT_MEMLOCK`.
    pub const IPC_LOCK: Capabilities = Capabilities(1 << 14);

    const NAMES: [(Capabilities, &str); 3] = [
        (Self::DAC_OVERRIDE, "DAC_OVERRIDE"),
        (Self::NET_BIND_SERVICE, "NET_BIND_SERVICE"),
        (Self::IPC_LOCK, "IPC_LOCK"),
    ];

    /// Returns the union of both sets.
    #[must_use]
    pub const fn and(self, others: Capabilities) -> Capabilities {
        Capabilities(self.0 | others.0)
    }

    /// Returns the intersection of both sets.
    #[must_use]
    pub const fn only(self, others: Capabilities) -> Capabilities {
        Capabilities(self.0 & others.0)
    }

    /// Returns the names, without the prefix `CAP_` of capabilities(7).
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        let own = Self::NAMES.into_iter().filter(move |(one, _)| self.0 & one.0 != 0);
        own.map(|(_, name)| name)
    }

    /// The permitted set of the calling thread.
    fn own() -> Result<Capabilities, Failed> {
        let (mut header, mut data) = (Header::OWN, [Data::default(); 2]);
        // SAFETY: capget(2) reads and writes the header and writes two sets, as version 3 has them; both
        // live across the call.
        let result = unsafe { libc::syscall(libc::SYS_capget, &raw mut header, data.as_mut_ptr()) };
        check("capget", result)?;
        let [low, high] = data.map(|data| u64::from(data.permitted));
        Ok(Capabilities(low | high << 32))
    }
}

impl std::fmt::Display for Capabilities {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut separator = "";
        for name in self.names() {
            write!(f, "{separator}{name}")?;
            separator = "+";
        }
        if separator.is_empty() { f.write_str("none") } else { Ok(()) }
    }
}

/// `struct __user_cap_header_struct`.
#[repr(C)]
struct Header {
    version: u32,
    pid: c_int,
}

impl Header {
    /// `_LINUX_CAPABILITY_VERSION_3`, of the calling thread.
    const OWN: Header = Header { version: 0x2008_0522, pid: 0 };
}

/// `struct __user_cap_data_struct`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Data {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

fn prctl(call: &'static str, option: c_int, argument: c_ulong) -> Result<(), Failed> {
    let zero: c_ulong = 0;
    // SAFETY: the options used here take numbers.
    let result = unsafe { libc::prctl(option, argument, zero, zero, zero) };
    check(call, result.into())
}

/// Sets no_new_privs: executing a program grants no privilege, on this thread and on its children. The kernel
/// requires it before an unprivileged thread installs a filter.
pub(crate) fn no_new_privileges() -> Result<(), Failed> {
    prctl("prctl(PR_SET_NO_NEW_PRIVS)", libc::PR_SET_NO_NEW_PRIVS, 1)
}

/// Changes the calling thread, and its later children, to `identity`, and drops all capabilities but `keep`.
/// Returns the capabilities that are left: those of `keep` that the thread had.
pub(crate) fn drop_all_but(
    identity: Option<&Identity>,
    keep: Capabilities,
) -> Result<Capabilities, Failed> {
    let own = Capabilities::own()?;
    let kept = Capabilities(own.0 & keep.0);
    if own.0 & Capabilities::SETPCAP.0 != 0 {
        drop_bounding();
    }
    // A thread inherits the user of its parent, which may have changed already.
    if let Some(identity) = identity
        && !is(identity)?
    {
        // Without it the kernel clears the capabilities when the user changes.
        prctl("prctl(PR_SET_KEEPCAPS)", libc::PR_SET_KEEPCAPS, 1)?;
        become_(identity)?;
    }
    set(kept)?;
    Ok(kept)
}

/// Empties the ambient and the bounding set, which needs CAP_SETPCAP. Without that capability both stay as they
/// are, without harm: the daemon executes no program.
fn drop_bounding() {
    let mut capability = 0;
    // SAFETY: these take numbers. The first number that is no capability ends the loop.
    unsafe {
        let clear = libc::PR_CAP_AMBIENT_CLEAR_ALL as c_ulong;
        let zero: c_ulong = 0;
        libc::prctl(libc::PR_CAP_AMBIENT, clear, zero, zero, zero);
        while libc::prctl(libc::PR_CAPBSET_DROP, capability, zero, zero, zero) == 0 {
            capability += 1;
        }
    }
}

/// Whether the calling thread has this user and these groups, in any order.
fn is(identity: &Identity) -> Result<bool, Failed> {
    let mut groups = vec![0; GROUPS];
    // SAFETY: these take nothing and cannot fail.
    let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
    // SAFETY: getgroups(2) writes at most the given number of ids, to memory that lives across the call.
    let count = unsafe { libc::getgroups(GROUPS as c_int, groups.as_mut_ptr()) };
    check("getgroups", count.into())?;
    let set = |groups: &[u32], gid| groups.iter().copied().chain([gid]).collect::<BTreeSet<_>>();
    let same_groups = set(&groups[..count as usize], gid) == set(&identity.groups, identity.gid);
    Ok(uid == identity.uid && gid == identity.gid && same_groups)
}

fn become_(identity: &Identity) -> Result<(), Failed> {
    let Identity { uid, gid, groups } = identity;
    // SAFETY: setgroups(2) reads the given number of ids, from memory that lives across the call; the others take
    // numbers. Groups first: the new user may not change them.
    unsafe {
        let result = libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr());
        check("setgroups", result)?;
        check("setresgid", libc::syscall(libc::SYS_setresgid, *gid, *gid, *gid))?;
        check("setresuid", libc::syscall(libc::SYS_setresuid, *uid, *uid, *uid))
    }
}

fn set(capabilities: Capabilities) -> Result<(), Failed> {
    let half = |bits: u64| {
        let bits = (bits & u64::from(u32::MAX)) as u32;
        Data { effective: bits, permitted: bits, inheritable: 0 }
    };
    let data = [half(capabilities.0), half(capabilities.0 >> 32)];
    let mut header = Header::OWN;
    // SAFETY: capset(2) reads the header and two sets, as version 3 has them; both live across the call.
    let result = unsafe { libc::syscall(libc::SYS_capset, &raw mut header, data.as_ptr()) };
    check("capset", result)
}
