//! `ringmill list`.

use integration::{Image, Qmp, Scratch, ServerCommand};
use serde_json::{Value, json};

/// The lines of a daemon.
fn listed(scratch: &Scratch, pid: u32) -> Vec<Value> {
    let command = ServerCommand::other_command(scratch, "list").named("list");
    let (status, text) = command.args(["--output", "json"]).run();
    assert!(status.success(), "{text}");
    let all: Vec<Value> = serde_json::from_str(&text).expect("JSON");
    all.into_iter().filter(|line| line["pid"] == pid).collect()
}

/// Each daemon shows what it serves now, also after commands and an upgrade.
#[test]
fn exports_of_all_daemons_are_listed() {
    let scratch = Scratch::new();
    let (one, two) = (Image::empty(&scratch, "one", 1), Image::empty(&scratch, "two", 1));
    let mut server = ServerCommand::new(&scratch)
        .iothread("io0")
        .monitor("qmp")
        .file("one", &one, "")
        .export("one", "")
        .start();
    let line = json!({
        "pid": server.pid(),
        "type": "vhost-user-blk",
        "image": one.path(),
        "at": server.socket("one"),
    });
    assert_eq!(listed(&scratch, server.pid()), [line]);
    let mut qmp = Qmp::connect(&scratch.path("qmp.sock"));
    let node = json!({"driver": "file", "node-name": "two", "filename": two.path()});
    qmp.execute("blockdev-add", node);
    let socket = scratch.path("two.sock");
    let export = json!({
        "type": "vhost-user-blk", "id": "two", "node-name": "two",
        "addr": {"type": "unix", "path": socket},
    });
    qmp.execute("block-export-add", export);
    drop(qmp);
    server.upgrade();
    let lines = listed(&scratch, server.pid());
    let images: Vec<_> = lines.iter().map(|line| line["image"].clone()).collect();
    assert_eq!(images, [json!(one.path()), json!(two.path())]);
    server.stop();
}
