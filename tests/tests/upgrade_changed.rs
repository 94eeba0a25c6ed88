//! The daemon is upgraded after QMP commands have changed its configuration. The new process serves the present
//! configuration, and reports the same to clients.

use crate::common;

use std::path::Path;
use std::process::Command;

use common::{Load, MIB, add_file, check, daemon, wait_for_end, wait_for_status};
use integration::nbd::{client_output, nbd_export, nbd_server, nbd_uri};
use integration::{
    BlkClient, Image, Qmp, Request, Scratch, Segment, Server, ServerCommand, pattern, request, tool,
};
use serde_json::{Value, json};

fn monitor(server: &Server) -> Qmp {
    Qmp::connect(&server.socket("qmp"))
}

fn connect(server: &Server) -> BlkClient {
    BlkClient::connect(&server.socket("disk"), 2, 16).expect("the export serves")
}

/// Removes file sizes and allocations, as qcow2 files grow.
fn without_sizes(told: &mut Value) {
    match told {
        Value::Object(members) => {
            members.remove("actual-size");
            if members.get("format").is_some_and(|format| format == "file") {
                members.remove("virtual-size");
            }
            members.values_mut().for_each(without_sizes);
        }
        Value::Array(list) => list.iter_mut().for_each(without_sizes),
        _ => {}
    }
}

/// Everything that QMP reports about nodes and exports, by name.
fn told(server: &Server) -> [Value; 2] {
    let mut qmp = monitor(server);
    let sorted = |mut list: Value, key: &str| {
        let by_name = |one: &Value| one[key].as_str().map(str::to_owned);
        list.as_array_mut().expect("a list").sort_by_key(by_name);
        without_sizes(&mut list);
        list
    };
    [
        sorted(qmp.execute("query-named-block-nodes", json!({})), "node-name"),
        sorted(qmp.execute("query-block-exports", json!({})), "id"),
    ]
}

/// Upgrades the daemon twice, so that a configuration that was handed over is handed over again. Checks that QMP reports the
/// same.
fn upgrades(server: &mut Server, load: &Load) {
    let before = told(server);
    for _ in 0..2 {
        load.go_on();
        server.upgrade();
        assert_eq!(told(server), before);
    }
    load.go_on();
}

/// Whether other programs cannot write to the image.
fn is_locked(image: &Path) -> bool {
    let io = Command::new(tool("qemu-io")).args(["-f", "raw", "-c", "quit"]).arg(image).output();
    !io.expect("qemu-io runs").status.success()
}

#[test]
fn reopened_nodes_keep_their_options() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", MIB);
    let other = Image::filled(&scratch, "other.img", 1);
    let mut server = ServerCommand::new(&scratch)
        .monitor("qmp")
        .file("read", &other, "")
        .arg("--blockdev")
        .arg(format!(
            "raw,node-name=disk,file.driver=file,file.node-name=file,file.filename={}",
            image.path().display()
        ))
        .export("disk", "num-queues=2")
        .start();
    let load = Load::start(connect(&server), 1);
    let reopen = |server: &Server, direct: bool| {
        let file = json!({
            "driver": "file", "node-name": "file", "filename": image.path(),
            "cache": {"direct": direct, "no-flush": false}, "discard": "unmap",
        });
        let read = json!({
            "driver": "file", "node-name": "read", "filename": other.path(), "read-only": direct,
        });
        monitor(server).execute("blockdev-reopen", json!({"options": [file, read]}));
    };
    // The second time by the new process, with locks taken by the first one.
    for direct in [true, false] {
        reopen(&server, direct);
        upgrades(&mut server, &load);
        let [nodes, _] = told(&server);
        let of = |name: &str| {
            let nodes = nodes.as_array().expect("a list");
            nodes.iter().find(|node| node["node-name"] == name).expect("a node").clone()
        };
        assert_eq!(
            (&of("file")["cache"]["direct"], &of("read")["ro"]),
            (&json!(direct), &json!(direct))
        );
        assert!(is_locked(image.path()));
        // Nothing uses that node: it locks its image to write.
        assert_eq!(is_locked(other.path()), !direct);
    }
    let log = load.finish();
    server.stop();
    check(&image, &log, log.len());
    assert!(!is_locked(image.path()) && !is_locked(other.path()));
}

#[test]
fn changed_properties_survive_an_upgrade() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", MIB);
    let mut server = ServerCommand::new(&scratch)
        .monitor("qmp")
        .iothread("io0")
        .arg("--object")
        .arg("throttle-group,id=group,x-iops-total=1000,x-iops-total-max=2000")
        .arg("--blockdev")
        .arg("throttle,node-name=slow,throttle-group=group,file.driver=null-co")
        .file("disk", &image, "")
        .export("disk", "num-queues=2,iothread=io0")
        .start();
    let mut qmp = monitor(&server);
    qmp.execute("object-add", json!({"qom-type": "iothread", "id": "io1", "poll-grow": 4}));
    let set = |qmp: &mut Qmp, path: &str, property: &str, value: Value| {
        qmp.execute("qom-set", json!({"path": path, "property": property, "value": value}));
    };
    set(&mut qmp, "/objects/io0", "poll-max-ns", json!(5000));
    set(&mut qmp, "/objects/io0", "poll-max-ns", json!(6000));
    set(&mut qmp, "/objects/io0", "poll-policy", json!("weighted"));
    set(&mut qmp, "io1", "poll-max-ns", json!(0));
    set(&mut qmp, "group", "limits", json!({"iops-total-max": 0, "bps-read": 1 << 30}));
    drop(qmp);
    let properties = |server: &Server| {
        let mut qmp = monitor(server);
        ["io0", "io1", "group"].map(|id| {
            let list = qmp.execute("qom-list", json!({"path": id}));
            let names = list.as_array().expect("a list").iter().map(|one| one["name"].clone());
            let mut get =
                |name| (qmp.execute("qom-get", json!({"path": id, "property": name})), name);
            names
                .map(|name| {
                    let (value, name) = get(name);
                    json!([name, value])
                })
                .collect::<Vec<_>>()
        })
    };
    let before = properties(&server);
    assert!(before[0].contains(&json!(["poll-max-ns", 6000])), "{before:?}");
    assert!(before[2].contains(&json!(["x-iops-total-max", 0])), "{before:?}");
    let load = Load::start(connect(&server), 2);
    upgrades(&mut server, &load);
    assert_eq!(properties(&server), before);
    load.finish();
    server.stop();
}

/// Makes an empty qcow2 image.
fn qcow2(path: &Path, mib: u64) {
    let mut command = Command::new(tool("qemu-img"));
    command.args(["create", "-q", "-f", "qcow2"]).arg(path).arg(format!("{mib}M"));
    assert!(command.status().expect("qemu-img can be run").success());
}

#[test]
fn overlays_and_copies_survive_an_upgrade() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", MIB);
    let mut server = daemon(&scratch, &image, "cache.direct=on");
    let load = Load::start(connect(&server), 3);
    let (top, over) = (scratch.path("top.qcow2"), scratch.path("over.qcow2"));
    let snapshot = json!({"node-name": "disk", "snapshot-file": top, "snapshot-node-name": "top"});
    monitor(&server).execute("blockdev-snapshot-sync", snapshot);
    upgrades(&mut server, &load);
    assert_eq!(told(&server)[1][0]["node-name"], "top");

    let mut qmp = monitor(&server);
    let add = |qmp: &mut Qmp, name: &str, path: &Path, mib: u64| {
        qcow2(path, mib);
        // Generated names are generated again.
        let below = format!("{name}-file");
        let file = json!({"driver": "file", "filename": path, "node-name": below});
        let node = json!({"driver": "qcow2", "node-name": name, "file": file, "backing": null});
        qmp.execute("blockdev-add", node);
    };
    // A node that does not fit stays as it was.
    add(&mut qmp, "small", &scratch.path("small.qcow2"), MIB / 2);
    let why = qmp.refused("blockdev-snapshot", json!({"node": "top", "overlay": "small"}));
    assert!(why.contains("bytes"), "{why}");
    add(&mut qmp, "over", &over, MIB);
    let put = json!({"node": "top", "overlay": "over"});
    qmp.execute("blockdev-snapshot", put.clone());
    let busy = "Node 'top' is busy: node is used as backing hd of 'over'";
    assert_eq!(qmp.refused("blockdev-snapshot", put), busy);
    drop(qmp);
    upgrades(&mut server, &load);

    let flat = scratch.path("flat.img");
    let mut qmp = monitor(&server);
    // The backing node of a snapshot is read-only, in the new process as in the old one.
    for node in ["disk", "top"] {
        let addr = json!({"type": "unix", "path": scratch.path("behind.sock")});
        let export = json!({"type": "vhost-user-blk", "id": "x", "node-name": node, "addr": addr, "writable": true});
        let why = qmp.refused("block-export-add", export);
        assert_eq!(why, "Cannot export read-only node as writable");
    }
    let options = json!({"driver": "file", "filename": flat, "size": MIB << 20});
    qmp.execute("blockdev-create", json!({"job-id": "c", "options": options}));
    wait_for_status(&mut qmp, "c", "concluded");
    let why = qmp.refused("x-upgrade", json!({}));
    assert!(why.contains("job 'c' has ended"), "{why}");
    qmp.execute("job-dismiss", json!({"id": "c"}));
    add_file(&mut qmp, "flat", &flat);
    let mirror = json!({"job-id": "m", "device": "over", "target": "flat", "sync": "full"});
    qmp.execute("blockdev-mirror", mirror);
    qmp.wait_for("BLOCK_JOB_READY");
    let why = qmp.refused("x-upgrade", json!({}));
    assert!(why.contains("a job is running"), "{why}");
    qmp.execute("job-complete", json!({"id": "m"}));
    wait_for_end(&mut qmp, "m");
    drop(qmp);
    upgrades(&mut server, &load);
    assert_eq!(told(&server)[1][0]["node-name"], "flat");
    // The other nodes exist, and can be deleted.
    let mut qmp = monitor(&server);
    for node in ["over", "top", "disk", "small"] {
        qmp.execute("blockdev-del", json!({"node-name": node}));
    }
    drop(qmp);
    upgrades(&mut server, &load);
    let log = load.finish();
    server.stop();
    check(&Image::existing(&flat), &log, log.len());
    for path in [&top, &over] {
        let sound = Image::existing(path).qemu_img(&["check", "-f", "qcow2"]);
        assert!(sound.status.success(), "{sound:?}");
    }
}

/// A snapshot of a node that was defined inside another one and is exported over NBD by its name.
#[test]
fn nested_nodes_survive_an_upgrade() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", MIB);
    let path = image.path().display();
    let command = ServerCommand::new(&scratch).monitor("qmp").arg("--blockdev");
    let command = command.arg(format!(
        "raw,node-name=disk,file.driver=file,file.node-name=file,file.filename={path}"
    ));
    let command = nbd_server(command.export("disk", "num-queues=2"), &scratch, "");
    let mut server = nbd_export(command, "file", "").start();
    let load = Load::start(connect(&server), 4);
    let top = scratch.path("top.qcow2");
    let snapshot = json!({"node-name": "file", "snapshot-file": top, "snapshot-node-name": "top"});
    monitor(&server).execute("blockdev-snapshot-sync", snapshot);
    upgrades(&mut server, &load);
    let [_, exports] = told(&server);
    assert_eq!(
        (&exports[0]["node-name"], &exports[1]["node-name"]),
        (&json!("disk"), &json!("top"))
    );
    let log = load.finish();
    // The export keeps its old name.
    let copy = scratch.path("copy.img");
    let target = copy.to_str().expect("UTF-8");
    client_output(&scratch, "nbdcopy", &[&nbd_uri(&scratch, "file"), target]);
    server.stop();
    check(&Image::existing(&copy), &log, log.len());
}

/// The new process opens the image, and the node inside it, late: so it does the filter.
#[test]
fn a_filter_above_a_node_inside_an_image_survives_an_upgrade() {
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    let filled = Image::filled(&scratch, "disk.img", MIB);
    let mut convert = Command::new(tool("qemu-img"));
    convert.args(["convert", "-f", "raw", "-O", "qcow2"]).arg(filled.path()).arg(&path);
    assert!(convert.status().expect("qemu-img can be run").success());
    let file = format!("file.driver=file,file.node-name=inside,file.filename={}", path.display());
    let command = ServerCommand::new(&scratch)
        .monitor("qmp")
        .args(["--object", "throttle-group,id=group"])
        .args(["--blockdev", &format!("qcow2,node-name=disk,{file}")])
        .export("disk", "num-queues=2");
    let mut server = command.start();
    let load = Load::start(connect(&server), 5);
    let above = json!({"driver": "throttle", "node-name": "above", "throttle-group": "group",
        "file": "inside", "read-only": true});
    monitor(&server).execute("blockdev-add", above);
    upgrades(&mut server, &load);
    load.finish();
    server.stop();
}

/// Its data file, which only the header names, stays locked for writing below the snapshot.
#[test]
fn a_snapshot_of_an_image_with_a_data_file_is_handed_over() {
    let scratch = Scratch::new();
    let (image, data) = (scratch.path("disk.qcow2"), scratch.path("disk.data"));
    let made = Command::new(tool("qemu-img"))
        .args(["create", "-q", "-f", "qcow2", "-o"])
        .arg(format!("data_file={}", data.display()))
        .args([image.as_os_str(), "1M".as_ref()])
        .status();
    assert!(made.expect("qemu-img runs").success());
    let command = ServerCommand::new(&scratch)
        .monitor("qmp")
        .arg("--blockdev")
        .arg(format!("qcow2,node-name=disk,file.driver=file,file.filename={}", image.display()));
    let mut server = command.export("disk", "num-queues=2").start();
    let mut client = connect(&server);
    client.write(0, &pattern::block(0, 1));
    let top = scratch.path("top.qcow2");
    let snapshot = json!({"node-name": "disk", "snapshot-file": top, "snapshot-node-name": "top"});
    monitor(&server).execute("blockdev-snapshot-sync", snapshot);
    let before = told(&server);
    for generation in 2..4 {
        server.upgrade();
        assert_eq!(told(&server), before);
        assert_eq!(client.read(0, pattern::BLOCK), pattern::block(0, generation - 1));
        client.write(0, &pattern::block(0, generation));
    }
    drop(client);
    server.stop();
    let below = Image::existing(&data).read(0, pattern::BLOCK);
    assert_eq!(pattern::generation(0, &below), Ok(1));
}

#[test]
fn inactive_nodes_stay_inactive() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", MIB);
    let over = scratch.path("over.qcow2");
    qcow2(&over, MIB);
    let command = ServerCommand::new(&scratch)
        .monitor("qmp")
        .file("disk", &image, "")
        .arg("--blockdev")
        .arg(format!("qcow2,node-name=over,file.driver=file,file.filename={}", over.display()))
        .export("disk", "num-queues=2,allow-inactive=on")
        .export("over", "allow-inactive=on");
    // This export does not set allow-inactive, but a read-only NBD export keeps no node active.
    let mut server = nbd_export(nbd_server(command, &scratch, ""), "disk", "").start();
    let mut client = connect(&server);
    let mut other = BlkClient::connect(&server.socket("over"), 1, 16).expect("the export serves");
    other.write(0, &pattern::block(0, 9));
    let block = pattern::block(7, 1);
    client.put(0, &block);
    monitor(&server).execute("blockdev-set-active", json!({"active": false}));
    let segments = vec![Segment { at: 0, len: block.len(), device_writes: false }];
    client.submit(0, &Request { kind: request::OUT, sector: 7 * 8, segments });
    let before = told(&server);
    assert_eq!(before[0][0]["active"], false);
    for _ in 0..2 {
        server.upgrade();
        assert_eq!(told(&server), before);
        assert!(!is_locked(image.path()) && !is_locked(&over));
        let found = pattern::generation(7, &image.read(7 * pattern::BLOCK as u64, pattern::BLOCK));
        assert_eq!(found, Ok(0), "nothing is done meanwhile");
    }
    monitor(&server).execute("blockdev-set-active", json!({"active": true}));
    let done = client.wait(0).expect("an answer");
    assert_eq!((done.len(), done[0].status), (1, 0));
    assert_eq!(client.read(7 * 8, block.len()), block);
    assert_eq!(other.read(0, pattern::BLOCK), pattern::block(0, 9));
    assert!(is_locked(image.path()) && is_locked(&over));
    server.upgrade();
    assert_eq!(client.read(7 * 8, block.len()), block);
    drop((client, other));
    server.stop();
}
