//! Snapshots inside a qcow2 image that is in use.

use crate::common;

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering;

use common::peers::{Peers, run};
use common::{check, check_moment, under_load, upgrade_under};
use integration::{Image, Qmp, Scratch, ServerCommand, merged};
use serde_json::{Value, json};

const MAKE: &str = "blockdev-snapshot-internal-sync";
const DELETE: &str = "blockdev-snapshot-delete-internal-sync";

fn add(name: &str, image: &str, read_only: bool) -> Value {
    let file = json!({"driver": "file", "filename": format!("DIR/{image}"), "node-name": format!("{name}-file")});
    json!({"driver": "qcow2", "node-name": name, "file": file, "read-only": read_only})
}

/// Sends a command to both, which answer the same, but for the time.
fn alike(peers: &mut Peers, command: &str, arguments: Value) -> Value {
    let [ours, theirs] = peers.sides().map(|side| {
        let mut answer = side.ask(command, &arguments);
        if let Some(info) = answer.get_mut("return").and_then(Value::as_object_mut) {
            for (name, value) in info {
                if name.starts_with("date") || name.starts_with("vm-clock") {
                    assert!(value.is_number(), "{name}: {value}");
                    *value = 0.into();
                }
            }
        }
        answer
    });
    assert_eq!(ours, theirs, "{command} {arguments}");
    ours
}

/// The ids and names of a node's snapshots.
fn told(peers: &mut Peers, node: &str) -> Vec<(String, String)> {
    let [ours, theirs] = peers.sides().map(|side| {
        let nodes = side.qmp.execute("query-named-block-nodes", json!({"flat": true}));
        let node = nodes.as_array().unwrap().iter().find(|one| one["node-name"] == node).cloned();
        let image = &node.expect("the node")["image"];
        let snapshots = image["snapshots"].as_array().cloned().unwrap_or_default();
        let text = |one: &Value, name: &str| one[name].as_str().unwrap().to_owned();
        let told = snapshots.iter().map(|one| (text(one, "id"), text(one, "name")));
        told.collect::<Vec<_>>()
    });
    assert_eq!(ours, theirs, "{node}");
    ours
}

/// Both daemons, and images of several kinds.
fn peers(scratch: &Scratch) -> Peers {
    let mut peers = Peers::new(scratch);
    let create = ["create", "-q", "-f", "qcow2"];
    for (image, options) in [
        ("disk", "compat=1.1"),
        ("old", "compat=0.10"),
        ("one-bit", "refcount_bits=1"),
        ("read-only", "compat=1.1"),
        ("apart", "data_file=DIR/apart.raw"),
    ] {
        let image = format!("DIR/{image}.qcow2");
        peers.run("qemu-img", &[&create[..], &["-o", options, &image, "8M"]].concat());
    }
    for image in ["disk", "one-bit"] {
        let image = format!("DIR/{image}.qcow2");
        peers.run("qemu-io", &["-f", "qcow2", "-c", "write -P 1 0 1M", &image]);
    }
    for (name, image) in
        [("disk", "disk"), ("old", "old"), ("one-bit", "one-bit"), ("apart", "apart")]
    {
        peers.execute("blockdev-add", add(name, &format!("{image}.qcow2"), false));
    }
    peers.execute("blockdev-add", add("read-only", "read-only.qcow2", true));
    peers
}

/// Closes the images, in which QEMU finds nothing wrong, not even leaks.
fn check_images(peers: &mut Peers) {
    for node in ["disk", "old", "one-bit"] {
        peers.execute("blockdev-del", json!({"node-name": node}));
        let image = format!("DIR/{node}.qcow2");
        let check = ["check", "-q", "-f", "qcow2", &image];
        match node {
            // QSD leaks a cluster when it cannot count a snapshot.
            "one-bit" => drop(run("qemu-img", &peers.ours.folder, &check)),
            _ => peers.run("qemu-img", &check),
        }
    }
}

#[test]
fn snapshots_are_made_and_deleted_as_by_qsd() {
    let scratch = Scratch::new();
    let mut peers = peers(&scratch);
    let null = json!({"driver": "null-co", "node-name": "null", "size": 1 << 20});
    peers.execute("blockdev-add", null);
    for (device, name) in [
        ("none", "a"),
        ("", "a"),
        ("disk", ""),
        ("disk", "a"),
        ("disk", "a"),
        ("disk", "1"),
        ("disk", "2"),
        ("old", "a"),
        ("null", "a"),
        ("null", ""),
        ("disk-file", "a"),
        ("read-only", "a"),
        ("one-bit", "a"),
        ("apart", "a"),
    ] {
        alike(&mut peers, MAKE, json!({"device": device, "name": name}));
    }
    alike(&mut peers, MAKE, json!({"device": "disk"}));
    alike(&mut peers, MAKE, json!({"name": "a"}));
    // Longer than a name can be: the rest is cut off.
    alike(&mut peers, MAKE, json!({"device": "disk", "name": "n".repeat(300)}));
    assert_eq!(told(&mut peers, "disk").len(), 4);
    told(&mut peers, "old");
    told(&mut peers, "one-bit");
    for arguments in [
        json!({"device": "disk"}),
        json!({"device": "none"}),
        json!({"device": "disk", "name": ""}),
        json!({"device": "disk", "id": ""}),
        json!({"device": "disk", "name": "9"}),
        json!({"device": "disk", "id": "9"}),
        json!({"device": "disk", "id": "1", "name": "1"}),
        json!({"device": "disk", "id": "9", "name": "a"}),
        json!({"device": "null", "name": "a"}),
        json!({"device": "apart", "name": "a"}),
        json!({"device": "disk-file", "name": "a"}),
        json!({"device": "read-only", "name": "a"}),
        json!({"device": "disk", "id": "2", "name": "1"}),
        json!({"device": "disk", "name": "a"}),
        json!({"device": "disk", "id": "3"}),
        json!({"device": "old", "name": "a"}),
    ] {
        alike(&mut peers, DELETE, arguments);
    }
    assert_eq!(told(&mut peers, "disk").len(), 1);
    // Ids are not used again, as long as there is a higher one.
    alike(&mut peers, MAKE, json!({"device": "disk", "name": "again"}));
    assert_eq!(told(&mut peers, "disk")[1], ("5".to_owned(), "again".to_owned()));
    // Through a node above.
    let raw = json!({"driver": "raw", "node-name": "raw", "file": "disk"});
    peers.execute("blockdev-add", raw);
    alike(&mut peers, MAKE, json!({"device": "disk", "name": "below"}));
    alike(&mut peers, MAKE, json!({"device": "raw", "name": "through"}));
    alike(&mut peers, DELETE, json!({"device": "raw", "name": "again"}));
    told(&mut peers, "disk");
    told(&mut peers, "raw");
    peers.execute("blockdev-del", json!({"node-name": "raw"}));
    // An inactive image is not changed. QSD ends when it is asked to delete one there.
    peers.execute("blockdev-set-active", json!({"node-name": "disk", "active": false}));
    alike(&mut peers, MAKE, json!({"device": "disk", "name": "inactive"}));
    let why = peers.ours.qmp.refused(DELETE, json!({"device": "disk", "name": "through"}));
    assert_eq!(why, "Node 'disk' is inactive");
    peers.execute("blockdev-set-active", json!({"node-name": "disk", "active": true}));
    told(&mut peers, "disk");
    check_images(&mut peers);
}

/// The host gets back what only the deleted snapshot had, unless an option of the image or its file says otherwise.
#[test]
fn a_deleted_snapshot_gives_its_space_back_as_in_qsd() {
    const TAKEN: u64 = 8 << 20;
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    let off = json!({"pass-discard-snapshot": false});
    for (name, discard, options, gives_back) in [
        ("default", None, json!({}), true),
        ("unmap", Some("unmap"), json!({"discard": "ignore"}), true),
        ("ignore", Some("ignore"), json!({"discard": "unmap"}), false),
        ("off", None, off, false),
    ] {
        let image = format!("DIR/{name}");
        peers.run("qemu-img", &["create", "-q", "-f", "qcow2", &image, "64M"]);
        peers.run("qemu-io", &["-c", "write -P 1 1M 8M", &image]);
        peers.run("qemu-img", &["snapshot", "-c", "s", &image]);
        peers.run("qemu-io", &["-c", "write -P 2 1M 8M", &image]);
        let mut node = merged(add(name, name, false), &options);
        if let Some(discard) = discard {
            node["file"]["discard"] = discard.into();
        }
        peers.execute("blockdev-add", node);
        let blocks = |peers: &mut Peers| {
            peers.sides().map(|side| side.path(name).metadata().expect("the image").blocks() * 512)
        };
        let before = blocks(&mut peers);
        alike(&mut peers, DELETE, json!({"device": name, "name": "s"}));
        let after = blocks(&mut peers);
        for (before, after) in before.into_iter().zip(after) {
            // Tables and the journal aside.
            let is_given_back = after + TAKEN <= before + (1 << 20);
            assert_eq!(is_given_back, gives_back, "{name}: {before} {after}");
        }
    }
    let folders = peers.sides().map(|side| side.folder.clone());
    peers.stop();
    for folder in folders {
        for name in ["default", "unmap", "ignore", "off"] {
            let image = format!("DIR/{name}");
            run("qemu-img", &folder, &["check", "-q", &image]);
            run("qemu-io", &folder, &["-r", "-c", "read -P 2 1M 8M", &image]);
        }
    }
}

#[test]
fn transactions_and_jobs_are_as_in_qsd() {
    let scratch = Scratch::new();
    let mut peers = peers(&scratch);
    let action =
        |device: &str, name: &str| json!({"type": MAKE, "data": {"device": device, "name": name}});
    let abort = || json!({"type": "abort", "data": {}});
    for actions in [
        json!([action("disk", "t"), action("none", "t")]),
        json!([action("disk", "t"), action("disk", "t")]),
        json!([action("disk", "t"), abort()]),
        json!([action("disk", "t"), action("old", "t")]),
        json!([action("disk", "u"), action("one-bit", "u")]),
        json!([{"type": DELETE, "data": {"device": "disk", "name": "t"}}]),
    ] {
        alike(&mut peers, "transaction", json!({"actions": actions}));
        told(&mut peers, "disk");
        told(&mut peers, "old");
    }
    let grouped = json!({"completion-mode": "grouped"});
    let one = json!({"actions": [action("disk", "g")], "properties": grouped});
    alike(&mut peers, "transaction", one);
    let names: Vec<_> = told(&mut peers, "disk").into_iter().map(|(_, name)| name).collect();
    assert_eq!(names, ["t"]);
    // A job's node is not a root.
    peers.run("qemu-img", &["create", "-q", "-f", "raw", "DIR/copy.raw", "8M"]);
    let file = json!({"driver": "file", "filename": "DIR/copy.raw"});
    let copy = json!({"driver": "raw", "node-name": "copy", "file": file});
    peers.execute("blockdev-add", copy);
    let mirror = json!({"job-id": "m", "device": "disk", "target": "copy", "sync": "full"});
    peers.execute("blockdev-mirror", mirror);
    for side in peers.sides() {
        side.qmp.wait_for("BLOCK_JOB_READY");
    }
    alike(&mut peers, MAKE, json!({"device": "disk", "name": "job"}));
    alike(&mut peers, DELETE, json!({"device": "disk", "name": "t"}));
    for side in peers.sides() {
        side.qmp.execute("job-cancel", json!({"id": "m"}));
        side.qmp.wait_for("BLOCK_JOB_CANCELLED");
    }
    alike(&mut peers, DELETE, json!({"device": "disk", "name": "t"}));
    check_images(&mut peers);
}

/// Snapshots are the disk at one moment of a load, and what is written later does not change them, nor does an upgrade.
#[test]
fn a_snapshot_is_the_disk_at_one_moment() {
    let scratch = Scratch::new();
    let (_image, mut server, mut qmp, load) = under_load(&scratch, 9);
    load.go_on();
    let top = scratch.path("top.qcow2");
    let above = json!({"node-name": "disk", "snapshot-file": top, "snapshot-node-name": "top"});
    qmp.execute("blockdev-snapshot-sync", above);
    load.go_on();
    let mut moments = Vec::new();
    let mut make = |qmp: &mut Qmp, name: &str| {
        let before = load.written.load(Ordering::Relaxed);
        qmp.execute(MAKE, json!({"device": "top", "name": name}));
        moments.push((name.to_owned(), before..=load.written.load(Ordering::Relaxed) + 1));
        load.go_on();
    };
    for name in ["a", "b", "c"] {
        make(&mut qmp, name);
    }
    qmp.execute(DELETE, json!({"device": "top", "name": "b"}));
    load.go_on();
    upgrade_under(&mut server, &load);
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    make(&mut qmp, "d");
    qmp.execute(DELETE, json!({"device": "top", "name": "a"}));
    load.go_on();
    moments.retain(|(name, _)| !["a", "b"].contains(&name.as_str()));
    let log = load.finish();
    server.stop();
    let folder = top.parent().unwrap();
    run("qemu-img", folder, &["check", "-q", "-f", "qcow2", "DIR/top.qcow2"]);
    let convert = ["convert", "-f", "qcow2", "-O", "raw"];
    for (name, moment) in moments {
        let from = ["-l", &name, "DIR/top.qcow2", "DIR/then.img"];
        run("qemu-img", folder, &[&convert[..], &from].concat());
        check_moment(&Image::existing(&scratch.path("then.img")), &log, moment);
    }
    run("qemu-img", folder, &[&convert[..], &["DIR/top.qcow2", "DIR/then.img"]].concat());
    check(&Image::existing(&scratch.path("then.img")), &log, log.len());
}

/// The table of snapshots may be the last there is on a device, and a device is not read past its end.
#[test]
fn a_table_at_the_end_of_a_device_is_read() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    let create = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", "DIR/short", "1M"];
    peers.run("qemu-img", &create);
    peers.run("qemu-img", &["snapshot", "-c", "a", "DIR/short"]);
    let len = std::fs::metadata(peers.ours.path("short")).expect("the image").len();
    let len = len.next_multiple_of(512);
    for side in peers.sides() {
        let image = File::options().write(true).open(side.path("short"));
        image.expect("the image").set_len(len).expect("it becomes longer");
    }
    let device =
        json!({"driver": "raw", "size": len, "file": {"driver": "file", "filename": "DIR/short"}});
    let node = json!({"driver": "qcow2", "node-name": "short", "file": device});
    peers.execute("blockdev-add", node);
    assert_eq!(told(&mut peers, "short"), [("1".to_owned(), "a".to_owned())]);
    peers.stop();
}

/// A number of so many bytes, big-endian.
fn number(bytes: &[u8]) -> usize {
    bytes.iter().fold(0, |number, byte| number << 8 | usize::from(*byte))
}

/// Of images with a damaged table of snapshots, the same are opened and refused as by QSD. A repair refuses them, too: their
/// snapshots would count as unused.
#[test]
fn a_damaged_table_of_snapshots_is_left_as_it_is() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    peers.run("qemu-img", &["create", "-q", "-f", "qcow2", "DIR/good", "8M"]);
    peers.run("qemu-io", &["-f", "qcow2", "-c", "write -P 1 0 1M", "DIR/good"]);
    for name in ["a", "b"] {
        peers.run("qemu-img", &["snapshot", "-c", name, "DIR/good"]);
    }
    let good = std::fs::read(peers.ours.path("good")).expect("the image");
    let table = number(&good[64..72]);
    let l1 = number(&good[table..table + 8]);
    let past_the_end = (good.len() as u64).next_multiple_of(64 << 10);
    let put = |at: usize, bytes: &[u8]| (at, bytes.to_vec());
    let places = [
        // Of the header: the table's place, and the number of snapshots.
        ("offset", put(64, &(table as u64 + 512).to_be_bytes()), true),
        ("count", put(60, &70_000u32.to_be_bytes()), true),
        // Of the first entry: extra data, the number of entries of the L1 table, and its place.
        ("extra", put(table + 36, &5000u32.to_be_bytes()), true),
        ("entries", put(table + 8, &(1u32 << 30).to_be_bytes()), false),
        ("aligned", put(table, &(l1 as u64 + 512).to_be_bytes()), false),
        ("end", put(table, &past_the_end.to_be_bytes()), false),
        // Of its L1 table.
        ("entry", put(l1, &0xffff_0000_0000_0000u64.to_be_bytes()), false),
    ];
    for (name, (at, bytes), is_refused) in places {
        let mut damaged = good.clone();
        damaged[at..at + bytes.len()].copy_from_slice(&bytes);
        for side in peers.sides() {
            std::fs::write(side.path(name), &damaged).expect("a copy");
        }
        let answers = peers.sides().map(|side| side.ask("blockdev-add", &add(name, name, false)));
        for answer in &answers {
            assert_eq!(answer.get("error").is_some(), is_refused, "{name}: {answer}");
        }
        if is_refused {
            let [ours, theirs] = answers.map(|answer| answer["error"]["desc"].to_string());
            assert!(ours.contains(theirs.trim_matches('"').split('\n').next().unwrap()), "{ours}");
            let path = peers.ours.path(name);
            let repair = ServerCommand::other_command(&scratch, "check").named("repair");
            let repair = repair.arg("--repair").arg("all").arg(path.display().to_string());
            let (repaired, said) = repair.run();
            assert_eq!(repaired.code(), Some(1), "{name}: {said}");
            assert_eq!(std::fs::read(&path).expect("the image"), damaged, "{name}");
            continue;
        }
        // The disk is still served, and its other snapshot can be deleted.
        let deleted = peers.ours.ask(DELETE, &json!({"device": name, "name": "a"}));
        let why = deleted["error"]["desc"].as_str().unwrap_or_default();
        assert!(why.contains("the snapshot is damaged"), "{name}: {deleted}");
        peers.ours.qmp.execute(DELETE, json!({"device": name, "name": "b"}));
        peers.ours.qmp.execute(MAKE, json!({"device": name, "name": "c"}));
        let nodes = peers.ours.qmp.execute("query-named-block-nodes", json!({"flat": true}));
        let is_it = |node: &&Value| node["node-name"] == name;
        let node = nodes.as_array().unwrap().iter().find(is_it).expect("the node");
        assert_eq!(node["image"]["format-specific"]["data"]["corrupt"], false, "{name}");
        for side in peers.sides() {
            side.qmp.execute("blockdev-del", json!({"node-name": name}));
        }
    }
    peers.stop();
}
