//! Injected faults at different places of the inventory, as QEMU's client sees them.

use crate::common;

use std::process::Command;

use common::peers::{Peers, Side};
use integration::nbd::{client, client_output, nbd_export, nbd_server, nbd_uri};
use integration::{Image, Qmp, Scratch, Server, ServerCommand, merged, tool};
use serde_json::{Value, json};

/// A daemon with an image under blkdebug, with `rules`, under raw.
fn daemon(scratch: &Scratch, image: &Image, rules: &str) -> Server {
    let path = image.path().display();
    let node = format!(
        "driver=raw,node-name=disk,discard=unmap,file.driver=blkdebug,file.image.driver=file,\
         file.image.filename={path},{rules}"
    );
    let command = ServerCommand::new(scratch).iothread("io0").monitor("qmp");
    let command = nbd_server(command.arg("--blockdev").arg(node), scratch, "");
    nbd_export(command, "disk", ",writable=on,iothread=io0").start()
}

/// The messages of qemu-io for commands in turn, each on a new connection, as QEMU's client closes a connection on which
/// a read has failed.
fn qemu_io(scratch: &Scratch, commands: &[&str]) -> Vec<Option<String>> {
    let uri = nbd_uri(scratch, "disk");
    let run = |command: &&str| {
        let output = client(scratch, "qemu-io", &["-fraw", "-tnone", "-c", command, &uri]);
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8(text).expect("text");
        text.lines().find_map(|line| Some(line.split_once("failed: ")?.1.to_owned()))
    };
    commands.iter().map(run).collect()
}

const EIO: &str = "Input/output error";
const ENOSPC: &str = "No space left on device";

#[test]
fn a_client_sees_exactly_the_injected_errors() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let server = daemon(
        &scratch,
        &image,
        "file.inject-error.0.event=write_aio,file.inject-error.0.errno=28,\
         file.inject-error.0.iotype=write,file.inject-error.0.count=2,\
         file.inject-error.1.event=none,file.inject-error.1.sector=64,\
         file.inject-error.1.iotype=read",
    );
    let found = qemu_io(&scratch, &["read 0 32k", "read 32k 512", "read 0 1M", "read 33k 512"]);
    assert_eq!(found, [None, Some(EIO.into()), Some(EIO.into()), None]);
    let commands = ["write 0 4k", "write 8k 4k", "write 8k 4k", "read 32k 512"];
    let found = qemu_io(&scratch, &commands);
    assert_eq!(found, [Some(ENOSPC.into()), Some(ENOSPC.into()), None, None]);
    server.stop();
}

#[test]
fn faults_under_other_nodes_and_added_while_the_daemon_runs() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.qcow2", 0);
    let path = image.path().to_str().expect("UTF-8");
    client_output(&scratch, "qemu-img", &["create", "-q", "-f", "qcow2", path, "64M"]);
    let command = ServerCommand::new(&scratch).monitor("qmp").arg("--object");
    let command = command.arg("throttle-group,id=slow,x-iops-total=10000");
    let server = nbd_server(command, &scratch, "").start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let file = json!({"driver": "file", "filename": path});
    // After the writes that open the image.
    let rule = json!({"event": "flush_to_disk", "state": 2, "iotype": "write", "errno": 28});
    let transition = json!({"event": "flush_to_disk", "state": 1, "new_state": 2});
    let blkdebug = json!({
        "driver": "blkdebug", "node-name": "faults", "image": file, "inject-error": [rule],
        "set-state": [transition],
    });
    let qcow2 = json!({"driver": "qcow2", "file": blkdebug});
    let disk = json!({
        "driver": "throttle", "node-name": "disk", "throttle-group": "slow", "file": qcow2,
    });
    qmp.execute("blockdev-add", disk);
    let export = json!({"id": "e", "type": "nbd", "node-name": "disk", "writable": true});
    qmp.execute("block-export-add", export);
    let nodes = qmp.execute("query-named-block-nodes", json!({}));
    let nodes = nodes.as_array().expect("a list");
    let faults = nodes.iter().find(|node| node["node-name"] == "faults").expect("it is there");
    assert_eq!(faults["drv"], "blkdebug");
    assert_eq!(faults["children"][0]["child"], "image");
    assert_eq!(qemu_io(&scratch, &["write -P 5 1M 64k", "read -P 5 1M 64k"]), [None, None]);
    assert_eq!(qemu_io(&scratch, &["flush", "flush"]), [None, None]);
    assert_eq!(qemu_io(&scratch, &["write -P 6 9M 64k"]), [Some(ENOSPC.into())]);
    assert_eq!(qemu_io(&scratch, &["read -P 5 1M 64k"]), [None]);
    let wrong = json!({
        "driver": "blkdebug", "node-name": "more", "image": "disk",
        "inject-error": [{"event": "cluster_alloc"}],
    });
    let refused = qmp.refused("blockdev-add", wrong);
    let expected = "Parameter 'event' does not accept value 'cluster_alloc'";
    assert!(refused.contains(expected), "{refused}");
    // The daemon may or may not have noticed that the client has disconnected.
    qmp.execute("block-export-del", json!({"id": "e", "mode": "hard"}));
    server.stop();
    // Clusters allocated for the failed write may have leaked. The image has no other error.
    let check = client(&scratch, "qemu-img", &["check", "-q", path]);
    assert!(matches!(check.status.code(), Some(0 | 3)), "{check:?}");
}

/// Whether a node with these rules can be added, and which runs of qemu-io's commands have failed, in one client each.
fn outcome(side: &mut Side, rules: &Value, runs: &[&[&str]]) -> (bool, Vec<bool>) {
    let image = json!({"driver": "file", "filename": "DIR/disk.qcow2"});
    let file = merged(json!({"driver": "blkdebug", "image": image}), rules);
    let node = json!({"driver": "qcow2", "node-name": "disk", "file": file});
    if side.ask("blockdev-add", &node).get("error").is_some() {
        return (false, Vec::new());
    }
    let export =
        json!({"type": "nbd", "id": "e", "node-name": "disk", "name": "e", "writable": true});
    side.ask("block-export-add", &export);
    let uri = format!("nbd+unix:///e?socket={}", side.path("nbd.sock").display());
    let fails = |commands: &&[&str]| {
        let commands = commands.iter().flat_map(|command| ["-c", command]);
        let output = Command::new(tool("qemu-io")).args(["-fraw", &uri]).args(commands).output();
        !output.expect("qemu-io runs").status.success()
    };
    let failed = runs.iter().map(fails).collect();
    side.ask("block-export-del", &json!({"id": "e", "mode": "hard"}));
    side.qmp.wait_for("BLOCK_EXPORT_DELETED");
    let deleted = side.ask("blockdev-del", &json!({"node-name": "disk"}));
    assert!(deleted.get("error").is_none(), "{deleted}");
    (true, failed)
}

/// Tables are read at the same requests. They are written at the next flush at the latest.
#[test]
fn events_of_a_qcow2_image_are_those_of_qemu_storage_daemon() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    let addr = json!({"type": "unix", "data": {"path": "DIR/nbd.sock"}});
    peers.execute("nbd-server-start", json!({"addr": addr}));
    let once = |event: &str| json!({"inject-error": [{"event": event, "errno": 5, "once": true}]});
    // The second state is that between one read and the next.
    let toggled = json!({
        "inject-error": [{"event": "read_aio", "state": 2, "errno": 5}],
        "set-state": [
            {"event": "read_aio", "state": 1, "new_state": 2},
            {"event": "read_aio", "state": 2, "new_state": 1},
        ],
    });
    // A table describes 2 MiB.
    let reads: &[&[&str]] =
        &[&["read 0 4k"], &["read 2M 4k"], &["read 0 4k"], &["read 4M 4k"], &["read 6M 4k"]];
    let writes: &[&[&str]] = &[&["write 10M 4k", "flush"], &["write 10M 4k", "flush"]];
    let mut struck = Vec::new();
    for (name, rules, runs) in [
        ("none", json!({}), reads),
        ("toggled", toggled, reads),
        ("read_aio", once("read_aio"), reads),
        ("l2_load", once("l2_load"), reads),
        ("read_compressed", once("read_compressed"), reads),
        ("reftable_load", once("reftable_load"), reads),
        ("reftable_update", once("reftable_update"), writes),
        ("write_aio", once("write_aio"), writes),
        ("l1_update", once("l1_update"), writes),
        ("l2_update", once("l2_update"), writes),
        ("refblock_load", once("refblock_load"), writes),
        ("refblock_update_part", once("refblock_update_part"), writes),
        ("write_compressed", once("write_compressed"), writes),
    ] {
        peers.run(
            "qemu-img",
            &["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", "DIR/disk.qcow2", "16M"],
        );
        let fill = ["write 0 5M", "write -c 6M 64k"];
        peers.run("qemu-io", &["-c", fill[0], "-c", fill[1], "DIR/disk.qcow2"]);
        let [ours, theirs] = peers.sides().map(|side| outcome(side, &rules, runs));
        assert_eq!(ours, theirs, "{name}");
        if !ours.0 || ours.1.contains(&true) {
            struck.push(name);
        }
    }
    let never = ["none", "reftable_update", "write_compressed"];
    assert!(never.iter().all(|name| !struck.contains(name)), "{struck:?}");
    assert_eq!(struck.len(), 13 - never.len(), "{struck:?}");
    peers.stop();
}

/// A client that removes a node hears of no error, as in QSD.
#[test]
fn an_image_that_cannot_be_closed_is_in_the_log() {
    for (clusters, errno, why, means) in [
        ("cluster_size=64k", 5, "I/O error", "the journal has the changes that the image lacks"),
        ("cluster_size=64k", 28, ENOSPC, "the journal has the changes that the image lacks"),
        ("cluster_size=2k", 5, "I/O error", "what was written since the last flush may be lost"),
    ] {
        let scratch = Scratch::new();
        let create = ["create", "-q", "-f", "qcow2", "-o", clusters, "disk.qcow2", "8M"];
        client_output(&scratch, "qemu-img", &create);
        client_output(&scratch, "qemu-img", &["bitmap", "--add", "disk.qcow2", "b"]);
        let command = ServerCommand::new(&scratch).monitor("qmp");
        let runtime = scratch.dir().display().to_string();
        let server = nbd_server(command.env("RUNTIME_DIRECTORY", runtime), &scratch, "").start();
        let mut qmp = Qmp::connect(&server.socket("qmp"));
        let image = json!({"driver": "file", "filename": scratch.path("disk.qcow2")});
        let rule = json!({"event": "l2_update", "errno": errno});
        let faulty = json!({"driver": "blkdebug", "image": image, "inject-error": [rule]});
        let export = json!({"type": "nbd", "id": "e", "node-name": "disk", "name": "disk", "writable": true});
        let mut with = |file: &Value, what: &str| {
            let node = json!({"driver": "qcow2", "node-name": "disk", "file": file});
            qmp.execute("blockdev-add", node);
            qmp.execute("block-export-add", export.clone());
            let uri = nbd_uri(&scratch, "disk");
            // This client does not flush.
            let arguments = ["-f", "raw", "-t", "unsafe", "-c", what, &uri];
            let output = client(&scratch, "qemu-io", &arguments);
            qmp.execute("block-export-del", json!({"id": "e", "mode": "hard"}));
            qmp.wait_for("BLOCK_EXPORT_DELETED");
            qmp.execute("blockdev-del", json!({"node-name": "disk"}));
            output.status.success()
        };
        // Without a journal, the write needs the entry.
        assert_eq!(with(&faulty, "write -P 7 0 64k"), means.contains("journal"));
        let log = server.log();
        for line in [
            format!("Could not close qcow2 image of node 'disk': {why}; {means}"),
            format!("storing the dirty bitmaps of the qcow2 image of node 'disk' failed: {why}; "),
        ] {
            assert!(log.contains(&line), "{line}: {log}");
        }
        if means.contains("journal") {
            assert!(with(&image, "read -P 7 0 64k"));
            let told = client_output(&scratch, "qemu-img", &["check", "disk.qcow2"]);
            assert!(told.contains("No errors were found"), "{told}");
        }
        server.stop();
    }
}
