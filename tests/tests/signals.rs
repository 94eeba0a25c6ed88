//! SIGTERM and SIGINT: requests in flight are completed, then the daemon ends.

use std::fs;
use std::time::{Duration, Instant};

use integration::nbd::client_output;
use integration::{
    BlkClient, Image, Request, Scratch, Segment, Server, ServerCommand, pattern, request,
};
use nix::sys::signal::Signal;

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
