//! QEMU's QMP client has the same dialogue with qemu-storage-daemon and with ringmill.

use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use integration::{Image, Scratch, ServerCommand, client, eventually, python, tied_command, tool};
use serde_json::{Value, json};

/// A command, and the paths of members in which ringmill's answer may differ or lack something.
struct Exchange {
    command: &'static str,
    arguments: Value,
    differs: &'static [&'static str],
}

fn same(command: &'static str, arguments: Value) -> Exchange {
    Exchange { command, arguments, differs: &[] }
}

/// The dialogue, with sockets and an image in `dir`.
fn dialogue(dir: &Path, image: &Image) -> Vec<Exchange> {
    let thread = |id: &str, more: Value| {
        let mut options = json!({"qom-type": "iothread", "id": id});
        options.as_object_mut().expect("an object").extend(more.as_object().expect("one").clone());
        options
    };
    let qom = |path: &str, property: &str| json!({"path": path, "property": property});
    let set = |property: &str, value: Value| json!({"path": "/objects/t0", "property": property, "value": value});
    let null = |name: &str| json!({"driver": "null-co", "node-name": name});
    let nbd_node = |server: Value| json!({"driver": "nbd", "node-name": "n", "server": server});
    let file = json!({"driver": "file", "filename": image.path()});
    let export = |id: &str, node: &str, socket: &str| {
        let addr = json!({"type": "unix", "path": dir.join(socket)});
        json!({"type": "vhost-user-blk", "id": id, "node-name": node, "addr": addr})
    };
    let nbd = |mut more: Value| {
        more["addr"] = json!({"type": "unix", "data": {"path": dir.join("nbd")}});
        more
    };
    let with = |mut value: Value, name: &str, member: Value| {
        value[name] = member;
        value
    };
    let reopen = |more: Value| {
        let mut options = file.clone();
        options.as_object_mut().expect("an object").extend(more.as_object().expect("one").clone());
        json!({"options": [options]})
    };
    let active = |node: &str, on: bool| json!({"node-name": node, "active": on});
    let mirror = |more: Value| {
        let mut options = json!({"job-id": "j", "device": "f", "target": "n0", "sync": "full"});
        options.as_object_mut().expect("an object").extend(more.as_object().expect("one").clone());
        options
    };
    vec![
        Exchange {
            command: "query-version",
            arguments: json!({}),
            differs: &["/qemu/major", "/qemu/minor", "/qemu/micro", "/package"],
        },
        same("frob", json!({})),
        same("query-version", json!({"frob": 1})),
        same("qmp_capabilities", json!({})),
        same("object-add", thread("t0", json!({}))),
        same("object-add", thread("t0", json!({}))),
        same("object-add", thread("1 t", json!({}))),
        same("object-add", thread("t1", json!({"poll-max-ns": "5"}))),
        same("object-add", thread("t1", json!({"poll-max-ns": -5}))),
        same("object-add", thread("t1", json!({"thread-pool-max": 0}))),
        same("object-add", thread("t1", json!({"frob": 1}))),
        same("object-add", json!({"qom-type": "iothread"})),
        same("object-add", json!({"qom-type": "frob", "id": "t1"})),
        same("object-add", json!({})),
        same("object-add", thread("t1", json!({"poll-max-ns": 7}))),
        // QSD's monitors are objects since QEMU 11.1.
        Exchange {
            command: "qom-list",
            arguments: json!({"path": "/objects"}),
            differs: &["/compat_monitor0"],
        },
        same("qom-list", json!({"path": "/objects/t1"})),
        same("qom-list", json!({"path": "t1"})),
        same("qom-list", json!({"path": "/objects/frob"})),
        same("qom-list", json!({"path": "frob"})),
        same("qom-list", json!({"path": ""})),
        // Without a user's value, ringmill's default depends on the measured cost of a sleep.
        Exchange {
            command: "qom-get",
            arguments: qom("/objects/t0", "poll-max-ns"),
            differs: &[""],
        },
        same("qom-get", qom("/objects/t1", "poll-max-ns")),
        same("qom-get", qom("/objects/t1", "thread-pool-max")),
        same("qom-get", qom("t1", "type")),
        same("qom-get", qom("/objects", "t1")),
        same("qom-get", qom("/", "objects")),
        same("qom-get", qom("/objects/t1", "frob")),
        same("qom-get", qom("/objects/frob", "frob")),
        same("qom-set", set("poll-max-ns", json!(100))),
        same("qom-get", qom("/objects/t0", "poll-max-ns")),
        same("qom-set", set("poll-grow", json!(3))),
        same("qom-get", qom("/objects/t0", "poll-grow")),
        same("qom-set", set("poll-max-ns", json!("100"))),
        same("qom-set", set("poll-max-ns", json!(-1))),
        same("qom-set", set("poll-max-ns", json!(1.5))),
        same("qom-set", set("poll-max-ns", json!(1u64 << 63))),
        same("qom-set", set("thread-pool-max", json!(0))),
        same("qom-set", set("thread-pool-min", json!(65))),
        same("qom-set", set("frob", json!(1))),
        same("qom-set", set("type", json!("x"))),
        same("qom-set", json!({"path": "/objects/t0", "property": "poll-grow"})),
        same("object-del", json!({"id": "t1"})),
        same("object-del", json!({"id": "t1"})),
        same("object-del", json!({"id": 1})),
        same("object-del", json!({})),
        same("blockdev-add", null("n0")),
        same("blockdev-add", null("n0")),
        same("blockdev-add", null("1n")),
        same("blockdev-add", json!({"driver": "null-co"})),
        same("blockdev-add", json!({"driver": "frob", "node-name": "n"})),
        same("blockdev-add", json!({"node-name": "n"})),
        same("blockdev-add", json!({"driver": "file", "node-name": "n"})),
        same("blockdev-add", with(file.clone(), "node-name", json!("f"))),
        same(
            "blockdev-add",
            json!({"driver": "file", "node-name": "n", "filename": "/nonexistent"}),
        ),
        same("blockdev-add", with(null("n"), "frob", json!(1))),
        same("blockdev-add", json!({"driver": "nbd", "node-name": "n"})),
        same("blockdev-add", nbd_node(json!({"type": "unix"}))),
        same("blockdev-add", nbd_node(json!({"type": "unix", "path": dir.join("nowhere")}))),
        same("blockdev-add", nbd_node(json!({"type": "inet", "host": "127.0.0.1", "port": "1"}))),
        same("blockdev-add", nbd_node(json!({"type": "inet", "host": "127.0.0.1", "port": "x"}))),
        same("blockdev-add", nbd_node(json!({"type": "frob"}))),
        same(
            "blockdev-add",
            json!({"driver": "raw", "node-name": "r", "offset": 1 << 20, "file": "n0", "read-only": true}),
        ),
        same(
            "blockdev-add",
            json!({"driver": "raw", "node-name": "outer", "file":
                {"driver": "null-co", "node-name": "inner", "size": 1 << 20}}),
        ),
        Exchange {
            command: "query-named-block-nodes",
            arguments: json!({}),
            differs: &[
                "/r/file",
                "/r/image/filename",
                "/outer/file",
                "/outer/image/filename",
                "/inner/file",
                "/inner/image/filename",
                "*/image/limits",
                "*/image/format-specific",
                "*/image/dirty-flag",
            ],
        },
        same("blockdev-reopen", json!({})),
        same("blockdev-reopen", reopen(json!({"node-name": "f", "read-only": true}))),
        same("blockdev-reopen", reopen(json!({"node-name": "f"}))),
        same("blockdev-reopen", reopen(json!({"node-name": "f", "frob": 1}))),
        same("blockdev-reopen", reopen(json!({"node-name": "f", "filename": "/frob"}))),
        same("blockdev-reopen", reopen(json!({"node-name": "f", "locking": "off"}))),
        same("blockdev-reopen", reopen(json!({"node-name": "frob"}))),
        same("blockdev-reopen", reopen(json!({}))),
        same("blockdev-set-active", json!({})),
        same("blockdev-set-active", active("frob", true)),
        same("blockdev-set-active", active("r", false)),
        same("blockdev-set-active", active("r", false)),
        same("blockdev-add", json!({"driver": "raw", "node-name": "s", "file": "r"})),
        same(
            "blockdev-add",
            json!({"driver": "raw", "node-name": "s", "file": "r", "active": false, "read-only": true}),
        ),
        same("blockdev-set-active", active("s", true)),
        same("blockdev-set-active", active("r", false)),
        same("blockdev-set-active", active("s", false)),
        same("blockdev-del", json!({"node-name": "s"})),
        same("blockdev-set-active", json!({"active": true})),
        same("blockdev-set-active", json!({"active": false})),
        same("blockdev-set-active", active("outer", true)),
        same("blockdev-set-active", json!({"active": true})),
        same("job-cancel", json!({"id": "frob"})),
        same("job-dismiss", json!({})),
        same("block-job-cancel", json!({"device": "frob"})),
        same("block-job-set-speed", json!({"device": "frob", "speed": 1})),
        same("query-jobs", json!({})),
        same("query-block-jobs", json!({})),
        same("blockdev-mirror", mirror(json!({"target": "f"}))),
        same("blockdev-mirror", mirror(json!({"device": "frob"}))),
        same("blockdev-mirror", mirror(json!({"target": "frob"}))),
        same("blockdev-mirror", mirror(json!({"sync": "frob"}))),
        same("blockdev-mirror", mirror(json!({"granularity": 100}))),
        same("blockdev-mirror", mirror(json!({"granularity": 1000}))),
        same("blockdev-backup", mirror(json!({"target": "f"}))),
        same("blockdev-backup", mirror(json!({"device": "frob"}))),
        same("blockdev-backup", mirror(json!({}))),
        same("blockdev-snapshot-sync", json!({"snapshot-file": "/nonexistent"})),
        same("blockdev-snapshot", json!({"node": "f", "overlay": "frob"})),
        same("block-job-change", json!({"id": "j", "type": "backup", "copy-mode": "background"})),
        same("blockdev-snapshot", json!({"node": "f", "overlay": "n0"})),
        same("block-export-add", with(export("e", "n0", "e"), "writable", json!(true))),
        same("block-export-add", export("e", "n0", "f")),
        same("block-export-add", export("1e", "n0", "f")),
        same("block-export-add", export("f", "frob", "f")),
        same("block-export-add", with(export("f", "r", "f"), "writable", json!(true))),
        same("block-export-add", with(export("f", "n0", "f"), "iothread", json!("frob"))),
        same("block-export-add", export("f", "n0", "nowhere/f")),
        same("block-export-add", with(export("f", "n0", "f"), "num-queues", json!(0))),
        same("block-export-add", with(export("f", "n0", "f"), "type", json!("frob"))),
        same("block-export-add", json!({"type": "vhost-user-blk", "id": "f", "node-name": "n0"})),
        same("query-block-exports", json!({})),
        same("blockdev-set-active", json!({"active": false})),
        same("nbd-server-stop", json!({})),
        same("nbd-server-add", json!({"device": "n0"})),
        same("nbd-server-remove", json!({"name": "n0"})),
        same("nbd-server-start", json!({})),
        same("nbd-server-start", json!({"addr": {"type": "unix", "path": "s"}})),
        same("nbd-server-start", json!({"addr": {"type": "frob", "data": {}}})),
        same("nbd-server-start", nbd(json!({"frob": 1}))),
        same("nbd-server-start", nbd(json!({"tls-creds": "frob"}))),
        same("nbd-server-start", nbd(json!({"tls-creds": "t0"}))),
        same("nbd-server-start", nbd(json!({"max-connections": -1}))),
        same("nbd-server-start", nbd(json!({"handshake-max-seconds": 5, "max-connections": 3}))),
        same("nbd-server-start", nbd(json!({}))),
        same("nbd-server-add", json!({"device": "frob"})),
        same("nbd-server-add", json!({"device": "n0", "name": ""})),
        same("nbd-server-add", json!({"device": "n0", "bitmap": "frob"})),
        same("nbd-server-add", json!({"device": "n0", "writable": true})),
        same("nbd-server-add", json!({"device": "n0"})),
        same("nbd-server-add", json!({"device": "n0", "name": "e"})),
        // Fails, as the node is read-only.
        same("nbd-server-add", json!({"device": "r", "writable": true, "description": "a disk"})),
        same(
            "block-export-add",
            json!({"type": "nbd", "id": "f", "node-name": "n0", "name": "x", "iothread": "t0"}),
        ),
        same("block-export-add", json!({"type": "nbd", "id": "g", "node-name": "n0", "name": "x"})),
        same(
            "block-export-add",
            json!({"type": "nbd", "id": "g", "node-name": "n0", "name": "y", "bitmaps": ["frob"]}),
        ),
        same("nbd-server-remove", json!({"name": "x"})),
        same("nbd-server-remove", json!({"name": "f", "mode": "frob"})),
        same("nbd-server-remove", json!({"name": "f", "mode": "hard"})),
        same("nbd-server-remove", json!({"name": "e"})),
        same("nbd-server-stop", json!({})),
        same("nbd-server-start", nbd(json!({}))),
        same("nbd-server-stop", json!({})),
        same("blockdev-del", json!({"node-name": "r"})),
        same("blockdev-del", json!({"node-name": "n0"})),
        same("blockdev-del", json!({"node-name": "inner"})),
        same("blockdev-del", json!({"node-name": "frob"})),
        same("blockdev-del", json!({"node-name": "outer"})),
        same("blockdev-add", null("inner")),
        same("block-export-del", json!({"id": "frob"})),
        same("block-export-del", json!({"id": "e", "mode": "frob"})),
        same("block-export-del", json!({"id": "e"})),
        same("query-block-exports", json!({})),
        same("blockdev-del", json!({"node-name": "n0"})),
        same("blockdev-del", json!({"node-name": "f"})),
        same("blockdev-del", json!({"node-name": "inner"})),
    ]
}

/// Runs the dialogue with the client. Returns the answers and the events.
fn hold(socket: &Path, dialogue: &[Exchange]) -> (Vec<Value>, Value) {
    let input: Value =
        dialogue.iter().map(|exchange| json!([exchange.command, exchange.arguments])).collect();
    eventually("the monitor's socket", || socket.exists().then_some(()));
    let mut child = tied_command(&python())
        .arg(client("qmp_dialogue.py"))
        .arg(socket)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("Python runs");
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin.write_all(input.to_string().as_bytes()).expect("Python reads");
    drop(stdin);
    let output = child.wait_with_output().expect("Python ends");
    assert!(output.status.success(), "the client ended with {}", output.status);
    let mut said: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let answers = said["answers"].as_array().expect("a list").clone();
    (answers, said["events"].take())
}

/// Lists what ringmill's answer lacks or has otherwise, by path. Additional members are permitted.
fn differences(qsd: &Value, ours: &Value, at: &str, found: &mut Vec<String>) {
    match (qsd, ours) {
        (Value::Object(qsd), Value::Object(ours)) => {
            for (name, value) in qsd {
                let at = format!("{at}/{name}");
                differences(value, ours.get(name).unwrap_or(&Value::Null), &at, found);
            }
        }
        // Lists of things with names have no order.
        (Value::Array(qsd), Value::Array(ours)) => {
            let key = |value: &Value| {
                let names = ["node-name", "name", "id"].map(|name| value[name].as_str());
                names.into_iter().flatten().next().map(str::to_owned)
            };
            for value in qsd {
                let name = key(value);
                let other = ours.iter().find(|other| key(other) == name && name.is_some());
                let at = format!("{at}/{}", name.unwrap_or_default());
                differences(value, other.unwrap_or(&Value::Null), &at, found);
            }
        }
        (qsd, ours) if qsd == ours => {}
        _ => found.push(at.to_owned()),
    }
}

fn may_differ(at: &str, differs: &[&str]) -> bool {
    differs.iter().any(|known| match known.strip_prefix('*') {
        Some(end) => at.contains(end),
        None => at == format!("/return{known}") || at.starts_with(&format!("/return{known}/")),
    })
}

#[test]
fn the_same_dialogue_with_qemu_storage_daemon() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let theirs = scratch.path("theirs");
    let ours = scratch.path("ours");
    for dir in [&theirs, &ours] {
        std::fs::create_dir(dir).expect("a new folder");
    }
    let socket = theirs.join("qmp.sock");
    let mut qsd = tied_command(&tool("qemu-storage-daemon"))
        .arg("--chardev")
        .arg(format!("socket,id=m,path={},server=on,wait=off", socket.display()))
        .args(["--monitor", "chardev=m"])
        .spawn()
        .expect("qemu-storage-daemon runs");
    let (qsd_answers, qsd_events) = hold(&socket, &dialogue(&theirs, &image));
    qsd.kill().and_then(|()| qsd.wait()).expect("our child");

    let server = ServerCommand::new(&scratch).monitor("qmp").start();
    let exchanges = dialogue(&ours, &image);
    let (our_answers, our_events) = hold(&server.socket("qmp"), &exchanges);
    server.stop();

    let mut wrong = Vec::new();
    for ((exchange, qsd), ours) in exchanges.iter().zip(&qsd_answers).zip(&our_answers) {
        // Each daemon has a separate folder.
        let qsd: Value = serde_json::from_str(&qsd.to_string().replace("/theirs/", "/ours/"))
            .expect("JSON still");
        let mut found = Vec::new();
        differences(&qsd, ours, "", &mut found);
        found.retain(|at| !may_differ(at, exchange.differs));
        if !found.is_empty() || qsd.get("return").is_some() != ours.get("return").is_some() {
            let Exchange { command, arguments, .. } = exchange;
            wrong
                .push(format!("{command} {arguments}\n  {found:?}\n  QSD:  {qsd}\n  ours: {ours}"));
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), exchanges.len(), wrong.join("\n"));
    assert_eq!(qsd_answers.len(), exchanges.len());
    assert_eq!(our_answers.len(), exchanges.len());
    assert_eq!(our_events, qsd_events);
    assert_eq!(our_events, json!(vec!["BLOCK_EXPORT_DELETED"; 4]));
}
