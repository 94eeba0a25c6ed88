//! `--state`: the changes that commands made survive a kill.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use integration::nbd::{RawNbd, client_output, nbd_export, nbd_server, nbd_uri, request};
use integration::{
    BlkClient, Image, Qmp, Scratch, Server, ServerCommand, eventually, preloaded, tool,
};
use serde_json::{Value, json};
use test_requirements::{Needs, untested};

/// Size of the disks, bytes.
const SIZE: u64 = 8 << 20;
const BLOCK: usize = 4096;

fn command<'a>(scratch: &'a Scratch) -> ServerCommand<'a> {
    let file = scratch.path("state").display().to_string();
    ServerCommand::new(scratch).monitor("qmp").arg("--state").arg(file)
}

fn client(server: &Server) -> Qmp {
    Qmp::connect(&server.socket("qmp"))
}

/// Starts a daemon, and waits for its configuration: it answers no command earlier.
fn start(scratch: &Scratch) -> Server {
    let server = command(scratch).start();
    client(&server).execute("query-block-exports", json!({}));
    server
}

/// Exports an image as `disk`, over NBD.
fn serve_disk(qmp: &mut Qmp, scratch: &Scratch, image: &Path) {
    let server = json!({"addr": {"type": "unix", "data": {"path": scratch.path("nbd.sock")}}});
    qmp.execute("nbd-server-start", server);
    qmp.execute("blockdev-add", json!({"driver": "file", "node-name": "disk", "filename": image}));
    let export =
        json!({"type": "nbd", "id": "e", "node-name": "disk", "name": "disk", "writable": true});
    qmp.execute("block-export-add", export);
}

/// Fills the disk with a byte, over NBD.
fn fill(scratch: &Scratch, byte: u8) {
    let script = format!("h.pwrite(bytearray([{byte}]) * {SIZE}, 0)\nh.flush()\nh.shutdown()");
    client_output(scratch, "nbdsh", &["-u", &nbd_uri(scratch, "disk"), "-c", &script]);
}

fn check(scratch: &Scratch, byte: u8) {
    let script = format!("assert h.pread({SIZE}, 0) == bytearray([{byte}]) * {SIZE}");
    client_output(scratch, "nbdsh", &["-u", &nbd_uri(scratch, "disk"), "-c", &script]);
}

fn names(answer: &Value, member: &str) -> Vec<String> {
    let name = |one: &Value| one[member].as_str().expect("a name").to_owned();
    let mut names: Vec<_> = answer.as_array().expect("a list").iter().map(name).collect();
    names.sort();
    names
}

/// Returns the names of all nodes, exports and objects.
fn all(qmp: &mut Qmp) -> [Vec<String>; 3] {
    let nodes = qmp.execute("query-named-block-nodes", json!({"flat": true}));
    let exports = qmp.execute("query-block-exports", json!({}));
    let objects = qmp.execute("qom-list", json!({"path": "/objects"}));
    [names(&nodes, "node-name"), names(&exports, "id"), names(&objects, "name")]
}

#[test]
fn changes_by_commands_survive_each_kill() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", SIZE >> 20);
    let image = image.path();
    let node = |n: u8| json!({"driver": "null-co", "node-name": format!("n{n}"), "size": 1 << 20});
    let socket = |n: u8| json!({"type": "unix", "path": scratch.path(&format!("v{n}.sock"))});
    let steps: Vec<(&str, Value)> = vec![
        ("object-add", json!({"qom-type": "iothread", "id": "io"})),
        ("qom-set", json!({"path": "io", "property": "poll-max-ns", "value": 77})),
        (
            "object-add",
            json!({"qom-type": "throttle-group", "id": "g", "limits": {"iops-total": 5}}),
        ),
        ("qom-set", json!({"path": "g", "property": "limits", "value": {"iops-total": 9}})),
        ("blockdev-add", node(1)),
        (
            "blockdev-add",
            json!({"driver": "throttle", "node-name": "t", "throttle-group": "g", "file": "n1"}),
        ),
        (
            "block-export-add",
            json!({
                "type": "vhost-user-blk", "id": "v", "node-name": "t", "iothread": "io", "addr": socket(1),
            }),
        ),
        ("block-export-del", json!({"id": "e"})),
        ("nbd-server-add", json!({"device": "disk", "name": "again", "writable": true})),
        ("nbd-server-remove", json!({"name": "again"})),
        (
            "blockdev-reopen",
            json!({"options": [
                {"driver": "file", "node-name": "disk", "filename": image, "discard": "unmap"},
            ]}),
        ),
        ("nbd-server-stop", json!({})),
        ("block-export-del", json!({"id": "v"})),
        ("blockdev-del", json!({"node-name": "t"})),
        ("object-del", json!({"id": "g"})),
        ("blockdev-del", json!({"node-name": "disk"})),
    ];
    let server = start(&scratch);
    let mut qmp = client(&server);
    serve_disk(&mut qmp, &scratch, image);
    fill(&scratch, 7);
    let (mut server, mut qmp) = (Some(server), Some(qmp));
    for (name, arguments) in steps {
        let mut before = qmp.take().expect("a client");
        before.execute(name, arguments.clone());
        let expected = all(&mut before);
        server.take().expect("a daemon").kill();
        let started = start(&scratch);
        let mut after = client(&started);
        assert_eq!(all(&mut after), expected, "{name} {arguments}");
        if expected[1].contains(&"e".to_owned()) {
            check(&scratch, 7);
        }
        if expected[2].contains(&"g".to_owned()) {
            let limits = after.execute("qom-get", json!({"path": "g", "property": "limits"}));
            let set = if name == "object-add" { 5 } else { 9 };
            assert_eq!(limits["iops-total"], set, "{limits}");
        }
        if name != "object-add" {
            let polls = after.execute("qom-get", json!({"path": "io", "property": "poll-max-ns"}));
            assert_eq!(polls, 77);
        }
        (server, qmp) = (Some(started), Some(after));
    }
    server.expect("a daemon").stop();
    let mode = fs::metadata(scratch.path("state")).expect("the file").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn an_export_is_on_the_overlay_after_a_kill() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", SIZE >> 20);
    let server = start(&scratch);
    let mut qmp = client(&server);
    serve_disk(&mut qmp, &scratch, image.path());
    fill(&scratch, 1);
    let top = scratch.path("top.qcow2");
    let snapshot = json!({"node-name": "disk", "snapshot-file": top, "snapshot-node-name": "top"});
    qmp.execute("blockdev-snapshot-sync", snapshot);
    fill(&scratch, 2);
    server.kill();
    let server = start(&scratch);
    check(&scratch, 2);
    assert_eq!(image.read(0, BLOCK), [1; BLOCK]);

    // First a mirror job that a kill ends. Then a mirror job that replaces the source by the target.
    let mut qmp = client(&server);
    let flat = Image::empty(&scratch, "flat.img", SIZE >> 20);
    qmp.execute(
        "blockdev-add",
        json!({"driver": "file", "node-name": "flat", "filename": flat.path()}),
    );
    let mirror = json!({"job-id": "m", "device": "top", "target": "flat", "sync": "full"});
    qmp.execute("blockdev-mirror", mirror.clone());
    qmp.wait_for("BLOCK_JOB_READY");
    // The state written meanwhile does not have the job's filter.
    qmp.execute("object-add", json!({"qom-type": "iothread", "id": "io"}));
    server.kill();
    let server = start(&scratch);
    check(&scratch, 2);
    let mut qmp = client(&server);
    qmp.execute("blockdev-mirror", mirror);
    qmp.wait_for("BLOCK_JOB_READY");
    qmp.execute("job-complete", json!({"id": "m"}));
    qmp.wait_for("BLOCK_JOB_COMPLETED");
    fill(&scratch, 3);
    server.kill();
    let server = start(&scratch);
    check(&scratch, 3);
    assert_eq!(flat.read(0, BLOCK), [3; BLOCK]);
    server.stop();
}

#[test]
fn a_shorter_chain_is_there_after_a_kill() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", SIZE >> 20);
    let server = start(&scratch);
    let mut qmp = client(&server);
    serve_disk(&mut qmp, &scratch, image.path());
    let mut below = "disk";
    for (name, byte) in [("a", 1), ("b", 2), ("c", 3)] {
        let file = scratch.path(&format!("{name}.qcow2"));
        let snapshot =
            json!({"node-name": below, "snapshot-file": file, "snapshot-node-name": name});
        qmp.execute("blockdev-snapshot-sync", snapshot);
        fill(&scratch, byte);
        below = name;
    }
    // An intermediate image is removed, then those below the topmost one. Finally the first image becomes the disk.
    let end = |mut qmp: Qmp, server: Server, byte| {
        qmp.wait_for("BLOCK_JOB_COMPLETED");
        fill(&scratch, byte);
        server.kill();
        let server = start(&scratch);
        check(&scratch, byte);
        (client(&server), server)
    };
    qmp.execute(
        "block-commit",
        json!({"job-id": "j", "device": "c", "top-node": "b", "base-node": "a"}),
    );
    let (mut qmp, server) = end(qmp, server, 4);
    qmp.execute("block-commit", json!({"job-id": "j", "device": "c", "base-node": "disk"}));
    qmp.wait_for("BLOCK_JOB_READY");
    qmp.execute("job-complete", json!({"id": "j"}));
    let (mut qmp, server) = end(qmp, server, 5);
    assert_eq!(image.read(0, BLOCK), [5; BLOCK]);
    for node in ["c", "b", "a"] {
        qmp.execute("blockdev-del", json!({"node-name": node}));
    }
    let top = json!({"node-name": "disk", "snapshot-file": scratch.path("d.qcow2"), "snapshot-node-name": "d"});
    qmp.execute("blockdev-snapshot-sync", top);
    fill(&scratch, 6);
    qmp.execute("block-stream", json!({"job-id": "j", "device": "d"}));
    let (_, mut server) = end(qmp, server, 7);
    server.upgrade();
    check(&scratch, 7);
    assert_eq!(image.read(0, BLOCK), [5; BLOCK]);
    server.stop();
}

/// Writes increasing numbers to a block of the disk, until the daemon is gone. `answered` has the last
/// acknowledged one.
fn write_until_killed(socket: &Path, answered: &AtomicU64) {
    let mut raw = RawNbd::go(socket, "disk");
    raw.0.set_read_timeout(None).expect("a socket");
    for number in answered.load(Ordering::Relaxed) + 1.. {
        let mut message = request(1, number, 0, 8).to_vec();
        message.extend(number.to_be_bytes());
        let mut reply = [0; 16];
        if raw.0.write_all(&message).is_err() || raw.0.read_exact(&mut reply).is_err() {
            return;
        }
        assert_eq!(reply[4..8], [0; 4], "a write failed");
        answered.store(number, Ordering::Relaxed);
    }
}

/// No acknowledged write is missing after a kill at any moment. Each round adds an overlay.
#[test]
fn a_kill_during_a_snapshot_loses_no_write() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", SIZE >> 20);
    let server = start(&scratch);
    serve_disk(&mut client(&server), &scratch, image.path());
    let mut server = Some(server);
    let answered = AtomicU64::new(0);
    let mut moved = 0;
    for round in 0..12u32 {
        let running = server.take().expect("a daemon");
        let mut qmp = client(&running);
        let exports = qmp.execute("query-block-exports", json!({}));
        let node = exports[0]["node-name"].as_str().expect("a name").to_owned();
        let before = answered.load(Ordering::Relaxed);
        std::thread::scope(|scope| {
            scope.spawn(|| write_until_killed(&scratch.path("nbd.sock"), &answered));
            eventually("writes", || (answered.load(Ordering::Relaxed) > before + 5).then_some(()));
            let top = scratch.path(&format!("top{round}.qcow2"));
            let snapshot = json!({
                "node-name": node, "snapshot-file": top, "snapshot-node-name": format!("top{round}"),
            });
            let snapshot = json!({"execute": "blockdev-snapshot-sync", "arguments": snapshot});
            qmp.send(&snapshot.to_string());
            // The moment of the kill: not a wait for a condition.
            std::thread::sleep(Duration::from_millis(u64::from(round) * 9));
            running.kill();
        });
        let started = start(&scratch);
        let exports = client(&started).execute("query-block-exports", json!({}));
        moved += u32::from(exports[0]["node-name"] != json!(node));
        let mut raw = RawNbd::go(&scratch.path("nbd.sock"), "disk");
        raw.request(0, 1, 0, 8);
        assert_eq!(raw.reply(), (0, 1));
        let found = u64::from_be_bytes(raw.take());
        let last = answered.load(Ordering::Relaxed);
        // One more write may have been carried out without an answer.
        assert!(found == last || found == last + 1, "round {round}: {found} instead of {last}");
        answered.store(found, Ordering::Relaxed);
        drop(raw);
        server = Some(started);
    }
    assert!(moved > 0, "no snapshot was made in time");
    server.expect("a daemon").stop();
}

#[test]
fn the_command_line_and_commands_are_merged() {
    let scratch = Scratch::new();
    let with = |options: &[&str]| {
        let mut all = command(&scratch);
        for option in options {
            let (name, value) = option.split_once(' ').expect("an option");
            all = all.arg(name).arg(value);
        }
        all
    };
    let (one, two) = ("--blockdev null-co,node-name=one", "--blockdev null-co,node-name=two");
    let server = with(&[one, two]).start();
    let mut qmp = client(&server);
    qmp.execute("blockdev-del", json!({"node-name": "two"}));
    qmp.execute("blockdev-add", json!({"driver": "null-co", "node-name": "three"}));
    qmp.execute("blockdev-add", json!({"driver": "raw", "node-name": "four", "file": "one"}));
    server.kill();
    let nodes = |server: &Server| {
        names(&client(server).execute("query-named-block-nodes", json!({})), "node-name")
    };
    let server = with(&[one, two]).start();
    assert_eq!(nodes(&server), ["four", "one", "three"]);
    server.kill();
    let server = with(&[one, two, "--blockdev null-co,node-name=five"]).start();
    assert_eq!(nodes(&server), ["five", "four", "one", "three"]);
    server.kill();

    // The command line changes what commands changed, or removes what the state file needs. The file stays as
    // it is.
    let before = fs::read(scratch.path("state")).expect("the file");
    let changed = "--blockdev null-co,node-name=two,size=1048576";
    for (options, words) in [
        (
            vec![one, changed, "--blockdev null-co,node-name=five"],
            "node 'two' was changed on the command line, and removed by commands of a monitor",
        ),
        (
            vec![two, "--blockdev null-co,node-name=five"],
            "Cannot find device='one' nor node-name='one'",
        ),
    ] {
        let (status, log) = with(&options).run();
        assert!(!status.success() && log.contains(words), "{log}");
        assert_eq!(fs::read(scratch.path("state")).expect("the file"), before);
    }
}

#[test]
fn refused_state_files() {
    let scratch = Scratch::new();
    let server = start(&scratch);
    let (status, log) = command(&scratch).named("other").run();
    assert!(!status.success() && log.contains("another process uses it"), "{log}");
    let mut qmp = client(&server);
    let relative = json!({"driver": "file", "node-name": "disk", "filename": "disk.img"});
    let why = qmp.refused("blockdev-add", relative);
    assert_eq!(why, "with --state, 'disk.img' must be an absolute path");
    let node = json!({"driver": "null-co", "node-name": "n"});
    qmp.execute("blockdev-add", node);
    server.kill();
    for text in ["", "{", r#"{"ringmill-state": 2}"#, r#"{"a": 1}"#] {
        fs::write(scratch.path("state"), text).expect("a file");
        let (status, log) = command(&scratch).run();
        assert!(!status.success() && log.contains("The file was left as it is"), "{log}");
        assert_eq!(fs::read_to_string(scratch.path("state")).expect("a file"), text);
    }
}

/// A change that cannot be kept is reported. A change that would lose data is not made.
#[test]
fn a_file_that_cannot_be_written() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", SIZE >> 20);
    let server = start(&scratch);
    let mut qmp = client(&server);
    serve_disk(&mut qmp, &scratch, image.path());
    // A folder at the temporary file's path.
    let obstacle = scratch.path("state.new");
    fs::create_dir(&obstacle).expect("a folder");
    let why = qmp.refused("blockdev-add", json!({"driver": "null-co", "node-name": "n"}));
    assert!(why.starts_with("carried out, but not kept for a restart: state file '"), "{why}");
    let why = why.split_once(": ").expect("a cause").1;
    assert!(server.log().contains(why), "{}", server.log());
    let top = json!({"node-name": "disk", "snapshot-file": scratch.path("top.qcow2"), "snapshot-node-name": "top"});
    qmp.refused("blockdev-snapshot-sync", top);
    assert_eq!(qmp.execute("query-block-exports", json!({}))[0]["node-name"], "disk");
    // A reopened node gets its previous options back.
    let why = qmp.refused("blockdev-reopen", json!({"options": [reopened(image.path(), true)]}));
    assert!(why.starts_with("state file '"), "{why}");
    assert!(!is_direct(&mut qmp));
    fill(&scratch, 4);
    fs::remove_dir(&obstacle).expect("the folder");
    qmp.execute("object-add", json!({"qom-type": "iothread", "id": "io"}));
    let expected = all(&mut qmp);
    assert_eq!(expected[0], ["disk", "n"]);
    server.kill();
    let server = start(&scratch);
    assert_eq!(all(&mut client(&server)), expected);
    check(&scratch, 4);
    server.stop();
}

fn reopened(image: &Path, direct: bool) -> Value {
    json!({"driver": "file", "node-name": "disk", "filename": image, "cache": {"direct": direct}})
}

fn is_direct(qmp: &mut Qmp) -> bool {
    let nodes = qmp.execute("query-named-block-nodes", json!({"flat": true}));
    let disk = nodes.as_array().expect("a list").iter().find(|node| node["node-name"] == "disk");
    disk.expect("the node")["cache"]["direct"] == true
}

/// A raw node that cannot be recorded with another file or another part of it gets no writes there.
#[test]
fn a_reopened_node_that_cannot_be_recorded() {
    let scratch = Scratch::new();
    let (one, two) = (Image::filled(&scratch, "one.img", 1), Image::filled(&scratch, "two.img", 1));
    let before = two.md5();
    let server = start(&scratch);
    let mut qmp = client(&server);
    serve_disk(&mut qmp, &scratch, one.path());
    qmp.execute("block-export-del", json!({"id": "e"}));
    let file = json!({"driver": "file", "node-name": "two", "filename": two.path()});
    qmp.execute("blockdev-add", file);
    let raw = |file: Value, offset: u64| {
        let size = (1u64 << 20) - 4096;
        json!({"driver": "raw", "node-name": "r", "file": file, "offset": offset, "size": size})
    };
    qmp.execute("blockdev-add", raw(json!("disk"), 0));
    let export =
        json!({"type": "nbd", "id": "e", "node-name": "r", "name": "disk", "writable": true});
    qmp.execute("block-export-add", export);
    let mut client_of_r = RawNbd::go(&scratch.path("nbd.sock"), "disk");
    fs::create_dir(scratch.path("state.new")).expect("a folder");
    for options in [raw(json!("two"), 0), raw(json!("disk"), 4096)] {
        let why = qmp.refused("blockdev-reopen", json!({"options": [options]}));
        assert!(why.starts_with("state file '"), "{why}");
        client_of_r.send(&request(1, 1, 0, 8));
        client_of_r.send(&[0xab; 8]);
        assert_eq!(client_of_r.reply(), (0, 1));
        assert_eq!(one.read(0, 8), [0xab; 8]);
        assert_ne!(one.read(4096, 8), [0xab; 8]);
    }
    assert_eq!(two.md5(), before);

    // A node that was defined inside the reopened one is closed, and cannot come back.
    let nested = json!({"driver": "file", "filename": scratch.path("three.img")});
    let own = |file: Value| json!({"driver": "raw", "node-name": "own", "file": file});
    let _three = Image::filled(&scratch, "three.img", 1);
    qmp.refused("blockdev-add", own(nested));
    let why = qmp.refused("blockdev-reopen", json!({"options": [own(json!("two"))]}));
    assert!(why.starts_with("carried out, but not kept for a restart: state file '"), "{why}");
    let told =
        "node 'own': restoring its previous options failed: Cannot change the option 'file.driver'";
    assert!(server.log().contains(told), "{}", server.log());
    drop(client_of_r);
    server.stop();
}

/// An overlay is used once a power cut cannot remove it any more. If the folder of the state file cannot be synced, the
/// daemon reverts the change and writes the state file again.
#[test]
fn folders_that_cannot_be_synced() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", SIZE >> 20);
    let preload = preloaded(&scratch, "folder_syncs_that_fail.c");
    let tops = scratch.path("tops");
    fs::create_dir(&tops).expect("a folder");
    let server = command(&scratch).env("LD_PRELOAD", preload).start();
    let mut qmp = client(&server);
    serve_disk(&mut qmp, &scratch, image.path());
    let top = tops.join("top.qcow2");
    let snapshot = json!({"node-name": "disk", "snapshot-file": top, "snapshot-node-name": "top"});
    let node_of_export =
        |qmp: &mut Qmp| qmp.execute("query-block-exports", json!({}))[0]["node-name"].clone();

    fs::write(tops.join("unsynced"), "").expect("a file");
    let why = qmp.refused("blockdev-snapshot-sync", snapshot.clone());
    let expected = format!("fsync of the folder of '{}' failed: Input/output error", top.display());
    assert_eq!(why, expected);
    assert_eq!(node_of_export(&mut qmp), "disk");
    fs::remove_file(tops.join("unsynced")).expect("the file");

    let before = fs::read_to_string(scratch.path("state")).expect("the file");
    fs::write(scratch.path("unsynced"), "").expect("a file");
    let why = qmp.refused("blockdev-snapshot-sync", snapshot.clone());
    assert!(why.ends_with("fsync of its folder failed: Input/output error"), "{why}");
    qmp.refused("blockdev-reopen", json!({"options": [reopened(image.path(), true)]}));
    assert!(!is_direct(&mut qmp));
    let state = fs::read_to_string(scratch.path("state")).expect("the file");
    assert_eq!(state, before);
    fs::remove_file(scratch.path("unsynced")).expect("the file");

    qmp.execute("blockdev-snapshot-sync", snapshot);
    fill(&scratch, 6);
    // The end of a mirror job is not a command.
    let flat = Image::empty(&scratch, "flat.img", SIZE >> 20);
    let file = json!({"driver": "file", "node-name": "flat", "filename": flat.path()});
    qmp.execute("blockdev-add", file);
    let mirror = json!({"job-id": "m", "device": "top", "target": "flat", "sync": "full"});
    qmp.execute("blockdev-mirror", mirror);
    qmp.wait_for("BLOCK_JOB_READY");
    let before = fs::read_to_string(scratch.path("state")).expect("the file");
    fs::write(scratch.path("unsynced"), "").expect("a file");
    qmp.ask("job-complete", json!({"id": "m"}));
    assert_eq!(qmp.wait_for("BLOCK_JOB_COMPLETED")["error"], why);
    assert_eq!(fs::read_to_string(scratch.path("state")).expect("the file"), before);
    server.kill();
    fs::remove_file(scratch.path("unsynced")).expect("the file");
    let server = start(&scratch);
    assert_eq!(node_of_export(&mut client(&server)), "top");
    check(&scratch, 6);
    server.stop();
}

#[test]
fn a_new_process_continues_the_state_file() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", SIZE >> 20);
    let mut server = start(&scratch);
    serve_disk(&mut client(&server), &scratch, image.path());
    fill(&scratch, 5);
    server.upgrade();
    let (status, log) = command(&scratch).named("other").run();
    assert!(!status.success() && log.contains("another process uses it"), "{log}");
    let mut qmp = client(&server);
    qmp.execute("blockdev-add", json!({"driver": "null-co", "node-name": "n"}));
    let expected = all(&mut qmp);
    server.kill();
    let server = start(&scratch);
    assert_eq!(all(&mut client(&server)), expected);
    check(&scratch, 5);
    server.stop();
}

/// In the sandbox the daemon can replace the state file, and no more.
#[test]
fn in_the_sandbox_and_in_the_background() {
    let scratch = Scratch::new();
    let (images, state) = (scratch.path("images"), scratch.path("kept"));
    for folder in [&images, &state] {
        fs::create_dir(folder).expect("a folder");
    }
    let image = images.join("disk.img");
    fs::write(&image, vec![9; SIZE as usize]).expect("an image");
    fs::write(scratch.path("elsewhere.img"), [0; BLOCK]).expect("an image");
    let command = || {
        let sandbox = format!("on,paths={}", images.display());
        let file = state.join("file").display().to_string();
        let command = ServerCommand::new(&scratch).monitor("qmp");
        command.args(["--sandbox", &sandbox, "--state", &file])
    };
    let add = |name: &str, path: &Path| json!({"driver": "file", "node-name": name, "filename": path, "read-only": true});
    let server = command().start();
    let mut qmp = client(&server);
    qmp.execute("blockdev-add", add("disk", &image));
    let has_landlock = qmp.execute("x-query-sandbox", json!({})).get("landlock").is_some();
    if has_landlock {
        let why = qmp.refused("blockdev-add", add("other", &scratch.path("elsewhere.img")));
        assert!(why.contains("Permission denied"), "{why}");
    }
    server.kill();
    // A state file forged by a compromised daemon does not give access to more files, either.
    if has_landlock {
        let file = state.join("file");
        let text = fs::read_to_string(&file).expect("the file");
        let elsewhere = scratch.path("elsewhere.img").display().to_string();
        let forged = text.replace(&image.display().to_string(), &elsewhere);
        assert_ne!(forged, text);
        fs::write(&file, forged).expect("the file");
        let (status, log) = command().run();
        assert!(!status.success() && log.contains("Permission denied"), "{log}");
        fs::write(&file, text).expect("the file");
    }
    let server = command().start();
    let nodes = client(&server).execute("query-named-block-nodes", json!({}));
    assert_eq!(names(&nodes, "node-name"), ["disk"]);
    server.stop();
}

/// As in QSD, the node keeps its connection: there is no lock that another process could wait for.
#[test]
fn an_inactive_nbd_node_is_readable_also_after_a_kill() {
    let (back, scratch) = (Scratch::new(), Scratch::new());
    let image = Image::empty(&back, "disk.img", 8);
    let storage = ServerCommand::new(&back).file("disk", &image, "");
    let storage = nbd_export(nbd_server(storage, &back, ""), "disk", ",writable=on").start();
    fill(&back, 3);
    let server = start(&scratch);
    let mut qmp = client(&server);
    let address = json!({"type": "unix", "path": back.path("nbd.sock")});
    let node = json!({"driver": "nbd", "node-name": "disk", "server": address, "export": "disk"});
    qmp.execute("blockdev-add", node);
    qmp.execute("blockdev-set-active", json!({"node-name": "disk", "active": false}));
    let address = json!({"type": "unix", "data": {"path": scratch.path("nbd.sock")}});
    qmp.execute("nbd-server-start", json!({"addr": address}));
    let export = json!({"type": "nbd", "id": "e", "node-name": "disk", "name": "disk",
        "writable": true, "allow-inactive": true});
    qmp.execute("block-export-add", export);
    let uri = nbd_uri(&scratch, "disk");
    let is_readable = || {
        check(&scratch, 3);
        let write = ["-fraw", "-c", "write 0 4k", &uri];
        let refused = integration::nbd::client(&scratch, "qemu-io", &write);
        let why = String::from_utf8_lossy(&[refused.stdout, refused.stderr].concat()).into_owned();
        assert!(why.contains("Operation not permitted"), "{why}");
    };
    is_readable();
    server.kill();
    let server = start(&scratch);
    is_readable();
    client(&server).execute("blockdev-set-active", json!({"node-name": "disk", "active": true}));
    fill(&scratch, 7);
    server.stop();
    storage.stop();
}

/// Also one that writes when it is read.
#[test]
fn inactive_filters_above_an_image_start_again() {
    let scratch = Scratch::new();
    let image = scratch.path("disk.qcow2");
    let made = std::process::Command::new(tool("qemu-img"))
        .args(["create", "-q", "-f", "qcow2"])
        .arg(&image)
        .arg(SIZE.to_string())
        .status();
    assert!(made.expect("qemu-img runs").success());
    let file = json!({"driver": "file", "filename": image});
    let disk = json!({"driver": "qcow2", "node-name": "disk", "file": file});
    for driver in ["copy-on-read", "compress", "raw"] {
        let server = start(&scratch);
        let mut qmp = client(&server);
        qmp.execute("blockdev-add", disk.clone());
        let filter = json!({"driver": driver, "node-name": "top", "file": "disk"});
        qmp.execute("blockdev-add", filter);
        qmp.execute("blockdev-set-active", json!({"active": false}));
        server.kill();
        let server = start(&scratch);
        let mut qmp = client(&server);
        let nodes = qmp.execute("query-named-block-nodes", json!({}));
        let active = |node: &Value| node["active"] == true;
        assert!(!nodes.as_array().expect("a list").iter().any(active), "{driver}: {nodes}");
        qmp.execute("blockdev-set-active", json!({"active": true}));
        for name in ["top", "disk"] {
            qmp.execute("blockdev-del", json!({"node-name": name}));
        }
        server.stop();
    }
}

/// The error says what to remove from the file, and the daemon then starts.
#[test]
fn a_missing_image_can_be_left_out() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", SIZE >> 20);
    let server = start(&scratch);
    let mut qmp = client(&server);
    serve_disk(&mut qmp, &scratch, image.path());
    let raw = json!({"driver": "raw", "node-name": "part", "file": "disk"});
    qmp.execute("block-export-del", json!({"id": "e"}));
    qmp.execute("blockdev-add", raw);
    qmp.execute("blockdev-add", json!({"driver": "null-co", "node-name": "stays"}));
    drop(qmp);
    server.stop();
    fs::remove_file(image.path()).expect("it is ours");
    let (status, log) = command(&scratch).run();
    assert!(!status.success() && log.contains("No such file or directory\n"), "{log}");
    let advice = log.split("To start without it, remove from \"options\" in that file:\n").nth(1);
    let advice = advice.unwrap_or_else(|| panic!("no advice: {log}"));
    let file = scratch.path("state");
    let mut state: Value =
        serde_json::from_str(&fs::read_to_string(&file).expect("a file")).expect("JSON");
    let options = state["options"].as_array_mut().expect("a list");
    let before = options.len();
    for line in advice.lines() {
        let option: Value = serde_json::from_str(line.trim()).expect("a string of the file");
        let is_it = options.iter().position(|other| *other == option);
        options.remove(is_it.unwrap_or_else(|| panic!("{option} is not in {options:?}")));
    }
    assert_eq!(before - options.len(), 2, "{log}");
    fs::write(&file, state.to_string()).expect("it is ours");
    let server = start(&scratch);
    assert_eq!(all(&mut client(&server))[0], ["stays"]);
    server.stop();
}

/// With `--user`, the state file is that user's, and what it names is opened as that user.
#[test]
fn a_daemon_that_becomes_a_user() {
    const USER: u32 = 65529;
    if !nix::unistd::geteuid().is_root() {
        return untested(Needs::Root, "only root can change the user");
    }
    let scratch = Scratch::new();
    let give = |path: &Path, user| chown(path, Some(user), None).expect("we are root");
    let kept = scratch.path("kept");
    fs::create_dir(&kept).expect("a folder");
    let file = kept.join("file");
    let command = || {
        let user = format!("{USER}:{USER}");
        let command = ServerCommand::new(&scratch).monitor("qmp");
        command.args(["--user", &user, "--state", &file.display().to_string()])
    };
    let refused = |words: &str| {
        let (status, log) = command().run();
        assert!(!status.success() && log.contains(words), "{log}");
    };
    refused("making files in its folder failed: Permission denied");
    give(&kept, USER);
    let image = Image::empty(&scratch, "disk.img", SIZE >> 20);
    give(image.path(), USER);
    let server = command().start();
    let add = json!({"driver": "file", "node-name": "disk", "filename": image.path()});
    client(&server).execute("blockdev-add", add);
    server.kill();
    assert_eq!(fs::metadata(&file).expect("the file").uid(), USER);
    let server = command().start();
    let nodes = client(&server).execute("query-named-block-nodes", json!({}));
    assert_eq!(names(&nodes, "node-name"), ["disk"]);
    server.kill();

    // A state file forged by a compromised daemon does not open root's files.
    give(image.path(), 0);
    fs::set_permissions(image.path(), fs::Permissions::from_mode(0o600)).expect("it is ours");
    refused(&format!("Could not open '{}': Permission denied", image.path().display()));
    give(image.path(), USER);
    give(&file, USER + 1);
    refused("others may write to it");
}

/// Runs `storage-daemon --check`. Returns whether all is well, and the output.
fn dry_run(scratch: &Scratch, arguments: &[&str]) -> (bool, String) {
    let command = ServerCommand::new(scratch).named("check").arg("--check");
    let command = arguments.iter().fold(command, |command, argument| command.arg(*argument));
    let (status, output) = command.run();
    (status.success(), output)
}

/// A dry run beside the daemon that serves: it reports all that is wrong, changes nothing, and tells what a restart would
/// change.
#[test]
fn a_dry_run_reports_everything_and_changes_nothing() {
    let scratch = Scratch::new();
    let path = |name: &str| scratch.path(name).display().to_string();
    let image = path("disk.qcow2");
    client_output(&scratch, "qemu-img", &["create", "-q", "-f", "qcow2", &image, "1M"]);
    let node = format!("qcow2,node-name=disk,file.driver=file,file.filename={image}");
    let socket = path("disk.sock");
    let export =
        format!("vhost-user-blk,id=e,node-name=disk,writable=on,addr.type=unix,addr.path={socket}");
    let state = path("state");
    let good = ["--blockdev", &node, "--export", &export, "--state", &state];
    let server = good
        .into_iter()
        .fold(ServerCommand::new(&scratch), |command, argument| command.arg(argument));
    let server = server.start();
    let mut blk = BlkClient::connect(&scratch.path("disk.sock"), 1, 16).expect("it serves");
    blk.write(0, &[7; 512]);
    let before =
        || ["disk.qcow2", "state"].map(|name| fs::read(scratch.path(name)).expect("a file"));
    let files = before();
    let (is_good, output) = dry_run(&scratch, &good);
    assert!(is_good && output.contains("No problem was found."), "{output}");
    // Two options that cannot be read, a missing image, a missing node, a missing folder.
    let missing = format!("file,node-name=missing,filename={}", path("no.img"));
    let nowhere = format!("addr.type=unix,addr.path={}", path("no/nbd.sock"));
    let bad = [
        &["--blockdev", "fil,node-name=a", "--object", "iothread,id=io,poll-max-ns=x"][..],
        &["--blockdev", &missing, "--nbd-server", &nowhere],
        &["--export", "nbd,id=n,node-name=none"],
        &["--blockdev", "file,node-name=relative,filename=relative.img"],
        &good,
    ];
    let (is_good, output) = dry_run(&scratch, &bad.concat());
    assert!(!is_good, "{output}");
    for part in [
        "--blockdev fil,node-name=a: ",
        "--object iothread,id=io,poll-max-ns=x: ",
        "no.img': No such file or directory",
        "no/nbd.sock' can be made in ",
        "--export nbd,id=n,node-name=none: ",
        "with --state, 'relative.img' must be an absolute path",
        "not in use before a restart: the command line has ",
        "added node 'missing'",
    ] {
        assert!(output.contains(part), "{part} in {output}");
    }
    let null = ["--blockdev", "null-co,node-name=null,size=1048576"];
    let ublk = ["--export", "ublk,id=u,node-name=null"];
    let (is_good, output) = dry_run(&scratch, &[null, ublk].concat());
    let can_be = Path::new("/dev/ublk-control").exists();
    assert_eq!(is_good, can_be, "{output}");
    assert_eq!(
        output.contains("--export ublk,id=u,node-name=null: there is no "),
        !can_be,
        "{output}"
    );
    assert_eq!(before(), files);
    assert_eq!(blk.read(0, 512), [7; 512]);
    drop(blk);
    server.stop();
}

/// An operator adds a node by a command, and later to the configuration with other options.
#[test]
fn a_node_that_both_have_added_is_that_of_the_command_line() {
    let scratch = Scratch::new();
    let state = scratch.path("state").display().to_string();
    let start = |more: &[&str]| {
        let command = ServerCommand::new(&scratch).monitor("m").arg("--state").arg(state.as_str());
        more.iter().fold(command, |command, argument| command.arg(*argument))
    };
    let server = start(&[]).start();
    let mut qmp = Qmp::connect(&server.socket("m"));
    let size = |qmp: &mut Qmp, name: &str| {
        let nodes = qmp.execute("query-named-block-nodes", json!({}));
        let nodes = nodes.as_array().expect("a list").clone();
        let node = nodes.iter().find(|node| node["node-name"] == name).expect("the node");
        node["image"]["virtual-size"].as_u64().expect("a size")
    };
    for name in ["n", "below"] {
        let node = json!({"driver": "null-co", "node-name": name, "size": 1 << 20});
        qmp.execute("blockdev-add", node);
    }
    qmp.execute("blockdev-add", json!({"driver": "raw", "node-name": "above", "file": "below"}));
    server.stop();
    let both = ["--blockdev", "null-co,node-name=n,size=2097152"];
    let warning =
        "node 'n' is on the command line and in the state file: the command line's is used";
    let (is_good, output) = dry_run(&scratch, &[&both[..], &["--state", &state]].concat());
    assert!(is_good && output.contains(warning), "{output}");
    let server = start(&both).start();
    assert!(server.log().contains(warning), "{}", server.log());
    let mut qmp = Qmp::connect(&server.socket("m"));
    assert_eq!(size(&mut qmp, "n"), 2 << 20);
    server.stop();
    // From now on the option is that of both.
    let server = start(&both).start();
    assert!(!server.log().contains(warning), "{}", server.log());
    server.stop();
    // What commands have put above a node does not get another one below.
    let (status, output) = start(&["--blockdev", "null-co,node-name=below,size=2097152"]).run();
    assert_eq!(status.code(), Some(1), "{output}");
    assert!(
        output.contains("node 'below' was added on the command line, and added by"),
        "{output}"
    );
}
