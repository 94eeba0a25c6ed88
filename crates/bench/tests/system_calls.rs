//! All system calls of a request, counted with ptrace(2): guest, kick, queue, device, block node, ring, completion, signal.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use nix::errno::Errno;
use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

/// Calls by number.
type Calls = BTreeMap<i64, u64>;

const WRITE: i64 = libc::SYS_write;
const ENTER: i64 = libc::SYS_io_uring_enter;

/// The calls of a child that serves `rounds` rounds.
fn calls(row: &str, rounds: u64, file: &Path) -> Calls {
    let mut child = Command::new(env!("CARGO_BIN_EXE_bench"))
        .args(["guards", "--serve", row, &rounds.to_string()])
        .arg(file)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = Pid::from_raw(child.id() as i32);
    ptrace::seize(pid, ptrace::Options::PTRACE_O_TRACESYSGOOD).unwrap();
    ptrace::interrupt(pid).unwrap();
    let mut calls = Calls::new();
    let mut enters = true;
    // It begins its rounds after a line, which is sent once it is traced.
    let mut stdin = child.stdin.take();
    loop {
        let signal = match waitpid(pid, Some(WaitPidFlag::__WALL)) {
            Ok(WaitStatus::PtraceSyscall(_)) => {
                if enters {
                    match call(pid) {
                        // The read of the line: each call after it counts.
                        (libc::SYS_read, 0) => calls.clear(),
                        (number, _) => *calls.entry(number).or_default() += 1,
                    }
                }
                enters = !enters;
                None
            }
            Ok(WaitStatus::Stopped(_, signal)) => Some(signal),
            Ok(WaitStatus::Exited(_, status)) => {
                assert_eq!(status, 0, "{row}: the child's exit status");
                // Fails if it has ended and was reaped.
                let _ = child.wait();
                return calls;
            }
            Ok(WaitStatus::PtraceEvent(..)) | Err(Errno::EINTR) => None,
            other => panic!("{row}: {other:?}"),
        };
        ptrace::syscall(pid, signal).unwrap();
        if let Some(mut stdin) = stdin.take() {
            stdin.write_all(b"\n").unwrap();
        }
    }
}

/// The call that a stopped process enters, by number, and its first argument: proc_pid_syscall(5).
fn call(pid: Pid) -> (i64, u64) {
    let text = fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap();
    let mut words = text.split(' ');
    let number = words.next().unwrap().parse().unwrap();
    let argument = words.next().and_then(|word| word.strip_prefix("0x")).unwrap();
    (number, u64::from_str_radix(argument, 16).unwrap())
}

#[test]
fn a_round_is_one_kick_one_enter_and_one_signal_however_many_requests_it_has() {
    const ROUNDS: u64 = 50;
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("system-calls.dat");
    fs::write(&file, vec![0x77; 4 << 20]).unwrap();
    for (row, enters) in
        [("null depth 1", 0), ("null depth 64", 0), ("file depth 1", 1), ("file depth 64", 1)]
    {
        // Both counts include the calls before and after the rounds.
        let [short, long] = [ROUNDS, 2 * ROUNDS].map(|rounds| calls(row, rounds, &file));
        let per_run = |call: i64| {
            let [short, long] = [&short, &long].map(|calls| calls.get(&call).copied());
            long.unwrap_or(0) - short.unwrap_or(0)
        };
        assert_eq!(per_run(WRITE), 2 * ROUNDS, "{row}: a kick and a signal per round");
        assert_eq!(per_run(ENTER), enters * ROUNDS, "{row}: submissions, of all reads of a round");
        for &call in long.keys().filter(|&&call| call != WRITE && call != ENTER) {
            assert_eq!(per_run(call), 0, "{row}: system call {call} in the rounds");
        }
    }
    fs::remove_file(file).unwrap();
}
