//! Front ends that send half a message, nonsense, or nothing, and vanish: the next one is served.

use std::io::Write;

use integration::wire::{self, GET_FEATURES, SET_MEM_TABLE, SET_OWNER};
use integration::{
    BlkClient, Image, Request, Scratch, Segment, Server, ServerCommand, eventually, pattern,
    request,
};

fn serve(scratch: &Scratch) -> Server {
    let image = Image::filled(scratch, "disk.img", 1);
    ServerCommand::new(scratch).file("disk", &image, "").export("disk", "").start()
}

fn assert_serves(server: &Server) {
    let mut client = BlkClient::connect(&server.socket("disk"), 1, 16).expect("a device");
    assert_eq!(pattern::generation(1, &client.read(8, pattern::BLOCK)), Ok(0));
}

/// Sends `bytes` and hangs up.
fn vanish_after(bytes: &[u8]) {
    let scratch = Scratch::new();
    let server = serve(&scratch);
    for _ in 0..3 {
        let mut stream = wire::connect(&server.socket("disk"));
        wire::get_features(&mut stream);
        stream.write_all(bytes).expect("the export listens");
        drop(stream);
        assert_serves(&server);
    }
    server.stop();
}

/// Sends `bytes` and finds that the daemon hangs up.
fn refused(bytes: &[u8]) {
    let scratch = Scratch::new();
    let server = serve(&scratch);
    let mut stream = wire::connect(&server.socket("disk"));
    wire::get_features(&mut stream);
    stream.write_all(bytes).expect("the export listens");
    wire::assert_closed(stream);
    assert_serves(&server);
    server.stop();
}

#[test]
fn without_a_word() {
    let scratch = Scratch::new();
    let server = serve(&scratch);
    for _ in 0..50 {
        drop(wire::connect(&server.socket("disk")));
    }
    assert_serves(&server);
    server.stop();
}

/// Requests in flight are finished in the memory of the one that has gone, which is given back then.
#[test]
fn with_requests_in_flight() {
    let scratch = Scratch::new();
    let server = ServerCommand::new(&scratch)
        .iothread("io0")
        .arg("--blockdev")
        .arg("driver=null-co,node-name=slow,size=1048576,latency-ns=300000000")
        .export("slow", "iothread=io0")
        .start();
    for _ in 0..3 {
        let mut client = BlkClient::connect(&server.socket("slow"), 1, 64).expect("a device");
        for slot in 0..8 {
            let segments = vec![Segment { at: slot * 4096, len: 4096, device_writes: true }];
            client.submit(0, &Request { kind: request::IN, sector: slot * 8, segments });
        }
    }
    let mut client = BlkClient::connect(&server.socket("slow"), 1, 64).expect("a device");
    client.read(0, 4096);
    drop(client);
    eventually("the front ends' memory to be given back", || {
        (server.guest_mappings() == 0).then_some(())
    });
    server.stop();
}

#[test]
fn after_half_a_header() {
    vanish_after(&wire::header(SET_OWNER, 1, 0)[..6]);
}

#[test]
fn after_a_header_without_its_payload() {
    vanish_after(&wire::header(SET_MEM_TABLE, 1, 40));
}

#[test]
fn after_half_a_payload() {
    let message = wire::message(SET_MEM_TABLE, &[0; 40]);
    vanish_after(&message[..30]);
}

#[test]
fn before_the_answer() {
    vanish_after(&wire::message(GET_FEATURES, &[]).repeat(10));
}

#[test]
fn a_payload_of_four_gigabytes_is_refused() {
    refused(&wire::header(SET_MEM_TABLE, 1, u32::MAX));
}

#[test]
fn a_memory_table_without_memory_is_refused() {
    // One region, but no fd comes along.
    let mut payload = vec![1, 0, 0, 0, 0, 0, 0, 0];
    payload.extend([0u8; 8]);
    payload.extend(4096u64.to_ne_bytes());
    payload.extend([0u8; 16]);
    refused(&wire::message(SET_MEM_TABLE, &payload));
}
