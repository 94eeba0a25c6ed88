//! Several backups of one disk at the same time: each target is the disk at the moment when its own job began.

use crate::common;

use std::fs;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::Ordering;

use common::peers::{Peers, run};
use common::{
    Load, MIB, check, check_moment, connect, create, daemon, under_load, wait_for_end,
    wait_for_status,
};
use integration::{Image, Qmp, Scratch, ServerCommand, eventually, merged};
use serde_json::{Value, json};

/// So slow that, before the limit is lifted, the filter copies nearly all that is copied, and no job ends by itself.
const SLOW: u64 = 1;

/// How a job copies, what its target is, and its name.
const KINDS: [(&str, &str); 3] = [("a", "raw"), ("b", "compressed"), ("c", "small-parts")];

/// A backup that has begun: the numbers of writes between which that was.
struct Begun {
    target: PathBuf,
    moment: RangeInclusive<u64>,
    is_raw: bool,
}

/// Makes a target and begins a backup to it.
fn begin(scratch: &Scratch, qmp: &mut Qmp, load: &Load, id: &str, kind: &str) -> Begun {
    let target = scratch.path(&format!("{id}.{kind}"));
    let mut backup =
        json!({"job-id": id, "device": "disk", "target": id, "sync": "full", "speed": SLOW});
    match kind {
        "compressed" => {
            let size = format!("{MIB}M");
            let path = format!("DIR/{id}.{kind}");
            run("qemu-img", scratch.dir(), &["create", "-q", "-f", "qcow2", &path, &size]);
            let file = json!({"driver": "file", "filename": target});
            let node = json!({"driver": "qcow2", "node-name": id, "file": file});
            qmp.execute("blockdev-add", node);
            backup["compress"] = true.into();
        }
        _ => create(qmp, id, &target, MIB << 20),
    }
    if kind == "small-parts" {
        backup["x-perf"] =
            json!({"max-workers": 2, "max-chunk": 1 << 18, "min-cluster-size": 1 << 18});
    }
    let before = load.written.load(Ordering::Relaxed);
    qmp.execute("blockdev-backup", backup);
    let after = load.written.load(Ordering::Relaxed) + 1;
    load.go_on();
    Begun { target, moment: before..=after, is_raw: kind != "compressed" }
}

fn check_backup(scratch: &Scratch, backup: &Begun, log: &[u64]) {
    let image = match backup.is_raw {
        true => backup.target.clone(),
        false => {
            let raw = scratch.path("converted.img");
            let target = backup.target.display().to_string();
            let to = raw.display().to_string();
            run("qemu-img", scratch.dir(), &["check", "-q", &target]);
            run("qemu-img", scratch.dir(), &["convert", "-O", "raw", &target, &to]);
            raw
        }
    };
    check_moment(&Image::existing(&image), log, backup.moment.clone());
}

/// Three backups that begin one after the other, and end in different orders. Each is once the cancelled one.
#[test]
fn each_backup_is_the_disk_at_its_own_moment() {
    let scratch = Scratch::new();
    let (image, server, mut qmp, load) = under_load(&scratch, 5);
    let mut backups = Vec::new();
    let orders = [[0, 1, 2], [2, 1, 0], [1, 0, 2]];
    for (round, order) in orders.into_iter().enumerate() {
        let folder = format!("{round}");
        fs::create_dir(scratch.path(&folder)).expect("a new folder");
        let mut begun: Vec<_> = KINDS
            .iter()
            .map(|(id, kind)| Some(begin(&scratch, &mut qmp, &load, id, kind)))
            .collect();
        for (nth, which) in order.into_iter().enumerate() {
            let id = KINDS[which].0;
            let is_cancelled = nth == round;
            if is_cancelled {
                qmp.execute("block-job-cancel", json!({"device": id}));
                assert_eq!(qmp.wait_for("BLOCK_JOB_CANCELLED")["device"], id);
            } else {
                qmp.execute("block-job-set-speed", json!({"device": id, "speed": 0}));
                wait_for_end(&mut qmp, id);
            }
            wait_for_status(&mut qmp, id, "null");
            qmp.execute("blockdev-del", json!({"node-name": id}));
            load.go_on();
            let ended = begun[which].take().expect("it has begun");
            let moved = scratch.path(&folder).join(id);
            fs::rename(&ended.target, &moved).expect("a target");
            if !is_cancelled {
                backups.push(Begun { target: moved, ..ended });
            }
        }
    }
    assert_eq!(qmp.execute("query-jobs", json!({})), json!([]));
    let log = load.finish();
    server.stop();
    check(&image, &log, log.len());
    assert_eq!(backups.len(), 6);
    backups.iter().for_each(|backup| check_backup(&scratch, backup, &log));
}

/// Backups of one transaction have one moment. If an action fails, none runs.
#[test]
fn backups_of_a_transaction_have_one_moment() {
    let scratch = Scratch::new();
    let (image, server, mut qmp, load) = under_load(&scratch, 6);
    let path = |name: &str| scratch.path(&format!("{name}.img"));
    for name in ["a", "b", "early", "failed"] {
        create(&mut qmp, name, &path(name), MIB << 20);
    }
    let backup = |id: &str| {
        json!({"type": "blockdev-backup", "data": {
            "job-id": id, "device": "disk", "target": id, "sync": "full", "speed": SLOW}})
    };
    let early = load.written.load(Ordering::Relaxed);
    qmp.execute("blockdev-backup", backup("early")["data"].clone());
    let early = early..=load.written.load(Ordering::Relaxed) + 1;
    load.go_on();
    let abort = json!({"type": "abort", "data": {}});
    let failing = json!([backup("a"), backup("failed"), backup("b"), abort]);
    qmp.refused("transaction", json!({"actions": failing}));
    let jobs = qmp.execute("query-jobs", json!({}));
    assert_eq!((jobs[0]["id"].as_str(), jobs.get(1)), (Some("early"), None));
    load.go_on();
    let before = load.written.load(Ordering::Relaxed);
    qmp.execute("transaction", json!({"actions": [backup("a"), backup("b")]}));
    let moment = before..=load.written.load(Ordering::Relaxed) + 1;
    load.go_on();
    for id in ["a", "early", "b"] {
        qmp.execute("block-job-set-speed", json!({"device": id, "speed": 0}));
        wait_for_end(&mut qmp, id);
        load.go_on();
    }
    let log = load.finish();
    server.stop();
    check(&image, &log, log.len());
    check_moment(&Image::existing(&path("early")), &log, early);
    check_moment(&Image::existing(&path("a")), &log, moment.clone());
    assert!(fs::read(path("a")).expect("a file") == fs::read(path("b")).expect("a file"));
}

/// A kill ends the jobs. The disk has all writes that were answered.
#[test]
fn a_kill_during_two_backups_leaves_the_disk() {
    let scratch = Scratch::new();
    let (image, server, mut qmp, load) = under_load(&scratch, 7);
    begin(&scratch, &mut qmp, &load, "a", "raw");
    begin(&scratch, &mut qmp, &load, "b", "raw");
    let log = load.finish();
    server.kill();
    check(&image, &log, log.len());
}

const DISK: usize = 4 << 20;

/// Both sides have a disk full of 7 that is served over NBD, and empty nodes of these names and of its size.
fn peers(scratch: &Scratch, targets: &[&str]) -> Peers {
    let mut peers = Peers::new(scratch);
    for name in ["disk"].iter().chain(targets) {
        for side in peers.sides() {
            let byte = if *name == "disk" { 7 } else { 0 };
            fs::write(side.path(name), vec![byte; DISK]).expect("a file");
        }
        let file = json!({"driver": "file", "node-name": name, "filename": format!("DIR/{name}"),
            "discard": "unmap"});
        peers.execute("blockdev-add", file);
    }
    peers.serve("disk");
    peers
}

fn backup(id: &str, target: &str, more: &Value) -> Value {
    let backup =
        json!({"job-id": id, "device": "disk", "target": target, "sync": "full", "speed": 65536});
    merged(backup, more)
}

fn finish(peers: &mut Peers, id: &str) {
    peers.execute("block-job-set-speed", json!({"device": id, "speed": 0}));
    let ended = peers.wait_for("BLOCK_JOB_COMPLETED");
    assert_eq!((&ended["device"], ended.get("error")), (&json!(id), None), "{ended}");
}

/// Checks that both sides have these bytes, each for 1 MiB, in a file.
fn has(peers: &mut Peers, name: &str, bytes: [u8; 4]) {
    for side in peers.sides() {
        let found = fs::read(side.path(name)).expect("a file");
        let parts: Vec<_> = found.chunks(1 << 20).collect();
        assert_eq!(parts.len(), 4, "{name}");
        for (part, byte) in parts.iter().zip(bytes) {
            assert!(part.iter().all(|found| *found == byte), "{name}: not all {byte}");
        }
    }
}

/// What both daemons refuse, and what each job's target has.
#[test]
fn backups_side_by_side_are_as_in_qemu_storage_daemon() {
    let scratch = Scratch::new();
    let mut peers = peers(&scratch, &["a", "b", "c"]);
    let none = json!({});
    peers.execute("blockdev-backup", backup("j1", "a", &json!({"filter-node-name": "f1"})));
    peers.io(&["write -P 1 0 1M"]);
    for refused in [
        backup("j2", "a", &none),
        backup("j1", "b", &none),
        backup("j2", "b", &json!({"device": "a"})),
    ] {
        let answer = peers.both("blockdev-backup", refused.clone());
        assert!(answer.get("error").is_some(), "{refused}");
    }
    peers.execute("blockdev-backup", backup("j2", "b", &none));
    peers.io(&["write -P 2 1M 1M"]);
    peers.execute("blockdev-backup", backup("j3", "c", &json!({"sync": "none"})));
    peers.io(&["write -P 3 0 3M"]);
    finish(&mut peers, "j1");
    peers.io(&["write -P 4 2M 1M"]);
    finish(&mut peers, "j2");
    peers.io(&["write -P 5 0 4M"]);
    peers.execute("job-cancel", json!({"id": "j3"}));
    peers.wait_for("BLOCK_JOB_CANCELLED");
    peers.io(&["read -P 5 0 4M"]);
    peers.stop();
    has(&mut peers, "a", [7, 7, 7, 7]);
    has(&mut peers, "b", [1, 7, 7, 7]);
    has(&mut peers, "c", [1, 2, 7, 7]);
    has(&mut peers, "disk", [5, 5, 5, 5]);
}

/// A target that fails pauses its own job, and leaves the other one alone.
#[test]
fn a_failing_target_leaves_the_other_backup_alone() {
    for first_fails in [false, true] {
        let scratch = Scratch::new();
        let mut peers = peers(&scratch, &["a", "b"]);
        peers.execute("blockdev-add", faults());
        let failing = backup("fails", "faults", &json!({"on-target-error": "stop"}));
        let good = backup("good", "a", &json!({}));
        let [first, second] = if first_fails { [&failing, &good] } else { [&good, &failing] };
        peers.execute("blockdev-backup", first.clone());
        peers.execute("blockdev-backup", second.clone());
        peers.io(&["write -P 1 0 1M"]);
        // The old data cannot be copied: the write fails.
        for side in peers.sides() {
            let uri = format!("nbd+unix:///e?socket={}", side.path("nbd.sock").display());
            let mut client = Command::new(integration::tool("qemu-io"));
            let output = client.args(["-f", "raw", "-c", "write -P 1 1M 1M", &uri]).output();
            let output = output.expect("qemu-io runs");
            let told = [output.stdout, output.stderr].concat();
            let told = String::from_utf8_lossy(&told);
            assert!(told.contains("No space left on device"), "{told}");
        }
        peers.execute("block-job-set-speed", json!({"device": "fails", "speed": 0}));
        let error = peers.wait_for("BLOCK_JOB_ERROR");
        assert_eq!((&error["device"], &error["action"]), (&json!("fails"), &json!("stop")));
        peers.execute("block-job-cancel", json!({"device": "fails", "force": true}));
        peers.wait_for("BLOCK_JOB_CANCELLED");
        peers.io(&["write -P 1 1M 1M"]);
        finish(&mut peers, "good");
        peers.stop();
        has(&mut peers, "a", [7, 7, 7, 7]);
        has(&mut peers, "disk", [1, 1, 7, 7]);
    }
}

/// With `break-snapshot` only the backup fails, and the write succeeds.
#[test]
fn a_broken_backup_leaves_the_other_backup_alone() {
    for first_fails in [false, true] {
        let scratch = Scratch::new();
        let image = Image::filled(&scratch, "disk0.img", MIB);
        let server = daemon(&scratch, &image, "");
        let mut qmp = Qmp::connect(&server.socket("qmp"));
        for name in ["a", "b"] {
            create(&mut qmp, name, &scratch.path(name), MIB << 20);
        }
        qmp.execute("blockdev-add", faults());
        let failing = backup("fails", "faults", &json!({"on-cbw-error": "break-snapshot"}));
        let good = backup("good", "a", &json!({}));
        let [first, second] = if first_fails { [&failing, &good] } else { [&good, &failing] };
        qmp.execute("blockdev-backup", first.clone());
        qmp.execute("blockdev-backup", second.clone());
        let load = Load::start(connect(&server, 2), 9);
        let ended = qmp.wait_for("BLOCK_JOB_COMPLETED");
        assert_eq!(ended["device"], "fails");
        assert!(ended.get("error").is_some(), "{ended}");
        load.go_on();
        qmp.execute("block-job-set-speed", json!({"device": "good", "speed": 0}));
        wait_for_end(&mut qmp, "good");
        let log = load.finish();
        server.stop();
        check(&image, &log, log.len());
        check(&Image::existing(&scratch.path("a")), &log, 0);
    }
}

/// A node above the node `b`. The second MiB cannot be written.
fn faults() -> Value {
    let rule =
        |sector: u64| json!({"event": "none", "iotype": "write", "errno": 28, "sector": sector});
    let rules: Vec<_> = (2048..4096).step_by(128).map(rule).collect();
    json!({"driver": "blkdebug", "node-name": "faults", "image": "b", "inject-error": rules})
}

/// What one backup discards in the source, another one of the same moment copies first. One that began later would take
/// data from the first one.
#[test]
fn what_one_backup_discards_the_other_one_has() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk0.img", MIB);
    let server = daemon(&scratch, &image, "discard=unmap");
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let load = Load::start(connect(&server, 2), 8);
    load.go_on();
    let log = load.finish();
    let path = |name: &str| scratch.path(&format!("{name}.img"));
    for name in ["a", "b", "c"] {
        create(&mut qmp, name, &path(name), MIB << 20);
    }
    let backup = |id: &str, discards: bool| {
        json!({"job-id": id, "device": "disk", "target": id, "sync": "full",
            "discard-source": discards, "speed": SLOW})
    };
    let both = [backup("a", true), backup("b", false)];
    let actions = both.map(|data| json!({"type": "blockdev-backup", "data": data}));
    qmp.execute("transaction", json!({"actions": actions}));
    let why = qmp.refused("blockdev-backup", backup("c", true));
    assert_eq!(why, "Node 'disk' is busy: block device is in use by block job: backup");
    for id in ["a", "b"] {
        qmp.execute("block-job-set-speed", json!({"device": id, "speed": 0}));
        wait_for_end(&mut qmp, id);
    }
    server.stop();
    for name in ["a", "b"] {
        check(&Image::existing(&path(name)), &log, log.len());
    }
    assert_eq!(image.read(0, 1 << 20), vec![0; 1 << 20], "it was discarded");
}

/// Backups at the same time use different bitmaps. A second backup by the same bitmap is refused.
#[test]
fn backups_by_bitmaps_side_by_side_are_as_in_qemu_storage_daemon() {
    let scratch = Scratch::new();
    let mut peers = peers(&scratch, &["a", "b", "c"]);
    for name in ["x", "y"] {
        let bitmap = json!({"node": "disk", "name": name, "granularity": 65536});
        peers.execute("block-dirty-bitmap-add", bitmap);
    }
    let by = |id: &str, target: &str, bitmap: &str, mode: &str| {
        backup(id, target, &json!({"sync": "bitmap", "bitmap": bitmap, "bitmap-mode": mode}))
    };
    peers.io(&["write -P 1 0 3M"]);
    peers.execute("blockdev-backup", by("j1", "a", "x", "on-success"));
    peers.io(&["write -P 2 0 1M"]);
    let answer = peers.both("blockdev-backup", by("j2", "b", "x", "on-success"));
    assert!(answer.get("error").is_some());
    let both = |mode: &str| {
        let backups = [by("j2", "b", "y", mode), by("j3", "c", "y", mode)];
        let actions = backups.map(|data| json!({"type": "blockdev-backup", "data": data}));
        json!({"actions": actions})
    };
    assert!(peers.both("transaction", both("always")).get("error").is_some());
    peers.execute("blockdev-backup", by("j2", "b", "y", "always"));
    peers.io(&["write -P 3 1M 1M"]);
    finish(&mut peers, "j1");
    peers.io(&["write -P 4 3M 64k"]);
    peers.execute("job-cancel", json!({"id": "j2"}));
    peers.wait_for("BLOCK_JOB_CANCELLED");
    let told = |qmp: &mut Qmp, name: &str| {
        let nodes = qmp.execute("query-named-block-nodes", json!({"flat": true}));
        let nodes = nodes.as_array().expect("a list").clone();
        let disk = nodes.iter().find(|node| node["node-name"] == "disk").expect("the disk");
        let bitmaps = disk["dirty-bitmaps"].as_array().expect("bitmaps").clone();
        bitmaps.iter().find(|bitmap| bitmap["name"] == name).expect("it is there").clone()
    };
    for side in peers.sides() {
        let x = told(&mut side.qmp, "x");
        assert_eq!((&x["count"], &x["busy"]), (&json!((2 << 20) + 65536), &json!(false)));
        let y = told(&mut side.qmp, "y");
        // At least what was written since. Of what was not, the limit let some parts be copied.
        let count = y["count"].as_u64().expect("a number");
        assert!(((1 << 20) + 65536..=(3 << 20) + 65536).contains(&count), "{y}");
    }
    peers.stop();
    has(&mut peers, "a", [1, 1, 1, 0]);
}

/// Backups continue when an overlay is put above the disk: by itself, in the transaction of a backup, or in one that is undone.
#[test]
fn backups_continue_below_a_new_overlay() {
    let scratch = Scratch::new();
    let mut peers = peers(&scratch, &["a", "b", "c"]);
    let action = |kind: &str, data: Value| json!({"type": kind, "data": data});
    let snapshot = json!({"node": "disk", "overlay": "over"});
    peers.run("qemu-img", &["create", "-q", "-f", "qcow2", "DIR/over", "4M"]);
    let file = json!({"driver": "file", "filename": "DIR/over"});
    let over = json!({"driver": "qcow2", "node-name": "over", "file": file, "backing": null});
    peers.execute("blockdev-add", over);
    peers.execute("blockdev-backup", backup("j1", "a", &json!({"filter-node-name": "f1"})));
    peers.io(&["write -P 1 0 1M"]);
    let undone = [
        action("blockdev-backup", backup("j2", "b", &json!({}))),
        action("blockdev-snapshot", snapshot.clone()),
        action("abort", json!({})),
    ];
    assert!(peers.both("transaction", json!({"actions": undone})).get("error").is_some());
    let filters = |peers: &mut Peers| {
        let [ours, theirs] = peers.sides().map(|side| {
            let nodes = side.ask("query-named-block-nodes", &json!({"flat": true}));
            let nodes = nodes["return"].as_array().expect("a list");
            let filters = nodes.iter().filter(|node| node["drv"] == "copy-before-write");
            let children = filters.map(|node| node["children"][0]["node-name"].clone());
            children.collect::<Vec<_>>()
        });
        assert_eq!(ours.len(), theirs.len());
        ours
    };
    assert_eq!(filters(&mut peers), ["disk"]);
    peers.io(&["write -P 2 1M 64k"]);
    let both = [
        action("blockdev-backup", backup("j2", "b", &json!({}))),
        action("blockdev-snapshot", snapshot.clone()),
    ];
    peers.execute("transaction", json!({"actions": both}));
    assert!(filters(&mut peers).contains(&json!("over")));
    peers.io(&["write -P 3 1M 1M", "read -P 1 0 1M", "read -P 7 2M 2M"]);
    assert!(peers.both("blockdev-snapshot", snapshot).get("error").is_some());
    peers.execute("blockdev-backup", backup("j3", "c", &json!({"device": "over"})));
    peers.io(&["write -P 4 2M 1M"]);
    for id in ["j1", "j2", "j3"] {
        finish(&mut peers, id);
    }
    assert!(filters(&mut peers).is_empty());
    peers.io(&["write -P 5 3M 1M", "read -P 4 2M 1M"]);
    peers.stop();
    has(&mut peers, "a", [7, 7, 7, 7]);
    has(&mut peers, "c", [1, 3, 7, 7]);
    for side in peers.sides() {
        for (name, second) in [("b", [2; 65536]), ("disk", [2; 65536])] {
            let found = fs::read(side.path(name)).expect("a file");
            assert_eq!(found[..1 << 20], [1; 1 << 20], "{name}");
            assert_eq!(found[1 << 20..(1 << 20) + 65536], second, "{name}");
            assert!(found[(1 << 20) + 65536..].iter().all(|byte| *byte == 7), "{name}");
        }
    }
}

/// Under a load on two I/O threads, an overlay leaves running backups their moments, and the disk its own.
#[test]
fn an_overlay_under_load_leaves_backups_their_moments() {
    let scratch = Scratch::new();
    let (image, server, mut qmp, load) = under_load(&scratch, 6);
    let begun = KINDS.map(|(id, kind)| begin(&scratch, &mut qmp, &load, id, kind));
    let over = scratch.path("over");
    let snapshot =
        json!({"node-name": "disk", "snapshot-file": over, "snapshot-node-name": "over"});
    let before = load.written.load(Ordering::Relaxed);
    qmp.execute("blockdev-snapshot-sync", snapshot);
    let moment = before..=load.written.load(Ordering::Relaxed) + 1;
    load.go_on();
    for (id, _) in KINDS {
        qmp.execute("block-job-set-speed", json!({"device": id, "speed": 0}));
        wait_for_end(&mut qmp, id);
        load.go_on();
    }
    let log = load.finish();
    server.stop();
    check_moment(&image, &log, moment);
    begun.iter().for_each(|backup| check_backup(&scratch, backup, &log));
    run("qemu-img", scratch.dir(), &["convert", "-O", "raw", "DIR/over", "DIR/flat"]);
    check(&Image::existing(&scratch.path("flat")), &log, log.len());
}

/// A backup that looks at the topmost image, or discards in the disk, needs the disk as the topmost image.
#[test]
fn some_backups_refuse_an_overlay() {
    for (sync, discards) in [("top", false), ("full", true)] {
        let scratch = Scratch::new();
        let image = Image::filled(&scratch, "disk0.img", MIB);
        let server = daemon(&scratch, &image, "discard=unmap");
        let mut qmp = Qmp::connect(&server.socket("qmp"));
        create(&mut qmp, "a", &scratch.path("a"), MIB << 20);
        let more = json!({"sync": sync, "discard-source": discards});
        qmp.execute("blockdev-backup", backup("j", "a", &more));
        let file = scratch.path("over");
        let snapshot =
            json!({"node-name": "disk", "snapshot-file": file, "snapshot-node-name": "over"});
        let why = qmp.refused("blockdev-snapshot-sync", snapshot);
        assert_eq!(why, "Node 'disk' is busy: block device is in use by block job: backup");
        server.stop();
    }
}

/// An overlay is also refused below a filter with a job that looks at the topmost image.
#[test]
fn jobs_of_a_filter_refuse_an_overlay_below_it() {
    for kind in ["backup", "mirror"] {
        let scratch = Scratch::new();
        let image = Image::filled(&scratch, "disk0.img", MIB);
        let server = ServerCommand::new(&scratch)
            .monitor("qmp")
            .arg("--object")
            .arg("throttle-group,id=t")
            .file("disk", &image, "")
            .arg("--blockdev")
            .arg("throttle,node-name=top,throttle-group=t,file=disk")
            .start();
        let mut qmp = Qmp::connect(&server.socket("qmp"));
        create(&mut qmp, "a", &scratch.path("a"), MIB << 20);
        let job = json!({"job-id": "j", "device": "top", "target": "a", "sync": "top", "speed": 1});
        qmp.execute(&format!("blockdev-{kind}"), job);
        let file = scratch.path("over");
        let snapshot =
            json!({"node-name": "disk", "snapshot-file": file, "snapshot-node-name": "over"});
        let why = qmp.refused("blockdev-snapshot-sync", snapshot.clone());
        let busy = "Node 'top' is busy: block device is in use by block job:";
        assert_eq!(why, format!("{busy} {kind}"));
        qmp.execute("block-job-cancel", json!({"device": "j", "force": true}));
        wait_for_status(&mut qmp, "j", "null");
        qmp.execute("blockdev-snapshot-sync", snapshot);
        server.stop();
    }
}

/// An image above such a filter is the topmost one, whatever lies below the filter.
#[test]
fn jobs_of_an_image_above_a_filter_permit_an_overlay_below_it() {
    for (kind, more) in [
        ("backup", json!({"sync": "top"})),
        ("backup", json!({"sync": "full", "discard-source": true})),
        ("mirror", json!({"sync": "top"})),
    ] {
        let scratch = Scratch::new();
        let image = Image::filled(&scratch, "disk0.img", MIB);
        let convert = ["convert", "-f", "raw", "-O", "qcow2", "DIR/disk0.img", "DIR/disk.qcow2"];
        run("qemu-img", scratch.dir(), &convert);
        let converted = scratch.path("disk.qcow2");
        let before = fs::read(&converted).expect("an image");
        let server = ServerCommand::new(&scratch)
            .monitor("qmp")
            .arg("--object")
            .arg("throttle-group,id=t")
            .file("disk", &Image::existing(&converted), "")
            .arg("--blockdev")
            .arg("throttle,node-name=filter,throttle-group=t,file=disk")
            .arg("--blockdev")
            .arg("qcow2,node-name=top,file=filter")
            .start();
        let mut qmp = Qmp::connect(&server.socket("qmp"));
        create(&mut qmp, "a", &scratch.path("a"), MIB << 20);
        let job = json!({"job-id": "j", "device": "top", "target": "a", "speed": 1});
        qmp.execute(&format!("blockdev-{kind}"), merged(job, &more));
        let file = scratch.path("over");
        let snapshot =
            json!({"node-name": "disk", "snapshot-file": file, "snapshot-node-name": "over"});
        qmp.execute("blockdev-snapshot-sync", snapshot);
        qmp.execute("block-job-set-speed", json!({"device": "j", "speed": 0}));
        if kind == "mirror" {
            wait_for_status(&mut qmp, "j", "ready");
            qmp.execute("job-complete", json!({"id": "j"}));
        }
        wait_for_end(&mut qmp, "j");
        server.stop();
        assert!(fs::read(&converted).expect("an image") == before, "all writes are in the overlay");
        let copy = Image::existing(&scratch.path("a"));
        assert_eq!(copy.md5(), image.md5(), "{kind} {more}");
    }
}

/// The target of a backup has the size of its disk: a larger overlay is refused meanwhile.
#[test]
fn a_backup_refuses_a_larger_overlay() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk0.img", MIB);
    let server = daemon(&scratch, &image, "");
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    create(&mut qmp, "a", &scratch.path("a"), MIB << 20);
    let (size, over) = (format!("{}M", MIB + 1), scratch.path("over"));
    run("qemu-img", scratch.dir(), &["create", "-q", "-f", "qcow2", "DIR/over", &size]);
    let file = json!({"driver": "file", "filename": over});
    qmp.execute("blockdev-add", json!({"driver": "qcow2", "node-name": "over", "file": file}));
    let snapshot = json!({"node": "disk", "overlay": "over"});
    let actions = json!({"actions": [
        {"type": "blockdev-backup", "data": backup("undone", "a", &json!({}))},
        {"type": "blockdev-snapshot", "data": snapshot},
    ]});
    let why = qmp.refused("transaction", actions);
    assert!(why.contains("Permission conflict on node 'disk': permissions 'resize'"), "{why}");
    qmp.execute("blockdev-backup", backup("j", "a", &json!({})));
    let why = qmp.refused("blockdev-snapshot", snapshot.clone());
    assert!(why.contains("Permission conflict on node 'disk': permissions 'resize'"), "{why}");
    qmp.execute("block-job-cancel", json!({"device": "j", "force": true}));
    wait_for_status(&mut qmp, "j", "null");
    qmp.execute("blockdev-snapshot", snapshot);
    server.stop();
}

/// Two overlays of a disk show what it was at two moments.
#[test]
fn two_overlays_of_one_source_show_two_moments() {
    for ends_first in ["j1", "j2"] {
        let scratch = Scratch::new();
        let mut peers = peers(&scratch, &["kept"]);
        let overlay = |peers: &mut Peers, name: &str| {
            let path = format!("DIR/{name}.qcow2");
            peers.run("qemu-img", &["create", "-q", "-f", "qcow2", &path, "4M"]);
            let file = json!({"driver": "file", "filename": path});
            peers.execute(
                "blockdev-add",
                json!({"driver": "qcow2", "node-name": name, "file": file, "backing": "disk"}),
            );
            let export = json!({"type": "nbd", "id": name, "node-name": name});
            peers.execute("block-export-add", export);
        };
        let read = |peers: &mut Peers, name: &str, reads: &[&str]| {
            let uri = format!("nbd+unix:///{name}?socket=DIR/nbd.sock");
            let mut arguments = vec!["-r", "-f", "raw", &*uri];
            reads.iter().for_each(|read| arguments.extend(["-c", read]));
            for side in peers.sides() {
                let told = run("qemu-io", &side.folder, &arguments);
                assert!(!told.contains("failed"), "{name}: {told}");
            }
        };
        overlay(&mut peers, "o1");
        peers.execute("blockdev-backup", backup("j1", "o1", &json!({"sync": "none"})));
        peers.io(&["write -P 1 0 1M", "write -P 1 1M 5k"]);
        // An overlay of a disk that has a backup.
        overlay(&mut peers, "o2");
        peers.execute("blockdev-backup", backup("j2", "o2", &json!({"sync": "none"})));
        peers.io(&["write -P 2 512k 1M", "write -z 3M 5k"]);
        let first = ["read -P 7 0 4M"];
        let second = ["read -P 1 0 1M", "read -P 1 1M 5k", "read -P 7 1029k 3067k"];
        read(&mut peers, "o1", &first);
        read(&mut peers, "o2", &second);
        let kept = match ends_first {
            "j1" => ("o2", &second[..]),
            _ => ("o1", &first[..]),
        };
        peers.execute("job-cancel", json!({"id": ends_first}));
        assert_eq!(peers.wait_for("BLOCK_JOB_CANCELLED")["device"], ends_first);
        peers.io(&["write -P 9 0 4M", "discard 2M 64k", "write -P 8 2M 1M"]);
        read(&mut peers, kept.0, kept.1);
        // A third one, again of both.
        overlay(&mut peers, "o3");
        peers.execute("blockdev-backup", backup("j3", "o3", &json!({"sync": "none"})));
        peers.io(&["write -P 4 1M 2M"]);
        read(&mut peers, kept.0, kept.1);
        read(&mut peers, "o3", &["read -P 9 0 2M", "read -P 8 2M 1M", "read -P 9 3M 1M"]);
        peers.stop();
        for name in ["o1", "o2", "o3"] {
            peers.run("qemu-img", &["check", "-q", &format!("DIR/{name}.qcow2")]);
        }
    }
}

/// Backups of a disk, of a copy-before-write node above it, and of what that node keeps: each has its own moment.
#[test]
fn backups_beside_a_copy_before_write_node_have_their_own_moments() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    for name in ["disk", "kept", "a", "b", "c", "d"] {
        for side in peers.sides() {
            let byte = if name == "disk" { 7 } else { 0 };
            fs::write(side.path(name), vec![byte; DISK]).expect("a file");
        }
        let file = json!({"driver": "file", "node-name": name, "filename": format!("DIR/{name}")});
        peers.execute("blockdev-add", file);
    }
    for node in [
        json!({"driver": "copy-before-write", "node-name": "above", "file": "disk", "target": "kept"}),
        json!({"driver": "snapshot-access", "node-name": "was", "file": "above"}),
    ] {
        peers.execute("blockdev-add", node);
    }
    peers.serve("above");
    let mut write = 0;
    for (id, target, device) in
        [("j1", "a", "above"), ("j2", "b", "disk"), ("j3", "c", "disk"), ("j4", "d", "was")]
    {
        write += 1;
        peers.io(&[&format!("write -P {write} {}M 512k", write - 1)]);
        let device = json!({"device": device});
        peers.execute("blockdev-backup", backup(id, target, &device));
    }
    // The rest is left for the jobs.
    peers.io(&["write -P 9 0 3M"]);
    for id in ["j3", "j1", "j4", "j2"] {
        finish(&mut peers, id);
    }
    peers.stop();
    let targets = [("a", [1, 7, 7, 7]), ("b", [1, 2, 7, 7]), ("c", [1, 2, 3, 7]), ("d", [7; 4])];
    for (name, first_halves) in targets {
        // In QSD, the backup of the node above takes its place below the node that shows the moment.
        let checked = if name == "d" { 1 } else { 2 };
        for side in peers.sides().into_iter().take(checked) {
            let found = fs::read(side.path(name)).expect("a file");
            for (half, part) in found.chunks(512 << 10).enumerate() {
                let byte = if half % 2 == 0 { first_halves[half / 2] } else { 7 };
                assert!(part.iter().all(|found| *found == byte), "{name}, {half}: not all {byte}");
            }
        }
    }
}

/// The events about jobs until these have been dismissed: of each job in order, without how far the job was.
fn ends(peers: &mut Peers, ids: &[&str]) -> Vec<Vec<Value>> {
    let [ours, theirs] = peers.sides().map(|side| {
        let mut told = vec![Vec::new(); ids.len()];
        let mut left = ids.len();
        while left > 0 {
            let message = side.qmp.message();
            let data = &message["data"];
            let id = ["id", "device"].iter().find_map(|name| data[name].as_str());
            let Some(job) = id.and_then(|id| ids.iter().position(|of| *of == id)) else { continue };
            left -= usize::from(data["status"] == "null");
            told[job].push(json!([message["event"], data["status"], data["error"]]));
        }
        told
    });
    assert_eq!(ours, theirs);
    ours
}

fn status(status: &str) -> Value {
    json!(["JOB_STATUS_CHANGE", status, null])
}

fn event(name: &str) -> Value {
    json!([name, null, null])
}

/// Begins a transaction of backups `j1` to `a` and `j2` to `b`, of which `j1` has copied all it has to.
fn begin_grouped(peers: &mut Peers, first: &Value, second: &Value) {
    let first = backup("j1", "a", &merged(json!({"speed": 0}), first));
    let actions = [first, backup("j2", "b", second)]
        .map(|data| json!({"type": "blockdev-backup", "data": data}));
    let grouped = json!({"completion-mode": "grouped"});
    peers.execute("transaction", json!({"actions": actions, "properties": grouped}));
    for side in peers.sides() {
        wait_for_status(&mut side.qmp, "j1", "waiting");
    }
}

/// Jobs of a grouped transaction end together, in the order of events of QSD.
#[test]
fn grouped_jobs_end_together_as_in_qemu_storage_daemon() {
    let none = json!({});
    let all_end = ["pending", "concluded", "null"].map(status);
    // All succeed.
    let scratch = Scratch::new();
    let mut peers = peers(&scratch, &["a", "b"]);
    let grouped = json!({"completion-mode": "grouped"});
    peers.execute("transaction", json!({"actions": [], "properties": grouped}));
    let clear = json!({"type": "block-dirty-bitmap-clear", "data": {"node": "a", "name": "b"}});
    let refused = json!({"actions": [clear], "properties": grouped});
    assert!(peers.both("transaction", refused).get("error").is_some());
    begin_grouped(&mut peers, &none, &none);
    for (command, argument) in [("job-finalize", "id"), ("job-pause", "id"), ("job-dismiss", "id")]
    {
        let answer = peers.both(command, json!({argument: "j1"}));
        assert!(answer.get("error").is_some(), "{command}");
    }
    peers.io(&["write -P 1 0 1M"]);
    peers.execute("block-job-set-speed", json!({"device": "j2", "speed": 0}));
    let told = ends(&mut peers, &["j1", "j2"]);
    let [pending, concluded, null] = all_end.clone();
    let completed = event("BLOCK_JOB_COMPLETED");
    assert_eq!(told[0], [pending.clone(), completed.clone(), concluded.clone(), null.clone()]);
    assert_eq!(told[1], [status("waiting"), pending, completed, concluded, null]);
    peers.stop();
    for name in ["a", "b"] {
        has(&mut peers, name, [7, 7, 7, 7]);
    }
}

/// If one of them is to be ended by the client, all are.
#[test]
fn grouped_jobs_are_finalized_together_as_in_qemu_storage_daemon() {
    for ended in ["j1", "j2"] {
        let scratch = Scratch::new();
        let mut peers = peers(&scratch, &["a", "b"]);
        begin_grouped(&mut peers, &json!({}), &json!({"auto-finalize": false}));
        peers.execute("block-job-set-speed", json!({"device": "j2", "speed": 0}));
        for side in peers.sides() {
            eventually("two pending jobs", || {
                let jobs = side.qmp.execute("query-jobs", json!({}));
                let jobs = jobs.as_array().expect("a list");
                jobs.iter().all(|job| job["status"] == "pending").then_some(())
            });
        }
        peers.execute("job-finalize", json!({"id": ended}));
        let told = ends(&mut peers, &["j1", "j2"]);
        let done = [event("BLOCK_JOB_COMPLETED"), status("concluded"), status("null")];
        assert_eq!(told[0], [&[status("pending")][..], &done].concat());
        let pending = [status("waiting"), status("pending"), event("BLOCK_JOB_PENDING")];
        assert_eq!(told[1], [&pending[..], &done].concat());
        peers.stop();
    }
}

/// If one fails or is cancelled, the others are cancelled, and their bitmaps have the bits again.
#[test]
fn grouped_jobs_fail_together_as_in_qemu_storage_daemon() {
    let cancelled =
        [status("aborting"), event("BLOCK_JOB_CANCELLED"), status("concluded"), status("null")];
    for how in ["cancel the running one", "cancel the waiting one", "an error", "paused"] {
        let scratch = Scratch::new();
        let mut peers = peers(&scratch, &["a", "b"]);
        peers.execute("blockdev-add", faults());
        let bitmap = json!({"node": "disk", "name": "x", "granularity": 65536});
        peers.execute("block-dirty-bitmap-add", bitmap);
        peers.io(&["write -P 1 0 1M"]);
        let by_bitmap = json!({"sync": "incremental", "bitmap": "x"});
        let target = if how == "an error" { "faults" } else { "b" };
        begin_grouped(&mut peers, &by_bitmap, &json!({"target": target}));
        match how {
            "an error" => {
                peers.execute("block-job-set-speed", json!({"device": "j2", "speed": 0}));
            }
            "cancel the waiting one" => {
                peers.execute("block-job-cancel", json!({"device": "j1"}));
            }
            "paused" => {
                peers.execute("block-job-pause", json!({"device": "j2"}));
                peers.execute("job-cancel", json!({"id": "j1"}));
            }
            _ => {
                peers.execute("block-job-cancel", json!({"device": "j2"}));
            }
        }
        let told = ends(&mut peers, &["j1", "j2"]);
        assert_eq!(told[0], cancelled, "{how}");
        let why = if how == "an error" { json!("No space left on device") } else { json!(null) };
        let end = told[1].iter().rev().nth(2).expect("events");
        assert_eq!(end[2], why, "{how}: {told:?}");
        for side in peers.sides() {
            let nodes = side.qmp.execute("query-named-block-nodes", json!({"flat": true}));
            let nodes = nodes.as_array().expect("a list");
            let disk = nodes.iter().find(|node| node["node-name"] == "disk").expect("the disk");
            let bitmap = &disk["dirty-bitmaps"][0];
            assert_eq!(
                (&bitmap["count"], &bitmap["busy"]),
                (&json!(1 << 20), &json!(false)),
                "{how}"
            );
        }
        peers.io(&["write -P 2 0 4M"]);
        peers.stop();
        has(&mut peers, "disk", [2, 2, 2, 2]);
    }
}
