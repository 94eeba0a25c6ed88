//! Hands an image over between two daemons and back, as in a migration of the guest (`blockdev-set-active`). Never do
//! both write, and nothing is lost.

use integration::{
    BlkClient, Image, Qmp, Request, Scratch, Segment, Server, ServerCommand, request,
};
use serde_json::json;

/// A daemon with a node `disk` on the image. The socket has the daemon's name.
fn serve(scratch: &Scratch, name: &'static str, image: &Image, options: &str) -> Server {
    let (path, active) = (image.path().display(), if options.is_empty() { "" } else { "," });
    let format = image.path().extension().expect("one").to_str().expect("UTF-8");
    let format = if format == "qcow2" { "qcow2" } else { "raw" };
    ServerCommand::new(scratch)
        .named(name)
        .monitor(&format!("{name}-qmp"))
        .arg("--blockdev")
        .arg(format!("file,node-name=file,filename={path}{active}{options}"))
        .arg("--blockdev")
        .arg(format!("{format},node-name={name},file=file{active}{options}"))
        .export(name, "allow-inactive=on")
        .start()
}

fn monitor(server: &Server, name: &str) -> Qmp {
    Qmp::connect(&server.socket(&format!("{name}-qmp")))
}

fn set_active(qmp: &mut Qmp, node: &str, active: bool) {
    qmp.execute("blockdev-set-active", json!({"node-name": node, "active": active}));
}

fn refused(qmp: &mut Qmp, node: &str) -> String {
    qmp.refused("blockdev-set-active", json!({"node-name": node, "active": true}))
}

fn active(qmp: &mut Qmp) -> Vec<bool> {
    let nodes = qmp.execute("query-named-block-nodes", json!({"flat": true}));
    let nodes = nodes.as_array().expect("a list");
    nodes.iter().map(|node| node["active"].as_bool().expect("a flag")).collect()
}

/// Capacity in sectors.
fn capacity(client: &BlkClient) -> u64 {
    let capacity = client.config().expect("a configuration").capacity;
    capacity.into()
}

fn goes_there_and_back(image: &Image) {
    // Separate folders, as each daemon expects only its own sockets to be left.
    let (of_here, of_there) = (Scratch::new(), Scratch::new());
    let here = serve(&of_here, "here", image, "");
    let there = serve(&of_there, "there", image, "active=off");
    let (mut here_qmp, mut there_qmp) = (monitor(&here, "here"), monitor(&there, "there"));
    assert_eq!((active(&mut here_qmp), active(&mut there_qmp)), (vec![true; 2], vec![false; 2]));
    let mut client = BlkClient::connect(&here.socket("here"), 1, 16).expect("a device");
    let mut other = BlkClient::connect(&there.socket("there"), 1, 16).expect("a device");
    assert_eq!(capacity(&client), capacity(&other));
    assert_eq!(client.features(), other.features());

    client.write(8, &[1; 4096]);
    let why = refused(&mut there_qmp, "there");
    assert!(why.contains("lock"), "{why}");
    assert_eq!(active(&mut there_qmp), [false; 2]);
    client.write(16, &[2; 4096]);
    here_qmp.execute("block_resize", json!({"node-name": "here", "size": 8 << 20}));
    // A request that comes before the activation waits.
    other.put(0, &[0xee; 4096]);
    let segments = vec![Segment { at: 0, len: 4096, device_writes: true }];
    other.submit(0, &Request { kind: request::IN, sector: 16, segments });

    set_active(&mut here_qmp, "here", false);
    assert_eq!(active(&mut here_qmp), [false; 2]);
    assert_eq!(other.get(0, 4096), [0xee; 4096]);
    set_active(&mut there_qmp, "there", true);
    let done = other.wait(0).expect("an answer");
    assert_eq!((done.len(), done[0].status), (1, 0));
    assert_eq!(other.get(0, 4096), [2; 4096]);
    assert_eq!(other.read(8, 4096), [1; 4096]);
    // The size is that of the image at the activation.
    assert_eq!(capacity(&other), (8 << 20) / 512);
    other.write(8, &[3; 4096]);
    let why = refused(&mut here_qmp, "here");
    assert!(why.contains("lock"), "{why}");
    let why = here_qmp.refused("block_resize", json!({"node-name": "here", "size": 4 << 20}));
    assert!(why.contains("inactive"), "{why}");

    // Back to the first daemon, all nodes at once.
    there_qmp.execute("blockdev-set-active", json!({"active": false}));
    here_qmp.execute("blockdev-set-active", json!({"active": true}));
    assert_eq!((active(&mut here_qmp), active(&mut there_qmp)), (vec![true; 2], vec![false; 2]));
    assert_eq!(client.read(8, 4096), [3; 4096]);
    assert_eq!(client.read(16, 4096), [2; 4096]);
    drop((client, other));
    there.stop();
    here.stop();
}

#[test]
fn a_raw_image_goes_there_and_back() {
    let scratch = Scratch::new();
    goes_there_and_back(&Image::empty(&scratch, "disk.raw", 4));
}

#[test]
fn a_qcow2_image_goes_there_and_back() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.qcow2", 0);
    let path = image.path().to_str().expect("UTF-8").to_owned();
    let create = std::process::Command::new(integration::tool("qemu-img"))
        .args(["create", "-q", "-f", "qcow2", &path, "4M"])
        .status();
    assert!(create.expect("qemu-img runs").success());
    goes_there_and_back(&image);
    let check = std::process::Command::new(integration::tool("qemu-img"))
        .args(["check", "-q", &path])
        .status();
    assert!(check.expect("qemu-img runs").success());
}

#[test]
fn an_export_that_does_not_allow_it_keeps_its_node_active() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.raw", 4);
    let server = ServerCommand::new(&scratch)
        .monitor("qmp")
        .file("disk", &image, "active=off")
        .export("disk", "")
        .start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    // The export has activated the node.
    assert_eq!(active(&mut qmp), [true]);
    let off = json!({"node-name": "disk", "active": false});
    let why = qmp.refused("blockdev-set-active", off);
    assert_eq!(why, "Failed to inactivate node: Operation not permitted");
    let mut client = BlkClient::connect(&server.socket("disk"), 1, 16).expect("a device");
    client.write(0, &[7; 512]);
    drop(client);
    server.stop();
}
