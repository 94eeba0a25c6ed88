//! The filter that a job puts above its source: a node with a name, beside qemu-storage-daemon.

use crate::common;

use std::fs;
use std::sync::atomic::Ordering;

use common::peers::Peers;
use common::{Load, MIB, check, check_moment, connect, create, wait_for_end, wait_for_status};
use integration::nbd::{client_output, nbd_uri};
use integration::{Image, Qmp, Scratch, ServerCommand, merged};
use serde_json::{Value, json};

const DISK: usize = 4 << 20;
/// So slow that a job does not end by itself.
const SLOW: u64 = 65536;

/// Both sides have a disk full of 7, and empty nodes of its size.
fn peers(scratch: &Scratch) -> Peers {
    let mut peers = Peers::new(scratch);
    for name in ["disk", "a", "b", "free"] {
        for side in peers.sides() {
            let byte = if name == "disk" { 7 } else { 0 };
            fs::write(side.path(name), vec![byte; DISK]).expect("a file");
        }
        let file = json!({"driver": "file", "node-name": name, "filename": format!("DIR/{name}")});
        peers.execute("blockdev-add", file);
    }
    let addr = json!({"type": "unix", "data": {"path": "DIR/nbd.sock"}});
    peers.execute("nbd-server-start", json!({"addr": addr}));
    peers
}

fn job(id: &str, target: &str, filter: &str) -> Value {
    json!({"job-id": id, "device": "disk", "target": target, "sync": "full", "speed": SLOW,
        "filter-node-name": filter})
}

/// What both sides list of the nodes, but for what a job keeps in its filter. Sorted by name.
fn listed(peers: &mut Peers) -> Vec<Value> {
    let [mut ours, theirs] = peers.sides().map(|side| {
        let nodes = side.ask("query-named-block-nodes", &json!({"flat": true}));
        let mut nodes = nodes["return"].as_array().expect("a list").clone();
        for node in &mut nodes {
            let members = node.as_object_mut().expect("an object");
            members.remove("dirty-bitmaps");
            let image = members["image"].as_object_mut().expect("an image");
            for name in ["limits", "actual-size", "format-specific"] {
                image.remove(name);
            }
            if members["drv"] == "raw" {
                // QSD's file names of nodes above contain the filter.
                members.remove("file");
                members["image"].as_object_mut().expect("an image").remove("filename");
            }
            // QSD 10.0 lists no children.
            if let Some(children) = members.get_mut("children") {
                let children = children.as_array_mut().expect("a list");
                children.sort_by_key(|child| child["child"].to_string());
            }
        }
        nodes.sort_by_key(|node| node["node-name"].to_string());
        nodes
    });
    if theirs.iter().all(|node| node.get("children").is_none()) {
        ours.iter_mut().filter_map(Value::as_object_mut).for_each(|node| {
            assert!(node.remove("children").is_some());
        });
    }
    assert_eq!(ours, theirs);
    ours
}

/// The nodes of all exports of both, by the exports' names.
fn exported(peers: &mut Peers) -> Vec<(String, String)> {
    let [ours, theirs] = peers.sides().map(|side| {
        let exports = side.qmp.execute("query-block-exports", json!({}));
        let text = |value: &Value| value.as_str().expect("text").to_owned();
        let of = |export: &Value| (text(&export["id"]), text(&export["node-name"]));
        let mut exports: Vec<_> = exports.as_array().expect("a list").iter().map(of).collect();
        exports.sort();
        exports
    });
    assert_eq!(ours, theirs);
    ours
}

fn export(node: &str, id: &str, writable: bool) -> Value {
    json!({"type": "nbd", "id": id, "node-name": node, "name": id, "writable": writable})
}

fn cancel(peers: &mut Peers, id: &str) {
    peers.execute("block-job-cancel", json!({"device": id, "force": true}));
    assert_eq!(peers.wait_for("BLOCK_JOB_CANCELLED")["device"], id);
}

#[test]
fn filters_are_listed_as_in_qemu_storage_daemon() {
    let scratch = Scratch::new();
    let mut peers = peers(&scratch);
    let before = listed(&mut peers);
    peers.execute("blockdev-backup", job("j1", "a", "f1"));
    peers.execute("blockdev-backup", job("j2", "b", "f2"));
    assert_eq!(listed(&mut peers).len(), before.len() + 2);
    cancel(&mut peers, "j1");
    assert_eq!(listed(&mut peers).len(), before.len() + 1);
    cancel(&mut peers, "j2");
    peers.execute("blockdev-mirror", job("m", "a", "top"));
    assert_eq!(listed(&mut peers).len(), before.len() + 1);
    cancel(&mut peers, "m");
    assert_eq!(listed(&mut peers), before);
    // One without a name has a name all the same.
    let mut unnamed = job("j1", "a", "");
    unnamed.as_object_mut().expect("an object").remove("filter-node-name");
    peers.execute("blockdev-backup", unnamed);
    for side in peers.sides() {
        let nodes = side.qmp.execute("query-named-block-nodes", json!({"flat": true}));
        let mut nodes = nodes.as_array().expect("a list").iter();
        let filter = nodes.find(|node| node["drv"] == "copy-before-write").expect("the filter");
        assert!(filter["node-name"].as_str().is_some_and(|name| name.starts_with("#block")));
    }
    peers.stop();
}

#[test]
fn what_is_refused_of_a_filter_is_refused_as_in_qemu_storage_daemon() {
    for (command, names) in
        [("blockdev-backup", &["f1", "f2"][..]), ("blockdev-mirror", &["f1"][..])]
    {
        let scratch = Scratch::new();
        let mut peers = peers(&scratch);
        for (name, target) in names.iter().zip(["a", "b"]) {
            peers.execute(command, job(&format!("of-{name}"), target, name));
        }
        for name in names {
            let free = |device: &str, target: &str| json!({"job-id": "new", "device": device, "target": target, "sync": "full"});
            let reopened = json!({"driver": "raw", "node-name": name, "file": "disk"});
            let new = json!({"node-name": name, "snapshot-file": "DIR/new",
                "snapshot-node-name": "new"});
            for (command, arguments) in [
                ("blockdev-backup", free(name, "free")),
                ("blockdev-backup", free("free", name)),
                ("blockdev-backup", free("disk", name)),
                ("blockdev-mirror", free(name, "free")),
                ("blockdev-mirror", free("free", name)),
                ("blockdev-mirror", free("disk", "free")),
                ("block-commit", json!({"job-id": "new", "device": name})),
                ("block-commit", json!({"job-id": "new", "device": "disk"})),
                ("block-stream", json!({"job-id": "new", "device": name})),
                ("blockdev-del", json!({"node-name": name})),
                ("block_resize", json!({"node-name": name, "size": DISK})),
                ("blockdev-reopen", json!({"options": [reopened]})),
                ("blockdev-snapshot", json!({"node": name, "overlay": "free"})),
                ("blockdev-snapshot-sync", new),
                ("blockdev-add", json!({"driver": "null-co", "node-name": name})),
                ("blockdev-set-active", json!({"node-name": "disk", "active": false})),
            ] {
                let answer = peers.both(command, arguments.clone());
                assert!(answer.get("error").is_some(), "{command} {arguments}");
            }
        }
        peers.stop();
    }
}

/// Writes to the exports of filters are writes to the disk. When a job has ended, its filter's exports have the node below.
#[test]
fn exports_of_filters_outlive_their_jobs_as_in_qemu_storage_daemon() {
    for order in [["j1", "j2"], ["j2", "j1"]] {
        let scratch = Scratch::new();
        let mut peers = peers(&scratch);
        peers.execute("blockdev-backup", job("j1", "a", "f1"));
        peers.execute("block-export-add", export("f1", "e", true));
        peers.io(&["write -P 1 0 1M"]);
        peers.execute("blockdev-backup", job("j2", "b", "f2"));
        peers.execute("block-export-add", export("f2", "lower", false));
        let conflict = peers.both("block-export-add", export("f2", "written", true));
        assert!(conflict["error"]["desc"].as_str().is_some_and(|why| why.contains("'f1'")));
        peers.execute("nbd-server-add", json!({"device": "f2", "name": "another"}));
        let above =
            |name: &str, below: &str| json!({"driver": "raw", "node-name": name, "file": below});
        peers.execute("blockdev-add", above("raw", "f1"));
        peers.execute("blockdev-add", above("lowest", "f2"));
        peers.execute("block-export-add", export("raw", "through-raw", true));
        let conflict = peers.both("block-export-add", export("lowest", "written", true));
        assert!(conflict["error"]["desc"].as_str().is_some_and(|why| why.contains("'lowest'")));
        peers.io(&["write -P 2 1M 1M"]);
        let read = |peers: &mut Peers, export: &str, commands: &[&str]| {
            let uri = format!("nbd+unix:///{export}?socket=DIR/nbd.sock");
            let mut arguments = vec!["-f", "raw", &*uri];
            commands.iter().for_each(|command| arguments.extend(["-c", command]));
            peers.run("qemu-io", &arguments);
        };
        read(&mut peers, "through-raw", &["read -P 2 1M 1M", "write -P 3 2M 1M"]);
        exported(&mut peers);
        for id in order {
            peers.execute("block-job-set-speed", json!({"device": id, "speed": 0}));
            let ended = peers.wait_for("BLOCK_JOB_COMPLETED");
            assert_eq!((&ended["device"], ended.get("error")), (&json!(id), None));
            for side in peers.sides() {
                wait_for_status(&mut side.qmp, id, "null");
            }
            peers.io(&["write -P 4 3M 1M", "read -P 2 1M 1M"]);
            read(&mut peers, "through-raw", &["write -P 5 3M 512k", "read -P 4 3584k 512k"]);
            if id == "j1" {
                listed(&mut peers);
            }
        }
        let nodes: Vec<_> = exported(&mut peers).into_iter().map(|(_, node)| node).collect();
        assert_eq!(nodes, ["disk", "disk", "disk", "raw"]);
        // A node above a filter is above the disk, also when it is opened anew.
        for active in [false, true] {
            let arguments = json!({"node-name": "lowest", "active": active});
            peers.execute("blockdev-set-active", arguments);
        }
        peers.execute("block-export-add", export("lowest", "written", true));
        read(&mut peers, "written", &["read -P 5 3M 512k", "write -P 6 0 1M"]);
        peers.io(&["read -P 6 0 1M"]);
        peers.stop();
        for side in peers.sides() {
            let has = |name: &str, bytes: [u8; 4]| {
                let found = fs::read(side.path(name)).expect("a file");
                for (part, byte) in found.chunks(1 << 20).zip(bytes) {
                    assert!(part.iter().all(|found| *found == byte), "{name}: not all {byte}");
                }
            };
            has("a", [7, 7, 7, 7]);
            has("b", [1, 7, 7, 7]);
        }
    }
}

/// A mirror's end moves the exports of its filter to the target.
#[test]
fn exports_of_a_mirrors_filter_move_as_in_qemu_storage_daemon() {
    let scratch = Scratch::new();
    let mut peers = peers(&scratch);
    let mirror = merged(job("m", "a", "top"), &json!({"speed": 0}));
    peers.execute("blockdev-mirror", mirror);
    peers.execute("block-export-add", export("top", "e", true));
    peers.io(&["write -P 1 0 1M"]);
    assert_eq!(exported(&mut peers), [("e".to_owned(), "top".to_owned())]);
    peers.wait_for("BLOCK_JOB_READY");
    peers.execute("job-complete", json!({"id": "m"}));
    peers.wait_for("BLOCK_JOB_COMPLETED");
    for side in peers.sides() {
        wait_for_status(&mut side.qmp, "m", "null");
    }
    assert_eq!(exported(&mut peers), [("e".to_owned(), "a".to_owned())]);
    peers.io(&["write -P 2 1M 1M", "read -P 1 0 1M", "read -P 7 2M 2M"]);
    peers.stop();
    for side in peers.sides() {
        let [old, new] = ["disk", "a"].map(|name| fs::read(side.path(name)).expect("a file"));
        assert!((old[0], old[1 << 20], new[0], new[1 << 20]) == (1, 7, 1, 2));
    }
}

/// After jobs on chains, they move to the topmost image, or to the base.
#[test]
fn exports_of_filters_above_chains_move_as_in_qemu_storage_daemon() {
    for (command, driver, end) in
        [("block-stream", "copy-on-read", "top"), ("block-commit", "mirror_top", "base")]
    {
        let scratch = Scratch::new();
        let mut peers = peers(&scratch);
        peers.run("qemu-img", &["create", "-q", "-f", "qcow2", "DIR/base", "4M"]);
        let backing = ["-F", "qcow2", "-b", "DIR/base", "DIR/top"];
        peers.run("qemu-img", &[&["create", "-q", "-f", "qcow2"][..], &backing[..]].concat());
        for (name, backing) in [("base", Value::Null), ("top", json!("base"))] {
            let file = json!({"driver": "file", "filename": format!("DIR/{name}")});
            let node = json!({"driver": "qcow2", "node-name": name, "file": file});
            peers.execute("blockdev-add", merged(node, &json!({"backing": backing})));
        }
        peers.execute("block-export-add", export("top", "e", true));
        peers.io(&["write -P 1 0 1M"]);
        let arguments = json!({"job-id": "j", "device": "top", "filter-node-name": "f"});
        match command {
            "block-stream" => {
                peers.execute(command, merged(arguments, &json!({"auto-finalize": false})));
                peers.wait_for("BLOCK_JOB_PENDING");
            }
            _ => {
                peers.execute(command, arguments);
                peers.wait_for("BLOCK_JOB_READY");
            }
        }
        let [ours, theirs] = peers.sides().map(|side| {
            let nodes = side.qmp.execute("query-named-block-nodes", json!({"flat": true}));
            let nodes = nodes.as_array().expect("a list").clone();
            nodes.into_iter().find(|node| node["node-name"] == "f").expect("the filter")
        });
        assert_eq!((&ours["drv"], &theirs["drv"]), (&json!(driver), &json!(driver)));
        assert!(theirs.get("children").is_none_or(|children| *children == ours["children"]));
        peers.execute("block-export-add", export("f", "filter", true));
        peers.execute("nbd-server-add", json!({"device": "f", "name": "more", "writable": true}));
        let read = |peers: &mut Peers, name: &str, commands: &[&str]| {
            let uri = format!("nbd+unix:///{name}?socket=DIR/nbd.sock");
            let mut arguments = vec!["-f", "raw", &*uri];
            commands.iter().for_each(|command| arguments.extend(["-c", command]));
            peers.run("qemu-io", &arguments);
        };
        read(&mut peers, "filter", &["read -P 1 0 1M", "write -P 2 1M 1M"]);
        let order = if command == "block-stream" { "job-finalize" } else { "job-complete" };
        peers.execute(order, json!({"id": "j"}));
        peers.wait_for("BLOCK_JOB_COMPLETED");
        for side in peers.sides() {
            wait_for_status(&mut side.qmp, "j", "null");
        }
        assert!(exported(&mut peers).iter().all(|(_, node)| node == end));
        read(&mut peers, "more", &["read -P 1 0 1M", "read -P 2 1M 1M"]);
        read(&mut peers, "filter", &["write -P 3 2M 1M", "read -P 1 0 1M"]);
        peers.io(&["read -P 3 2M 1M"]);
        peers.stop();
    }
}

/// The next daemon has no job: the state file names the source for what uses the filter.
#[test]
fn a_restart_finds_exports_of_a_filter_at_the_source() {
    let scratch = Scratch::new();
    for name in ["disk", "a"] {
        fs::write(scratch.path(name), vec![7; DISK]).expect("a file");
    }
    let start = || {
        let state = scratch.path("state").display().to_string();
        ServerCommand::new(&scratch).monitor("qmp").arg("--state").arg(state).start()
    };
    let server = start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let addr = json!({"type": "unix", "data": {"path": scratch.path("nbd.sock")}});
    qmp.execute("nbd-server-start", json!({"addr": addr}));
    for name in ["disk", "a"] {
        let path = scratch.path(name);
        qmp.execute("blockdev-add", json!({"driver": "file", "node-name": name, "filename": path}));
    }
    qmp.execute("blockdev-backup", job("j", "a", "f"));
    qmp.execute("block-export-add", export("f", "e", true));
    qmp.execute("blockdev-add", json!({"driver": "raw", "node-name": "raw", "file": "f"}));
    let written = ["-f", "raw", "-c", "write -P 1 0 1M", &nbd_uri(&scratch, "e")];
    client_output(&scratch, "qemu-io", &written);
    server.kill();
    let server = start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let exports = qmp.execute("query-block-exports", json!({}));
    assert_eq!((&exports[0]["id"], &exports[0]["node-name"]), (&json!("e"), &json!("disk")));
    let nodes = qmp.execute("query-named-block-nodes", json!({"flat": true}));
    let nodes = nodes.as_array().expect("a list").iter();
    let nodes: Vec<_> = nodes.map(|node| (&node["node-name"], &node["children"])).collect();
    let below = json!([{"node-name": "disk", "child": "file"}]);
    assert_eq!(nodes[2], (&json!("raw"), &below), "{nodes:?}");
    let uri = nbd_uri(&scratch, "e");
    let read = ["-f", "raw", "-c", "read -P 1 0 1M", "-c", "read -P 7 1M 3M", &uri];
    client_output(&scratch, "qemu-io", &read);
    server.stop();
}

/// A guest has its disk by the filter of a backup, while other backups begin and end below and above.
#[test]
fn writes_through_a_filter_are_kept_and_pass_all_backups() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk0.img", MIB);
    let server = ServerCommand::new(&scratch).monitor("qmp").file("disk", &image, "");
    let mut server = server.start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let names = ["a", "b", "c"];
    let path = |name: &str| scratch.path(&format!("{name}.img"));
    names.iter().for_each(|name| create(&mut qmp, name, &path(name), MIB << 20));
    let backup = |name: &str| {
        json!({"job-id": name, "device": "disk", "target": name, "sync": "full", "speed": 1,
            "filter-node-name": format!("above-{name}")})
    };
    let socket = server.socket("disk");
    qmp.execute("blockdev-backup", backup("a"));
    qmp.execute(
        "block-export-add",
        json!({"type": "vhost-user-blk", "id": "disk", "node-name": "above-a", "writable": true,
            "num-queues": 2, "addr": {"type": "unix", "path": socket}}),
    );
    let load = Load::start(connect(&server, 2), 9);
    load.go_on();
    let mut moments = vec![0..=0];
    let mut begin = |qmp: &mut Qmp, name: &str| {
        let before = load.written.load(Ordering::Relaxed);
        qmp.execute("blockdev-backup", backup(name));
        moments.push(before..=load.written.load(Ordering::Relaxed) + 1);
        load.go_on();
    };
    let end = |qmp: &mut Qmp, name: &str| {
        let why = qmp.refused("x-upgrade", json!({}));
        assert!(why.contains("a job is running"), "{why}");
        qmp.execute("block-job-set-speed", json!({"device": name, "speed": 0}));
        wait_for_end(qmp, name);
        wait_for_status(qmp, name, "null");
        load.go_on();
    };
    begin(&mut qmp, "b");
    end(&mut qmp, "a");
    begin(&mut qmp, "c");
    ["b", "c"].iter().for_each(|name| end(&mut qmp, name));
    let exports = qmp.execute("query-block-exports", json!({}));
    assert_eq!(exports[0]["node-name"], "disk");
    drop(qmp);
    server.upgrade();
    load.go_on();
    let log = load.finish();
    server.stop();
    check(&image, &log, log.len());
    for (name, moment) in names.iter().zip(moments) {
        check_moment(&Image::existing(&path(name)), &log, moment);
    }
}

/// The same names are refused as in qemu-storage-daemon, with the same words.
#[test]
fn names_of_filters_are_unique_as_in_qemu_storage_daemon() {
    let scratch = Scratch::new();
    let mut peers = peers(&scratch);
    peers.execute("blockdev-backup", job("first", "a", "taken"));
    for name in ["disk", "a", "b", "free", "taken", "1", "#block001"] {
        let named = merged(job("second", "b", name), &json!({"speed": 0}));
        let refused = peers.both("blockdev-backup", named.clone());
        assert!(refused.get("error").is_some(), "{named}");
        let mirror = merged(named, &json!({"device": "free"}));
        let refused = peers.both("blockdev-mirror", mirror);
        assert!(refused.get("error").is_some(), "{name}");
    }
    cancel(&mut peers, "first");
    // The name is free again.
    peers.execute("blockdev-backup", job("second", "a", "taken"));
    peers.stop();
}
