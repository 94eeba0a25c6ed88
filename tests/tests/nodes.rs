//! Commands that report and change nodes, compared with qemu-storage-daemon.

use std::fs;
use std::os::unix::fs::MetadataExt;

use crate::common;

use common::peers::{Peers, Side, run};
use integration::{Qmp, Scratch, ServerCommand, merged};
use serde_json::{Value, json};

/// A chain of three images: a raw one, and two of qcow2 that name theirs with and without the folder.
fn make_chain(peers: &mut Peers) {
    let create =
        |more: &[&'static str]| -> Vec<&'static str> { [&["create", "-q", "-f"], more].concat() };
    peers.run("qemu-img", &create(&["raw", "DIR/base.raw", "4M"]));
    peers.run("qemu-img", &create(&["qcow2", "-b", "base.raw", "-F", "raw", "DIR/mid.qcow2"]));
    let top = ["qcow2", "-o", "refcount_bits=8,lazy_refcounts=on,cluster_size=16k"];
    let top = [&top[..], &["-b", "DIR/mid.qcow2", "-F", "qcow2", "DIR/top.qcow2"]].concat();
    peers.run("qemu-img", &create(&top));
}

fn add(peers: &mut Peers, name: &str, file: &str) {
    let file = json!({"driver": "file", "filename": format!("DIR/{file}"), "node-name": format!("{name}-file")});
    peers.execute("blockdev-add", json!({"driver": "qcow2", "node-name": name, "file": file}));
}

/// The comparable facts about a node: without generated names, and with file names that are options parsed.
fn facts(mut node: Value) -> Value {
    node.as_object_mut().expect("a node").remove("children");
    compare_images(&mut node["image"]);
    for place in ["/file", "/backing_file"] {
        parse(node.pointer_mut(place));
    }
    node
}

fn compare_images(image: &mut Value) {
    // QEMU reports them since 10.2.
    image.as_object_mut().expect("an image").remove("limits");
    parse(image.get_mut("filename"));
    if image.get("backing-image").is_some() {
        compare_images(&mut image["backing-image"]);
    }
}

fn parse(filename: Option<&mut Value>) {
    let Some(filename) = filename else { return };
    let options = filename.as_str().and_then(|text| text.strip_prefix("json:"));
    if let Some(options) = options.map(|text| serde_json::from_str(text).expect("options")) {
        *filename = options;
    }
}

fn compare_nodes(peers: &mut Peers, names: &[&str]) {
    for flat in [false, true] {
        let [ours, theirs] = peers.sides().map(|side| {
            let nodes = side.ask("query-named-block-nodes", &json!({"flat": flat}));
            let nodes = nodes["return"].as_array().expect("a list").clone();
            let named =
                |name: &&str| nodes.iter().find(|node| node["node-name"] == **name).cloned();
            names.iter().filter_map(|name| named(name).map(facts)).collect::<Vec<_>>()
        });
        assert_eq!(ours.len(), names.len());
        assert_eq!(ours, theirs);
    }
}

#[test]
fn image_details_are_those_of_qemu_storage_daemon() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    make_chain(&mut peers);
    peers.run(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "-o", "compat=0.10", "DIR/over.qcow2", "4M"],
    );
    add(&mut peers, "top", "top.qcow2");
    add(&mut peers, "over", "over.qcow2");
    compare_nodes(&mut peers, &["top", "top-file", "over"]);
    peers.execute("blockdev-snapshot", json!({"node": "top", "overlay": "over"}));
    compare_nodes(&mut peers, &["over"]);
    assert_eq!(peers.execute("query-block", json!({})), json!([]));
    peers.stop();
}

/// A backing image is open for reading, and is opened for writing meanwhile, unless its file was added with `read-only=on`.
#[test]
fn the_backing_file_of_a_backing_image_is_named_anew() {
    let file = |name: &str| json!({"driver": "file", "filename": format!("DIR/{name}")});
    let image =
        |name: &str, file: Value| json!({"driver": "qcow2", "node-name": name, "file": file});
    // Whether the image was added by itself, whether its file was, and whether that file is read-only.
    for (is_apart, has_file, is_read_only) in [
        (false, false, false),
        (true, false, false),
        (true, true, true),
        (false, false, true),
        (true, false, true),
    ] {
        let scratch = Scratch::new();
        let mut peers = Peers::new(&scratch);
        make_chain(&mut peers);
        let mut mid = file("mid.qcow2");
        if is_read_only {
            mid["read-only"] = true.into();
        }
        if has_file {
            peers.execute("blockdev-add", merged(mid, &json!({"node-name": "mid-file"})));
            mid = "mid-file".into();
        }
        let mut backing = image("mid", mid);
        if is_apart {
            peers.execute("blockdev-add", merged(backing, &json!({"read-only": true})));
            backing = "mid".into();
        }
        let top = merged(image("top", file("top.qcow2")), &json!({"backing": backing}));
        peers.execute("blockdev-add", top);
        let change = json!({"device": "top", "image-node-name": "mid", "backing-file": "DIR/new"});
        let answer = peers.both("change-backing-file", change);
        assert_eq!(answer.get("error").is_some(), is_read_only, "{answer}");
        peers.stop();
        for side in peers.sides() {
            let info = run("qemu-img", &side.folder, &["info", "--output=json", "DIR/mid.qcow2"]);
            assert_eq!(info.contains("/new\""), !is_read_only, "{info}");
        }
    }
}

/// The header tells the format from now on: it is not to be guessed from what a guest writes.
#[test]
fn a_backing_file_is_named_with_its_format() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    peers.run("qemu-img", &["create", "-q", "-f", "qcow2", "DIR/base.qcow2", "1M"]);
    peers.run("qemu-img", &["create", "-q", "-f", "qcow2", "DIR/top.qcow2", "1M"]);
    add(&mut peers, "base", "base.qcow2");
    let file = json!({"driver": "file", "filename": "DIR/top.qcow2"});
    let top = json!({"driver": "qcow2", "node-name": "top", "file": file, "backing": "base"});
    peers.execute("blockdev-add", top);
    let name = json!({"device": "top", "image-node-name": "top", "backing-file": "DIR/base.qcow2"});
    peers.execute("change-backing-file", name);
    peers.stop();
    for side in peers.sides() {
        let info = run("qemu-img", &side.folder, &["info", "--output=json", "DIR/top.qcow2"]);
        let info: Value = serde_json::from_str(&info).expect("JSON");
        assert_eq!(info["backing-filename-format"], "qcow2");
    }
}

/// The header's format was that of another image.
#[test]
fn a_backing_file_is_named_with_the_format_of_its_node() {
    let scratch = Scratch::new();
    let create = |arguments: &[&str]| {
        let create = [&["create", "-q", "-f"], arguments].concat();
        run("qemu-img", scratch.dir(), &create);
    };
    create(&["raw", "DIR/base.raw", "1M"]);
    create(&["qcow2", "DIR/base.qcow2", "1M"]);
    create(&["qcow2", "-b", "DIR/base.raw", "-F", "raw", "DIR/top.qcow2"]);
    let server = ServerCommand::new(&scratch).monitor("qmp").start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let image = |name: &str| {
        let file = json!({"driver": "file", "filename": scratch.path(&format!("{name}.qcow2"))});
        json!({"driver": "qcow2", "node-name": name, "file": file})
    };
    let backing = json!({"driver": "throttle", "throttle-group": "t", "file": image("base")});
    qmp.execute("object-add", json!({"qom-type": "throttle-group", "id": "t"}));
    qmp.execute("blockdev-add", merged(image("top"), &json!({"backing": backing})));
    let name = json!({"device": "top", "image-node-name": "top",
        "backing-file": scratch.path("base.qcow2")});
    qmp.execute("change-backing-file", name);
    server.stop();
    let info = run("qemu-img", scratch.dir(), &["info", "--output=json", "DIR/top.qcow2"]);
    let info: Value = serde_json::from_str(&info).expect("JSON");
    assert_eq!(info["backing-filename-format"], "qcow2");
}

#[test]
fn a_backing_file_is_named_anew() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    make_chain(&mut peers);
    add(&mut peers, "top", "top.qcow2");
    let change = |device: &str, image: &str, name: &str| json!({"device": device, "image-node-name": image, "backing-file": name});
    for (device, image) in
        [("gone", "top"), ("top", "gone"), ("top", "top-file"), ("top-file", "top-file")]
    {
        peers.both("change-backing-file", change(device, image, "new"));
    }
    // One name that fits into the first sector, and others that alternate between the places behind.
    let long = format!("DIR/{}", ["x/"; 200].concat());
    for name in [
        "b",
        &format!("{long}1"),
        &format!("{long}2"),
        "DIR/other.qcow2",
        &format!("{long}3"),
        "mid.qcow2",
    ] {
        peers.execute("change-backing-file", change("top", "top", name));
        // QEMU does not notice that the name is again that of the backing node.
        if name != "mid.qcow2" {
            compare_nodes(&mut peers, &["top"]);
        }
    }
    // Changed names survive the move of a table, which writes a part of the header.
    peers.serve("top");
    peers.io(&["write -P 7 0 1M"]);
    peers.execute("block-export-del", json!({"id": "e"}));
    peers.wait_for("BLOCK_EXPORT_DELETED");
    peers.execute("block_resize", json!({"node-name": "top", "size": 8u64 << 30}));
    peers.stop();
    for side in peers.sides() {
        let info = run("qemu-img", &side.folder, &["info", "--output=json", "DIR/top.qcow2"]);
        let info: Value = serde_json::from_str(&info).expect("JSON");
        assert_eq!(info["backing-filename"], "mid.qcow2");
        assert_eq!(info["backing-filename-format"], "qcow2");
        assert_eq!(info["virtual-size"], 8u64 << 30);
        run("qemu-img", &side.folder, &["check", "-q", "DIR/top.qcow2"]);
    }
}

#[test]
fn a_write_threshold_is_reported_once() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    peers.run("qemu-img", &["create", "-q", "-f", "raw", "DIR/disk.raw", "4M"]);
    let file = json!({"driver": "file", "filename": "DIR/disk.raw", "node-name": "file"});
    peers.execute("blockdev-add", json!({"driver": "raw", "node-name": "disk", "file": file}));
    let set = |node: &str, bytes: u64| json!({"node-name": node, "write-threshold": bytes});
    peers.both("block-set-write-threshold", set("gone", 1));
    peers.execute("block-set-write-threshold", set("file", 1 << 20));
    peers.serve("disk");
    peers.io(&["write 0 1M"]);
    compare_nodes(&mut peers, &["file", "disk"]);
    peers.io(&["write 1020k 8k", "write 2M 1M"]);
    let data = peers.wait_for("BLOCK_WRITE_THRESHOLD");
    let expected =
        json!({"node-name": "file", "amount-exceeded": 4096, "write-threshold": 1 << 20});
    assert_eq!(data, expected);
    // The node is gone, and can be added again, under a node in use.
    compare_nodes(&mut peers, &["file", "disk"]);
    peers.execute("block-set-write-threshold", set("disk", 3 << 20));
    peers.io(&["write 3M 64k"]);
    assert_eq!(peers.wait_for("BLOCK_WRITE_THRESHOLD")["node-name"], "disk");
    peers.execute("block-set-write-threshold", set("disk", 512));
    peers.execute("block-set-write-threshold", set("disk", 0));
    compare_nodes(&mut peers, &["disk"]);
    peers.stop();
}

#[test]
fn a_null_disk_is_no_larger_than_in_qemu_storage_daemon() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    let most = i64::MAX & !((1 << 30) - 1);
    for (name, size, is_granted) in
        [("a", most, true), ("b", most + 1, false), ("c", i64::MAX, false)]
    {
        let node = json!({"driver": "null-co", "node-name": name, "size": size});
        let answer = peers.both("blockdev-add", node);
        assert_eq!(answer.get("return").is_some(), is_granted, "{answer}");
    }
    peers.stop();
}

/// The message says which of several items is wrong.
#[test]
fn items_of_lists_are_named_in_errors() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    for name in ["n", "m"] {
        let null = json!({"driver": "null-co", "node-name": name, "size": 1 << 20});
        peers.execute("blockdev-add", null);
    }
    peers.execute("block-dirty-bitmap-add", json!({"node": "n", "name": "b"}));
    let addr = json!({"type": "unix", "data": {"path": "DIR/nbd.sock"}});
    peers.execute("nbd-server-start", json!({"addr": addr}));
    let add = |data: Value| json!({"type": "block-dirty-bitmap-add", "data": data});
    let right = add(json!({"node": "n", "name": "new"}));
    for (wrong, message) in [
        (json!(5), "Invalid parameter type for 'actions[1]', expected: object"),
        (json!({"data": {}}), "Parameter 'actions[1].type' is missing"),
        (json!({"type": "abort"}), "Parameter 'actions[1].data' is missing"),
        (add(json!(5)), "Invalid parameter type for 'actions[1].data', expected: object"),
        (add(json!({"name": "x"})), "Parameter 'actions[1].data.node' is missing"),
        (
            add(json!({"node": 5, "name": "x"})),
            "Invalid parameter type for 'actions[1].data.node', expected: string",
        ),
        (
            json!({"type": "blockdev-backup", "data": {"device": "n", "target": "m", "sync": "full", "speed": "x"}}),
            "Invalid parameter type for 'actions[1].data.speed', expected: integer",
        ),
    ] {
        let answer = peers.both("transaction", json!({"actions": [right, wrong]}));
        assert_eq!(answer["error"]["desc"], message);
    }
    let merge = json!({"node": "n", "target": "b", "bitmaps": ["b", {"node": "n"}]});
    let answer = peers.both("block-dirty-bitmap-merge", merge);
    assert_eq!(answer["error"]["desc"], "Parameter 'bitmaps[1].name' is missing");
    let export = json!({"type": "nbd", "id": "e", "node-name": "n", "bitmaps": [{"node": "n"}]});
    let answer = peers.both("block-export-add", export);
    assert_eq!(answer["error"]["desc"], "Parameter 'bitmaps[0].name' is missing");
    let mirror = json!({"job-id": "j", "device": "n", "target": "m", "sync": "bitmap"});
    let answer = peers.both("blockdev-mirror", mirror);
    assert_eq!(answer["error"]["desc"], "Sync mode 'bitmap' not supported");
    peers.stop();
}

/// A file below an image format grows with the image, and is counted when its name is removed. `wr_highest_offset`
/// is how far writes have reached, which programs for thin volumes ask for.
#[test]
fn sizes_of_a_growing_file_are_those_of_now() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    peers.run("qemu-img", &["create", "-q", "-f", "qcow2", "DIR/disk.qcow2", "64M"]);
    add(&mut peers, "disk", "disk.qcow2");
    let addr = json!({"type": "unix", "data": {"path": "DIR/nbd.sock"}});
    peers.execute("nbd-server-start", json!({"addr": addr}));
    let export = json!({"type": "nbd", "id": "e", "node-name": "disk", "writable": true});
    peers.execute("block-export-add", export);
    let uri = "nbd+unix:///disk?socket=DIR/nbd.sock";
    peers.run("qemu-io", &["-f", "raw", "-c", "write 1M 4M", "-c", "flush", uri]);
    for side in peers.sides() {
        let file = side.path("disk.qcow2");
        let metadata = fs::metadata(&file).expect("it is there");
        let [length, used] = [metadata.len().next_multiple_of(512), metadata.blocks() * 512];
        assert!(length > 4 << 20 && used > 4 << 20);
        let sizes = |side: &mut Side, name: &str| {
            let nodes = side.ask("query-named-block-nodes", &json!({}));
            let nodes = nodes["return"].as_array().expect("a list").clone();
            let node = nodes.iter().find(|node| node["node-name"] == name).expect("the node");
            ["virtual-size", "actual-size"].map(|size| node["image"][size].as_u64())
        };
        assert_eq!(sizes(side, "disk-file"), [Some(length), Some(used)]);
        assert_eq!(sizes(side, "disk"), [Some(64 << 20), Some(used)]);
        fs::remove_file(&file).expect("it is there");
        assert_eq!(sizes(side, "disk-file"), [Some(length), Some(used)]);
        let stats = side.ask("query-blockstats", &json!({"query-nodes": true}));
        let highest = |name: &str| {
            let nodes = stats["return"].as_array().expect("a list");
            let node = nodes.iter().find(|node| node["node-name"] == name).expect("the node");
            node["stats"]["wr_highest_offset"].as_u64().expect("a number")
        };
        assert!((4 << 20..=length).contains(&highest("disk-file")), "{}", highest("disk-file"));
    }
}

/// What strangers' images make long is cut short, and counted. Images behind each other are described as often as QSD does, or not.
#[test]
fn a_description_has_bounded_lists_and_chains() {
    let scratch = Scratch::new();
    let server = ServerCommand::new(&scratch).monitor("qmp").start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    qmp.execute("blockdev-add", json!({"driver": "null-co", "node-name": "f0", "size": 1 << 20}));
    for n in 0..1030 {
        let bitmap = json!({"node": "f0", "name": format!("b{n}")});
        qmp.execute("block-dirty-bitmap-add", bitmap);
    }
    let nodes = qmp.execute("query-named-block-nodes", json!({}));
    assert_eq!(nodes[0]["dirty-bitmaps"].as_array().map(Vec::len), Some(1024));
    assert_eq!(nodes[0]["x-dirty-bitmaps-left-out"], 6);
    // Behind the n-th filter lie n images: 4095 for 90 filters, 4186 for 91.
    for n in 1..=91 {
        let file = format!("f{}", n - 1);
        let filter = json!({"driver": "copy-on-read", "node-name": format!("f{n}"), "file": file});
        qmp.execute("blockdev-add", filter);
        if n == 90 {
            let nodes = qmp.execute("query-named-block-nodes", json!({}));
            assert_eq!(nodes.as_array().map(Vec::len), Some(91));
        }
    }
    let refusal = qmp.refused("query-named-block-nodes", json!({}));
    assert!(refusal.contains("more than 4096 images") && refusal.contains("flat"), "{refusal}");
    let nodes = qmp.execute("query-named-block-nodes", json!({"flat": true}));
    assert_eq!(nodes.as_array().map(Vec::len), Some(92));
    server.stop();
}
