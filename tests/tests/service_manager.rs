//! Messages to a service manager.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::time::Duration;

use integration::{BlkClient, PATIENCE, Qmp, Scratch, ServerCommand, eventually, tool};
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;
use serde_json::json;

/// The service manager's side of its notification socket.
struct Manager {
    socket: UnixDatagram,
    path: PathBuf,
}

impl Manager {
    fn new(scratch: &Scratch) -> Self {
        let path = scratch.path("notify");
        let socket = UnixDatagram::bind(&path).expect("a socket");
        socket.set_read_timeout(Some(PATIENCE)).expect("a time limit");
        Manager { socket, path }
    }

    fn variable(&self) -> String {
        self.path.to_str().expect("UTF-8").to_owned()
    }

    /// Receives the next message: lines of a name and a value.
    fn next(&self) -> BTreeMap<String, String> {
        self.receive().expect("a word of the daemon's")
    }

    /// Receives the next message; `None` if none arrives in time.
    fn receive(&self) -> Option<BTreeMap<String, String>> {
        let mut buf = [0; 4096];
        let len = match self.socket.recv(&mut buf) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
            len => len.expect("a datagram"),
        };
        let text = std::str::from_utf8(&buf[..len]).expect("text").to_owned();
        let line = |line: &str| line.split_once('=').map(|(n, v)| (n.to_owned(), v.to_owned()));
        Some(text.lines().map(|text| line(text).expect("a name and a value")).collect())
    }

    /// Expects a message that a reload begins, with a time after `since`. A manager uses the time to ignore messages from before
    /// the change.
    fn expect_reloading(&self, since: u64) {
        let mut lines = self.next();
        let time = lines.remove("MONOTONIC_USEC").and_then(|time| time.parse().ok());
        let time: u64 = time.unwrap_or_else(|| panic!("no time beside {lines:?}"));
        assert!((since..=now_usec()).contains(&time), "{time} is not after {since}");
        assert_eq!(lines, told(&[("RELOADING", "1")]));
    }
}

/// CLOCK_MONOTONIC, as sd_notify(3) requires.
fn now_usec() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("a clock");
    Duration::from(now).as_micros().try_into().expect("64 bits")
}

fn disk(scratch: &Scratch) -> ServerCommand<'_> {
    let node = "null-co,node-name=disk,size=1048576";
    ServerCommand::new(scratch)
        .iothread("io0")
        .arg("--blockdev")
        .arg(node)
        .export("disk", "iothread=io0")
}

fn told(lines: &[(&str, &str)]) -> BTreeMap<String, String> {
    lines.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

#[test]
fn ready_when_every_export_listens_and_stopping_when_it_ends() {
    let scratch = Scratch::new();
    let manager = Manager::new(&scratch);
    let command = disk(&scratch).monitor("qmp").env("NOTIFY_SOCKET", manager.variable());
    let mut server = command.spawn();
    let pid = server.pid().to_string();
    let ready = [("READY", "1"), ("MAINPID", &pid), ("STATUS", "Serving 1 export")];
    assert_eq!(manager.next(), told(&ready));
    // The socket accepts at once.
    BlkClient::connect(&server.socket("disk"), 1, 16).expect("a device").read(0, 4096);

    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let addr = json!({"type": "unix", "path": scratch.path("more.sock")});
    let export = json!({"type": "vhost-user-blk", "id": "more", "node-name": "disk", "addr": addr});
    qmp.execute("block-export-add", export);
    assert_eq!(manager.next(), told(&[("STATUS", "Serving 2 exports")]));
    qmp.execute("block-export-del", json!({"id": "more"}));
    assert_eq!(manager.next(), told(&[("STATUS", "Serving 1 export")]));

    server.signal(Signal::SIGTERM);
    let status = "Finishing the requests in flight";
    // --stop-timeout and a margin.
    let stopping = [("STOPPING", "1"), ("STATUS", status), ("EXTEND_TIMEOUT_USEC", "15000000")];
    assert_eq!(manager.next(), told(&stopping));
    assert!(server.wait().success());
}

#[test]
fn a_live_upgrade_is_a_reload_after_which_another_process_is_the_main_one() {
    let scratch = Scratch::new();
    let manager = Manager::new(&scratch);
    let mut server = disk(&scratch).env("NOTIFY_SOCKET", manager.variable()).start();
    assert_eq!(manager.next()["READY"], "1");
    for _ in 0..2 {
        let since = now_usec();
        server.upgrade();
        let pid = server.pid().to_string();
        manager.expect_reloading(since);
        // The two processes' messages may come in either order. A manager ignores an unknown process, so both send them.
        let hand_over = told(&[("READY", "1"), ("MAINPID", &pid)]);
        let ready = told(&[("READY", "1"), ("MAINPID", &pid), ("STATUS", "Serving 1 export")]);
        let mut both = [manager.next(), manager.next()];
        both.sort_by_key(BTreeMap::len);
        assert_eq!(both, [hand_over, ready]);
    }
    // The old process has not reported that it stops. The new one reports its own stop, once.
    server.signal(Signal::SIGTERM);
    assert_eq!(manager.next()["STOPPING"], "1");
    assert!(server.wait().success());
}

#[test]
fn a_daemon_is_ready_again_after_a_failed_upgrade() {
    let scratch = Scratch::new();
    let manager = Manager::new(&scratch);
    let command = disk(&scratch).called_qemu_storage_daemon();
    let server = command.env("NOTIFY_SOCKET", manager.variable()).start();
    let ready = manager.next();
    assert_eq!(ready["READY"], "1");
    let installed = scratch.path("qemu-storage-daemon");
    fs::remove_file(&installed).expect("it is a link");
    symlink(tool("false"), &installed).expect("a link");
    let since = now_usec();
    server.signal(Signal::SIGUSR2);
    manager.expect_reloading(since);
    assert_eq!(manager.next(), ready);
    BlkClient::connect(&server.socket("disk"), 1, 16).expect("a device").read(0, 4096);
    server.stop();
    assert_eq!(manager.next()["STOPPING"], "1");
}

#[test]
fn a_daemon_in_the_background_says_which_process_it_is() {
    let scratch = Scratch::new();
    let manager = Manager::new(&scratch);
    let pid_file = scratch.path("background.pid");
    let command = disk(&scratch).arg("--daemonize").arg("--pidfile");
    let command = command.arg(pid_file.to_str().expect("UTF-8"));
    // A watchdog for the called process applies to the process that takes its place.
    let mut server = command
        .wrapped_by(env!("CARGO_BIN_EXE_watched"))
        .env("NOTIFY_SOCKET", manager.variable())
        .spawn();
    assert!(server.wait().success());
    let pid = fs::read_to_string(&pid_file).expect("a pid file").trim().to_owned();
    assert_ne!(pid, server.pid().to_string());
    let ready = manager.next();
    assert_eq!((ready["READY"].as_str(), &ready["MAINPID"]), ("1", &pid));
    assert_eq!(manager.next(), told(&[("WATCHDOG", "1")]));
    let pid = Pid::from_raw(pid.parse().expect("a number"));
    nix::sys::signal::kill(pid, Signal::SIGTERM).expect("it lives");
    eventually("the end of the daemon", || (!pid_file.exists()).then_some(()));
}

/// An abstract socket name, which some managers use.
#[test]
fn abstract_names_of_sockets() {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::SocketAddr;

    let scratch = Scratch::new();
    let name = format!("ringmill-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).expect("a name");
    let socket = UnixDatagram::bind_addr(&address).expect("a socket");
    socket.set_read_timeout(Some(PATIENCE)).expect("a time limit");
    let manager = Manager { socket, path: format!("@{name}").into() };
    let server = disk(&scratch).env("NOTIFY_SOCKET", manager.variable()).start();
    assert_eq!(manager.next()["READY"], "1");
    server.stop();
}

#[test]
fn an_invalid_socket_is_an_error() {
    let scratch = Scratch::new();
    for name in ["relative", "/nonexistent/notify"] {
        let (status, log) = disk(&scratch).env("NOTIFY_SOCKET", name).run();
        assert_eq!(status.code(), Some(1), "{log}");
        assert!(log.contains("NOTIFY_SOCKET: "), "{log}");
    }
}

/// The watchdog gets messages while all threads work, and only then.
#[test]
fn a_stuck_io_thread_is_not_alive() {
    let scratch = Scratch::new();
    let manager = Manager::new(&scratch);
    let server = disk(&scratch)
        .env("NOTIFY_SOCKET", manager.variable())
        .env("WATCHDOG_USEC", "100000")
        .start();
    let alive = told(&[("WATCHDOG", "1")]);
    assert_eq!(manager.next()["READY"], "1");
    for _ in 0..3 {
        assert_eq!(manager.next(), alive);
    }
    let thread = server.thread("io0");
    ptrace::seize(thread, ptrace::Options::empty()).expect("our own child");
    ptrace::interrupt(thread).expect("it is traced");
    waitpid(thread, Some(WaitPidFlag::__WALL)).expect("it stops");
    // Messages sent before may arrive, and then none for many intervals.
    manager.socket.set_read_timeout(Some(Duration::from_secs(2))).expect("a time limit");
    let mut late = 0;
    while manager.receive().is_some() {
        late += 1;
        assert!(late < 20, "the watchdog gets messages although a thread does not respond");
    }
    manager.socket.set_read_timeout(Some(PATIENCE)).expect("a time limit");
    eventually("the log to name the thread", || {
        server
            .log()
            .contains("watchdog: I/O thread \"io0\" has not answered for 50 ms")
            .then_some(())
    });
    ptrace::detach(thread, None).expect("it is stopped");
    assert_eq!(manager.next(), alive);
    server.stop();
}
