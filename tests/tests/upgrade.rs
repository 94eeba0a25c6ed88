//! The daemon gives place to another process under a client that writes and checks what it reads; and
//! carries on where no other process takes over.

mod common;

use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use common::{Load, MIB, add_file, check, daemon};
use integration::nbd::{RawNbd, nbd_export, nbd_server};
use integration::{
    BlkClient, Image, PATIENCE, Qmp, Request, Scratch, Segment, Server, ServerCommand,
    daemon as program, eventually, install, pattern, request, tool, wire,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use nix::sys::socket::{MsgFlags, recv, send};
use serde_json::{Value, json};

/// `ringmill upgrade`.
fn upgrade(of: &Path) -> Output {
    Command::new(program()).arg("upgrade").arg(of).output().expect("ringmill can be run")
}

fn connect(server: &Server, queues: usize) -> BlkClient {
    BlkClient::connect(&server.socket("disk"), queues, 128).expect("the export serves")
}

/// All that clients are told of what there is.
fn told(server: &Server) -> Vec<Value> {
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let mut exports = qmp.execute("query-block-exports", json!({}));
    // Their order is that in which they were made, and those on qcow2 images are made last.
    let by_id = |export: &Value| export["id"].as_str().map(str::to_owned);
    exports.as_array_mut().expect("a list").sort_by_key(by_id);
    let nodes = qmp.execute("query-named-block-nodes", json!({}));
    vec![exports, nodes, qmp.execute("qom-list", json!({"path": "/objects"}))]
}

#[test]
fn what_qmp_has_added_and_taken_away_is_as_it_was() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", MIB);
    let more = Image::empty(&scratch, "more.img", MIB);
    let mut server = daemon(&scratch, &image, "cache.direct=on,aio=io_uring");
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    qmp.execute("object-add", json!({"qom-type": "iothread", "id": "late", "poll-max-ns": 0}));
    add_file(&mut qmp, "gone", more.path());
    qmp.execute("blockdev-del", json!({"node-name": "gone"}));
    let file = json!({"driver": "file", "filename": more.path()});
    qmp.execute("blockdev-add", json!({"driver": "raw", "node-name": "more", "file": file}));
    let socket = server.socket("more");
    qmp.execute(
        "block-export-add",
        json!({
            "type": "vhost-user-blk", "id": "more", "node-name": "more", "writable": true,
            "iothread": "late", "addr": {"type": "unix", "path": socket},
        }),
    );
    drop(qmp);
    let before = told(&server);
    let load = Load::start(connect(&server, 2), 1);
    let mut other = BlkClient::connect(&socket, 1, 64).expect("the export serves");
    other.read(0, 512);
    load.go_on();
    let (files, threads) = (server.open_files(), server.threads());
    let mut after_one = 0;
    for round in 0..5 {
        server.upgrade_by(|server| {
            let done = upgrade(&server.socket("qmp"));
            assert!(done.status.success(), "{done:?}");
        });
        load.go_on();
        assert_eq!(told(&server), before);
        // Clients of the monitor come and go.
        let open = || eventually("few files", || (server.open_files() <= files).then_some(()));
        open();
        eventually("as many threads", || (server.threads() == threads).then_some(()));
        // The standard ones and the way to the daemon: no memory, no image, no socket.
        let spawner = server.spawner().expect("a spawner");
        let kept = || fs::read_dir(format!("/proc/{spawner}/fd")).expect("its files").count();
        eventually("a spawner that keeps nothing", || (kept() == 4).then_some(()));
        if round == 0 {
            after_one = server.open_files();
        }
    }
    // The last client of the monitor goes when its end is seen.
    eventually("as few files", || (server.open_files() <= after_one).then_some(()));
    drop(other);
    let log = load.finish();
    server.stop();
    check(&image, &log, log.len());
}

fn convert(from: &str, image: &Path, to: &str, other: &Path) {
    let mut command = Command::new(tool("qemu-img"));
    command.args(["convert", "-f", from, "-O", to]).arg(image).arg(other);
    assert!(command.status().expect("qemu-img can be run").success());
}

#[test]
fn a_qcow2_image_is_whole_after_upgrades_under_load() {
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    let filled = Image::filled(&scratch, "disk.img", MIB);
    convert("raw", filled.path(), "qcow2", &path);
    let blockdev =
        format!("qcow2,node-name=disk,file.driver=file,file.filename={}", path.display());
    let mut server = ServerCommand::new(&scratch)
        .monitor("qmp")
        .arg("--blockdev")
        .arg(blockdev)
        .export("disk", "num-queues=2")
        .start();
    let before = told(&server);
    let load = Load::start(connect(&server, 2), 2);
    for _ in 0..5 {
        load.go_on();
        server.upgrade();
    }
    load.go_on();
    assert_eq!(told(&server), before);
    let log = load.finish();
    server.stop();
    let raw = scratch.path("disk.raw");
    let sound = Image::existing(&path).qemu_img(&["check", "-f", "qcow2"]);
    assert!(sound.status.success(), "{sound:?}");
    convert("qcow2", &path, "raw", &raw);
    check(&Image::existing(&raw), &log, log.len());
}

/// A daemon at whose path there is a program that does not take over.
fn carries_on_beside(script: &str, why: &str) {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", MIB);
    let mut server = ServerCommand::new(&scratch)
        .called_qemu_storage_daemon()
        .monitor("qmp")
        .iothread("io0")
        .iothread("io1")
        .file("disk", &image, "cache.direct=on")
        .export("disk", "num-queues=2,iothread.0=io0,iothread.1=io1")
        .start();
    let load = Load::start(connect(&server, 2), 3);
    load.go_on();
    let (files, threads) = (server.open_files(), server.threads());
    let installed = scratch.path("qemu-storage-daemon");
    fs::remove_file(&installed).expect("it is a link");
    install(&installed, script);
    let done = upgrade(&server.socket("qmp"));
    let text = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(!done.status.success() && text.contains(why), "{done:?}");
    load.go_on();
    eventually("the files of before", || (server.open_files() <= files).then_some(()));
    eventually("as many threads", || (server.threads() == threads).then_some(()));
    // The image is locked as it was.
    let locked = image.qemu_img(&["bench", "-f", "raw", "-c", "1", "-w"]);
    assert!(String::from_utf8_lossy(&locked.stderr).contains("lock"), "{locked:?}");
    // With the right program it works the next time, and what the load's connection is at is right.
    fs::remove_file(&installed).expect("it is ours");
    std::os::unix::fs::symlink(program(), &installed).expect("a link");
    server.upgrade();
    load.go_on();
    let log = load.finish();
    server.stop();
    check(&image, &log, log.len());
}

#[test]
fn the_daemon_carries_on_beside_a_program_that_fails() {
    carries_on_beside("#!/bin/sh\nexit 3\n", "has ended with status 3");
}

#[test]
fn the_daemon_carries_on_beside_what_is_no_program() {
    carries_on_beside("\u{7f}ELF, or so it seems", "cannot be started");
}

#[test]
fn the_daemon_carries_on_beside_a_program_that_hangs() {
    carries_on_beside("#!/bin/sh\nexec sleep 1000\n", "has not been ready within");
}

#[test]
fn the_daemon_carries_on_beside_a_program_that_takes_another_document() {
    // What such a program sends, of which the real one's own test is in `take_over.rs`.
    let script = "#!/usr/bin/python3
import socket
to = socket.socket(fileno=0)
to.recv(100)
to.send(b'Ewhat is handed over is of version 1; this program takes version 2')
";
    carries_on_beside(script, "this program takes version 2");
}

#[test]
fn the_daemon_carries_on_beside_a_program_that_dies_when_all_queues_stand_still() {
    let script = "#!/usr/bin/python3
import socket
to = socket.socket(fileno=0)
while (kind := to.recv(100)[:1]) != b'Q':
    if kind == b'G':
        to.send(b'R')
";
    carries_on_beside(script, "has given up");
}

/// A guest may see no answer for so long, at depth 64.
const PAUSE: Duration = Duration::from_millis(100);

/// The same of a build for debugging, where other programs may have the processors.
const PAUSE_BUSY: Duration = Duration::from_millis(500);

/// Judges pauses, the shortest first. Of a release build, on a machine without much else to do, nine of ten are, as one
/// may be the scheduler's (`RINGMILL_LONG`); else the usual one is.
fn judge(pauses: &[Duration]) {
    let (judged, most) = match std::env::var_os("RINGMILL_LONG") {
        Some(_) => (pauses.len() * 9 / 10, PAUSE),
        None => (pauses.len() / 2, PAUSE_BUSY),
    };
    assert!(pauses[judged] <= most, "{pauses:?}");
}

/// Upgrades a daemon under a client that keeps 64 requests in flight, a read and a write in turn, each 64 KiB further on
/// in the `mib` MiB of the disk. Gives for how long the client got no answer each time, the shortest first.
/// `RINGMILL_UPGRADES` says how often; 5 times when it is not set.
fn pauses(mut server: Server, mib: u64) -> Vec<Duration> {
    const DEPTH: u64 = 64;
    let times = std::env::var("RINGMILL_UPGRADES").map_or(5, |n| n.parse().expect("a number"));
    let mut client = BlkClient::connect(&server.socket("disk"), 2, 256).expect("it serves");
    let (stop, stopped) = mpsc::channel::<()>();
    let (gap, gaps) = mpsc::channel();
    let answered = Arc::<AtomicU64>::default();
    let count = answered.clone();
    let load = thread::spawn(move || {
        let request = |number: u64| {
            let (at, is_read) = (number % DEPTH * 4096, number.is_multiple_of(2));
            let segments = vec![Segment { at, len: 4096, device_writes: is_read }];
            let kind = if is_read { request::IN } else { request::OUT };
            Request { kind, sector: number % (mib * 16) * 128, segments }
        };
        let mut numbers = 0..;
        let mut submit = |client: &mut BlkClient, count: usize| {
            for number in numbers.by_ref().take(count) {
                client.submit(0, &request(number));
            }
        };
        submit(&mut client, DEPTH as usize);
        let mut last = Instant::now();
        let mut longest = Duration::ZERO;
        while stopped.try_recv() == Err(mpsc::TryRecvError::Empty) {
            let done = client.wait(0).expect("completions");
            longest = longest.max(last.elapsed());
            last = Instant::now();
            assert!(done.iter().all(|done| done.status == 0), "{done:?}");
            submit(&mut client, done.len());
            if longest > Duration::from_millis(1) {
                let _ = gap.send(longest);
                longest = Duration::ZERO;
            }
            count.fetch_add(done.len() as u64, Ordering::Release);
        }
    });
    let mut pauses = Vec::new();
    let wait_for = |more: u64| {
        let all = answered.load(Ordering::Acquire) + more;
        eventually("answers", || (answered.load(Ordering::Acquire) >= all).then_some(()));
    };
    for _ in 0..times {
        wait_for(32 * DEPTH);
        // What was before is not the upgrade's.
        gaps.try_iter().for_each(drop);
        server.upgrade();
        // All that were in flight may have been answered before the pause; one more comes after it.
        wait_for(DEPTH + 1);
        pauses.push(gaps.try_iter().max().unwrap_or_default());
    }
    drop(stop);
    load.join().expect("no request failed");
    server.stop();
    pauses.sort();
    println!("pauses at depth 64: {pauses:?}");
    pauses
}

#[test]
fn a_client_at_depth_64_waits_a_little() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", MIB);
    judge(&pauses(daemon(&scratch, &image, "cache.direct=on,aio=io_uring"), MIB));
}

/// Whose metadata change, and are handed over in its journal.
#[test]
fn a_client_of_a_growing_qcow2_image_waits_a_little() {
    const LARGE: u64 = 4096;
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    let mut create = Command::new(tool("qemu-img"));
    create.args(["create", "-q", "-f", "qcow2"]).arg(&path).arg(format!("{LARGE}M"));
    assert!(create.status().expect("qemu-img can be run").success());
    let blockdev = format!(
        "qcow2,node-name=disk,file.driver=file,file.filename={},file.cache.direct=on",
        path.display()
    );
    let command = ServerCommand::new(&scratch).arg("--blockdev").arg(blockdev);
    judge(&pauses(command.export("disk", "num-queues=2").start(), LARGE));
}

/// Requests that take 1.5 s, over vhost-user and over NBD, when the queues are to stop: nobody waits until they are done,
/// neither other exports nor those behind them in the same queue, and they need not be done again.
#[test]
fn requests_that_take_long_for_once_keep_nobody_else_waiting_for_long() {
    const SLOW: &str = "image.driver=null-co,inject-error.0.event=read_aio,inject-error.0.sector=0,\
                        inject-error.0.errno=0,inject-error.0.delay-ns=1500000000";
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", MIB);
    let slow = |name| format!("blkdebug,node-name={name},{SLOW}");
    let command = ServerCommand::new(&scratch)
        .monitor("qmp")
        .arg("--blockdev")
        .arg(slow("slow"))
        .export("slow", "")
        .arg("--blockdev")
        .arg(slow("nbd"))
        .file("disk", &image, "cache.direct=on");
    let command = command.export("disk", "num-queues=2");
    let mut server = nbd_export(nbd_server(command, &scratch, ""), "nbd", "").start();
    let load = Load::start(connect(&server, 2), 1);
    let mut client = BlkClient::connect(&server.socket("slow"), 1, 64).expect("it serves");
    let mut nbd = RawNbd::go(&scratch.path("nbd.sock"), "nbd");
    let read = |sector| {
        let segments = vec![Segment { at: sector * 512, len: 512, device_writes: true }];
        Request { kind: request::IN, sector, segments }
    };
    for round in 1..=10 {
        let said = server.log().len();
        let mut order = vec![];
        let slow = client.submit(0, &read(0));
        let mut behind = None;
        nbd.request(0, round, 0, 512);
        let mut waited = 0;
        server.upgrade_by(|server| {
            let socket = server.socket("qmp");
            let upgrading = thread::spawn(move || upgrade(&socket));
            let tries = || server.log()[said..].contains("to be tried again");
            eventually("another try, or the end", || {
                (tries() || upgrading.is_finished()).then_some(())
            });
            if tries() {
                behind = Some(client.submit(0, &read(8)));
                order = client.wait(0).expect("it serves");
            }
            // On a machine that is busy they may have been too old before it began.
            let mut first = Some(upgrading.join().expect("it was run"));
            let done = eventually("requests that are young", || {
                let done = first.take().unwrap_or_else(|| upgrade(&server.socket("qmp")));
                let refused = String::from_utf8_lossy(&done.stderr);
                (!refused.contains("has a request that has taken ")).then_some(done)
            });
            assert!(done.status.success(), "{done:?}");
            let text = String::from_utf8_lossy(&done.stdout);
            let text = text.split("waited for ").nth(1).and_then(|text| text.split(' ').next());
            waited = text.and_then(|ms| ms.parse().ok()).expect("how long guests waited");
        });
        while order.len() < 1 + usize::from(behind.is_some()) {
            order.extend(client.wait(0).expect("it serves"));
        }
        assert!(order.iter().all(|done| done.status == 0), "{order:?}");
        assert_eq!(nbd.reply(), (0, round));
        let _data: [u8; 512] = nbd.take();
        load.go_on();
        // A new process may take so long to get ready that the slow ones are done, or nearly so, and a busy machine
        // a second for anything.
        let ids: Vec<u16> = order.iter().map(|done| done.id).collect();
        if waited < 1000 && behind.is_some_and(|behind| ids == [behind, slow]) {
            let log = load.finish();
            server.stop();
            return check(&image, &log, log.len());
        }
    }
    panic!("each time those behind a slow request waited for it:\n{}", server.log());
}

/// Requests that never end, over vhost-user and over NBD, and a front end that never says anything.
#[test]
fn a_request_that_hangs_keeps_nobody_else_waiting_for_long() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", MIB);
    let command = ServerCommand::new(&scratch)
        .monitor("qmp")
        .arg("--blockdev")
        .arg("null-co,node-name=hangs,size=1048576,latency-ns=600000000000")
        .export("hangs", "")
        .arg("--blockdev")
        .arg(
            "blkdebug,node-name=nbd,image.driver=null-co,inject-error.0.event=read_aio,\
             inject-error.0.delay-ns=600000000000",
        )
        .file("disk", &image, "cache.direct=on")
        .export("disk", "num-queues=2");
    let server = nbd_export(nbd_server(command, &scratch, ""), "nbd", "").start();
    let load = Load::start(connect(&server, 2), 1);
    let mut client = BlkClient::connect(&server.socket("hangs"), 1, 64).expect("it serves");
    let segments = vec![Segment { at: 0, len: 512, device_writes: true }];
    let hanging = Request { kind: request::IN, sector: 0, segments };
    client.submit(0, &hanging);
    let mut nbd = RawNbd::go(&scratch.path("nbd.sock"), "nbd");
    nbd.request(0, 1, 0, 512);
    let refused = || {
        let refused = upgrade(&server.socket("qmp"));
        assert!(!refused.status.success(), "{refused:?}");
        // Its own rings cannot, but the others' go on.
        load.go_on();
        String::from_utf8_lossy(&refused.stderr).into_owned()
    };
    let text = refused();
    let of_age = "has a request that has taken ";
    let in_flight = "requests in flight have not ended within 5 s";
    assert!(text.contains(in_flight) || text.contains(of_age), "{text}");
    // By now it is known that it would be in vain, and nobody waits for it.
    let text = refused();
    assert!(text.contains(of_age), "{text}");
    // Those who hang are served as before: more of their requests are taken, and a client that leaves is let go.
    client.submit(0, &hanging);
    nbd.request(2, 2, 0, 0);
    drop((client, nbd));
    let log = load.finish();
    server.kill();
    check(&image, &log, log.len());
}

/// A front end that begins a message and leaves it at that is named, and sent away: the next upgrade works.
#[test]
fn a_front_end_within_a_message_keeps_a_daemon_from_its_next_version_for_seconds_only() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", MIB);
    let mut server = daemon(&scratch, &image, "");
    let mut front_end = wire::connect(&server.socket("disk"));
    wire::get_features(&mut front_end);
    front_end.write_all(&[1, 0, 0, 0, 1, 0]).expect("it is connected");
    let refused = upgrade(&server.socket("qmp"));
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(text.contains("the front end of export 'disk' is within a message"), "{refused:?}");
    assert_eq!(front_end.read(&mut [0]).expect("the end"), 0);
    server.upgrade();
    server.stop();
}

/// Nor does one that asks and asks, and reads no reply.
#[test]
fn a_front_end_that_reads_no_replies_keeps_a_daemon_from_its_next_version_for_seconds_only() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", MIB);
    let mut server = daemon(&scratch, &image, "");
    let mut front_end = wire::connect(&server.socket("disk"));
    wire::get_features(&mut front_end);
    // As many replies as a socket holds, and more, to requests of one write.
    let reply = [0; 20];
    let (socket, _other) = UnixStream::pair().expect("a pair of sockets");
    let send = || send(socket.as_raw_fd(), &reply, MsgFlags::MSG_DONTWAIT);
    let held = std::iter::from_fn(|| send().ok()).count();
    let requests = wire::message(wire::GET_FEATURES, &[]).repeat(held + 8);
    front_end.write_all(&requests).expect("room for them");
    let mut replies = vec![0; requests.len() * 2];
    eventually("replies that fill the socket", || {
        let there = recv(front_end.as_raw_fd(), &mut replies, MsgFlags::MSG_PEEK).ok()?;
        (there == held * reply.len()).then_some(())
    });
    let refused = upgrade(&server.socket("qmp"));
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(text.contains("the front end of export 'disk' is within a message"), "{refused:?}");
    // Reading would have it go on.
    let mut end = [PollFd::new(front_end.as_fd(), PollFlags::empty())];
    let patience = PollTimeout::try_from(PATIENCE).expect("a time");
    assert_eq!(poll(&mut end, patience), Ok(1), "LOST: the end of the connection");
    server.upgrade();
    server.stop();
}

/// The disk of a qcow2 image without a guest answers nobody, the new process neither: the others' guests stand still for no
/// longer than the limit, and the image is used on.
#[test]
fn a_disk_that_hangs_keeps_nobody_else_waiting_for_long() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", MIB);
    // Room for its clusters comes by NBD, where nothing grows.
    let far = scratch.path("far.qcow2");
    let mut create = Command::new(tool("qemu-img"));
    create.args(["create", "-q", "-f", "qcow2"]).arg(&far).arg("4M");
    assert!(create.status().expect("qemu-img can be run").success());
    let file = fs::File::options().write(true).open(&far).expect("the image");
    file.set_len(8 << 20).expect("a longer file");
    let storage = ServerCommand::new(&scratch).named("storage");
    let storage = storage.file("far", &Image::existing(&far), "");
    let storage = nbd_export(nbd_server(storage, &scratch, ""), "far", ",writable=on").start();
    let blockdev = format!(
        "qcow2,node-name=far,file.driver=nbd,file.export=far,file.server.type=unix,file.server.path={}",
        scratch.path("nbd.sock").display()
    );
    let command = ServerCommand::new(&scratch).monitor("qmp").arg("--blockdev").arg(blockdev);
    let command = command.file("disk", &image, "cache.direct=on");
    let mut server = command.export("disk", "num-queues=2").start();
    let load = Load::start(connect(&server, 2), 6);
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let addr = json!({"type": "unix", "path": server.socket("far")});
    let export = json!({
        "type": "vhost-user-blk", "id": "far", "node-name": "far", "writable": true, "addr": addr
    });
    qmp.execute("block-export-add", export.clone());
    let mut client = BlkClient::connect(&server.socket("far"), 1, 16).expect("the export serves");
    client.write(0, &pattern::block(0, 1));
    drop(client);
    qmp.execute("block-export-del", json!({"id": "far", "mode": "hard"}));
    qmp.wait_for("BLOCK_EXPORT_DELETED");
    drop(qmp);

    storage.signal(Signal::SIGSTOP);
    let socket = server.socket("qmp");
    let refused = || {
        let (done, is_done) = mpsc::channel();
        let socket = socket.clone();
        thread::spawn(move || done.send(upgrade(&socket)));
        let refused = is_done.recv_timeout(Duration::from_secs(60)).expect("LOST: a refusal");
        assert!(!refused.status.success(), "{refused:?}");
        load.go_on();
        println!("{}", String::from_utf8_lossy(&refused.stderr));
        String::from_utf8_lossy(&refused.stderr).into_owned()
    };
    // On a machine that is busy, there may be other reasons before.
    let why = "the new program has not taken over within 5 s; it was killed";
    eventually(why, || refused().contains(why).then_some(()));
    storage.signal(Signal::SIGCONT);

    Qmp::connect(&socket).execute("block-export-add", export);
    let mut client = BlkClient::connect(&server.socket("far"), 1, 16).expect("the export serves");
    client.write(1024, &pattern::block(128, 2));
    server.upgrade_by(|_| {
        let upgraded = || upgrade(&socket).status.success().then_some(());
        eventually("an upgrade", upgraded);
    });
    load.go_on();
    for (index, generation) in [(0, 1), (128, 2)] {
        let found = pattern::generation(index, &client.read(index * 8, pattern::BLOCK));
        assert_eq!(found, Ok(generation));
    }
    drop(client);
    let log = load.finish();
    server.signal(Signal::SIGTERM);
    assert!(server.wait().success(), "{}", server.log());
    storage.stop();
    check(&image, &log, log.len());
    let sound = Image::existing(&far).qemu_img(&["check", "-f", "qcow2"]);
    assert!(sound.status.success(), "{sound:?}");
}

/// Requests that a group holds back for longer than anybody waits are let go by an upgrade, in their order;
/// who takes over holds others back.
#[test]
fn what_a_throttle_group_holds_back_is_done() {
    // As many as the queue has room for; that many seconds.
    const REQUESTS: u64 = 80;
    let scratch = Scratch::new();
    let mut server = ServerCommand::new(&scratch)
        .monitor("qmp")
        .arg("--object")
        .arg("throttle-group,id=slow,limits.iops-total=1")
        .arg("--blockdev")
        .arg("throttle,node-name=disk,throttle-group=slow,file.driver=null-co")
        .export("disk", "")
        .start();
    let mut client = BlkClient::connect(&server.socket("disk"), 1, 256).expect("it serves");
    let submit = |client: &mut BlkClient, requests: u64| -> Vec<u16> {
        let request = |slot: u64| {
            let segments = vec![Segment { at: slot * 512, len: 512, device_writes: true }];
            Request { kind: request::IN, sector: slot, segments }
        };
        (0..requests).map(|slot| client.submit(0, &request(slot))).collect()
    };
    let wait_for = |client: &mut BlkClient, count: usize| -> Vec<u16> {
        let mut done = Vec::new();
        while done.len() < count {
            let more = client.wait(0).expect("answers");
            assert!(more.iter().all(|one| one.status == 0), "{more:?}");
            done.extend(more.into_iter().map(|one| one.id));
        }
        done
    };
    for _ in 0..2 {
        // The first may come at once: then the daemon has taken them.
        let ids = submit(&mut client, REQUESTS);
        let mut done = wait_for(&mut client, 1);
        server.upgrade();
        done.extend(wait_for(&mut client, ids.len() - done.len()));
        assert_eq!(done, ids);
        let begun = Instant::now();
        submit(&mut client, 3);
        wait_for(&mut client, 3);
        // The group's bucket was empty, which is one request's worth; one more comes each second.
        assert!(begun.elapsed() > Duration::from_secs(1), "{:?}", begun.elapsed());
    }
    drop(client);
    server.stop();
}

/// Nothing but the list of processes says who serves then.
#[test]
fn a_daemon_is_upgraded_by_its_process_id() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", MIB);
    let socket = scratch.path("disk.sock");
    let mut server = ServerCommand::other_command(&scratch, "serve")
        .arg(image.path().to_str().expect("UTF-8"))
        .arg("--socket")
        .arg(socket.to_str().expect("UTF-8"))
        .start();
    let load = Load::start(BlkClient::connect(&socket, 1, 16).expect("it serves"), 5);
    for _ in 0..3 {
        load.go_on();
        let mut said = String::new();
        server.upgrade_by(|server| {
            let pid = server.pid().to_string();
            let done = upgrade(Path::new(&pid));
            assert!(done.status.success(), "{done:?}");
            said = String::from_utf8_lossy(&done.stdout).into_owned();
        });
        assert_eq!(said.trim_end(), format!("Process {} serves now.", server.pid()));
        let name = fs::read_to_string(format!("/proc/{}/comm", server.pid())).expect("its name");
        assert_eq!(name, "ringmill\n");
    }
    load.go_on();
    let log = load.finish();
    server.stop();
    check(&image, &log, log.len());
}

#[test]
fn a_daemon_without_a_spawner_is_not_upgraded() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", MIB);
    let command = ServerCommand::new(&scratch).monitor("qmp").file("disk", &image, "");
    let server = command.arg("--sandbox").arg("on,upgrade=off").export("disk", "").start();
    assert_eq!(server.spawner(), None);
    let refused = upgrade(&server.socket("qmp"));
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && text.contains("upgrade=off"), "{refused:?}");
    server.stop();
}
