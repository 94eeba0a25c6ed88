//! Hostile and slow NBD clients: each affects only itself, at bounded cost.

use std::io::Write;
use std::net::Shutdown;
use std::thread;

use integration::nbd::{RawNbd, client_output, nbd_export, nbd_server, nbd_uri, request};
use integration::{Image, Scratch, Server, ServerCommand, eventually, pattern};

const READ: u16 = 0;
const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;
const FLUSH: u16 = 3;

fn serve(scratch: &Scratch, image: &Image, options: &str) -> Server {
    let command = ServerCommand::new(scratch).file("disk", image, "");
    nbd_export(nbd_server(command, scratch, options), "disk", ",writable=on").start()
}

/// Asserts that another client is served as usual.
fn others_are_served(scratch: &Scratch) {
    let size = client_output(scratch, "nbdinfo", &["--size", &nbd_uri(scratch, "disk")]);
    assert_eq!(size.trim(), "4194304");
}

#[test]
fn malformed_messages_end_only_their_connection() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 4);
    let server = serve(&scratch, &image, "");
    let socket = scratch.path("nbd.sock");

    // Close before a handshake, within one, and within a message of each length.
    RawNbd::connect(&socket).0.shutdown(Shutdown::Both).expect("a connection");
    for len in 0..4 {
        RawNbd::connect(&socket).send(&[0; 4][..len]);
    }
    for len in 0..16 {
        RawNbd::greet(&socket).send(&b"IHAVEOPT\0\0\0\x03\0\0\0\x01"[..len]);
    }
    for len in 0..28 {
        RawNbd::go(&socket, "disk").send(&request(WRITE, 1, 0, 512)[..len]);
    }

    let mut raw = RawNbd::connect(&socket);
    raw.send(b"GET / HTTP/1.0\r\n\r\n");
    raw.wait_for_close();
    let mut raw = RawNbd::greet(&socket);
    raw.send(b"GET / HTTP/1.0\r\n\r\n");
    raw.wait_for_close();
    let mut raw = RawNbd::greet(&socket);
    raw.option_header(3, u32::MAX);
    raw.wait_for_close();
    let mut raw = RawNbd::greet(&socket);
    raw.option(1, b"no such export");
    raw.wait_for_close();
    let mut raw = RawNbd::go(&socket, "disk");
    raw.send(&[0xff; 28]);
    raw.wait_for_close();
    // The server does not wait for a payload above the limit.
    let mut raw = RawNbd::go(&socket, "disk");
    raw.request(WRITE, 1, 0, u32::MAX);
    raw.wait_for_close();
    // Requests before the error are still carried out.
    let mut raw = RawNbd::go(&socket, "disk");
    let mut bytes = request(WRITE, 7, 4096, 512).to_vec();
    bytes.extend([7; 512]);
    bytes.extend([0xff; 28]);
    raw.send(&bytes);
    assert_eq!(raw.reply(), (0, 7));
    raw.wait_for_close();
    let mut raw = RawNbd::go(&socket, "disk");
    raw.request(READ, 8, 4096, 512);
    assert_eq!((raw.reply(), raw.take::<512>()), ((0, 8), [7; 512]));
    raw.request(DISCONNECT, 9, 0, 0);
    raw.wait_for_close();

    others_are_served(&scratch);
    server.stop();
}

#[test]
fn a_payload_of_a_refused_write_is_taken_and_forgotten() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 4);
    let server = serve(&scratch, &image, "");
    let mut raw = RawNbd::go(&scratch.path("nbd.sock"), "disk");
    let mut bytes = request(WRITE, 1, 4 << 20, 1 << 20).to_vec();
    // The bytes look like requests.
    bytes.extend(request(WRITE, 99, 0, 512).iter().cycle().take(1 << 20));
    bytes.extend(request(READ, 2, 0, 4096));
    raw.send(&bytes);
    assert_eq!(raw.reply(), (28, 1));
    assert_eq!(raw.reply(), (0, 2));
    assert_eq!(pattern::generation(0, &raw.take::<4096>()), Ok(0));
    server.stop();
}

#[test]
fn a_slow_handshake_is_ended() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 4);
    let server = serve(&scratch, &image, ",handshake-max-seconds=3");
    let socket = scratch.path("nbd.sock");
    let silent = RawNbd::connect(&socket);
    let mut half = RawNbd::greet(&socket);
    half.option_header(7, 100);
    // Further messages do not extend the time limit.
    let mut busy = RawNbd::greet(&socket);
    let talk =
        thread::spawn(move || while busy.0.write_all(b"IHAVEOPT\0\0\0\x63\0\0\0\0").is_ok() {});
    // After the handshake a client may be silent.
    let mut chosen = RawNbd::go(&socket, "disk");
    silent.wait_for_close();
    half.wait_for_close();
    talk.join().expect("it was sent away");
    chosen.request(FLUSH, 5, 0, 0);
    assert_eq!(chosen.reply(), (0, 5));
    others_are_served(&scratch);
    server.stop();
}

#[test]
fn connections_beyond_the_most_wait_for_their_turn() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 4);
    let server = serve(&scratch, &image, ",max-connections=2");
    let socket = scratch.path("nbd.sock");
    let mut clients = [(); 2].map(|()| RawNbd::go(&socket, "disk"));
    let mut are_served = || {
        for client in &mut clients {
            client.request(FLUSH, 1, 0, 0);
            assert_eq!(client.reply(), (0, 1));
        }
    };
    // The clients then hold all resources that they can.
    are_served();
    let files = server.open_files();
    let waiting: Vec<_> = (0..20).map(|_| RawNbd::connect(&socket)).collect();
    are_served();
    assert_eq!(server.open_files(), files, "the others were not even accepted");
    drop(waiting);
    let [one, two] = clients;
    drop(one);
    others_are_served(&scratch);
    drop(two);
    server.stop();
}

#[test]
fn a_client_that_reads_no_replies_blocks_only_itself() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 4);
    let server = serve(&scratch, &image, "");
    let socket = scratch.path("nbd.sock");
    let before = server.private_kib();
    let deaf = RawNbd::go(&socket, "disk");
    let mut sender = deaf.0.try_clone().expect("another descriptor");
    // More requests than are ever answered: the thread ends with the connection.
    let flood = thread::spawn(move || {
        let requests: Vec<u8> =
            (0..100).flat_map(|cookie| request(READ, cookie, 0, 1 << 20)).collect();
        while sender.write_all(&requests).is_ok() {}
    });
    // The limit of memory for data in flight: 32 MiB.
    eventually("the flood", || (server.private_kib() > before + (24 << 10)).then_some(()));
    for _ in 0..5 {
        others_are_served(&scratch);
    }
    assert!(server.private_kib() < before + (40 << 10), "{} KiB", server.private_kib());
    // The daemon can end nonetheless.
    server.stop();
    drop(deaf);
    flood.join().expect("it was ended");
}

#[test]
fn each_of_many_requests_gets_its_reply() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 4);
    let server = serve(&scratch, &image, "");
    let mut raw = RawNbd::go(&scratch.path("nbd.sock"), "disk");
    // More requests than slots, all at once.
    let mut sender = raw.0.try_clone().expect("another descriptor");
    let requests: Vec<u8> =
        (0..1000u64).flat_map(|n| request(READ, n, (n % 1024) * 4096, 4096)).collect();
    let send = thread::spawn(move || sender.write_all(&requests).expect("it is taken"));
    let mut seen = vec![false; 1000];
    for _ in 0..1000 {
        let (error, cookie) = raw.reply();
        let block: [u8; 4096] = raw.take();
        assert_eq!((error, pattern::generation(cookie % 1024, &block)), (0, Ok(0)));
        assert!(!std::mem::replace(&mut seen[cookie as usize], true), "answered twice");
    }
    send.join().expect("all was sent");
    server.stop();
}
