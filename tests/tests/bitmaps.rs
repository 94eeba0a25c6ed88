//! Dirty bitmaps, incremental backups and transactions.

mod common;

use common::peers::Peers;
use common::{Load, MIB, check, create, daemon, wait_for_end};
use integration::{BlkClient, Image, Qmp, Scratch, eventually};
use serde_json::{Value, json};

/// The bitmaps that both daemons report, by node, regardless of their order.
fn bitmaps(peers: &mut Peers) -> Vec<Value> {
    let [ours, theirs] = peers.sides().map(|side| {
        let nodes = side.ask("query-named-block-nodes", &json!({"flat": true}));
        let nodes = nodes["return"].as_array().expect("a list").clone();
        let told = nodes.iter().filter_map(|node| node.get("dirty-bitmaps"));
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

#[test]
fn snapshots_of_a_transaction_are_undone() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk0.img", MIB);
    let server = daemon(&scratch, &image, "");
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let blk = BlkClient::connect(&server.socket("disk"), 2, 16).expect("the export serves");
    let load = Load::start(blk, 1);
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
        let image = Image::filled(&scratch, "disk0.img", MIB);
        let server = daemon(&scratch, &image, "");
        let mut qmp = Qmp::connect(&server.socket("qmp"));
        let blk = BlkClient::connect(&server.socket("disk"), 2, 16).expect("the export serves");
        let load = Load::start(blk, granularity);
        load.go_on();
        create(&mut qmp, "target", &scratch.path("target.img"), MIB << 20);
        let backup = |sync: &str, more: Value| {
            let mut arguments =
                json!({"job-id": "j", "device": "disk", "target": "target", "sync": sync});
            for (name, value) in more.as_object().expect("members") {
                arguments[name] = value.clone();
            }
            arguments
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
