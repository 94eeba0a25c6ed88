//! `ringmill ctl`, with ringmill's monitor and with qemu-storage-daemon's.

use std::os::unix::net::UnixListener;
use std::path::Path;

use integration::{Qmp, Scratch, Server, ServerCommand, eventually, tied_command, tool};
use serde_json::{Value, json};

/// What `ringmill ctl SOCKET WORDS…` prints, and whether it succeeds.
fn ctl(scratch: &Scratch, socket: &Path, words: &[&str]) -> (bool, String) {
    let command = ServerCommand::other_command(scratch, "ctl").named("ctl");
    let command = command.arg(socket.to_str().expect("UTF-8"));
    let (status, output) = words.iter().fold(command, |command, word| command.arg(*word)).run();
    (status.success(), output)
}

fn done(scratch: &Scratch, socket: &Path, words: &[&str]) -> String {
    let (success, output) = ctl(scratch, socket, words);
    assert!(success, "{words:?}: {output}");
    output
}

fn refused(scratch: &Scratch, socket: &Path, words: &[&str]) -> String {
    let (success, output) = ctl(scratch, socket, words);
    assert!(!success, "{words:?}: {output}");
    output
}

/// The cells of a table's rows, its heading first. No cell of these has blanks that matter.
fn rows(table: &str) -> Vec<Vec<&str>> {
    table
        .lines()
        .map(|line| line.split("  ").map(str::trim).filter(|c| !c.is_empty()).collect())
        .collect()
}

/// What both daemons answer alike.
fn conversation(scratch: &Scratch, socket: &Path, image: &Path) {
    let done = |words: &[&str]| done(scratch, socket, words);
    let listed = done(&[]);
    assert!(
        listed.lines().any(|l| l.starts_with("  blockdev-add ") && l.contains("open a block")),
        "{listed}"
    );
    assert_eq!(done(&["help"]), listed);
    assert_eq!(done(&["query-commands"]), listed);
    assert!(done(&["query-version"]).contains("qemu.major"));
    let none = done(&["query-block-exports"]);
    assert!(none.starts_with("EXPORT  TYPE ") && none.lines().count() == 1, "{none}");
    let filename = format!("filename={}", image.display());
    // The driver's name may go without its key, as on the command line.
    let add = ["blockdev-add", "file", "node-name=disk", &filename, "cache.direct=off"];
    assert_eq!(done(&add), "");
    let part = r#"{"driver": "raw", "node-name": "part", "file": "disk", "size": 1048576}"#;
    assert_eq!(done(&["blockdev-add", part, "read-only=on"]), "");
    let nodes = done(&["query-named-block-nodes"]);
    let nodes = rows(&nodes);
    assert_eq!(nodes[0][..3], ["NODE", "DRIVER", "SIZE"], "{nodes:?}");
    let disk = nodes.iter().find(|row| row[0] == "disk").expect("the node");
    assert_eq!((disk[1], disk[2], disk[4]), ("file", "3 MiB", "no"), "{nodes:?}");
    let raw = nodes.iter().find(|row| row[0] == "part").expect("the node");
    assert_eq!((raw[1], raw[2], raw[4]), ("raw", "1 MiB", "yes"), "{nodes:?}");
    assert_eq!((nodes[0][5], disk[5]), ("ACTIVE", "yes"), "{nodes:?}");
    let json: Value =
        serde_json::from_str(&done(&["query-named-block-nodes", "--json"])).expect("JSON");
    assert_eq!(json.as_array().map(Vec::len), Some(2));
    // Numbers are numbers, whatever they look like here.
    done(&["object-add", "iothread", "id=io0", "poll-max-ns=1000"]);
    let get = ["qom-get", "path=/objects/io0", "property=poll-max-ns"];
    assert_eq!(done(&get), "1000\n");
    done(&["qom-set", "path=/objects/io0", "property=poll-max-ns", "value=2000"]);
    assert_eq!(done(&get), "2000\n");
    // A daemon's error is the error.
    let refused = |words: &[&str]| refused(scratch, socket, words);
    let missing = refused(&["blockdev-del", "node-name=nothing"]);
    assert_eq!(missing, "ringmill: Failed to find node with node-name='nothing'\n");
    let unknown = refused(&["no-such-command", "a=1"]);
    assert!(unknown.starts_with("ringmill: The command no-such-command has not been found"));
    assert!(refused(&["blockdev-del", "node-name=disk"]).contains("disk"), "it is in use");
    done(&["blockdev-del", "node-name=part"]);
    done(&["blockdev-del", "node-name=disk"]);
    done(&["object-del", "id=io0"]);
}

fn image(scratch: &Scratch) -> std::path::PathBuf {
    let path = scratch.path("disk.img");
    std::fs::write(&path, vec![0; 3 << 20]).expect("an image");
    path
}

#[test]
fn ctl_works_with_ringmill() {
    let scratch = Scratch::new();
    let image = image(&scratch);
    let server = ServerCommand::new(&scratch).monitor("qmp").start();
    let socket = server.socket("qmp");
    conversation(&scratch, &socket, &image);
    // Nothing that is wrong is sent: what is wrong is said by the same tables.
    let wrong = refused(&scratch, &socket, &["object-add", "iothread", "id=x", "poll-max-ns=abc"]);
    assert_eq!(
        wrong,
        "ringmill: Invalid parameter type for 'poll-max-ns', expected: integer\n\
         'ringmill ctl <socket> object-add help' lists its arguments.\n"
    );
    let help = done(&scratch, &socket, &["blockdev-add", "file", "help"]);
    assert!(help.contains("filename=<path>") && help.contains("locking="), "{help}");
    server.stop();
}

#[test]
fn ctl_works_with_qemu_storage_daemon() {
    let scratch = Scratch::new();
    let image = image(&scratch);
    let socket = scratch.path("qsd.sock");
    let chardev = format!("socket,id=c,path={},server=on,wait=off", socket.display());
    let mut qsd = tied_command(&tool("qemu-storage-daemon"))
        .args(["--chardev", &chardev, "--monitor", "chardev=c"])
        .spawn()
        .expect("qemu-storage-daemon runs");
    drop(Qmp::connect(&socket));
    conversation(&scratch, &socket, &image);
    // What ringmill does not know goes there as it looks.
    let query = done(&scratch, &socket, &["query-block-jobs"]);
    assert_eq!(query.lines().count(), 1, "{query}");
    done(&scratch, &socket, &["quit"]);
    assert!(qsd.wait().expect("it was started here").success());
}

/// Messages of several lines (`pretty=on`), of both daemons, and commands as QMP writes them.
#[test]
fn monitors_that_indent_are_understood() {
    let scratch = Scratch::new();
    let [ours, theirs] = ["ours.sock", "theirs.sock"].map(|name| scratch.path(name));
    let chardev = |path: &Path| format!("socket,id=c,path={},server=on,wait=off", path.display());
    let mut server = ServerCommand::new(&scratch)
        .args(["--chardev", &chardev(&ours), "--monitor", "chardev=c,pretty=on"])
        .start();
    let mut qsd = tied_command(&tool("qemu-storage-daemon"))
        .args(["--chardev", &chardev(&theirs), "--monitor", "chardev=c,pretty=on"])
        .spawn()
        .expect("qemu-storage-daemon runs");
    // A connection that is closed at once can end QSD (seen with 10.0.2).
    eventually("QSD's monitor", || ctl(&scratch, &theirs, &["query-version"]).0.then_some(()));
    for socket in [&ours, &theirs] {
        assert!(done(&scratch, socket, &["query-version"]).contains("qemu.major"));
        let message = r#"{"execute": "query-version", "arguments": {}, "id": 1}"#;
        let answer: Value =
            serde_json::from_str(&done(&scratch, socket, &[message])).expect("JSON");
        assert!(answer["qemu"]["major"].is_u64(), "{answer}");
    }
    let node =
        r#"{"execute": "blockdev-add", "arguments": {"driver": "null-co", "node-name": "n"}}"#;
    done(&scratch, &ours, &[node]);
    assert!(done(&scratch, &ours, &["query-named-block-nodes"]).contains("null-co"));
    for wrong in ["{execute", r#"{"exec": "quit"}"#, "{}", r#"{"execute": 1}"#] {
        let why = refused(&scratch, &ours, &[wrong]);
        assert!(why.contains("not a QMP command") && why.contains("\nUsage: "), "{why}");
    }
    let run = |command: &'static str, words: &[&str]| {
        let command = ServerCommand::other_command(&scratch, command).named(command);
        let command = command.arg(ours.to_str().expect("UTF-8"));
        let (status, output) = words.iter().fold(command, |command, word| command.arg(*word)).run();
        assert!(status.success(), "{output}");
    };
    run("top", &["--batch", "--count", "1", "--interval-ms", "10"]);
    server.upgrade_by(|_| run("upgrade", &[]));
    done(&scratch, &theirs, &["quit"]);
    assert!(qsd.wait().expect("it was started here").success());
    server.stop();
}

#[test]
fn what_a_foreign_peer_says_does_not_reach_the_terminal() {
    let scratch = Scratch::new();
    let socket = scratch.path("foreign.sock");
    let listener = UnixListener::bind(&socket).expect("a socket");
    let peer = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        std::io::Write::write_all(&mut stream, b"\x1b[31mSSH-2.0\r\n").expect("it listens");
    });
    let why = refused(&scratch, &socket, &["query-version"]);
    assert_eq!(why, "ringmill: this is not QMP: \\u{1b}[31mSSH-2.0\n");
    peer.join().expect("it has written");
}

#[test]
fn events_are_followed_until_the_daemon_ends() {
    let scratch = Scratch::new();
    let null = "null-co,node-name=n,size=1048576";
    // A monitor serves one client at a time.
    let command = ServerCommand::new(&scratch).monitor("qmp").monitor("lines").monitor("json");
    let server = command.arg("--blockdev").arg(null).start();
    let follow = |name, option: Option<&str>| {
        let command = ServerCommand::other_command(&scratch, "ctl").named(name);
        let socket = server.socket(name);
        let command = command.arg(socket.to_str().expect("UTF-8")).arg("events");
        option.iter().fold(command, |command, option| command.arg(*option)).spawn()
    };
    let mut followers: Vec<Server> = vec![follow("lines", None), follow("json", Some("--json"))];
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    // Until both listen.
    eventually("an event in both", || {
        let addr = json!({"type": "unix", "path": server.socket("e")});
        let export = json!({"type": "vhost-user-blk", "id": "e", "node-name": "n", "addr": addr});
        qmp.execute("block-export-add", export);
        qmp.execute("block-export-del", json!({"id": "e"}));
        qmp.wait_for("BLOCK_EXPORT_DELETED");
        followers
            .iter()
            .all(|follower| follower.log().contains("BLOCK_EXPORT_DELETED"))
            .then_some(())
    });
    let (lines, json) = (followers[0].log(), followers[1].log());
    let first = lines.lines().next().expect("a line");
    assert!(first.ends_with(" BLOCK_EXPORT_DELETED id=e"), "{first}");
    let event: Value = serde_json::from_str(json.lines().next().expect("a line")).expect("JSON");
    assert_eq!(event["data"], json!({"id": "e"}));
    server.stop();
    for follower in &mut followers {
        assert!(follower.wait().success());
    }
}

/// The table shows each logical unit of a target, and whether an error has stopped it.
#[test]
fn exports_are_shown_with_luns_and_io_status() {
    let scratch = Scratch::new();
    let node = |name: &str| format!("null-co,node-name={name},size=1048576");
    let command = ServerCommand::new(&scratch).monitor("qmp").arg("--blockdev").arg(node("a"));
    let server = command.arg("--blockdev").arg(node("b")).start();
    let socket = server.socket("qmp");
    let add = |words: &[&str]| {
        let address = format!("addr.path={}", server.socket(words[1]).display());
        let address = ["addr.type=unix", &address];
        done(&scratch, &socket, &[&["block-export-add"], words, &address[..]].concat());
    };
    add(&["vhost-user-scsi", "id=scsi", "luns.0=b", "luns.1=a", "werror=stop"]);
    add(&["vhost-user-scsi", "id=one", "node-name=a"]);
    add(&["vhost-user-blk", "id=blk", "node-name=a"]);
    let shown = done(&scratch, &socket, &["query-block-exports"]);
    let rows = rows(&shown);
    let luns = rows[0].iter().position(|&heading| heading == "LUNS").expect("a column");
    let status = rows[0].iter().position(|&heading| heading == "IO-STATUS").expect("a column");
    let row = |name: &str| rows.iter().find(|row| row[0] == name).expect("the export");
    assert_eq!((row("scsi")[luns], row("scsi")[status]), ("b,a", "ok"), "{shown}");
    assert_eq!((row("one")[luns], row("blk")[luns]), ("a", "-"), "{shown}");
    server.stop();
}

#[test]
fn a_missing_monitor_is_an_error() {
    let scratch = Scratch::new();
    let nowhere = scratch.path("nowhere");
    let error = refused(&scratch, &nowhere, &["query-version"]);
    assert!(error.contains("connect failed: No such file or directory"), "{error}");
}
