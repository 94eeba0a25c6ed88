//! `--daemonize` and `--pidfile`, tried on the program itself.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getsid};

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

    fn pid(&self, file: &str) -> Pid {
        let text = fs::read_to_string(self.0.join(file)).expect("a pid file");
        Pid::from_raw(text.strip_suffix('\n').expect("a line").parse().expect("a pid"))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn is_gone(pid: Pid) -> bool {
    !Path::new(&format!("/proc/{pid}")).exists()
        || fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") Z "))
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A daemon in the foreground, killed with its test.
struct Foreground(Child);

impl Foreground {
    fn pid(&self) -> Pid {
        Pid::from_raw(self.0.id().cast_signed())
    }
}

impl Drop for Foreground {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs in the foreground until the pid file is there.
fn foreground(scratch: &Scratch, file: &str) -> Foreground {
    let child = scratch
        .daemon(&[NODE[0], NODE[1], "--pidfile", file])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    let daemon = Foreground(child);
    let path = scratch.0.join(file);
    wait_until("the pid file is filled", || {
        fs::read_to_string(&path).is_ok_and(|text| text == format!("{}\n", daemon.pid()))
    });
    daemon
}

#[test]
fn the_parent_leaves_when_the_daemon_is_ready() {
    let scratch = Scratch::new("ready");
    let arguments = [NODE[0], NODE[1], "--daemonize", "--pidfile", "a.pid"];
    // Standard output and error are pipes: `output` also waits until the daemon has let go of them.
    let output = scratch.daemon(&arguments).output().expect("it starts");
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(output.stdout.is_empty());

    let pid = scratch.pid("a.pid");
    let proc = PathBuf::from(format!("/proc/{pid}"));
    assert_eq!(getsid(Some(pid)), Ok(pid), "it has a session of its own");
    assert_eq!(fs::read_link(proc.join("cwd")).expect("a directory"), Path::new("/"));
    for fd in 0..3 {
        let file = fs::read_link(proc.join(format!("fd/{fd}"))).expect("it is open");
        assert_eq!(file, Path::new("/dev/null"), "descriptor {fd}");
    }
    assert_eq!(fs::read_to_string(proc.join("comm")).expect("a name"), "ringmill\n");

    kill(pid, Signal::SIGTERM).expect("it lives");
    wait_until("it ends", || is_gone(pid));
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
    let output = scratch
        .daemon(&[NODE[0], NODE[1], "--export", export, "--daemonize", "--pidfile", "a.pid"])
        .output()
        .expect("it starts");
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(scratch.0.join("e.sock").exists());
    let pid = scratch.pid("a.pid");
    kill(pid, Signal::SIGTERM).expect("it lives");
    wait_until("it ends", || is_gone(pid));
    assert_eq!(fs::read_dir(&scratch.0).expect("a directory").count(), 0, "nothing is left");
}

#[test]
fn a_stale_variable_does_no_harm() {
    let scratch = Scratch::new("stale");
    let output = scratch
        .daemon(&["--daemonize", "--pidfile", "a.pid"])
        .env("RINGMILL_DAEMONIZE_PARENT", "1")
        .output()
        .expect("it starts");
    assert!(output.status.success(), "{}", stderr(&output));
    let pid = scratch.pid("a.pid");
    kill(pid, Signal::SIGTERM).expect("it lives");
    wait_until("it ends", || is_gone(pid));
}

#[test]
fn the_pid_file_of_a_living_process_is_not_taken() {
    let scratch = Scratch::new("taken");
    let mut first = foreground(&scratch, "a.pid");
    for daemonize in [&[][..], &["--daemonize"]] {
        let mut command = scratch.daemon(&["--pidfile", "a.pid"]);
        let output = command.args(daemonize).output().expect("it starts");
        assert_eq!(output.status.code(), Some(1));
        let stderr = stderr(&output);
        let expected = "cannot create PID file: Cannot lock pid file: Resource temporarily \
                        unavailable\n";
        assert!(stderr.ends_with(expected), "{stderr}");
    }
    assert_eq!(scratch.pid("a.pid"), first.pid());
    kill(first.pid(), Signal::SIGTERM).expect("it lives");
    assert!(first.0.wait().expect("it ends").success());
    assert!(!scratch.0.join("a.pid").exists());
}

#[test]
fn the_pid_file_of_a_killed_process_is_taken_over() {
    let scratch = Scratch::new("killed");
    let mut first = foreground(&scratch, "a.pid");
    first.0.kill().expect("it lives");
    first.0.wait().expect("it ends");
    assert!(scratch.0.join("a.pid").exists());
    let mut second = foreground(&scratch, "a.pid");
    kill(second.pid(), Signal::SIGINT).expect("it lives");
    assert!(second.0.wait().expect("it ends").success());
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

    let output = run(&["--daemonize", "--pidfile", "a.pid"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let pid = scratch.pid("a.pid");
    let mut arguments = String::new();
    fs::File::open(format!("/proc/{pid}/cmdline"))
        .and_then(|mut file| file.read_to_string(&mut arguments))
        .expect("it lives");
    assert!(arguments.starts_with(&qsd.display().to_string()), "{arguments}");
    kill(pid, Signal::SIGTERM).expect("it lives");
    wait_until("it ends", || is_gone(pid));
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
