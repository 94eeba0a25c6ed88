//! Jobs on a chain of images beside each other, and new options for their images, beside qemu-storage-daemon.

use crate::common;

use common::peers::{Peers, run};
use common::{check, under_load, wait_for_end, wait_for_status};
use integration::{Image, Scratch, eventually, merged};
use serde_json::{Value, json};

/// From one image's data to the next one's.
const STRIDE_KIB: usize = 450;

/// An image of the chain. Its file and its backing image have names.
fn image(number: usize, more: &Value) -> Value {
    let mut options =
        json!({"driver": "qcow2", "node-name": format!("n{number}"), "file": format!("f{number}")});
    if number > 0 {
        options["backing"] = format!("n{}", number - 1).into();
    }
    merged(options, more)
}

/// A chain n0 <- n1 <- … of so many images. Each stores other data, and `n0` is full.
///
/// A job begins with a copy of at most 512 KiB, however slow it is. The next image's data is not among it.
fn chain(peers: &mut Peers, images: usize) {
    for number in 0..images {
        let (name, below) = (format!("DIR/h{number}"), format!("h{}", number.saturating_sub(1)));
        let mut create = vec!["create", "-q", "-f", "qcow2"];
        if number > 0 {
            create.extend(["-b", &below, "-F", "qcow2"]);
        }
        create.extend([&*name, "4M"]);
        peers.run("qemu-img", &create);
        let write = match number {
            0 => "write -P 1 0 4M".to_owned(),
            _ => format!("write -P {} {}k 64k", number + 1, STRIDE_KIB * number),
        };
        peers.run("qemu-io", &["-c", &write, &name]);
    }
    for number in 0..images {
        let file = json!({"driver": "file", "node-name": format!("f{number}"),
            "filename": format!("DIR/h{number}")});
        peers.execute("blockdev-add", file);
        peers.execute("blockdev-add", image(number, &json!({})));
    }
}

/// Reads the data of some images, and of n0, in the topmost one.
fn read(peers: &mut Peers, images: &[usize], top: &str) {
    let of = |n: &usize| format!("read -P {} {}k 64k", n + 1, STRIDE_KIB * n);
    let reads: Vec<_> = images.iter().map(of).collect();
    let reads = reads.iter().flat_map(|read| ["-c", read]);
    peers.run("qemu-io", &reads.chain(["-c", "read -P 1 0 100k", top]).collect::<Vec<_>>());
}

fn no_jobs(peers: &mut Peers) {
    for side in peers.sides() {
        eventually("the end of all jobs", || {
            let jobs = side.ask("query-jobs", &json!({}));
            (jobs["return"] == json!([])).then_some(())
        });
    }
}

/// ringmill refuses more: all links of a job's chain stay.
#[test]
fn the_images_of_a_job_are_reopened_as_in_qemu_storage_daemon() {
    let stream = json!({"job-id": "j", "device": "n3", "base-node": "n1"});
    let commit = json!({"job-id": "j", "device": "n4", "base-node": "n2"});
    for (command, job, written) in [("block-stream", stream, 3), ("block-commit", commit, 2)] {
        let scratch = Scratch::new();
        let mut peers = Peers::new(&scratch);
        chain(&mut peers, 5);
        let job = merged(job, &json!({"auto-finalize": false, "filter-node-name": "filter"}));
        peers.execute(command, job);
        let end = if command == "block-stream" { "BLOCK_JOB_PENDING" } else { "BLOCK_JOB_READY" };
        peers.wait_for(end);
        let (mut frozen, mut read_only) = (0, 0);
        for number in 0..5 {
            let mut others = vec![
                json!({}),
                json!({"lazy-refcounts": true}),
                json!({}),
                json!({"read-only": true}),
                json!({}),
            ];
            // QSD lets the link to the base go.
            if number > 0 && (command, number) != ("block-stream", 2) {
                others.extend([json!({"backing": null}), json!({})]);
            }
            for more in others {
                let options = json!({"options": [image(number, &more)]});
                let answer = peers.both("blockdev-reopen", options).to_string();
                frozen += usize::from(answer.contains("Cannot change frozen 'backing' link"));
                if answer.contains("cannot support read-write users") {
                    assert_eq!(number, written, "{command}: {answer}");
                    read_only += 1;
                }
            }
        }
        assert_eq!(frozen, if command == "block-stream" { 1 } else { 2 }, "{command}");
        assert_eq!(read_only, 1, "{command}");
        if command == "block-stream" {
            let cut = json!({"options": [image(2, &json!({"backing": null}))]});
            let why = peers.ours.qmp.refused("blockdev-reopen", cut);
            assert_eq!(why, "Cannot change frozen 'backing' link from 'n2' to 'n1'");
        } else {
            peers.execute("job-complete", json!({"id": "j"}));
            peers.wait_for("BLOCK_JOB_PENDING");
        }
        peers.execute("job-finalize", json!({"id": "j"}));
        no_jobs(&mut peers);
        peers.stop();
        let top = if command == "block-stream" { "DIR/h4" } else { "DIR/h2" };
        read(&mut peers, &[1, 3, 4], top);
    }
}

#[test]
fn streams_share_a_chain_as_in_qemu_storage_daemon() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    chain(&mut peers, 9);
    let refused = |peers: &mut Peers, command: &str, job: Value| {
        let answer = peers.both(command, merged(json!({"job-id": "other"}), &job));
        assert!(
            answer["error"]["desc"].as_str().is_some_and(|why| why.contains("is busy")),
            "{answer}"
        );
    };
    let cancel = |peers: &mut Peers| {
        peers.execute("block-job-cancel", json!({"device": "first"}));
        no_jobs(peers);
    };
    let slow = |job: Value| merged(json!({"job-id": "first", "speed": 1}), &job);
    let first = json!({"device": "n4", "base-node": "n1", "filter-node-name": "filter"});
    peers.execute("block-stream", slow(first));
    for (command, job) in [
        ("block-stream", json!({"device": "n5", "base-node": "n2"})),
        ("block-stream", json!({"device": "n3", "base-node": "n2"})),
        ("block-stream", json!({"device": "n4"})),
        ("block-stream", json!({"device": "n2", "base-node": "n0"})),
        ("block-stream", json!({"device": "n8", "base-node": "n1"})),
        ("block-commit", json!({"device": "n8", "base-node": "n4"})),
        ("block-commit", json!({"device": "n8", "base-node": "n1", "top-node": "n3"})),
        ("block-commit", json!({"device": "n8", "base-node": "n0", "top-node": "n1"})),
    ] {
        refused(&mut peers, command, job);
    }
    cancel(&mut peers);
    let first = json!({"device": "n8", "top-node": "n5", "base-node": "n3"});
    peers.execute("block-commit", slow(first));
    for job in [
        json!({"device": "n3"}),
        json!({"device": "n6", "base-node": "n2"}),
        json!({"device": "n4", "base-node": "n2"}),
        json!({"device": "n6", "base-node": "n4"}),
        json!({"device": "n8", "base-node": "n5"}),
    ] {
        refused(&mut peers, "block-stream", job);
    }
    // The commit gives n6 another image behind it. QSD grants this one.
    let drops = json!({"job-id": "other", "device": "n7", "base-node": "n5"});
    let why = peers.ours.qmp.refused("block-stream", drops);
    assert_eq!(why, "Node 'n6' is busy: block device is in use by block job: commit");
    cancel(&mut peers);
    peers.execute("block-commit", slow(json!({"device": "n8", "base-node": "n3"})));
    refused(&mut peers, "block-stream", json!({"device": "n5", "base-node": "n3"}));
    refused(&mut peers, "block-stream", json!({"device": "n3", "base-node": "n1"}));
    cancel(&mut peers);
    // The base of each stream is the next one's image.
    for number in [2, 4, 6, 8] {
        let job = json!({"job-id": format!("s{number}"), "device": format!("n{number}"),
            "bottom": format!("n{}", number - 1), "speed": 1024});
        peers.execute("block-stream", job);
    }
    for number in [6, 2, 8, 4] {
        let speed = json!({"device": format!("s{number}"), "speed": 0});
        peers.execute("block-job-set-speed", speed);
    }
    no_jobs(&mut peers);
    peers.stop();
    for side in peers.sides() {
        for number in [8, 6, 4, 2] {
            let info = ["info", "--output=json", &format!("DIR/h{number}")];
            let info = run("qemu-img", &side.folder, &info);
            let info: Value = serde_json::from_str(&info).expect("JSON");
            let behind = info["backing-filename"].as_str().unwrap_or_default();
            let base = format!("/h{}", number - 2);
            assert!(behind.ends_with(&base) || behind.contains(&format!("{base}\"")), "{info}");
        }
    }
    read(&mut peers, &[1, 2, 3, 4, 5, 6, 7, 8], "DIR/h8");
}

/// A guest writes while streams of its chain run beside each other, and their images get other options.
#[test]
fn streams_run_while_a_guest_writes_and_their_images_are_reopened() {
    let scratch = Scratch::new();
    let (_, server, mut qmp, load) = under_load(&scratch, 5);
    load.go_on();
    let file = |name: &str| scratch.path(&format!("{name}.qcow2"));
    let names = ["a", "b", "c", "d"];
    let mut below = "disk";
    for name in names {
        let snapshot =
            json!({"node-name": below, "snapshot-file": file(name), "snapshot-node-name": name});
        qmp.execute("blockdev-snapshot-sync", snapshot);
        load.go_on();
        below = name;
    }
    for (name, bottom) in [("b", "a"), ("d", "c")] {
        let stream = json!({"job-id": name, "device": name, "bottom": bottom, "speed": 1,
            "auto-finalize": false});
        qmp.execute("block-stream", stream);
    }
    let reopen = |name: &str, backing: &str, more: Value| {
        let file = json!({"driver": "file", "filename": file(name)});
        let options =
            json!({"driver": "qcow2", "node-name": name, "file": file, "backing": backing});
        json!({"options": [merged(options, &more)]})
    };
    for round in 0..6 {
        let more = json!({"discard": if round % 2 == 0 { "unmap" } else { "ignore" }});
        qmp.execute("blockdev-reopen", reopen("d", "c", more.clone()));
        load.go_on();
        qmp.execute("blockdev-reopen", reopen("b", "a", more));
        load.go_on();
    }
    let jobs = qmp.execute("query-jobs", json!({}));
    let running = |job: &Value| job["status"] == "running";
    assert!(jobs.as_array().is_some_and(|jobs| jobs.iter().all(running)), "{jobs}");
    for name in ["b", "d"] {
        qmp.execute("block-job-set-speed", json!({"device": name, "speed": 0}));
        wait_for_status(&mut qmp, name, "pending");
    }
    // The upper one ends first: its base is an image with a job.
    for name in ["d", "b"] {
        qmp.execute(
            "blockdev-reopen",
            reopen(name, if name == "d" { "c" } else { "a" }, json!({})),
        );
        qmp.execute("job-finalize", json!({"id": name}));
        wait_for_end(&mut qmp, name);
        load.go_on();
    }
    for node in ["a", "c"] {
        qmp.execute("blockdev-del", json!({"node-name": node}));
        std::fs::remove_file(file(node)).expect("the image");
    }
    let log = load.finish();
    server.stop();
    run("qemu-img", scratch.dir(), &["check", "-q", "DIR/d.qcow2"]);
    run("qemu-img", scratch.dir(), &["convert", "-O", "raw", "DIR/d.qcow2", "DIR/flat.img"]);
    check(&Image::existing(&scratch.path("flat.img")), &log, log.len());
}
