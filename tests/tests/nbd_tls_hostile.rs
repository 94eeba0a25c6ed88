//! Clients that break the rules of TLS, or dawdle: each harms itself alone, and costs what is bounded.

use std::path::Path;

use integration::nbd::{RawNbd, client_output, nbd_export, nbd_server, nbds_uri};
use integration::tls::{Authority, NOW};
use integration::{Image, Scratch, Server, ServerCommand, client, eventually, tied_command, tool};

fn serve(scratch: &Scratch, image: &Image, creds: &Path, options: &str) -> Server {
    let creds = creds.display();
    let object = format!("tls-creds-x509,id=tls0,endpoint=server,dir={creds}");
    let command = ServerCommand::new(scratch).arg("--object").arg(object).file("disk", image, "");
    let command = nbd_server(command, scratch, &format!(",tls-creds=tls0{options}"));
    nbd_export(command, "disk", ",writable=on").start()
}

/// Another client is served as if nothing were.
fn others_are_served(scratch: &Scratch, creds: &Path) {
    let uri = nbds_uri(scratch, "disk", creds);
    assert_eq!(client_output(scratch, "nbdinfo", &["--size", &uri]).trim(), "4194304");
}

#[test]
fn malformed_tls_ends_only_its_connection() {
    let scratch = Scratch::new();
    let authority = Authority::new(&scratch, "ca");
    let (creds, alice) = (authority.server("server", NOW), authority.client("alice", NOW));
    let image = Image::filled(&scratch, "disk.img", 4);
    let server = serve(&scratch, &image, &creds, "");
    others_are_served(&scratch, &alice);
    let before = server.private_kib();
    let program = client("nbd_tls_hostile.py");
    let socket = scratch.path("nbd.sock");
    let arguments = [&program, &socket, &alice].map(|path| path.to_str().expect("UTF-8"));
    assert_eq!(client_output(&scratch, "python3", &arguments).trim(), "done");
    others_are_served(&scratch, &alice);
    // What they were served with, freed or not, is that of a few connections.
    assert!(server.private_kib() < before + (8 << 10), "{} KiB", server.private_kib());
    let log = server.log();
    let lines = log.lines().filter(|line| line.contains("warning: NBD server: client sent away"));
    // Twenty at most of each of two places in the program.
    assert!((12..=40).contains(&lines.count()), "{log}");
    assert!(log.contains("TLS failed: a record could not be decrypted"), "{log}");
    assert!(log.contains("the client left in the middle of a message"), "{log}");
    server.stop();
}

#[test]
fn a_slow_handshake_is_ended() {
    let scratch = Scratch::new();
    let authority = Authority::new(&scratch, "ca");
    let (creds, alice) = (authority.server("server", NOW), authority.client("alice", NOW));
    let image = Image::filled(&scratch, "disk.img", 4);
    let server = serve(&scratch, &image, &creds, ",handshake-max-seconds=4");
    let begin = || {
        let mut raw = RawNbd::greet(&scratch.path("nbd.sock"));
        raw.option(5, b"");
        assert_eq!(raw.option_reply(), (5, 1));
        raw
    };
    let silent = begin();
    let mut half = begin();
    half.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03");
    silent.wait_for_close();
    half.wait_for_close();
    others_are_served(&scratch, &alice);
    server.stop();
}

#[test]
fn a_client_that_reads_no_replies_blocks_only_itself() {
    let scratch = Scratch::new();
    let authority = Authority::new(&scratch, "ca");
    let (creds, alice) = (authority.server("server", NOW), authority.client("alice", NOW));
    let image = Image::filled(&scratch, "disk.img", 4);
    let server = serve(&scratch, &image, &creds, "");
    others_are_served(&scratch, &alice);
    let before = server.private_kib();
    let mut deaf = tied_command(&tool("python3"));
    deaf.arg(client("nbd_tls_hostile.py")).arg(scratch.path("nbd.sock")).arg(&alice).arg("deaf");
    let mut deaf = deaf.spawn().expect("Python runs");
    // All that it may have: 32 MiB of data in memory, and what goes out at once.
    eventually("the flood", || (server.private_kib() > before + (24 << 10)).then_some(()));
    for _ in 0..3 {
        others_are_served(&scratch, &alice);
    }
    assert!(server.private_kib() < before + (42 << 10), "{} KiB", server.private_kib());
    // And it does not keep the daemon from ending.
    server.stop();
    deaf.wait().expect("it was ended");
}
