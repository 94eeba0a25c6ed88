//! Sockets made by a service manager: their use by address, and their ownership.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use integration::nbd::{client_output, nbd_export};
use integration::{
    BlkClient, Image, PATIENCE, Port, Qmp, Scratch, ServerCommand, eventually, tool,
};
use nix::sys::signal::Signal;
use serde_json::json;

const GIVE: &str = env!("CARGO_BIN_EXE_give-sockets");

/// Passes these sockets to the daemon.
fn given<'a>(command: ServerCommand<'a>, sockets: &[String]) -> ServerCommand<'a> {
    let end = "--".to_owned();
    let arguments: Vec<String> = sockets.iter().cloned().chain([end]).collect();
    command.wrapped_by_with(GIVE, &arguments)
}

fn unix(name: &str, path: &Path) -> String {
    format!("unix:{name}:{}", path.display())
}

/// `addr.*` options of a unix socket.
fn at(path: &Path) -> String {
    format!("addr.type=unix,addr.path={}", path.display())
}

const NULL: &str = "null-co,node-name=disk,size=1048576";

fn disk<'a>(scratch: &'a Scratch, addr: &str) -> ServerCommand<'a> {
    let export = format!("vhost-user-blk,id=e,node-name=disk,{addr}");
    ServerCommand::new(scratch).arg("--blockdev").arg(NULL).arg("--export").arg(export)
}

fn page(port: u16) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("the metrics' socket");
    stream.set_read_timeout(Some(PATIENCE)).expect("a time limit");
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").expect("it listens");
    let mut page = String::new();
    stream.read_to_string(&mut page).expect("an answer");
    page
}

#[test]
fn each_listener_takes_its_socket() {
    let scratch = Scratch::new();
    let [disk_path, nbd, second] =
        ["disk.given", "nbd.given", "other.given"].map(|n| scratch.path(n));
    let (monitor, reserved) = (scratch.path("monitor.given"), Port::new());
    let port = reserved.number();
    let sockets = [
        unix("a", &nbd),
        unix("b", &second),
        unix("c", &disk_path),
        format!("tcp:metrics:127.0.0.1:{port}"),
        unix("qmp", &monitor),
    ];
    // By another path to the same socket, by number, by name, by address and by path.
    let way_round = scratch.path(".").join("disk.given");
    let command = disk(&scratch, &at(&way_round))
        .arg("--export")
        .arg("vhost-user-blk,id=f,node-name=disk,addr.type=fd,addr.str=4")
        .arg("--nbd-server")
        .arg(at(&nbd))
        .arg("--chardev")
        .arg("socket,id=m,fd=qmp,server=on,wait=off")
        .arg("--monitor")
        .arg("chardev=m")
        .arg("--metrics")
        .arg(format!("addr.type=inet,addr.host=127.0.0.1,addr.port={port}"));
    let server = given(nbd_export(command, "disk", ""), &sockets).start();
    for path in [&disk_path, &second] {
        BlkClient::connect(path, 1, 16).expect("a device").read(0, 4096);
    }
    let uri = format!("nbd+unix:///disk?socket={}", nbd.display());
    assert_eq!(client_output(&scratch, "nbdinfo", &["--size", &uri]).trim(), "1048576");
    let mut qmp = Qmp::connect(&monitor);
    assert_eq!(qmp.execute("query-block-exports", json!({})).as_array().map(Vec::len), Some(3));
    drop(qmp);
    assert!(page(port).contains("ringmill_export"));
    assert!(!server.log().contains("no option uses"), "{}", server.log());
    server.stop();
    for path in [&disk_path, &nbd, &second, &monitor] {
        assert!(path.exists(), "{} is not ours to remove", path.display());
    }
}

/// The manager keeps the socket while no daemon runs. Connections made meanwhile are served by the next daemon.
#[test]
fn a_given_socket_outlives_the_daemon() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let path = scratch.path("disk.given");
    let listener = UnixListener::bind(&path).expect("a socket");
    for _ in 0..2 {
        let command = ServerCommand::new(&scratch).file("disk", &image, "").arg("--export");
        let export = format!("vhost-user-blk,id=e,node-name=disk,{}", at(&path));
        let command = given(command.arg(export), &["stdin:disk".into()]);
        let stdin = listener.try_clone().expect("another descriptor");
        let waiting = UnixStream::connect(&path).expect("the manager listens");
        let server = command.stdin(stdin).start();
        // The waiting connection is served first.
        drop(waiting);
        BlkClient::connect(&path, 1, 16).expect("a device").read(0, 4096);
        server.stop();
        assert!(path.exists());
    }
}

#[test]
fn an_export_that_was_deleted_can_be_added_again() {
    let scratch = Scratch::new();
    let path = scratch.path("disk.given");
    let server = given(disk(&scratch, &at(&path)).monitor("qmp"), &[unix("disk", &path)]).start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let export = |id: &str, addr: serde_json::Value| json!({"type": "vhost-user-blk", "id": id, "node-name": "disk", "addr": addr});
    let by_path = json!({"type": "unix", "path": path});
    let by_name = json!({"type": "fd", "str": "disk"});
    let refused = qmp.refused("block-export-add", export("second", by_name.clone()));
    assert!(refused.contains("file descriptor 3, disk, "), "{refused}");
    assert!(refused.ends_with(" is used already"), "{refused}");
    for addr in [by_name, by_path] {
        // The daemon may not have seen that the last front end has disconnected.
        qmp.execute("block-export-del", json!({"id": "e", "mode": "hard"}));
        qmp.wait_for("BLOCK_EXPORT_DELETED");
        // The socket is free once the kernel has ended the poll for connections.
        eventually("the socket to be free", || {
            let answer = qmp.ask("block-export-add", export("e", addr.clone()));
            answer.get("return").map(drop)
        });
        BlkClient::connect(&path, 1, 16).expect("a device").read(0, 4096);
    }
    drop(qmp);
    server.stop();
}

#[test]
fn unused_sockets_are_reported_once() {
    let scratch = Scratch::new();
    let [path, unused] = ["disk.given", "unused.given"].map(|name| scratch.path(name));
    let sockets = [unix("disk", &path), unix("spare", &unused), "pipe:tube".into()];
    let mut server = given(disk(&scratch, &at(&path)), &sockets).start();
    server.signal(Signal::SIGTERM);
    assert!(server.wait().success());
    let log = server.log();
    let line = format!(
        "warning: inherited sockets that no option uses: file descriptor 4, spare, {}; \
         file descriptor 5, tube, not a listening stream socket\n",
        unused.display()
    );
    assert_eq!(log.matches(&line).count(), 1, "{log}");
    assert!(unused.exists());
}

#[test]
fn missing_sockets_are_refused() {
    let scratch = Scratch::new();
    let by = |fd: &str| disk(&scratch, &format!("addr.type=fd,addr.str={fd}"));
    let pipe = ["pipe:tube".to_owned()];
    for (command, words) in [
        (given(by("other"), &pipe), "Unable to parse FD number other\nNo socket of that name"),
        (given(by("tube"), &pipe), "file descriptor 3, tube, not a listening stream socket"),
        (given(by("3"), &pipe), "file descriptor 3, tube, not a listening stream socket"),
        (by("1"), "file descriptor 1, not a listening stream socket"),
        (by("77"), "file descriptor 77"),
    ] {
        let (status, log) = command.run();
        assert_eq!(status.code(), Some(1), "{log}");
        assert!(log.contains(words), "{words}: {log}");
    }
    // Given to another process.
    let command = by("disk").env("LISTEN_PID", "1").env("LISTEN_FDS", "1");
    let (_, log) = command.env("LISTEN_FDNAMES", "disk").run();
    assert!(log.contains("Unable to parse FD number disk"), "{log}");
}

#[test]
fn the_daemon_in_the_background_has_them_too() {
    let scratch = Scratch::new();
    let (path, pid_file) = (scratch.path("disk.given"), scratch.path("background.pid"));
    let command = disk(&scratch, &at(&path)).arg("--daemonize").arg("--pidfile");
    let command = command.arg(pid_file.to_str().expect("UTF-8"));
    let (status, log) = given(command, &[unix("disk", &path)]).run();
    assert!(status.success(), "{log}");
    BlkClient::connect(&path, 1, 16).expect("a device").read(0, 4096);
    let pid = std::fs::read_to_string(&pid_file).expect("a pid file");
    let pid = nix::unistd::Pid::from_raw(pid.trim().parse().expect("a number"));
    nix::sys::signal::kill(pid, Signal::SIGTERM).expect("it lives");
    eventually("the end of the daemon", || (!pid_file.exists()).then_some(()));
    assert!(path.exists());
}

/// systemd's own program starts the daemon when the first front end connects.
#[test]
fn systemd_starts_the_daemon_for_the_first_front_end() {
    let scratch = Scratch::new();
    let path = scratch.path("disk.given");
    let arguments = [format!("--listen={}", path.display()), "--fdname=disk".into()];
    let command = disk(&scratch, "addr.type=fd,addr.str=disk");
    let mut server = command.wrapped_by_with(tool("systemd-socket-activate"), &arguments).spawn();
    // The socket exists before systemd listens on it.
    let mut client = eventually("a socket", || BlkClient::connect(&path, 1, 16).ok());
    client.read(0, 4096);
    drop(client);
    server.signal(Signal::SIGTERM);
    assert!(server.wait().success());
}
