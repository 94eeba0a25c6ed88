//! QMP: commands, and clients that misbehave.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use integration::{
    BlkClient, Image, PATIENCE, Port, Qmp, Scratch, Server, ServerCommand, eventually, merged,
    pattern,
};
use serde_json::{Value, json};

fn daemon(scratch: &Scratch) -> Server {
    ServerCommand::new(scratch).monitor("qmp").logging(Some("debug")).start()
}

fn client(server: &Server) -> Qmp {
    Qmp::connect(&server.socket("qmp"))
}

/// A connection before the negotiation.
fn socket(server: &Server) -> UnixStream {
    let stream = UnixStream::connect(server.socket("qmp")).expect("a monitor");
    stream.set_read_timeout(Some(PATIENCE)).expect("a time limit");
    stream
}

fn vhost_user_blk(server: &Server, id: &str, node: &str, more: Value) -> Value {
    let addr = json!({"type": "unix", "path": server.socket(id)});
    let options = json!({
        "type": "vhost-user-blk", "id": id, "node-name": node, "writable": true, "addr": addr,
    });
    merged(options, &more)
}

#[test]
fn a_disk_comes_and_goes_while_the_daemon_runs() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let server = daemon(&scratch);
    let mut qmp = client(&server);
    for round in 1..=3 {
        qmp.execute("object-add", json!({"qom-type": "iothread", "id": "io0"}));
        let file = json!({"driver": "file", "filename": image.path()});
        let node = json!({"driver": "raw", "node-name": "disk", "file": file});
        qmp.execute("blockdev-add", node);
        let export = vhost_user_blk(&server, "e", "disk", json!({"iothread": "io0"}));
        qmp.execute("block-export-add", export);
        let expected = json!([
            {"id": "e", "node-name": "disk", "type": "vhost-user-blk", "shutting-down": false}
        ]);
        assert_eq!(qmp.execute("query-block-exports", json!({})), expected);

        let mut blk = BlkClient::connect(&server.socket("e"), 1, 16).expect("the export serves");
        blk.write(8, &pattern::block(1, round));

        // Nothing in use can be deleted.
        for (command, arguments) in [
            ("object-del", json!({"id": "io0"})),
            ("blockdev-del", json!({"node-name": "disk"})),
            ("block-export-del", json!({"id": "e"})),
        ] {
            let why = qmp.refused(command, arguments);
            assert!(why.contains("in use"), "{command}: {why}");
        }
        assert_eq!(pattern::generation(1, &blk.read(8, pattern::BLOCK)), Ok(round));

        qmp.execute("block-export-del", json!({"id": "e", "mode": "hard"}));
        assert_eq!(qmp.wait_for("BLOCK_EXPORT_DELETED"), json!({"id": "e"}));
        assert!(!server.socket("e").exists());
        assert_eq!(qmp.execute("query-block-exports", json!({})), json!([]));
        qmp.execute("blockdev-del", json!({"node-name": "disk"}));
        qmp.execute("object-del", json!({"id": "io0"}));
        assert_eq!(qmp.execute("query-iothreads", json!({})), json!([]));
        assert_eq!(pattern::generation(1, &image.read(4096, pattern::BLOCK)), Ok(round));
        drop(blk);
    }
    server.stop();
}

#[test]
fn failed_commands_leave_nothing_behind() {
    let scratch = Scratch::new();
    let server = daemon(&scratch);
    let mut qmp = client(&server);
    let node = json!({"driver": "null-co", "node-name": "n"});
    qmp.execute("blockdev-add", node.clone());
    let mut export = vhost_user_blk(&server, "e", "n", json!({"iothread": "io0"}));
    assert_eq!(qmp.refused("block-export-add", export.clone()), "iothread \"io0\" not found");
    qmp.execute("object-add", json!({"qom-type": "iothread", "id": "io0"}));
    let nowhere = json!({"type": "unix", "path": "/nonexistent/socket"});
    let somewhere = std::mem::replace(&mut export["addr"], nowhere);
    qmp.refused("block-export-add", export.clone());
    qmp.refused("blockdev-add", node);
    let missing = json!({"driver": "file", "filename": "/nonexistent"});
    let nested = json!({"driver": "raw", "node-name": "r", "file": missing});
    qmp.refused("blockdev-add", nested);
    // The same again, without the error.
    export["addr"] = somewhere;
    qmp.execute("block-export-add", export);
    qmp.execute("blockdev-add", json!({"driver": "raw", "node-name": "r", "file": "n"}));
    server.stop();
}

/// The change reaches the thread's loop, not only the answer of the command.
#[test]
fn polling_is_tuned_while_the_thread_runs() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let server = ServerCommand::new(&scratch)
        .monitor("qmp")
        .arg("--object")
        .arg("iothread,id=io0,poll-policy=stepped,poll-max-ns=1000000000")
        .file("disk", &image, "")
        .export("disk", "iothread=io0")
        .start();
    let mut qmp = client(&server);
    let set = |qmp: &mut Qmp, ns: u64| {
        let property = json!({"path": "/objects/io0", "property": "poll-max-ns", "value": ns});
        qmp.execute("qom-set", property);
        let property = json!({"path": "/objects/io0", "property": "poll-max-ns"});
        assert_eq!(qmp.execute("qom-get", property), json!(ns));
    };
    let mut blk = BlkClient::connect(&server.socket("disk"), 1, 16).expect("the export serves");
    // How often the thread sleeps during a number of requests, with pauses in between.
    let mut sleeps = || {
        let before = server.sleeps("io0");
        for _ in 0..200 {
            blk.read(8, pattern::BLOCK);
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        server.sleeps("io0") - before
    };
    // A thread without a CPU finds the next request when it runs again, so repeat.
    eventually("sleeps with polling off, and far fewer with polling on", || {
        set(&mut qmp, 0);
        let without = sleeps();
        set(&mut qmp, 1_000_000_000);
        let with = sleeps();
        println!("{with} sleeps with polling on, {without} without");
        (without >= 150 && with < without / 2).then_some(())
    });
    server.stop();
}

#[test]
fn quit_is_answered_and_takes_everything_down() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let mut server = ServerCommand::new(&scratch)
        .monitor("qmp")
        .file("disk", &image, "")
        .export("disk", "")
        .start();
    let mut other = client(&server);
    drop(socket(&server));
    other.execute("block-export-add", vhost_user_blk(&server, "newer", "disk", json!({})));
    other.send("{'execute': 'quit'}");
    // In QSD's order.
    let gone = |id| json!({"event": "BLOCK_EXPORT_DELETED", "data": {"id": id}});
    for expected in [gone("newer"), gone("disk"), json!({"return": {}})] {
        let mut message = other.message();
        message.as_object_mut().expect("an object").remove("timestamp");
        assert_eq!(message, expected);
    }
    other.closed();
    assert!(server.wait().success());
    for name in ["qmp", "disk"] {
        assert!(!server.socket(name).exists(), "{name} was left behind");
    }
}

/// Each client has a separate conversation, and all that have negotiated receive events.
#[test]
fn several_monitors_at_once() {
    let scratch = Scratch::new();
    let server =
        ServerCommand::new(&scratch).monitor("qmp").monitor("two").monitor("three").start();
    let mut one = client(&server);
    let mut two = Qmp::connect(&server.socket("two"));
    let mut silent = UnixStream::connect(server.socket("three")).expect("a monitor");
    one.execute("blockdev-add", json!({"driver": "null-co", "node-name": "n"}));
    one.execute("block-export-add", vhost_user_blk(&server, "e", "n", json!({})));
    two.execute("block-export-del", json!({"id": "e"}));
    for qmp in [&mut one, &mut two] {
        assert_eq!(qmp.wait_for("BLOCK_EXPORT_DELETED"), json!({"id": "e"}));
    }
    silent.shutdown(Shutdown::Write).expect("a socket");
    let mut heard = String::new();
    silent.read_to_string(&mut heard).expect("the greeting");
    assert_eq!(heard.lines().count(), 1, "{heard}");
    server.stop();
}

#[test]
fn the_next_client_begins_anew() {
    let scratch = Scratch::new();
    let server = daemon(&scratch);
    let mut first = client(&server);
    let mut waiting = socket(&server);
    first.send("{\"execute\": \"query-");
    drop(first);
    // The first client's unfinished command does not affect the second client.
    waiting.write_all(b"{'execute':'query-version'}\n").expect("a monitor");
    waiting.shutdown(Shutdown::Write).expect("a socket");
    let mut heard = String::new();
    waiting.read_to_string(&mut heard).expect("two lines");
    assert!(heard.starts_with("{\"QMP\""), "{heard}");
    assert!(heard.contains("Expecting capabilities negotiation"), "{heard}");
    client(&server).execute("query-version", json!({}));
    server.stop();
}

/// Reads the first line from the daemon.
fn first_line(stream: &UnixStream) -> Value {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).expect("a line");
    serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error} in {line:?}"))
}

/// One socket serves eight clients at once, even if some misbehave. The ninth is refused at once.
#[test]
fn several_clients_of_one_monitor() {
    let scratch = Scratch::new();
    let server = daemon(&scratch);
    // A client that does not negotiate could lose its place.
    let mut silent = socket(&server);
    silent.write_all(b"{'execute':'qmp_capabilities'}\n").expect("a monitor");
    // This client never reads, and sends until the socket is full.
    let mut deaf = socket(&server);
    deaf.write_all(b"{'execute':'qmp_capabilities'}\n").expect("a monitor");
    flood(&mut deaf, &b"{'execute':'query-commands'}\n".repeat(1000), 8 << 20);
    let mut clients: Vec<Qmp> = (0..6).map(|_| client(&server)).collect();
    clients[0].execute("blockdev-add", json!({"driver": "null-co", "node-name": "n"}));
    clients[1].execute("block-export-add", vhost_user_blk(&server, "e", "n", json!({})));
    // Each client negotiates separately.
    let why = clients[2].refused("qmp_capabilities", json!({}));
    assert!(why.contains("already complete"), "{why}");
    clients[2].execute("block-export-del", json!({"id": "e"}));
    for qmp in &mut clients {
        assert_eq!(qmp.wait_for("BLOCK_EXPORT_DELETED"), json!({"id": "e"}));
    }

    let mut ninth = socket(&server);
    let mut heard = String::new();
    ninth.read_to_string(&mut heard).expect("a line and the end");
    let refused: Value = serde_json::from_str(&heard).expect("one line");
    let expected = json!({"class": "GenericError", "desc":
        "chardev 'qmp' has 8 clients, which is the limit: try again when one of them has disconnected"});
    assert_eq!(refused["error"], expected);

    // A client that disconnects frees a place.
    drop(silent);
    eventually("a free place", || {
        let stream = socket(&server);
        first_line(&stream).get("QMP").map(drop)
    });
    for qmp in &mut clients {
        qmp.execute("query-version", json!({}));
    }
    server.stop();
}

/// Silent clients do not keep others out for long.
#[test]
fn clients_that_do_not_negotiate_make_room() {
    let scratch = Scratch::new();
    let server = daemon(&scratch);
    let silent: Vec<_> = (0..8).map(|_| socket(&server)).collect();
    for stream in &silent {
        assert!(first_line(stream).get("QMP").is_some());
    }
    eventually("a place", || {
        let mut stream = socket(&server);
        first_line(&stream).get("QMP")?;
        stream.write_all(b"{'execute':'qmp_capabilities'}\n").expect("a monitor");
        Some(stream)
    });
    assert!(server.log().contains("it has not negotiated"), "{}", server.log());
    server.stop();
}

#[test]
fn commands_in_pieces_and_in_heaps() {
    let scratch = Scratch::new();
    let server = daemon(&scratch);
    let mut qmp = client(&server);
    for (text, answers) in [
        ("{\"execute\":", 0),
        ("\"query-version\"", 0),
        ("} {\"execute\": \"query-version\"}{\"execute\": \"query-version\",", 2),
        ("\"id\": 1}", 1),
        (&"{\"execute\": \"query-commands\"}".repeat(1000), 1000),
    ] {
        qmp.send(text);
        for _ in 0..answers {
            let answer = qmp.answer();
            assert!(answer.get("return").is_some(), "{answer}");
        }
    }
    server.stop();
}

/// Sends until the daemon takes no more. Returns the number of bytes sent.
fn flood(stream: &mut UnixStream, text: &[u8], most: usize) -> usize {
    stream.set_nonblocking(true).expect("a socket");
    let mut sent = 0;
    let mut quiet = 0;
    // Nothing was taken for a while: the daemon has stopped reading.
    while sent < most && quiet < 100 {
        match stream.write(text) {
            Ok(written) => {
                sent += written;
                quiet = 0;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                quiet += 1;
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            Err(error) => panic!("{error}"),
        }
    }
    stream.set_nonblocking(false).expect("a socket");
    sent
}

/// The daemon stops reading its commands once too many answers are unread. Other clients are not affected.
#[test]
fn a_client_that_never_reads() {
    let scratch = Scratch::new();
    let server = ServerCommand::new(&scratch).monitor("qmp").monitor("two").start();
    let mut stream = socket(&server);
    stream.write_all(b"{'execute':'qmp_capabilities'}\n").expect("a monitor");
    let mut two = Qmp::connect(&server.socket("two"));
    let before = server.private_kib();
    let most = 64 << 20;
    let sent = flood(&mut stream, &b"{'execute':'query-commands'}\n".repeat(1000), most);
    assert!(sent < most, "all of {sent} bytes were read");
    let after = server.private_kib();
    assert!(after < before + 4096, "{before} KiB before, {after} after");
    two.execute("query-version", json!({}));

    // Events cannot wait, so their number is limited.
    let node = json!({"driver": "null-co", "node-name": "n"});
    two.execute("blockdev-add", node);
    let export = vhost_user_blk(&server, "e", "n", json!({}));
    eventually("the end of a client that does not read events", || {
        for _ in 0..100 {
            two.execute("block-export-add", export.clone());
            two.execute("block-export-del", json!({"id": "e"}));
            two.wait_for("BLOCK_EXPORT_DELETED");
        }
        server.log().contains("it does not read what it is sent").then_some(())
    });
    client(&server).execute("query-version", json!({}));
    server.stop();
}

#[test]
fn a_line_without_an_end() {
    let scratch = Scratch::new();
    let server = daemon(&scratch);
    let mut qmp = client(&server);
    let before = server.private_kib();
    qmp.send(&format!("{{\"execute\": \"{}", "x".repeat(32 << 20)));
    let answer = qmp.answer();
    assert_eq!(answer["error"]["desc"], "JSON token size limit exceeded");
    let after = server.private_kib();
    assert!(after < before + 4096, "{before} KiB before, {after} after");
    qmp.execute("query-version", json!({}));
    qmp.send(&"[".repeat(1 << 20));
    assert_eq!(qmp.answer()["error"]["desc"], "JSON nesting depth limit exceeded");
    qmp.execute("query-version", json!({}));
    server.stop();
}

#[test]
fn a_flood_of_rubbish() {
    let scratch = Scratch::new();
    let server = ServerCommand::new(&scratch).monitor("qmp").monitor("two").start();
    let mut two = Qmp::connect(&server.socket("two"));
    let mut stream = socket(&server);
    let mut reader = stream.try_clone().expect("another descriptor");
    let reads = std::thread::spawn(move || {
        let mut heard = Vec::new();
        reader.read_to_end(&mut heard).expect("answers");
        heard.split(|byte| *byte == b'\n').filter(|line| line.starts_with(b"{\"error\"")).count()
    });
    for _ in 0..20 {
        stream.write_all(&b"}]\xff%\0".repeat(400)).expect("a monitor");
        two.execute("query-version", json!({}));
    }
    stream.shutdown(Shutdown::Write).expect("a socket");
    let errors = reads.join().expect("the reader");
    assert!(errors >= 20 * 400 * 4, "{errors} errors");
    server.stop();
}

#[test]
fn over_standard_input_and_output() {
    let scratch = Scratch::new();
    let server = ServerCommand::new(&scratch)
        .arg("--chardev")
        .arg("stdio,id=s")
        .arg("--monitor")
        .arg("s,pretty=on");
    let (ours, theirs) = UnixStream::pair().expect("two sockets");
    let mut server = server.stdin(theirs).spawn();
    (&ours).write_all(b"{'execute':'qmp_capabilities'}\n{'execute':'quit','id':7}").expect("stdin");
    assert!(server.wait().success());
    let log = server.log();
    assert!(log.contains("\"id\": 7\r\n}\r\n"), "{log}");
}

/// As in QSD, standard output has the events that come after the end of standard input.
#[test]
fn the_end_of_standard_input_does_not_end_standard_output() {
    let scratch = Scratch::new();
    let server = ServerCommand::new(&scratch).monitor("qmp");
    let server = server.args(["--chardev", "stdio,id=s", "--monitor", "s"]);
    let (ours, theirs) = UnixStream::pair().expect("two sockets");
    (&ours).write_all(b"{'execute':'qmp_capabilities'}\n").expect("stdin");
    let server = server.stdin(theirs).start();
    eventually("the answer", || server.log().contains("\"return\"").then_some(()));
    drop(ours);
    let mut qmp = client(&server);
    qmp.execute("blockdev-add", json!({"driver": "null-co", "node-name": "n"}));
    qmp.execute("block-export-add", vhost_user_blk(&server, "e", "n", json!({})));
    qmp.execute("block-export-del", json!({"id": "e"}));
    eventually("the event", || server.log().contains("BLOCK_EXPORT_DELETED").then_some(()));
    server.stop();
}

#[test]
fn over_tcp_and_by_connecting_to_the_client() {
    let scratch = Scratch::new();
    let path = scratch.path("client.socket");
    let listener = std::os::unix::net::UnixListener::bind(&path).expect("a socket");
    let connect = format!("socket,id=c,path={}", path.display());
    let reserved = Port::new();
    let port = reserved.number();
    let server = ServerCommand::new(&scratch)
        .arg("--chardev")
        .arg(connect)
        .arg("--monitor")
        .arg("c")
        .arg("--chardev")
        .arg(format!("socket,id=t,host=127.0.0.1,port={port},server=on,wait=off"))
        .arg("--monitor")
        .arg("t")
        .start();
    let (mut ours, _) = listener.accept().expect("the daemon connects");
    let mut tcp = std::net::TcpStream::connect(("127.0.0.1", port)).expect("the daemon listens");
    let talk = |stream: &mut dyn Read| {
        let mut heard = String::new();
        stream.read_to_string(&mut heard).expect("lines");
        assert_eq!(heard.lines().count(), 2, "{heard}");
    };
    ours.write_all(b"{'execute':'qmp_capabilities'}").expect("a monitor");
    ours.shutdown(Shutdown::Write).expect("a socket");
    talk(&mut ours);
    tcp.write_all(b"{'execute':'qmp_capabilities'}").expect("a monitor");
    tcp.shutdown(Shutdown::Write).expect("a socket");
    talk(&mut tcp);
    server.stop();
}

/// `wait=on`: the daemon is not ready before its client has connected.
#[test]
fn a_daemon_that_waits_for_its_client() {
    let scratch = Scratch::new();
    let path = scratch.path("qmp.sock");
    let pid_file = scratch.path("pid");
    let command = |server: ServerCommand<'_>| {
        server
            .arg("--chardev")
            .arg(format!("socket,id=m,path={},server=on", path.display()))
            .arg("--monitor")
            .arg("m")
            .arg("--pidfile")
            .arg(pid_file.display().to_string())
            .spawn()
    };
    let mut server = command(ServerCommand::new(&scratch));
    let stream = eventually("the socket", || UnixStream::connect(&path).ok());
    eventually("the pid file", || pid_file.exists().then_some(()));
    drop(stream);
    server.signal(nix::sys::signal::Signal::SIGTERM);
    assert!(server.wait().success());

    // A signal also ends the wait.
    let mut server = command(ServerCommand::new(&scratch).named("other"));
    eventually("the socket", || path.exists().then_some(()));
    server.signal(nix::sys::signal::Signal::SIGTERM);
    assert!(server.wait().success());
    assert!(!pid_file.exists() && !path.exists(), "files were left behind");
}

/// A client that keeps the daemon busy cannot prevent its end.
#[test]
fn the_daemon_ends_with_a_monitor_that_is_busy() {
    let scratch = Scratch::new();
    let server = daemon(&scratch);
    let mut stream = socket(&server);
    let sender = std::thread::spawn(move || {
        // Until the daemon has ended.
        while stream.write_all(&b"{'execute':'qmp_capabilities'}".repeat(100)).is_ok() {}
    });
    eventually("a busy monitor", || server.log().contains("client connected").then_some(()));
    server.stop();
    sender.join().expect("the sender");
}
