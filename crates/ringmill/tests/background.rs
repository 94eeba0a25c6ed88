//! `--daemonize` and `--pidfile`, tried on the program itself.

use std::fs;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getsid};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{PidfdFlags, pidfd_open, pidfd_send_signal};

const NODE: [&str; 2] = ["--blockdev", "null-co,node-name=n"];

/// A directory to run in, gone afterwards.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("background-{}-{name}", std::process::id()));
        fs::create_dir(&path).expect("a directory");
        Self(path)
    }

    fn daemon(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringmill"));
        command.arg("storage-daemon").args(arguments).current_dir(&self.0).stdin(Stdio::null());
        command
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A daemon in the background, killed with its test.
struct Daemon {
    pid: Pid,
    /// Readable once the process has ended.
    process: OwnedFd,
}

impl Daemon {
    /// Starts one with `--daemonize` and `--pidfile a.pid`, and finds that its parent succeeds.
    fn start(scratch: &Scratch, arguments: &[&str]) -> Self {
        Self::of(scratch, &mut scratch.daemon(arguments))
    }

    fn of(scratch: &Scratch, command: &mut Command) -> Self {
        // Standard output and error are pipes: `output` waits until the daemon has closed them, too.
        let output =
            command.args(["--daemonize", "--pidfile", "a.pid"]).output().expect("it starts");
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(output.stdout.is_empty());
        let text = fs::read_to_string(scratch.0.join("a.pid")).expect("a pid file");
        let pid = text.strip_suffix('\n').expect("a line").parse().expect("a pid");
        let rustix_pid = rustix::process::Pid::from_raw(pid).expect("a pid");
        let process = pidfd_open(rustix_pid, PidfdFlags::empty()).expect("it lives");
        Self { pid: Pid::from_raw(pid), process }
    }

    fn end_by(&self, signal: Signal) {
        kill(self.pid, signal).expect("it lives");
        let mut ended = [PollFd::new(&self.process, PollFlags::IN)];
        let patience = Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(poll(&mut ended, Some(&patience)), Ok(1), "it ends");
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = pidfd_send_signal(&self.process, rustix::process::Signal::KILL);
    }
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn the_parent_leaves_when_the_daemon_is_ready() {
    let scratch = Scratch::new("ready");
    let daemon = Daemon::start(&scratch, &NODE);
    let pid = daemon.pid;
    let proc = PathBuf::from(format!("/proc/{pid}"));
    assert_eq!(getsid(Some(pid)), Ok(pid), "it has a session of its own");
    let folder = fs::read_link(proc.join("cwd")).expect("a directory");
    assert_eq!(
        folder,
        fs::canonicalize(&scratch.0).expect("a directory"),
        "names of images stay valid"
    );
    for fd in 0..3 {
        let file = fs::read_link(proc.join(format!("fd/{fd}"))).expect("it is open");
        assert_eq!(file, Path::new("/dev/null"), "descriptor {fd}");
    }
    assert_eq!(fs::read_to_string(proc.join("comm")).expect("a name"), "ringmill\n");

    daemon.end_by(Signal::SIGTERM);
    assert!(!scratch.0.join("a.pid").exists(), "the pid file goes with it");
}

#[test]
fn the_parent_fails_when_the_daemon_does() {
    let scratch = Scratch::new("fails");
    let node = "file,node-name=n,filename=missing.img";
    let output = scratch
        .daemon(&["--daemonize", "--pidfile", "a.pid", "--blockdev", node])
        .output()
        .expect("it starts");
    assert_eq!(output.status.code(), Some(1));
    let stderr = stderr(&output);
    let expected = format!("ringmill: --blockdev {node}: Could not open 'missing.img': ");
    assert!(stderr.contains(&expected), "{stderr}");
    assert_eq!(fs::read_dir(&scratch.0).expect("a directory").count(), 0, "nothing is left");
}

/// Their paths are relative to a directory that the daemon leaves.
#[test]
fn relative_sockets_go_with_the_daemon() {
    let scratch = Scratch::new("socket");
    let export = "vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path=e.sock";
    let daemon = Daemon::start(&scratch, &[NODE[0], NODE[1], "--export", export]);
    assert!(scratch.0.join("e.sock").exists());
    daemon.end_by(Signal::SIGTERM);
    assert_eq!(fs::read_dir(&scratch.0).expect("a directory").count(), 0, "nothing is left");
}

#[test]
fn a_stale_variable_does_no_harm() {
    let scratch = Scratch::new("stale");
    let mut command = scratch.daemon(&[]);
    let daemon = Daemon::of(&scratch, command.env("RINGMILL_DAEMONIZE_PARENT", "1"));
    daemon.end_by(Signal::SIGTERM);
}

#[test]
fn the_pid_file_of_a_living_process_is_not_taken() {
    let scratch = Scratch::new("taken");
    let first = Daemon::start(&scratch, &NODE);
    let export = "vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path=e.sock";
    for daemonize in [&[][..], &["--daemonize"]] {
        let mut command = scratch.daemon(&[NODE[0], NODE[1], "--export", export]);
        let command = command.args(["--pidfile", "a.pid"]).args(daemonize);
        let output = command.output().expect("it starts");
        assert_eq!(output.status.code(), Some(1));
        let stderr = stderr(&output);
        let expected = format!(
            "cannot create PID file: Cannot lock pid file 'a.pid': Resource temporarily unavailable: process {} \
             has it\n",
            first.pid
        );
        assert!(stderr.ends_with(&expected), "{stderr}");
        assert!(!scratch.0.join("e.sock").exists(), "nothing is left");
    }
    let text = fs::read_to_string(scratch.0.join("a.pid")).expect("the first one's file");
    assert_eq!(text, format!("{}\n", first.pid));
    first.end_by(Signal::SIGTERM);
    assert!(!scratch.0.join("a.pid").exists());
}

#[test]
fn the_pid_file_of_a_killed_process_is_taken_over() {
    let scratch = Scratch::new("killed");
    Daemon::start(&scratch, &NODE).end_by(Signal::SIGKILL);
    assert!(scratch.0.join("a.pid").exists());
    Daemon::start(&scratch, &NODE).end_by(Signal::SIGINT);
    assert!(!scratch.0.join("a.pid").exists());
}

#[test]
fn nothing_runs_when_the_pid_file_cannot_be_made() {
    let scratch = Scratch::new("unmade");
    let output =
        scratch.daemon(&["--daemonize", "--pidfile", "no/a.pid"]).output().expect("it starts");
    assert_eq!(output.status.code(), Some(1));
    let stderr = stderr(&output);
    let expected = "cannot create PID file: Could not create 'no/a.pid': No such file or directory";
    assert!(stderr.contains(expected), "{stderr}");
}

#[test]
fn under_the_name_of_qsd() {
    let scratch = Scratch::new("name");
    let qsd = scratch.0.join("qemu-storage-daemon");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_ringmill"), &qsd).expect("a link");
    let run = |arguments: &[&str]| {
        let mut command = Command::new(&qsd);
        command.args(arguments).current_dir(&scratch.0).output().expect("it starts")
    };
    let output = run(&["--blockdev", "foo"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).starts_with("qemu-storage-daemon: --blockdev foo: Parameter 'driver'"));

    let daemon = Daemon::of(&scratch, Command::new(&qsd).current_dir(&scratch.0));
    let pid = daemon.pid;
    let mut arguments = String::new();
    fs::File::open(format!("/proc/{pid}/cmdline"))
        .and_then(|mut file| file.read_to_string(&mut arguments))
        .expect("it lives");
    assert!(arguments.starts_with(&qsd.display().to_string()), "{arguments}");
    daemon.end_by(Signal::SIGTERM);
}

#[test]
fn probe_tells_all_sections() {
    let scratch = Scratch::new("probe");
    let image = scratch.0.join("disk.img");
    fs::write(&image, vec![1; 1 << 20]).expect("an image");
    let output = Command::new(env!("CARGO_BIN_EXE_ringmill"))
        .arg("probe")
        .arg(&image)
        .output()
        .expect("runs");
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(stderr(&output), "");
    let text = String::from_utf8(output.stdout).expect("text");
    for expected in [
        "kernel.io_uring_disabled",
        "seccomp",
        "set-up, DEFER_TASKRUN",
        "operations",
        "RLIMIT_MEMLOCK",
        "RLIMIT_NOFILE",
        "1 MiB (1048576 bytes)",
        "O_DIRECT",
        "event loop",
        "aio",
        "driver                    file",
    ] {
        assert!(text.contains(expected), "{expected} in\n{text}");
    }
    let missing = scratch.0.join("missing.img");
    let output = Command::new(env!("CARGO_BIN_EXE_ringmill"))
        .arg("probe")
        .arg(&missing)
        .output()
        .expect("runs");
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("missing.img: No such file"), "{}", stderr(&output));
}
