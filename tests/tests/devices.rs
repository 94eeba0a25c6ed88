//! Block devices of the host: opened by a name in a header or a snapshot, full, made larger while in use, read-only. Beside
//! qemu-storage-daemon.

use std::os::unix::fs::symlink;

use crate::common::peers::{Peers, Side, run};
use integration::nbd::RawNbd;
use integration::{BlkClient, LoopDevice, LoopDevices, Scratch, ServerCommand, eventually};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;

/// A device for each side, which both reach by the link `DIR/NAME`.
fn device(all: &LoopDevices, peers: &mut Peers, name: &str, size: u64) -> [LoopDevice; 2] {
    peers.sides().map(|side| {
        let device = all.attach(&side.path(&format!("{name}.img")), size);
        symlink(device.path(), side.path(name)).expect("a new link");
        device
    })
}

/// Runs a program for each side. `DIR` in the arguments is the side's folder, and `DEV` its device.
fn run_with(peers: &mut Peers, devices: &[LoopDevice; 2], program: &str, arguments: &[&str]) {
    for (side, device) in peers.sides().into_iter().zip(devices) {
        let arguments: Vec<_> =
            arguments.iter().map(|argument| argument.replace("DEV", device.path())).collect();
        let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
        run(program, &side.folder, &arguments);
    }
}

/// The drivers of all nodes, and whether each is read-only.
fn drivers(side: &mut Side) -> Vec<(String, Value)> {
    let nodes = side.qmp.execute("query-named-block-nodes", json!({"flat": true}));
    let nodes = nodes.as_array().expect("a list").iter();
    let mut found: Vec<_> = nodes
        .map(|node| (node["drv"].as_str().expect("a name").to_owned(), node["ro"].clone()))
        .collect();
    found.sort_by_key(|(driver, ro)| (driver.clone(), ro.as_bool()));
    found
}

fn same_drivers(peers: &mut Peers) -> Vec<(String, Value)> {
    let [ours, theirs] = peers.sides().map(drivers);
    assert_eq!(ours, theirs);
    ours
}

/// Removes the export and the node of [`Peers::serve`].
fn unserve(peers: &mut Peers, node: &str) {
    peers.execute("block-export-del", json!({"id": "e"}));
    peers.wait_for("BLOCK_EXPORT_DELETED");
    peers.execute("nbd-server-stop", json!({}));
    peers.execute("blockdev-del", json!({"node-name": node}));
}

#[test]
fn the_kind_of_a_file_that_is_named_without_a_driver_decides_about_the_driver() {
    let Some(all) = LoopDevices::new() else { return };
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    let base = device(&all, &mut peers, "base", 4 * MIB);
    let over = device(&all, &mut peers, "over", 4 * MIB);
    let is = |driver: &str, ro: bool| (driver.to_owned(), json!(ro));

    // A backing file, by its name and through a link.
    run_with(&mut peers, &base, "qemu-img", &["create", "-q", "-f", "qcow2", "DEV", "1M"]);
    for backing in ["DEV", "DIR/base", "host_device:DEV"] {
        let arguments = ["create", "-q", "-u", "-f", "qcow2", "-b", backing, "-F", "qcow2"];
        run_with(&mut peers, &base, "qemu-img", &[&arguments[..], &["DIR/over", "1M"]].concat());
        let file = json!({"driver": "host_device", "filename": "DIR/over"});
        let node = json!({"driver": "qcow2", "node-name": "n", "file": file});
        peers.execute("blockdev-add", node);
        peers.serve("n");
        let found = same_drivers(&mut peers);
        let expected = [
            is("host_device", false),
            is("host_device", true),
            is("qcow2", false),
            is("qcow2", true),
        ];
        assert_eq!(found, expected, "{backing}");
        peers.io(&["write -P 1 64k 64k", "read -P 0 0 64k"]);
        // The base is locked as one that was named in options.
        let why = ServerCommand::new(&scratch)
            .arg("--blockdev")
            .arg(format!("host_device,node-name=x,filename={}", base[0].path()));
        let (status, log) = why.export("x", "").run();
        assert!(!status.success() && log.contains("Failed to get"), "{log}");
        unserve(&mut peers, "n");
    }
    // Raw below, as `-F host_device` says.
    let arguments = ["create", "-q", "-u", "-f", "qcow2", "-b", "DEV", "-F", "host_device"];
    run_with(&mut peers, &base, "qemu-img", &[&arguments[..], &["DIR/over", "1M"]].concat());
    let file = json!({"driver": "host_device", "filename": "DIR/over"});
    peers.execute("blockdev-add", json!({"driver": "qcow2", "node-name": "n", "file": file}));
    peers.serve("n");
    peers.io(&["read -P 0x51 0 1"]);
    unserve(&mut peers, "n");

    // A data file, with the calls that only devices have.
    let data = ["create", "-q", "-f", "qcow2", "-o", "data_file=DEV,data_file_raw=on"];
    run_with(&mut peers, &base, "qemu-img", &[&data[..], &["DIR/data.qcow2", "2M"]].concat());
    let file = json!({"driver": "file", "filename": "DIR/data.qcow2"});
    let node = json!({"driver": "qcow2", "node-name": "n", "discard": "unmap", "file": file});
    peers.execute("blockdev-add", node);
    peers.serve("n");
    let found = same_drivers(&mut peers);
    assert_eq!(found, [is("file", false), is("host_device", false), is("qcow2", false)]);
    peers.io(&["write -P 7 0 1M", "write -z 64k 64k", "discard 256k 64k", "flush"]);
    unserve(&mut peers, "n");
    for device in &base {
        let found = std::fs::read(device.path()).expect("our device");
        assert!(found[..65536].iter().all(|byte| *byte == 7), "the data are on {}", device.path());
    }

    // Snapshots, in both modes.
    run_with(&mut peers, &base, "qemu-img", &["create", "-q", "-f", "qcow2", "DIR/d.qcow2", "1M"]);
    for mode in ["absolute-paths", "existing"] {
        let file = json!({"driver": "file", "filename": "DIR/d.qcow2"});
        peers.execute("blockdev-add", json!({"driver": "qcow2", "node-name": "n", "file": file}));
        peers.serve("n");
        if mode == "existing" {
            let again = ["create", "-q", "-u", "-f", "qcow2", "-b", "DIR/d.qcow2", "-F", "qcow2"];
            run_with(&mut peers, &over, "qemu-img", &[&again[..], &["DEV", "1M"]].concat());
        }
        let snapshot = json!({"node-name": "n", "snapshot-file": "DIR/over", "snapshot-node-name": "s",
            "format": "qcow2", "mode": mode});
        peers.execute("blockdev-snapshot-sync", snapshot);
        peers.io(&["write -P 9 0 64k"]);
        for side in peers.sides() {
            let found = drivers(side);
            assert!(found.contains(&is("host_device", false)), "{mode}: {found:?}");
        }
        peers.execute("block-export-del", json!({"id": "e"}));
        peers.wait_for("BLOCK_EXPORT_DELETED");
        peers.execute("nbd-server-stop", json!({}));
        for side in peers.sides() {
            // QSD closes the overlay with its last user.
            for node in ["s", "n"] {
                let _ = side.qmp.ask("blockdev-del", json!({"node-name": node}));
            }
        }
        run_with(&mut peers, &over, "qemu-img", &["compare", "-q", "DEV", "DIR/over"]);
        run_with(&mut peers, &over, "qemu-io", &["-f", "qcow2", "-c", "read -P 9 0 64k", "DEV"]);
    }
    peers.stop();
}

#[test]
fn a_snapshot_is_refused_on_a_device_without_room_for_an_image() {
    let Some(all) = LoopDevices::new() else { return };
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    let _small = device(&all, &mut peers, "small", 64 << 10);
    peers.execute("blockdev-add", json!({"driver": "null-co", "node-name": "n", "size": MIB}));
    let snapshot =
        json!({"node-name": "n", "snapshot-file": "DIR/small", "snapshot-node-name": "s"});
    let refused = peers.ours.qmp.ask("blockdev-snapshot-sync", snapshot_at(&peers.ours, snapshot));
    let why = refused["error"]["desc"].as_str().expect("an error");
    assert!(why.contains("No space left on device"), "{why}");
    peers.stop();
}

/// The arguments with the side's folder for `DIR`.
fn snapshot_at(side: &Side, arguments: Value) -> Value {
    let text = arguments.to_string().replace("DIR", &side.folder.display().to_string());
    serde_json::from_str(&text).expect("JSON")
}

/// The size that a node of the driver `host_device` shows.
fn size_of_device(side: &mut Side) -> u64 {
    let nodes = side.qmp.execute("query-named-block-nodes", json!({"flat": true}));
    let mut nodes = nodes.as_array().expect("a list").iter();
    let device = nodes.find(|node| node["drv"] == "host_device").expect("a device");
    device["image"]["virtual-size"].as_u64().expect("a number")
}

fn highest_write(side: &mut Side, name: &str) -> u64 {
    let stats = side.qmp.execute("query-blockstats", json!({"query-nodes": true}));
    let mut stats = stats.as_array().expect("a list").iter();
    let of_node = stats.find(|stats| stats["node-name"] == name).expect("the node");
    of_node["stats"]["wr_highest_offset"].as_u64().expect("a number")
}

#[test]
fn an_image_on_a_full_device_reports_so_and_goes_on_once_the_device_has_grown() {
    const NBD_ENOSPC: u32 = 28;
    let Some(all) = LoopDevices::new() else { return };
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    let devices = device(&all, &mut peers, "d", 2 * MIB);
    run_with(&mut peers, &devices, "qemu-img", &["create", "-q", "-f", "qcow2", "DEV", "8M"]);
    let file = json!({"driver": "host_device", "node-name": "d", "filename": "DIR/d"});
    peers.execute("blockdev-add", json!({"driver": "qcow2", "node-name": "n", "file": file}));
    peers.serve("n");
    peers.io(&["write -P 1 0 1M"]);
    let [ours, theirs] = peers.sides().map(|side| highest_write(side, "d"));
    assert!(ours >= MIB && ours == theirs, "{ours} of {theirs}");
    // Until the device is full, and beyond.
    for side in peers.sides() {
        let mut nbd = RawNbd::go(&side.path("nbd.sock"), "e");
        for _ in 0..2 {
            nbd.request(1, 1, 2 * MIB, 2 << 20);
            nbd.send(&vec![2; 2 << 20]);
            assert_eq!(nbd.reply(), (NBD_ENOSPC, 1), "{:?}", side.folder);
        }
        nbd.request(3, 2, 0, 0);
        assert_eq!(nbd.reply(), (0, 2), "a flush still succeeds");
    }
    devices.iter().for_each(|device| device.resize(6 * MIB));
    assert_eq!(size_of_device(&mut peers.ours), 6 * MIB, "asked for anew");
    peers.io(&["write -P 3 2M 2M", "read -P 1 0 1M", "flush"]);
    // Into the metadata, too.
    devices.iter().for_each(|device| device.resize(10 * MIB));
    peers.io(&["write -P 4 0 8M", "flush"]);
    let [ours, theirs] = peers.sides().map(|side| highest_write(side, "d"));
    assert!(ours > 8 * MIB && theirs > 8 * MIB, "{ours} and {theirs}");
    unserve(&mut peers, "n");
    run_with(&mut peers, &devices, "qemu-img", &["check", "-q", "DEV"]);
    let whole = ["-f", "qcow2", "-c", "read -P 4 0 8M", "DEV"];
    run_with(&mut peers, &devices, "qemu-io", &whole);
    peers.stop();
}

#[test]
fn a_backup_to_a_full_device_pauses_and_goes_on_once_the_device_has_grown() {
    let Some(all) = LoopDevices::new() else { return };
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    let devices = device(&all, &mut peers, "d", 2 * MIB);
    run_with(&mut peers, &devices, "qemu-img", &["create", "-q", "-f", "qcow2", "DEV", "8M"]);
    let source = json!({"driver": "file", "filename": "DIR/source.img"});
    for side in peers.sides() {
        std::fs::write(side.path("source.img"), vec![5; 8 << 20]).expect("a new file");
    }
    peers.execute("blockdev-add", json!({"driver": "raw", "node-name": "s", "file": source}));
    let file = json!({"driver": "host_device", "filename": "DIR/d"});
    peers.execute("blockdev-add", json!({"driver": "qcow2", "node-name": "t", "file": file}));
    let backup = json!({"job-id": "b", "device": "s", "target": "t", "sync": "full",
        "on-target-error": "enospc"});
    peers.execute("blockdev-backup", backup);
    for side in peers.sides() {
        // Other copies in flight may fail, too.
        let event = side.qmp.wait_for("BLOCK_JOB_ERROR");
        assert_eq!((&event["operation"], &event["action"]), (&json!("write"), &json!("stop")));
    }
    let status = |side: &mut Side| {
        let job = side.qmp.execute("query-block-jobs", json!({}))[0].take();
        (job["io-status"].clone(), job["paused"].clone())
    };
    for side in peers.sides() {
        eventually("the job to pause", || {
            (status(side) == (json!("nospace"), json!(true))).then_some(())
        });
    }
    devices.iter().for_each(|device| device.resize(10 * MIB));
    peers.execute("block-job-resume", json!({"device": "b"}));
    peers.wait_for("BLOCK_JOB_COMPLETED");
    for node in ["t", "s"] {
        peers.execute("blockdev-del", json!({"node-name": node}));
    }
    let compare = ["compare", "-q", "-f", "qcow2", "-F", "raw", "DEV", "DIR/source.img"];
    run_with(&mut peers, &devices, "qemu-img", &compare);
    peers.stop();
}

#[test]
fn a_device_that_the_kernel_has_as_read_only_is_not_opened_for_writing() {
    let Some(all) = LoopDevices::new() else { return };
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    let devices = device(&all, &mut peers, "d", 2 * MIB);
    run_with(&mut peers, &devices, "qemu-img", &["create", "-q", "-f", "qcow2", "DEV", "1M"]);
    devices.iter().for_each(LoopDevice::set_read_only);
    let node = |more: &Value| {
        let base = json!({"driver": "host_device", "node-name": "d", "filename": "DIR/d"});
        integration::merged(base, more)
    };
    let above = |more: &Value| json!({"driver": "qcow2", "node-name": "n", "file": node(more)});
    let refused = json!("The device is not writable: Permission denied");
    for node in [node(&json!({})), above(&json!({})), above(&json!({"auto-read-only": true}))] {
        assert_eq!(peers.both("blockdev-add", node)["error"]["desc"], refused);
    }
    let addr = json!({"type": "unix", "data": {"path": "DIR/nbd.sock"}});
    peers.execute("nbd-server-start", json!({"addr": addr}));
    let export = |writable: bool| json!({"type": "nbd", "id": "e", "node-name": "d", "name": "e", "writable": writable});
    peers.execute("blockdev-add", node(&json!({"auto-read-only": true})));
    assert_eq!(peers.both("block-export-add", export(true))["error"]["desc"], refused);
    peers.execute("block-export-add", export(false));
    unserve(&mut peers, "d");
    peers.execute("blockdev-add", node(&json!({"read-only": true})));
    let why = peers.both("blockdev-reopen", json!({"options": [node(&json!({}))]}));
    assert_eq!(why["error"]["desc"], refused);
    peers.execute("blockdev-del", json!({"node-name": "d"}));
    peers.stop();
}

/// `serve` and `check` take the device behind an image, as the daemon does.
#[test]
fn serve_and_check_follow_headers_to_devices() {
    let Some(all) = LoopDevices::new() else { return };
    let scratch = Scratch::new();
    let base = all.attach(&scratch.path("base.img"), 4 * MIB);
    run("qemu-img", scratch.dir(), &["create", "-q", "-f", "qcow2", base.path(), "1M"]);
    let create =
        ["create", "-q", "-f", "qcow2", "-b", base.path(), "-F", "qcow2", "DIR/over.qcow2"];
    run("qemu-img", scratch.dir(), &create);
    let socket = scratch.path("disk.sock").display().to_string();
    let server = ServerCommand::other_command(&scratch, "serve")
        .arg(scratch.path("over.qcow2").display().to_string())
        .args(["--socket", &socket])
        .start();
    let mut blk = eventually("the socket", || BlkClient::connect(socket.as_ref(), 1, 16).ok());
    blk.write(8, &[6; 4096]);
    assert_eq!(blk.read(0, 512), [0; 512]);
    drop(blk);
    server.stop();
    for image in [scratch.path("over.qcow2").to_str().expect("UTF-8"), base.path()] {
        let (status, output) = ServerCommand::other_command(&scratch, "check").arg(image).run();
        assert!(status.success(), "{output}");
    }
}
