//! Jobs and commands put other images below a node than its options name. A node that is opened again stays above the
//! present images.

use crate::common;

use common::peers::run;
use common::wait_for_end;
use integration::{Qmp, Scratch, Server, ServerCommand, merged};
use serde_json::{Value, json};

fn start(scratch: &Scratch) -> (Server, Qmp) {
    let file = scratch.path("state").display().to_string();
    let server = ServerCommand::new(scratch).monitor("qmp").arg("--state").arg(file).start();
    let qmp = monitor(&server);
    (server, qmp)
}

/// A client of the monitor, which answers when the configuration is complete.
fn monitor(server: &Server) -> Qmp {
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    qmp.execute("query-block-exports", json!({}));
    qmp
}

fn qcow2(scratch: &Scratch, name: &str, backing: Value) -> Value {
    let path = scratch.path(&format!("{name}.qcow2"));
    let file = json!({"driver": "file", "filename": path});
    json!({"driver": "qcow2", "node-name": name, "file": file, "backing": backing})
}

/// What changes below the disk: a command with its arguments, and the images below the disk afterwards.
type Change = (&'static str, Value, &'static [&'static str]);

fn changes() -> Vec<Change> {
    let job = |more: Value| merged(json!({"job-id": "j", "device": "top"}), &more);
    vec![
        ("blockdev-mirror", job(json!({"target": "other", "sync": "full"})), &["other"]),
        ("block-commit", job(json!({"base-node": "base"})), &["base"]),
        ("block-commit", job(json!({"top-node": "mid", "base-node": "base"})), &["top", "base"]),
        ("block-stream", job(json!({"base-node": "base"})), &["top", "base"]),
        ("block-stream", job(json!({})), &["top"]),
        (
            "blockdev-snapshot",
            json!({"node": "top", "overlay": "over"}),
            &["over", "top", "mid", "base"],
        ),
        (
            "change-backing-file",
            json!({"device": "top", "image-node-name": "top", "backing-file": "mid.qcow2"}),
            &["top", "mid", "base"],
        ),
    ]
}

/// Adds the nodes, as they are defined in one another or next to one another.
fn add_nodes(scratch: &Scratch, qmp: &mut Qmp, nested: bool) {
    qmp.execute("object-add", json!({"qom-type": "throttle-group", "id": "group"}));
    let mut below = Value::Null;
    for name in ["base", "mid", "top"] {
        let node = qcow2(scratch, name, below);
        below = match nested {
            true => node,
            false => {
                qmp.execute("blockdev-add", node);
                name.into()
            }
        };
    }
    let disk = json!({"driver": "throttle", "node-name": "disk", "throttle-group": "group", "file": below});
    qmp.execute("blockdev-add", disk);
    for name in ["over", "other"] {
        qmp.execute("blockdev-add", qcow2(scratch, name, Value::Null));
    }
}

/// The names of the images below the disk.
fn below(qmp: &mut Qmp) -> Vec<String> {
    let nodes = qmp.execute("query-named-block-nodes", json!({"flat": true}));
    let child = |of: &str, role: &str| {
        let node = nodes.as_array()?.iter().find(|node| node["node-name"] == of)?;
        let child = node["children"].as_array()?.iter().find(|child| child["child"] == role)?;
        Some(child["node-name"].as_str()?.to_owned())
    };
    let mut names: Vec<String> = child("disk", "file").into_iter().collect();
    while let Some(name) = names.last().and_then(|last| child(last, "backing")) {
        names.push(name);
    }
    names
}

/// Has a client of the disk carry out commands of qemu-io.
fn io(scratch: &Scratch, qmp: &mut Qmp, writable: bool, commands: &[&str]) {
    let addr = json!({"type": "unix", "data": {"path": scratch.path("nbd")}});
    qmp.execute("nbd-server-start", json!({"addr": addr}));
    let export = json!({"type": "nbd", "id": "e", "node-name": "disk", "writable": writable});
    qmp.execute("block-export-add", export);
    let mut arguments = vec!["-f", "raw", "nbd+unix:///disk?socket=DIR/nbd"];
    if !writable {
        arguments.insert(0, "-r");
    }
    commands.iter().for_each(|command| arguments.extend(["-c", command]));
    let output = run("qemu-io", scratch.dir(), &arguments);
    assert!(!output.contains("failed"), "{output}");
    qmp.execute("nbd-server-stop", json!({}));
}

#[derive(Debug, Clone, Copy)]
enum Anew {
    Activated,
    Upgraded,
    Started,
}

/// Changes what lies below the disk, opens the disk again, and writes to it.
fn follow((command, arguments, expected): Change, nested: bool, anew: Anew) {
    let scratch = Scratch::new();
    let mut create = vec!["create", "-q", "-f", "qcow2", "DIR/base.qcow2", "1M"];
    run("qemu-img", scratch.dir(), &create);
    for name in ["DIR/over.qcow2", "DIR/other.qcow2"] {
        create[4] = name;
        run("qemu-img", scratch.dir(), &create);
    }
    for (name, backing) in [("DIR/mid.qcow2", "base.qcow2"), ("DIR/top.qcow2", "mid.qcow2")] {
        let overlay = ["create", "-q", "-f", "qcow2", "-b", backing, "-F", "qcow2", name];
        run("qemu-img", scratch.dir(), &overlay);
    }
    let (mut server, mut qmp) = start(&scratch);
    add_nodes(&scratch, &mut qmp, nested);
    io(&scratch, &mut qmp, true, &["write -q -P 1 0 64k"]);
    qmp.execute(command, arguments.clone());
    if arguments.get("job-id").is_some() {
        if command == "blockdev-mirror" || expected == ["base"] {
            qmp.wait_for("BLOCK_JOB_READY");
            qmp.execute("job-complete", json!({"id": "j"}));
        }
        wait_for_end(&mut qmp, "j");
    }
    assert_eq!(below(&mut qmp), expected);
    io(&scratch, &mut qmp, true, &["write -q -P 2 4k 4k"]);
    match anew {
        Anew::Activated => {
            let active = |active| json!({"node-name": "disk", "active": active});
            qmp.execute("blockdev-set-active", active(false));
            io(&scratch, &mut qmp, false, &["read -P 1 0 4k", "read -P 2 4k 4k"]);
            qmp.execute("blockdev-set-active", active(true));
        }
        Anew::Upgraded => {
            server.upgrade();
            qmp = monitor(&server);
        }
        Anew::Started => {
            server.kill();
            (server, qmp) = start(&scratch);
        }
    }
    assert_eq!(below(&mut qmp), expected);
    let commands = ["read -P 1 0 4k", "read -P 2 4k 4k", "write -q -P 3 8k 4k", "flush"];
    io(&scratch, &mut qmp, true, &commands);
    drop(qmp);
    server.stop();
    let image = format!("DIR/{}.qcow2", expected[0]);
    let read =
        ["-r", "-c", "read -P 1 0 4k", "-c", "read -P 2 4k 4k", "-c", "read -P 3 8k 4k", &image];
    let output = run("qemu-io", scratch.dir(), &read);
    assert!(!output.contains("failed"), "{output}");
}

fn follow_all(anew: Anew) {
    for nested in [false, true] {
        for (n, change) in changes().into_iter().enumerate() {
            println!("{anew:?}, nested: {nested}, change {n}: {} {}", change.0, change.1);
            follow(change, nested, anew);
        }
    }
}

#[test]
fn a_disk_that_becomes_active_again_is_above_its_present_images() {
    follow_all(Anew::Activated);
}

#[test]
fn an_upgraded_daemon_has_the_disk_above_its_present_images() {
    follow_all(Anew::Upgraded);
}

#[test]
fn a_restarted_daemon_has_the_disk_above_its_present_images() {
    follow_all(Anew::Started);
}
