//! Jobs: a disk moves to other storage, and is backed up, while it is in use.

use crate::common;

use std::fs;
use std::sync::atomic::Ordering;

use common::peers::Peers;
use common::{
    Load, MIB, check, check_moment, create, daemon, under_load, wait_for_end, wait_for_status,
};
use integration::nbd::{client_output, nbd_export, nbd_server};
use integration::{
    BlkClient, Guest, Image, Qmp, Request, Scratch, Segment, Server, ServerCommand, eventually,
    merged, request,
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

/// A node above it names it in metadata, and would show other data after the next start.
#[test]
fn an_image_that_another_one_needs_is_not_replaced() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    peers.run("qemu-img", &["create", "-q", "-f", "qcow2", "DIR/base", "1M"]);
    let over = ["create", "-q", "-f", "qcow2", "-b", "DIR/base", "-F", "qcow2", "DIR/top"];
    peers.run("qemu-img", &over);
    peers.run("qemu-img", &["create", "-q", "-f", "raw", "DIR/copy", "1M"]);
    let file = |name: &str, image: &str| json!({"driver": "file", "node-name": name, "filename": format!("DIR/{image}")});
    let base = json!({"driver": "qcow2", "node-name": "base", "file": file("base-file", "base")});
    let top = json!({"driver": "qcow2", "node-name": "top", "file": file("top-file", "top"), "backing": "base"});
    for node in [base, top, file("copy", "copy")] {
        peers.both("blockdev-add", node);
    }
    for device in ["base", "base-file", "top-file"] {
        for sync in ["full", "top", "none"] {
            let mirror = json!({"job-id": "j", "device": device, "target": "copy", "sync": sync});
            let answer = peers.both("blockdev-mirror", mirror);
            assert_eq!(answer["error"]["desc"], "Need a root block node", "{device}, {sync}");
        }
    }
    peers.stop();
}

/// A client that does not wait for a job finds its failure in the log.
#[test]
fn a_job_that_fails_is_in_the_log() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk0.img", MIB);
    let server = daemon(&scratch, &image, "");
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    create(&mut qmp, "small", &scratch.path("small.img"), 1 << 20);
    create(&mut qmp, "copy", &scratch.path("copy.img"), MIB << 20);
    let rules = json!([{"event": "none", "iotype": "write", "errno": 28}]);
    let full =
        json!({"driver": "blkdebug", "node-name": "full", "image": "copy", "inject-error": rules});
    qmp.execute("blockdev-add", full);
    create(&mut qmp, "other", &scratch.path("other.img"), MIB << 20);
    let late = json!({"driver": "blkdebug", "node-name": "late", "image": "other",
        "set-state": [{"event": "flush_to_disk", "state": 1, "new_state": 2}],
        "inject-error": [{"event": "flush_to_disk", "state": 2}]});
    qmp.execute("blockdev-add", late);
    let size = "Source and target image have different sizes";
    let cases = [
        ("blockdev-mirror", "small", size),
        ("blockdev-mirror", "late", "writing the target: Input/output error"),
        ("blockdev-mirror", "full", "writing the target: No space left on device"),
        ("blockdev-backup", "full", "writing the target: No space left on device"),
    ];
    for (command, target, why) in cases {
        let arguments = json!({"job-id": "j", "device": "disk", "target": target, "sync": "full"});
        qmp.execute(command, arguments);
        if target == "late" {
            qmp.wait_for("BLOCK_JOB_READY");
            qmp.execute("job-complete", json!({"id": "j"}));
        }
        qmp.wait_for("BLOCK_JOB_COMPLETED");
        let kind = command.trim_start_matches("blockdev-");
        let line = format!("job 'j': {kind} of node 'disk' to '{target}' failed: {why}\n");
        assert!(server.log().contains(&line), "{line}: {}", server.log());
    }
    // What a client cancels is no failure.
    create(&mut qmp, "spare", &scratch.path("spare.img"), MIB << 20);
    let mirror = json!({"job-id": "j", "device": "disk", "target": "spare", "sync": "full"});
    qmp.execute("blockdev-mirror", mirror);
    qmp.execute("block-job-cancel", json!({"device": "j", "force": true}));
    qmp.wait_for("BLOCK_JOB_CANCELLED");
    assert_eq!(server.log().matches("failed:").count(), cases.len(), "{}", server.log());
    server.stop();
}

#[test]
fn a_disk_moves_while_it_is_in_use() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk0.img", MIB);
    let server = daemon(&scratch, &image, "cache.direct=on");
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let blk = BlkClient::connect(&server.socket("disk"), 2, 16).expect("the export serves");
    let load = Load::start(blk, 1);
    let mut from = ("disk".to_owned(), image.path().to_owned());
    for round in 1..=4 {
        let node = format!("disk{round}");
        let path = scratch.path(&format!("disk{round}.img"));
        create(&mut qmp, &node, &path, MIB << 20);
        // Small parts and a limit, so that the load meets each stage.
        let mirror = json!({
            "job-id": "move", "device": from.0, "target": node, "sync": "full",
            "granularity": 512 << (4 * (round % 3)), "speed": (64 << 20) * (round % 2),
            "copy-mode": if round > 2 { "write-blocking" } else { "background" },
        });
        qmp.execute("blockdev-mirror", mirror);
        for name in [&from.0, &node] {
            let why = qmp.refused("blockdev-del", json!({"node-name": name}));
            assert!(why.contains("in use"), "{why}");
        }
        assert_eq!(qmp.wait_for("BLOCK_JOB_READY")["device"], "move");
        load.go_on();
        qmp.execute("job-complete", json!({"id": "move"}));
        wait_for_end(&mut qmp, "move");
        let exports = qmp.execute("query-block-exports", json!({}));
        assert_eq!(exports[0]["node-name"], node.as_str());
        let counted = qmp.execute("x-query-export-stats", json!({}));
        assert_eq!(counted[0]["nodes"], json!([node]));
        // Nothing holds the old one any more.
        qmp.execute("blockdev-del", json!({"node-name": from.0}));
        fs::write(&from.1, []).expect("the old image can be emptied");
        load.go_on();
        from = (node, path);
    }
    assert_eq!(qmp.execute("query-jobs", json!({})), json!([]));
    let log = load.finish();
    server.stop();
    check(&Image::existing(&from.1), &log, log.len());
}

#[test]
fn a_mirror_that_is_cancelled_leaves_the_disk_where_it_is() {
    let scratch = Scratch::new();
    let (image, server, mut qmp, load) = under_load(&scratch, 2);
    create(&mut qmp, "copy", &scratch.path("copy.img"), MIB << 20);
    let mirror = |speed: u64| json!({"job-id": "m", "device": "disk", "target": "copy", "sync": "full", "speed": speed});
    // While it copies.
    qmp.execute("blockdev-mirror", mirror(1 << 20));
    load.go_on();
    qmp.execute("job-cancel", json!({"id": "m"}));
    let cancelled = qmp.wait_for("BLOCK_JOB_CANCELLED");
    assert_eq!(cancelled["device"], "m");
    let names: Vec<_> = cancelled.as_object().expect("an object").keys().collect();
    assert_eq!(names, ["device", "len", "offset", "speed", "type"]);
    // While it is paused, and then ready: then the copy is a whole one.
    qmp.execute("blockdev-mirror", mirror(0));
    qmp.wait_for("BLOCK_JOB_READY");
    qmp.execute("job-pause", json!({"id": "m"}));
    load.go_on();
    assert_eq!(qmp.execute("query-block-jobs", json!({}))[0]["status"], "standby");
    qmp.execute("job-resume", json!({"id": "m"}));
    let before = load.written.load(Ordering::Relaxed);
    qmp.execute("block-job-cancel", json!({"device": "m"}));
    wait_for_end(&mut qmp, "m");
    let after = load.written.load(Ordering::Relaxed) + 1;
    qmp.execute("blockdev-del", json!({"node-name": "copy"}));
    load.go_on();
    let log = load.finish();
    server.stop();
    check(&image, &log, log.len());
    check_moment(&Image::existing(&scratch.path("copy.img")), &log, before..=after);
}

/// With `copy-mode=write-blocking` an answered write is in the target, though the job is paused.
#[test]
fn blocked_writes_are_in_the_target_when_they_are_answered() {
    for change in [false, true] {
        let scratch = Scratch::new();
        let (image, server, mut qmp, load) = under_load(&scratch, 4);
        let path = scratch.path("copy.img");
        create(&mut qmp, "copy", &path, MIB << 20);
        let mode = if change { "background" } else { "write-blocking" };
        // Parts larger and smaller than the load's blocks.
        let mirror = json!({
            "job-id": "m", "device": "disk", "target": "copy", "sync": "full", "copy-mode": mode,
            "granularity": if change { 512 } else { 65536 },
        });
        qmp.execute("blockdev-mirror", mirror);
        qmp.wait_for("BLOCK_JOB_READY");
        let to = |mode: &str| json!({"id": "m", "type": "mirror", "copy-mode": mode});
        qmp.execute("block-job-change", to("write-blocking"));
        let why = qmp.refused("block-job-change", to("background"));
        assert_eq!(why, "Change to copy mode 'background' is not implemented");
        eventually("both sides to be equal", || {
            let job = &qmp.execute("query-block-jobs", json!({}))[0];
            (job["actively-synced"] == true).then_some(())
        });
        qmp.execute("job-pause", json!({"id": "m"}));
        load.go_on();
        let log = load.finish();
        server.kill();
        check(&image, &log, log.len());
        check(&Image::existing(&path), &log, log.len());
    }
}

#[test]
fn a_backup_is_the_disk_at_one_moment() {
    let scratch = Scratch::new();
    let (image, server, mut qmp, load) = under_load(&scratch, 3);
    let mut backups = Vec::new();
    for round in 0..3 {
        let path = scratch.path(&format!("backup{round}.img"));
        create(&mut qmp, "backup", &path, MIB << 20);
        load.go_on();
        let before = load.written.load(Ordering::Relaxed);
        let speed = if round == 0 { 0 } else { 64 << 20 };
        let backup = json!({
            "job-id": "b", "device": "disk", "target": "backup", "sync": "full", "speed": speed,
            "auto-finalize": round != 2, "auto-dismiss": round != 2,
        });
        qmp.execute("blockdev-backup", backup);
        let after = load.written.load(Ordering::Relaxed) + 1;
        if round == 2 {
            qmp.wait_for("BLOCK_JOB_PENDING");
            load.go_on();
            qmp.execute("job-finalize", json!({"id": "b"}));
        }
        wait_for_end(&mut qmp, "b");
        if round == 2 {
            assert_eq!(qmp.execute("query-jobs", json!({}))[0]["status"], "concluded");
            qmp.execute("job-dismiss", json!({"id": "b"}));
        }
        qmp.execute("blockdev-del", json!({"node-name": "backup"}));
        backups.push((path, before..=after));
    }
    let log = load.finish();
    server.stop();
    check(&image, &log, log.len());
    for (path, moment) in backups {
        check_moment(&Image::existing(&path), &log, moment);
    }
}

/// A qcow2 image on a part of a file gets full, and the part becomes larger.
#[test]
fn a_backup_waits_for_space_as_in_qemu_storage_daemon() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    peers.run("qemu-img", &["create", "-q", "-f", "qcow2", "DIR/target.qcow2", "4M"]);
    for side in peers.sides() {
        fs::write(side.path("disk.raw"), vec![7; 4 << 20]).expect("a disk");
        let file = fs::OpenOptions::new().write(true).open(side.path("target.qcow2"));
        file.and_then(|file| file.set_len(8 << 20)).expect("a longer file");
    }
    let file = |name: &str| json!({"driver": "file", "filename": format!("DIR/{name}")});
    let part = |mib: u64| {
        let file = file("target.qcow2");
        json!({"driver": "raw", "node-name": "part", "file": file, "size": mib << 20})
    };
    peers.execute("blockdev-add", merged(file("disk.raw"), &json!({"node-name": "disk"})));
    peers.execute("blockdev-add", part(2));
    let target = json!({"driver": "qcow2", "node-name": "target", "file": "part"});
    peers.execute("blockdev-add", target);
    let backup = json!({"job-id": "j", "device": "disk", "target": "target", "sync": "full",
        "on-target-error": "enospc", "x-perf": {"max-workers": 1}});
    peers.execute("blockdev-backup", backup);
    assert_eq!(peers.wait_for("BLOCK_JOB_ERROR")["action"], "stop");
    for side in peers.sides() {
        let job = &side.qmp.execute("query-block-jobs", json!({}))[0];
        assert_eq!((&job["status"], &job["io-status"]), (&json!("paused"), &json!("nospace")));
    }
    peers.execute("blockdev-reopen", json!({"options": [part(8)]}));
    peers.execute("job-resume", json!({"id": "j"}));
    assert_eq!(peers.wait_for("BLOCK_JOB_COMPLETED").get("error"), None);
    peers.stop();
    let compare = ["compare", "-f", "raw", "-F", "qcow2", "DIR/disk.raw", "DIR/target.qcow2"];
    peers.run("qemu-img", &compare);
}

/// A guest's file system checks itself; fio checks what it has written, before and after the move.
#[test]
fn a_guests_disk_moves() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk0.img", 64);
    let moved = scratch.path("disk1.img");
    let server = daemon(&scratch, &image, "aio=io_uring,cache.direct=on");
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let mut guest = Guest::new().disk(server.socket("disk")).queues(2).boot(
        "everywhere() {
            verify --bsrange=4k-64k --size=12m --offset_increment=12m --numjobs=2 $1
        }
        echo begin
        read go
        everywhere --do_verify=1
        everywhere --do_verify=1
        echo written
        read go
        everywhere --verify_only=1
        md5sum </dev/vda",
    );
    guest.expect("begin");
    create(&mut qmp, "disk1", &moved, 64 << 20);
    let mirror = json!({
        "job-id": "move", "device": "disk", "target": "disk1", "sync": "full", "speed": 16 << 20,
    });
    qmp.execute("blockdev-mirror", mirror);
    guest.send("go");
    qmp.wait_for("BLOCK_JOB_READY");
    qmp.execute("block-job-complete", json!({"device": "move"}));
    wait_for_end(&mut qmp, "move");
    qmp.execute("blockdev-del", json!({"node-name": "disk"}));
    fs::write(image.path(), []).expect("the old image can be emptied");
    guest.expect("written");
    guest.send("go");
    let lines = guest.finish();
    server.stop();
    let sum = format!("{}  -", Image::existing(&moved).md5());
    assert_eq!(lines.last(), Some(&sum), "the guest's view against the image");
}

/// Adds the node `slow`, as large as the disk, which takes this number of bytes per second.
fn slow_target(qmp: &mut Qmp, scratch: &Scratch, bps: u64) {
    let limits = json!({"bps-total": bps});
    qmp.execute("object-add", json!({"qom-type": "throttle-group", "id": "tg", "limits": limits}));
    create(qmp, "copy", &scratch.path("copy.img"), MIB << 20);
    let throttle =
        json!({"driver": "throttle", "node-name": "slow", "throttle-group": "tg", "file": "copy"});
    qmp.execute("blockdev-add", throttle);
}

/// A daemon with a backup of a filled disk to a node that takes this number of bytes per second.
fn throttled_backup(scratch: &Scratch, bps: u64) -> (Server, Qmp) {
    let image = Image::filled(scratch, "disk0.img", MIB);
    let server = daemon(scratch, &image, "");
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    slow_target(&mut qmp, scratch, bps);
    let backup = json!({"job-id": "j", "device": "disk", "target": "slow", "sync": "full"});
    qmp.execute("blockdev-backup", backup);
    (server, qmp)
}

/// What a throttle group holds back does not hold up a job that was cancelled, or the daemon's end.
#[test]
fn a_throttled_job_ends_at_once() {
    let scratch = Scratch::new();
    let (server, mut qmp) = throttled_backup(&scratch, 1000);
    qmp.execute("block-job-cancel", json!({"device": "j"}));
    qmp.wait_for("BLOCK_JOB_CANCELLED");
    eventually("the job's end", || {
        (qmp.execute("query-jobs", json!({})) == json!([])).then_some(())
    });
    let backup = json!({"job-id": "j", "device": "disk", "target": "slow", "sync": "full"});
    qmp.execute("blockdev-backup", backup);
    server.stop();
}

/// A target that does not answer holds up neither the end of its job, nor the guest after that.
#[test]
fn a_cancelled_job_leaves_a_target_that_hangs() {
    for (command, more) in [
        ("blockdev-backup", json!({"sync": "none"})),
        ("blockdev-mirror", json!({"sync": "none", "copy-mode": "write-blocking"})),
    ] {
        let (scratch, behind) = (Scratch::new(), Scratch::new());
        let back = ServerCommand::new(&behind).arg("--blockdev");
        let back = back.arg(format!("null-co,node-name=to,size={}", MIB << 20));
        let back = nbd_export(nbd_server(back, &behind, ""), "to", ",writable=on").start();
        let image = Image::filled(&scratch, "disk0.img", MIB);
        let server = ServerCommand::new(&scratch)
            .monitor("qmp")
            .iothread("io0")
            .file("disk", &image, "")
            .export("disk", "iothread=io0,stall-timeout-ms=100")
            .start();
        let mut qmp = Qmp::connect(&server.socket("qmp"));
        let target = json!({"type": "unix", "path": behind.path("nbd.sock")});
        let target = json!({"driver": "nbd", "node-name": "to", "server": target, "export": "to"});
        qmp.execute("blockdev-add", target);
        let job = json!({"job-id": "j", "device": "disk", "target": "to"});
        qmp.execute(command, merged(job, &more));
        let mut blk = BlkClient::connect(&server.socket("disk"), 1, 16).expect("it serves");
        // This copy connects to the target.
        blk.write(0, &[1; 512]);
        if command == "blockdev-mirror" {
            // Its flush is over, which a cancel waits for.
            qmp.wait_for("BLOCK_JOB_READY");
        }
        back.pause();
        let segments = vec![Segment { at: 0, len: 512, device_writes: false }];
        blk.put(0, &[2; 512]);
        blk.submit(0, &Request { kind: request::OUT, sector: 1024, segments });
        eventually("a write that hangs", || {
            server.log().contains("write of 512 bytes at offset 524288 takes longer").then_some(())
        });
        qmp.execute("job-cancel", json!({"id": "j"}));
        qmp.wait_for("BLOCK_JOB_CANCELLED");
        assert_eq!(blk.wait(0).expect("a reply")[0].status, 0, "{command}");
        blk.write(2048, &[3; 512]);
        assert_eq!(qmp.execute("query-jobs", json!({})), json!([]));
        drop(blk);
        server.stop();
        assert_eq!(image.read(524_288, 512), [2; 512], "{command}");
        back.signal(Signal::SIGCONT);
        back.stop();
    }
}

/// A guest's write goes through when a backup is cancelled. What the backup is still copying there is not discarded.
#[test]
fn a_cancelled_backup_discards_nothing_that_is_written_meanwhile() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk0.img", MIB);
    let server = ServerCommand::new(&scratch)
        .monitor("qmp")
        .iothread("io0")
        .file("disk", &image, "discard=unmap")
        .export("disk", "iothread=io0,stall-timeout-ms=100")
        .start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    slow_target(&mut qmp, &scratch, 1000);
    let backup = json!({
        "job-id": "j", "device": "disk", "target": "slow", "sync": "full", "discard-source": true,
    });
    qmp.execute("blockdev-backup", backup);
    eventually("a copy", || {
        let jobs = qmp.execute("query-block-jobs", json!({}));
        (jobs[0]["busy"] == true).then_some(())
    });
    let mut blk = BlkClient::connect(&server.socket("disk"), 1, 16).expect("it serves");
    let segments = vec![Segment { at: 0, len: 512, device_writes: false }];
    blk.put(0, &[2; 512]);
    // Of the parts that are being copied, the target has taken the first one.
    blk.submit(0, &Request { kind: request::OUT, sector: 8 << 11, segments });
    eventually("a write that waits for the copy", || {
        server.log().contains("write of 512 bytes at offset 8388608 takes longer").then_some(())
    });
    qmp.execute("job-cancel", json!({"id": "j"}));
    assert_eq!(blk.wait(0).expect("a reply")[0].status, 0);
    qmp.wait_for("BLOCK_JOB_CANCELLED");
    assert_eq!(blk.read(8 << 11, 512), [2; 512]);
    drop(blk);
    server.stop();
}

/// A job that is paused and not busy has no request in flight.
#[test]
fn a_paused_job_is_busy_until_its_requests_have_ended() {
    let scratch = Scratch::new();
    let (server, mut qmp) = throttled_backup(&scratch, 8 << 20);
    qmp.execute("block-job-pause", json!({"device": "j"}));
    let offset = eventually("a job without requests", || {
        let job = &qmp.execute("query-block-jobs", json!({}))[0];
        assert_eq!(job["paused"], true);
        (job["busy"] == false).then(|| job["offset"].clone())
    });
    qmp.execute("block-job-cancel", json!({"device": "j", "force": true}));
    assert_eq!(qmp.wait_for("BLOCK_JOB_CANCELLED")["offset"], offset);
    server.stop();
}

#[test]
fn a_mirror_copies_no_more_at_once_than_its_buffers_hold() {
    let scratch = Scratch::new();
    let server = ServerCommand::new(&scratch).monitor("qmp").start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    for name in ["from", "to"] {
        let node = json!({"driver": "null-co", "node-name": name, "size": 1 << 20});
        qmp.execute("blockdev-add", node);
    }
    // The second copy begins after half a day.
    let mirror = json!({
        "job-id": "j", "device": "from", "target": "to", "sync": "full", "speed": 1, "buf-size": 64 << 10,
    });
    qmp.execute("blockdev-mirror", mirror);
    eventually("the first copy", || {
        let jobs = qmp.execute("query-block-jobs", json!({}));
        jobs[0]["offset"].as_u64().filter(|offset| *offset > 0).map(drop)
    });
    qmp.execute("block-job-cancel", json!({"device": "j"}));
    assert_eq!(qmp.wait_for("BLOCK_JOB_CANCELLED")["offset"], 64 << 10);
    server.stop();
}

/// With what counts, these jobs would take longer than a lifetime.
#[test]
fn zeroes_and_what_is_not_stored_do_not_count_for_the_speed() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    for side in peers.sides() {
        // qemu-img would store the first block.
        let hole = fs::File::create(side.path("hole")).expect("a new file");
        hole.set_len(256 << 20).expect("a longer file");
    }
    for (name, backing) in [("base", None), ("mid", Some("base")), ("top", Some("mid"))] {
        let behind = backing.map(|backing| ["-b", backing, "-F", "qcow2"]);
        let mut create = vec!["create", "-q", "-f", "qcow2"];
        create.extend(behind.iter().flatten());
        let path = format!("DIR/{name}");
        create.extend([&*path, "256M"]);
        peers.run("qemu-img", &create);
    }
    for name in ["zero", "to"] {
        let path = format!("DIR/{name}");
        peers.run("qemu-img", &["create", "-q", "-f", "qcow2", &path, "256M"]);
    }
    peers.run("qemu-io", &["-f", "qcow2", "-c", "write -q -z 0 256M", "DIR/zero"]);
    peers.run("qemu-io", &["-f", "qcow2", "-c", "write -q -z 0 1M", "DIR/base"]);
    let file = |name: &str| json!({"driver": "file", "filename": format!("DIR/{name}")});
    let raw = json!({"driver": "raw", "node-name": "hole", "file": file("hole")});
    peers.execute("blockdev-add", raw);
    let nodes =
        [("base", None), ("mid", Some("base")), ("top", Some("mid")), ("zero", None), ("to", None)];
    for (name, backing) in nodes {
        let node =
            json!({"driver": "qcow2", "node-name": name, "file": file(name), "backing": backing});
        peers.execute("blockdev-add", node);
    }
    let job = |more: Value| merged(json!({"job-id": "j", "speed": 1}), &more);
    let mirror =
        |device: &str, sync: &str| job(json!({"device": device, "target": "to", "sync": sync}));
    // QSD 10 counts zeroes that a mirror reads, 11 does not.
    for (newest, command, arguments) in [
        (true, "blockdev-mirror", mirror("hole", "full")),
        (true, "blockdev-mirror", mirror("zero", "full")),
        (false, "blockdev-mirror", mirror("top", "top")),
        (false, "blockdev-backup", mirror("top", "top")),
        (
            false,
            "block-commit",
            job(json!({"device": "top", "top-node": "mid", "base-node": "base"})),
        ),
        (false, "block-stream", job(json!({"device": "top", "base-node": "base"}))),
    ] {
        for side in peers.sides().into_iter().take(if newest { 1 } else { 2 }) {
            side.qmp.execute(command, arguments.clone());
            if command == "blockdev-mirror" {
                side.qmp.wait_for("BLOCK_JOB_READY");
                side.qmp.execute("block-job-cancel", json!({"device": "j", "force": true}));
                side.qmp.wait_for("BLOCK_JOB_CANCELLED");
            } else {
                side.qmp.wait_for("BLOCK_JOB_COMPLETED");
            }
            eventually("the job's end", || {
                (side.ask("query-jobs", &json!({}))["return"] == json!([])).then_some(())
            });
        }
    }
    peers.stop();
}

#[test]
fn a_mirror_that_has_ended_cannot_be_changed() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    for name in ["from", "to"] {
        let path = format!("DIR/{name}");
        peers.run("qemu-img", &["create", "-q", "-f", "raw", &path, "1M"]);
        let file = json!({"driver": "file", "node-name": name, "filename": path});
        peers.execute("blockdev-add", file);
    }
    let job = json!({"job-id": "j", "device": "from", "target": "to", "sync": "full",
        "auto-finalize": false, "auto-dismiss": false});
    peers.execute("blockdev-mirror", job);
    peers.wait_for("BLOCK_JOB_READY");
    let change = |mode: &str| json!({"id": "j", "type": "mirror", "copy-mode": mode});
    peers.execute("block-job-change", change("background"));
    peers.execute("job-complete", json!({"id": "j"}));
    for (status, next) in [("pending", "job-finalize"), ("concluded", "job-dismiss")] {
        for side in peers.sides() {
            while side.qmp.wait_for("JOB_STATUS_CHANGE")["status"] != status {}
            let jobs = side.qmp.execute("query-block-jobs", json!({}));
            assert_eq!(jobs[0]["busy"], false, "{status}");
        }
        let other = json!({"id": "j", "type": "backup"});
        for arguments in [change("write-blocking"), change("background"), other] {
            let answer = peers.both("block-job-change", arguments);
            let why = format!("Job 'j' in state '{status}' cannot accept command verb 'change'");
            assert_eq!(answer["error"]["desc"], why);
        }
        peers.execute(next, json!({"id": "j"}));
    }
    peers.stop();
}

/// A wait for the speed after it would take half a day. QSD's mirrors wait.
#[test]
fn a_job_ends_after_its_last_copy_whatever_its_speed() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    for (name, backing) in [("base", None), ("mid", Some("base")), ("top", Some("mid"))] {
        let behind = backing.map(|backing| ["-b", backing, "-F", "qcow2"]);
        let mut create = vec!["create", "-q", "-f", "qcow2"];
        create.extend(behind.iter().flatten());
        let path = format!("DIR/{name}");
        create.extend([&*path, "64k"]);
        peers.run("qemu-img", &create);
        peers.run("qemu-io", &["-f", "qcow2", "-c", "write -q -P 1 0 64k", &path]);
    }
    peers.run("qemu-img", &["create", "-q", "-f", "qcow2", "-b", "top", "-F", "qcow2", "DIR/over"]);
    peers.run("qemu-img", &["create", "-q", "-f", "raw", "DIR/to", "64k"]);
    let file = |name: &str| json!({"driver": "file", "filename": format!("DIR/{name}")});
    peers.execute("blockdev-add", json!({"driver": "raw", "node-name": "to", "file": file("to")}));
    let nodes =
        [("base", None), ("mid", Some("base")), ("top", Some("mid")), ("over", Some("top"))];
    for (name, backing) in nodes {
        let node =
            json!({"driver": "qcow2", "node-name": name, "file": file(name), "backing": backing});
        peers.execute("blockdev-add", node);
    }
    let to = json!({"device": "over", "target": "to", "sync": "full"});
    for (command, arguments) in [
        ("blockdev-backup", to.clone()),
        ("block-commit", json!({"device": "over", "top-node": "mid"})),
        ("block-stream", json!({"device": "over"})),
        ("blockdev-mirror", to),
    ] {
        let job = merged(json!({"job-id": "j", "speed": 1}), &arguments);
        let is_mirror = command == "blockdev-mirror";
        for side in peers.sides().into_iter().take(if is_mirror { 1 } else { 2 }) {
            side.qmp.execute(command, job.clone());
            if is_mirror {
                side.qmp.wait_for("BLOCK_JOB_READY");
                side.qmp.execute("job-complete", json!({"id": "j"}));
            }
            let end = side.qmp.wait_for("BLOCK_JOB_COMPLETED");
            assert_eq!((&end["offset"], end.get("error")), (&json!(64 << 10), None), "{command}");
            while side.qmp.wait_for("JOB_STATUS_CHANGE")["status"] != "null" {}
        }
    }
    peers.stop();
}

#[test]
fn another_speed_counts_at_once() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    for name in ["from", "to"] {
        let path = format!("DIR/{name}");
        peers.run("qemu-img", &["create", "-q", "-f", "raw", &path, "8M"]);
        peers.run("qemu-io", &["-f", "raw", "-c", "write -q -P 1 0 8M", &path]);
        let file = json!({"driver": "file", "node-name": name, "filename": path});
        peers.execute("blockdev-add", file);
    }
    for command in ["blockdev-backup", "blockdev-mirror"] {
        let job =
            json!({"job-id": "j", "device": "from", "target": "to", "sync": "full", "speed": 1});
        peers.execute(command, job);
        for side in peers.sides() {
            eventually("the first copy", || {
                let jobs = side.ask("query-block-jobs", &json!({}));
                jobs["return"][0]["offset"].as_u64().filter(|offset| *offset > 0).map(drop)
            });
        }
        peers.execute("block-job-set-speed", json!({"device": "j", "speed": 1_u64 << 40}));
        if command == "blockdev-mirror" {
            peers.wait_for("BLOCK_JOB_READY");
            peers.execute("block-job-cancel", json!({"device": "j"}));
        }
        peers.wait_for("BLOCK_JOB_COMPLETED");
        for side in peers.sides() {
            eventually("the job's end", || {
                (side.ask("query-jobs", &json!({}))["return"] == json!([])).then_some(())
            });
        }
    }
    peers.stop();
}

#[test]
fn refused_jobs() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk0.img", MIB);
    let server = daemon(&scratch, &image, "");
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    create(&mut qmp, "small", &scratch.path("small.img"), 1 << 20);
    create(&mut qmp, "copy", &scratch.path("copy.img"), MIB << 20);
    let arguments = |more: Value| {
        merged(json!({"job-id": "j", "device": "disk", "target": "copy", "sync": "full"}), &more)
    };
    for (command, more, words) in [
        ("blockdev-backup", json!({"target": "disk"}), "Source and target cannot be the same"),
        ("blockdev-mirror", json!({"target": "disk"}), "Can't mirror node into itself"),
        (
            "blockdev-backup",
            json!({"target": "small"}),
            "Source and target image have different sizes",
        ),
        (
            "blockdev-backup",
            json!({"device": "none"}),
            "Cannot find device='none' nor node-name='none'",
        ),
        ("blockdev-mirror", json!({"job-id": "1j"}), "Invalid job ID '1j'"),
        ("blockdev-mirror", json!({"speed": -1}), "Parameter 'speed' expects a non-negative value"),
        (
            "blockdev-mirror",
            json!({"replaces": "none"}),
            "Failed to find node with node-name='none'",
        ),
    ] {
        assert_eq!(qmp.refused(command, arguments(more)), words, "{command}");
    }
    qmp.execute("blockdev-mirror", arguments(json!({"target": "small"})));
    let error = qmp.wait_for("BLOCK_JOB_COMPLETED");
    assert_eq!(error["error"], "Source and target image have different sizes");
    wait_for_status(&mut qmp, "j", "null");

    // One at a time.
    qmp.execute("blockdev-mirror", arguments(json!({"filter-node-name": "top"})));
    qmp.wait_for("BLOCK_JOB_READY");
    create(&mut qmp, "other", &scratch.path("other.img"), MIB << 20);
    let second = arguments(json!({"job-id": "k", "target": "other"}));
    assert!(qmp.refused("blockdev-backup", second).contains("in use by block job: mirror"));
    let other = arguments(json!({"device": "other", "target": "small"}));
    assert_eq!(qmp.refused("blockdev-backup", other), "Job ID 'j' already in use");
    for (command, words) in [
        ("job-finalize", "Job 'j' in state 'ready' cannot accept command verb 'finalize'"),
        ("job-dismiss", "Job 'j' in state 'ready' cannot accept command verb 'dismiss'"),
        ("job-resume", "Can't resume a job that was not paused"),
    ] {
        assert_eq!(qmp.refused(command, json!({"id": "j"})), words);
    }
    assert_eq!(qmp.refused("job-cancel", json!({"id": "none"})), "Job not found");
    let answer = qmp.ask("block-job-cancel", json!({"device": "none"}));
    assert_eq!(answer["error"]["class"], "DeviceNotActive");
    let in_place = json!({"driver": "file", "filename": image.path(), "size": 0});
    qmp.execute("blockdev-create", json!({"job-id": "c", "options": in_place}));
    wait_for_status(&mut qmp, "c", "concluded");
    let jobs = qmp.execute("query-jobs", json!({}));
    let error = jobs[0]["error"].as_str().expect("an image in use is not emptied");
    assert!(error.contains("lock"), "{error}");
    // The end of the daemon is the end of its jobs.
    server.stop();
    assert_eq!(fs::metadata(image.path()).expect("the image").len(), MIB << 20);
}

/// As libvirt makes the target of a backup: a file, its node, and an image in it.
#[test]
fn a_qcow2_image_is_made_in_a_node() {
    let scratch = Scratch::new();
    let base = scratch.path("base.raw");
    fs::write(&base, vec![7; 1 << 20]).expect("writable");
    let server = ServerCommand::new(&scratch).monitor("qmp").start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let path = scratch.path("new.qcow2");
    create(&mut qmp, "new", &path, 0);
    let mut make = |options: Value| {
        let whole = merged(json!({"driver": "qcow2", "file": "new"}), &options);
        qmp.execute("blockdev-create", json!({"job-id": "make", "options": whole}));
        wait_for_status(&mut qmp, "make", "concluded");
        let jobs = qmp.execute("query-jobs", json!({}));
        qmp.execute("job-dismiss", json!({"id": "make"}));
        jobs[0].get("error").map(|error| error.as_str().expect("text").to_owned())
    };
    // QEMU's sentences.
    for (options, words) in [
        (json!({"size": 1000}), "Image size must be a multiple of 512 bytes"),
        (
            json!({"size": 1 << 20, "cluster-size": 1000}),
            "Cluster size must be a power of two between 512 and 2048k",
        ),
        (
            json!({"size": 1 << 20, "refcount-bits": 3}),
            "Refcount width must be a power of two and may not exceed 64 bits",
        ),
        (
            json!({"size": 1u64 << 62}),
            "Could not resize image: Failed to grow the L1 table: File too large",
        ),
        (json!({"size": 1, "file": "none"}), "Cannot find device='none' nor node-name='none'"),
    ] {
        assert_eq!(make(options.clone()).as_deref(), Some(words), "{options}");
    }
    for options in [
        json!({"size": 1 << 20}),
        json!({"size": 64 << 20, "cluster-size": 4096, "refcount-bits": 1}),
        json!({"size": 2 << 20, "backing-file": "base.raw", "backing-fmt": "raw"}),
    ] {
        assert_eq!(make(options), None);
        client_output(&scratch, "qemu-img", &["check", "-q", "-U", "-f", "qcow2", "new.qcow2"]);
    }
    qmp.execute("blockdev-add", json!({"driver": "qcow2", "node-name": "image", "file": "new"}));
    let refused = {
        let whole = json!({"driver": "qcow2", "file": "new", "size": 1 << 20});
        qmp.execute("blockdev-create", json!({"job-id": "make", "options": whole}));
        wait_for_status(&mut qmp, "make", "concluded");
        qmp.execute("query-jobs", json!({}))[0]["error"].as_str().map(str::to_owned)
    };
    assert_eq!(
        refused.as_deref(),
        Some(
            "Permission conflict on node 'new': permissions 'write, resize' are both required by an unnamed \
             block device (uses node 'new' as 'root' child) and unshared by node 'image' (uses node 'new' as \
             'file' child)."
        )
    );
    server.stop();
    client_output(&scratch, "qemu-img", &["convert", "-O", "raw", "new.qcow2", "found.raw"]);
    let found = fs::read(scratch.path("found.raw")).expect("it was made");
    assert!(found[..1 << 20] == [7; 1 << 20] && found[1 << 20..] == [0; 1 << 20]);
}
