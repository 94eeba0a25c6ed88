//! What an export listens on, and several of them in one daemon.

use std::os::unix::net::UnixListener;

use integration::{BlkClient, Image, Scratch, ServerCommand, pattern};

#[test]
fn an_inherited_listening_socket() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let path = scratch.path("inherited");
    let listener = UnixListener::bind(&path).expect("a socket");
    let server = ServerCommand::new(&scratch)
        .file("disk", &image, "")
        .arg("--export")
        .arg("type=vhost-user-blk,id=e,node-name=disk,addr.type=fd,addr.str=0,writable=on")
        .stdin(listener)
        .start();
    for generation in 1..=3 {
        let mut client = BlkClient::connect(&path, 1, 16).expect("a device");
        client.write(8, &pattern::block(1, generation));
    }
    server.stop();
    assert_eq!(pattern::generation(1, &image.read(4096, pattern::BLOCK)), Ok(3));
}

#[test]
fn several_exports_are_served_at_the_same_time() {
    let scratch = Scratch::new();
    let names = ["one", "two", "three"];
    let images = names.map(|name| Image::filled(&scratch, name, 1));
    let mut server = ServerCommand::new(&scratch).iothread("io0").iothread("io1");
    for ((name, image), iothread) in names.iter().zip(&images).zip(["io0", "io1", "io0"]) {
        server = server.file(name, image, "").export(name, &format!("iothread={iothread}"));
    }
    let server = server.start();
    let mut clients = names
        .map(|name| BlkClient::connect(&server.socket(name), 1, 16).expect("the export serves"));
    for (generation, client) in (1..).zip(&mut clients) {
        client.write(8, &pattern::block(1, generation));
    }
    for (generation, client) in (1..).zip(&mut clients) {
        assert_eq!(pattern::generation(1, &client.read(8, pattern::BLOCK)), Ok(generation));
    }
    drop(clients);
    server.stop();
    for (generation, image) in (1..).zip(&images) {
        assert_eq!(pattern::generation(1, &image.read(4096, pattern::BLOCK)), Ok(generation));
    }
}

#[test]
fn nodes_on_nodes() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 2);
    let path = image.path().display();
    let server = ServerCommand::new(&scratch)
        .arg("--blockdev")
        .arg(format!(
            r#"{{"driver": "raw", "node-name": "part", "offset": 1048576, "size": 524288,
                "file": {{"driver": "file", "filename": "{path}"}}}}"#
        ))
        .export("part", "")
        .start();
    let mut client = BlkClient::connect(&server.socket("part"), 1, 16).expect("a device");
    assert_eq!(u64::from(client.config().expect("a configuration").capacity), 1024);
    assert_eq!(pattern::generation(257, &client.read(8, pattern::BLOCK)), Ok(0));
    drop(client);
    server.stop();
}
