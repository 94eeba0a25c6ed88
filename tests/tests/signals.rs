//! SIGTERM and SIGINT: requests in flight are completed, then the daemon ends.

use std::time::{Duration, Instant};

use integration::{
    BlkClient, Image, Request, Scratch, Segment, Server, ServerCommand, pattern, request,
};
use nix::sys::signal::Signal;

/// A disk with this `latency`, with eight requests in flight.
fn slow_disk(scratch: &Scratch, latency: Duration) -> (Server, BlkClient) {
    let node = |name: &str, latency: Duration| {
        let nanoseconds = latency.as_nanos();
        format!("driver=null-co,node-name={name},size=1048576,latency-ns={nanoseconds}")
    };
    let server = ServerCommand::new(scratch)
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

#[test]
fn a_second_signal_ends_at_once() {
    let scratch = Scratch::new();
    let (mut server, _client) = slow_disk(&scratch, Duration::from_secs(300));
    server.signal(Signal::SIGTERM);
    server.signal(Signal::SIGINT);
    let status = server.wait();
    assert!(!status.success(), "work was left undone, but the exit status says success");
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
