//! Malformed descriptor chains: the device answers with an error or breaks the queue. The daemon continues, and serves
//! the next front end.

use integration::{BlkClient, Image, Request, Scratch, Segment, ServerCommand, pattern, request};

fn survives(segments: &[Segment]) {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let server = ServerCommand::new(&scratch).file("disk", &image, "").export("disk", "").start();
    for _ in 0..3 {
        let mut client = BlkClient::connect(&server.socket("disk"), 1, 16).expect("a device");
        assert_eq!(pattern::generation(1, &client.read(8, pattern::BLOCK)), Ok(0));
        let segments = segments.to_vec();
        client.submit(0, &Request { kind: request::IN, sector: 0, segments });
    }
    let mut client = BlkClient::connect(&server.socket("disk"), 1, 16).expect("a device");
    assert_eq!(pattern::generation(2, &client.read(16, pattern::BLOCK)), Ok(0));
    drop(client);
    server.stop();
}

#[test]
fn a_buffer_outside_of_memory() {
    survives(&[Segment { at: 1 << 40, len: 4096, device_writes: true }]);
}

#[test]
fn a_buffer_across_the_end_of_memory() {
    survives(&[Segment { at: (16 << 20) - 512, len: 1024, device_writes: true }]);
}

#[test]
fn a_buffer_that_wraps_around() {
    let at = u64::MAX - 0x10_0000_0000 - 511;
    survives(&[Segment { at, len: 1 << 20, device_writes: true }]);
}

#[test]
fn a_buffer_in_the_wrong_direction() {
    survives(&[Segment { at: 0, len: 4096, device_writes: false }]);
}

#[test]
fn an_empty_buffer() {
    survives(&[Segment { at: 0, len: 0, device_writes: true }]);
}

#[test]
fn a_readable_buffer_after_a_writable_one() {
    survives(&[
        Segment { at: 0, len: 4096, device_writes: true },
        Segment { at: 4096, len: 4096, device_writes: false },
    ]);
}
