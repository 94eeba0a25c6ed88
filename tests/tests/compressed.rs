//! Compressed clusters that the daemon writes: the `compress` driver and `blockdev-backup` with `compress=on`, judged by
//! `qemu-img`.

use crate::common;

use std::fs;

use common::wait_for_end;
use integration::nbd::client_output;
use integration::{Qmp, Scratch, Server, ServerCommand};
use serde_json::{Value, json};

const MIB: usize = 1 << 20;

/// Kinds of images.
const KINDS: [&str; 4] = [
    "cluster_size=64k",
    "cluster_size=4k,refcount_bits=1",
    "cluster_size=2M",
    "compression_type=zstd,cluster_size=64k,refcount_bits=8",
];

fn path(scratch: &Scratch, name: &str) -> String {
    scratch.path(name).display().to_string()
}

fn image(scratch: &Scratch, arguments: &[&str]) -> String {
    client_output(scratch, "qemu-img", arguments)
}

fn create(scratch: &Scratch, name: &str, options: &str, size: &str) {
    image(scratch, &["create", "-q", "-f", "qcow2", "-o", options, &path(scratch, name), size]);
}

fn file(scratch: &Scratch, name: &str) -> Value {
    json!({"driver": "file", "filename": path(scratch, name)})
}

fn qcow2(scratch: &Scratch, name: &str) -> Value {
    json!({"driver": "qcow2", "node-name": name, "file": file(scratch, &format!("{name}.qcow2"))})
}

fn daemon(scratch: &Scratch) -> (Server, Qmp) {
    let server = ServerCommand::new(scratch).monitor("qmp").start();
    let qmp = Qmp::connect(&server.socket("qmp"));
    (server, qmp)
}

fn serve(scratch: &Scratch, qmp: &mut Qmp, node: &str) -> String {
    let socket = path(scratch, "nbd");
    let addr = json!({"type": "unix", "data": {"path": socket}});
    qmp.execute("nbd-server-start", json!({"addr": addr}));
    let export = json!({"type": "nbd", "id": node, "node-name": node, "writable": true});
    qmp.execute("block-export-add", export);
    format!("nbd+unix:///{node}?socket={socket}")
}

/// Writes through an export.
fn io(scratch: &Scratch, uri: &str, commands: &[&str]) {
    let mut arguments = vec!["-f", "raw"];
    commands.iter().for_each(|command| arguments.extend(["-c", command]));
    arguments.push(uri);
    let output = client_output(scratch, "qemu-io", &arguments);
    assert!(!output.contains("failed"), "{output}");
}

/// Checks an image that is closed. Returns how many clusters are compressed, and how many have data.
fn check(scratch: &Scratch, name: &str) -> (u64, u64) {
    let found = image(scratch, &["check", "--output=json", &path(scratch, name)]);
    let found: Value = serde_json::from_str(&found).expect("JSON");
    assert!(found["leaks"].is_null() && found["corruptions"].is_null(), "{found}");
    let number = |name: &str| found[name].as_u64().unwrap_or_default();
    (number("compressed-clusters"), number("allocated-clusters"))
}

/// Half of each 512 bytes are random.
fn half_random(len: usize) -> Vec<u8> {
    let mut state = 1u64;
    let byte = |at: usize| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        if at % 512 < 256 { (state >> 56) as u8 } else { 7 }
    };
    (0..len).map(byte).collect()
}

/// An extent of the backing image ends within a cluster. Clients ask for one extent, from there on.
#[test]
fn extents_within_clusters_are_told() {
    let scratch = Scratch::new();
    image(&scratch, &["create", "-q", "-f", "raw", &path(&scratch, "base"), "4M"]);
    io(&scratch, &path(&scratch, "base"), &["write -P 3 4k 4k"]);
    let base = path(&scratch, "base");
    let disk = path(&scratch, "disk.qcow2");
    image(&scratch, &["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &disk, "4M"]);
    let (server, mut qmp) = daemon(&scratch);
    qmp.execute("blockdev-add", qcow2(&scratch, "disk"));
    let compress = json!({"driver": "compress", "node-name": "compress", "file": "disk"});
    qmp.execute("blockdev-add", compress);
    let uri = serve(&scratch, &mut qmp, "compress");
    let copy = path(&scratch, "copy");
    image(&scratch, &["convert", "-f", "raw", "-O", "raw", &uri, &copy]);
    image(&scratch, &["compare", "-q", "-f", "raw", "-F", "raw", &base, &copy]);
    server.stop();
}

#[test]
fn what_is_written_through_the_driver_is_stored_compressed() {
    for kind in KINDS {
        let scratch = Scratch::new();
        create(&scratch, "disk.qcow2", kind, "9M");
        fs::write(scratch.path("data"), half_random(2 * MIB)).expect("data");
        let (server, mut qmp) = daemon(&scratch);
        qmp.execute("blockdev-add", qcow2(&scratch, "disk"));
        let node = json!({"driver": "compress", "node-name": "small", "file": "disk"});
        qmp.execute("blockdev-add", node);
        let uri = serve(&scratch, &mut qmp, "small");
        let data = format!("write -s {} 0 2M", path(&scratch, "data"));
        io(&scratch, &uri, &[&data, "write -P 2 4M 2M", "flush", "read -P 2 4M 2M"]);
        // Parts of clusters, and clusters that are compressed already.
        let over = [
            "write -P 3 4100k 1k",
            "write -P 4 5M 1M",
            "write -P 5 9215k 1k",
            "read -P 2 4096k 4k",
            "read -P 3 4100k 1k",
            "write -z 5M 64k",
            "write -P 6 6M 300k",
            "discard 4M 64k",
            "flush",
        ];
        io(&scratch, &uri, &over);
        let copy = path(&scratch, "copy");
        image(&scratch, &["convert", "-f", "raw", "-O", "raw", &uri, &copy]);
        server.stop();
        let (compressed, allocated) = check(&scratch, "disk.qcow2");
        assert!(compressed > 0 && compressed == allocated, "{kind}: {compressed}, {allocated}");
        image(&scratch, &["compare", "-q", "-F", "raw", &path(&scratch, "disk.qcow2"), &copy]);
        let expected = half_random(2 * MIB);
        assert!(fs::read(&copy).expect("a copy").starts_with(&expected), "{kind}");
        if !kind.contains("refcount_bits=1") {
            // Several in each cluster of the file.
            let host = fs::metadata(scratch.path("disk.qcow2")).expect("an image").len();
            assert!(host < 5 << 20 || kind.contains("2M"), "{kind}: {host}");
        }
    }
}

#[test]
fn a_backup_is_compressed_while_the_disk_is_written() {
    for kind in KINDS {
        let scratch = Scratch::new();
        create(&scratch, "disk.qcow2", "cluster_size=4k", "9M");
        create(&scratch, "target.qcow2", kind, "9M");
        fs::write(scratch.path("data"), half_random(4 * MIB)).expect("data");
        let (server, mut qmp) = daemon(&scratch);
        qmp.execute("blockdev-add", qcow2(&scratch, "disk"));
        qmp.execute("blockdev-add", qcow2(&scratch, "target"));
        let uri = serve(&scratch, &mut qmp, "disk");
        let data = format!("write -s {} 0 4M", path(&scratch, "data"));
        io(&scratch, &uri, &[&data, "write -P 2 6M 4k", "write -P 2 8M 1M"]);
        let was = path(&scratch, "was");
        image(&scratch, &["convert", "-f", "raw", "-O", "raw", &uri, &was]);
        // Slow enough that the writes come first.
        let job = json!({"job-id": "j", "device": "disk", "target": "target", "sync": "full",
            "compress": true, "speed": 1 << 20});
        qmp.execute("blockdev-backup", job);
        io(&scratch, &uri, &["write -P 9 3M 5k", "write -P 9 6M 1M", "discard 8M 512k"]);
        qmp.execute("block-job-set-speed", json!({"device": "j", "speed": 0}));
        wait_for_end(&mut qmp, "j");
        server.stop();
        let (compressed, allocated) = check(&scratch, "target.qcow2");
        assert!(compressed > 0 && compressed == allocated, "{kind}: {compressed}, {allocated}");
        image(&scratch, &["compare", "-q", "-F", "raw", &path(&scratch, "target.qcow2"), &was]);
        check(&scratch, "disk.qcow2");
    }
}

#[test]
fn images_that_cannot_compress_are_refused() {
    let scratch = Scratch::new();
    fs::write(scratch.path("raw.img"), vec![0; MIB]).expect("a disk");
    create(&scratch, "data.qcow2", &format!("data_file={}", path(&scratch, "data.raw")), "1M");
    create(&scratch, "disk.qcow2", "cluster_size=64k", "1M");
    let (server, mut qmp) = daemon(&scratch);
    let mut raw = file(&scratch, "raw.img");
    raw["node-name"] = "raw".into();
    qmp.execute("blockdev-add", raw);
    for name in ["data", "disk"] {
        qmp.execute("blockdev-add", qcow2(&scratch, name));
    }
    qmp.execute("object-add", json!({"qom-type": "throttle-group", "id": "g"}));
    let throttle =
        json!({"driver": "throttle", "node-name": "slow", "throttle-group": "g", "file": "disk"});
    qmp.execute("blockdev-add", throttle);
    for (below, why) in [("raw", "file"), ("data", "qcow2")] {
        let node = json!({"driver": "compress", "node-name": "small", "file": below});
        let why = format!("Compression is not supported for underlying format: {why}");
        assert!(qmp.refused("blockdev-add", node).starts_with(&why), "{below}");
        let job = json!({"job-id": "j", "device": "disk", "target": below, "sync": "full", "compress": true});
        let why = "Compression is not supported for this drive ";
        assert_eq!(qmp.refused("blockdev-backup", job), why);
    }
    let node = json!({"driver": "compress", "node-name": "small", "file": "slow"});
    qmp.execute("blockdev-add", node);
    server.stop();
}

#[test]
fn a_compress_node_is_inactive_or_above_a_node_that_is_read() {
    let scratch = Scratch::new();
    create(&scratch, "disk.qcow2", KINDS[0], "4M");
    let (server, mut qmp) = daemon(&scratch);
    // Nothing is written above a node that is only read.
    let mut read = qcow2(&scratch, "disk");
    read["read-only"] = true.into();
    qmp.execute("blockdev-add", read);
    let compress = json!({"driver": "compress", "node-name": "packed", "file": "disk"});
    qmp.execute("blockdev-add", compress.clone());
    let socket = json!({"type": "unix", "data": {"path": path(&scratch, "nbd")}});
    qmp.execute("nbd-server-start", json!({"addr": socket}));
    let mut export =
        json!({"type": "nbd", "id": "packed", "node-name": "packed", "writable": true});
    assert_eq!(qmp.refused("block-export-add", export.clone()), "Block node is read-only");
    export["writable"] = false.into();
    qmp.execute("block-export-add", export);
    let uri = format!("nbd+unix:///packed?socket={}", path(&scratch, "nbd"));
    let output =
        client_output(&scratch, "qemu-io", &["-r", "-f", "raw", "-c", "read -P 0 0 4M", &uri]);
    assert!(!output.contains("failed"), "{output}");
    qmp.execute("block-export-del", json!({"id": "packed"}));
    assert_eq!(qmp.wait_for("BLOCK_EXPORT_DELETED")["id"], "packed");
    qmp.execute("nbd-server-stop", json!({}));
    for node in ["packed", "disk"] {
        qmp.execute("blockdev-del", json!({"node-name": node}));
    }

    // As the destination of a migration has it.
    let mut inactive = qcow2(&scratch, "disk");
    inactive["active"] = false.into();
    qmp.execute("blockdev-add", inactive);
    let mut above = compress;
    above["active"] = false.into();
    qmp.execute("blockdev-add", above);
    for active in [true, false, true] {
        qmp.execute("blockdev-set-active", json!({"active": active}));
    }
    let uri = serve(&scratch, &mut qmp, "packed");
    io(&scratch, &uri, &["write -P 5 0 1M", "read -P 5 0 1M"]);
    server.stop();
    assert_eq!(check(&scratch, "disk.qcow2"), (16, 16));
}

/// The cut-off part of a compressed cluster reads as zeroes when a program makes the disk larger.
#[test]
fn a_disk_that_ends_within_a_compressed_cluster_grows_by_zeroes() {
    const SIZE: u64 = 256 << 10;
    let kinds = [("compat=0.10", 64 << 10), ("cluster_size=4k", 4 << 10), (KINDS[3], 64 << 10)];
    for (kind, cluster) in kinds {
        for grows_here in [true, false] {
            let scratch = Scratch::new();
            let (data, disk) = (path(&scratch, "data"), path(&scratch, "disk.qcow2"));
            fs::write(&data, half_random(SIZE as usize)).expect("data");
            let convert = ["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", kind, &data, &disk];
            image(&scratch, &convert);
            let (compressed, _) = check(&scratch, "disk.qcow2");
            assert_eq!(compressed, SIZE / cluster, "{kind}");
            let end = SIZE / 2 + cluster / 2;
            let (server, mut qmp) = daemon(&scratch);
            qmp.execute("blockdev-add", qcow2(&scratch, "disk"));
            qmp.execute("block_resize", json!({"node-name": "disk", "size": end}));
            if grows_here {
                qmp.execute("block_resize", json!({"node-name": "disk", "size": SIZE}));
                let uri = serve(&scratch, &mut qmp, "disk");
                io(&scratch, &uri, &[&format!("read -P 0 {end} {}", SIZE - end)]);
            }
            drop(qmp);
            server.stop();
            check(&scratch, "disk.qcow2");
            if !grows_here {
                image(&scratch, &["resize", "-q", "-f", "qcow2", &disk, &SIZE.to_string()]);
            }
            let copy = path(&scratch, "copy");
            image(&scratch, &["convert", "-f", "qcow2", "-O", "raw", &disk, &copy]);
            let mut expected = half_random(SIZE as usize);
            expected[end as usize..].fill(0);
            assert!(fs::read(&copy).expect("a copy") == expected, "{kind}, {grows_here}");
        }
    }
}
