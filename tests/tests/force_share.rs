//! `force-share`: images that are read while another user writes to them, as in qemu-storage-daemon.

use crate::common;

use std::fs;

use common::peers::{Peers, Side, run};
use integration::{Scratch, merged, tool};
use serde_json::{Value, json};

const DISK: usize = 1 << 20;

fn file(more: &Value) -> Value {
    merged(json!({"driver": "file", "filename": "DIR/disk"}), more)
}

fn reader(name: &str) -> Value {
    file(&json!({"node-name": name, "read-only": true, "force-share": true}))
}

fn export(node: &str, writable: bool) -> Value {
    json!({"type": "nbd", "id": node, "node-name": node, "name": node, "writable": writable})
}

fn peers(scratch: &Scratch) -> Peers {
    let mut peers = Peers::new(scratch);
    for side in peers.sides() {
        fs::write(side.path("disk"), [7; DISK]).expect("writable");
    }
    let addr = json!({"type": "unix", "data": {"path": "DIR/nbd.sock"}});
    peers.execute("nbd-server-start", json!({"addr": addr}));
    peers
}

/// Whether another program can write to a file of the side.
fn is_written(side: &Side, image: &str, format: &str) -> bool {
    let image = side.path(image);
    let mut writer = std::process::Command::new(tool("qemu-io"));
    writer.args(["-f", format, "-c", "write -P 9 0 512"]).arg(image);
    writer.output().expect("qemu-io can be run").status.success()
}

#[test]
fn a_file_is_read_while_others_write_to_it() {
    let scratch = Scratch::new();
    let mut peers = peers(&scratch);
    for more in [json!({}), json!({"auto-read-only": true})] {
        let options = merged(file(&json!({"node-name": "n", "force-share": true})), &more);
        let refused = peers.both("blockdev-add", options);
        let why = "force-share=on can only be used with read-only images";
        assert_eq!(refused["error"]["desc"], why);
    }
    // The reader first, then a writer in another process, and one in this process.
    peers.execute("blockdev-add", reader("r"));
    peers.execute("block-export-add", export("r", false));
    assert!(peers.sides().iter().all(|side| is_written(side, "disk", "raw")));
    peers.execute("blockdev-add", file(&json!({"node-name": "w"})));
    peers.execute("block-export-add", export("w", true));
    let write = ["-f", "raw", "nbd+unix:///w?socket=DIR/nbd.sock", "-c", "write -P 5 512 512"];
    peers.run("qemu-io", &write);
    let read = ["-r", "-f", "raw", "nbd+unix:///r?socket=DIR/nbd.sock", "-c", "read -P 5 512 512"];
    peers.run("qemu-io", &read);
    // The writer first.
    peers.execute("blockdev-add", reader("s"));
    peers.execute("block-export-add", export("s", false));
    let writable = peers.both("block-export-add", merged(export("s", true), &json!({"id": "t"})));
    assert_eq!(writable["error"]["desc"], "Cannot export read-only node as writable");
    // QSD's raw files have several writers.
    assert!(!is_written(&peers.ours, "disk", "raw"), "the writer's lock");
    for share in [false, true] {
        let changed = file(&json!({"node-name": "s", "read-only": true, "force-share": share}));
        let answer = peers.ours.ask("blockdev-reopen", &json!({"options": [changed.clone()]}));
        assert_eq!(answer.get("error").is_some(), !share, "{answer}");
        if !share {
            let theirs = peers.theirs.ask("blockdev-reopen", &json!({"options": [changed]}));
            assert_eq!(answer, theirs);
        }
    }
    let writable = file(&json!({"node-name": "s", "force-share": true}));
    let refused = peers.both("blockdev-reopen", json!({"options": [writable]}));
    assert_eq!(refused["error"]["desc"], "Cannot change the option 'force-share'");
    peers.stop();
}

/// Nested nodes inherit the option, and so do the files that headers name.
#[test]
fn all_images_of_a_chain_are_shared() {
    let scratch = Scratch::new();
    let mut peers = peers(&scratch);
    peers.run("qemu-img", &["create", "-q", "-f", "qcow2", "DIR/base", "1M"]);
    let create = ["create", "-q", "-f", "qcow2", "-b", "DIR/base", "-F", "qcow2", "DIR/top"];
    peers.run("qemu-img", &create);
    let node = |name: &str, image: &str, more: &Value| {
        let file = json!({"driver": "file", "filename": format!("DIR/{image}")});
        merged(json!({"driver": "qcow2", "node-name": name, "file": file}), more)
    };
    let share = json!({"read-only": true, "force-share": true});
    peers.execute("blockdev-add", node("w", "base", &json!({})));
    peers.execute("block-export-add", export("w", true));
    for side in peers.sides() {
        let refused = side.ask("blockdev-add", &node("r", "top", &json!({"read-only": true})));
        assert!(refused.get("error").is_some(), "{refused}");
    }
    peers.execute("blockdev-add", node("r", "top", &share));
    peers.execute("block-export-add", export("r", false));
    peers.execute("blockdev-add", node("s", "base", &share));
    let named = json!({"driver": "qcow2", "node-name": "t", "file": {"driver": "file",
        "filename": "DIR/base", "force-share": false}});
    for side in peers.sides() {
        let refused = side.ask("blockdev-add", &merged(named.clone(), &share));
        assert!(refused.get("error").is_some(), "{refused}");
    }
    for id in ["w", "r"] {
        peers.execute("block-export-del", json!({"id": id}));
        peers.wait_for("BLOCK_EXPORT_DELETED");
    }
    peers.execute("blockdev-del", json!({"node-name": "w"}));
    for side in peers.sides() {
        assert!(is_written(side, "base", "qcow2") && is_written(side, "top", "qcow2"));
    }
    peers.stop();
    for side in peers.sides() {
        run("qemu-img", &side.folder, &["check", "-q", "DIR/top"]);
    }
}
