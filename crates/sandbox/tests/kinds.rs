//! System calls that injected code would try, on each kind of thread. Each call runs in a separate process, since some
//! calls end the process.

#![allow(unsafe_code)]

mod common;

use std::ffi::{c_int, c_long};
use std::fs::File;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, exit};
use std::{env, io, ptr, thread};

use sandbox::{Beneath, Config, Mode, Purpose, Reach, Sandbox};

use common::landlock_of_the_kernel;

/// The result of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// The call is carried out.
    Done,
    /// The call fails with this errno.
    Fails(c_int),
    /// The call fails with EPERM, and a log line says that the sandbox refused it.
    Refused,
    /// Landlock refuses the call with this errno from this version on. Earlier versions allow what was allowed
    /// at the start.
    Denied(c_int, i32),
    /// The process ends by SIGSYS.
    Deadly,
}

use End::{Deadly, Denied, Done, Fails, Refused};

const REFUSED: End = Refused;
const NO_FILE: End = Denied(libc::EACCES, 1);
const NO_TCP: End = Denied(libc::EACCES, 4);
const OUT_OF_SCOPE: End = Denied(libc::EPERM, 6);

/// Kinds of threads, each with the index of its result in a case. A helper has the results of the control thread.
const KINDS: [(&str, usize); 5] =
    [("start", 0), ("control", 1), ("helper", 1), ("io", 2), ("pool", 3)];

/// A call, and its results: at the start, on the control thread, on an I/O thread, on a pool thread.
type Case = (&'static str, fn() -> c_long, [End; 4]);

/// The control thread can read /proc and nothing else.
const CASES: &[Case] = &[
    ("openat of a file that was named", || open("/proc/self/stat"), [Done, Done, REFUSED, REFUSED]),
    ("openat of another", || open("/etc/passwd"), [Done, NO_FILE, REFUSED, REFUSED]),
    ("unlinkat", || call(libc::SYS_unlinkat, [-1, 0, 0, 0]), [BAD, BAD, REFUSED, REFUSED]),
    ("socket of TCP", || socket(libc::AF_INET), [Done, Done, REFUSED, REFUSED]),
    ("connect by TCP", connect_by_tcp, [NOBODY, NO_TCP, REFUSED, REFUSED]),
    ("connect to an abstract socket", connect_to_us, [Done, OUT_OF_SCOPE, REFUSED, REFUSED]),
    ("socket of vsock", || socket(libc::AF_VSOCK), [REFUSED; 4]),
    ("socket of packets", || socket(libc::AF_PACKET), [REFUSED; 4]),
    ("bind", || call(libc::SYS_bind, [-1, 0, 0, 0]), [FD, FD, REFUSED, REFUSED]),
    ("io_uring_setup", || call(libc::SYS_io_uring_setup, [0; 4]), [BAD, BAD, REFUSED, REFUSED]),
    ("io_uring_enter", || call(libc::SYS_io_uring_enter, [-1, 0, 0, 0]), [FD, FD, FD, REFUSED]),
    // A file slot; the eventfd of a ring.
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
    (
        "ioctl of a file's flags",
        || call(libc::SYS_ioctl, [-1, 0x8008_6601, 0, 0]),
        [FD, FD, REFUSED, REFUSED],
    ),
    // VDUSE_CREATE_DEV, VDUSE_VQ_INJECT_IRQ.
    (
        "ioctl that makes a VDUSE device",
        || call(libc::SYS_ioctl, [-1, 0x4150_8102, 0, 0]),
        [FD, FD, REFUSED, REFUSED],
    ),
    (
        "ioctl that signals a VDUSE driver",
        || call(libc::SYS_ioctl, [-1, 0x4004_8117, 0, 0]),
        [FD, FD, FD, REFUSED],
    ),
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

/// The same for a control thread that can reach abstract sockets and vsock.
const MORE: &[(&str, [End; 4])] = &[
    ("connect to an abstract socket", [Done, Done, REFUSED, REFUSED]),
    ("socket of vsock", [Done, Done, REFUSED, REFUSED]),
    ("connect by TCP", [NOBODY, NO_TCP, REFUSED, REFUSED]),
];

/// With `Mode::Log` all kinds of threads carry these calls out.
const LOGGED: &[(&str, End)] = &[
    ("openat of another", Done),
    ("connect by TCP", NOBODY),
    ("connect to an abstract socket", Done),
    ("setsockopt(SO_ATTACH_FILTER)", FD),
    ("memfd_create", BAD),
    ("pidfd_open", Done),
    ("mmap of code", Done),
    ("setresuid", Done),
    ("execve", BAD),
    ("unshare", Done),
    ("clone3", Fails(libc::ENOSYS)),
];

const NO_SIGNAL: c_long = libc::MSG_NOSIGNAL as c_long;
const FAST_OPEN: c_long = libc::MSG_FASTOPEN as c_long;

const BAD: End = Fails(libc::EFAULT);
const FD: End = Fails(libc::EBADF);
const NOBODY: End = Fails(libc::ECONNREFUSED);

fn call(number: c_long, arguments: [c_long; 4]) -> c_long {
    let [a, b, c, d] = arguments;
    // SAFETY: no call above gets memory to write to, or a descriptor in use.
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

/// Of a descriptor that is no socket.
fn set_option(level: c_long, option: c_long) -> c_long {
    call(libc::SYS_setsockopt, [-1, level, option, 0])
}

/// To a closed port.
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
    // SAFETY: the kernel chooses the address; nothing uses the memory.
    let at = unsafe { libc::mmap(ptr::null_mut(), 4096, protection, flags, -1, 0) };
    if at == libc::MAP_FAILED { -1 } else { 0 }
}

/// Connects to the socket of the parent process, outside of the sandbox.
fn connect_to_us() -> c_long {
    let name = env::args().nth(5).expect("a name");
    let address = SocketAddr::from_abstract_name(name).expect("a short name");
    // As for TCP: a thread that cannot make a socket still tries the other call.
    match socket(libc::AF_UNIX) {
        0.. => UnixStream::connect_addr(&address).map_or(-1, |_| 0),
        _ => call(libc::SYS_connect, [-1, 0, 0, 0]),
    }
}

/// Confines a thread as that kind and makes the call, in a separate process.
fn attempt(mode: &str, kind: &str, number: usize) -> End {
    let more = mode == "more";
    let mode = if mode == "log" { Mode::Log } else { Mode::On };
    let proc = Beneath { path: "/proc".into(), purpose: Purpose::Read };
    let reach = Reach {
        files: Some(vec![proc]),
        connect: Some(Vec::new()),
        abstract_sockets: more,
        vsock: more,
    };
    let config = Config { mode, reach, ..Config::default() };
    let sandbox = Sandbox::begin(config).expect("a sandbox");
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
            sandbox.serve(true).expect("less");
            outcome(CASES[number].1)
        }
        "helper" => on_thread(|sandbox| sandbox.helper_thread().expect("less"), number),
        "io" => on_thread(|sandbox| sandbox.io_thread().expect("less"), number),
        "pool" => on_thread(|sandbox| sandbox.pool_thread().expect("less"), number),
        _ => unreachable!("one of KINDS"),
    }
}

fn outcome(make: fn() -> c_long) -> End {
    if make() >= 0 {
        return Done;
    }
    Fails(io::Error::last_os_error().raw_os_error().unwrap_or(0))
}

/// Runs this program again, for one call.
fn run(mode: &str, kind: &str, number: usize, socket: &str) -> (ExitStatus, String) {
    let program = env::current_exe().expect("a path");
    let mut command = Command::new(program);
    let output = command.args(["attempt", mode, kind, &number.to_string(), socket]).output();
    let output = output.expect("it runs");
    (output.status, String::from_utf8_lossy(&output.stderr).into_owned())
}

fn end_of(status: ExitStatus, text: &str) -> Option<End> {
    // A call outside the tables is logged.
    let is_told = text.contains("sandbox: refused system call");
    match (status.code(), status.signal()) {
        (Some(libc::EPERM), _) if is_told => Some(Refused),
        _ if is_told => None,
        (Some(0), _) => Some(Done),
        (Some(errno), _) => Some(Fails(errno)),
        (None, Some(libc::SIGSYS)) => Some(Deadly),
        _ => None,
    }
}

fn main() {
    let arguments: Vec<String> = env::args().collect();
    if let [_, what, mode, kind, number, _] = arguments.as_slice()
        && what == "attempt"
    {
        match attempt(mode, kind, number.parse().expect("a number")) {
            Done => exit(0),
            Fails(errno) => exit(errno),
            Refused | Denied(..) | Deadly => unreachable!("it is seen from outside"),
        }
    }
    // cargo-nextest lists all tests, and then the ignored ones. All calls are one test.
    if arguments.iter().any(|argument| argument == "--list") {
        if !arguments.iter().any(|argument| argument == "--ignored") {
            println!("each_call_of_each_kind_of_thread: test");
        }
        return;
    }
    // The kernel may lack vsock.
    let vsock = outcome(|| socket(libc::AF_VSOCK));
    let socket = format!("ringmill-kinds-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&socket).expect("a short name");
    let _listener = UnixListener::bind_addr(&address).expect("an unused address");
    // Without Landlock, or with an early version, the control thread can do more.
    let version = landlock_of_the_kernel();
    let mut wrong = 0;
    let mut expect = |mode: &str, kind: &str, number: usize, expected: End| {
        let (status, text) = run(mode, kind, number, &socket);
        let end = end_of(status, &text);
        if end != Some(expected) {
            let name = CASES[number].0;
            println!("{name}, {kind}, {mode}: {end:?} ({status}), not {expected:?}: {text}");
            wrong += 1;
        }
    };
    let number_of =
        |name: &str| CASES.iter().position(|(case, ..)| *case == name).expect("one of them");
    let on = CASES.iter().enumerate().map(|(number, (_, _, ends))| ("on", number, ends));
    let more = MORE.iter().map(|(name, ends)| ("more", number_of(name), ends));
    for (mode, number, ends) in on.chain(more) {
        for (kind, column) in KINDS {
            let expected = match ends[column] {
                Denied(errno, since) if version >= since => Fails(errno),
                Denied(..) => ends[0],
                Done if CASES[number].0 == "socket of vsock" => vsock,
                end => end,
            };
            expect(mode, kind, number, expected);
        }
    }
    for (name, end) in LOGGED {
        let number = number_of(name);
        for (kind, _) in KINDS {
            expect("log", kind, number, *end);
        }
    }
    let (calls, kinds) = (CASES.len(), KINDS.len());
    println!("{calls} calls on {kinds} kinds of threads, Landlock ABI {version}, {wrong} wrong");
    exit(i32::from(wrong > 0));
}
