//! The daemon is upgraded under a client that writes and checks what it reads. The daemon continues to serve if no other
//! process takes over.

use crate::common;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use common::{
    Load, MIB, add_file, check, connect, daemon, refused_upgrade, upgrade, upgrade_under,
};
use integration::{
    BlkClient, Image, Qmp, Request, Scratch, Segment, Server, ServerCommand, daemon as program,
    eventually, install, preloaded, request, tool,
};
use serde_json::{Value, json};

/// Everything that QMP reports about nodes, exports and objects.
fn told(server: &Server) -> Vec<Value> {
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let mut exports = qmp.execute("query-block-exports", json!({}));
    // Exports are listed in the order of creation, in which those on qcow2 images come last.
    let by_id = |export: &Value| export["id"].as_str().map(str::to_owned);
    exports.as_array_mut().expect("a list").sort_by_key(by_id);
    let nodes = qmp.execute("query-named-block-nodes", json!({}));
    vec![exports, nodes, qmp.execute("qom-list", json!({"path": "/objects"}))]
}

#[test]
fn changes_by_qmp_survive_an_upgrade() {
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
        upgrade_under(&mut server, &load);
        load.go_on();
        assert_eq!(told(&server), before);
        // Clients of the monitor connect and disconnect.
        let open = || eventually("few files", || (server.open_files() <= files).then_some(()));
        open();
        eventually("as many threads", || (server.threads() == threads).then_some(()));
        // The standard descriptors and the channel to the daemon: no memory, no image, no socket.
        let spawner = server.spawner().expect("a spawner");
        let kept = || fs::read_dir(format!("/proc/{spawner}/fd")).expect("its files").count();
        eventually("a spawner that keeps nothing", || (kept() == 4).then_some(()));
        if round == 0 {
            after_one = server.open_files();
        }
    }
    // The daemon sees the last monitor client's end with a delay.
    eventually("as few files", || (server.open_files() <= after_one).then_some(()));
    drop(other);
    let log = load.finish();
    server.stop();
    check(&image, &log, log.len());
}

/// Returns the ids that a program for listing processes prints.
fn processes(program: &str, arguments: &[&str]) -> Vec<u32> {
    let output = Command::new(tool(program)).args(arguments).output().expect("it can be run");
    let text = String::from_utf8(output.stdout).expect("numbers");
    text.split_whitespace().map(|pid| pid.parse().expect("a number")).collect()
}

#[test]
fn a_list_of_processes_has_the_daemon_once_and_no_zombie() {
    let scratch = Scratch::new();
    let mut server = ServerCommand::new(&scratch).monitor("qmp").start();
    for _ in 0..2 {
        let spawner = server.spawner().expect("a spawner");
        // The spawner changes its name a moment after its start.
        let comm = || fs::read_to_string(format!("/proc/{spawner}/cmdline")).expect("it is there");
        eventually("a name of the spawner's own", || comm().starts_with("spawner\0").then_some(()));
        for (program, pattern) in [("pidof", "ringmill"), ("pgrep", "ringmill")] {
            let found = processes(program, &[pattern]);
            assert!(
                found.contains(&server.pid()) && !found.contains(&spawner),
                "{program}: {found:?}"
            );
        }
        let folder = scratch.dir().to_str().expect("UTF-8");
        assert_eq!(processes("pgrep", &["-f", folder]), [server.pid()]);
        server.upgrade();
    }
    let spawner = server.spawner().expect("a spawner");
    let spawner = nix::unistd::Pid::from_raw(spawner.cast_signed());
    nix::sys::signal::kill(spawner, nix::sys::signal::Signal::SIGKILL).expect("it is there");
    eventually("nothing left of the spawner", || server.spawner().is_none().then_some(()));
    server.stop();
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
        upgrade_under(&mut server, &load);
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

/// A daemon whose path has a program that does not take over.
fn continues_after(script: &str, why: &str) {
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
    // The image is still locked.
    let locked = image.qemu_img(&["bench", "-f", "raw", "-c", "1", "-w"]);
    assert!(String::from_utf8_lossy(&locked.stderr).contains("lock"), "{locked:?}");
    // With the right program the next upgrade works, and the load finds correct data.
    fs::remove_file(&installed).expect("it is ours");
    std::os::unix::fs::symlink(program(), &installed).expect("a link");
    upgrade_under(&mut server, &load);
    load.go_on();
    let log = load.finish();
    server.stop();
    check(&image, &log, log.len());
}

#[test]
fn the_daemon_continues_if_the_new_program_fails() {
    continues_after("#!/bin/sh\nexit 3\n", "has ended with status 3");
}

#[test]
fn the_daemon_continues_if_there_is_no_program() {
    continues_after("\u{7f}ELF, or so it seems", "cannot be started");
}

/// The log of a daemon in the background goes nowhere. The answer has the reason.
#[test]
fn a_daemon_in_the_background_says_why_an_upgrade_failed() {
    let scratch = Scratch::new();
    let [installed, socket, pid_file] =
        ["qemu-storage-daemon", "qmp.sock", "pid"].map(|name| scratch.path(name));
    let link = || std::os::unix::fs::symlink(program(), &installed).expect("a link");
    link();
    let chardev = format!("socket,id=m,path={},server=on,wait=off", socket.display());
    let mut command = Command::new(&installed);
    command.args(["--daemonize", "--chardev", &chardev, "--monitor", "m", "--pidfile"]);
    assert!(command.arg(&pid_file).status().expect("it runs").success());
    let path = installed.display();
    for (script, why) in [
        (
            "#!/bin/sh\necho one >&2\necho 'no such library' >&2\nexit 3\n",
            "it has ended with status 3: no such library\n".to_owned(),
        ),
        ("\u{7f}ELF, or so it seems", format!("cannot be started: {path}: Exec format error\n")),
        ("", format!("cannot be started: {path}: No such file or directory\n")),
    ] {
        fs::remove_file(&installed).expect("it is there");
        if !script.is_empty() {
            install(&installed, script);
        }
        let text = refused_upgrade(&socket);
        assert!(text.ends_with(&why), "{text}");
        // The next one takes over, and its errors go nowhere.
        let _ = fs::remove_file(&installed);
        link();
        let done = upgrade(&socket);
        let said = String::from_utf8_lossy(&done.stdout).into_owned();
        let pid = said.split(' ').nth(1).unwrap_or_default();
        assert!(done.status.success(), "{done:?}");
        let errors = format!("/proc/{pid}/fd/2");
        eventually("errors to nowhere", || {
            (fs::read_link(&errors).ok()? == Path::new("/dev/null")).then_some(())
        });
    }
    Qmp::connect(&socket).execute("quit", json!({}));
    eventually("the end", || (!pid_file.exists()).then_some(()));
}

#[test]
fn the_daemon_continues_if_the_new_program_hangs() {
    continues_after("#!/bin/sh\nexec sleep 1000\n", "has not been ready within");
}

#[test]
fn the_daemon_continues_if_the_new_program_needs_another_document() {
    // The beginning of such a program's message. `take_over.rs` tests the real one's refusal.
    let script = "#!/usr/bin/python3
import socket
to = socket.socket(fileno=0)
to.recv(100)
to.send(b'Ewhat is handed over is of version 1; this program takes version 2')
";
    continues_after(script, "this program takes version 2");
}

#[test]
fn the_daemon_continues_if_the_new_program_dies_after_the_stop() {
    let script = "#!/usr/bin/python3
import socket
to = socket.socket(fileno=0)
while (kind := to.recv(100)[:1]) != b'Q':
    if kind == b'G':
        to.send(b'R')
";
    continues_after(script, "has given up");
}

/// An upgrade releases, in order, the requests that a group has delayed. The new process delays later ones.
#[test]
fn throttled_requests_are_released_by_an_upgrade() {
    // As many requests as the queue holds, which take as many seconds.
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
        // The first answer may come at once, and shows that the daemon has taken the requests.
        let ids = submit(&mut client, REQUESTS);
        let mut done = wait_for(&mut client, 1);
        server.upgrade();
        done.extend(wait_for(&mut client, ids.len() - done.len()));
        assert_eq!(done, ids);
        let begun = Instant::now();
        submit(&mut client, 3);
        wait_for(&mut client, 3);
        // The group's bucket holds one request and was empty; one more is permitted each second.
        assert!(begun.elapsed() > Duration::from_secs(1), "{:?}", begun.elapsed());
    }
    drop(client);
    server.stop();
}

/// Only the list of processes shows which process serves.
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

/// The disk of the pid file is slow.
#[test]
fn the_pid_file_is_right_when_the_command_is_answered() {
    let scratch = Scratch::new();
    let slow = preloaded(&scratch, "slow_pid_file.c");
    let mut server = ServerCommand::new(&scratch).env("LD_PRELOAD", slow).monitor("qmp").start();
    for by in ["qmp.sock", "daemon.pid"] {
        server.upgrade_by(|server| {
            let done = upgrade(&scratch.path(by));
            let pid = server.pid_file();
            assert!(done.status.success(), "{done:?}");
            let said = String::from_utf8_lossy(&done.stdout).into_owned();
            assert!(said.starts_with(&format!("Process {pid} serves now")), "{pid}: {said}");
        });
    }
    server.stop();
}

#[test]
fn a_daemon_without_a_spawner_is_not_upgraded() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", MIB);
    let command = ServerCommand::new(&scratch).monitor("qmp").file("disk", &image, "");
    let server = command.arg("--sandbox").arg("on,upgrade=off").export("disk", "").start();
    assert_eq!(server.spawner(), None);
    let text = refused_upgrade(&server.socket("qmp"));
    assert!(text.contains("upgrade=off"), "{text}");
    server.stop();
}
