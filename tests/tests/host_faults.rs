//! Faults around the daemon: stopped processes, full and truncated images, lost devices, changes of the clock, many
//! short-lived clients. docs/decisions/0088-host-faults.md has the expected results.

use crate::common;
#[path = "../../crates/block/tests/common/zram.rs"]
#[allow(unreachable_pub, reason = "shared with the tests of block nodes")]
mod zram;

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use common::footprint::{Alone, Footprint};
use common::{Load, MIB, check};
use fastrand::Rng;
use integration::nbd::{RawNbd, nbd_export, nbd_server};
use integration::{
    BlkClient, Image, PATIENCE, Qmp, Scratch, Server, ServerCommand, eventually, pattern,
    preloaded, request, tied_command, tool, wire,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};
use serde_json::{Value, json};
use test_requirements::{Needs, untested};
use zram::Zram;

/// `VIRTIO_BLK_S_IOERR`.
const IO_ERROR: u8 = 1;

/// A disk of 16 MiB on an image, exported over vhost-user-blk and NBD.
fn serve(scratch: &Scratch, image: &Image) -> Server {
    let command = ServerCommand::new(scratch).iothread("io0").monitor("qmp");
    let command = command.file("disk", image, "").export("disk", "iothread=io0");
    nbd_export(nbd_server(command, scratch, ""), "disk", "").start()
}

fn connect(server: &Server) -> BlkClient {
    BlkClient::connect(&server.socket("disk"), 1, 16).expect("the export serves")
}

/// Waits until that many requests of each kind have failed, and none of other kinds. They are counted after their
/// answers.
fn expect_failed(server: &Server, expected: &[(&str, u64)]) {
    let expected: BTreeMap<String, u64> =
        expected.iter().map(|(kind, count)| ((*kind).to_owned(), *count)).collect();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let list = |value: &Value| value.as_array().expect("a list").clone();
    eventually(&format!("the counts of failed requests: {expected:?}"), || {
        let mut failed = BTreeMap::new();
        let exports = list(&qmp.execute("x-query-export-stats", json!({})));
        let queues = exports.iter().flat_map(|export| list(&export["queues"]));
        for of_kind in queues.flat_map(|queue| list(&queue["requests"])) {
            let kind = of_kind["operation"].as_str().expect("a name").to_owned();
            *failed.entry(kind).or_default() += of_kind["failed"].as_u64().expect("a number");
        }
        failed.retain(|_, count| *count > 0);
        (failed == expected).then_some(())
    });
}

/// Stops a process, and waits until all its threads have stopped.
fn stop(pid: u32) {
    kill(raw(pid), Signal::SIGSTOP).expect("it is there");
    eventually("all threads to be stopped", || {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("it is there");
        let state = |task: PathBuf| {
            let stat = fs::read_to_string(task.join("stat")).unwrap_or_default();
            stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next())
        };
        let mut states = tasks.map(|task| state(task.expect("a thread").path()));
        states.all(|state| state == Some('T')).then_some(())
    });
}

fn go_on(pid: u32) {
    kill(raw(pid), Signal::SIGCONT).expect("it is there");
}

fn raw(pid: u32) -> Pid {
    Pid::from_raw(pid.try_into().expect("a pid"))
}

/// Requests and new connections wait. No client sees an error.
#[test]
fn a_stopped_daemon_resumes() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", MIB);
    let server = serve(&scratch, &image);
    let alone = Alone::of(&server);
    let load = Load::start(connect(&server), 1);
    for _ in 0..3 {
        load.go_on();
        stop(server.pid());
        let mut waiting = UnixStream::connect(scratch.path("nbd.sock")).expect("the backlog");
        waiting.set_read_timeout(Some(PATIENCE)).expect("a time limit");
        go_on(server.pid());
        let mut greeting = [0; 18];
        waiting.read_exact(&mut greeting).expect("the waiting client is greeted");
        load.go_on();
    }
    let log = load.finish();
    expect_failed(&server, &[]);
    alone.again(&server);
    server.stop();
    check(&image, &log, log.len());
}

/// Its requests in flight are completed. Answers that it does not take wait in its memory. Other front ends are not
/// affected.
#[test]
fn a_stopped_front_end_resumes() {
    let scratch = Scratch::new();
    let images = ["one", "two"].map(|name| Image::filled(&scratch, name, MIB));
    let server = ServerCommand::new(&scratch)
        .iothread("io0")
        .file("disk", &images[0], "")
        .export("disk", "iothread=io0")
        .file("other", &images[1], "")
        .export("other", "iothread=io0")
        .start();
    let alone = Alone::of(&server);
    let mut writer = tied_command(Path::new(env!("CARGO_BIN_EXE_pattern-writer")))
        .arg(server.socket("other"))
        .arg("1")
        .stdout(Stdio::piped())
        .spawn()
        .expect("a front end");
    let mut records = writer.stdout.take().expect("a pipe");
    let mut take = |count: usize| {
        let mut bytes = vec![0; 16 * count];
        records.read_exact(&mut bytes).expect("writes that were acknowledged");
    };
    let mut log = Vec::new();
    for seed in 0..3 {
        take(500);
        stop(writer.id());
        let load = Load::start_after(log, connect(&server), seed);
        load.go_on();
        log = load.finish();
        go_on(writer.id());
        // More than a pipe holds.
        take(10_000);
    }
    writer.kill().expect("it is our child");
    writer.wait().expect("it is our child");
    BlkClient::connect(&server.socket("other"), 1, 16).expect("a device").read(0, 4096);
    alone.again(&server);
    server.stop();
    check(&images[0], &log, log.len());
}

/// The guest gets an I/O error for writes without space. All other requests succeed, and so do writes once there is
/// space.
#[test]
fn a_full_file_system() {
    let scratch = Scratch::new();
    let folder = scratch.path("small");
    fs::create_dir(&folder).expect("a folder");
    let (dir, image) = (folder.display(), folder.join("disk.img"));
    // Mounted in the daemon's own namespace.
    let script = format!(
        "mount -t tmpfs -o size=2m none {dir} && truncate -s 8M {dir}/disk.img && exec \"$@\""
    );
    let user = if geteuid().is_root() { "--mount" } else { "--map-root-user" };
    let arguments = [user, "--mount", "sh", "-c", &script, "sh"].map(str::to_owned);
    let server = ServerCommand::new(&scratch)
        .wrapped_by_with(tool("unshare"), &arguments)
        .monitor("qmp")
        .iothread("io0")
        .arg("--blockdev")
        .arg(format!("file,node-name=disk,discard=unmap,filename={}", image.display()))
        .export("disk", "iothread=io0")
        .start();
    let alone = Alone::of(&server);
    let mut client = connect(&server);
    let block = |index: u64| pattern::block(index, 1);
    let write = |client: &mut BlkClient, index: u64| {
        client.call(request::OUT, index * 8, &block(index), 0).status
    };
    let full = (0..1024).find(|index| write(&mut client, *index) != 0).expect("2 MiB are full");
    assert_eq!(write(&mut client, full), IO_ERROR);
    assert!((256..=512).contains(&full), "{full} blocks of 4 KiB in 2 MiB");
    // Allocated blocks can be read and overwritten, holes read as zeroes, and flushes succeed.
    for index in 0..full {
        assert_eq!(client.read(index * 8, pattern::BLOCK), block(index), "block {index}");
    }
    assert_eq!(write(&mut client, 0), 0);
    assert_eq!(client.read(full * 8, pattern::BLOCK), [0; pattern::BLOCK]);
    assert_eq!(client.call(request::FLUSH, 0, &[], 0).status, 0);
    // A discard frees space: the first 64 blocks.
    let mut range = [0; 16];
    range[8..12].copy_from_slice(&512u32.to_le_bytes());
    assert_eq!(client.call(request::DISCARD, 0, &range, 0).status, 0);
    assert_eq!(write(&mut client, full), 0);
    assert_eq!(client.read(full * 8, pattern::BLOCK), block(full));
    // 63 blocks are free. A write that fits only in part fails.
    let long: Vec<u8> = (0..16).flat_map(block).collect();
    let at = |nth: u64| (full + 1 + 16 * nth) * 8;
    let statuses = (0..4).map(|nth| client.call(request::OUT, at(nth), &long, 0).status);
    assert_eq!(statuses.collect::<Vec<_>>(), [0, 0, 0, IO_ERROR]);
    for nth in 0..3 {
        assert!(client.read(at(nth), long.len()) == long, "long write {nth}");
    }
    // Two writes of a block, and the long one.
    expect_failed(&server, &[("write", 3)]);
    drop(client);
    alone.again(&server);
    server.stop();
}

/// The truncated part reads as zeroes and can be written again: the disk keeps its size.
#[test]
fn an_image_is_truncated_under_its_guest() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 4);
    let server = serve(&scratch, &image);
    let alone = Alone::of(&server);
    let mut client = connect(&server);
    let file = OpenOptions::new().write(true).open(image.path()).expect("the image");
    file.set_len(1 << 20).expect("a shorter image");
    let at = |mib: u64| mib * 2048;
    assert_eq!(pattern::generation(0, &client.read(0, pattern::BLOCK)), Ok(0));
    assert_eq!(client.read(at(2), pattern::BLOCK), [0; pattern::BLOCK]);
    // Across the file's end.
    let across = client.read(at(1) - 8, 2 * pattern::BLOCK);
    assert_eq!(pattern::generation(255, &across[..pattern::BLOCK]), Ok(0));
    assert_eq!(across[pattern::BLOCK..], [0; pattern::BLOCK]);
    client.write(at(3), &pattern::block(768, 1));
    assert_eq!(pattern::generation(768, &client.read(at(3), pattern::BLOCK)), Ok(1));
    assert_eq!(client.call(request::FLUSH, 0, &[], 0).status, 0);
    assert_eq!(u64::from(client.config().expect("a configuration").capacity), 4 * 2048);
    expect_failed(&server, &[]);
    drop(client);
    alone.again(&server);
    server.stop();
}

/// A detached loop device works as long as it is open. If its backing file has lost data, it gives I/O errors. The daemon
/// survives both.
#[test]
fn a_loop_device_is_lost() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 4);
    let losetup = |arguments: &[&str]| {
        Command::new(tool("losetup")).args(arguments).output().expect("losetup runs")
    };
    let path = image.path().to_str().expect("UTF-8");
    let found = losetup(&["--find", "--show", path]);
    if !found.status.success() {
        let why = String::from_utf8_lossy(&found.stderr);
        return untested(Needs::Loop, format_args!("loop devices take root: {}", why.trim()));
    }
    let device = String::from_utf8(found.stdout).expect("a path");
    let device = device.trim();
    // Compare the backing file too, as another test may reuse the device's name.
    let is_attached = || {
        let all = losetup(&["--all", "--output", "NAME,BACK-FILE", "--noheadings"]);
        let all = String::from_utf8(all.stdout).expect("paths");
        all.lines().any(|line| {
            line.split_once(' ').is_some_and(|(name, file)| name == device && file.trim() == path)
        })
    };
    let server = ServerCommand::new(&scratch)
        .monitor("qmp")
        .iothread("io0")
        .arg("--blockdev")
        .arg(format!("host_device,node-name=disk,filename={device},cache.direct=on"))
        .export("disk", "iothread=io0")
        .start();
    let alone = Alone::of(&server);
    let mut client = connect(&server);
    client.write(8, &pattern::block(1, 1));
    assert!(losetup(&["--detach", device]).status.success());
    assert!(is_attached(), "{device} is in use");
    assert_eq!(pattern::generation(1, &client.read(8, pattern::BLOCK)), Ok(1));
    let file = OpenOptions::new().write(true).open(image.path()).expect("the image");
    file.set_len(0).expect("nothing behind it");
    let reply = client.call(request::IN, 16, &[], pattern::BLOCK);
    assert_eq!(reply.status, IO_ERROR);
    drop(client);
    let mut client = connect(&server);
    assert_eq!(client.call(request::IN, 16, &[], pattern::BLOCK).status, IO_ERROR);
    expect_failed(&server, &[("read", 2)]);
    drop(client);
    alone.again(&server);
    server.stop();
    eventually("the device to be let go", || (!is_attached()).then_some(()));
}

/// A zram device in use cannot be reset: the kernel refuses. Without memory, it gives I/O errors until it has some.
#[test]
fn a_zram_device_is_reset_and_has_no_memory() {
    const RESOURCE_BUSY: i32 = 16;
    let Some(zram) = Zram::new(16 << 20) else { return };
    let set = |attribute: &str, value: &str| {
        fs::write(Path::new("/sys/block/zram0").join(attribute), value)
    };
    let scratch = Scratch::new();
    let server = ServerCommand::new(&scratch)
        .monitor("qmp")
        .iothread("io0")
        .arg("--blockdev")
        .arg(format!(
            "host_device,node-name=disk,filename={},cache.direct=on",
            zram.path().display()
        ))
        .export("disk", "iothread=io0")
        .start();
    let alone = Alone::of(&server);
    let mut client = connect(&server);
    let block = |index: u64| {
        // Incompressible data.
        let mut block = vec![0; pattern::BLOCK];
        Rng::with_seed(index).fill(&mut block);
        block
    };
    client.write(0, &block(0));
    let refused = set("reset", "1").expect_err("the device is in use");
    assert_eq!(refused.raw_os_error(), Some(RESOURCE_BUSY));
    assert_eq!(client.read(0, pattern::BLOCK), block(0));
    set("mem_limit", "1M").expect("a limit");
    let write = |client: &mut BlkClient, index: u64| {
        client.call(request::OUT, index * 8, &block(index), 0).status
    };
    let full = (1..1024).find(|index| write(&mut client, *index) != 0).expect("1 MiB is full");
    assert_eq!(write(&mut client, full), IO_ERROR);
    for index in 0..full {
        assert_eq!(client.read(index * 8, pattern::BLOCK), block(index), "block {index}");
    }
    set("mem_limit", "0").expect("no limit");
    assert_eq!(write(&mut client, full), 0);
    assert_eq!(client.read(full * 8, pattern::BLOCK), block(full));
    expect_failed(&server, &[("write", 2)]);
    drop(client);
    alone.again(&server);
    server.stop();
}

/// Only events and certificates depend on the time of day. A library loaded before libc moves it by a day, forth and back,
/// with each query. Setting the machine's clock would affect other tests.
#[test]
fn the_clock_is_set() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", MIB);
    let limits = r#"{"qom-type":"throttle-group","id":"tg","limits":{"iops-total":200}}"#;
    let slow = "throttle,node-name=slow,throttle-group=tg,file.driver=null-co,file.size=1048576";
    let command = ServerCommand::new(&scratch)
        .env("LD_PRELOAD", preloaded(&scratch, "clock_that_jumps.c"))
        .iothread("io0")
        .monitor("qmp")
        .file("disk", &image, "")
        .export("disk", "iothread=io0,stall-timeout-ms=60000")
        .arg("--object")
        .arg(limits)
        .arg("--blockdev")
        .arg(slow)
        .export("slow", "iothread=io0");
    let command = nbd_server(command, &scratch, ",handshake-max-seconds=60");
    let server = nbd_export(command, "disk", "").start();
    let alone = Alone::of(&server);
    let load = Load::start(connect(&server), 3);
    let mut shaking_hands = RawNbd::greet(&scratch.path("nbd.sock"));
    // An event contains the time of day.
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let mut seconds = || {
        let addr = json!({"type": "unix", "path": scratch.path("more.sock")});
        let export =
            json!({"type": "vhost-user-blk", "id": "more", "node-name": "slow", "addr": addr});
        qmp.execute("block-export-add", export);
        qmp.execute("block-export-del", json!({"id": "more"}));
        let event = qmp.wait_for_event("BLOCK_EXPORT_DELETED");
        event["timestamp"]["seconds"].as_i64().expect("seconds")
    };
    let times: Vec<i64> = (0..6).map(|_| seconds()).collect();
    let jumps = times.windows(2).filter(|pair| (pair[1] - pair[0]).abs() > 80_000).count();
    assert!(jumps > 0, "the clock does not jump: {times:?}");
    let mut slow = BlkClient::connect(&server.socket("slow"), 1, 16).expect("a device");
    for sector in 0..50 {
        slow.read(sector * 8, 4096);
    }
    load.go_on();
    shaking_hands.option(1, b"disk");
    let _size_and_flags: [u8; 10] = shaking_hands.take();
    let log = load.finish();
    assert!(!server.log().contains("takes longer"), "{}", server.log());
    drop((slow, shaking_hands, qmp));
    alone.again(&server);
    server.stop();
    check(&image, &log, log.len());
}

/// Permitted growth of memory over 20,000 clients, KiB: 50 bytes for each, kept by the allocator.
const MARGIN_KIB: u64 = 1024;
/// Permitted growth of the number of mappings, which the allocator makes.
const MARGIN_MAPPINGS: usize = 16;

#[test]
fn ten_thousand_reconnects_leave_nothing_behind() {
    let scratch = Scratch::new();
    let node = "null-co,node-name=disk,size=1048576";
    let command = ServerCommand::new(&scratch).iothread("io0").arg("--blockdev").arg(node);
    let command = command.export("disk", "iothread=io0");
    // A low limit, as memory depends on the number of simultaneous connections.
    let command = nbd_server(command, &scratch, ",max-connections=4");
    let command = nbd_export(command, "disk", ",iothread=io0");
    let begun = Instant::now();
    let server = command.start();
    let alone = Footprint::of(&server);
    let come_and_go = |times: usize, with_memory: usize| {
        for _ in 0..times {
            wire::get_features(&mut wire::connect(&server.socket("disk")));
            drop(RawNbd::go(&scratch.path("nbd.sock"), "disk"));
        }
        for _ in 0..with_memory {
            connect(&server).read(0, 4096);
        }
        eventually("all to be as before", || (Footprint::of(&server) == alone).then_some(()));
    };
    // The first clients allocate memory that later ones reuse.
    come_and_go(500, 50);
    let (memory, mappings) = (server.private_kib(), server.mappings());
    come_and_go(10_000, 300);
    let (memory_after, mappings_after) = (server.private_kib(), server.mappings());
    println!("{memory} KiB in {mappings} mappings, then {memory_after} KiB in {mappings_after}");
    assert!(memory_after <= memory + MARGIN_KIB, "{memory} KiB became {memory_after} KiB");
    assert!(mappings_after <= mappings + MARGIN_MAPPINGS, "{mappings} became {mappings_after}");
    // The log has not grown with each client.
    let lines = server.log().lines().count();
    let minutes = begun.elapsed().as_secs() as usize / 60 + 1;
    assert!(lines < 50 + 150 * minutes, "{lines} lines in {minutes} minutes");
    server.stop();
}
