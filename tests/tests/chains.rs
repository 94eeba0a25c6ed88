//! `block-stream` and `block-commit`: chains of images are shortened while in use.

use crate::common;

use std::path::Path;

use common::peers::{Peers, run};
use common::{BLOCKS, Load, MIB, check, daemon, wait_for_end, wait_for_status};
use integration::nbd::{nbd_export, nbd_server, nbd_uri};
use integration::{BlkClient, Image, Qmp, Scratch, Server, ServerCommand, eventually, pattern};
use serde_json::{Value, json};

fn snapshot(qmp: &mut Qmp, scratch: &Scratch, below: &str, name: &str) {
    let file = scratch.path(&format!("{name}.qcow2"));
    let snapshot = json!({"node-name": below, "snapshot-file": file, "snapshot-node-name": name});
    qmp.execute("blockdev-snapshot-sync", snapshot);
}

/// MiB at the disk's end that the load never writes.
const QUIET: u64 = 4;

/// A disk under load with overlays of these names. The first one has data that no later one ever has: a job that copies
/// 1 MiB a second from there is still at it however much the load has overwritten.
fn chain(scratch: &Scratch, names: &[&str], seed: u64) -> (Image, Server, Qmp, Load) {
    let image = Image::filled(scratch, "disk0.img", MIB + QUIET);
    let server = daemon(scratch, &image, "");
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let mut blk = BlkClient::connect(&server.socket("disk"), 2, 16).expect("the export serves");
    let mut names = names.iter();
    let mut below = *names.next().expect("an overlay");
    snapshot(&mut qmp, scratch, "disk", below);
    for block in BLOCKS..BLOCKS + (QUIET << 20) / pattern::BLOCK as u64 {
        blk.write(block * 8, &pattern::block(block, 1));
    }
    let load = Load::start(blk, seed);
    load.go_on();
    for name in names {
        snapshot(&mut qmp, scratch, below, name);
        load.go_on();
        below = name;
    }
    (image, server, qmp, load)
}

/// The disk as seen through an image of the chain.
fn flat(scratch: &Scratch, name: &str) -> Image {
    let raw = scratch.path("flat.img");
    let (from, to) = (format!("DIR/{name}"), "DIR/flat.img");
    run("qemu-img", scratch.dir(), &["check", "-q", &from]);
    run("qemu-img", scratch.dir(), &["convert", "-O", "raw", &from, to]);
    Image::existing(&raw)
}

fn backing_of(scratch: &Scratch, name: &str) -> Value {
    let info = ["info", "--output=json", &format!("DIR/{name}")];
    let info: Value = serde_json::from_str(&run("qemu-img", scratch.dir(), &info)).expect("JSON");
    info["backing-filename"].clone()
}

#[test]
fn a_stream_copies_from_all_backing_images() {
    let scratch = Scratch::new();
    let (_, server, mut qmp, load) = chain(&scratch, &["a", "b", "c"], 1);
    // An intermediate image, with a pause and a limit that is lifted, then the topmost one.
    let stream = json!({"job-id": "s", "device": "b", "base-node": "disk", "speed": 1 << 20});
    qmp.execute("block-stream", stream);
    for name in ["disk", "a", "b"] {
        let why = qmp.refused("blockdev-del", json!({"node-name": name}));
        assert!(why.contains("used as backing"), "{why}");
    }
    qmp.execute("job-pause", json!({"id": "s"}));
    load.go_on();
    assert_eq!(qmp.execute("query-block-jobs", json!({}))[0]["paused"], true);
    qmp.execute("job-resume", json!({"id": "s"}));
    qmp.execute("block-job-set-speed", json!({"device": "s", "speed": 0}));
    wait_for_end(&mut qmp, "s");
    load.go_on();
    qmp.execute("blockdev-del", json!({"node-name": "a"}));
    std::fs::remove_file(scratch.path("a.qcow2")).expect("the image");
    qmp.execute("block-stream", json!({"job-id": "s", "device": "c", "auto-finalize": false}));
    wait_for_status(&mut qmp, "s", "pending");
    load.go_on();
    qmp.execute("job-finalize", json!({"id": "s"}));
    wait_for_end(&mut qmp, "s");
    load.go_on();
    for node in ["b", "disk"] {
        qmp.execute("blockdev-del", json!({"node-name": node}));
    }
    // An image without a backing file can get an overlay.
    snapshot(&mut qmp, &scratch, "c", "d");
    load.go_on();
    let log = load.finish();
    server.stop();
    assert_eq!(backing_of(&scratch, "c.qcow2"), Value::Null);
    std::fs::remove_file(scratch.path("b.qcow2")).expect("the image");
    check(&flat(&scratch, "d.qcow2"), &log, log.len());
}

#[test]
fn a_stream_of_a_throttle_copies_into_the_image_below_it() {
    let scratch = Scratch::new();
    Image::filled(&scratch, "base.img", MIB);
    run(
        "qemu-img",
        scratch.dir(),
        &["create", "-q", "-f", "qcow2", "-b", "base.img", "-F", "raw", "DIR/top.qcow2"],
    );
    let server = ServerCommand::new(&scratch).monitor("qmp").start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    qmp.execute("object-add", json!({"qom-type": "throttle-group", "id": "group"}));
    let file = json!({"driver": "file", "filename": scratch.path("top.qcow2")});
    qmp.execute("blockdev-add", json!({"driver": "qcow2", "node-name": "top", "file": file}));
    let throttle = json!({"driver": "throttle", "node-name": "limited", "throttle-group": "group", "file": "top"});
    qmp.execute("blockdev-add", throttle);
    qmp.execute("block-stream", json!({"job-id": "s", "device": "limited"}));
    wait_for_end(&mut qmp, "s");
    server.stop();
    assert_eq!(backing_of(&scratch, "top.qcow2"), Value::Null);
    run("qemu-img", scratch.dir(), &["compare", "DIR/base.img", "DIR/top.qcow2"]);
}

/// The throttle lies on the base afterwards, also in the next process.
#[test]
fn a_chain_below_a_throttle_is_committed() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "base.img", MIB);
    let top = ["create", "-q", "-f", "qcow2", "-b", "base.img", "-F", "raw", "DIR/top.qcow2"];
    run("qemu-img", scratch.dir(), &top);
    let path = |name: &str| scratch.path(name).display().to_string();
    let (file, base) = (path("top.qcow2"), path("base.img"));
    let command = ServerCommand::new(&scratch)
        .monitor("qmp")
        .args(["--object", "throttle-group,id=group"])
        .args(["--blockdev", &format!("file,node-name=base,filename={base}")])
        .args([
            "--blockdev",
            &format!("qcow2,node-name=top,file.driver=file,file.filename={file},backing=base"),
        ])
        .args(["--blockdev", "throttle,node-name=disk,throttle-group=group,file=top"]);
    let mut server = command.export("disk", "num-queues=2").start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let blk = BlkClient::connect(&server.socket("disk"), 2, 16).expect("the export serves");
    let load = Load::start(blk, 6);
    load.go_on();
    let named = json!({"device": "top", "image-node-name": "top", "backing-file": base});
    qmp.execute("change-backing-file", named);
    qmp.execute("block-commit", json!({"job-id": "j", "device": "top"}));
    qmp.wait_for("BLOCK_JOB_READY");
    // The job's filter is a node above.
    let why = qmp.refused("block-commit", json!({"job-id": "k", "device": "top"}));
    assert_eq!(why, "Need a root block node");
    load.go_on();
    qmp.execute("job-complete", json!({"id": "j"}));
    wait_for_end(&mut qmp, "j");
    qmp.execute("blockdev-del", json!({"node-name": "top"}));
    std::fs::remove_file(&file).expect("the image");
    load.go_on();
    drop(qmp);
    server.upgrade();
    load.go_on();
    let log = load.finish();
    server.stop();
    check(&image, &log, log.len());
}

#[test]
fn a_stream_that_is_cancelled_leaves_the_chain_as_it_was() {
    let scratch = Scratch::new();
    let (_, server, mut qmp, load) = chain(&scratch, &["a", "b"], 2);
    qmp.execute("block-stream", json!({"job-id": "s", "device": "b", "speed": 1 << 20}));
    load.go_on();
    qmp.execute("job-cancel", json!({"id": "s"}));
    assert_eq!(qmp.wait_for("BLOCK_JOB_CANCELLED")["type"], "stream");
    load.go_on();
    let log = load.finish();
    server.stop();
    let behind = scratch.path("a.qcow2").display().to_string();
    assert_eq!(backing_of(&scratch, "b.qcow2"), behind.as_str());
    check(&flat(&scratch, "b.qcow2"), &log, log.len());
}

#[test]
fn a_commit_moves_data_into_a_backing_image() {
    let scratch = Scratch::new();
    let (image, server, mut qmp, load) = chain(&scratch, &["a", "b", "c", "d"], 3);
    // Intermediate images, into a raw image and into a qcow2 image.
    qmp.execute("block-commit", json!({"job-id": "j", "device": "d", "top-node": "a"}));
    wait_for_end(&mut qmp, "j");
    load.go_on();
    let commit = json!({"job-id": "j", "device": "d", "top-node": "c", "base-node": "b"});
    qmp.execute("block-commit", commit);
    wait_for_end(&mut qmp, "j");
    for node in ["a", "c"] {
        qmp.execute("blockdev-del", json!({"node-name": node}));
        std::fs::remove_file(scratch.path(&format!("{node}.qcow2"))).expect("the image");
    }
    load.go_on();
    // The topmost image: first cancelled when ready, then completed.
    for complete in [false, true] {
        let commit = json!({"job-id": "j", "device": "d", "base-node": "b"});
        qmp.execute("block-commit", commit);
        assert_eq!(qmp.wait_for("BLOCK_JOB_READY")["type"], "commit");
        load.go_on();
        match complete {
            true => {
                qmp.execute("job-complete", json!({"id": "j"}));
                wait_for_end(&mut qmp, "j");
            }
            false => {
                qmp.execute("job-cancel", json!({"id": "j"}));
                qmp.wait_for("BLOCK_JOB_CANCELLED");
            }
        }
        load.go_on();
        let expected = if complete { "b" } else { "d" };
        let exports = qmp.execute("query-block-exports", json!({}));
        assert_eq!(exports[0]["node-name"], expected);
    }
    qmp.execute("blockdev-del", json!({"node-name": "d"}));
    // Down to the first image.
    qmp.execute("block-commit", json!({"job-id": "j", "device": "b"}));
    qmp.wait_for("BLOCK_JOB_READY");
    load.go_on();
    qmp.execute("job-complete", json!({"id": "j"}));
    wait_for_end(&mut qmp, "j");
    load.go_on();
    qmp.execute("blockdev-del", json!({"node-name": "b"}));
    let log = load.finish();
    server.stop();
    check(&image, &log, log.len());
}

/// Images with different sizes, cluster sizes and zeroes.
fn make_images(peers: &mut Peers, size_of_b: &str) {
    for arguments in [
        &["create", "-q", "-f", "raw", "DIR/base.raw", "3M"][..],
        &["create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "DIR/a.qcow2", "5M"],
        &[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-o",
            "cluster_size=4k",
            "-b",
            "a.qcow2",
            "-F",
            "qcow2",
            "DIR/b.qcow2",
            size_of_b,
        ],
        &["create", "-q", "-f", "qcow2", "-b", "b.qcow2", "-F", "qcow2", "DIR/c.qcow2", "6M"],
    ] {
        peers.run("qemu-img", arguments);
    }
    for arguments in [
        ["-f", "raw", "-c", "write -P 1 0 3M", "DIR/base.raw"],
        ["-f", "qcow2", "-c", "write -P 2 1M 3M", "DIR/a.qcow2"],
        ["-f", "qcow2", "-c", "write -z 1500k 600k", "DIR/a.qcow2"],
        ["-f", "qcow2", "-c", "write -P 3 4100k 100k", "DIR/a.qcow2"],
        ["-f", "qcow2", "-c", "write -P 4 2052k 700k", "DIR/b.qcow2"],
        ["-f", "qcow2", "-c", "write -z 100k 10k", "DIR/b.qcow2"],
        ["-f", "qcow2", "-c", "write -P 5 5M 1k", "DIR/c.qcow2"],
    ] {
        peers.run("qemu-io", &arguments);
    }
    peers.run("qemu-img", &["convert", "-O", "raw", "DIR/c.qcow2", "DIR/expected.raw"]);
}

/// Each way to shorten the chain: the command, its arguments, and whether it needs a completion.
fn ways() -> Vec<(&'static str, Value, bool)> {
    vec![
        ("block-stream", json!({"device": "c"}), false),
        ("block-stream", json!({"device": "c", "base-node": "base"}), false),
        ("block-stream", json!({"device": "c", "bottom": "b"}), false),
        ("block-stream", json!({"device": "b", "base": "DIR/base.raw"}), false),
        ("block-stream", json!({"device": "a"}), false),
        ("block-commit", json!({"device": "c", "top-node": "a"}), false),
        ("block-commit", json!({"device": "c", "top-node": "b"}), false),
        (
            "block-commit",
            json!({"device": "c", "top-node": "b", "base-node": "a", "backing-file": "DIR/a.qcow2"}),
            false,
        ),
        ("block-commit", json!({"device": "c", "base-node": "b"}), true),
        ("block-commit", json!({"device": "c"}), true),
    ]
}

fn add_chain(ask: &mut impl FnMut(&str, Value)) {
    let file = |name: &str| json!({"driver": "file", "filename": format!("DIR/{name}")});
    ask("blockdev-add", json!({"driver": "raw", "node-name": "base", "file": file("base.raw")}));
    for (name, below) in [("a", "base"), ("b", "a"), ("c", "b")] {
        let file = file(&format!("{name}.qcow2"));
        ask(
            "blockdev-add",
            json!({"driver": "qcow2", "node-name": name, "file": file, "backing": below}),
        );
    }
}

#[test]
fn chains_become_the_same_as_in_qemu_storage_daemon() {
    for (command, mut arguments, completes) in ways() {
        let scratch = Scratch::new();
        let mut peers = Peers::new(&scratch);
        make_images(&mut peers, "5M");
        add_chain(&mut |command, arguments| drop(peers.execute(command, arguments)));
        arguments["job-id"] = "j".into();
        peers.execute(command, arguments.clone());
        if completes {
            peers.wait_for("BLOCK_JOB_READY");
            peers.execute("job-complete", json!({"id": "j"}));
        }
        peers.wait_for("BLOCK_JOB_COMPLETED");
        let [ours, theirs] = peers.sides().map(|side| {
            eventually("the job's end", || {
                (side.ask("query-jobs", &json!({}))["return"] == json!([])).then_some(())
            });
            let nodes = side.ask("query-named-block-nodes", &json!({"flat": true}));
            let nodes = nodes["return"].as_array().expect("a list").clone();
            let facts = ["a", "b", "c"].map(|name| {
                let node = nodes.iter().find(|node| node["node-name"] == name).expect("a node");
                let image = &node["image"];
                // For a node whose backing node was replaced, QEMU reports options.
                let backing = node["backing_file"].as_str().map(|name| match name {
                    name if name.contains("c.qcow2") => "c",
                    name if name.contains("b.qcow2") => "b",
                    name if name.contains("a.qcow2") => "a",
                    _ => "base",
                });
                // QEMU may report all options of the base where a path suffices.
                let named = image["backing-filename"].as_str().map(|name| {
                    let options = name.strip_prefix("json:");
                    let options = options
                        .map(|text| -> Value { serde_json::from_str(text).expect("options") });
                    options.map_or_else(
                        || name.to_owned(),
                        |options| options["file"]["filename"].as_str().expect("a file").to_owned(),
                    )
                });
                (backing, named, image["backing-filename-format"].clone())
            });
            facts.to_vec()
        });
        assert_eq!(ours, theirs, "{command} {arguments}");
        peers.stop();
        // The topmost image that is left has the same contents.
        let top = match completes {
            true if arguments.get("base-node").is_some() => "b.qcow2",
            true => "base.raw",
            false => "c.qcow2",
        };
        for side in peers.sides() {
            let top = format!("DIR/{top}");
            run("qemu-img", &side.folder, &["compare", "-q", "DIR/expected.raw", &top]);
            for image in ["DIR/a.qcow2", "DIR/b.qcow2", "DIR/c.qcow2"] {
                run("qemu-img", &side.folder, &["check", "-q", image]);
            }
        }
    }
}

/// Only the topmost image is added by an option. The others are found in the headers and have generated names.
#[test]
fn a_chain_that_is_found_in_headers_is_shortened() {
    let ways = [
        ("block-commit", json!({"device": "c", "top": "DIR/b.qcow2"})),
        ("block-commit", json!({"device": "c", "top": "DIR/b.qcow2", "base": "DIR/a.qcow2"})),
        ("block-stream", json!({"device": "c", "base": "DIR/a.qcow2"})),
        ("block-stream", json!({"device": "c"})),
    ];
    for (command, mut arguments) in ways {
        let scratch = Scratch::new();
        let mut peers = Peers::new(&scratch);
        make_images(&mut peers, "5M");
        let file = json!({"driver": "file", "filename": "DIR/c.qcow2"});
        let node = json!({"driver": "qcow2", "node-name": "c", "file": file});
        peers.execute("blockdev-add", node);
        for (top, base) in [("a", "b"), ("b", "b"), ("b", "c"), ("c", "c")] {
            let [top, base] = [top, base].map(|name| format!("DIR/{name}.qcow2"));
            let upwards = json!({"job-id": "j", "device": "c", "top": top, "base": base});
            let refused = peers.both("block-commit", upwards);
            assert_ne!(refused["error"], Value::Null);
        }
        arguments["job-id"] = "j".into();
        peers.execute(command, arguments);
        peers.wait_for("BLOCK_JOB_COMPLETED");
        peers.stop();
        for side in peers.sides() {
            let compare = ["compare", "-q", "DIR/expected.raw", "DIR/c.qcow2"];
            run("qemu-img", &side.folder, &compare);
        }
    }
}

/// A job is refused because of an export of another image of the chain, or not, as by QSD: answers, and events before.
#[test]
fn exports_of_a_chain_exclude_the_same_jobs_as_in_qemu_storage_daemon() {
    let jobs = [
        ("block-stream", json!({"device": "c"})),
        ("block-stream", json!({"device": "c", "base-node": "a"})),
        ("block-commit", json!({"device": "c", "top-node": "b"})),
        ("block-commit", json!({"device": "c", "top-node": "b", "base-node": "a"})),
        ("block-commit", json!({"device": "c"})),
    ];
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    make_images(&mut peers, "5M");
    add_chain(&mut |command, arguments| drop(peers.execute(command, arguments)));
    let addr = json!({"type": "unix", "data": {"path": "DIR/nbd.sock"}});
    peers.execute("nbd-server-start", json!({"addr": addr}));
    for node in ["base", "a", "b"] {
        peers.both("blockdev-del", json!({"node-name": node}));
    }
    let mut refused = 0;
    for (node, writable) in [("a", true), ("a", false), ("b", true), ("b", false)] {
        let export = json!({"type": "nbd", "id": "e", "node-name": node, "writable": writable});
        peers.execute("block-export-add", export);
        for (command, arguments) in &jobs {
            let mut arguments = arguments.clone();
            arguments["job-id"] = "j".into();
            arguments["speed"] = 1.into();
            // Granted ones would change the chain. In QSD, a writer makes a commit of an intermediate image an active one.
            let is_active = writable && arguments["top-node"] == node;
            let answer = peers.theirs.ask(command, &arguments);
            if answer.get("error").is_some() && !is_active {
                let ours = peers.ours.ask(command, &arguments);
                assert_eq!(ours, answer, "{command} {arguments} with an export of {node}");
                for status in ["created", "null"] {
                    assert_eq!(peers.ours.qmp.wait_for("JOB_STATUS_CHANGE")["status"], status);
                }
                refused += 1;
                continue;
            }
            peers.theirs.ask("block-job-cancel", &json!({"device": "j", "force": true}));
            eventually("the job's end", || {
                let jobs = peers.theirs.ask("query-jobs", &json!({}));
                (jobs["return"] == json!([])).then_some(())
            });
        }
        peers.execute("block-export-del", json!({"id": "e", "mode": "hard"}));
        peers.wait_for("BLOCK_EXPORT_DELETED");
    }
    assert!(refused > 6, "{refused}");
    // An export of the topmost image hinders none.
    let export = json!({"type": "nbd", "id": "e", "node-name": "c", "writable": true});
    peers.execute("block-export-add", export);
    peers.execute("block-commit", json!({"job-id": "j", "device": "c"}));
    peers.wait_for("BLOCK_JOB_READY");
    peers.execute("block-job-cancel", json!({"device": "j", "force": true}));
    peers.wait_for("BLOCK_JOB_CANCELLED");
    peers.stop();
}

/// A backing image that is shorter than its overlay and its base hides the base beyond its end.
#[test]
fn a_shorter_image_hides_its_base_beyond_its_end() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    make_images(&mut peers, "4M");
    add_chain(&mut |command, arguments| drop(peers.ours.ask(command, &arguments)));
    let commit = json!({"job-id": "j", "device": "c", "top-node": "b", "base-node": "a"});
    let refused = peers.ours.ask("block-commit", &commit);
    assert!(
        refused["error"]["desc"].as_str().is_some_and(|why| why.contains("hides")),
        "{refused}"
    );
    let stream = json!({"job-id": "j", "device": "c", "base-node": "a"});
    assert_eq!(peers.ours.ask("block-stream", &stream), json!({"return": {}}));
    wait_for_end(&mut peers.ours.qmp, "j");
    peers.stop();
    let compare = ["compare", "-q", "DIR/expected.raw", "DIR/c.qcow2"];
    run("qemu-img", &peers.ours.folder, &compare);
}

/// Copies of the common images.
fn copy_images(from: &Path, to: &Path) {
    for name in ["base.raw", "a.qcow2", "b.qcow2", "c.qcow2"] {
        std::fs::copy(from.join(name), to.join(name)).expect("a copy");
    }
}

#[test]
fn a_kill_at_any_moment_keeps_the_chains_contents() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    make_images(&mut peers, "5M");
    peers.stop();
    let made = peers.ours.folder.clone();
    for (command, mut arguments, completes) in ways() {
        // Shortly after the start, half-way, and at the moment of the event.
        for moment in ["running", "copying", "BLOCK_JOB_COMPLETED"] {
            let scratch = Scratch::new();
            copy_images(&made, scratch.dir());
            let server = ServerCommand::new(&scratch).monitor("qmp").start();
            let mut qmp = Qmp::connect(&server.socket("qmp"));
            let dir = scratch.dir().display().to_string();
            let here = |value: Value| -> Value {
                serde_json::from_str(&value.to_string().replace("DIR", &dir)).expect("JSON")
            };
            add_chain(&mut |command, arguments| drop(qmp.execute(command, here(arguments))));
            arguments["job-id"] = "j".into();
            arguments["speed"] = (if moment == "copying" { 8 << 20 } else { 0 }).into();
            qmp.execute(command, here(arguments.clone()));
            if moment == "copying" {
                eventually("some progress", || {
                    let jobs = qmp.execute("query-jobs", json!({}));
                    let done = jobs[0]["current-progress"].as_u64();
                    done.is_none_or(|done| done > 0).then_some(())
                });
            }
            if moment == "BLOCK_JOB_COMPLETED" {
                if completes {
                    qmp.wait_for("BLOCK_JOB_READY");
                    qmp.execute("job-complete", json!({"id": "j"}));
                }
                qmp.wait_for("BLOCK_JOB_COMPLETED");
            }
            let socket = server.socket("qmp");
            server.kill();
            std::fs::remove_file(socket).expect("the socket of the killed daemon");
            // The next daemon opens the images that the headers name.
            close_properly(&scratch, "c.qcow2", "");
            for image in ["a.qcow2", "b.qcow2", "c.qcow2"] {
                close_properly(&scratch, image, ",backing=");
                run("qemu-img", scratch.dir(), &["check", "-q", &format!("DIR/{image}")]);
            }
            let expected = made.join("expected.raw").display().to_string();
            run("qemu-img", scratch.dir(), &["compare", "-q", &expected, "DIR/c.qcow2"]);
        }
    }
}

/// Opens an image after a kill, and closes it.
fn close_properly(scratch: &Scratch, name: &str, options: &str) {
    let file = scratch.path(name).display().to_string();
    let node = format!("qcow2,node-name=n,file.driver=file,file.filename={file}{options}");
    ServerCommand::new(scratch).args(["--blockdev", &node]).start().stop();
}

/// Exports that were moved there write to it, and so may others.
#[test]
fn a_base_that_an_active_commit_opens_for_writing_can_be_exported() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    peers.run("qemu-img", &["create", "-q", "-f", "qcow2", "DIR/base", "4M"]);
    let over = ["create", "-q", "-f", "qcow2", "-b", "DIR/base", "-F", "qcow2", "DIR/top"];
    peers.run("qemu-img", &over);
    let file = |name: &str| json!({"driver": "file", "filename": format!("DIR/{name}")});
    let base =
        json!({"driver": "qcow2", "node-name": "base", "read-only": true, "file": file("base")});
    let top =
        json!({"driver": "qcow2", "node-name": "top", "backing": "base", "file": file("top")});
    peers.execute("blockdev-add", base);
    peers.execute("blockdev-add", top);
    peers.serve("top");
    peers.io(&["write -q -P 1 0 1M"]);
    peers.execute("block-commit", json!({"job-id": "j", "device": "top"}));
    peers.wait_for("BLOCK_JOB_READY");
    peers.execute("job-complete", json!({"id": "j"}));
    peers.wait_for("BLOCK_JOB_COMPLETED");
    let export = json!({"type": "nbd", "id": "e2", "node-name": "base", "writable": true});
    peers.execute("block-export-del", json!({"id": "e", "mode": "hard"}));
    peers.wait_for("BLOCK_EXPORT_DELETED");
    peers.execute("block-export-add", export);
    peers.stop();
}

/// It is a node that was added with `read-only=on`, or has that option inside the image's node.
#[test]
fn a_read_only_file_is_not_opened_for_writing_by_a_job() {
    for is_apart in [true, false] {
        no_job_writes_to_a_read_only_file(is_apart);
    }
}

fn no_job_writes_to_a_read_only_file(is_apart: bool) {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    peers.run("qemu-img", &["create", "-q", "-f", "qcow2", "DIR/base", "4M"]);
    let over = ["create", "-q", "-f", "qcow2", "-b", "DIR/base", "-F", "qcow2"];
    for name in ["middle", "top"] {
        let path = format!("DIR/{name}");
        peers.run("qemu-img", &[&over[..], &[&path]].concat());
    }
    let file = |name: &str, read_only: bool| {
        json!({"driver": "file", "node-name": format!("{name}-file"), "filename": format!("DIR/{name}"),
            "read-only": read_only})
    };
    for (name, backing) in
        [("base", Value::Null), ("middle", "base".into()), ("top", "middle".into())]
    {
        let is_top = name == "top";
        let mut file = file(name, !is_top);
        if is_apart {
            peers.execute("blockdev-add", file);
            file = format!("{name}-file").into();
        }
        let image = json!({"driver": "qcow2", "node-name": name, "file": file,
            "backing": backing, "read-only": !is_top});
        peers.execute("blockdev-add", image);
    }
    for (command, arguments) in [
        ("block-commit", json!({"device": "top"})),
        ("block-commit", json!({"device": "top", "top-node": "middle", "base-node": "base"})),
        ("block-commit", json!({"device": "top", "base-node": "middle"})),
        ("block-stream", json!({"device": "middle"})),
    ] {
        let arguments = integration::merged(json!({"job-id": "j"}), &arguments);
        let answer = peers.both(command, arguments);
        assert_eq!(answer["error"]["desc"], "Block node is read-only", "{command}");
    }
    peers.stop();
}

/// An image behind an overlay is read-only, although it was opened for writing.
#[test]
fn a_backing_image_is_not_written_to() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    peers.run("qemu-img", &["create", "-q", "-f", "qcow2", "DIR/a.qcow2", "1M"]);
    let file = json!({"driver": "file", "filename": "DIR/a.qcow2"});
    peers.execute("blockdev-add", json!({"driver": "qcow2", "node-name": "a", "file": file}));
    let snapshot =
        json!({"node-name": "a", "snapshot-file": "DIR/o.qcow2", "snapshot-node-name": "o"});
    peers.execute("blockdev-snapshot-sync", snapshot);
    let filter = json!({"driver": "copy-on-read", "node-name": "c", "file": "a"});
    let answer = peers.both("blockdev-add", filter);
    assert_eq!(answer["error"]["desc"], "Block node is read-only");
    // In the words of QSD 11.1; 10.0 loses it.
    let bitmap = json!({"node": "a", "name": "b", "persistent": true});
    let why = peers.ours.qmp.refused("block-dirty-bitmap-add", bitmap);
    assert_eq!(why, "Cannot add a persistent bitmap to read-only or inactive node 'a'");
    peers.execute("block-dirty-bitmap-add", json!({"node": "a", "name": "b"}));
    peers.stop();
}

/// NBD exports do not share resizing: answers, and events before.
#[test]
fn a_commit_does_not_grow_a_base_whose_user_does_not_share_that() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    peers.run("qemu-img", &["create", "-q", "-f", "raw", "DIR/base", "1M"]);
    peers.run(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "-b", "DIR/base", "-F", "raw", "DIR/top", "4M"],
    );
    let addr = json!({"type": "unix", "data": {"path": "DIR/nbd.sock"}});
    peers.execute("nbd-server-start", json!({"addr": addr}));
    let file = json!({"driver": "file", "node-name": "file", "filename": "DIR/base"});
    peers.execute("blockdev-add", file);
    peers.execute("blockdev-add", json!({"driver": "raw", "node-name": "base", "file": "file"}));
    peers.execute("blockdev-add", json!({"driver": "raw", "node-name": "other", "file": "base"}));
    let top = json!({"driver": "file", "filename": "DIR/top"});
    let top = json!({"driver": "qcow2", "node-name": "top", "backing": "base", "file": top});
    peers.execute("blockdev-add", top);
    let commit = json!({"job-id": "j", "device": "top"});
    for node in ["base", "other", "file"] {
        peers.execute("block-export-add", json!({"type": "nbd", "id": "e", "node-name": node}));
        let answer = peers.both("block-commit", commit.clone());
        let why = answer["error"]["desc"].as_str().unwrap_or_default();
        assert!(why.contains("permissions 'resize' are both required"), "{answer}");
        for status in ["created", "null"] {
            assert_eq!(peers.wait_for("JOB_STATUS_CHANGE")["status"], status);
        }
        peers.execute("block-export-del", json!({"id": "e", "mode": "hard"}));
        peers.wait_for("BLOCK_EXPORT_DELETED");
    }
    peers.execute("block-commit", commit);
    peers.wait_for("BLOCK_JOB_READY");
    peers.execute("block-job-cancel", json!({"device": "j", "force": true}));
    peers.wait_for("BLOCK_JOB_CANCELLED");
    peers.stop();
}

#[test]
fn a_job_that_is_refused_late_is_reported_as_in_qemu_storage_daemon() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    for (name, read_only) in [("a", false), ("b", false), ("reader", true)] {
        let node = json!({"driver": "null-co", "node-name": name, "read-only": read_only});
        peers.execute("blockdev-add", node);
    }
    for (command, arguments) in [
        ("blockdev-backup", json!({"device": "a", "target": "b", "sync": "full", "speed": -1})),
        ("blockdev-mirror", json!({"device": "a", "target": "b", "sync": "full", "speed": -1})),
        ("block-stream", json!({"device": "a", "speed": -1})),
        ("blockdev-mirror", json!({"device": "a", "target": "reader", "sync": "full"})),
    ] {
        for side in peers.sides() {
            let arguments = integration::merged(json!({"job-id": "j"}), &arguments);
            let answer = side.ask(command, &arguments);
            assert!(answer.get("error").is_some(), "{command}: {answer}");
        }
        for status in ["created", "null"] {
            assert_eq!(peers.wait_for("JOB_STATUS_CHANGE")["status"], status, "{command}");
        }
    }
    peers.stop();
}

/// As many images as a start and a snapshot allow behind one. In a debug build, each level takes most of the stack.
#[test]
fn a_chain_that_snapshots_have_built_is_opened_by_its_headers() {
    const MOST: usize = 256;
    const BY_HEADERS: usize = 250;
    let scratch = Scratch::new();
    let image = |n: usize| format!("DIR/{n}.qcow2");
    let create = ["create", "-q", "-f", "qcow2"];
    run("qemu-img", scratch.dir(), &[&create[..], &[&image(0), "4M"]].concat());
    run("qemu-io", scratch.dir(), &["-c", "write -P 7 1M 64k", &image(0)]);
    for n in 1..=BY_HEADERS {
        let behind = format!("{}.qcow2", n - 1);
        let backing = ["-u", "-b", &behind, "-F", "qcow2", &image(n), "4M"];
        run("qemu-img", scratch.dir(), &[&create[..], &backing].concat());
    }
    let serve = |n: usize| {
        let path = scratch.path(&format!("{n}.qcow2"));
        let node =
            format!("qcow2,node-name=n{n},file.driver=file,file.filename={}", path.display());
        let command = ServerCommand::new(&scratch).monitor("qmp").arg("--blockdev").arg(&node);
        nbd_export(nbd_server(command, &scratch, ""), &format!("n{n}"), ",writable=on").start()
    };
    // From the lowest image, from none, and to the topmost one.
    let io = |node: &str| {
        let commands =
            ["-c", "read -P 7 1M 64k", "-c", "read -P 0 2M 1M", "-c", "write -P 9 3M 64k"];
        let uri = nbd_uri(&scratch, node);
        run("qemu-io", scratch.dir(), &[&["-f", "raw"], &commands[..], &[&uri]].concat());
    };
    let node = format!("n{BY_HEADERS}");
    let mut server = serve(BY_HEADERS);
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    io(&node);
    let nodes = qmp.execute("query-named-block-nodes", json!({"flat": true}));
    assert_eq!(nodes.as_array().map(Vec::len), Some(2 * (BY_HEADERS + 1)));
    for n in BY_HEADERS..MOST {
        let snapshot = json!({"node-name": format!("n{n}"), "snapshot-node-name": format!("n{}", n + 1),
            "snapshot-file": scratch.path(&format!("{}.qcow2", n + 1))});
        qmp.execute("blockdev-snapshot-sync", snapshot);
    }
    let more = json!({"node-name": format!("n{MOST}"), "snapshot-node-name": "more",
        "snapshot-file": scratch.path("more.qcow2")});
    let why = qmp.refused("blockdev-snapshot-sync", more);
    assert_eq!(why, format!("Node 'more' has more than {MOST} images behind it"));
    io(&node);
    server.upgrade();
    io(&node);
    server.stop();
    let server = serve(MOST);
    io(&format!("n{MOST}"));
    server.stop();
    run("qemu-io", scratch.dir(), &["-r", "-c", "read -P 7 1M 64k", &image(MOST)]);
}

/// Each path that options take takes as deep a nesting: the command line in both forms, a monitor, the state file, and
/// an upgrade.
#[test]
fn options_nest_as_deep_as_chains_are_long() {
    const LEVELS: usize = 256;
    // An argument of a program has at most 128 KiB.
    const DOTTED: usize = 90;
    let scratch = Scratch::new();
    let create = ["create", "-q", "-f", "qcow2"];
    run("qemu-img", scratch.dir(), &[&create[..], &["DIR/0.qcow2", "4M"]].concat());
    for name in (1..LEVELS).map(|n| n.to_string()).chain(["a", "b", "c"].map(str::to_owned)) {
        let copy = scratch.path(&format!("{name}.qcow2"));
        std::fs::copy(scratch.path("0.qcow2"), copy).expect("a copy");
    }
    run("qemu-io", scratch.dir(), &["-c", "write -P 7 1M 64k", "DIR/0.qcow2"]);
    let image = |name: String| {
        let path = scratch.path(&format!("{name}.qcow2"));
        json!({"driver": "qcow2", "file": {"driver": "file", "filename": path}, "backing": null})
    };
    let chain = |name: &str| {
        let top = image(name.to_owned());
        let behind = (0..LEVELS).map(|n| image(n.to_string()));
        let mut node = behind.chain([top]).reduce(|below, mut above| {
            above["backing"] = below;
            above
        });
        let node = node.as_mut().expect("images");
        node["node-name"] = name.into();
        node.take()
    };
    // The lowest image of dotted keys has no backing image in its header, and null has no dotted form.
    let dotted: Vec<String> = (0..=DOTTED)
        .map(|level| {
            let at = "backing.".repeat(level);
            let name = if level == 0 { "a".to_owned() } else { (DOTTED - level).to_string() };
            let path = scratch.path(&format!("{name}.qcow2"));
            format!("{at}driver=qcow2,{at}file.driver=file,{at}file.filename={}", path.display())
        })
        .collect();
    let command = || {
        let command = ServerCommand::new(&scratch).monitor("qmp").arg("--blockdev");
        let command = command.arg(format!("node-name=a,{}", dotted.join(",")));
        let command = command.arg("--blockdev").arg(chain("b").to_string());
        let command = command.arg("--state").arg(scratch.path("state").display().to_string());
        ["a", "b"].into_iter().fold(nbd_server(command, &scratch, ""), |command, name| {
            nbd_export(command, name, ",writable=on")
        })
    };
    let io = |names: &[&str]| {
        for name in names {
            let uri = nbd_uri(&scratch, name);
            let commands = ["-f", "raw", "-c", "read -P 7 1M 64k", "-c", "write -P 9 3M 64k", &uri];
            run("qemu-io", scratch.dir(), &commands);
        }
    };
    let server = command().start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    qmp.execute("blockdev-add", chain("c"));
    let export = json!({"type": "nbd", "id": "c", "node-name": "c", "writable": true});
    qmp.execute("block-export-add", export);
    io(&["a", "b", "c"]);
    let mut deeper = json!({"driver": "raw", "node-name": "d"});
    deeper["file"] = (0..400)
        .fold(json!({"driver": "null-co"}), |below, _| json!({"driver": "raw", "file": below}));
    let why = qmp.refused("blockdev-add", deeper);
    assert!(why.contains("is nested too deeply"), "{why}");
    drop(qmp);
    // The state file has `c`.
    server.kill();
    let mut server = command().start();
    io(&["a", "b", "c"]);
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let nodes = qmp.execute("query-named-block-nodes", json!({"flat": true}));
    assert_eq!(nodes.as_array().map(Vec::len), Some(2 * (DOTTED + 1 + 2 * (LEVELS + 1))));
    qmp.execute("block-export-del", json!({"id": "c"}));
    qmp.wait_for("BLOCK_EXPORT_DELETED");
    qmp.execute("blockdev-del", json!({"node-name": "c"}));
    drop(qmp);
    server.upgrade();
    io(&["a", "b"]);
    server.stop();
}
