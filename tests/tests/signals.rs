//! SIGTERM and SIGINT: requests in flight are completed, then the daemon ends.

use std::fs;
use std::time::{Duration, Instant};

use integration::nbd::{client, client_output, nbd_export, nbd_server};
use integration::{
    BlkClient, Image, Qmp, Request, Scratch, Segment, Server, ServerCommand, eventually, pattern,
    request,
};
use nix::sys::signal::Signal;
use serde_json::json;

/// A disk with this `latency`, with eight requests in flight.
fn slow_disk(scratch: &Scratch, latency: Duration) -> (Server, BlkClient) {
    slow_disk_beside(ServerCommand::new(scratch), latency)
}

/// The same, of a daemon that also has what `command` says.
fn slow_disk_beside(command: ServerCommand<'_>, latency: Duration) -> (Server, BlkClient) {
    let node = |name: &str, latency: Duration| {
        let nanoseconds = latency.as_nanos();
        format!("driver=null-co,node-name={name},size=1048576,latency-ns={nanoseconds}")
    };
    let server = command
        .iothread("io0")
        .arg("--blockdev")
        .arg(node("slow", latency))
        .arg("--blockdev")
        .arg(node("quick", Duration::ZERO))
        .export("slow", "iothread=io0")
        .export("quick", "iothread=io0")
        .start();
    let mut client = BlkClient::connect(&server.socket("slow"), 1, 64).expect("a device");
    for slot in 0..8 {
        let segments = vec![Segment { at: slot * 4096, len: 4096, device_writes: false }];
        client.submit(0, &Request { kind: request::OUT, sector: slot * 8, segments });
    }
    // The thread that answers this request has taken the eight before: they are in flight, not only available.
    let mut quick = BlkClient::connect(&server.socket("quick"), 1, 64).expect("a device");
    quick.read(0, 512);
    (server, client)
}

fn finishes(signal: Signal) {
    let scratch = Scratch::new();
    // Before the requests are made, whose duration depends on the machine.
    let (start, latency) = (Instant::now(), Duration::from_millis(1500));
    let (mut server, mut client) = slow_disk(&scratch, latency);
    server.signal(signal);
    let mut done = 0;
    while done < 8 {
        for completion in client.wait(0).expect("the requests in flight are finished") {
            assert_eq!(completion.status, 0);
            done += 1;
        }
    }
    assert!(server.wait().success());
    assert!(start.elapsed() >= latency, "the requests were in flight");
    assert!(!server.socket("slow").exists());
}

#[test]
fn sigterm_completes_requests_in_flight() {
    finishes(Signal::SIGTERM);
}

#[test]
fn sigint_completes_requests_in_flight() {
    finishes(Signal::SIGINT);
}

/// When a terminal closes, or a service manager ends the daemon, SIGHUP comes along with the first signal.
#[test]
fn a_hang_up_is_no_second_signal() {
    let scratch = Scratch::new();
    let (mut server, _client) = slow_disk(&scratch, Duration::from_millis(500));
    server.signal(Signal::SIGTERM);
    server.signal(Signal::SIGHUP);
    assert!(server.wait().success());
    assert!(!server.socket("slow").exists());
}

/// A daemon's options for a new qcow2 image.
fn with_image(scratch: &Scratch) -> ServerCommand<'_> {
    let path = scratch.path("disk.qcow2").display().to_string();
    if !scratch.path("disk.qcow2").exists() {
        client_output(scratch, "qemu-img", &["create", "-q", "-f", "qcow2", &path, "1M"]);
    }
    ServerCommand::new(scratch)
        .arg("--blockdev")
        .arg(format!("driver=qcow2,node-name=disk,file.driver=file,file.filename={path}"))
        .export("disk", "")
}

/// Writes a block to the image, and does not flush it.
fn write(server: &Server) -> BlkClient {
    let mut client = BlkClient::connect(&server.socket("disk"), 1, 16).expect("a device");
    client.write(8, &pattern::block(1, 1));
    client
}

/// Returns whether other programs find the written block in the image.
fn is_written(scratch: &Scratch) -> bool {
    let [image, raw] = ["disk.qcow2", "raw"].map(|name| scratch.path(name).display().to_string());
    client_output(scratch, "qemu-img", &["convert", "-O", "raw", &image, &raw]);
    let block = Image::existing(&scratch.path("raw")).read(4096, pattern::BLOCK);
    pattern::generation(1, &block) == Ok(1)
}

/// timeout(1) signals the daemon, and then its process group.
#[test]
fn signals_at_the_same_time_are_one() {
    let scratch = Scratch::new();
    let mut server = with_image(&scratch).start();
    let _client = write(&server);
    server.signal(Signal::SIGTERM);
    server.signal(Signal::SIGTERM);
    server.signal(Signal::SIGINT);
    assert!(server.wait().success());
    assert!(is_written(&scratch));
}

#[test]
fn a_later_signal_ends_at_once_and_leaves_an_image_to_its_journal() {
    let scratch = Scratch::new();
    let (mut server, _slow) = slow_disk_beside(with_image(&scratch), Duration::from_secs(300));
    let _client = write(&server);
    server.signal(Signal::SIGTERM);
    let socket = server.socket("slow");
    assert_eq!(server.insist().code(), Some(1), "work was left undone");
    fs::remove_file(socket).expect("it was left behind");
    with_image(&scratch).start().stop();
    assert!(is_written(&scratch));
}

#[test]
fn an_idle_daemon_ends_while_a_front_end_is_connected() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let server = ServerCommand::new(&scratch).file("disk", &image, "").export("disk", "").start();
    let mut client = BlkClient::connect(&server.socket("disk"), 1, 16).expect("a device");
    client.write(8, &pattern::block(1, 1));
    server.stop();
    assert_eq!(pattern::generation(1, &image.read(4096, pattern::BLOCK)), Ok(1));
}

/// Waits until another program may write to the image.
fn expect_unlocked(scratch: &Scratch) {
    let image = scratch.path("disk.qcow2").display().to_string();
    eventually("the image's locks to be released", || {
        client(scratch, "qemu-io", &["-c", "read 0 512", &image]).status.success().then_some(())
    });
}

#[test]
fn an_image_is_closed_while_another_disk_does_not_answer() {
    let scratch = Scratch::new();
    let command = with_image(&scratch).args(["--stop-timeout", "0"]);
    let (mut server, _slow) = slow_disk_beside(command, Duration::from_secs(300));
    let _client = write(&server);
    server.signal(Signal::SIGTERM);
    expect_unlocked(&scratch);
    // Written without the journal of a killed daemon.
    assert!(is_written(&scratch));
    assert_eq!(server.insist().code(), Some(1), "the other disk's requests were left undone");
}

/// Expects the end of a daemon that `--stop-timeout` ends, and returns its log.
fn expect_timed_out(server: &mut Server) -> String {
    assert_eq!(server.wait().code(), Some(124));
    let log = server.log();
    assert!(log.contains("--stop-timeout: 1 s have passed"), "{log}");
    log
}

#[test]
fn a_daemon_ends_after_the_stop_timeout_and_names_what_it_waits_for() {
    let scratch = Scratch::new();
    let command = with_image(&scratch).args(["--stop-timeout", "1"]).monitor("qmp");
    let (mut server, _slow) = slow_disk_beside(command, Duration::from_secs(300));
    let _client = write(&server);
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    qmp.send("{'execute':'quit'}");
    let log = expect_timed_out(&mut server);
    assert!(log.contains("export slow: waits for 8 requests: to node \"slow\""), "{log}");
    assert!(!log.contains("export disk: waits"), "{log}");
    assert!(is_written(&scratch));
}

/// The control thread waits for the server, so that no timer of its loop can end the daemon.
#[test]
fn a_node_that_waits_for_a_server_to_be_closed_does_not_keep_the_daemon() {
    let (scratch, far) = (Scratch::new(), Scratch::new());
    let disk = far.path("disk.qcow2");
    client_output(
        &far,
        "qemu-img",
        &["create", "-q", "-f", "qcow2", &disk.display().to_string(), "1M"],
    );
    // Over NBD the image cannot grow.
    let opened = fs::OpenOptions::new().write(true).open(&disk).expect("an image");
    opened.set_len(4 << 20).expect("an image");
    let bytes = Image::existing(&disk);
    let command = nbd_server(ServerCommand::new(&far).file("far", &bytes, ""), &far, "");
    let storage = nbd_export(command, "far", ",writable=on").start();
    let path = far.path("nbd.sock").display().to_string();
    let node = format!("driver=nbd,server.type=unix,server.path={path},export=far");
    let node = node.split(',').map(|option| format!("file.{option}")).collect::<Vec<_>>().join(",");
    let mut server = with_image(&scratch)
        .args(["--stop-timeout", "1"])
        .monitor("qmp")
        .arg("--blockdev")
        .arg(format!("driver=qcow2,node-name=remote,{node}"))
        .export("remote", "")
        .start();
    let _client = write(&server);
    BlkClient::connect(&server.socket("remote"), 1, 16)
        .expect("a device")
        .write(8, &pattern::block(1, 1));
    Qmp::connect(&server.socket("qmp")).execute("block-export-del", json!({"id": "remote"}));
    storage.pause();
    server.signal(Signal::SIGTERM);
    expect_unlocked(&scratch);
    let log = expect_timed_out(&mut server);
    assert!(log.contains("node remote: waits to be closed"), "{log}");
    assert!(is_written(&scratch));
}
