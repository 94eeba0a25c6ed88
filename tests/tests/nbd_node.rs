//! A node that is the export of another NBD server, as a rule ringmill's own: a daemon in front of a daemon.

use crate::common;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;

use common::peers::Peers;
use integration::nbd::{client_output, nbd_export, nbd_server, nbd_uri};
use integration::tls::Authority;
use integration::{
    Image, Qmp, Scratch, Server, ServerCommand, eventually, merged, tied_command, tool,
};
use serde_json::{Value, json};

/// The daemon that has the image.
fn storage(scratch: &Scratch, name: &'static str, image: &Image) -> Server {
    let command =
        ServerCommand::new(scratch).named(name).iothread("a").file("disk", image, "discard=unmap");
    nbd_export(nbd_server(command, scratch, ""), "disk", ",writable=on,iothread=a").start()
}

/// The daemon in front of it, which two threads serve.
fn front(scratch: &Scratch, storage: &Scratch) -> Server {
    let path = storage.path("nbd.sock");
    let node = format!(
        "driver=nbd,node-name=disk,server.type=unix,server.path={},export=disk,discard=unmap,\
         reconnect-delay=600",
        path.display()
    );
    let command = ServerCommand::new(scratch).iothread("a").iothread("b");
    let command = nbd_server(command.arg("--blockdev").arg(node), scratch, "");
    nbd_export(command, "disk", ",writable=on,iothread.0=a,iothread.1=b").start()
}

fn path(image: &Image) -> &str {
    image.path().to_str().expect("UTF-8")
}

#[test]
fn an_image_goes_through_two_daemons() {
    let (back, fore) = (Scratch::new(), Scratch::new());
    let source = Image::filled(&fore, "source", 20);
    let copy = Image::empty(&fore, "copy", 20);
    let image = Image::empty(&back, "disk.img", 20);
    let storage = storage(&back, "first", &image);
    let server = front(&fore, &back);
    let uri = nbd_uri(&fore, "disk");
    client_output(&fore, "nbdcopy", &["--flush", path(&source), &uri]);
    let compare = ["compare", "-fraw", "-Fraw", path(&source)];
    client_output(&fore, "qemu-img", &[&compare[..], &[path(&image)]].concat());
    client_output(&fore, "nbdcopy", &[&uri, path(&copy)]);
    client_output(&fore, "qemu-img", &[&compare[..], &[path(&copy)]].concat());
    // What takes no data goes through as such: whole clusters, and less than a sector.
    for command in ["write -z -u 1M 2M", "discard 8M 1M", "write -P 7 1000 10", "read -P 7 1000 10"]
    {
        client_output(&fore, "qemu-io", &["-fraw", "-c", command, &uri]);
    }
    client_output(&fore, "qemu-io", &["-r", "-U", "-fraw", "-c", "read -P 0 1M 2M", path(&image)]);
    let map = client_output(&fore, "nbdinfo", &["--map", &uri]);
    assert!(map.lines().any(|line| line.contains("hole,zero")), "{map}");
    server.stop();
    storage.stop();
}

/// The only export has no name, and there is no TLS.
#[test]
fn servers_with_old_handshakes_are_used_as_by_qemu_storage_daemon() {
    let scratch = Scratch::new();
    let creds = Authority::new(&scratch, "ca").trusted("client");
    let mut peers = Peers::new(&scratch);
    let creds =
        json!({"qom-type": "tls-creds-x509", "id": "t", "dir": creds, "endpoint": "client"});
    peers.execute("object-add", creds);
    peers.execute(
        "nbd-server-start",
        json!({"addr": {"type": "unix", "data": {"path": "DIR/nbd.sock"}}}),
    );
    for handshake in ["--oldstyle", "--mask-handshake=0", "--mask-handshake=2"] {
        let socket = scratch.path("old.sock");
        let mut command: Command = tied_command(&tool("nbdkit"));
        command.args(["-f", "-U"]).arg(&socket).args([handshake, "pattern", "1M"]);
        let mut server = command.spawn().expect("it starts");
        eventually("nbdkit", || UnixStream::connect(&socket).ok());
        let node = json!({
            "driver": "nbd", "node-name": "disk", "read-only": true,
            "server": {"type": "unix", "path": socket},
        });
        let with = |more: &Value| merged(node.clone(), more);
        let refused = peers.both("blockdev-add", with(&json!({"tls-creds": "t", "export": "x"})));
        assert_eq!(refused["error"]["desc"], "Server does not support STARTTLS", "{handshake}");
        if handshake == "--oldstyle" {
            let refused = peers.both("blockdev-add", with(&json!({"export": "x"})));
            let why = "Server does not support non-empty export names";
            assert_eq!(refused["error"]["desc"], why);
        }
        peers.execute("blockdev-add", node);
        peers.execute(
            "block-export-add",
            json!({"type": "nbd", "id": "e", "node-name": "disk", "name": "e"}),
        );
        let uri = "nbd+unix:///e?socket=DIR/nbd.sock";
        peers.run("qemu-img", &["convert", "-f", "raw", "-O", "raw", uri, "DIR/out"]);
        let [ours, theirs] = peers.sides().map(|side| fs::read(side.path("out")).expect("a file"));
        // The pattern: each eight bytes have their offset.
        assert!(ours == theirs && ours[4096..4104] == 4096u64.to_be_bytes(), "{handshake}");
        peers.execute("block-export-del", json!({"id": "e", "mode": "hard"}));
        peers.wait_for("BLOCK_EXPORT_DELETED");
        peers.execute("blockdev-del", json!({"node-name": "disk"}));
        server.kill().expect("our child");
        server.wait().expect("our child");
        fs::remove_file(&socket).expect("nbdkit made it");
    }
    peers.stop();
}

#[test]
fn a_host_without_an_address_is_reported_once() {
    let scratch = Scratch::new();
    let server = ServerCommand::new(&scratch).monitor("qmp").start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let address = json!({"type": "inet", "host": "missing.invalid", "port": "10809"});
    let node = json!({"driver": "nbd", "node-name": "far", "server": address});
    let why = qmp.refused("blockdev-add", node);
    let reason = why.strip_prefix("address resolution failed for missing.invalid:10809: ");
    // The reason depends on the machine's network.
    assert!(reason.is_some_and(|reason| !reason.contains(':')), "{why}");
}

/// A server takes the connection, and says nothing. Only the client that adds the node waits.
#[test]
fn other_clients_are_served_while_a_node_connects() {
    let scratch = Scratch::new();
    let silent = UnixListener::bind(scratch.path("silent")).expect("a socket");
    let server = ServerCommand::new(&scratch).monitor("qmp").start();
    let [mut waiting, mut other] = [0, 1].map(|_| Qmp::connect(&server.socket("qmp")));
    let address = json!({"type": "unix", "path": scratch.path("silent")});
    let node = json!({"driver": "nbd", "node-name": "far", "server": address});
    waiting.send(&json!({"execute": "blockdev-add", "arguments": node}).to_string());
    let (far, _) = silent.accept().expect("the daemon connects");
    let null = json!({"driver": "null-co", "node-name": "near", "size": 1 << 20});
    other.execute("blockdev-add", null);
    let nodes = other.execute("query-named-block-nodes", json!({}));
    assert_eq!(nodes.as_array().map(Vec::len), Some(1), "{nodes}");
    let why = other.refused("x-upgrade", json!({}));
    assert!(why.contains("a command of a monitor waits"), "{why}");
    // Another node may have the name by now.
    let far_too = json!({"driver": "null-co", "node-name": "far", "size": 1 << 20});
    other.execute("blockdev-add", far_too);
    drop(far);
    let answer = waiting.answer();
    assert_eq!(answer["error"]["desc"], "Failed to read data: the server left");
    server.stop();
}

/// A node that becomes active makes another connection.
#[test]
fn other_clients_are_served_while_an_inactive_node_connects() {
    let (back, scratch) = (Scratch::new(), Scratch::new());
    let image = Image::empty(&back, "disk.img", 1);
    let storage = storage(&back, "storage", &image);
    let path = back.path("nbd.sock");
    let command = nbd_server(ServerCommand::new(&scratch).monitor("qmp"), &scratch, "");
    let server = command.start();
    let [mut waiting, mut other] = [0, 1].map(|_| Qmp::connect(&server.socket("qmp")));
    let address = json!({"type": "unix", "path": path});
    let node = json!({"driver": "nbd", "node-name": "far", "server": address, "export": "disk",
        "active": false});
    other.execute("blockdev-add", node);
    storage.stop();
    let _ = fs::remove_file(&path);
    let silent = UnixListener::bind(&path).expect("a socket");
    let export = json!({"type": "nbd", "id": "e", "node-name": "far"});
    let active = json!({"node-name": "far", "active": true});
    for (command, arguments) in [("blockdev-set-active", active), ("block-export-add", export)] {
        waiting.send(&json!({"execute": command, "arguments": arguments}).to_string());
        let (far, _) = silent.accept().expect("the daemon connects");
        let nodes = other.execute("query-named-block-nodes", json!({}));
        assert_eq!(nodes[0]["active"], false, "{nodes}");
        let why = other.refused("x-upgrade", json!({}));
        assert!(why.contains("a command of a monitor waits"), "{why}");
        drop(far);
        let answer = waiting.answer();
        assert_eq!(answer["error"]["desc"], "Failed to read data: the server left", "{command}");
    }
    assert_eq!(other.execute("query-block-exports", json!({})), json!([]));
    // The node may be gone when the server answers.
    let active = json!({"execute": "blockdev-set-active", "arguments": {"node-name": "far", "active": true}});
    waiting.send(&active.to_string());
    let (far, _) = silent.accept().expect("the daemon connects");
    other.execute("blockdev-del", json!({"node-name": "far"}));
    drop(far);
    assert!(waiting.answer()["error"].is_object());
    server.stop();
}

/// A cancelled job does not wait for the server of its target, and neither do the writes of the disk's users.
#[test]
fn a_cancelled_copy_to_a_server_that_is_gone_ends_at_once() {
    let (back, fore) = (Scratch::new(), Scratch::new());
    let image = Image::empty(&back, "disk.img", 20);
    let disk = Image::filled(&fore, "disk.img", 20);
    let command = ServerCommand::new(&fore).iothread("a").file("disk", &disk, "").monitor("qmp");
    let server = nbd_export(nbd_server(command, &fore, ""), "disk", ",writable=on,iothread=a");
    let server = server.start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    for (command, name) in [("blockdev-backup", "first"), ("blockdev-mirror", "second")] {
        let storage = storage(&back, name, &image);
        let address = json!({"type": "unix", "path": back.path("nbd.sock")});
        let target = json!({
            "driver": "raw",
            "node-name": "far",
            "file": {"driver": "nbd", "server": address, "export": "disk", "reconnect-delay": 600},
        });
        qmp.execute("blockdev-add", target);
        let job = json!({"device": "disk", "target": "far", "sync": "full", "job-id": "j", "speed": 1 << 20});
        qmp.execute(command, job);
        eventually("the first data", || {
            let jobs = qmp.execute("query-block-jobs", json!({}));
            jobs[0]["offset"].as_u64().filter(|offset| *offset > 0).map(drop)
        });
        drop(storage);
        qmp.execute("block-job-set-speed", json!({"device": "j", "speed": 0}));
        let write = ["-fraw", "-c", "write -P 7 19M 64k", &nbd_uri(&fore, "disk")];
        let mut write = tied_command(&tool("qemu-io")).args(write).spawn().expect("qemu-io runs");
        if command == "blockdev-backup" {
            let waiting = ["-fraw", "-c", "read 0 4k", &nbd_uri(&fore, "disk")];
            client_output(&fore, "qemu-io", &waiting);
        }
        qmp.execute("block-job-cancel", json!({"device": "j", "force": true}));
        let data = qmp.wait_for("BLOCK_JOB_CANCELLED");
        assert_eq!(data.get("error"), None);
        assert!(write.wait().expect("our child").success(), "a write during a {command}");
        eventually("the job's end", || {
            (qmp.execute("query-jobs", json!({})) == json!([])).then_some(())
        });
        qmp.execute("blockdev-del", json!({"node-name": "far"}));
    }
    server.stop();
}

#[test]
fn the_storage_is_killed_while_an_image_is_copied() {
    let (back, fore) = (Scratch::new(), Scratch::new());
    let source = Image::filled(&fore, "source", 128);
    let image = Image::empty(&back, "disk.img", 128);
    let first = storage(&back, "first", &image);
    let server = front(&fore, &back);
    let uri = nbd_uri(&fore, "disk");
    let mut copying: Command = tied_command(&tool("nbdcopy"));
    let mut copying = copying.args(["--flush", path(&source), &uri]).spawn().expect("nbdcopy runs");
    eventually("the first data", || {
        let written = std::fs::metadata(image.path()).expect("the image").blocks();
        (written > 0).then_some(())
    });
    drop(first);
    let second = storage(&back, "second", &image);
    assert!(copying.wait().expect("our child").success());
    let compare = ["compare", "-fraw", "-Fraw", path(&source), path(&image)];
    client_output(&fore, "qemu-img", &compare);
    server.stop();
    second.stop();
}
