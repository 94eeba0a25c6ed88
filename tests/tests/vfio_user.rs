//! A vfio-user-ahci export of a whole daemon: sandboxed, refused and removed. What its clients see is tested by
//! `crates/exports/tests/vfio_user/`, real guests by `guest_ahci.rs`.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use integration::{Image, Qmp, Scratch, Server, ServerCommand};
use serde_json::json;

fn server(scratch: &Scratch, image: &Image) -> Server {
    let socket = scratch.path("ahci.sock");
    let export = format!(
        "vfio-user-ahci,id=ahci,node-name=disk,addr.type=unix,addr.path={},writable=on",
        socket.display()
    );
    ServerCommand::new(scratch)
        .args(["--sandbox", "on"])
        .file("disk", image, "discard=unmap")
        .args(["--export", &export])
        .monitor("monitor")
        .start()
}

/// Agrees on a version and reads the PCI IDs.
fn ids(stream: &mut UnixStream) -> u32 {
    let words =
        |words: &[u32]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>();
    // Headers: number and command, size, flags, no error.
    let version = words(&[1 << 16, 20, 0, 0, 0]);
    let read = words(&[9 << 16, 32, 0, 0, 0, 0, 7, 4]);
    stream.write_all(&[version, read].concat()).expect("the export listens");
    let mut header = [0; 16];
    stream.read_exact(&mut header).expect("a version");
    let size = u32::from_ne_bytes(header[4..8].try_into().expect("four bytes"));
    let mut rest = vec![0; size as usize - 16];
    stream.read_exact(&mut rest).expect("a whole version");
    let mut reply = [0; 36];
    stream.read_exact(&mut reply).expect("the IDs");
    u32::from_ne_bytes(reply[32..].try_into().expect("four bytes"))
}

#[test]
fn an_upgrade_is_refused_and_the_drive_stays() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 1);
    let server = server(&scratch, &image);
    let mut client = UnixStream::connect(scratch.path("ahci.sock")).expect("a socket");
    assert_eq!(ids(&mut client), 0x2922_8086);
    let mut qmp = Qmp::connect(&server.socket("monitor"));
    let why = qmp.refused("x-upgrade", json!({}));
    assert!(why.contains("vfio-user exports cannot be handed over"), "{why}");
    let why = qmp.refused("block-export-del", json!({"id": "ahci"}));
    assert_eq!(why, "export 'ahci' still in use");
    drop(client);
    let mut client = UnixStream::connect(scratch.path("ahci.sock")).expect("a socket");
    assert_eq!(ids(&mut client), 0x2922_8086, "the next client is served");
    qmp.execute("block-export-del", json!({"id": "ahci", "mode": "hard"}));
    assert_eq!(client.read(&mut [0; 1]).expect("an end"), 0);
    integration::eventually("the socket is removed", || {
        (!scratch.path("ahci.sock").exists()).then_some(())
    });
    server.stop();
}
