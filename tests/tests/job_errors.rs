//! Failed requests of jobs, beside qemu-storage-daemon: events, progress, and what becomes of the job.

use crate::common;

use common::peers::{Peers, Side, run};
use integration::{Image, Qmp, Scratch, ServerCommand, merged};
use serde_json::{Value, json};

/// What `query-block-jobs` says of the only job, but for its options.
fn state(side: &mut Side) -> Value {
    let jobs = side.qmp.execute("query-block-jobs", json!({}));
    let told = ["status", "len", "offset", "busy", "paused", "ready", "io-status"];
    told.iter().map(|key| jobs[0][*key].clone()).collect()
}

/// A job's events until it is gone, with its state whenever it pauses. `resume` is the command for a job that has paused
/// so many times.
fn life(side: &mut Side, resume: &dyn Fn(&mut Side, usize)) -> Vec<Value> {
    let (mut told, mut pauses) = (Vec::new(), 0);
    loop {
        let event = side.qmp.message();
        told.push(json!([event["event"], event["data"]]));
        match event["data"]["status"].as_str() {
            Some("paused" | "standby") => {
                told.push(state(side));
                pauses += 1;
                resume(side, pauses);
            }
            Some("null") => return told,
            Some(_) | None => {}
        }
    }
}

/// Both jobs have the same life.
fn same_life(peers: &mut Peers, what: &str, resume: &dyn Fn(&mut Side, usize)) -> Vec<Value> {
    let [ours, theirs] = peers.sides().map(|side| life(side, resume));
    assert_eq!(ours, theirs, "{what}");
    ours
}

fn resume(side: &mut Side, _: usize) {
    side.qmp.execute("job-resume", json!({"id": "j"}));
}

/// The file `name` with these errors.
fn faulty(name: &str, rules: &Value) -> Value {
    let image = json!({"driver": "file", "filename": format!("DIR/{name}")});
    merged(json!({"driver": "blkdebug", "image": image}), rules)
}

fn count(told: &[Value], event: &str) -> usize {
    told.iter().filter(|told| told[0] == event).count()
}

/// The first flush comes before the mirror is ready, the second one at its end.
#[test]
fn a_mirror_whose_last_flush_fails_does_what_its_policy_says() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    peers.run("qemu-img", &["create", "-q", "-f", "qcow2", "DIR/source", "2M"]);
    let file = json!({"driver": "file", "filename": "DIR/source"});
    let source = json!({"driver": "qcow2", "node-name": "source", "file": file});
    peers.execute("blockdev-add", source);
    peers.serve("source");
    let write = format!("write -P 1 0 {}", 2 << 20);
    peers.io(&[&write]);
    let at_end = |once: bool| {
        json!({
            "set-state": [{"event": "flush_to_disk", "state": 1, "new_state": 2}],
            "inject-error": [{"event": "flush_to_disk", "state": 2, "once": once}],
        })
    };
    let before_ready =
        json!({"inject-error": [{"event": "flush_to_disk", "state": 1, "once": true}]});
    let cases = [
        ("stop", at_end(true), "job-complete", 1),
        ("stop", at_end(false), "block-job-cancel", 2),
        ("report", at_end(true), "block-job-cancel", 0),
        ("ignore", at_end(true), "block-job-cancel", 0),
        ("enospc", at_end(true), "job-complete", 0),
        ("stop", before_ready.clone(), "block-job-cancel", 1),
        ("report", before_ready.clone(), "", 0),
        ("ignore", before_ready, "block-job-cancel", 0),
    ];
    for (number, (policy, rules, end, pauses)) in cases.into_iter().enumerate() {
        let what = format!("{policy} {rules} {end}");
        let (target, name) = (format!("t{number}"), format!("target{number}"));
        peers.run("qemu-img", &["create", "-q", "-f", "raw", &format!("DIR/{target}"), "2M"]);
        let node = json!({"driver": "raw", "node-name": name, "file": faulty(&target, &rules)});
        peers.execute("blockdev-add", node);
        let mirror = json!({"job-id": "j", "device": "source", "target": name, "sync": "full",
            "on-target-error": policy});
        peers.execute("blockdev-mirror", mirror);
        if pauses == 1 && end == "block-job-cancel" {
            peers.wait_for("BLOCK_JOB_ERROR");
            for side in peers.sides() {
                assert_eq!(side.qmp.wait_for("JOB_STATUS_CHANGE")["status"], "paused", "{what}");
            }
            let [ours, theirs] = peers.sides().map(state);
            assert_eq!(ours, theirs, "{what}");
            peers.execute("job-resume", json!({"id": "j"}));
        }
        if !end.is_empty() {
            peers.wait_for("BLOCK_JOB_READY");
            // Something is left to copy.
            peers.io(&[&format!("write -P {} 0 64k", 2 + number)]);
            let named = if end == "job-complete" { "id" } else { "device" };
            peers.execute(end, json!({named: "j"}));
        }
        let told = same_life(&mut peers, &what, &|side, times| match times {
            2 => drop(side.qmp.execute("block-job-cancel", json!({"device": "j", "force": true}))),
            _ => resume(side, times),
        });
        let at_end = usize::from(!rules["set-state"].is_null() || end.is_empty());
        assert_eq!(
            count(&told, "BLOCK_JOB_ERROR"),
            at_end.max(if pauses == 2 { 2 } else { 0 }),
            "{what}: {told:?}"
        );
        let [ours, theirs] = peers.sides().map(|side| {
            let exports = side.ask("query-block-exports", &json!({}));
            exports["return"][0]["node-name"].clone()
        });
        assert_eq!(ours, theirs, "{what}");
        // Guests continue.
        peers.io(&["read 0 2M", "write -P 9 64k 64k", "flush"]);
        // Back to the source.
        if ours != "source" {
            peers.execute(
                "blockdev-mirror",
                json!({"job-id": "back", "device": ours, "target": "source",
                "sync": "full"}),
            );
            peers.wait_for("BLOCK_JOB_READY");
            peers.execute("job-complete", json!({"id": "back"}));
            peers.wait_for("BLOCK_JOB_COMPLETED");
            for side in peers.sides() {
                while side.qmp.wait_for("JOB_STATUS_CHANGE")["status"] != "null" {}
            }
        }
        peers.execute("blockdev-del", json!({"node-name": name}));
    }
    peers.stop();
}

/// QSD does not flush the target of such a job at its end.
#[test]
fn a_copy_whose_last_flush_fails_does_what_its_policy_says() {
    let scratch = Scratch::new();
    let server = ServerCommand::new(&scratch).monitor("qmp").start();
    let qmp = Qmp::connect(&server.socket("qmp"));
    let mut side = Side { folder: scratch.dir().to_path_buf(), qmp };
    let cases = [
        ("report", 5, "report", "ok", true),
        ("ignore", 5, "ignore", "ok", false),
        ("stop", 5, "stop", "failed", false),
        ("enospc", 28, "stop", "nospace", false),
        ("enospc", 5, "report", "ok", true),
    ];
    for (policy, errno, action, io_status, fails) in cases {
        for kind in ["blockdev-backup", "block-commit"] {
            let what = format!("{kind} {policy} {errno}");
            run("qemu-img", &side.folder, &["create", "-q", "-f", "raw", "DIR/target", "2M"]);
            let over = ["create", "-q", "-f", "qcow2", "-b", "target", "-F", "raw", "DIR/source"];
            run("qemu-img", &side.folder, &over);
            run("qemu-io", &side.folder, &["-c", "write -P 1 0 2M", "DIR/source"]);
            let over = ["create", "-q", "-f", "qcow2", "-b", "source", "-F", "qcow2", "DIR/top"];
            run("qemu-img", &side.folder, &over);
            let rule = json!({"event": "flush_to_disk", "once": true, "errno": errno});
            let target = faulty("target", &json!({"inject-error": [rule]}));
            let file = |name: &str| json!({"driver": "file", "filename": format!("DIR/{name}")});
            let (behind, job) = match kind {
                "blockdev-backup" => (
                    Value::Null,
                    json!({"device": "source", "target": "target", "sync": "full",
                        "on-target-error": policy}),
                ),
                _ => (
                    "target".into(),
                    json!({"device": "top", "top-node": "source", "on-error": policy}),
                ),
            };
            for node in [
                json!({"driver": "raw", "node-name": "target", "file": target}),
                json!({"driver": "qcow2", "node-name": "source", "file": file("source"),
                    "backing": behind}),
                json!({"driver": "qcow2", "node-name": "top", "file": file("top"),
                    "backing": "source"}),
            ] {
                let added = side.ask("blockdev-add", &node);
                assert!(added.get("return").is_some(), "{what}: {added}");
            }
            side.qmp.execute(kind, merged(json!({"job-id": "j"}), &job));
            let told = life(&mut side, &resume);
            let errors: Vec<_> = told.iter().filter(|told| told[0] == "BLOCK_JOB_ERROR").collect();
            let error = json!({"device": "j", "operation": "write", "action": action});
            assert_eq!(errors, [&json!(["BLOCK_JOB_ERROR", error])], "{what}: {told:?}");
            let paused: Vec<_> = told.iter().filter_map(|told| told.get(6)).collect();
            let expected = if action == "stop" { vec![io_status] } else { vec![] };
            assert_eq!(paused, expected, "{what}: {told:?}");
            let end = told.iter().find(|told| told[0] == "BLOCK_JOB_COMPLETED").expect("its end");
            assert_eq!((&end[1]["offset"], &end[1]["len"]), (&json!(2 << 20), &json!(2 << 20)));
            assert_eq!(end[1].get("error").is_some(), fails, "{what}: {end}");
            for node in ["top", "source", "target"] {
                side.qmp.execute("blockdev-del", json!({"node-name": node}));
            }
            run("qemu-io", &side.folder, &["-f", "raw", "-c", "read -P 1 0 2M", "DIR/target"]);
        }
    }
    server.stop();
}

/// A chain base <- mid <- top, in which the base fails at 512 KiB: once, with this error, at this event. A job that writes to
/// the base finds data in the image between.
fn chain(peers: &mut Peers, number: usize, event: &str, errno: u64) {
    let names = ["base", "mid", "top"].map(|name| format!("{name}{number}"));
    let [base, mid, top] = &names;
    peers.run("qemu-img", &["create", "-q", "-f", "raw", &format!("DIR/{base}"), "2M"]);
    peers.run("qemu-io", &["-f", "raw", "-c", "write -P 1 0 2M", &format!("DIR/{base}")]);
    for (image, behind, format) in [(mid, base, "raw"), (top, mid, "qcow2")] {
        let image = format!("DIR/{image}");
        let create = ["create", "-q", "-f", "qcow2", "-b", behind, "-F", format, &image];
        peers.run("qemu-img", &create);
    }
    if event == "write_aio" {
        peers.run("qemu-io", &["-c", "write -P 2 0 2M", &format!("DIR/{mid}")]);
    }
    let rule = json!({"event": event, "sector": 1024, "once": true, "errno": errno});
    let rules = json!({"inject-error": [rule]});
    let file = |name: &str| json!({"driver": "file", "filename": format!("DIR/{name}")});
    let image = |name: &str, backing: &str| {
        json!({
        "driver": "qcow2", "node-name": name, "file": file(name), "backing": backing})
    };
    peers.execute(
        "blockdev-add",
        json!({"driver": "raw", "node-name": base, "file": faulty(base, &rules)}),
    );
    peers.execute("blockdev-add", image(mid, base));
    peers.execute("blockdev-add", image(top, mid));
}

#[test]
fn a_job_on_a_chain_has_copied_what_is_before_an_error() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    let cases = [
        ("block-stream", "report", 5, 524_288),
        ("block-stream", "stop", 5, 2 << 20),
        ("block-stream", "ignore", 5, 2 << 20),
        ("block-stream", "enospc", 28, 2 << 20),
        ("block-stream", "enospc", 5, 524_288),
        ("block-commit", "report", 5, 524_288),
        ("block-commit", "stop", 5, 2 << 20),
        ("block-commit", "ignore", 5, 2 << 20),
        ("block-commit", "enospc", 28, 2 << 20),
    ];
    for (number, (command, policy, errno, offset)) in cases.into_iter().enumerate() {
        let what = format!("{command} {policy} {errno}");
        let is_stream = command == "block-stream";
        let event = if is_stream { "read_aio" } else { "write_aio" };
        chain(&mut peers, number, event, errno);
        let [base, mid, top] = ["base", "mid", "top"].map(|name| format!("{name}{number}"));
        let mut job = json!({"job-id": "j", "device": top, "on-error": policy});
        if !is_stream {
            job = merged(job, &json!({"top-node": mid, "base-node": base}));
        }
        peers.execute(command, job);
        let told = same_life(&mut peers, &what, &resume);
        assert_eq!(count(&told, "BLOCK_JOB_ERROR"), 1, "{what}: {told:?}");
        let ended = told.iter().find(|told| told[0] == "BLOCK_JOB_COMPLETED").expect("its end");
        assert_eq!(ended[1]["offset"], offset, "{what}: {told:?}");
        // A stream without a part fails, and leaves the chain.
        let fails = policy == "report" || policy == "enospc" && errno == 5;
        let fails = fails || is_stream && policy == "ignore";
        assert_eq!(ended[1].get("error").is_some(), fails, "{what}: {told:?}");
        let images = [&top, &mid, &base];
        for side in peers.sides() {
            let nodes = side.qmp.execute("query-named-block-nodes", json!({"flat": true}));
            let nodes = nodes.as_array().expect("a list");
            let node = nodes.iter().find(|node| node["node-name"] == *top).expect("it is open");
            let behind = node.get("backing_file");
            let expected = match (fails, is_stream) {
                (true, _) => Some("mid"),
                (false, true) => None,
                (false, false) => Some("base"),
            };
            let found = behind.and_then(Value::as_str);
            assert_eq!(found.is_some(), expected.is_some(), "{what}: {node}");
            assert!(found.is_none_or(|found| expected.is_some_and(|name| found.contains(name))));
            for image in images {
                side.qmp.execute("blockdev-del", json!({"node-name": image}));
            }
        }
        // A client sees the same disk as before.
        let pattern = if is_stream { "read -P 1 0 2M" } else { "read -P 2 0 2M" };
        peers.run("qemu-io", &["-c", pattern, &format!("DIR/{top}")]);
    }
    peers.stop();
}

/// Copies run in parallel, and several fail: one resumption is enough.
#[test]
fn a_mirror_pauses_once_for_copies_that_fail_together() {
    let scratch = Scratch::new();
    Image::filled(&scratch, "source", 8);
    Image::empty(&scratch, "target", 8);
    let server = ServerCommand::new(&scratch).monitor("qmp").start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let file = |name: &str| json!({"driver": "file", "filename": scratch.path(name)});
    qmp.execute("blockdev-add", merged(file("source"), &json!({"node-name": "source"})));
    let full = json!({"event": "none", "iotype": "write", "errno": 28, "once": true});
    let target = json!({"driver": "blkdebug", "node-name": "target", "image": file("target"),
        "inject-error": vec![full; 4]});
    qmp.execute("blockdev-add", target);
    let mirror = json!({"job-id": "j", "device": "source", "target": "target", "sync": "full",
        "on-target-error": "enospc"});
    qmp.execute("blockdev-mirror", mirror);
    let mut told = Vec::new();
    loop {
        let event = qmp.message();
        let name = event["event"].as_str().expect("an event").to_owned();
        if event["data"]["status"] == "paused" {
            qmp.execute("job-resume", json!({"id": "j"}));
        }
        let is_ready = name == "BLOCK_JOB_READY";
        told.push(name);
        if is_ready {
            break;
        }
    }
    assert_eq!(told.iter().filter(|name| *name == "BLOCK_JOB_ERROR").count(), 1, "{told:?}");
    qmp.execute("job-complete", json!({"id": "j"}));
    while qmp.wait_for("JOB_STATUS_CHANGE")["status"] != "null" {}
    server.stop();
    let [source, target] = ["source", "target"].map(|name| std::fs::read(scratch.path(name)));
    assert!(source.expect("it is there") == target.expect("it is there"));
}
