//! io_uring is denied by a seccomp filter: the daemon says so, and serves with epoll.

use integration::{BlkClient, Guest, Image, Scratch, Server, ServerCommand, pattern};

fn serve(scratch: &Scratch, image: &Image) -> Server {
    let server = ServerCommand::new(scratch)
        .wrapped_by(env!("CARGO_BIN_EXE_deny-io-uring"))
        .iothread("io0")
        .file("disk", image, "discard=unmap")
        .export("disk", "num-queues=2,iothread=io0")
        .start();
    assert!(server.log().contains("epoll"), "the log does not speak of epoll: {}", server.log());
    server
}

#[test]
fn a_client_is_served_with_epoll() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let server = serve(&scratch, &image);
    let mut client = BlkClient::connect(&server.socket("disk"), 1, 16).expect("a device");
    for generation in 1..=1000 {
        client.write(8, &pattern::block(1, generation));
        let block = client.read(8, pattern::BLOCK);
        assert_eq!(pattern::generation(1, &block), Ok(generation));
    }
    drop(client);
    server.stop();
}

#[test]
fn a_guest_is_served_with_epoll() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 32);
    let server = serve(&scratch, &image);
    let lines = Guest::new().disk(server.socket("disk")).queues(2).run(
        "verify --size=16m --numjobs=2 --offset_increment=16m --do_verify=1
        md5sum </dev/vda",
    );
    server.stop();
    assert_eq!(lines, [format!("{}  -", image.md5())]);
}
