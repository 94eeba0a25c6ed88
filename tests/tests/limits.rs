//! Limits of what untrusted clients can occupy: docs/SECURITY.md lists them. Limits of messages are tested next to their
//! parsers.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::process::Command;

use integration::nbd::{RawNbd, nbd_export, nbd_server};
use integration::wire;
use integration::{
    BlkClient, Image, PATIENCE, Qmp, Scratch, Server, ServerCommand, eventually, pattern, tool,
};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::Signal;
use serde_json::json;

/// A front end that breaks the rules repeatedly does not flood the log, and does not suppress messages about others.
#[test]
fn the_log_has_a_rate_by_source() {
    const TIMES: usize = 500;
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 1);
    let mut server = ServerCommand::new(&scratch)
        .file("disk", &image, "")
        .file("other", &image, "locking=off")
        .export("disk", "writable=off")
        .export("other", "writable=off")
        .start();
    let rubbish = |node: &str| {
        let mut stream = wire::connect(&server.socket(node));
        // The daemon may have closed the connection.
        let _ = stream.write_all(&wire::header(wire::GET_FEATURES, 7, u32::MAX));
        wire::assert_closed(stream);
    };
    (0..TIMES).for_each(|_| rubbish("disk"));
    rubbish("other");
    let told = |node: &str| {
        let line = format!("warning: export {node}: closed the connection");
        server.log().lines().filter(|text| text.contains(&line)).count()
    };
    eventually("a line about the other", || (told("other") == 1).then_some(()));
    let seen = told("disk");
    assert!((20..TIMES / 2).contains(&seen), "{seen} lines");
    server.signal(Signal::SIGTERM);
    assert!(server.wait().success());
    // By now the number of suppressed messages is logged.
    let log = server.log();
    let left_out = log.lines().filter_map(|line| {
        let (_, text) = line.split_once(": export disk: ")?;
        text.strip_suffix(" similar lines were left out")
    });
    let left_out: usize = left_out.map(|count| count.parse::<usize>().expect("a number")).sum();
    let shown = log.lines().filter(|line| line.contains("export disk: ")).count();
    // Each connection was made and closed.
    assert!(shown + left_out >= 2 * TIMES, "{shown} shown and {left_out} left out: {log}");
}

/// Clients of one server leave descriptors for other uses, even if their number has no limit.
#[test]
fn connections_take_at_most_half_of_the_descriptors() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("a limit");
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).expect("the soft limit may be the hard one");
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    for (connections, warned) in [("0", false), ("600", true)] {
        let command = ServerCommand::new(&scratch).file("disk", &image, "").export("disk", "");
        let options = format!(",max-connections={connections},handshake-max-seconds=0");
        let command = nbd_export(nbd_server(command, &scratch, &options), "disk", "");
        // A limit of 1000 files.
        let server = command.wrapped_by(env!("CARGO_BIN_EXE_limit-open-files")).start();
        let warning = "max-connections=600, but half of the 1000 files";
        assert_eq!(server.log().contains(warning), warned, "{}", server.log());
        let socket = scratch.path("nbd.sock");
        let mut served: Vec<_> = (0..500).map(|_| RawNbd::greet(&socket)).collect();
        // Further connections wait in the backlog.
        let waiting = UnixStream::connect(&socket).expect("the backlog");
        waiting.set_nonblocking(true).expect("a socket");
        BlkClient::connect(&server.socket("disk"), 1, 16).expect("a device").read(0, 4096);
        assert!(server.open_files() < 560, "{} files", server.open_files());
        let mut greeting = [0; 18];
        let read = |bytes: &mut [u8]| std::io::Read::read(&mut &waiting, bytes);
        assert!(read(&mut greeting).is_err(), "no client beyond the limit is greeted");
        served.pop();
        eventually("the next to be greeted", || read(&mut greeting).ok());
        drop((served, waiting));
        server.stop();
    }
}

/// Limits the daemon's descriptors to numbers below `most`.
fn limit_descriptors(server: &Server, most: u32) {
    let mut prlimit = Command::new(tool("prlimit"));
    prlimit.args(["--pid", &server.pid().to_string(), &format!("--nofile={most}:")]);
    assert!(prlimit.status().expect("prlimit runs").success());
}

/// Connections made without free descriptors wait, and are served once descriptors are free, without another event.
/// Existing connections, monitors included, are served meanwhile.
#[test]
fn connections_wait_for_free_descriptors() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let command = ServerCommand::new(&scratch).monitor("qmp").file("disk", &image, "locking=off");
    let command = command.file("more", &image, "locking=off");
    let command = command.export("disk", "writable=off").export("more", "writable=off");
    // Over TCP; on a unix socket the NBD server accepts by the same code as an export.
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let command = command.stdin(listener).arg("--nbd-server").arg("addr.type=fd,addr.str=0");
    let server = nbd_export(command, "disk", "").start();
    let mut there = BlkClient::connect(&server.socket("disk"), 1, 16).expect("a device");
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    // The connection is set up completely.
    there.read(0, pattern::BLOCK);

    let is_free = |number: &u32| !server.has_open(*number);
    limit_descriptors(&server, (0..).find(is_free).expect("a number"));
    let mut client = TcpStream::connect(address).expect("the backlog");
    client.set_read_timeout(Some(PATIENCE)).expect("a time limit");
    let mut front_end = wire::connect(&server.socket("more"));
    for who in ["NBD server", "export more"] {
        let line = format!("{who}: accept failed: Too many open files");
        eventually(&line, || server.log().contains(&line).then_some(()));
    }
    assert_eq!(pattern::generation(1, &there.read(8, pattern::BLOCK)), Ok(0));
    qmp.execute("query-block-exports", json!({}));

    limit_descriptors(&server, 1000);
    let mut greeting = [0; 16];
    client.read_exact(&mut greeting).expect("the client is greeted");
    assert_eq!(&greeting, b"NBDMAGICIHAVEOPT");
    wire::get_features(&mut front_end);
    drop((there, client, front_end, qmp));
    server.stop();
}
