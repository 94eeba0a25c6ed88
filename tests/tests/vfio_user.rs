//! vfio-user exports of a whole daemon: sandboxed, refused and removed. What their clients see is tested by
//! `crates/exports/tests/vfio_user/` and `crates/devices/tests/nvme/`, real guests by `guest_ahci.rs` and
//! `guest_nvme.rs`.

use integration::{Image, Qmp, Scratch, Server, ServerCommand};
use serde_json::json;
use vcpu::vfio_user::{CONFIG, Client};

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

fn connect(scratch: &Scratch) -> Client {
    Client::connect(&scratch.path("pci.sock")).expect("the export listens")
}

fn read(client: &mut Client, region: u32, offset: u64) -> u32 {
    client.read(region, offset).expect("a register")
}

fn write(client: &mut Client, region: u32, offset: u64, value: u32) {
    client.write(region, offset, value).expect("a register");
}

fn ids(client: &mut Client) -> u32 {
    read(client, CONFIG, 0)
}

fn the_export_stays_while_it_is_used(kind: &str, expected: u32) {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 1);
    let server = server(&scratch, &image, kind);
    let mut client = connect(&scratch);
    assert_eq!(ids(&mut client), expected);
    let mut qmp = Qmp::connect(&server.socket("monitor"));
    let why = qmp.refused("block-export-del", json!({"id": "pci"}));
    assert_eq!(why, "export 'pci' still in use");
    drop(client);
    let mut client = connect(&scratch);
    assert_eq!(ids(&mut client), expected, "the next client is served");
    qmp.execute("block-export-del", json!({"id": "pci", "mode": "hard"}));
    client.wait_for_end().expect("an end");
    integration::eventually("the socket is removed", || {
        (!scratch.path("pci.sock").exists()).then_some(())
    });
    server.stop();
}

#[test]
fn an_ahci_drive_stays_while_it_is_used() {
    the_export_stays_while_it_is_used("vfio-user-ahci", 0x2922_8086);
}

#[test]
fn an_nvme_controller_stays_while_it_is_used() {
    the_export_stays_while_it_is_used("vfio-user-nvme", 0x0001_4e58);
}

/// Registers, configuration space and the connection are those of before.
#[test]
fn an_ahci_client_goes_on_after_an_upgrade() {
    const ABAR: u32 = 5;
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 1);
    let mut server = server(&scratch, &image, "vfio-user-ahci");
    let mut client = connect(&scratch);
    assert_eq!(ids(&mut client), 0x2922_8086);
    write(&mut client, CONFIG, 0x24, 0xfebf_0000);
    // GHC.IE, PxCLB, PxIE, PxCMD.FRE and, once more, the link.
    for (register, value) in
        [(4, 0x8000_0002), (0x100, 0x4400), (0x114, 0x17), (0x118, 0x10), (0x12c, 0x301)]
    {
        write(&mut client, ABAR, register, value);
    }
    let state = |client: &mut Client| {
        let places = (0..0x180).step_by(4).map(|register| (ABAR, register));
        let places = places.chain([(CONFIG, 0x24), (CONFIG, 4)]);
        places.map(|(region, at)| read(client, region, at)).collect::<Vec<_>>()
    };
    let before = state(&mut client);
    for _ in 0..3 {
        server.upgrade();
        assert_eq!(state(&mut client), before);
    }
    write(&mut client, ABAR, 0x12c, 0x300);
    assert_eq!(read(&mut client, ABAR, 0x128) & 0xf, 3, "the link comes up");
    // Software resets the function.
    write(&mut client, CONFIG, 0xb4, 1);
    assert_eq!(read(&mut client, ABAR, 0x114), 0);
    assert_eq!(read(&mut client, CONFIG, 0x24), 0);
    server.stop();
}

/// Drives have their own nodes, threads and counters, and `drives` excludes `node-name`.
#[test]
fn an_ahci_controller_has_several_drives() {
    let scratch = Scratch::new();
    let images = ["a", "b", "c"].map(|name| Image::empty(&scratch, name, 1));
    let socket = scratch.path("pci.sock");
    let mut command = ServerCommand::new(&scratch).args(["--sandbox", "on"]).args([
        "--object",
        "iothread,id=io0",
        "--object",
        "iothread,id=io1",
    ]);
    for (name, image) in ["disk0", "disk1", "disk2"].iter().zip(&images) {
        command = command.file(name, image, "discard=unmap");
    }
    let server = command.monitor("monitor").start();
    let mut qmp = Qmp::connect(&server.socket("monitor"));
    let export = |extra: serde_json::Value| {
        let mut export = json!({
            "type": "vfio-user-ahci", "id": "pci", "writable": true, "iothread": ["io0", "io1"],
            "addr": {"type": "unix", "path": socket},
        });
        let members = extra.as_object().expect("members").clone();
        export.as_object_mut().expect("an object").extend(members);
        export
    };
    let both = export(json!({"node-name": "disk0", "drives": ["disk1"]}));
    let why = qmp.refused("block-export-add", both);
    assert_eq!(why, "node-name and drives exclude each other");
    qmp.execute("block-export-add", export(json!({"drives": ["disk0", "disk1", "disk2"]})));
    let exports = qmp.execute("query-block-exports", json!({}));
    assert_eq!(exports[0]["drives"], json!(["disk0", "disk1", "disk2"]));
    let stats = qmp.execute("x-query-export-stats", json!({}));
    let threads = [0, 1, 2].map(|drive: usize| stats[0]["queues"][drive]["iothread"].clone());
    assert_eq!(json!(threads), json!(["io0", "io1", "io0"]));
    let mut client = Client::connect(&socket).expect("the export listens");
    ids(&mut client);
    assert_eq!(read(&mut client, 5, 0x0c), 0b111, "the ports");
    for port in [0, 1, 2] {
        assert_eq!(read(&mut client, 5, 0x128 + port * 0x80) & 0xf, 3, "port {port} has a drive");
    }
    drop(client);
    server.stop();
}
