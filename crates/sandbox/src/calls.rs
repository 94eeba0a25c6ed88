//! The tables: the system calls that each kind of thread makes, with the reason.

use libc::c_long;

/// A set of kinds of threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Who(u8);

/// The control thread until the daemon serves, and the threads that it starts until then.
pub(crate) const START: Who = Who(1);
/// The control thread while the daemon serves, and the helpers that it starts.
pub(crate) const CONTROL: Who = Who(2);
/// An I/O thread.
pub(crate) const IO: Who = Who(4);
/// A pool thread of a loop, for calls that block.
pub(crate) const POOL: Who = Who(8);

/// The control thread at any time.
const MAIN: Who = Who(START.0 | CONTROL.0);
/// Threads with a loop.
const LOOPS: Who = Who(MAIN.0 | IO.0);
const ALL: Who = Who(LOOPS.0 | POOL.0);

impl Who {
    pub(crate) fn includes(self, other: Who) -> bool {
        self.0 & other.0 == other.0
    }
}

/// A condition on the arguments of a call. The kernel caches which calls a filter always allows, and skips the
/// filter for them. So the calls of the data path have no conditions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arguments {
    /// Any arguments.
    Any,
    /// The lower 32 bits of this argument (from 0) are one of these values.
    OneOf(u8, &'static [u64]),
    /// The lower 32 bits of this argument, masked, equal these bits: argument, mask, bits.
    Bits(u8, u64, u64),
    /// This argument is the id of this process.
    OwnPid(u8),
}

use Arguments::{Any, Bits, OneOf, OwnPid};

/// A line of the table.
pub(crate) struct Row {
    pub(crate) calls: &'static [(&'static str, c_long)],
    pub(crate) who: Who,
    pub(crate) arguments: Arguments,
    /// The reason.
    #[cfg_attr(not(test), expect(dead_code, reason = "documents the table"))]
    pub(crate) why: &'static str,
}

const fn row(
    who: Who,
    calls: &'static [(&'static str, c_long)],
    arguments: Arguments,
    why: &'static str,
) -> Row {
    Row { calls, who, arguments, why }
}

/// The names and numbers of calls.
macro_rules! calls {
    ($($name:ident),+ $(,)?) => {
        &[$((stringify!($name), libc::$name)),+]
    };
}

/// `AF_UNIX`, `AF_INET`, `AF_INET6`; getaddrinfo(3) reads the addresses of the machine by `AF_NETLINK`.
const FAMILIES: &[u64] =
    &[libc::AF_UNIX as u64, libc::AF_INET as u64, libc::AF_INET6 as u64, libc::AF_NETLINK as u64];

/// What a sandbox adds whose [`Reach`](crate::Reach) has vsock.
pub(crate) static VSOCK: Row =
    row(MAIN, calls![SYS_socket], OneOf(0, &[libc::AF_VSOCK as u64]), "NBD over vsock");

/// Of files: flags and the extent size (`FS_IOC_GETFLAGS`, `FS_IOC_SETFLAGS`, `FS_IOC_FSGETXATTR`, `FS_IOC_FSSETXATTR`).
const ATTRIBUTES: &[u64] = &[0x8008_6601, 0x4008_6602, 0x801c_581f, 0x401c_5820];

/// Of block devices: sizes (`BLKGETSIZE64`, `BLKSSZGET`, `BLKPBSZGET`, `BLKALIGNOFF`, `BLKROGET`), discarding
/// and zeroing (`BLKDISCARD`, `BLKZEROOUT`, `BLKDISCARDZEROES`); of descriptors: `FIONREAD`, `FIONBIO`;
/// whether output is a terminal, its size and its foreground process group: `TCGETS`, `TIOCGWINSZ`, `TCGETS2`,
/// `TIOCGPGRP`.
const REQUESTS: &[u64] = &[
    0x8008_1272,
    0x1268,
    0x127b,
    0x127a,
    0x125e,
    0x1277,
    0x127f,
    0x127c,
    0x541b,
    0x5421,
    0x5401,
    0x5413,
    0x802c_542a,
    0x540f,
];

/// Of VDUSE, on I/O threads: `VDUSE_IOTLB_GET_FD`, `VDUSE_VQ_INJECT_IRQ`.
const VDUSE_QUEUES: &[u64] = &[0xc020_8110, 0x4004_8117];
/// `VDUSE_SET_API_VERSION`, `VDUSE_CREATE_DEV`, `VDUSE_DESTROY_DEV`, `VDUSE_DEV_GET_FEATURES`, `VDUSE_DEV_SET_CONFIG`,
/// `VDUSE_DEV_INJECT_CONFIG_IRQ`, `VDUSE_VQ_SETUP`, `VDUSE_VQ_GET_INFO`, `VDUSE_VQ_SETUP_KICKFD`.
const VDUSE_DEVICES: &[u64] = &[
    0x4008_8101,
    0x4150_8102,
    0x4100_8103,
    0x8008_8111,
    0x4008_8112,
    0x8113,
    0x4020_8114,
    0xc030_8115,
    0x4008_8116,
];

/// `PR_SET_NAME`, `PR_GET_NAME`, `PR_SET_VMA` (glibc names its memory), and what the sandbox itself asks for:
/// `PR_SET_NO_NEW_PRIVS`, `PR_GET_NO_NEW_PRIVS`, `PR_CAPBSET_READ`; `PR_SET_TIMERSLACK` and
/// `PR_GET_TIMERSLACK` of I/O threads.
const PRCTL: &[u64] = &[15, 16, 0x5356_4d41, 38, 39, 23, 29, 30];
/// And while privileges are dropped: `PR_SET_KEEPCAPS`, `PR_CAPBSET_DROP`, `PR_CAP_AMBIENT`,
/// `PR_SET_DUMPABLE`.
const PRCTL_START: &[u64] = &[15, 16, 0x5356_4d41, 38, 39, 23, 29, 30, 8, 24, 47, 4];

/// `F_GETFD`, `F_SETFD`, `F_GETFL`, `F_SETFL`, `F_OFD_GETLK`, `F_OFD_SETLK`, `F_DUPFD_CLOEXEC`,
/// `F_ADD_SEALS`, `F_GET_SEALS`. Not `F_SETOWN`: the kernel would signal other processes for a thread.
const FCNTL: &[u64] = &[1, 2, 3, 4, 36, 37, 1030, 1033, 1034];

/// `IORING_REGISTER_*` of a ring in use, as `event-loop/src/ring/restrict.rs` has them: `FILES_UPDATE`,
/// `BUFFERS2`, `BUFFERS_UPDATE`.
const REGISTERING: &[u64] = &[6, 15, 16];

/// `TCP_NODELAY`, `SO_KEEPALIVE`, of accepted connections. Not `SO_ATTACH_FILTER`, which loads a
/// program into the kernel.
const SOCKET_OPTIONS: &[u64] = &[libc::TCP_NODELAY as u64, libc::SO_KEEPALIVE as u64];

/// Sending with this flag connects an unconnected TCP socket. Neither the filter of connect(2) nor Landlock sees
/// that connection.
const FAST_OPEN: u64 = libc::MSG_FASTOPEN as u64;

/// `SECCOMP_FILTER_FLAG_SPEC_ALLOW`. Not `SECCOMP_FILTER_FLAG_TSYNC`, which changes other threads, nor
/// `SECCOMP_FILTER_FLAG_NEW_LISTENER`, which lets another process answer calls.
const FILTER_FLAGS: &[u64] = &[4];

/// `PROT_EXEC`: no memory becomes executable.
const EXECUTABLE: u64 = libc::PROT_EXEC as u64;
/// Of clone(2): a thread of this process, in its namespaces.
const THREAD: u64 = (libc::CLONE_VM | libc::CLONE_THREAD) as u64;
const NAMESPACES: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u64;

/// Every call that is allowed.
pub(crate) static ALLOWED: &[Row] = &[
    // The loop.
    row(LOOPS, calls![SYS_io_uring_enter], Any, "the ring: once per iteration"),
    row(ALL, calls![SYS_write], Any, "wake-ups of loops, calls of guests; the log"),
    row(ALL, calls![SYS_futex], Any, "locks, joining threads"),
    row(IO, calls![SYS_io_uring_register], OneOf(1, REGISTERING), "file and buffer slots"),
    row(
        MAIN,
        calls![SYS_io_uring_setup, SYS_io_uring_register],
        Any,
        "rings that signal eventfds; rings of I/O threads, before those are confined",
    ),
    row(
        LOOPS,
        calls![SYS_epoll_create1, SYS_epoll_ctl, SYS_epoll_pwait, SYS_epoll_pwait2],
        Any,
        "loops where there is no io_uring",
    ),
    row(LOOPS, calls![SYS_read, SYS_eventfd2], Any, "eventfds; files while they are opened"),
    row(LOOPS, calls![SYS_ppoll], Any, "whether a descriptor is ready"),
    row(
        LOOPS,
        calls![SYS_io_setup, SYS_io_submit, SYS_io_getevents, SYS_io_cancel, SYS_io_destroy],
        Any,
        "aio=native",
    ),
    row(
        ALL,
        calls![SYS_clock_gettime, SYS_clock_nanosleep, SYS_nanosleep, SYS_gettimeofday],
        Any,
        "clocks that the vDSO cannot read",
    ),
    // Open files: pool threads (`event-loop/src/blocking.rs`), and queries at opening.
    row(
        ALL,
        calls![
            SYS_pread64,
            SYS_preadv,
            SYS_preadv2,
            SYS_pwrite64,
            SYS_pwritev,
            SYS_pwritev2,
            SYS_readv,
            SYS_writev,
        ],
        Any,
        "aio=threads; the log",
    ),
    row(ALL, calls![SYS_fsync, SYS_fdatasync], Any, "flushes on pool threads"),
    row(ALL, calls![SYS_fallocate, SYS_ftruncate], Any, "discard, zeroes, resize"),
    row(ALL, calls![SYS_lseek], Any, "block status; the size of a device"),
    row(ALL, calls![SYS_ioctl], OneOf(1, REQUESTS), "block devices; whether output is a terminal"),
    row(MAIN, calls![SYS_ioctl], OneOf(1, ATTRIBUTES), "files that are created"),
    row(LOOPS, calls![SYS_ioctl], OneOf(1, VDUSE_QUEUES), "memory and interrupts of VDUSE devices"),
    row(MAIN, calls![SYS_ioctl], OneOf(1, VDUSE_DEVICES), "VDUSE devices that are made and served"),
    row(ALL, calls![SYS_fstat], Any, "what a descriptor is"),
    row(LOOPS, calls![SYS_fstatfs], Any, "the size of a descriptor's pages"),
    // fstat(3) of glibc 2.33 and later. With a path the call would only stat a file.
    row(
        ALL,
        calls![SYS_newfstatat],
        Bits(3, libc::AT_EMPTY_PATH as u64, libc::AT_EMPTY_PATH as u64),
        "what a descriptor is",
    ),
    row(LOOPS, calls![SYS_close, SYS_dup], Any, "descriptors come and go"),
    row(LOOPS, calls![SYS_fcntl], OneOf(1, FCNTL), "descriptors and image locks"),
    row(LOOPS, calls![SYS_fadvise64], Any, "cache.direct=off"),
    // Open sockets.
    row(LOOPS, calls![SYS_recvfrom, SYS_recvmsg], Any, "front ends and NBD"),
    row(LOOPS, calls![SYS_sendto], Bits(3, FAST_OPEN, 0), "NBD"),
    row(LOOPS, calls![SYS_sendmsg], Bits(2, FAST_OPEN, 0), "front ends and NBD"),
    row(MAIN, calls![SYS_sendmmsg], Bits(3, FAST_OPEN, 0), "resolving host names"),
    row(
        LOOPS,
        calls![SYS_shutdown, SYS_getsockopt, SYS_getsockname, SYS_getpeername],
        Any,
        "connections come and go",
    ),
    row(IO, calls![SYS_setsockopt], OneOf(2, SOCKET_OPTIONS), "connections of NBD clients"),
    row(MAIN, calls![SYS_setsockopt], Any, "sockets that are made"),
    row(MAIN, calls![SYS_socket], OneOf(0, FAMILIES), "the nbd client"),
    row(MAIN, calls![SYS_connect], Any, "the nbd client; whether a socket has a listener"),
    // Memory and threads.
    row(ALL, calls![SYS_mmap], Bits(2, EXECUTABLE, 0), "malloc, stacks, guests' memory"),
    row(ALL, calls![SYS_mprotect], Bits(2, EXECUTABLE, 0), "malloc, stacks"),
    row(ALL, calls![SYS_munmap, SYS_mremap, SYS_brk, SYS_madvise], Any, "malloc, stacks"),
    row(ALL, calls![SYS_clone], Bits(0, THREAD | NAMESPACES, THREAD), "pool threads"),
    row(
        ALL,
        calls![
            SYS_set_robust_list,
            SYS_rseq,
            SYS_sigaltstack,
            SYS_rt_sigprocmask,
            SYS_exit,
            SYS_sched_getaffinity,
            SYS_membarrier,
        ],
        Any,
        "start and end of threads, by the libraries",
    ),
    row(ALL, calls![SYS_prctl], OneOf(0, PRCTL), "threads' names"),
    row(ALL, calls![SYS_getrandom], Any, "keys of hash tables, TLS"),
    row(ALL, calls![SYS_gettid, SYS_getpid, SYS_sched_yield, SYS_restart_syscall], Any, "harmless"),
    row(LOOPS, calls![SYS_prlimit64], OneOf(0, &[0]), "how many descriptors there may be"),
    row(ALL, calls![SYS_getgroups], Any, "whether the user has changed already"),
    row(ALL, calls![SYS_getuid, SYS_geteuid, SYS_getgid, SYS_getegid], Any, "the libraries ask"),
    // Signals and exit.
    row(ALL, calls![SYS_rt_sigreturn, SYS_rt_sigaction], Any, "SIGBUS and SIGSYS; abort(3)"),
    row(ALL, calls![SYS_tgkill], OwnPid(0), "abort(3), SIGBUS raised anew"),
    row(ALL, calls![SYS_exit_group], Any, "exit"),
    // The control plane: opens, listens, creates.
    row(
        MAIN,
        calls![
            SYS_openat,
            SYS_newfstatat,
            SYS_statx,
            SYS_readlinkat,
            SYS_getdents64,
            SYS_faccessat,
            SYS_faccessat2,
            SYS_getcwd,
            SYS_statfs,
        ],
        Any,
        "images, credentials, /proc",
    ),
    row(MAIN, calls![SYS_unlinkat, SYS_fchmod, SYS_fchmodat], Any, "sockets, the pid file"),
    row(
        MAIN,
        calls![SYS_socketpair, SYS_bind, SYS_listen, SYS_accept4, SYS_accept],
        Any,
        "exports, the NBD server, monitors, metrics",
    ),
    row(MAIN, calls![SYS_mkdirat, SYS_flock], Any, "journals of qcow2 images"),
    row(MAIN, calls![SYS_memfd_create], Any, "records of requests in flight"),
    row(
        MAIN,
        calls![SYS_signalfd4, SYS_pipe2, SYS_dup3],
        Any,
        "signals; detaching from the terminal",
    ),
    row(MAIN, calls![SYS_uname, SYS_sysinfo, SYS_getrusage, SYS_times], Any, "statistics"),
    row(
        MAIN,
        calls![SYS_mlock, SYS_munlock, SYS_getpriority, SYS_getppid, SYS_umask],
        Any,
        "libcryptsetup, which librbd decrypts images with: keys out of swap space, the device mapper's control node",
    ),
    row(
        MAIN,
        calls![SYS_sched_setaffinity, SYS_sched_setscheduler, SYS_setpriority],
        Any,
        "start of I/O threads",
    ),
    // None of these calls widens what a thread can do.
    row(LOOPS, calls![SYS_seccomp], OneOf(1, FILTER_FLAGS), "new threads confine themselves"),
    row(
        LOOPS,
        calls![
            SYS_capget,
            SYS_capset,
            SYS_landlock_create_ruleset,
            SYS_landlock_add_rule,
            SYS_landlock_restrict_self,
        ],
        Any,
        "new threads confine themselves",
    ),
    row(
        MAIN,
        calls![SYS_copy_file_range, SYS_renameat2, SYS_linkat],
        Any,
        "creating images, the pid file",
    ),
    // Only until the daemon serves.
    row(
        START,
        calls![SYS_setgroups, SYS_setresuid, SYS_setresgid, SYS_chdir],
        Any,
        "--user, --daemonize",
    ),
    row(START, calls![SYS_fchown, SYS_fchownat], Any, "--user: journals of qcow2 images"),
    row(START, calls![SYS_prctl], OneOf(0, PRCTL_START), "dropping privileges"),
    #[cfg(target_arch = "x86_64")]
    row(
        LOOPS,
        calls![SYS_poll, SYS_epoll_wait, SYS_epoll_create],
        Any,
        "as ppoll, epoll_pwait and epoll_create1",
    ),
    #[cfg(target_arch = "x86_64")]
    row(ALL, calls![SYS_arch_prctl], OneOf(0, &[0x3001]), "whether a thread has a shadow stack"),
    #[cfg(target_arch = "x86_64")]
    row(
        MAIN,
        calls![
            SYS_open,
            SYS_stat,
            SYS_lstat,
            SYS_readlink,
            SYS_access,
            SYS_unlink,
            SYS_dup2,
            SYS_chmod,
            SYS_rename,
            SYS_mkdir,
            SYS_time,
        ],
        Any,
        "older forms of calls above",
    ),
];

/// Calls that end the process. Neither the daemon nor its libraries make them in any case; injected code would.
pub(crate) static DEADLY: &[(&str, c_long)] = calls![
    SYS_execve,
    SYS_execveat,
    SYS_ptrace,
    SYS_process_vm_readv,
    SYS_process_vm_writev,
    SYS_process_madvise,
    SYS_pidfd_getfd,
    SYS_kcmp,
    SYS_bpf,
    SYS_perf_event_open,
    SYS_userfaultfd,
    SYS_init_module,
    SYS_finit_module,
    SYS_delete_module,
    SYS_kexec_load,
    SYS_kexec_file_load,
    SYS_reboot,
    SYS_mount,
    SYS_umount2,
    SYS_pivot_root,
    SYS_chroot,
    SYS_move_mount,
    SYS_open_tree,
    SYS_fsopen,
    SYS_fspick,
    SYS_fsmount,
    SYS_fsconfig,
    SYS_mount_setattr,
    SYS_unshare,
    SYS_setns,
    SYS_open_by_handle_at,
    SYS_name_to_handle_at,
    SYS_add_key,
    SYS_request_key,
    SYS_keyctl,
    SYS_personality,
    SYS_swapon,
    SYS_swapoff,
    SYS_acct,
    SYS_quotactl,
    SYS_syslog,
    SYS_settimeofday,
    SYS_clock_settime,
    SYS_adjtimex,
    SYS_clock_adjtime,
    SYS_sethostname,
    SYS_setdomainname,
    SYS_vhangup,
    SYS_lookup_dcookie,
    SYS_nfsservctl,
    SYS_remap_file_pages,
    SYS_fanotify_init,
    SYS_fanotify_mark,
];

/// Deadly calls that only this architecture has.
#[cfg(target_arch = "x86_64")]
pub(crate) static DEADLY_HERE: &[(&str, c_long)] = calls![
    SYS_fork,
    SYS_vfork,
    SYS_iopl,
    SYS_ioperm,
    SYS_modify_ldt,
    SYS_uselib,
    SYS_ustat,
    SYS_sysfs,
    SYS__sysctl
];
#[cfg(not(target_arch = "x86_64"))]
pub(crate) static DEADLY_HERE: &[(&str, c_long)] = &[];

/// Calls that fail with ENOSYS, without a log line.
///
/// - clone3: the C library falls back to clone(2), whose flags a filter can check.
/// - mknod, mknodat: on a host without the device mapper, libcryptsetup tries to make /dev/mapper/control for an
///   encrypted RBD image, and does without it.
pub(crate) static MISSING: &[(&str, c_long)] = calls![SYS_clone3, SYS_mknodat];

/// These too. Other architectures lack them.
#[cfg(target_arch = "x86_64")]
pub(crate) static MISSING_HERE: &[(&str, c_long)] = calls![SYS_mknod];
#[cfg(not(target_arch = "x86_64"))]
pub(crate) static MISSING_HERE: &[(&str, c_long)] = &[];

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(who: Who) -> Vec<c_long> {
        let rows = ALLOWED.iter().filter(|row| row.who.includes(who));
        rows.flat_map(|row| row.calls).map(|(_, number)| *number).collect()
    }

    #[test]
    fn dangerous_and_unknown_calls_are_never_allowed() {
        for who in [START, CONTROL, IO, POOL] {
            for (name, number) in
                DEADLY.iter().chain(DEADLY_HERE).chain(MISSING).chain(MISSING_HERE)
            {
                assert!(!numbers(who).contains(number), "{name}: {who:?}");
            }
        }
    }

    #[test]
    fn threads_may_do_less_than_their_creators() {
        for (who, starter) in [(CONTROL, START), (IO, CONTROL), (POOL, IO)] {
            let wider = numbers(starter);
            assert!(numbers(who).iter().all(|number| wider.contains(number)), "{who:?}");
            assert!(numbers(who).len() < wider.len(), "{who:?}");
        }
    }

    #[test]
    fn each_row_says_why() {
        assert!(ALLOWED.iter().all(|row| !row.why.is_empty() && !row.calls.is_empty()));
    }

    /// These calls belong to the control plane alone.
    #[test]
    fn an_io_thread_opens_nothing() {
        for number in [
            libc::SYS_openat,
            libc::SYS_unlinkat,
            libc::SYS_bind,
            libc::SYS_socket,
            libc::SYS_connect,
            libc::SYS_io_uring_setup,
        ] {
            assert!(!numbers(IO).contains(&number), "{number}");
            assert!(numbers(CONTROL).contains(&number), "{number}");
        }
    }
}
