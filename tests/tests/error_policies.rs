//! `rerror` and `werror` of an export, as front ends and QMP clients see them.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use crate::common::peers::Peers;
use integration::nbd::RawNbd;
use integration::{
    BlkClient, Completion, Guest, Image, Qmp, Request, Scratch, Segment, Server, ServerCommand,
    can_mount, eventually, merged, request, tool,
};
use nix::errno::Errno;
use serde_json::{Value, json};

const OK: u8 = 0;
const IOERR: u8 = 1;

/// A daemon that exports an image under blkdebug, with `rules`, with policies.
fn daemon(scratch: &Scratch, image: &Image, rules: &str, policies: &str) -> Server {
    let path = image.path().display();
    let node =
        format!("driver=blkdebug,node-name=disk,image.driver=file,image.filename={path},{rules}");
    let metrics = format!("addr.type=unix,addr.path={}", scratch.path("metrics.sock").display());
    let command = ServerCommand::new(scratch).monitor("qmp").iothread("io0").iothread("io1");
    let command = command.arg("--metrics").arg(metrics);
    command
        .arg("--blockdev")
        .arg(node)
        .export("disk", &format!("num-queues=2,iothread.0=io0,iothread.1=io1,{policies}"))
        .start()
}

fn io_status(qmp: &mut Qmp) -> Value {
    qmp.execute("query-block-exports", json!({}))[0]["io-status"].take()
}

/// Returns the export's io-status from the metrics.
fn io_status_metric(scratch: &Scratch) -> String {
    let mut stream = UnixStream::connect(scratch.path("metrics.sock")).expect("metrics");
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").expect("it listens");
    let mut page = String::new();
    stream.read_to_string(&mut page).expect("a page");
    let mut lines = page.lines();
    let value =
        lines.find_map(|line| line.strip_prefix("ringmill_export_io_status{export=\"disk\"} "));
    value.expect("the metric").trim().to_owned()
}

fn resume(qmp: &mut Qmp) {
    qmp.execute("x-block-export-resume", json!({"id": "disk"}));
}

/// Writes a sector without waiting for the answer.
fn begin_write(blk: &mut BlkClient, queue: usize, sector: u64) -> u16 {
    let at = 4096 * sector;
    blk.put(at, &[sector as u8; 512]);
    let segments = vec![Segment { at, len: 512, device_writes: false }];
    blk.submit(queue, &Request { kind: request::OUT, sector, segments })
}

#[test]
fn requests_are_held_until_space_is_free() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    // Both requests are held longer than the stall limit of requests in flight.
    let rules = "inject-error.0.event=none,inject-error.0.iotype=write,inject-error.0.errno=28,\
                 inject-error.0.count=1,inject-error.1.event=none,inject-error.1.iotype=read,\
                 inject-error.1.errno=0,inject-error.1.delay-ns=3000000000";
    let server = daemon(&scratch, &image, rules, "werror=enospc,stall-timeout-ms=1000");
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let mut blk = BlkClient::connect(&server.socket("disk"), 2, 16).expect("it serves");
    assert_eq!(io_status(&mut qmp), "ok");
    let first = begin_write(&mut blk, 0, 1);
    let event = qmp.wait_for("BLOCK_IO_ERROR");
    let expected = json!({
        "qom-path": "", "device": "disk", "node-name": "disk", "operation": "write",
        "action": "stop", "nospace": true, "reason": "No space left on device",
    });
    assert_eq!(event, expected);
    assert_eq!(io_status(&mut qmp), "nospace");
    assert_eq!(io_status_metric(&scratch), "1");
    // Later requests are held too, also on the other queue's thread.
    let second = begin_write(&mut blk, 0, 2);
    let elsewhere = begin_write(&mut blk, 1, 3);
    let stats = |qmp: &mut Qmp| {
        let stats = qmp.execute("x-query-export-stats", json!({}));
        let queues = stats[0]["queues"].as_array().expect("a list").clone();
        queues.iter().map(|queue| queue["in-flight"].as_u64().expect("a number")).sum::<u64>()
    };
    eventually("all to be taken", || (stats(&mut qmp) == 3).then_some(()));
    let before = Image::filled(&scratch, "same.img", 1);
    assert_eq!(image.read(0, 1 << 20), before.read(0, 1 << 20));
    let refused = qmp.refused("x-block-export-resume", json!({"id": "other"}));
    assert_eq!(refused, "Export 'other' is not found");
    // Longer than the limit after which slow requests are logged.
    thread::sleep(Duration::from_millis(1500));
    resume(&mut qmp);
    let mut done: Vec<Completion> = Vec::new();
    while done.len() < 2 {
        done.extend(blk.wait(0).expect("a reply"));
    }
    let expected = [first, second].map(|id| Completion { id, status: OK });
    assert_eq!(done, expected);
    assert_eq!(blk.wait(1).expect("a reply"), [Completion { id: elsewhere, status: OK }]);
    assert_eq!(io_status(&mut qmp), "ok");
    assert_eq!(io_status_metric(&scratch), "0");
    for sector in 1..4 {
        assert_eq!(image.read(512 * sector, 512), [sector as u8; 512]);
    }
    // Held requests are not logged as slow. Slow requests are.
    blk.read(0, 512);
    eventually("a line in the log", || server.log().contains(": read of 512 bytes").then_some(()));
    assert!(!server.log().contains(": write of 512 bytes"), "{}", server.log());
    drop(blk);
    server.stop();
}

#[test]
fn held_requests_end_with_their_front_end() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let rules = "inject-error.0.event=none,inject-error.0.iotype=write";
    let server = daemon(&scratch, &image, rules, "werror=stop");
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let mut blk = BlkClient::connect(&server.socket("disk"), 1, 16).expect("it serves");
    begin_write(&mut blk, 0, 1);
    assert_eq!(qmp.wait_for("BLOCK_IO_ERROR")["nospace"], false);
    assert_eq!(io_status(&mut qmp), "failed");
    drop(blk);
    let mut blk = BlkClient::connect(&server.socket("disk"), 1, 16).expect("it serves again");
    // Held requests stay held for the next front end, until `x-block-export-resume`.
    let segments = vec![Segment { at: 0, len: 512, device_writes: true }];
    let id = blk.submit(0, &Request { kind: request::IN, sector: 0, segments });
    resume(&mut qmp);
    assert_eq!(blk.wait(0).expect("a reply"), [Completion { id, status: OK }]);
    // A daemon that is asked to quit does not wait for held requests.
    begin_write(&mut blk, 0, 1);
    assert_eq!(qmp.wait_for("BLOCK_IO_ERROR")["action"], "stop");
    server.stop();
}

#[test]
fn errors_are_reported_by_default_and_may_be_ignored() {
    for (policies, errno, status, action) in [
        ("rerror=report,werror=report", 28, IOERR, "report"),
        ("werror=report", 5, IOERR, "report"),
        ("rerror=auto,werror=auto", 5, IOERR, "report"),
        ("rerror=ignore,werror=ignore", 28, OK, "ignore"),
        ("rerror=enospc,werror=enospc", 5, IOERR, "report"),
    ] {
        let scratch = Scratch::new();
        let image = Image::filled(&scratch, "disk.img", 1);
        let rules = format!("inject-error.0.event=none,inject-error.0.errno={errno}");
        let server = daemon(&scratch, &image, &rules, policies);
        let mut qmp = Qmp::connect(&server.socket("qmp"));
        let mut blk = BlkClient::connect(&server.socket("disk"), 1, 16).expect("it serves");
        let reply = blk.call(request::IN, 0, &[], 512);
        assert_eq!(reply.status, status, "{policies}");
        if status == OK {
            assert_eq!(reply.data, [0; 512]);
        }
        assert_eq!(blk.call(request::OUT, 0, &[1; 512], 0).status, status, "{policies}");
        assert_eq!(blk.call(request::FLUSH, 0, &[], 0).status, status, "{policies}");
        assert_eq!(qmp.wait_for("BLOCK_IO_ERROR")["action"], action, "{policies}");
        let info = qmp.execute("query-block-exports", json!({}));
        let has_policy = !matches!(policies, "rerror=report,werror=report" | "werror=report");
        assert_eq!(info[0].get("io-status"), has_policy.then_some(&json!("ok")), "{policies}");
    }
}

/// Returns the log lines that contain `part`.
fn lines(server: &Server, part: &str) -> Vec<String> {
    let log = server.log();
    log.lines().filter(|line| line.contains(part)).map(str::to_owned).collect()
}

#[test]
fn reported_failures_are_logged_once_counted_and_an_event() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let rules = "inject-error.0.event=none,inject-error.0.iotype=write,inject-error.0.errno=28";
    let mut server = daemon(&scratch, &image, rules, "werror=report");
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let mut blk = BlkClient::connect(&server.socket("disk"), 1, 16).expect("it serves");
    for sector in 8..56 {
        assert_eq!(blk.call(request::OUT, sector, &[1; 512], 0).status, IOERR);
    }
    assert_eq!(blk.call(request::IN, 0, &[], 512).status, OK);
    let expected = json!({
        "qom-path": "", "device": "disk", "node-name": "disk", "operation": "write",
        "action": "report", "nospace": true, "reason": "No space left on device",
    });
    assert_eq!(qmp.wait_for("BLOCK_IO_ERROR"), expected);
    drop((blk, qmp));
    server.signal(nix::sys::signal::Signal::SIGTERM);
    assert!(server.wait().success());
    let line = "warning: export disk: write at offset 4096 of node 'disk' failed: No space left on \
                device (ENOSPC); the guest got an error";
    assert_eq!(lines(&server, line).len(), 1, "{}", server.log());
    let counted = "warning: export disk: write of node 'disk' failed 47 times more: No space left on \
                   device (ENOSPC)";
    assert_eq!(lines(&server, counted).len(), 1, "{}", server.log());
    assert_eq!(lines(&server, "failed").len(), 2, "{}", server.log());
}

/// A failed flush is no write at offset 0.
#[test]
fn a_failed_flush_is_logged_as_one() {
    for (policy, end) in [
        ("werror=stop", "; requests are held until x-block-export-resume"),
        ("werror=ignore", "; it is ignored, and the guest sees a success"),
        ("werror=report", "; the guest got an error"),
    ] {
        let scratch = Scratch::new();
        let image = Image::filled(&scratch, "disk.img", 1);
        let rules = "inject-error.0.event=none,inject-error.0.iotype=flush,inject-error.0.errno=5";
        let server = daemon(&scratch, &image, rules, policy);
        let mut qmp = Qmp::connect(&server.socket("qmp"));
        let mut blk = BlkClient::connect(&server.socket("disk"), 1, 16).expect("it serves");
        blk.submit(0, &Request { kind: request::FLUSH, sector: 0, segments: Vec::new() });
        assert_eq!(qmp.wait_for("BLOCK_IO_ERROR")["operation"], "write", "{policy}");
        let line = format!("export disk: flush of node 'disk' failed: I/O error (EIO){end}");
        eventually("a line in the log", || (lines(&server, &line).len() == 1).then_some(()));
        // Its last flush would fail, too.
        server.kill();
    }
}

#[test]
fn failures_over_nbd_are_reported_too() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let (path, socket) = (image.path().display(), scratch.path("nbd.sock"));
    let server = ServerCommand::new(&scratch)
        .monitor("qmp")
        .arg("--blockdev")
        .arg(format!(
            "driver=blkdebug,node-name=disk,image.driver=file,image.filename={path},\
             inject-error.0.event=none,inject-error.0.iotype=read,inject-error.0.errno=5"
        ))
        .arg("--nbd-server")
        .arg(format!("addr.type=unix,addr.path={}", socket.display()))
        .args(["--export", "nbd,id=e,node-name=disk"])
        .start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let uri = format!("nbd+unix:///disk?socket={}", socket.display());
    let read = std::process::Command::new(tool("nbdcopy")).args([&uri, "null:"]).output();
    assert!(!read.expect("nbdcopy runs").status.success());
    let event = qmp.wait_for("BLOCK_IO_ERROR");
    assert_eq!((&event["device"], &event["operation"]), (&json!("e"), &json!("read")));
    let line = "warning: export e: read at offset ";
    eventually("a line in the log", || (lines(&server, line).len() == 1).then_some(()));
    let end = "of node 'disk' failed: I/O error (EIO); the client got an error";
    assert_eq!(lines(&server, end).len(), 1, "{}", server.log());
    drop(qmp);
    server.stop();
}

/// An event names the node that the export offers at the time, as `query-block-exports` does.
#[test]
fn an_event_names_the_node_that_a_snapshot_has_put_in_place() {
    for (policy, status) in [("report", IOERR), ("ignore", OK)] {
        let scratch = Scratch::new();
        let image = Image::filled(&scratch, "disk.img", 1);
        // An export has one event a second: each has one here.
        let export = |id: &str| {
            let socket = scratch.path(&format!("{id}.sock"));
            let (socket, policy) = (socket.display(), format!("rerror={policy}"));
            format!(
                "vhost-user-blk,id={id},node-name=disk,addr.type=unix,addr.path={socket},{policy}"
            )
        };
        let server = ServerCommand::new(&scratch)
            .monitor("qmp")
            .arg("--blockdev")
            .arg(format!(
                "driver=blkdebug,node-name=disk,image.driver=file,image.filename={},\
                 inject-error.0.event=none,inject-error.0.iotype=read,inject-error.0.sector=8",
                image.path().display()
            ))
            .args(["--blockdev", "null-co,node-name=target,size=1048576"])
            .args(["--export", &export("a"), "--export", &export("b"), "--export", &export("c")])
            .start();
        let mut qmp = Qmp::connect(&server.socket("qmp"));
        let reads = |qmp: &mut Qmp, id: &str| {
            let mut blk = BlkClient::connect(&server.socket(id), 1, 16).expect("it serves");
            assert_eq!(blk.call(request::IN, 8, &[], 512).status, status);
            let event = qmp.wait_for("BLOCK_IO_ERROR");
            assert_eq!(event["device"], id);
            event["node-name"].clone()
        };
        assert_eq!(reads(&mut qmp, "a"), "disk");
        let snapshot = json!({"node-name": "disk", "snapshot-file": scratch.path("over"),
            "snapshot-node-name": "over"});
        qmp.execute("blockdev-snapshot-sync", snapshot);
        assert_eq!(reads(&mut qmp, "b"), "over");
        let backup = json!({"job-id": "j", "device": "over", "target": "target", "sync": "none"});
        qmp.execute("blockdev-backup", backup);
        assert_eq!(qmp.execute("query-block-exports", json!({}))[0]["node-name"], "over");
        assert_eq!(reads(&mut qmp, "c"), "over");
        server.stop();
    }
}

/// Linux's report of the sense data, and a write that is held until space is free.
const SCSI: &str = "
    dmesg -c >/dev/null
    if dd if=/dev/sda of=/dev/null bs=512 skip=1024 count=1 iflag=direct 2>/dev/null; then exit 1; fi
    if dd if=/dev/zero of=/dev/sda bs=512 seek=1032 count=1 oflag=direct 2>/dev/null; then exit 1; fi
    dmesg | sed -n 's/.*Sense Key : //p; s/.*Add. Sense: //p'
    echo full
    dd if=/dev/zero of=/dev/sda bs=512 seek=1040 count=1 oflag=direct 2>/dev/null
    dd if=/dev/sda bs=512 skip=1040 count=1 iflag=direct 2>/dev/null | md5sum";

#[test]
fn a_scsi_disk_has_policies_and_sense_data() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let rule = |n: u32, kind: &str, sector: u64, errno: i32| {
        let rule = format!("inject-error.{n}");
        format!(
            ",{rule}.event=none,{rule}.iotype={kind},{rule}.sector={sector},{rule}.errno={errno}"
        )
    };
    let rules = [rule(0, "read", 1024, 5), rule(1, "write", 1032, 5), rule(2, "write", 1040, 28)];
    let server = ServerCommand::new(&scratch)
        .monitor("qmp")
        .arg("--blockdev")
        .arg(format!(
            "driver=blkdebug,node-name=disk,image.driver=file,image.filename={}{},\
             inject-error.2.count=1",
            image.path().display(),
            rules.concat(),
        ))
        .export_scsi("scsi", &["disk"], "rerror=report,werror=enospc")
        .start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let mut guest = Guest::new().scsi(server.socket("scsi")).boot(SCSI);
    guest.expect("full");
    let event = loop {
        let event = qmp.wait_for("BLOCK_IO_ERROR");
        if event["action"] != "report" {
            break event;
        }
    };
    assert_eq!((&event["action"], &event["nospace"]), (&json!("stop"), &json!(true)));
    qmp.execute("x-block-export-resume", json!({"id": "scsi"}));
    let lines = guest.finish();
    server.stop();
    let expected = [
        "Medium Error [current] ",
        "Unrecovered read error",
        "Medium Error [current] ",
        "Write error",
        "full",
        // 512 zeroes.
        "bf619eac0cdf3f68d496ea9344137e8b  -",
    ];
    assert_eq!(lines, expected);
    assert_eq!(image.read(512 * 1040, 512), [0; 512]);
}

/// A node with each driver on top of a file that answers writes with `errno`. `DIR` is the folder with the images.
fn stacks(errno: i32) -> Vec<(&'static str, Value)> {
    let inject = json!([{"event": "none", "iotype": "write", "errno": errno}]);
    let fails = |name: &str| {
        let image = json!({"driver": "file", "filename": format!("DIR/{name}")});
        json!({"driver": "blkdebug", "image": image, "inject-error": &inject})
    };
    let raw = fails("disk.img");
    let above = |driver: &str, more: Value, file: &Value| {
        merged(json!({"driver": driver, "node-name": "n", "file": file}), &more)
    };
    let qcow2 = above("qcow2", json!({}), &fails("disk.qcow2"));
    let mut inner = qcow2.clone();
    inner["node-name"] = json!("inner");
    let target = json!({"driver": "null-co", "size": 1 << 20});
    let luks = above("luks", json!({"key-secret": "s"}), &fails("disk.luks"));
    let data_file = merged(
        above("qcow2", json!({"data-file": raw}), &Value::Null),
        &json!({"file": {"driver": "file", "filename": "DIR/data.qcow2"}}),
    );
    vec![
        ("raw", above("raw", json!({}), &raw)),
        ("a part", above("raw", json!({"offset": 4096, "size": 512 << 10}), &raw)),
        ("zeroes", above("raw", json!({"detect-zeroes": "on"}), &raw)),
        ("throttle", above("throttle", json!({"throttle-group": "t"}), &raw)),
        ("copy-on-read", above("copy-on-read", json!({}), &raw)),
        ("copy-before-write", above("copy-before-write", json!({"target": target}), &raw)),
        ("preallocate", above("preallocate", json!({}), &raw)),
        ("qcow2", qcow2),
        ("data file", data_file),
        ("throttled qcow2", above("throttle", json!({"throttle-group": "t"}), &inner)),
        ("compress", above("compress", json!({}), &inner)),
        ("luks", luks),
    ]
}

/// Each driver passes each error on as it is, and each protocol says as much of it as in QSD. NVMe's and SCSI's answers are
/// tested where they are made; vhost-user-blk knows one error.
#[test]
fn each_driver_and_protocol_passes_errors_on_as_in_qemu_storage_daemon() {
    let scratch = Scratch::new();
    let mut peers = Peers::new(&scratch);
    for side in peers.sides() {
        std::fs::write(side.path("disk.img"), vec![1; 1 << 20]).expect("a new file");
        std::fs::write(side.path("mounted"), []).expect("a new file");
    }
    peers.run("qemu-img", &["create", "-q", "-f", "qcow2", "DIR/disk.qcow2", "1M"]);
    let data = ["create", "-q", "-f", "qcow2", "-o", "data_file=DIR/d.raw", "DIR/data.qcow2", "1M"];
    peers.run("qemu-img", &data);
    let secret = "secret,id=s,data=12345678";
    let luks =
        ["create", "-q", "--object", secret, "-f", "luks", "-o", "key-secret=s,iter-time=10"];
    peers.run("qemu-img", &[&luks[..], &["DIR/disk.luks", "1M"]].concat());
    peers.execute("object-add", json!({"qom-type": "secret", "id": "s", "data": "12345678"}));
    peers.execute("object-add", json!({"qom-type": "throttle-group", "id": "t"}));
    let addr = json!({"type": "unix", "data": {"path": "DIR/nbd.sock"}});
    peers.execute("nbd-server-start", json!({"addr": addr}));
    let mounts = can_mount();
    let data: Vec<u8> = (0..65536).map(|at| at as u8 | 1).collect();
    for errno in
        [Errno::EIO, Errno::ENOSPC, Errno::EDQUOT, Errno::EFBIG, Errno::ENOMEM, Errno::EPERM]
    {
        for (name, node) in stacks(errno as i32) {
            peers.execute("blockdev-add", node);
            let export =
                json!({"type": "nbd", "id": "e", "node-name": "n", "name": "e", "writable": true});
            peers.execute("block-export-add", export);
            let [ours, theirs] = peers.sides().map(|side| {
                let mut nbd = RawNbd::go(&side.path("nbd.sock"), "e");
                nbd.request(1, 1, 65536, 65536);
                nbd.send(&data);
                nbd.reply()
            });
            assert_eq!(ours, theirs, "{errno} of {name} over NBD");
            assert_ne!(ours.0, 0, "{errno} of {name} over NBD");
            peers.execute("block-export-del", json!({"id": "e"}));
            peers.wait_for("BLOCK_EXPORT_DELETED");
            if mounts {
                let export = json!({"type": "fuse", "id": "f", "node-name": "n", "writable": true,
                    "mountpoint": "DIR/mounted"});
                peers.execute("block-export-add", export);
                for side in peers.sides() {
                    let mut file = File::options();
                    file.read(true).write(true).custom_flags(nix::libc::O_DIRECT);
                    let file = file.open(side.path("mounted")).expect("the mount");
                    let memory = Aligned(std::array::from_fn(|at| at as u8 | 1));
                    let error = file.write_at(&memory.0, 131_072).expect_err("no write passes");
                    let found = error.raw_os_error().map(Errno::from_raw);
                    assert_eq!(found, Some(errno), "{name} over FUSE in {:?}", side.folder);
                }
                peers.execute("block-export-del", json!({"id": "f"}));
                peers.wait_for("BLOCK_EXPORT_DELETED");
            }
            peers.execute("blockdev-del", json!({"node-name": "n"}));
        }
    }
    peers.stop();
}

/// Memory for direct I/O.
#[repr(align(4096))]
struct Aligned([u8; 4096]);
