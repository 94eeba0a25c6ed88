//! Snapshots: an image comes above a disk while it is in use, and what lies below stays as it is.

use crate::common;

use std::process::Command;
use std::sync::atomic::Ordering;

use common::peers::{Peers, Side, run};
use common::{BLOCKS, MIB, check, check_moment, create, daemon, under_load, wait_for_end};
use integration::nbd::nbd_server;
use integration::{
    BlkClient, Image, Qmp, Request, Scratch, Segment, ServerCommand, eventually, merged, pattern,
    request, tool,
};
use serde_json::{Value, json};

#[test]
fn backing_images_are_not_changed() {
    let scratch = Scratch::new();
    let (image, server, mut qmp, load) = under_load(&scratch, 4);
    load.go_on();

    // By an image that the daemon makes.
    let top = scratch.path("top.qcow2");
    let snapshot = json!({"node-name": "disk", "snapshot-file": top, "snapshot-node-name": "top"});
    let before = load.written.load(Ordering::Relaxed);
    qmp.execute("blockdev-snapshot-sync", snapshot);
    let first = before..=load.written.load(Ordering::Relaxed) + 1;
    assert_eq!(qmp.execute("query-block-exports", json!({}))[0]["node-name"], "top");
    load.go_on();

    // By one that is there.
    let over = scratch.path("over.qcow2");
    let size = (MIB << 20).to_string();
    let made = Command::new(tool("qemu-img"))
        .args(["create", "-q", "-f", "qcow2"])
        .arg(&over)
        .arg(size)
        .status();
    assert!(made.expect("qemu-img runs").success());
    let file = json!({"driver": "file", "filename": over});
    // Nothing lies behind the image, so that no option has to say so.
    let node = json!({"driver": "qcow2", "node-name": "over", "file": file});
    qmp.execute("blockdev-add", node);
    qmp.execute("blockdev-snapshot", json!({"node": "top", "overlay": "over"}));
    load.go_on();
    for node in ["disk", "top", "over"] {
        let why = qmp.refused("blockdev-del", json!({"node-name": node}));
        assert!(why.contains("in use") || why.contains("as backing"), "{node}: {why}");
    }

    // All of it moves to one file.
    let flat = scratch.path("flat.img");
    create(&mut qmp, "flat", &flat, MIB << 20);
    let mirror = json!({"job-id": "m", "device": "over", "target": "flat", "sync": "full"});
    qmp.execute("blockdev-mirror", mirror);
    qmp.wait_for("BLOCK_JOB_READY");
    load.go_on();
    qmp.execute("job-complete", json!({"id": "m"}));
    wait_for_end(&mut qmp, "m");
    load.go_on();
    for node in ["over", "top", "disk"] {
        qmp.execute("blockdev-del", json!({"node-name": node}));
    }
    let log = load.finish();
    server.stop();
    check_moment(&image, &log, first);
    check(&Image::existing(&flat), &log, log.len());
    // What was written between the two is in the image that the daemon has made.
    let info = Image::existing(&top).qemu_img(&["check", "-q", "-f", "qcow2"]);
    assert!(info.status.success(), "{info:?}");
    let raw = scratch.path("top.img");
    let converted = Command::new(tool("qemu-img"))
        .args(["convert", "-f", "qcow2", "-O", "raw"])
        .args([&top, &raw])
        .status();
    assert!(converted.expect("qemu-img runs").success());
    let newest = (0..BLOCKS).map(|index| {
        let data = Image::existing(&raw).read(index * pattern::BLOCK as u64, pattern::BLOCK);
        pattern::generation(index, &data).expect("a whole block")
    });
    let newest = newest.max().unwrap_or(0);
    check(&Image::existing(&raw), &log, newest as usize);
}

/// An overlay names the options of an image that a path does not tell all of.
#[test]
fn overlays_name_options() {
    let file = json!({"driver": "file", "filename": "DIR/disk"});
    let throttled = json!({"driver": "throttle", "throttle-group": "t", "file": file});
    for (nth, below) in [
        json!({"driver": "raw", "file": file}),
        json!({"driver": "raw", "offset": 65536, "file": file}),
        json!({"driver": "raw", "offset": 65536, "size": 65536, "file": file}),
        json!({"driver": "qcow2", "file": {"driver": "raw", "offset": 65536, "file": file}}),
        json!({"driver": "throttle", "throttle-group": "t", "file": {"driver": "raw", "file": file}}),
        json!({"driver": "raw", "file": throttled}),
        json!({"driver": "null-co", "size": 1 << 20, "read-zeroes": true}),
    ]
    .into_iter()
    .enumerate()
    {
        let scratch = Scratch::new();
        let mut peers = Peers::new(&scratch);
        peers.execute("object-add", json!({"qom-type": "throttle-group", "id": "t"}));
        peers.run("qemu-img", &["create", "-q", "-f", "qcow2", "DIR/image", "1M"]);
        for side in peers.sides() {
            let image = std::fs::read(side.path("image")).expect("the image");
            std::fs::write(side.path("disk"), [vec![0; 65536], image].concat()).expect("writable");
        }
        peers.execute("blockdev-add", merged(below.clone(), &json!({"node-name": "disk"})));
        let snapshot = json!({
            "node-name": "disk", "snapshot-file": "DIR/top", "snapshot-node-name": "top",
        });
        peers.execute("blockdev-snapshot-sync", snapshot);
        let named = peers.sides().map(|side| {
            let info = run("qemu-img", &side.folder, &["info", "-U", "--output=json", "DIR/top"]);
            let info = info.replace(&side.folder.display().to_string(), "DIR");
            let info: Value = serde_json::from_str(&info).expect("JSON");
            let name = info["backing-filename"].as_str().expect("a name").to_owned();
            let options = name.strip_prefix("json:").map(|options| {
                serde_json::from_str::<Value>(options).expect("JSON")
            });
            (options.unwrap_or_else(|| name.into()), info["backing-filename-format"].clone())
        });
        assert_eq!(named[0], named[1], "{below}");
        assert_eq!(named[0].0.is_object(), nth > 0, "{below}");
        peers.stop();
    }
}

/// What watches the writes of the node "over", as both tell.
fn watched(peers: &mut Peers) -> Value {
    watched_node(peers, "over")
}

fn watched_node(peers: &mut Peers, name: &str) -> Value {
    let [ours, theirs] = peers.sides().map(|side| {
        let nodes = side.ask("query-named-block-nodes", &json!({"flat": true}));
        let nodes = nodes["return"].as_array().expect("a list");
        let node = nodes.iter().find(|node| node["node-name"] == name).expect("the node");
        let mut bitmaps = node["dirty-bitmaps"].as_array().cloned().unwrap_or_default();
        bitmaps.sort_by_key(|bitmap| bitmap["name"].to_string());
        json!({"bitmaps": bitmaps, "threshold": node["write_threshold"]})
    });
    assert_eq!(ours, theirs);
    ours
}

/// Its bitmaps and its write threshold stay, whether the snapshot succeeds or is undone.
#[test]
fn an_overlay_stays_watched() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    for (name, options) in [("disk", json!({})), ("over", json!({"backing": null}))] {
        peers.run("qemu-img", &["create", "-q", "-f", "qcow2", &format!("DIR/{name}"), "1M"]);
        let file = json!({"driver": "file", "filename": format!("DIR/{name}")});
        let node = json!({"driver": "qcow2", "node-name": name, "file": file});
        peers.execute("blockdev-add", merged(node, &options));
    }
    for (name, persistent) in [("memory", false), ("image", true)] {
        let bitmap = json!({"node": "over", "name": name, "persistent": persistent});
        peers.execute("block-dirty-bitmap-add", bitmap);
    }
    let threshold = json!({"node-name": "over", "write-threshold": 786_432});
    peers.execute("block-set-write-threshold", threshold);
    peers.serve("over");
    peers.io(&["write 0 64k"]);
    peers.execute("block-export-del", json!({"id": "e"}));
    peers.wait_for("BLOCK_EXPORT_DELETED");
    peers.execute("nbd-server-stop", json!({}));
    let before = watched(&mut peers);
    assert_eq!(before["threshold"], 786_432);
    assert_eq!(before["bitmaps"][0]["count"], 65_536);

    let action = |kind: &str, data: Value| json!({"type": kind, "data": data});
    let bitmap = |name: &str| json!({"node": "over", "name": name});
    let snapshot = json!({"node": "disk", "overlay": "over"});
    let actions = json!({"actions": [
        action("block-dirty-bitmap-clear", bitmap("memory")),
        action("block-dirty-bitmap-clear", bitmap("image")),
        action("block-dirty-bitmap-disable", bitmap("image")),
        action("blockdev-snapshot", snapshot.clone()),
        action("abort", json!({})),
    ]});
    assert!(peers.both("transaction", actions).get("error").is_some());
    assert_eq!(watched(&mut peers), before);
    peers.execute("blockdev-snapshot", snapshot);
    assert_eq!(watched(&mut peers), before);
    peers.serve("over");
    peers.io(&["write 128k 64k"]);
    let after = watched(&mut peers);
    assert!(after["bitmaps"].as_array().expect("a list").iter().all(|of| of["count"] == 131_072));
    peers.stop();
}

/// The image of an overlay may be a node inside another one. A bitmap that was removed comes back if the snapshot is undone.
#[test]
fn an_undone_snapshot_leaves_the_overlay_as_it_was() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    peers.execute("object-add", json!({"qom-type": "throttle-group", "id": "t"}));
    for name in ["disk", "over"] {
        peers.run("qemu-img", &["create", "-q", "-f", "qcow2", &format!("DIR/{name}"), "1M"]);
    }
    let file = |name: &str| json!({"driver": "file", "filename": format!("DIR/{name}")});
    let disk = json!({"driver": "qcow2", "node-name": "disk", "file": file("disk"),
        "read-only": true});
    peers.execute("blockdev-add", disk);
    let inside = merged(file("over"), &json!({"node-name": "inside"}));
    let throttle = json!({"driver": "throttle", "node-name": "outside", "throttle-group": "t", "file": inside});
    peers.execute("blockdev-add", throttle);
    let over = json!({"driver": "qcow2", "node-name": "over", "file": "inside", "backing": null});
    peers.execute("blockdev-add", over);
    let bitmap = json!({"node": "over", "name": "b"});
    peers.execute("block-dirty-bitmap-add", bitmap.clone());
    let before = watched(&mut peers);
    let snapshot = json!({"node": "disk", "overlay": "over"});
    let action = |kind: &str, data: &Value| json!({"type": kind, "data": data});
    let actions = json!({"actions": [
        action("block-dirty-bitmap-remove", &bitmap),
        action("blockdev-snapshot", &snapshot),
        action("abort", &json!({})),
    ]});
    assert!(peers.both("transaction", actions).get("error").is_some());
    assert_eq!(watched(&mut peers), before);
    let writable =
        json!({"type": "nbd", "id": "e", "node-name": "disk", "name": "e", "writable": true});
    let addr = json!({"type": "unix", "data": {"path": "DIR/nbd.sock"}});
    peers.execute("nbd-server-start", json!({"addr": addr}));
    assert!(peers.both("block-export-add", writable).get("error").is_some());
    peers.execute("blockdev-snapshot", snapshot);
    assert_eq!(watched(&mut peers), before);
    peers.stop();
}

/// The write thresholds of the nodes inside it are kept, too, and so are their generated names.
#[test]
fn nodes_inside_an_overlay_stay_watched() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    for name in ["disk", "over"] {
        peers.run("qemu-img", &["create", "-q", "-f", "qcow2", &format!("DIR/{name}"), "1M"]);
    }
    let file = json!({"driver": "file", "filename": "DIR/disk"});
    peers.execute("blockdev-add", json!({"driver": "qcow2", "node-name": "disk", "file": file}));
    let file = json!({"driver": "file", "node-name": "inside", "filename": "DIR/over"});
    let raw = json!({"driver": "raw", "file": file});
    let over = json!({"driver": "qcow2", "node-name": "over", "file": raw, "backing": null});
    peers.execute("blockdev-add", over);
    let threshold = json!({"node-name": "inside", "write-threshold": 1 << 30});
    peers.execute("block-set-write-threshold", threshold);
    let names = generated_names(&mut peers);
    let snapshot = json!({"node": "disk", "overlay": "over"});
    let actions = json!({"actions": [
        {"type": "blockdev-snapshot", "data": snapshot}, {"type": "abort", "data": {}},
    ]});
    for (command, arguments) in [("transaction", actions), ("blockdev-snapshot", snapshot)] {
        peers.both(command, arguments);
        assert_eq!(watched_node(&mut peers, "inside")["threshold"], 1 << 30);
        assert_eq!(generated_names(&mut peers), names);
    }
    peers.stop();
}

/// The drivers and names of the nodes with generated names, of both sides. QSD 10.0 lists no children.
fn generated_names(peers: &mut Peers) -> [Vec<(String, Value)>; 2] {
    peers.sides().map(|side| {
        let nodes = side.ask("query-named-block-nodes", &json!({"flat": true}));
        let nodes = nodes["return"].as_array().expect("a list").iter();
        let generated = nodes.filter(|node| node["node-name"].to_string().starts_with("\"#"));
        let named = |node: &Value| (node["drv"].to_string(), node["node-name"].clone());
        let mut names: Vec<_> = generated.map(named).collect();
        names.sort_by_key(|(driver, name)| (driver.clone(), name.to_string()));
        names
    })
}

/// Nodes that are inactivated and activated keep their generated names.
#[test]
fn an_activated_node_is_reopened_with_generated_names() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    peers.run("qemu-img", &["create", "-q", "-f", "qcow2", "DIR/disk", "1M"]);
    let file = json!({"driver": "file", "filename": "DIR/disk"});
    let raw = json!({"driver": "raw", "file": file});
    peers.execute("blockdev-add", json!({"driver": "qcow2", "node-name": "disk", "file": raw}));
    let names = generated_names(&mut peers);
    for active in [false, true] {
        for side in peers.sides() {
            let all = json!({"active": active});
            assert_eq!(side.ask("blockdev-set-active", &all)["return"], json!({}));
        }
        assert_eq!(generated_names(&mut peers), names);
    }
    for (side, names) in peers.sides().into_iter().zip(names) {
        let [_, (driver, raw)] = &names[..] else { panic!("{names:?}") };
        assert_eq!(driver, "\"raw\"");
        let qcow2 = json!({"driver": "qcow2", "node-name": "disk", "file": raw,
            "discard": "unmap"});
        let answer = side.ask("blockdev-reopen", &json!({"options": [qcow2]}));
        assert_eq!(answer["return"], json!({}), "{answer}");
    }
    peers.stop();
}

/// The sizes of all nodes that have a given name.
fn sizes(side: &mut Side) -> Vec<(String, u64)> {
    let nodes = side.ask("query-named-block-nodes", &json!({"flat": true}));
    let nodes = nodes["return"].as_array().expect("a list").iter();
    let size = |node: &Value| {
        let name = node["node-name"].as_str().expect("a name");
        let size = node["image"]["virtual-size"].as_u64().expect("a size");
        (!name.starts_with('#')).then(|| (name.to_owned(), size))
    };
    let mut sizes: Vec<_> = nodes.filter_map(size).collect();
    sizes.sort();
    sizes
}

/// A larger overlay gives the disk its size.
#[test]
fn an_overlay_may_be_larger() {
    for (size, bytes) in [("2M", 2 << 20), ("1536k", 1536 << 10)] {
        let scratch = Scratch::new();
        let mut peers = Peers::new(&scratch);
        for (name, size) in [("disk", "1M"), ("over", size)] {
            peers.run("qemu-img", &["create", "-q", "-f", "qcow2", &format!("DIR/{name}"), size]);
            let file = json!({"driver": "file", "filename": format!("DIR/{name}")});
            let node = json!({"driver": "qcow2", "node-name": name, "file": file, "backing": null});
            peers.execute("blockdev-add", node);
        }
        peers.serve("disk");
        let disk = json!({"type": "vhost-user-blk", "id": "v", "node-name": "disk",
            "addr": {"type": "unix", "path": "DIR/v.sock"}, "writable": true});
        peers.execute("block-export-add", disk);
        peers.io(&["write -P 7 0 64k"]);
        let socket = peers.ours.path("v.sock");
        let blk = BlkClient::connect(&socket, 1, 16).expect("it serves");
        let snapshot = json!({"node": "disk", "overlay": "over"});
        let actions = json!({"actions": [
            {"type": "blockdev-snapshot", "data": snapshot}, {"type": "abort", "data": {}},
        ]});
        for (command, arguments, bytes) in
            [("transaction", actions, 1 << 20), ("blockdev-snapshot", snapshot, bytes)]
        {
            peers.both(command, arguments);
            let [ours, theirs] = peers.sides().map(sizes);
            assert_eq!(ours, theirs);
            // The size that the guest sees.
            eventually("the new size", || {
                let capacity = blk.config().expect("it answers").capacity.to_native();
                (capacity * 512 == bytes).then_some(())
            });
        }
        drop(blk);
        for id in ["e", "v"] {
            peers.execute("block-export-del", json!({"id": id, "mode": "hard"}));
            peers.wait_for("BLOCK_EXPORT_DELETED");
        }
        let export = json!({"type": "nbd", "id": "e", "node-name": "over", "writable": true});
        peers.execute("block-export-add", export);
        for side in peers.sides() {
            let uri = "nbd+unix:///over?socket=DIR/nbd.sock";
            let told = run("nbdinfo", &side.folder, &["--size", uri]);
            assert_eq!(told.trim(), bytes.to_string());
            let last = format!("write -P 8 {} 512", bytes - 512);
            run("qemu-io", &side.folder, &["-f", "raw", "-c", "read -P 7 0 64k", "-c", &last, uri]);
        }
        peers.stop();
        peers.run("qemu-img", &["check", "-q", "-f", "qcow2", "DIR/over"]);
    }
}

/// A filter above the disk and its bitmaps get the new size. A node that shows a part of the disk refuses it.
#[test]
fn nodes_above_follow_the_size_of_an_overlay() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk0.img", 1);
    let server = ServerCommand::new(&scratch)
        .monitor("qmp")
        .arg("--object")
        .arg("throttle-group,id=t")
        .file("disk", &image, "")
        .arg("--blockdev")
        .arg("throttle,node-name=top,throttle-group=t,file=disk")
        .arg("--blockdev")
        .arg("raw,node-name=part,file=disk,size=65536,read-only=on")
        .export("top", "")
        .start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    qmp.execute("block-dirty-bitmap-add", json!({"node": "top", "name": "b"}));
    let over = scratch.path("over");
    let create = ["create", "-q", "-f", "qcow2"];
    let made = Command::new(tool("qemu-img")).args(create).arg(&over).arg("2M").status();
    assert!(made.expect("qemu-img runs").success());
    let file = json!({"driver": "file", "filename": over});
    let node = json!({"driver": "qcow2", "node-name": "over", "file": file});
    qmp.execute("blockdev-add", node);
    let snapshot = json!({"node": "disk", "overlay": "over"});
    let why = qmp.refused("blockdev-snapshot", snapshot.clone());
    let sizes =
        "'over' has 2097152 bytes, and 'disk' has 1048576: Permission conflict on node 'disk'";
    assert!(why.starts_with(sizes), "{why}");
    qmp.execute("blockdev-del", json!({"node-name": "part"}));
    qmp.execute("blockdev-snapshot", snapshot);
    let mut blk = BlkClient::connect(&server.socket("top"), 1, 16).expect("it serves");
    blk.write(3072, &[1; 65536]);
    let nodes = qmp.execute("query-named-block-nodes", json!({"flat": true}));
    let mut nodes = nodes.as_array().expect("a list").iter();
    let top = nodes.find(|node| node["node-name"] == "top").expect("it is there");
    assert_eq!(top["image"]["virtual-size"], 2 << 20);
    // The new part counts as written.
    assert_eq!(top["dirty-bitmaps"][0]["count"], 1 << 20);
    drop(blk);
    server.stop();
}

/// Adds a qcow2 node of that name and size, which lies on no other.
fn add_overlay(qmp: &mut Qmp, scratch: &Scratch, name: &str, size: &str) {
    let file = scratch.path(name);
    let create = ["create", "-q", "-f", "qcow2"];
    let made = Command::new(tool("qemu-img")).args(create).arg(&file).arg(size).status();
    assert!(made.expect("qemu-img runs").success());
    let file = json!({"driver": "file", "filename": file});
    qmp.execute("blockdev-add", json!({"driver": "qcow2", "node-name": name, "file": file}));
}

/// A daemon with the filter "top" on "disk", which has 1 MiB.
fn filtered<'a>(scratch: &'a Scratch, image: &Image) -> ServerCommand<'a> {
    ServerCommand::new(scratch)
        .monitor("qmp")
        .arg("--object")
        .arg("throttle-group,id=t")
        .file("disk", image, "")
        .arg("--blockdev")
        .arg("throttle,node-name=top,throttle-group=t,file=disk")
}

/// As `block_resize` does, a larger overlay leaves alone bitmaps above it that are in use, or would become too large.
#[test]
fn bitmaps_above_may_refuse_a_larger_overlay() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk0.img", 1);
    let server = nbd_server(filtered(&scratch, &image), &scratch, "").start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    add_overlay(&mut qmp, &scratch, "over", "2M");
    add_overlay(&mut qmp, &scratch, "huge", "8T");
    qmp.execute("block-dirty-bitmap-add", json!({"node": "top", "name": "b", "granularity": 512}));
    let export = json!({"type": "nbd", "id": "e", "node-name": "top", "writable": true,
        "bitmaps": ["b"]});
    qmp.execute("block-export-add", export);
    let snapshot = |overlay: &str| json!({"node": "disk", "overlay": overlay});
    let action = json!({"type": "blockdev-snapshot", "data": snapshot("over")});
    let actions = json!({"actions": [action, {"type": "abort", "data": {}}]});
    for (command, arguments) in [("transaction", actions), ("blockdev-snapshot", snapshot("over"))]
    {
        let why = qmp.refused(command, arguments);
        let busy =
            "'over' has 2097152 bytes, and 'disk' has 1048576: Bitmap 'b' of 'top' is in use";
        assert_eq!(why, busy);
    }
    let nodes = qmp.execute("query-named-block-nodes", json!({"flat": true}));
    let mut nodes = nodes.as_array().expect("a list").iter();
    let top = nodes.find(|node| node["node-name"] == "top").expect("it is there");
    assert_eq!(top["dirty-bitmaps"][0]["busy"], true);
    qmp.execute("block-export-del", json!({"id": "e", "mode": "hard"}));
    qmp.wait_for("BLOCK_EXPORT_DELETED");
    let why = qmp.refused("blockdev-snapshot", snapshot("huge"));
    assert!(why.contains("more than 2147483648 parts of 512 bytes"), "{why}");
    qmp.execute("blockdev-snapshot", snapshot("over"));
    server.stop();
}

/// An image keeps the size that its backing image had, also if a filter is between the two.
#[test]
fn a_backing_image_below_a_filter_keeps_its_size() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk0.img", 1);
    let server = filtered(&scratch, &image).start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    add_overlay(&mut qmp, &scratch, "same", "1M");
    add_overlay(&mut qmp, &scratch, "over", "2M");
    add_overlay(&mut qmp, &scratch, "image", "2M");
    let node = json!({"node": "top", "overlay": "image"});
    qmp.execute("blockdev-snapshot", node);
    let why = qmp.refused("blockdev-snapshot", json!({"node": "disk", "overlay": "over"}));
    let busy = "Node 'disk' is busy: node is used as backing hd of 'image'";
    assert!(why.ends_with(busy), "{why}");
    let why = qmp.refused("block_resize", json!({"node-name": "disk", "size": 2 << 20}));
    assert_eq!(why, busy);
    qmp.execute("blockdev-snapshot", json!({"node": "disk", "overlay": "same"}));
    server.stop();
}

/// A request of another disk that takes long delays no larger overlay.
#[test]
fn a_larger_overlay_waits_for_no_other_disk() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk0.img", 1);
    let server = filtered(&scratch, &image)
        .export("top", "")
        .arg("--blockdev")
        .arg("null-co,node-name=hangs,size=1048576,latency-ns=600000000000")
        .export("hangs", "stall-timeout-ms=100")
        .start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    add_overlay(&mut qmp, &scratch, "over", "2M");
    let mut blk = BlkClient::connect(&server.socket("hangs"), 1, 16).expect("it serves");
    let segments = vec![Segment { at: 0, len: 512, device_writes: true }];
    blk.submit(0, &Request { kind: request::IN, sector: 0, segments });
    eventually("a read that hangs", || server.log().contains("takes longer").then_some(()));
    qmp.execute("blockdev-snapshot", json!({"node": "disk", "overlay": "over"}));
    server.kill();
}

/// The inventory has a node that is defined inside another one, also after its snapshot was undone.
#[test]
fn the_undo_of_a_nested_nodes_snapshot_leaves_it_in_its_place() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk0.img", 1);
    let server = ServerCommand::new(&scratch)
        .monitor("qmp")
        .arg("--object")
        .arg("throttle-group,id=t")
        .arg("--blockdev")
        .arg(format!(
            "throttle,node-name=top,throttle-group=t,file.driver=file,file.node-name=disk,file.filename={}",
            image.path().display()
        ))
        .export("top", "")
        .start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    add_overlay(&mut qmp, &scratch, "over", "1M");
    let snapshot = json!({"node": "disk", "overlay": "over"});
    let action = json!({"type": "blockdev-snapshot", "data": snapshot});
    let actions = json!({"actions": [action, {"type": "abort", "data": {}}]});
    for _ in 0..2 {
        qmp.refused("transaction", actions.clone());
        let why = qmp.refused("blockdev-del", json!({"node-name": "disk"}));
        assert_eq!(why, "Node disk is not owned by the monitor");
    }
    qmp.execute("blockdev-snapshot", snapshot);
    let mut blk = BlkClient::connect(&server.socket("top"), 1, 16).expect("it serves");
    blk.write(0, &[1; 512]);
    assert_eq!(blk.read(0, 512), [1; 512]);
    drop(blk);
    server.stop();
}

#[test]
fn refused_snapshots() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk0.img", MIB);
    let server = daemon(&scratch, &image, "");
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let file = scratch.path("top.qcow2");
    for (arguments, words) in [
        (json!({"snapshot-file": file}), "Cannot find device='' nor node-name=''"),
        (
            json!({"node-name": "disk", "snapshot-file": file, "format": "raw"}),
            "Backing file not supported for file format 'raw'",
        ),
        (
            json!({"node-name": "disk", "snapshot-file": file, "format": "bogus"}),
            "Unknown file format 'bogus'",
        ),
        (json!({"node-name": "disk", "snapshot-file": file}), "New overlay node-name missing"),
        (
            json!({"node-name": "disk", "snapshot-file": file, "snapshot-node-name": "disk"}),
            "New overlay node-name already in use",
        ),
        (
            json!({
                "node-name": "disk", "snapshot-file": "/nonexistent/top.qcow2",
                "snapshot-node-name": "top",
            }),
            "Could not create '/nonexistent/top.qcow2': No such file or directory",
        ),
    ] {
        assert_eq!(qmp.refused("blockdev-snapshot-sync", arguments), words);
    }
    let why = qmp.refused("blockdev-snapshot", json!({"node": "disk", "overlay": "disk"}));
    assert_eq!(why, "The overlay does not support backing images");
    assert_eq!(qmp.execute("query-block-exports", json!({}))[0]["node-name"], "disk");
    server.stop();
}
