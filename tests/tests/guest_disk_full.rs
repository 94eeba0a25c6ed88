//! A file system becomes full under a guest's disk. The guest's requests wait until space is free. The guest sees no
//! error, and finds each block as written.

use std::fs::{self, OpenOptions};
use std::path::PathBuf;

use integration::{Guest, Image, Qmp, Scratch, Server, ServerCommand, install};
use serde_json::json;

/// Writes with checksums and reads everything back, then prints the disk's checksum and the kernel's messages.
fn job(disk: &str) -> String {
    format!(
        "[ -e /dev/vda ] || ln -s /dev/{disk} /dev/vda
        echo begin
        verify --size=8m --do_verify=1
        verify --size=8m --verify_only=1
        md5sum </dev/{disk}
        dmesg | grep -E 'I/O error|{disk}.*(timeout|reset)' || true"
    )
}

/// Waits for the events of a full disk.
fn wait_for_stop(qmp: &mut Qmp) {
    let event = qmp.wait_for("BLOCK_IO_ERROR");
    assert_eq!((&event["action"], &event["nospace"]), (&json!("stop"), &json!(true)), "{event}");
}

fn resume(qmp: &mut Qmp) {
    qmp.execute("x-block-export-resume", json!({"id": "disk"}));
}

/// A program that starts another one with `folder` as a file system in memory of 24 MiB. The file system has a sparse
/// image of 32 MiB, and another file of 20 MiB.
fn on_small_file_system(scratch: &Scratch, folder: &str) -> PathBuf {
    let user = if nix::unistd::geteuid().is_root() { "" } else { "-r" };
    let script = format!(
        "#!/bin/sh
        exec unshare -m {user} sh -ec '
            mount -t tmpfs -o size=24m tmpfs {folder}
            truncate -s 32M {folder}/disk.img
            head -c 20M /dev/zero >{folder}/ballast
            exec \"$@\"' sh \"$@\"\n"
    );
    let path = scratch.path("small-file-system");
    install(&path, &script);
    path
}

#[test]
fn a_disk_is_full_and_space_is_made() {
    let scratch = Scratch::new();
    let folder = scratch.path("small");
    fs::create_dir(&folder).expect("a folder");
    let folder = folder.to_str().expect("UTF-8").to_owned();
    let server = ServerCommand::new(&scratch)
        .wrapped_by(on_small_file_system(&scratch, &folder))
        .monitor("qmp")
        .iothread("io0")
        .arg("--blockdev")
        .arg(format!("driver=file,node-name=disk,filename={folder}/disk.img"))
        .export("disk", "werror=enospc,iothread=io0")
        .start();
    let seen = |name: &str| PathBuf::from(format!("/proc/{}/root{folder}/{name}", server.pid()));
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let guest = Guest::new().disk(server.socket("disk"));
    let mut guest = guest.boot(&job("vda"));
    guest.expect("begin");
    wait_for_stop(&mut qmp);
    // Nothing has changed: the same requests stop the export again.
    resume(&mut qmp);
    wait_for_stop(&mut qmp);
    let ballast = OpenOptions::new().write(true).open(seen("ballast")).expect("ballast");
    ballast.set_len(0).expect("it goes");
    resume(&mut qmp);
    let lines = guest.finish();
    let copy = scratch.path("copy.img");
    fs::copy(seen("disk.img"), &copy).expect("a copy where there is space");
    let md5 = Image::existing(&copy).md5();
    server.stop();
    assert_eq!(lines, ["begin".to_owned(), format!("{md5}  -")]);
}

/// A daemon whose image has no space in its second 4 MiB, if `full`.
fn serve(scratch: &Scratch, image: &Image, name: &'static str, full: bool, scsi: bool) -> Server {
    let path = image.path().display();
    let rules = "inject-error.0.event=none,inject-error.0.iotype=write,inject-error.0.errno=28,\
                 inject-error.0.sector=8192,inject-error.0.sectors=8192";
    let rules = if full { rules } else { "inject-error.0.event=none,inject-error.0.errno=0" };
    let node =
        format!("driver=blkdebug,node-name=disk,image.driver=file,image.filename={path},{rules}");
    let command = ServerCommand::new(scratch).named(name).monitor("qmp").iothread("io0");
    let command = command.arg("--blockdev").arg(node);
    match scsi {
        true => command.export_scsi("disk", &["disk"], "werror=stop,iothread=io0").start(),
        false => command.export("disk", "werror=stop,iothread=io0").start(),
    }
}

/// While requests are held, the machine is paused and resumed, which stops and starts the rings. Then the daemon is
/// killed. The next daemon completes the held requests.
fn held_requests_outlive(scsi: bool) {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 32);
    let server = serve(&scratch, &image, "first", true, scsi);
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let (socket, disk) = (server.socket("disk"), if scsi { "sda" } else { "vda" });
    let guest = if scsi { Guest::new().scsi(socket) } else { Guest::new().disk(socket) };
    let guest = guest.chardev_options("reconnect-ms=10");
    let mut guest = guest.boot(&job(disk));
    guest.expect("begin");
    wait_for_stop(&mut qmp);
    let mut machine = guest.qmp();
    machine.execute("stop", json!({}));
    machine.execute("cont", json!({}));
    // The restarted rings try the requests again.
    resume(&mut qmp);
    wait_for_stop(&mut qmp);
    drop(qmp);
    server.kill();
    let server = serve(&scratch, &image, "second", false, scsi);
    let lines = guest.finish();
    server.stop();
    assert_eq!(lines, ["begin".to_owned(), format!("{}  -", image.md5())]);
}

#[test]
fn held_requests_outlive_the_rings_and_the_daemon() {
    held_requests_outlive(false);
}

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn held_requests_outlive_the_rings_and_the_daemon_on_virtio_scsi() {
    held_requests_outlive(true);
}

/// The guest resets the logical unit while its write is held. The reset is answered nonetheless, and the machine can be
/// paused, which stops the control queue first.
#[test]
#[ignore = "one of those that .ci/nightly has"]
fn a_reset_does_not_wait_for_held_requests() {
    const JOB: &str = "
        dd if=/dev/zero of=/dev/sda bs=4096 seek=1024 count=1 oflag=direct 2>/dev/null &
        read go
        sg_reset -d /dev/sda >/dev/null
        echo reset
        wait";
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 32);
    let server = serve(&scratch, &image, "first", true, true);
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let mut guest = Guest::new().scsi(server.socket("disk")).boot(JOB);
    wait_for_stop(&mut qmp);
    guest.send("go");
    guest.expect("reset");
    let mut machine = guest.qmp();
    machine.execute("stop", json!({}));
    machine.execute("cont", json!({}));
    // The guest has sent the write again, which fails again.
    resume(&mut qmp);
    wait_for_stop(&mut qmp);
    guest.kill();
    server.stop();
}
