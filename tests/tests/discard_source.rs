//! `discard-source` of `blockdev-backup`, and `backing-mask-protocol`, beside qemu-storage-daemon.

use crate::common;

use std::fs;
use std::os::unix::fs::MetadataExt;

use common::peers::{Peers, Side, run};
use integration::{Scratch, merged};
use serde_json::{Value, json};

const DISK: usize = 4 << 20;

/// Adds nodes of files, each with its contents.
fn add(peers: &mut Peers, name: &str, contents: &[u8], more: &Value) {
    for side in peers.sides() {
        fs::write(side.path(name), contents).expect("writable");
    }
    let node = json!({"driver": "file", "node-name": name, "filename": format!("DIR/{name}")});
    peers.execute("blockdev-add", merged(node, more));
}

fn delete(peers: &mut Peers, nodes: &[&str]) {
    for node in nodes {
        peers.execute("blockdev-del", json!({"node-name": node}));
    }
}

fn allocated(side: &Side, name: &str) -> u64 {
    fs::metadata(side.path(name)).expect("a file").blocks() * 512
}

/// The backup of `src` to `dst` ends without an error on both sides.
fn back_up(peers: &mut Peers, more: &Value) {
    let backup = json!({"job-id": "j", "device": "src", "target": "dst", "discard-source": true});
    peers.execute("blockdev-backup", merged(backup, more));
    assert_eq!(peers.wait_for("BLOCK_JOB_COMPLETED").get("error"), None, "{more}");
}

#[test]
fn what_was_copied_is_discarded() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    let unmap = json!({"discard": "unmap"});
    for (discard, sync) in [("unmap", "full"), ("unmap", "top"), ("ignore", "full")] {
        add(&mut peers, "src", &vec![7; DISK], &json!({"discard": discard}));
        add(&mut peers, "dst", &vec![0; DISK], &json!({}));
        back_up(&mut peers, &json!({"sync": sync}));
        for side in peers.sides() {
            let left = if discard == "unmap" { 0 } else { DISK as u64 };
            assert_eq!(allocated(side, "src"), left, "{discard} {sync}");
            assert!(
                fs::read(side.path("dst")).expect("a file") == vec![7; DISK],
                "{discard} {sync}"
            );
        }
        delete(&mut peers, &["src", "dst"]);
    }
    // Only the parts that a bitmap has.
    add(&mut peers, "src", &vec![7; DISK], &unmap);
    add(&mut peers, "dst", &vec![0; DISK], &json!({}));
    peers.execute("block-dirty-bitmap-add", json!({"node": "src", "name": "b"}));
    peers.serve("src");
    peers.io(&["write -P 8 1M 1M"]);
    back_up(&mut peers, &json!({"sync": "incremental", "bitmap": "b"}));
    for side in peers.sides() {
        assert_eq!(allocated(side, "src"), 3 << 20);
        let mut expected = vec![0; DISK];
        expected[1 << 20..2 << 20].fill(8);
        assert!(fs::read(side.path("dst")).expect("a file") == expected);
    }
    peers.execute("block-export-del", json!({"id": "e"}));
    peers.wait_for("BLOCK_EXPORT_DELETED");
    delete(&mut peers, &["src", "dst"]);
    add(&mut peers, "src", &vec![7; DISK], &json!({"read-only": true}));
    add(&mut peers, "dst", &vec![0; DISK], &json!({}));
    let backup = json!({"job-id": "j", "device": "src", "target": "dst", "sync": "full",
        "discard-source": true});
    let refused = peers.both("blockdev-backup", backup);
    assert_eq!(refused["error"]["desc"], "Block node is read-only");
    peers.stop();
}

/// With `sync=top`, the images behind do not disappear behind zeroes.
#[test]
fn an_overlay_shows_its_backing_image_after_a_backup() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    for side in peers.sides() {
        fs::write(side.path("base"), vec![3; DISK]).expect("writable");
    }
    let create = ["create", "-q", "-f", "qcow2", "-b", "DIR/base", "-F", "raw", "DIR/src.qcow2"];
    peers.run("qemu-img", &create);
    peers.run("qemu-io", &["-f", "qcow2", "-c", "write -P 4 1M 1M", "DIR/src.qcow2"]);
    let file = json!({"driver": "file", "filename": "DIR/src.qcow2", "discard": "unmap"});
    let src = json!({"driver": "qcow2", "node-name": "src", "file": file, "discard": "unmap"});
    peers.execute("blockdev-add", src);
    add(&mut peers, "dst", &vec![0; DISK], &json!({}));
    back_up(&mut peers, &json!({"sync": "top"}));
    peers.stop();
    for side in peers.sides() {
        let copied = fs::read(side.path("dst")).expect("a file");
        let has = |bytes: &[u8], byte| bytes.iter().all(|found| *found == byte);
        assert!(has(&copied[1 << 20..2 << 20], 4) && copied[2 << 20] == 0);
        run("qemu-img", &side.folder, &["check", "-q", "DIR/src.qcow2"]);
        run("qemu-img", &side.folder, &["convert", "-O", "raw", "DIR/src.qcow2", "DIR/found"]);
        let found = fs::read(side.path("found")).expect("it was made");
        assert!(has(&found[..1 << 20], 3) && has(&found[2 << 20..], 3));
        assert!(has(&found[1 << 20..2 << 20], 0), "discarded");
    }
}

/// A client pulls a backup of a moment, and each part that it has is freed.
#[test]
fn a_snapshot_gives_up_what_was_copied() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    let unmap = json!({"discard": "unmap"});
    for discard in ["unmap", "ignore"] {
        add(&mut peers, "disk", &vec![7; DISK], &json!({}));
        add(&mut peers, "kept", &[], &unmap);
        for side in peers.sides() {
            let kept = fs::File::options().write(true).open(side.path("kept"));
            kept.and_then(|file| file.set_len(DISK as u64)).expect("a longer file");
        }
        delete(&mut peers, &["kept"]);
        let kept = json!({"driver": "file", "node-name": "kept", "filename": "DIR/kept"});
        peers.execute("blockdev-add", merged(kept, &unmap));
        add(&mut peers, "dst", &vec![0; DISK], &json!({}));
        let above = json!({"driver": "copy-before-write", "node-name": "above", "file": "disk",
            "target": "kept", "discard": "unmap"});
        peers.execute("blockdev-add", above);
        let moment = json!({"driver": "snapshot-access", "node-name": "src", "file": "above",
            "discard": discard});
        peers.execute("blockdev-add", moment);
        peers.serve("above");
        peers.io(&["write -P 9 0 2M"]);
        let is_kept = |side: &Side| allocated(side, "kept");
        assert!(peers.sides().iter().all(|side| is_kept(side) == 2 << 20));
        back_up(&mut peers, &json!({"sync": "full"}));
        for side in peers.sides() {
            assert!(fs::read(side.path("dst")).expect("a file") == vec![7; DISK], "{discard}");
            let left = if discard == "unmap" { 0 } else { 2 << 20 };
            assert_eq!(allocated(side, "kept"), left, "{discard}");
        }
        // What is given up is not copied any more, and cannot be read.
        peers.io(&["write -P 1 3M 64k"]);
        let backup = json!({"job-id": "j", "device": "src", "target": "dst", "sync": "full"});
        peers.execute("blockdev-backup", backup);
        let error = peers.wait_for("BLOCK_JOB_COMPLETED");
        match discard {
            "unmap" => assert_eq!(error["error"], "Permission denied"),
            _ => assert_eq!(error.get("error"), None),
        }
        for side in peers.sides() {
            let left = if discard == "unmap" { 0 } else { (2 << 20) + 65536 };
            assert_eq!(allocated(side, "kept"), left, "{discard}");
        }
        peers.execute("nbd-server-stop", json!({}));
        peers.wait_for("BLOCK_EXPORT_DELETED");
        delete(&mut peers, &["src", "above", "disk", "kept", "dst"]);
    }
    peers.stop();
}

/// An image's header names the format of a base that has none.
#[test]
fn a_protocol_is_named_as_raw() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    for side in peers.sides() {
        fs::write(side.path("base"), vec![3; DISK]).expect("writable");
    }
    for masks in [false, true] {
        for (command, more) in [
            ("block-stream", json!({"device": "top", "base-node": "base"})),
            ("block-commit", json!({"device": "top", "top-node": "mid", "base-node": "base"})),
        ] {
            for (image, behind, format) in [("mid", "base", "raw"), ("top", "mid", "qcow2")] {
                let (image, behind) = (format!("DIR/{image}"), format!("DIR/{behind}"));
                let create = ["create", "-q", "-f", "qcow2", "-b", &behind, "-F", format, &image];
                peers.run("qemu-img", &create);
            }
            let base = json!({"driver": "file", "node-name": "base", "filename": "DIR/base"});
            peers.execute("blockdev-add", base);
            for (name, behind) in [("mid", "base"), ("top", "mid")] {
                let file = json!({"driver": "file", "filename": format!("DIR/{name}")});
                let node =
                    json!({"driver": "qcow2", "node-name": name, "backing": behind, "file": file});
                peers.execute("blockdev-add", node);
            }
            let job = merged(json!({"job-id": "j", "backing-mask-protocol": masks}), &more);
            peers.execute(command, job);
            assert_eq!(peers.wait_for("BLOCK_JOB_COMPLETED").get("error"), None, "{command}");
            let formats = peers.sides().map(|side| {
                let text =
                    run("qemu-img", &side.folder, &["info", "-U", "--output=json", "DIR/top"]);
                let info: Value = serde_json::from_str(&text).expect("JSON");
                info["backing-filename-format"].clone()
            });
            let expected = if masks { "raw" } else { "file" };
            assert_eq!(formats, [expected, expected], "{command}");
            delete(&mut peers, &["top", "mid", "base"]);
        }
    }
    peers.stop();
}
