//! Each kind of thread, and what somebody who has taken it over would try: run by a program of its own for each,
//! since some of it ends the program.

#![allow(unsafe_code)]

use std::ffi::{c_int, c_long};
use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, exit};
use std::{env, io, ptr, thread};

use sandbox::{Beneath, Config, Purpose, Reach, Sandbox};

/// What becomes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// It is carried out.
    Done,
    /// It fails with this errno.
    Fails(c_int),
    /// The process ends by SIGSYS.
    Deadly,
}

use End::{Deadly, Done, Fails};

const REFUSED: End = Fails(libc::EPERM);
/// By Landlock.
const DENIED: End = Fails(libc::EACCES);

const KINDS: [&str; 4] = ["start", "control", "io", "pool"];

/// A call; what becomes of it on each of `KINDS`.
type Case = (&'static str, fn() -> c_long, [End; 4]);

/// The control thread can read /proc and nothing else.
const CASES: &[Case] = &[
    ("openat of a file that was named", || open("/proc/self/stat"), [Done, Done, REFUSED, REFUSED]),
    ("openat of another", || open("/etc/passwd"), [Done, DENIED, REFUSED, REFUSED]),
    ("unlinkat", || call(libc::SYS_unlinkat, [-1, 0, 0, 0]), [BAD, BAD, REFUSED, REFUSED]),
    ("socket of TCP", || socket(libc::AF_INET), [Done, Done, REFUSED, REFUSED]),
    ("connect by TCP", connect_by_tcp, [NOBODY, DENIED, REFUSED, REFUSED]),
    ("socket of packets", || socket(libc::AF_PACKET), [REFUSED; 4]),
    ("bind", || call(libc::SYS_bind, [-1, 0, 0, 0]), [FD, FD, REFUSED, REFUSED]),
    ("io_uring_setup", || call(libc::SYS_io_uring_setup, [0; 4]), [BAD, BAD, REFUSED, REFUSED]),
    ("io_uring_enter", || call(libc::SYS_io_uring_enter, [-1, 0, 0, 0]), [FD, FD, FD, REFUSED]),
    // A place of a file; a ring's eventfd.
    (
        "io_uring_register",
        || call(libc::SYS_io_uring_register, [9999, 6, 0, 0]),
        [FD, FD, FD, REFUSED],
    ),
    (
        "registering more",
        || call(libc::SYS_io_uring_register, [9999, 4, 0, 0]),
        [FD, FD, REFUSED, REFUSED],
    ),
    ("fcntl(F_GETFL)", || call(libc::SYS_fcntl, [-1, 3, 0, 0]), [FD, FD, FD, REFUSED]),
    ("fcntl(F_SETOWN)", || call(libc::SYS_fcntl, [0, 8, 1, 0]), [REFUSED; 4]),
    ("fcntl(F_SETSIG)", || call(libc::SYS_fcntl, [0, 10, 9, 0]), [REFUSED; 4]),
    ("sendto", || call(libc::SYS_sendto, [-1, 0, 0, NO_SIGNAL]), [FD, FD, FD, REFUSED]),
    ("sendto that connects", || call(libc::SYS_sendto, [-1, 0, 0, FAST_OPEN]), [REFUSED; 4]),
    ("sendmsg that connects", || call(libc::SYS_sendmsg, [-1, 0, FAST_OPEN, 0]), [REFUSED; 4]),
    ("setsockopt(TCP_NODELAY)", || set_option(6, 1), [FD, FD, FD, REFUSED]),
    ("setsockopt(SO_ATTACH_FILTER)", || set_option(1, 26), [FD, FD, REFUSED, REFUSED]),
    ("a filter for other threads", || call(libc::SYS_seccomp, [1, 1, 0, 0]), [REFUSED; 4]),
    ("a filter that asks", || call(libc::SYS_seccomp, [1, 8, 0, 0]), [REFUSED; 4]),
    ("mprotect to code", || call(libc::SYS_mprotect, [0, 0, 4, 0]), [REFUSED; 4]),
    ("memfd_create", || call(libc::SYS_memfd_create, [0; 4]), [BAD, BAD, REFUSED, REFUSED]),
    ("dup of what is not there", || call(libc::SYS_dup, [-1, 0, 0, 0]), [FD, FD, FD, REFUSED]),
    ("pidfd_open", || call(libc::SYS_pidfd_open, [1, 0, 0, 0]), [REFUSED; 4]),
    ("shmget", || call(libc::SYS_shmget, [0; 4]), [REFUSED; 4]),
    ("prctl(PR_SET_PDEATHSIG)", || call(libc::SYS_prctl, [1, 9, 0, 0]), [REFUSED; 4]),
    ("prctl(PR_SET_MM)", || call(libc::SYS_prctl, [35, 0, 0, 0]), [REFUSED; 4]),
    ("fsync", || call(libc::SYS_fsync, [-1, 0, 0, 0]), [FD; 4]),
    ("mmap of code", || map(libc::PROT_READ | libc::PROT_EXEC), [REFUSED; 4]),
    ("mmap of data", || map(libc::PROT_READ), [Done; 4]),
    ("ioctl of a terminal", || call(libc::SYS_ioctl, [0, 0x5412, 0, 0]), [REFUSED; 4]),
    ("clone of a process", || call(libc::SYS_clone, [17, 0, 0, 0]), [REFUSED; 4]),
    ("clone3", || call(libc::SYS_clone3, [0; 4]), [Fails(libc::ENOSYS); 4]),
    ("kill", || call(libc::SYS_kill, [1, 0, 0, 0]), [REFUSED; 4]),
    ("tgkill of another process", || call(libc::SYS_tgkill, [1, 1, 0, 0]), [REFUSED; 4]),
    ("setresuid", || call(libc::SYS_setresuid, [-1, -1, -1, 0]), [Done, REFUSED, REFUSED, REFUSED]),
    ("execve", || call(libc::SYS_execve, [0; 4]), [Deadly; 4]),
    ("ptrace", || call(libc::SYS_ptrace, [0; 4]), [Deadly; 4]),
    ("bpf", || call(libc::SYS_bpf, [0; 4]), [Deadly; 4]),
    ("mount", || call(libc::SYS_mount, [0; 4]), [Deadly; 4]),
    ("unshare", || call(libc::SYS_unshare, [0; 4]), [Deadly; 4]),
    ("userfaultfd", || call(libc::SYS_userfaultfd, [0; 4]), [Deadly; 4]),
    ("pidfd_getfd", || call(libc::SYS_pidfd_getfd, [0; 4]), [Deadly; 4]),
    ("process_vm_readv", || call(libc::SYS_process_vm_readv, [0; 4]), [Deadly; 4]),
];

const NO_SIGNAL: c_long = libc::MSG_NOSIGNAL as c_long;
const FAST_OPEN: c_long = libc::MSG_FASTOPEN as c_long;

const BAD: End = Fails(libc::EFAULT);
const FD: End = Fails(libc::EBADF);
const NOBODY: End = Fails(libc::ECONNREFUSED);

fn call(number: c_long, arguments: [c_long; 4]) -> c_long {
    let [a, b, c, d] = arguments;
    // SAFETY: none of the calls above is given memory to write to, or a descriptor that is somebody's.
    unsafe { libc::syscall(number, a, b, c, d, 0, 0) }
}

fn open(path: &str) -> c_long {
    match File::open(path) {
        Ok(_) => 0,
        Err(_) => -1,
    }
}

fn socket(family: c_int) -> c_long {
    call(libc::SYS_socket, [family.into(), libc::SOCK_STREAM.into(), 0, 0])
}

/// Of a socket that is none.
fn set_option(level: c_long, option: c_long) -> c_long {
    call(libc::SYS_setsockopt, [-1, level, option, 0])
}

/// To a port on which nobody listens.
fn connect_by_tcp() -> c_long {
    let fd = socket(libc::AF_INET);
    if fd < 0 {
        return call(libc::SYS_connect, [-1, 0, 0, 0]);
    }
    // SAFETY: a structure of numbers, for which zeroes are valid.
    let mut address: libc::sockaddr_in = unsafe { std::mem::zeroed() };
    address.sin_family = libc::AF_INET as u16;
    address.sin_port = 1u16.to_be();
    address.sin_addr.s_addr = u32::from_ne_bytes([127, 0, 0, 1]);
    let size = size_of_val(&address) as c_long;
    // SAFETY: connect(2) reads the address, which lives across the call.
    unsafe { libc::syscall(libc::SYS_connect, fd, &raw const address, size) }
}

fn map(protection: c_int) -> c_long {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the kernel chooses the place; nobody uses it.
    let at = unsafe { libc::mmap(ptr::null_mut(), 4096, protection, flags, -1, 0) };
    if at == libc::MAP_FAILED { -1 } else { 0 }
}

/// In a program of its own: becomes a thread of that kind and makes the call.
fn attempt(kind: &str, number: usize) -> End {
    let proc = Beneath { path: "/proc".into(), purpose: Purpose::Read };
    let reach = Reach { files: Some(vec![proc]), connect: Some(Vec::new()) };
    let sandbox = Sandbox::begin(Config { reach, ..Config::default() }).expect("a sandbox");
    let on_thread = |confine: fn(&Sandbox), number: usize| {
        let attempt = || {
            confine(&sandbox);
            outcome(CASES[number].1)
        };
        thread::scope(|scope| scope.spawn(attempt).join().expect("the thread's end"))
    };
    match kind {
        "start" => outcome(CASES[number].1),
        "control" => {
            let in_force = sandbox.serve(true).expect("less");
            eprintln!("{in_force}");
            outcome(CASES[number].1)
        }
        "io" => on_thread(|sandbox| sandbox.io_thread().expect("less"), number),
        _ => on_thread(|sandbox| sandbox.pool_thread().expect("less"), number),
    }
}

fn outcome(make: fn() -> c_long) -> End {
    if make() >= 0 {
        return Done;
    }
    Fails(io::Error::last_os_error().raw_os_error().unwrap_or(0))
}

/// Runs this program anew.
fn run(kind: &str, number: usize) -> (ExitStatus, String) {
    let program = env::current_exe().expect("a path");
    let output = Command::new(program).args(["attempt", kind, &number.to_string()]).output();
    let output = output.expect("it runs");
    (output.status, String::from_utf8_lossy(&output.stderr).into_owned())
}

fn end_of(status: ExitStatus) -> Option<End> {
    match (status.code(), status.signal()) {
        (Some(0), _) => Some(Done),
        (Some(errno), _) => Some(Fails(errno)),
        (None, Some(libc::SIGSYS)) => Some(Deadly),
        _ => None,
    }
}

/// 0: there is none.
fn landlock_version(in_force: &str) -> u32 {
    let after = in_force.split("Landlock ABI ").nth(1).unwrap_or_default();
    after.split(' ').next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

fn main() {
    let arguments: Vec<String> = env::args().collect();
    if let [_, what, kind, number] = arguments.as_slice()
        && what == "attempt"
    {
        match attempt(kind, number.parse().expect("a number")) {
            Done => exit(0),
            Fails(errno) => exit(errno),
            Deadly => unreachable!("it is the process's end"),
        }
    }
    // A kernel without Landlock, or with an early one, leaves more to the control thread.
    let version = landlock_version(&run("control", 0).1);
    let mut wrong = 0;
    for (number, (name, _, ends)) in CASES.iter().enumerate() {
        for (kind, expected) in KINDS.iter().zip(ends) {
            let wanted = if name.contains("TCP") { 4 } else { 1 };
            let is_denied = *expected == DENIED && version >= wanted;
            let expected = if is_denied || *expected != DENIED { expected } else { &ends[0] };
            let (status, text) = run(kind, number);
            let end = end_of(status);
            // A call that is in no table is told of.
            let is_told = text.contains("sandbox: refused system call");
            if end != Some(*expected) || is_told != (*expected == REFUSED) {
                println!("{name}, {kind}: {end:?} ({status}), not {expected:?}: {text}");
                wrong += 1;
            }
        }
    }
    let (calls, kinds) = (CASES.len(), KINDS.len());
    println!("{calls} calls on {kinds} kinds of threads, Landlock ABI {version}, {wrong} wrong");
    exit(i32::from(wrong > 0));
}
