//! Clients are served once the whole command line is carried out, and no earlier.

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::PathBuf;

use integration::nbd::RawNbd;
use integration::{BlkClient, PATIENCE, Qmp, Scratch, Server, ServerCommand, eventually};

/// More clients than threads, and more than fit into one iteration of a loop.
const CLIENTS: usize = 40;
const EXPORTS: usize = 8;

/// Returns `addr.*` options for a Unix socket in the scratch folder.
fn at(scratch: &Scratch, name: &str) -> String {
    format!("addr.type=unix,addr.path={}", scratch.path(name).display())
}

fn disk(command: ServerCommand<'_>, name: String) -> ServerCommand<'_> {
    command
        .iothread(&format!("thread-{name}"))
        .arg("--blockdev")
        .arg(format!("null-co,node-name={name},size=1048576"))
        .arg("--export")
        .arg(format!("nbd,id={name},node-name={name},iothread=thread-{name}"))
}

/// All clients connect before the daemon starts. The daemon makes its exports one after the other.
#[test]
fn clients_of_an_inherited_socket_wait_for_the_exports() {
    let scratch = Scratch::new();
    let path = scratch.path("nbd.given");
    let listener = UnixListener::bind(&path).expect("a socket");
    let mut clients: Vec<_> = (0..CLIENTS).map(|_| RawNbd::connect(&path)).collect();
    let command = ServerCommand::new(&scratch).stdin(listener).arg("--nbd-server");
    let command = command.arg("addr.type=fd,addr.str=0,max-connections=0");
    for (number, client) in clients.iter_mut().enumerate() {
        client.ask_for(&format!("disk{}", number % EXPORTS));
    }
    let server = (0..EXPORTS).fold(command, |command, i| disk(command, format!("disk{i}"))).start();
    for client in &mut clients {
        client.expect_greeting();
        client.expect_export();
        client.request(0, 7, 0, 512);
        assert_eq!(client.reply(), (0, 7));
    }
    drop(clients);
    server.stop();
}

/// A daemon with all servers, and their clients. It waits for a client of its last chardev, before it carries
/// out the remaining options.
struct Waiting {
    server: Server,
    late: PathBuf,
    manager: UnixDatagram,
    nbd: RawNbd,
    monitor: UnixStream,
    metrics: UnixStream,
    front_end: UnixStream,
}

/// Starts a daemon, and connects clients of each kind. Each client has sent a request.
fn waiting(scratch: &Scratch, last: &[&str]) -> Waiting {
    let notify = scratch.path("notify");
    let manager = UnixDatagram::bind(&notify).expect("a socket");
    manager.set_read_timeout(Some(PATIENCE)).expect("a time limit");
    let late = scratch.path("late.sock");
    let command = ServerCommand::new(scratch)
        .env("NOTIFY_SOCKET", notify.to_str().expect("UTF-8"))
        .monitor("qmp")
        .args(["--metrics", &at(scratch, "metrics.sock")])
        .args(["--nbd-server", &at(scratch, "nbd.sock")]);
    let command = disk(command, "disk".into())
        .args([
            "--export",
            &format!("vhost-user-blk,id=vu,node-name=disk,{}", at(scratch, "vu.sock")),
        ])
        .args(["--pidfile", scratch.path("daemon.pid").to_str().expect("UTF-8")])
        .args(["--chardev", &format!("socket,id=late,path={},server=on", late.display())])
        .args(["--monitor", "late"]);
    let server = last.iter().fold(command, |command, word| command.arg(*word)).spawn();
    eventually("the last chardev", || late.exists().then_some(()));
    let connect = |name: &str| {
        let stream = UnixStream::connect(scratch.path(name)).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a time limit");
        stream
    };
    let mut monitor = connect("qmp.sock");
    monitor.write_all(b"{\"execute\": \"qmp_capabilities\"}\n").expect("it is kept");
    let mut metrics = connect("metrics.sock");
    metrics.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").expect("it is kept");
    // VHOST_USER_GET_FEATURES, version 1, no payload.
    let mut front_end = connect("vu.sock");
    let get_features = [1u32, 1, 0].map(u32::to_ne_bytes).concat();
    front_end.write_all(&get_features).expect("it is kept");
    let mut nbd = RawNbd(connect("nbd.sock"));
    nbd.ask_for("disk");
    Waiting { server, late, manager, nbd, monitor, metrics, front_end }
}

/// Reads until the other side closes the connection.
fn all_that_comes(mut stream: UnixStream) -> Vec<u8> {
    let mut all = Vec::new();
    match stream.read_to_end(&mut all) {
        Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("it is there: {error}"),
        _ => all,
    }
}

#[test]
fn an_error_in_the_last_option_admits_no_client() {
    let scratch = Scratch::new();
    // The file is missing, which shows only when the option is carried out.
    let mut waiting = waiting(&scratch, &["--blockdev", "file,node-name=f,filename=none.img"]);
    // The socket file is there a moment before the daemon listens.
    let late = eventually("a listener", || UnixStream::connect(&waiting.late).ok());
    assert_eq!(waiting.server.wait().code(), Some(1));
    let Waiting { server, manager, nbd, monitor, metrics, front_end, .. } = waiting;
    let log = server.log();
    assert!(log.contains("none.img") && !log.contains("connected\n"), "{log}");
    for (who, stream) in [
        ("NBD", nbd.0),
        ("the monitor", monitor),
        ("the monitor that was waited for", late),
        ("metrics", metrics),
        ("vhost-user", front_end),
    ] {
        let all = all_that_comes(stream);
        assert!(all.is_empty(), "{who}: {}", String::from_utf8_lossy(&all));
    }
    for left in ["daemon.pid", "nbd.sock", "vu.sock", "qmp.sock"] {
        assert!(!scratch.path(left).exists(), "{left}");
    }
    manager.set_nonblocking(true).expect("a mode");
    let mut word = [0; 512];
    let told =
        manager.recv(&mut word).map(|len| String::from_utf8_lossy(&word[..len]).into_owned());
    assert!(!told.as_ref().is_ok_and(|told| told.contains("READY")), "{told:?}");
}

#[test]
fn clients_that_have_waited_are_served() {
    let scratch = Scratch::new();
    let waiting = waiting(&scratch, &[]);
    assert!(!scratch.path("daemon.pid").exists());
    // The socket file is there a moment before the daemon listens.
    let late = eventually("a listener", || UnixStream::connect(&waiting.late).ok());
    let Waiting { server, manager, mut nbd, monitor, mut metrics, mut front_end, .. } = waiting;
    nbd.expect_greeting();
    nbd.expect_export();
    for stream in [&late, &monitor] {
        stream.set_read_timeout(Some(PATIENCE)).expect("a time limit");
        let mut greeting = String::new();
        BufReader::new(stream).read_line(&mut greeting).expect("a greeting");
        assert!(greeting.starts_with("{\"QMP\": "), "{greeting}");
    }
    let mut reply = [0; 20];
    front_end.read_exact(&mut reply).expect("the features");
    drop(front_end);
    let mut page = String::new();
    metrics.read_to_string(&mut page).expect("a page");
    assert!(page.starts_with("HTTP/1.1 200"), "{page}");
    let mut word = [0; 512];
    let len = manager.recv(&mut word).expect("that it is ready");
    assert!(word[..len].starts_with(b"READY=1\n"));
    // The pid file is filled no later than READY is sent.
    let pid = fs::read_to_string(scratch.path("daemon.pid")).expect("a pid file");
    assert_eq!(pid, format!("{}\n", server.pid()));
    BlkClient::connect(&scratch.path("vu.sock"), 1, 16).expect("a device").read(0, 4096);
    drop((nbd, late, monitor));
    // Servers that monitor commands make accept clients at once.
    let mut qmp = Qmp::connect(&scratch.path("qmp.sock"));
    let addr = |name: &str| serde_json::json!({"type": "unix", "path": scratch.path(name)});
    qmp.execute(
        "block-export-add",
        serde_json::json!({"type": "vhost-user-blk", "id": "vu2", "node-name": "disk", "addr": addr("vu2.sock")}),
    );
    BlkClient::connect(&scratch.path("vu2.sock"), 1, 16).expect("a device").read(0, 4096);
    qmp.execute("nbd-server-stop", serde_json::json!({}));
    qmp.execute(
        "nbd-server-start",
        serde_json::json!({"addr": {"type": "unix", "data": {"path": scratch.path("nbd2.sock")}}}),
    );
    RawNbd::greet(&scratch.path("nbd2.sock"));
    drop(qmp);
    server.stop();
}
