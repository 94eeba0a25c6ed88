//! `blockdev-reopen`: other options for nodes that are in use.

use crate::common;

use std::process::Command;

use common::{MIB, check, under_load};
use integration::{BlkClient, Image, Qmp, Scratch, ServerCommand, eventually, merged, tool};
use serde_json::{Value, json};

fn file(image: &Image, more: Value) -> Value {
    let options = json!({"driver": "file", "node-name": "disk", "filename": image.path()});
    json!({"options": [merged(options, &more)]})
}

/// Whether other programs are kept from writing to the image.
fn is_locked(image: &Image) -> bool {
    let mut io = Command::new(tool("qemu-io"));
    let io = io.args(["-f", "raw", "-c", "quit"]).arg(image.path()).output();
    !io.expect("qemu-io runs").status.success()
}

#[test]
fn options_change_under_a_load() {
    let scratch = Scratch::new();
    let (image, server, mut qmp, load) = under_load(&scratch, 5);
    let files = server.open_files();
    for round in 0..10 {
        let direct = round % 2 == 0;
        qmp.execute("blockdev-reopen", file(&image, json!({"cache": {"direct": direct}})));
        let nodes = qmp.execute("query-named-block-nodes", json!({}));
        assert_eq!(nodes[0]["cache"]["direct"], direct);
        assert!(is_locked(&image), "the lock goes along");
        load.go_on();
    }
    // One descriptor more: the one that holds the lock.
    eventually("the others to be closed", || (server.open_files() <= files + 1).then_some(()));
    let why = qmp.refused("blockdev-reopen", file(&image, json!({"read-only": true})));
    assert_eq!(why, "Read-only block node 'disk' cannot support read-write users");
    let log = load.finish();
    server.stop();
    check(&image, &log, log.len());
    assert!(!is_locked(&image));
}

#[test]
fn a_lock_follows_the_nodes_permissions() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk0.img", MIB);
    let server = ServerCommand::new(&scratch).monitor("qmp").file("disk", &image, "").start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    qmp.execute("blockdev-reopen", file(&image, json!({"read-only": true})));
    // Others may read it now.
    let elsewhere = Scratch::new();
    let reader = ServerCommand::new(&elsewhere).monitor("qmp");
    let reader = reader.file("reader", &image, "read-only=on");
    // A node without users would not hinder.
    let reader = reader.export("reader", "writable=off").start();
    let why = qmp.refused("blockdev-reopen", file(&image, json!({})));
    assert!(why.contains("lock"), "{why}");
    assert_eq!(qmp.execute("query-named-block-nodes", json!({}))[0]["ro"], true);
    reader.stop();
    qmp.execute("blockdev-reopen", file(&image, json!({})));
    assert_eq!(qmp.execute("query-named-block-nodes", json!({}))[0]["ro"], false);

    // Another file of that name is another disk.
    std::fs::rename(image.path(), scratch.path("elsewhere.img")).expect("another name");
    std::fs::write(image.path(), vec![0; 4096]).expect("another file");
    let why = qmp.refused("blockdev-reopen", file(&image, json!({})));
    assert!(why.contains("not the file"), "{why}");
    server.stop();
}

#[test]
fn a_child_changes() {
    let scratch = Scratch::new();
    let (one, two) = (Image::filled(&scratch, "one.img", 1), Image::empty(&scratch, "two.img", 1));
    let server = ServerCommand::new(&scratch)
        .monitor("qmp")
        .file("one", &one, "")
        .file("two", &two, "")
        .arg("--blockdev")
        .arg("raw,node-name=top,file=one")
        .export("top", "")
        .start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let mut blk = BlkClient::connect(&server.socket("top"), 1, 16).expect("the export serves");
    assert_ne!(blk.read(0, 512), [0; 512]);
    let top =
        |file: &str| json!({"options": [{"driver": "raw", "node-name": "top", "file": file}]});
    qmp.execute("blockdev-reopen", top("two"));
    assert_eq!(blk.read(0, 512), [0; 512]);
    qmp.execute("blockdev-del", json!({"node-name": "one"}));
    assert!(qmp.refused("blockdev-del", json!({"node-name": "two"})).contains("in use"));
    assert!(qmp.refused("blockdev-reopen", top("none")).contains("node-name='none'"));
    drop(blk);
    server.stop();
}

/// The first node cannot be reopened. The command reopens the other one before it.
#[test]
fn several_nodes_change_or_none() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk0.img", MIB);
    let server = ServerCommand::new(&scratch).monitor("qmp");
    let server = server.file("disk", &image, "read-only=on").start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    qmp.execute("blockdev-add", json!({"driver": "null-co", "node-name": "null"}));
    let filter = json!({"driver": "copy-on-read", "node-name": "filter", "file": "null"});
    qmp.execute("blockdev-add", filter.clone());
    let both = |disk: Value| json!({"options": [filter, disk["options"][0]]});
    let disk = file(&image, json!({"read-only": true, "detect-zeroes": "on"}));
    let why = qmp.refused("blockdev-reopen", both(disk));
    assert!(why.contains("does not support reopening"), "{why}");
    let nodes = qmp.execute("query-named-block-nodes", json!({}));
    let disk = nodes.as_array().expect("nodes").iter().find(|node| node["node-name"] == "disk");
    assert_eq!(disk.expect("the disk")["detect_zeroes"], "off");
    server.stop();
}

#[test]
fn a_node_below_copy_on_read_stays_writable() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk0.img", MIB);
    let server = ServerCommand::new(&scratch).monitor("qmp").file("disk", &image, "").start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let filter = json!({"driver": "copy-on-read", "node-name": "filter", "file": "disk"});
    qmp.execute("blockdev-add", filter);
    let why = qmp.refused("blockdev-reopen", file(&image, json!({"read-only": true})));
    assert_eq!(why, "Read-only block node 'disk' cannot support read-write users");
    qmp.execute("blockdev-del", json!({"node-name": "filter"}));
    qmp.execute("blockdev-reopen", file(&image, json!({"read-only": true})));
    server.stop();
}
