//! Dirty bitmaps, incremental backups and transactions.

use crate::common;

use std::fs;
use std::path::Path;

use common::peers::{Peers, run};
use common::{MIB, check, create, under_load, wait_for_end};
use integration::nbd::{nbd_export, nbd_server, nbd_uri};
use integration::{Image, Qmp, Scratch, Server, ServerCommand, eventually, merged};
use serde_json::{Value, json};

/// The bitmaps that both daemons report, regardless of their order. QSD has further ones in the filters of backups.
fn bitmaps(peers: &mut Peers) -> Vec<Value> {
    let [ours, theirs] = peers.sides().map(|side| {
        let nodes = side.ask("query-named-block-nodes", &json!({"flat": true}));
        let nodes = nodes["return"].as_array().expect("a list").clone();
        let nodes = nodes.iter().filter(|node| node["drv"] != "copy-before-write");
        let told = nodes.filter_map(|node| node.get("dirty-bitmaps"));
        let mut all: Vec<Value> =
            told.flat_map(|list| list.as_array().expect("a list").clone()).collect();
        all.iter_mut()
            .for_each(|bitmap| drop(bitmap.as_object_mut().map(|b| b.remove("inconsistent"))));
        all.sort_by_key(|bitmap| bitmap["name"].to_string());
        all
    });
    assert_eq!(ours, theirs);
    ours
}

fn count(bitmaps: &[Value], name: &str) -> u64 {
    let bitmap = bitmaps.iter().find(|bitmap| bitmap["name"] == name).expect("a bitmap");
    bitmap["count"].as_u64().expect("a count")
}

fn named(command: &str) -> String {
    format!("block-dirty-bitmap-{command}")
}

fn peers(scratch: &Scratch) -> Peers {
    let mut peers = Peers::new(scratch);
    for (name, size) in [("disk", "4M"), ("target", "4M"), ("other", "2M")] {
        let image = format!("DIR/{name}.raw");
        peers.run("qemu-img", &["create", "-q", "-f", "raw", &image, size]);
        let file = json!({"driver": "file", "filename": image});
        peers.execute("blockdev-add", json!({"driver": "raw", "node-name": name, "file": file}));
    }
    peers
}

#[test]
fn bitmaps_record_the_same_as_in_qemu_storage_daemon() {
    let scratch = Scratch::new();
    let mut peers = peers(&scratch);
    let of = |name: &str| json!({"node": "disk", "name": name});
    peers.execute(&named("add"), of("a"));
    peers.execute(
        &named("add"),
        json!({"node": "disk", "name": "b", "granularity": 4096, "disabled": true}),
    );
    peers.execute(&named("add"), json!({"node": "other", "name": "o"}));
    for (command, arguments) in [
        ("add", of("a")),
        ("add", of("")),
        ("add", json!({"node": "gone", "name": "a"})),
        ("add", json!({"node": "disk", "name": "x", "granularity": 1000})),
        ("add", json!({"node": "disk", "name": "x", "granularity": 256})),
        ("add", json!({"node": "disk", "name": "x", "persistent": true})),
        ("remove", of("x")),
        ("clear", of("x")),
        ("enable", json!({"node": "gone", "name": "a"})),
        ("merge", json!({"node": "disk", "target": "x", "bitmaps": ["a"]})),
        ("merge", json!({"node": "disk", "target": "a", "bitmaps": ["x"]})),
        (
            "merge",
            json!({"node": "disk", "target": "a", "bitmaps": [{"node": "other", "name": "o"}]}),
        ),
    ] {
        let answer = peers.both(&named(command), arguments);
        assert!(answer.get("error").is_some(), "{command}: {answer}");
    }
    peers.serve("disk");
    peers.io(&["write 0 100k", "write 1M 4k", "discard 2M 64k", "write -z 3M 1"]);
    assert_eq!(count(&bitmaps(&mut peers), "a"), 4 << 16);
    peers.execute(&named("enable"), of("b"));
    peers.execute(&named("disable"), of("a"));
    peers.io(&["write 3584k 4k", "read 0 4M"]);
    let all = bitmaps(&mut peers);
    assert_eq!((count(&all, "a"), count(&all, "b")), (4 << 16, 4096));
    peers.execute(&named("merge"), json!({"node": "disk", "target": "b", "bitmaps": ["a"]}));
    bitmaps(&mut peers);
    let both =
        json!({"node": "disk", "target": "a", "bitmaps": ["b", {"node": "disk", "name": "b"}]});
    peers.execute(&named("merge"), both);
    bitmaps(&mut peers);
    peers.execute(&named("clear"), of("b"));
    bitmaps(&mut peers);
    peers.execute(&named("remove"), of("a"));
    assert_eq!(bitmaps(&mut peers).len(), 2);
    peers.execute("block_resize", json!({"node-name": "other", "size": 4 << 20}));
    peers.execute(
        &named("merge"),
        json!({"node": "disk", "target": "b", "bitmaps": [{"node": "other", "name": "o"}]}),
    );
    peers.stop();
}

#[test]
fn a_transaction_is_carried_out_as_a_whole() {
    let scratch = Scratch::new();
    let mut peers = peers(&scratch);
    let action = |kind: &str, data: Value| json!({"type": kind, "data": data});
    let of = |name: &str| json!({"node": "disk", "name": name});
    let merge = json!({"node": "disk", "target": "c", "bitmaps": ["a"]});
    peers.execute(&named("add"), of("a"));
    peers.serve("disk");
    peers.io(&["write 0 1M"]);
    let actions = json!({"actions": [
        action(&named("add"), of("c")),
        action(&named("merge"), merge.clone()),
        action(&named("disable"), of("c")),
        action(&named("clear"), of("a")),
    ]});
    peers.execute("transaction", actions);
    let all = bitmaps(&mut peers);
    assert_eq!((count(&all, "a"), count(&all, "c")), (0, 1 << 20));
    // The whole transaction is undone.
    peers.io(&["write 2M 64k"]);
    let before = bitmaps(&mut peers);
    let refused = json!({"actions": [
        action(&named("enable"), of("c")),
        action(&named("merge"), merge),
        action(&named("clear"), of("a")),
        action(&named("remove"), of("a")),
        action(&named("add"), of("n")),
        action("abort", json!({})),
    ]});
    assert!(peers.both("transaction", refused).get("error").is_some());
    assert_eq!(bitmaps(&mut peers), before);
    for actions in [
        json!([]),
        json!([action("frob", json!({}))]),
        json!([action(&named("clear"), of("a")), action(&named("add"), of("a"))]),
        json!([action(&named("clear"), of("x"))]),
    ] {
        peers.both("transaction", json!({"actions": actions}));
        assert_eq!(bitmaps(&mut peers), before);
    }
    peers.stop();
}

/// The target may hold an older backup.
#[test]
fn a_backup_of_a_failed_transaction_never_runs() {
    let scratch = Scratch::new();
    let mut peers = peers(&scratch);
    let old = vec![b'o'; 4 << 20];
    let targets = peers.sides().map(|side| side.path("target.raw"));
    targets.iter().for_each(|target| fs::write(target, &old).expect("an older backup"));
    peers.execute(&named("add"), json!({"node": "disk", "name": "b"}));
    peers.serve("disk");
    peers.io(&["write 0 1M"]);
    let before = bitmaps(&mut peers);
    let again = json!({"type": named("add"), "data": {"node": "disk", "name": "b"}});
    let abort = json!({"type": "abort", "data": {}});
    for (mode, failing) in [("on-success", again), ("never", abort)] {
        let backup = json!({"job-id": "j", "device": "disk", "target": "target", "sync": "bitmap",
            "bitmap": "b", "bitmap-mode": mode, "auto-dismiss": false});
        let actions = json!([{"type": "blockdev-backup", "data": backup}, failing]);
        assert!(peers.both("transaction", json!({"actions": actions})).get("error").is_some());
        for status in ["created", "aborting", "concluded", "null"] {
            assert_eq!(
                peers.wait_for("JOB_STATUS_CHANGE"),
                json!({"id": "j", "status": status}),
                "{mode}"
            );
        }
        assert_eq!(peers.execute("query-jobs", json!({})), json!([]));
        assert_eq!(bitmaps(&mut peers), before);
    }
    peers.stop();
    for target in targets {
        assert!(fs::read(&target).expect("the target") == old, "{}", target.display());
    }
}

#[test]
fn snapshots_of_a_transaction_are_undone() {
    let scratch = Scratch::new();
    let (_image, server, mut qmp, load) = under_load(&scratch, 1);
    create(&mut qmp, "target", &scratch.path("target.img"), MIB << 20);
    let snapshot = |name: &str| {
        let file = scratch.path(&format!("{name}.qcow2"));
        json!({"type": "blockdev-snapshot-sync", "data": {
            "node-name": "disk", "snapshot-file": file, "snapshot-node-name": name}})
    };
    let bitmap = json!({"type": "block-dirty-bitmap-add", "data": {"node": "disk", "name": "b"}});
    let backup = json!({"type": "blockdev-backup", "data": {
        "job-id": "j", "device": "disk", "target": "target", "sync": "full"}});
    let abort = json!({"type": "abort", "data": {}});
    for actions in [
        json!([bitmap, snapshot("top"), abort]),
        json!([bitmap, backup, abort]),
        json!([snapshot("top"), snapshot("top")]),
    ] {
        qmp.refused("transaction", json!({"actions": actions}));
        load.go_on();
        let exports = qmp.execute("query-block-exports", json!({}));
        assert_eq!(exports[0]["node-name"], "disk");
        assert_eq!(qmp.execute("query-jobs", json!({})), json!([]));
    }
    // A transaction that succeeds: the snapshot and the backup have the same moment.
    qmp.execute("transaction", json!({"actions": [bitmap, backup]}));
    wait_for_end(&mut qmp, "j");
    qmp.execute("transaction", json!({"actions": [snapshot("top")]}));
    load.go_on();
    let exports = qmp.execute("query-block-exports", json!({}));
    assert_eq!(exports[0]["node-name"], "top");
    load.finish();
    server.stop();
}

/// A full backup and incremental ones of a disk under load, each into a copy of the one before.
#[test]
fn incremental_backups_add_up_to_the_disk() {
    for granularity in [512, 4096, 1 << 20] {
        let scratch = Scratch::new();
        let (_image, server, mut qmp, load) = under_load(&scratch, granularity);
        load.go_on();
        create(&mut qmp, "target", &scratch.path("target.img"), MIB << 20);
        let backup = |sync: &str, more: Value| {
            merged(
                json!({"job-id": "j", "device": "disk", "target": "target", "sync": sync}),
                &more,
            )
        };
        let added = json!({"node": "disk", "name": "b", "granularity": granularity});
        let actions = json!([
            {"type": "block-dirty-bitmap-add", "data": added},
            {"type": "blockdev-backup", "data": backup("full", json!({}))},
        ]);
        qmp.execute("transaction", json!({"actions": actions}));
        wait_for_end(&mut qmp, "j");
        load.go_on();
        // A cancelled backup gives all bits back.
        let slow = backup("incremental", json!({"bitmap": "b", "speed": 65536}));
        qmp.execute("blockdev-backup", slow);
        let busy = qmp.refused("block-dirty-bitmap-clear", json!({"node": "disk", "name": "b"}));
        assert!(busy.contains("in use"), "{busy}");
        load.go_on();
        qmp.execute("job-cancel", json!({"id": "j"}));
        eventually("the job's end", || {
            (qmp.execute("query-jobs", json!({})) == json!([])).then_some(())
        });
        for mode in ["never", "on-success", "always"] {
            let partial = backup("bitmap", json!({"bitmap": "b", "bitmap-mode": mode}));
            qmp.execute("blockdev-backup", partial);
            wait_for_end(&mut qmp, "j");
            load.go_on();
        }
        let log = load.finish();
        qmp.execute("blockdev-backup", backup("incremental", json!({"bitmap": "b"})));
        wait_for_end(&mut qmp, "j");
        server.stop();
        check(&Image::existing(&scratch.path("target.img")), &log, log.len());
    }
}

/// While a job has the bits of a bitmap, later writes are those of a bitmap without a name.
#[test]
fn the_bitmap_of_a_job_has_the_bits_that_the_job_began_with() {
    let scratch = Scratch::new();
    let mut peers = peers(&scratch);
    let of = json!({"node": "disk", "name": "b"});
    peers.execute(&named("add"), of.clone());
    peers.execute(&named("add"), json!({"node": "disk", "name": "idle"}));
    peers.serve("disk");
    peers.io(&["write 0 2M"]);
    // The bytes in "b" and "idle", and in the one without a name.
    let counts = |peers: &mut Peers| -> Vec<u64> {
        bitmaps(peers).iter().map(|bitmap| bitmap["count"].as_u64().expect("a count")).collect()
    };
    let (begun, all) = (2 << 20, (2 << 20) + (64 << 10));
    for (recording, before, new) in [(true, begun, 64 << 10), (false, all, 0)] {
        let job = json!({"job-id": "j", "device": "disk", "target": "target", "sync": "incremental",
            "bitmap": "b", "speed": 1});
        peers.execute("blockdev-backup", job);
        assert_eq!(counts(&mut peers), [before, before, 0], "{recording}");
        peers.io(&["write 3M 64k"]);
        assert_eq!(counts(&mut peers), [before, all, new], "{recording}");
        peers.execute("block-job-cancel", json!({"device": "j", "force": true}));
        for side in peers.sides() {
            while side.qmp.wait_for("JOB_STATUS_CHANGE")["status"] != "null" {}
        }
        assert_eq!(counts(&mut peers), [all, all], "{recording}");
        peers.execute(&named("disable"), of.clone());
    }
    peers.stop();
}

/// What `qemu-img` tells of the bitmaps of an image, which it finds whole.
fn stored(folder: &Path) -> Value {
    run("qemu-img", folder, &["check", "-q", "DIR/disk.qcow2"]);
    let told = run("qemu-img", folder, &["info", "--output=json", "DIR/disk.qcow2"]);
    let told: Value = serde_json::from_str(&told).expect("JSON");
    told["format-specific"]["data"]["bitmaps"].clone()
}

fn add_image(peers: &mut Peers, options: Value) {
    let node = json!({"driver": "qcow2", "node-name": "disk",
        "file": {"driver": "file", "filename": "DIR/disk.qcow2"}});
    peers.execute("blockdev-add", merged(node, &options));
}

/// Each of the two opens what the other one has stored.
#[test]
fn persistent_bitmaps_are_stored_as_by_qemu_storage_daemon() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    peers.run("qemu-img", &["create", "-q", "-f", "qcow2", "DIR/disk.qcow2", "64M"]);
    for arguments in [&["b0"][..], &["-g", "4096", "--disable", "b1"]] {
        let (name, options) = arguments.split_last().expect("a name");
        let arguments = [&["bitmap", "--add"], options, &["DIR/disk.qcow2", name]].concat();
        peers.run("qemu-img", &arguments);
    }
    add_image(&mut peers, json!({}));
    let of = |name: &str| json!({"node": "disk", "name": name});
    let new = |name: &str, granularity: u64| json!({"node": "disk", "name": name, "persistent": true, "granularity": granularity});
    bitmaps(&mut peers);
    for (command, arguments) in
        [("add", new(&"x".repeat(1024), 65536)), ("add", new("b0", 65536)), ("remove", of("gone"))]
    {
        peers.both(&named(command), arguments);
    }
    peers.execute(&named("add"), new("p", 65536));
    peers.execute(&named("add"), new("q", 1 << 31));
    peers.execute(&named("add"), of("memory"));
    peers.serve("disk");
    peers.io(&["write 2M 100k", "write 5M 1", "write -z 60M 1M"]);
    peers.execute(&named("merge"), json!({"node": "disk", "target": "b1", "bitmaps": ["b0"]}));
    let all = bitmaps(&mut peers);
    assert_eq!(count(&all, "b1"), (128 + 64 + 1024) << 10);
    peers.execute("block-export-del", json!({"id": "e", "mode": "hard"}));
    peers.wait_for("BLOCK_EXPORT_DELETED");
    peers.execute("block_resize", json!({"node-name": "disk", "size": 128 << 20}));
    // Ours has set the bits of the new part.
    let export =
        json!({"type": "nbd", "id": "e", "node-name": "disk", "name": "e", "writable": true});
    peers.execute("block-export-add", export);
    peers.io(&["write -z 64M 64M"]);
    peers.execute("block-export-del", json!({"id": "e", "mode": "hard"}));
    peers.wait_for("BLOCK_EXPORT_DELETED");
    peers.execute(&named("remove"), of("b0"));
    bitmaps(&mut peers);
    // A removal is undone with the rest of a transaction.
    let actions = json!([
        {"type": named("remove"), "data": of("p")},
        {"type": "abort", "data": {}},
    ]);
    assert!(peers.both("transaction", json!({"actions": actions})).get("error").is_some());
    let last = bitmaps(&mut peers);
    let folders = peers.sides().map(|side| side.folder.clone());
    peers.stop();
    let [ours, theirs] = folders.each_ref().map(|folder| stored(folder));
    assert_eq!(ours, theirs);
    assert_eq!(ours.as_array().map(Vec::len), Some(3));

    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    let [to_ours, to_theirs] = peers.sides().map(|side| side.path("disk.qcow2"));
    fs::copy(folders[1].join("disk.qcow2"), to_ours).expect("theirs");
    fs::copy(folders[0].join("disk.qcow2"), to_theirs).expect("ours");
    add_image(&mut peers, json!({"read-only": true}));
    for (command, arguments) in [
        ("remove", of("p")),
        ("clear", of("p")),
        ("merge", json!({"node": "disk", "target": "p", "bitmaps": ["b1"]})),
    ] {
        assert!(peers.both(&named(command), arguments).get("error").is_some());
    }
    peers.execute(&named("disable"), of("p"));
    bitmaps(&mut peers);
    peers.execute("blockdev-del", json!({"node-name": "disk"}));
    add_image(&mut peers, json!({}));
    let mut now = bitmaps(&mut peers);
    now.push(last.iter().find(|bitmap| bitmap["name"] == "memory").expect("it").clone());
    now.sort_by_key(|bitmap| bitmap["name"].to_string());
    assert_eq!(now, last);
    peers.stop();
}

/// QSD takes such a bitmap, and loses the bitmap as it closes the image.
#[test]
fn a_bitmap_without_room_in_the_header_is_refused_at_once() {
    // A name of so many bytes.
    let name = |len: usize| format!("{}base", "./".repeat((len - 4) / 2));
    let add = json!({"node": "disk", "name": "b", "persistent": true});
    for (cluster, most, too_long) in [("512", 340, 370), ("1024", 340, 880)] {
        let scratch = Scratch::new();
        let mut peers = Peers::new(&scratch);
        peers.run("qemu-img", &["create", "-q", "-f", "raw", "DIR/base", "4M"]);
        for (name, of) in [(name(too_long), "full"), (name(most), "disk")] {
            let options = format!("cluster_size={cluster}");
            let image = format!("DIR/{of}.qcow2");
            peers.run(
                "qemu-img",
                &["create", "-q", "-f", "qcow2", "-o", &options, "-b", &name, "-F", "raw", &image],
            );
        }
        peers.execute(
            "blockdev-add",
            json!({"driver": "qcow2", "node-name": "full",
                "file": {"driver": "file", "filename": "DIR/full.qcow2"}}),
        );
        let to_full = merged(add.clone(), &json!({"node": "full"}));
        assert_eq!(
            peers.ours.qmp.refused(&named("add"), to_full),
            "Can't make bitmap 'b' persistent in 'full': the image's header has no room for it; a \
             shorter name of the backing file or larger clusters leave room"
        );
        bitmaps(&mut peers);
        add_image(&mut peers, json!({}));
        peers.execute(&named("add"), add.clone());
        // A name that is given later leaves the bitmap its room.
        let rename =
            json!({"device": "disk", "image-node-name": "disk", "backing-file": name(370)});
        assert_eq!(
            peers.ours.qmp.refused("change-backing-file", rename),
            "Could not change the backing file: there is no room for the name in the image's header"
        );
        let folders = peers.sides().map(|side| side.folder.clone());
        peers.stop();
        let [ours, theirs] = folders.each_ref().map(|folder| stored(folder));
        assert_eq!(ours, theirs);
        assert_eq!(ours.as_array().map(Vec::len), Some(1));
    }
}

/// QSD has the bitmap empty, so that a backup would lack what was written.
#[test]
fn a_disk_with_a_damaged_bitmap_is_served_without_it() {
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    run("qemu-img", scratch.dir(), &["create", "-q", "-f", "qcow2", "DIR/disk.qcow2", "8M"]);
    run("qemu-img", scratch.dir(), &["bitmap", "--add", "DIR/disk.qcow2", "b"]);
    run("qemu-io", scratch.dir(), &["-c", "write -P 5 1M 1M", "DIR/disk.qcow2"]);
    let mut image = fs::read(&path).expect("the image");
    let number = |image: &[u8], at: usize, len: usize| {
        image[at..at + len].iter().fold(0, |number, byte| number << 8 | usize::from(*byte))
    };
    // The extension with the directory, its first entry, and that one's table.
    let mut at = number(&image, 100, 4);
    while number(&image, at, 4) != 0x2385_2875 {
        at += 8 + number(&image, at + 4, 4).next_multiple_of(8);
    }
    let table = number(&image, number(&image, at + 8 + 16, 8), 8);
    assert!(number(&image, table, 8) > 1);
    image[table + 1] ^= 0x10;
    fs::write(&path, image).expect("writable");
    for read_only in [true, false] {
        let server = ServerCommand::new(&scratch).monitor("qmp").start();
        let mut qmp = Qmp::connect(&server.socket("qmp"));
        let file = json!({"driver": "file", "filename": path});
        let disk =
            json!({"driver": "qcow2", "node-name": "disk", "read-only": read_only, "file": file});
        qmp.execute("blockdev-add", disk);
        let nodes = qmp.execute("query-named-block-nodes", json!({"flat": true}));
        let disk =
            nodes.as_array().and_then(|all| all.iter().find(|node| node["node-name"] == "disk"));
        let told = disk.expect("the node")["dirty-bitmaps"][0].clone();
        assert_eq!((&told["name"], &told["inconsistent"]), (&json!("b"), &json!(true)), "{nodes}");
        if !read_only {
            qmp.execute("block-dirty-bitmap-remove", json!({"node": "disk", "name": "b"}));
        }
        server.stop();
    }
    // The clusters of the damaged table are leaked at worst.
    run("qemu-img", scratch.dir(), &["check", "-q", "-r", "leaks", "DIR/disk.qcow2"]);
    run("qemu-img", scratch.dir(), &["check", "-q", "DIR/disk.qcow2"]);
    run("qemu-io", scratch.dir(), &["-c", "read -P 5 1M 1M", "DIR/disk.qcow2"]);
}

#[test]
fn inconsistent_bitmaps_can_only_be_removed() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    peers.run("qemu-img", &["create", "-q", "-f", "qcow2", "DIR/disk.qcow2", "8M"]);
    for name in ["b0", "b1"] {
        peers.run("qemu-img", &["bitmap", "--add", "DIR/disk.qcow2", name]);
    }
    // In use, as a daemon that was killed leaves them.
    add_image(&mut peers, json!({}));
    for side in peers.sides() {
        fs::copy(side.path("disk.qcow2"), side.path("killed.qcow2")).expect("a copy");
    }
    peers.execute("blockdev-del", json!({"node-name": "disk"}));
    for side in peers.sides() {
        fs::rename(side.path("killed.qcow2"), side.path("disk.qcow2")).expect("put back");
    }
    let of = |name: &str| json!({"node": "disk", "name": name});
    add_image(&mut peers, json!({"read-only": true}));
    for (command, why) in
        [("clear", "readonly"), ("enable", "inconsistent"), ("remove", "readonly")]
    {
        let refused = peers.both(&named(command), of("b0"));
        assert!(refused.to_string().contains(why), "{command}: {refused}");
    }
    peers.execute("blockdev-del", json!({"node-name": "disk"}));
    add_image(&mut peers, json!({}));
    let inconsistent = |peers: &mut Peers| {
        let told = peers.sides().map(|side| {
            let nodes = side.ask("query-named-block-nodes", &json!({"flat": true}));
            let disk = nodes["return"]
                .as_array()
                .and_then(|nodes| nodes.iter().find(|node| node["node-name"] == "disk").cloned());
            disk.expect("the node")["dirty-bitmaps"].clone()
        });
        assert_eq!(told[0], told[1]);
        let all = told[0].as_array().cloned().unwrap_or_default();
        all.iter().filter(|bitmap| bitmap["inconsistent"] == true).count()
    };
    assert_eq!(inconsistent(&mut peers), 2);
    peers.execute(&named("add"), of("m"));
    for (command, arguments) in [
        (named("clear"), of("b0")),
        (named("enable"), of("b0")),
        (named("merge"), json!({"node": "disk", "target": "m", "bitmaps": ["b0"]})),
        ("block_resize".to_owned(), json!({"node-name": "disk", "size": 16 << 20})),
    ] {
        let refused = peers.both(&command, arguments);
        assert!(refused.to_string().contains("inconsistent"), "{command}: {refused}");
    }
    peers.execute(&named("remove"), of("b0"));
    assert_eq!(inconsistent(&mut peers), 1);
    let folders = peers.sides().map(|side| side.folder.clone());
    peers.stop();
    let [ours, theirs] = folders.each_ref().map(|folder| stored(folder));
    assert_eq!(ours, theirs);
    assert_eq!(ours[0]["flags"], json!(["in-use", "auto"]));
}

#[test]
fn clients_see_bitmaps_as_those_of_qemu_storage_daemon() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    peers.run("qemu-img", &["create", "-q", "-f", "qcow2", "DIR/base.qcow2", "64M"]);
    peers.run("qemu-io", &["-c", "write 10M 1M", "-c", "write -z 20M 1M", "DIR/base.qcow2"]);
    let create = ["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2"];
    peers.run("qemu-img", &[&create[..], &["DIR/disk.qcow2"]].concat());
    add_image(&mut peers, json!({}));
    let of = |name: &str| json!({"node": "disk", "name": name});
    peers.execute(&named("add"), of("a"));
    peers.execute(&named("add"), json!({"node": "disk", "name": "fine", "granularity": 512}));
    let addr = json!({"type": "unix", "data": {"path": "DIR/nbd.sock"}});
    peers.execute("nbd-server-start", json!({"addr": addr}));
    let export = |name: &str, bitmaps: Value, writable: bool| {
        json!({"type": "nbd", "id": name, "node-name": "disk", "name": name, "writable": writable,
            "bitmaps": bitmaps, "allocation-depth": true})
    };
    for arguments in [
        export("e", json!(["gone"]), true),
        export("e", json!(["a"]), false),
        export("e", json!([{"node": "gone", "name": "a"}]), true),
        export("e", json!([{"node": "disk", "name": "gone"}]), true),
    ] {
        assert!(peers.both("block-export-add", arguments).get("error").is_some());
    }
    peers.execute(
        "block-export-add",
        export("e", json!(["a", {"node": "disk", "name": "fine"}]), true),
    );
    peers.io(&["write 3M 64k", "write 5M 512", "write 0 1M", "write 10M 64k"]);
    // Busy.
    for command in ["clear", "remove", "disable"] {
        assert!(peers.both(&named(command), of("a")).get("error").is_some(), "{command}");
    }
    assert!(peers.both("block-export-add", export("f", json!(["a"]), true)).get("error").is_some());
    bitmaps(&mut peers);
    let uri = "nbd+unix:///e?socket=DIR/nbd.sock";
    for context in ["qemu:dirty-bitmap:a", "qemu:dirty-bitmap:fine", "qemu:allocation-depth"] {
        let map = format!("--map={context}");
        let [ours, theirs] = peers.sides().map(|side| run("nbdinfo", &side.folder, &[&map, uri]));
        assert_eq!(ours, theirs, "{context}");
        let image = format!(
            "driver=nbd,server.type=unix,server.path=DIR/nbd.sock,export=e,x-dirty-bitmap={context}"
        );
        let map = ["map", "--output=json", "--image-opts", &image];
        let [ours, theirs] = peers.sides().map(|side| run("qemu-img", &side.folder, &map));
        assert_eq!(ours, theirs, "{context}");
    }
    let [ours, theirs] = peers
        .sides()
        .map(|side| run("env", &side.folder, &["PATH=/usr/bin:/bin", "nbdsh", "-c", ALL_CONTEXTS]));
    assert_eq!(ours, theirs);
    assert!(ours.contains("qemu:dirty-bitmap:fine"), "{ours}");
    peers.execute("block-export-del", json!({"id": "e", "mode": "hard"}));
    peers.wait_for("BLOCK_EXPORT_DELETED");
    peers.execute(&named("clear"), of("a"));
    peers.execute("nbd-server-add", json!({"device": "disk", "writable": true, "bitmap": "fine"}));
    bitmaps(&mut peers);
    peers.stop();
}

/// What libnbd finds: all contexts of one request, then one extent of each.
const ALL_CONTEXTS: &str = "
names = []
c = nbd.NBD()
c.set_opt_mode(True)
c.set_export_name('e')
c.connect_unix('DIR/nbd.sock')
c.opt_list_meta_context(lambda name: names.append(name))
print(names)
for name in names[1:]:
    c.add_meta_context(name)
c.opt_go()
for flags in 0, nbd.CMD_FLAG_REQ_ONE:
    c.block_status(60 << 20, 1 << 20, lambda *told: print(told[:3]), flags)
";

/// Bits, settings and clients of bitmaps go over to the new process; nothing is written to the image's bitmaps.
#[test]
fn bitmaps_are_handed_over_in_an_upgrade() {
    let scratch = Scratch::new();
    run("qemu-img", scratch.dir(), &["create", "-q", "-f", "qcow2", "DIR/disk.qcow2", "64M"]);
    run("qemu-img", scratch.dir(), &["bitmap", "--add", "DIR/disk.qcow2", "old"]);
    let raw = Image::filled(&scratch, "raw.img", MIB);
    let disk = scratch.path("disk.qcow2");
    let disk = format!("qcow2,node-name=disk,file.driver=file,file.filename={}", disk.display());
    let command = ServerCommand::new(&scratch).called_qemu_storage_daemon().monitor("qmp");
    let command = command.arg("--blockdev").arg(disk).file("raw", &raw, "");
    let command = nbd_server(command, &scratch, "");
    let mut server = nbd_export(command, "disk", ",writable=on,bitmaps.0=old").start();
    let write = |offset: &str| {
        let uri = nbd_uri(&scratch, "disk");
        run("qemu-io", scratch.dir(), &["-f", "raw", "-c", &format!("write {offset} 64k"), &uri]);
    };
    let told = |server: &Server| {
        let mut qmp = Qmp::connect(&server.socket("qmp"));
        let nodes = qmp.execute("query-named-block-nodes", json!({"flat": true}));
        let nodes = nodes.as_array().expect("a list");
        let told = nodes.iter().filter_map(|node| node.get("dirty-bitmaps").cloned());
        told.collect::<Vec<_>>()
    };
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    for (node, name, more) in [
        ("disk", "new", json!({"persistent": true, "granularity": 4096})),
        ("disk", "memory", json!({})),
        ("raw", "of-raw", json!({"disabled": true})),
    ] {
        let bitmap = merged(json!({"node": node, "name": name}), &more);
        qmp.execute("block-dirty-bitmap-add", bitmap);
    }
    drop(qmp);
    write("1M");
    for round in 1..4u64 {
        let before = told(&server);
        assert_eq!(before[0][1]["count"], round * 65536, "{before:?}");
        server.upgrade();
        assert_eq!(told(&server), before);
        // The next write is noted.
        write(&format!("{}M", round + 1));
    }
    let map = ["--map=qemu:dirty-bitmap:old", &nbd_uri(&scratch, "disk")];
    assert_eq!(run("nbdinfo", scratch.dir(), &map).matches("dirty").count(), 4);
    server.stop();
    let stored = stored(scratch.dir());
    let names: Vec<_> = stored.as_array().expect("a list").iter().map(|b| &b["name"]).collect();
    assert_eq!(names, ["old", "new"]);
    assert!(!stored.to_string().contains("in-use"), "{stored}");
}

/// The bytes that the only bitmap in an image marks.
fn stored_bytes(scratch: &Scratch, image: &Path) -> u64 {
    let folder = image.parent().expect("a folder");
    let told = stored(folder);
    assert!(!told.to_string().contains("in-use"), "{told}");
    let file = json!({"driver": "file", "filename": image});
    let node = json!({"driver": "qcow2", "node-name": "disk", "read-only": true, "file": file});
    let command = ServerCommand::new(scratch).named("reader").monitor("reader");
    let reader = command.arg("--blockdev").arg(node.to_string()).start();
    let mut qmp = Qmp::connect(&reader.socket("reader"));
    let nodes = qmp.execute("query-named-block-nodes", json!({"flat": true}));
    let nodes = nodes.as_array().expect("a list").iter();
    let found: Vec<_> = nodes.filter_map(|node| node.get("dirty-bitmaps")).collect();
    let count = found[0][0]["count"].as_u64().expect("a count");
    reader.stop();
    count
}

/// A base that was opened for reading is opened for writing by a commit. Its bitmap has what the commit writes.
#[test]
fn a_commit_into_a_read_only_image_is_recorded() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    peers.run("qemu-img", &["create", "-q", "-f", "qcow2", "DIR/disk.qcow2", "64M"]);
    peers.run("qemu-img", &["bitmap", "--add", "DIR/disk.qcow2", "b"]);
    peers.run("qemu-img", &["create", "-q", "-f", "qcow2", "DIR/top.qcow2", "64M"]);
    peers.run("qemu-io", &["-c", "write 1M 64k", "DIR/top.qcow2"]);
    add_image(&mut peers, json!({"read-only": true}));
    let file = json!({"driver": "file", "filename": "DIR/top.qcow2"});
    let top = json!({"driver": "qcow2", "node-name": "top", "backing": "disk", "file": file});
    peers.execute("blockdev-add", top);
    peers.execute("block-commit", json!({"job-id": "j", "device": "top"}));
    peers.wait_for("BLOCK_JOB_READY");
    peers.execute("job-complete", json!({"id": "j"}));
    peers.wait_for("BLOCK_JOB_COMPLETED");
    assert_eq!(count(&bitmaps(&mut peers), "b"), 64 << 10);
    let images = peers.sides().map(|side| side.path("disk.qcow2"));
    peers.stop();
    for image in images {
        assert_eq!(stored_bytes(&scratch, &image), 64 << 10, "{}", image.display());
    }
}

/// Before and after a restart, the image behind an overlay is read-only, and so are its stored bitmaps.
#[test]
fn bitmaps_behind_an_overlay_are_read_only() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    for name in ["disk", "top"] {
        peers
            .run("qemu-img", &["create", "-q", "-f", "qcow2", &format!("DIR/{name}.qcow2"), "64M"]);
    }
    for name in ["a", "b"] {
        peers.run("qemu-img", &["bitmap", "--add", "DIR/disk.qcow2", name]);
    }
    let top = json!({"driver": "qcow2", "node-name": "top",
        "file": {"driver": "file", "filename": "DIR/top.qcow2"}});
    let of = |name: &str| json!({"node": "disk", "name": name});
    let merge = json!({"node": "disk", "target": "a", "bitmaps": ["b"]});
    let changes = [("clear", of("a")), ("remove", of("b")), ("merge", merge)];
    let expect = |peers: &mut Peers, refused: bool| {
        for (command, arguments) in changes.clone() {
            let answer = peers.both(&named(command), arguments);
            assert_eq!(answer.get("error").is_some(), refused, "{command}: {answer}");
        }
        peers.execute(&named("add"), json!({"node": "disk", "name": "memory"}));
        for command in ["disable", "clear", "remove"] {
            peers.execute(&named(command), of("memory"));
        }
    };
    add_image(&mut peers, json!({}));
    peers.execute("blockdev-add", merged(top.clone(), &json!({"backing": null})));
    peers.execute("blockdev-snapshot", json!({"node": "disk", "overlay": "top"}));
    expect(&mut peers, true);
    peers.execute("blockdev-del", json!({"node-name": "top"}));
    peers.execute("blockdev-del", json!({"node-name": "disk"}));
    add_image(&mut peers, json!({"read-only": true}));
    peers.execute("blockdev-add", merged(top, &json!({"backing": "disk"})));
    expect(&mut peers, true);
    // A commit opens it for writing.
    peers.execute("block-commit", json!({"job-id": "j", "device": "top"}));
    peers.wait_for("BLOCK_JOB_READY");
    peers.execute("job-complete", json!({"id": "j"}));
    peers.wait_for("BLOCK_JOB_COMPLETED");
    peers.execute(&named("clear"), of("a"));
    peers.stop();
}

/// An incremental backup reads the bitmap of an image that has just become a backing file.
#[test]
fn enabled_bitmaps_behind_an_overlay_are_exported() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    for name in ["disk", "top"] {
        let image = format!("DIR/{name}.qcow2");
        peers.run("qemu-img", &["create", "-q", "-f", "qcow2", &image, "8M"]);
    }
    peers.run("qemu-img", &["bitmap", "--add", "DIR/disk.qcow2", "stored"]);
    add_image(&mut peers, json!({}));
    let file = json!({"driver": "file", "filename": "DIR/top.qcow2"});
    let top = json!({"driver": "qcow2", "node-name": "top", "backing": null, "file": file});
    peers.execute("blockdev-add", top);
    let addr = json!({"type": "unix", "data": {"path": "DIR/nbd.sock"}});
    peers.execute("nbd-server-start", json!({"addr": addr}));
    peers.execute(&named("add"), json!({"node": "disk", "name": "a"}));
    let mut number = 0;
    let mut export = |peers: &mut Peers, node: &str, writable: bool, bitmap: Value| {
        number += 1;
        let id = format!("e{number}");
        let export = json!({"type": "nbd", "id": id, "name": id, "node-name": node,
            "writable": writable, "bitmaps": [bitmap]});
        let answer = peers.both("block-export-add", export);
        if answer.get("error").is_none() {
            peers.execute("block-export-del", json!({"id": id}));
            peers.wait_for("BLOCK_EXPORT_DELETED");
        }
        answer["error"]["desc"].as_str().map(str::to_owned)
    };
    let refused =
        |name: &str| Some(format!("Enabled bitmap '{name}' incompatible with readonly export"));
    assert_eq!(export(&mut peers, "disk", false, json!("a")), refused("a"));
    assert_eq!(export(&mut peers, "disk", true, json!("a")), None);
    peers.execute("blockdev-snapshot", json!({"node": "disk", "overlay": "top"}));
    peers.execute(&named("add"), json!({"node": "top", "name": "t"}));
    for bitmap in [json!("a"), json!("stored"), json!({"node": "disk", "name": "a"})] {
        for node in ["disk", "top"] {
            assert_eq!(export(&mut peers, node, false, bitmap.clone()), None, "{node} {bitmap}");
        }
    }
    assert_eq!(export(&mut peers, "top", false, json!("t")), refused("t"));
    // QSD does not check a bitmap that is named with its node.
    assert_eq!(export(&mut peers, "top", false, json!({"node": "top", "name": "t"})), None);
    peers.stop();
}

/// The image behind an overlay is only read, and stores its bitmaps when it is closed. `ends`: what closes it. Returns the
/// bytes of the stored bitmap.
fn stored_behind_an_overlay(ends: impl FnOnce(&mut Qmp)) -> u64 {
    let scratch = Scratch::new();
    run("qemu-img", scratch.dir(), &["create", "-q", "-f", "qcow2", "DIR/disk.qcow2", "64M"]);
    run("qemu-img", scratch.dir(), &["bitmap", "--add", "DIR/disk.qcow2", "b"]);
    let command = ServerCommand::new(&scratch).monitor("qmp");
    let disk = scratch.path("disk.qcow2");
    let disk = format!("qcow2,node-name=disk,file.driver=file,file.filename={}", disk.display());
    let command = nbd_server(command.arg("--blockdev").arg(&disk), &scratch, "");
    let mut server = nbd_export(command, "disk", ",writable=on").start();
    let write = |offset: &str| {
        let uri = nbd_uri(&scratch, "disk");
        run("qemu-io", scratch.dir(), &["-f", "raw", "-c", &format!("write {offset} 64k"), &uri]);
    };
    write("1M");
    let snapshot = json!({"node-name": "disk", "snapshot-node-name": "top",
        "snapshot-file": scratch.path("top.qcow2")});
    Qmp::connect(&server.socket("qmp")).execute("blockdev-snapshot-sync", snapshot);
    server.upgrade();
    write("2M");
    server.upgrade();
    ends(&mut Qmp::connect(&server.socket("qmp")));
    server.stop();
    stored_bytes(&scratch, &scratch.path("disk.qcow2"))
}

#[test]
fn bitmaps_behind_an_overlay_are_stored_after_an_upgrade() {
    assert_eq!(stored_behind_an_overlay(|_| {}), 64 << 10);
    let deleted = stored_behind_an_overlay(|qmp| {
        qmp.execute("block-export-del", json!({"id": "nbd-disk", "mode": "hard"}));
        qmp.wait_for("BLOCK_EXPORT_DELETED");
        qmp.execute("blockdev-del", json!({"node-name": "top"}));
        qmp.execute("blockdev-del", json!({"node-name": "disk"}));
    });
    assert_eq!(deleted, 64 << 10);
    let committed = stored_behind_an_overlay(|qmp| {
        qmp.execute("block-commit", json!({"job-id": "j", "device": "top"}));
        qmp.wait_for("BLOCK_JOB_READY");
        qmp.execute("job-complete", json!({"id": "j"}));
        qmp.wait_for("BLOCK_JOB_COMPLETED");
    });
    assert_eq!(committed, 128 << 10);
}

/// After a kill, the bitmap is not there, and the daemon starts all the same.
#[test]
fn an_export_with_bitmaps_is_not_in_the_state_file() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "raw.img", MIB);
    let start = || {
        let state = scratch.path("state").display().to_string();
        let command = ServerCommand::new(&scratch).monitor("qmp").args(["--state", &state]);
        nbd_server(command.file("disk", &image, ""), &scratch, "").start()
    };
    let server = start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    qmp.execute("block-dirty-bitmap-add", json!({"node": "disk", "name": "b", "disabled": true}));
    let export = |id: &str, bitmaps: Value| json!({"type": "nbd", "id": id, "node-name": "disk", "name": id, "bitmaps": bitmaps});
    qmp.execute("block-export-add", export("shows", json!(["b"])));
    qmp.execute("block-export-add", export("plain", json!([])));
    server.kill();
    let server = start();
    let exports = Qmp::connect(&server.socket("qmp")).execute("query-block-exports", json!({}));
    let ids: Vec<_> = exports.as_array().expect("a list").iter().map(|e| &e["id"]).collect();
    assert_eq!(ids, ["plain"]);
    server.stop();
}

/// A bitmap that could not be stored at the end is refused at the beginning.
#[test]
fn a_read_only_or_inactive_image_takes_no_persistent_bitmap() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    peers.run("qemu-img", &["create", "-q", "-f", "qcow2", "DIR/disk.qcow2", "4M"]);
    for (name, option) in [("reader", "read-only"), ("inactive", "active")] {
        let mut node = json!({"driver": "qcow2", "node-name": name,
            "file": {"driver": "file", "filename": "DIR/disk.qcow2"}});
        node[option] = (option == "read-only").into();
        peers.execute("blockdev-add", node);
        let bitmap =
            |persistent: bool| json!({"node": name, "name": "b", "persistent": persistent});
        // In the words of QSD 11.1; 10.0 loses it.
        let why = peers.ours.qmp.refused(&named("add"), bitmap(true));
        let words = "Cannot add a persistent bitmap to read-only or inactive node";
        assert_eq!(why, format!("{words} '{name}'"));
        peers.execute(&named("add"), bitmap(false));
        peers.execute("blockdev-del", json!({"node-name": name}));
    }
    peers.stop();
}

/// A read-only export shows a bitmap that records if the bitmap's node cannot be written to, or is named.
#[test]
fn bitmaps_of_read_only_exports_are_those_of_qemu() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    peers.run("qemu-img", &["create", "-q", "-f", "qcow2", "DIR/base", "4M"]);
    peers.run("qemu-img", &["bitmap", "--add", "DIR/base", "stored"]);
    peers
        .run("qemu-img", &["create", "-q", "-f", "qcow2", "-b", "base", "-F", "qcow2", "DIR/over"]);
    let file = |name: &str, read_only: bool| json!({"driver": "file", "filename": format!("DIR/{name}"), "read-only": read_only});
    for (name, file, read_only, backing) in [
        ("base", file("base", true), true, None),
        ("over", file("over", false), false, Some("base")),
    ] {
        let mut node =
            json!({"driver": "qcow2", "node-name": name, "file": file, "read-only": read_only});
        if let Some(backing) = backing {
            node["backing"] = backing.into();
        }
        peers.execute("blockdev-add", node);
    }
    peers.execute("blockdev-add", json!({"driver": "null-co", "node-name": "n", "size": 1 << 20}));
    for (node, name, disabled) in [("over", "new", false), ("n", "on", false), ("n", "off", true)] {
        let bitmap = json!({"node": node, "name": name, "disabled": disabled});
        peers.execute("block-dirty-bitmap-add", bitmap);
    }
    let addr = json!({"type": "unix", "data": {"path": "DIR/nbd.sock"}});
    peers.execute("nbd-server-start", json!({"addr": addr}));
    let of = |node: &str, name: &str| json!({"node": node, "name": name});
    let cases = [
        ("n", json!("on"), false),
        ("n", json!("off"), true),
        ("n", of("n", "on"), true),
        ("over", json!("new"), false),
        ("over", of("over", "new"), true),
        ("over", json!("stored"), true),
        ("over", json!("none"), false),
        ("over", of("over", "none"), false),
    ];
    for (index, (node, bitmap, is_granted)) in cases.into_iter().enumerate() {
        let id = format!("e{index}");
        let export =
            json!({"type": "nbd", "id": id, "node-name": node, "name": id, "bitmaps": [bitmap]});
        let answer = peers.both("block-export-add", export);
        assert_eq!(answer.get("return").is_some(), is_granted, "{node}, {bitmap}: {answer}");
    }
    for side in peers.sides() {
        let listed = side.ask("query-block-exports", &json!({}));
        assert_eq!(listed["return"].as_array().map(Vec::len), Some(4), "{listed}");
    }
}
