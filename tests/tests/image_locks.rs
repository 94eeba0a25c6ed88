//! Image locks compatible with QEMU: a writer excludes other writers.

use crate::kernel;

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use integration::nbd::{RawNbd, nbd_export, nbd_server};
use integration::{BlkClient, Image, Qmp, Scratch, ServerCommand, eventually, pattern, tool};
use nix::sys::signal::Signal;
use serde_json::json;

use kernel::landlock_of_the_kernel;

/// Asserts that `program`, with the image between its arguments, cannot lock the image.
fn assert_locked_out(image: &Image, program: &str, before: &[&str], after: &[&str]) {
    let mut command = Command::new(tool(program));
    let output = command.args(before).arg(image.path()).args(after).output().expect("it runs");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains("lock"), "{command:?}: {output:?}");
}

#[test]
fn an_image_is_written_by_one() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let server = ServerCommand::new(&scratch).file("disk", &image, "").export("disk", "").start();

    let second = ServerCommand::new(&scratch).named("second");
    let (status, stderr) = second.file("again", &image, "").export("again", "").run();
    assert_eq!(status.code(), Some(1));
    assert!(stderr.contains("lock") && stderr.contains("disk.img"), "{stderr}");
    assert!(!scratch.path("again.sock").exists());

    let copy = scratch.path("copy").display().to_string();
    assert_locked_out(&image, "qemu-img", &["convert", "-f", "raw", "-O", "raw"], &[&copy]);
    assert_locked_out(&image, "qemu-img", &["resize", "-f", "raw"], &["2M"]);
    assert_locked_out(&image, "qemu-io", &["-f", "raw", "-c", "write 0 512"], &[]);
    assert!(image.qemu_img(&["info", "--force-share"]).status.success());

    // The lock is released with the daemon's end.
    server.stop();
    let mut resize = Command::new(tool("qemu-img"));
    let resize = resize.args(["resize", "-f", "raw"]).arg(image.path()).arg("2M").output();
    assert!(resize.expect("qemu-img runs").status.success());
}

/// A sandboxed daemon cannot search for the process that holds the image. It does not take that process for a killed
/// daemon whose locks remain.
#[test]
fn a_command_is_refused_an_image_of_another_daemon() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let first = ServerCommand::new(&scratch).file("disk", &image, "").start();
    let second = ServerCommand::new(&scratch).named("second").monitor("qmp").start();
    let mut qmp = Qmp::connect(&second.socket("qmp"));
    let node = json!({"driver": "file", "node-name": "again", "filename": image.path()});
    let why = qmp.refused("blockdev-add", node);
    assert!(why.contains("lock"), "{why}");
    // Without Landlock it can search.
    if landlock_of_the_kernel() > 0 {
        assert!(why.contains("not all of /proc may be read"), "{why}");
    }
    drop(qmp);
    second.stop();
    first.stop();
}

#[test]
fn an_image_that_qemu_writes_is_refused() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let mut qemu_io = Command::new(tool("qemu-io"))
        .args(["-f", "raw"])
        .arg(image.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("qemu-io runs");
    // The prompt comes once the image is open.
    let mut prompt = BufReader::new(qemu_io.stdout.take().expect("a pipe"));
    prompt.read_until(b'>', &mut Vec::new()).expect("a prompt");

    let daemon = ServerCommand::new(&scratch).file("disk", &image, "").export("disk", "");
    let (status, stderr) = daemon.run();
    assert_eq!(status.code(), Some(1));
    assert!(stderr.contains("lock"), "{stderr}");

    drop(qemu_io.stdin.take());
    qemu_io.wait().expect("qemu-io is our child");
    let server = ServerCommand::new(&scratch).file("disk", &image, "").export("disk", "").start();
    server.stop();
}

#[test]
fn readers_share() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let start = |name, node: &str| {
        let daemon = ServerCommand::new(&scratch).named(name);
        daemon.file(node, &image, "read-only=on").export(node, "writable=off").start()
    };
    let servers = [start("first", "one"), start("second", "two")];
    for (server, node) in servers.iter().zip(["one", "two"]) {
        let mut client = BlkClient::connect(&server.socket(node), 1, 16).expect("a device");
        assert_eq!(pattern::generation(1, &client.read(8, pattern::BLOCK)), Ok(0));
    }
    assert!(image.qemu_img(&["info"]).status.success());

    let writer = ServerCommand::new(&scratch).named("third");
    let (status, stderr) = writer.file("three", &image, "").export("three", "").run();
    assert_eq!(status.code(), Some(1));
    assert!(stderr.contains("lock"), "{stderr}");
}

/// As with qemu-storage-daemon, a node without users does not hinder others. Its first user locks the image.
#[test]
fn a_read_only_image_is_locked_while_it_has_users() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let overlay = scratch.path("over.qcow2");
    let mut create = Command::new(tool("qemu-img"));
    let create = create.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]);
    let made = create.arg(image.path()).arg(&overlay).status().expect("qemu-img runs");
    assert!(made.success());
    let nbd = scratch.path("nbd.sock");
    let addr = format!("addr.type=unix,addr.path={}", nbd.display());
    let server = ServerCommand::new(&scratch)
        .monitor("qmp")
        .args(["--nbd-server", &addr])
        .file("reader", &image, "read-only=on")
        .start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let file = |name: &str, read_only: bool| json!({"driver": "file", "node-name": name, "filename": image.path(), "read-only": read_only});
    let export = |node: &str, writable: bool| json!({"type": "nbd", "id": node, "node-name": node, "writable": writable});
    let is_writable_elsewhere = || {
        let mut write = Command::new(tool("qemu-io"));
        let write = write.args(["-f", "raw", "-c", "write 0 512"]).arg(image.path()).output();
        write.expect("qemu-io runs").status.success()
    };
    assert!(is_writable_elsewhere());

    // A window and an unused overlay use nothing.
    let raw = json!({"driver": "raw", "node-name": "window", "file": "reader", "read-only": true});
    qmp.execute("blockdev-add", raw);
    let file_of_overlay = json!({"driver": "file", "filename": overlay});
    let over = json!({"driver": "qcow2", "node-name": "over", "file": file_of_overlay, "backing": "window"});
    qmp.execute("blockdev-add", over);
    qmp.execute("blockdev-add", file("writer", false));
    let why = qmp.refused("block-export-add", export("over", true));
    assert!(why.contains("Failed to get shared \"write\" lock"), "{why}");
    qmp.execute("blockdev-add", file("other", true));
    assert!(!is_writable_elsewhere());
    qmp.execute("blockdev-del", json!({"node-name": "writer"}));

    // The overlay's guest reads the image, which nobody else writes meanwhile.
    qmp.execute("block-export-add", export("over", true));
    let why = qmp.refused("blockdev-add", file("writer", false));
    assert!(why.contains("Failed to get \"write\" lock"), "{why}");
    assert!(!is_writable_elsewhere());
    qmp.execute("block-export-del", json!({"id": "over"}));
    qmp.wait_for_event("BLOCK_EXPORT_DELETED");
    qmp.execute("blockdev-add", file("writer", false));
    drop(qmp);
    server.stop();
}

#[test]
fn locking_can_be_switched_off() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let start = |name, node: &str| {
        let daemon = ServerCommand::new(&scratch).named(name);
        daemon.file(node, &image, "locking=off").export(node, "").start()
    };
    let _servers = [start("first", "one"), start("second", "two")];
}

/// The clients of the images stay connected, with all requests answered. A request on another disk is never answered, so
/// the daemon does not end, and does not flush.
#[test]
fn an_image_is_free_after_its_last_request_while_the_daemon_ends() {
    let scratch = Scratch::new();
    let [over_nbd, over_vhost_user] =
        ["nbd.img", "vu.img"].map(|name| Image::filled(&scratch, name, 1));
    let command = ServerCommand::new(&scratch)
        .file("over-nbd", &over_nbd, "")
        .args(["--blockdev", "raw,node-name=raw,file=over-nbd"])
        .file("over-vu", &over_vhost_user, "")
        .args(["--blockdev", "null-co,node-name=never,latency-ns=3600000000000"])
        .export("over-vu", "");
    let command = nbd_server(command, &scratch, "");
    let command = nbd_export(command, "raw", ",writable=on");
    let mut server = nbd_export(command, "never", "").start();
    let socket = scratch.path("nbd.sock");
    let mut nbd = RawNbd::go(&socket, "raw");
    nbd.request(1, 7, 0, 512);
    nbd.send(&[1; 512]);
    assert_eq!(nbd.reply(), (0, 7));
    let mut front_end = BlkClient::connect(&server.socket("over-vu"), 1, 16).expect("a device");
    front_end.write(0, &[2; 4096]);
    let mut waits = RawNbd::go(&socket, "never");
    waits.request(0, 8, 0, 512);
    // The error for an unknown command shows that the server has taken the request before it.
    waits.request(99, 9, 0, 0);
    assert_eq!(waits.reply().1, 9);
    server.signal(Signal::SIGTERM);
    for image in [&over_nbd, &over_vhost_user] {
        eventually("an image without locks", || {
            let mut write = Command::new(tool("qemu-io"));
            write.args(["-f", "raw", "-c", "write 0 512"]).arg(image.path());
            write.output().expect("qemu-io runs").status.success().then_some(())
        });
    }
    assert_eq!(server.insist().code(), Some(1));
}
