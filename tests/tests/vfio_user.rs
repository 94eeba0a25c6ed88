//! vfio-user exports of a whole daemon: sandboxed, refused and removed. What their clients see is tested by
//! `crates/exports/tests/vfio_user/` and `crates/devices/tests/nvme/`, real guests by `guest_ahci.rs` and
//! `guest_nvme.rs`.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use integration::{Image, Qmp, Scratch, Server, ServerCommand};
use serde_json::json;

fn server(scratch: &Scratch, image: &Image, kind: &str) -> Server {
    let socket = scratch.path("pci.sock");
    let export = format!(
        "{kind},id=pci,node-name=disk,addr.type=unix,addr.path={},writable=on",
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

fn an_upgrade_is_refused_and_the_drive_stays(kind: &str, expected: u32) {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 1);
    let server = server(&scratch, &image, kind);
    let mut client = UnixStream::connect(scratch.path("pci.sock")).expect("a socket");
    assert_eq!(ids(&mut client), expected);
    let mut qmp = Qmp::connect(&server.socket("monitor"));
    let why = qmp.refused("x-upgrade", json!({}));
    assert!(why.contains("vfio-user exports cannot be handed over"), "{why}");
    let why = qmp.refused("block-export-del", json!({"id": "pci"}));
    assert_eq!(why, "export 'pci' still in use");
    drop(client);
    let mut client = UnixStream::connect(scratch.path("pci.sock")).expect("a socket");
    assert_eq!(ids(&mut client), expected, "the next client is served");
    qmp.execute("block-export-del", json!({"id": "pci", "mode": "hard"}));
    assert_eq!(client.read(&mut [0; 1]).expect("an end"), 0);
    integration::eventually("the socket is removed", || {
        (!scratch.path("pci.sock").exists()).then_some(())
    });
    server.stop();
}

#[test]
fn an_upgrade_is_refused_and_the_ahci_drive_stays() {
    an_upgrade_is_refused_and_the_drive_stays("vfio-user-ahci", 0x2922_8086);
}

#[test]
fn an_upgrade_is_refused_and_the_nvme_controller_stays() {
    an_upgrade_is_refused_and_the_drive_stays("vfio-user-nvme", 0x0001_4e58);
}
