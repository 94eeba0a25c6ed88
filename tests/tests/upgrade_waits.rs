//! How long an upgrade makes guests wait, and what an upgrade waits for.

use crate::common;

use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use common::{Load, MIB, check, connect, daemon, refused_upgrade, upgrade};
use integration::nbd::{RawNbd, nbd_export, nbd_server};
use integration::{
    BlkClient, Image, PATIENCE, Qmp, Request, Scratch, Segment, Server, ServerCommand, eventually,
    pattern, request, tool, wire,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use nix::sys::socket::{MsgFlags, recv, send};
use serde_json::json;

/// Maximum time without an answer for a guest at depth 64.
const PAUSE: Duration = Duration::from_millis(100);

/// The same for a debug build, on a machine with other load.
const PAUSE_BUSY: Duration = Duration::from_millis(500);

/// Judges pauses, sorted from the shortest. With `RINGMILL_LONG`, for a release build on an idle machine, nine of ten must be
/// within the limit, as the scheduler may cause one. Otherwise the median must be.
fn judge(pauses: &[Duration]) {
    let (judged, most) = match std::env::var_os("RINGMILL_LONG") {
        Some(_) => (pauses.len() * 9 / 10, PAUSE),
        None => (pauses.len() / 2, PAUSE_BUSY),
    };
    assert!(pauses[judged] <= most, "{pauses:?}");
}

/// Upgrades a daemon under a client with 64 requests in flight, reads and writes in turn, each 64 KiB further on in the disk of
/// `mib` MiB. Returns the longest time without an answer in each upgrade, sorted. `RINGMILL_UPGRADES` sets the number of
/// upgrades, 5 by default.
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
        // Discard gaps from before the upgrade.
        gaps.try_iter().for_each(drop);
        server.upgrade();
        // All requests in flight may have been answered before the pause; the next answer comes after it.
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

/// The image's metadata changes, and is handed over in its journal.
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

/// Requests of 1.5 s, over vhost-user and NBD, are in flight when the queues are to stop. Neither other exports nor later
/// requests in the same queue wait for them, and they need not be repeated.
#[test]
fn slow_requests_delay_no_others() {
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
            // On a busy machine they may have been too old before it began.
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
        // The new process may take so long to start that the slow requests are done by then. A busy machine may take a second
        // for anything.
        let ids: Vec<u16> = order.iter().map(|done| done.id).collect();
        if waited < 1000 && behind.is_some_and(|behind| ids == [behind, slow]) {
            let log = load.finish();
            server.stop();
            return check(&image, &log, log.len());
        }
    }
    panic!("each time those behind a slow request waited for it:\n{}", server.log());
}

/// Requests that never complete, over vhost-user and NBD, and a front end that never sends a message.
#[test]
fn a_hanging_request_delays_no_others() {
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
        let text = refused_upgrade(&server.socket("qmp"));
        // Its own rings cannot be served, but the others are.
        load.go_on();
        text
    };
    let text = refused();
    let of_age = "has a request that has taken ";
    let in_flight = "requests in flight have not ended within 5 s";
    assert!(text.contains(in_flight) || text.contains(of_age), "{text}");
    // The daemon knows by now that an upgrade would fail, and refuses at once.
    let text = refused();
    assert!(text.contains(of_age), "{text}");
    // Hanging clients are served as before: the daemon takes more of their requests, and a client can disconnect.
    client.submit(0, &hanging);
    nbd.request(2, 2, 0, 0);
    drop((client, nbd));
    let log = load.finish();
    server.kill();
    check(&image, &log, log.len());
}

/// A front end that sends a part of a message is named and disconnected: the next upgrade works.
#[test]
fn a_front_end_within_a_message_keeps_a_daemon_from_its_next_version_for_seconds_only() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", MIB);
    let mut server = daemon(&scratch, &image, "");
    let mut front_end = wire::connect(&server.socket("disk"));
    wire::get_features(&mut front_end);
    front_end.write_all(&[1, 0, 0, 0, 1, 0]).expect("it is connected");
    let text = refused_upgrade(&server.socket("qmp"));
    assert!(text.contains("the front end of export 'disk' is within a message"), "{text}");
    assert_eq!(front_end.read(&mut [0]).expect("the end"), 0);
    server.upgrade();
    server.stop();
}

/// So is a front end that sends requests but reads no reply.
#[test]
fn a_front_end_that_reads_no_replies_delays_one_upgrade() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", MIB);
    let mut server = daemon(&scratch, &image, "");
    let mut front_end = wire::connect(&server.socket("disk"));
    wire::get_features(&mut front_end);
    // More replies than a socket holds, to requests in one write.
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
    let text = refused_upgrade(&server.socket("qmp"));
    assert!(text.contains("the front end of export 'disk' is within a message"), "{text}");
    // Reading would unblock the daemon.
    let mut end = [PollFd::new(front_end.as_fd(), PollFlags::empty())];
    let patience = PollTimeout::try_from(PATIENCE).expect("a time");
    assert_eq!(poll(&mut end, patience), Ok(1), "LOST: the end of the connection");
    server.upgrade();
    server.stop();
}

/// The disk of a qcow2 image without a guest does not answer, in the new process neither. Other guests wait no longer than the
/// limit, and the old process continues to use the image.
#[test]
fn a_hanging_disk_delays_no_others() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", MIB);
    // The image grows over NBD into a file of fixed size.
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
    // On a busy machine there may be other reasons before.
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
