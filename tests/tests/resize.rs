//! Disks that change their size while guests and clients use them (`block_resize`).

use integration::nbd::{RawNbd, client_output, nbd_export, nbd_server, nbd_uri};
use integration::{BlkClient, Guest, Image, Qmp, Scratch, Server, ServerCommand, eventually};
use serde_json::json;

const MIB: u64 = 1 << 20;

fn resize(server: &Server, node: &str, size: u64) {
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    qmp.execute("block_resize", json!({"node-name": node, "size": size}));
}

/// Resizes a node of an NBD export. NBD clients learn the size only once: the export is removed first.
fn resize_between_exports(server: &Server, node: &str, size: u64) {
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let why = qmp.refused("block_resize", json!({"node-name": node, "size": size}));
    assert!(why.starts_with("Permission conflict on node 'disk': permissions 'resize'"), "{why}");
    qmp.execute("block-export-del", json!({"id": format!("nbd-{node}"), "mode": "hard"}));
    qmp.wait_for("BLOCK_EXPORT_DELETED");
    qmp.execute("block_resize", json!({"node-name": node, "size": size}));
    let export =
        json!({"type": "nbd", "id": format!("nbd-{node}"), "node-name": node, "writable": true});
    qmp.execute("block-export-add", export);
}

/// `DISK` grows while a file system on it is mounted, and what is new is used; then it becomes smaller.
const JOB: &str = "
    await() { until RESCAN [ $(cat /sys/block/DISK/size) = $1 ]; do sleep 0.1; done; }
    until [ -b /dev/DISK ]; do sleep 0.1; done
    /bin/mke2fs -q -t ext4 /dev/DISK
    mount -t ext4 /dev/DISK /mnt
    head -c 1000000 /dev/urandom >/mnt/a
    md5sum </mnt/a >/tmp/before
    sync
    echo mounted
    read line
    await 65536
    dmesg | grep 'DISK.*\\(new size\\|capacity change\\)' >/dev/null
    dd if=/dev/urandom of=/dev/DISK bs=1M seek=24 count=8 oflag=direct 2>/dev/null
    umount /mnt
    mount -t ext4 /dev/DISK /mnt
    md5sum </mnt/a >/tmp/after
    cmp /tmp/before /tmp/after
    umount /mnt
    md5sum </dev/DISK
    echo grown
    read line
    await 32768
    md5sum </dev/DISK";

/// `rescan`: what makes the guest look for the new size, where it is not told.
fn grows_and_becomes_smaller(
    server: Server,
    guest: Guest,
    (disk, rescan): (&str, &str),
    image: &Image,
) {
    let mut guest = guest.boot(&JOB.replace("RESCAN", rescan).replace("DISK", disk));
    guest.expect("mounted");
    resize(&server, "disk", 32 * MIB);
    guest.send("resized");
    let grown = guest.line();
    assert_eq!(grown, format!("{}  -", image.md5()));
    guest.expect("grown");
    resize(&server, "disk", 16 * MIB);
    guest.send("resized");
    let lines = guest.finish();
    assert_eq!(lines.last(), Some(&format!("{}  -", image.md5())));
    server.stop();
}

#[test]
fn a_guest_sees_its_virtio_blk_disk_grow() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 16);
    let command = ServerCommand::new(&scratch).file("disk", &image, "").export("disk", "");
    let server = command.monitor("qmp").start();
    let guest = Guest::new().disk(server.socket("disk"));
    grows_and_becomes_smaller(server, guest, ("vda", ""), &image);
}

#[test]
fn a_guest_finds_its_scsi_disk_grown() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 16);
    let command = ServerCommand::new(&scratch).file("disk", &image, "");
    let command = command.export_scsi("scsi", &["disk"], "");
    let server = command.monitor("qmp").start();
    let guest = Guest::new().scsi(server.socket("scsi"));
    // QEMU 10.0 does not pass VIRTIO_SCSI_F_CHANGE on to the back end, so no event may be sent.
    let rescan = "echo 1 >/sys/block/DISK/device/rescan;";
    grows_and_becomes_smaller(server, guest, ("sda", rescan), &image);
}

#[test]
fn new_nbd_clients_see_the_new_size() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 4);
    let command = ServerCommand::new(&scratch)
        .arg("--object")
        .arg("throttle-group,id=group,limits.iops-total=100000")
        .arg("--blockdev")
        .arg(format!(
            "throttle,node-name=disk,throttle-group=group,file.driver=raw,file.file.driver=file,\
             file.file.filename={}",
            image.path().display()
        ))
        .monitor("qmp");
    let command = nbd_export(nbd_server(command, &scratch, ""), "disk", ",writable=on");
    let server = command.start();
    let uri = nbd_uri(&scratch, "disk");
    let size = || client_output(&scratch, "nbdinfo", &["--size", &uri]).trim().to_owned();
    assert_eq!(size(), (4 * MIB).to_string());
    resize_between_exports(&server, "disk", 8 * MIB);
    assert_eq!(size(), (8 * MIB).to_string());
    client_output(&scratch, "qemu-io", &["-fraw", "-c", "write -P 7 7M 1M", &uri]);
    resize_between_exports(&server, "disk", 2 * MIB);
    assert_eq!(size(), (2 * MIB).to_string());
    server.stop();
    assert_eq!(std::fs::metadata(image.path()).expect("the image").len(), 2 * MIB);
}

/// `blockdev-reopen` of a raw node may change its size while an NBD export uses the node. Requests of connected
/// clients are then checked against the new size.
#[test]
fn an_nbd_export_follows_the_size_of_a_reopened_node() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 4);
    let command = ServerCommand::new(&scratch).file("file", &image, "");
    let command = command.arg("--blockdev").arg(format!("raw,node-name=disk,file=file,size={MIB}"));
    let command = nbd_server(command.monitor("qmp"), &scratch, "");
    let server = nbd_export(command, "disk", ",writable=on").start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let mut client = RawNbd::go(&scratch.path("nbd.sock"), "disk");
    let mut reads_last_sector_of = |mib: u64| {
        client.request(0, mib, mib * MIB - 512, 512);
        let (error, cookie) = client.reply();
        assert_eq!(cookie, mib);
        (error == 0).then(|| client.take::<512>())
    };
    assert!(reads_last_sector_of(1).is_some());
    assert_eq!(reads_last_sector_of(2), None);
    let mut reopen = |mib: u64| {
        let raw = json!({"driver": "raw", "node-name": "disk", "file": "file", "size": mib * MIB});
        qmp.execute("blockdev-reopen", json!({"options": [raw]}));
        let new_clients = ["--size", &nbd_uri(&scratch, "disk")];
        eventually("the new size", || {
            let size = client_output(&scratch, "nbdinfo", &new_clients);
            (size.trim() == (mib * MIB).to_string()).then_some(())
        });
    };
    reopen(2);
    eventually("the second MiB", || reads_last_sector_of(2));
    reopen(1);
    eventually("the end of the second MiB", || reads_last_sector_of(2).is_none().then_some(()));
    assert!(reads_last_sector_of(1).is_some());
    server.stop();
}

/// On top of an image that is longer than the disk was.
#[test]
fn a_qcow2_image_grows_and_becomes_smaller() {
    let scratch = Scratch::new();
    let _base = Image::filled(&scratch, "base.img", 16);
    let qemu_img = |args: &[&str]| client_output(&scratch, "qemu-img", args);
    let create = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.img", "disk.qcow2", "4M"];
    qemu_img(&create);
    let command = ServerCommand::new(&scratch).arg("--blockdev").arg(format!(
        "qcow2,node-name=disk,file.driver=file,file.filename={}",
        scratch.path("disk.qcow2").display()
    ));
    let command = command.monitor("qmp");
    let server = nbd_export(nbd_server(command, &scratch, ""), "disk", ",writable=on").start();
    let uri = nbd_uri(&scratch, "disk");
    let size = || client_output(&scratch, "nbdinfo", &["--size", &uri]).trim().to_owned();
    let qemu_io = |command| client_output(&scratch, "qemu-io", &["-fraw", "-c", command, &uri]);
    let verified = |said: String| assert!(!said.contains("verification failed"), "{said}");
    qemu_io("write -P 7 3M 1M");
    for (mib, command) in [(8, "read -P 0 4M 4M"), (2, "read 0 2M"), (6, "read -P 0 2M 4M")] {
        resize_between_exports(&server, "disk", mib * MIB);
        assert_eq!(size(), (mib * MIB).to_string());
        verified(qemu_io(command));
    }
    qemu_io("write -P 9 5M 1M");
    server.stop();
    qemu_img(&["check", "-q", "disk.qcow2"]);
    assert!(qemu_img(&["info", "disk.qcow2"]).contains(&format!(" ({} bytes)", 6 * MIB)));
    let read = ["-r", "-fqcow2", "-c", "read -P 0 2M 3M", "-c", "read -P 9 5M 1M", "disk.qcow2"];
    verified(client_output(&scratch, "qemu-io", &read));
}

/// The bits of a bitmap take memory.
#[test]
fn a_bitmap_bounds_the_size_to_which_a_disk_grows() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk0.img", 1);
    let server = ServerCommand::new(&scratch).monitor("qmp").file("disk", &image, "").start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let bitmap = json!({"node": "disk", "name": "b", "granularity": 512});
    qmp.execute("block-dirty-bitmap-add", bitmap);
    let grow = json!({"node-name": "disk", "size": 1u64 << 43});
    let why = qmp.refused("block_resize", grow);
    assert!(why.contains("more than 2147483648 parts of 512 bytes"), "{why}");
    qmp.execute("block_resize", json!({"node-name": "disk", "size": 2 << 20}));
    server.stop();
}

/// The disk is longer than a node that shows a part of it: its bitmap cannot get that node's size.
#[test]
fn a_bitmap_below_a_part_of_its_disk_refuses_a_resize_of_that() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk0.img", 4);
    let command = ServerCommand::new(&scratch).monitor("qmp").file("disk", &image, "");
    let part = "raw,node-name=part,file=disk,offset=1048576";
    let server = command.arg("--blockdev").arg(part).start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    let grow = json!({"node-name": "part", "size": 4 << 20});
    qmp.execute("block-dirty-bitmap-add", json!({"node": "disk", "name": "b"}));
    let why = qmp.refused("block_resize", grow.clone());
    assert!(why.contains("Bitmap 'b' of 'disk' is of another size than 'part'"), "{why}");
    qmp.execute("block-dirty-bitmap-remove", json!({"node": "disk", "name": "b"}));
    qmp.execute("block_resize", grow);
    server.stop();
}

/// Bitmaps of filters above the disk that is resized get its size, too.
#[test]
fn bitmaps_above_a_disk_grow_with_it() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk0.img", 1);
    let server = ServerCommand::new(&scratch)
        .monitor("qmp")
        .arg("--object")
        .arg("throttle-group,id=t")
        .file("disk", &image, "")
        .arg("--blockdev")
        .arg("throttle,node-name=top,throttle-group=t,file=disk")
        .arg("--blockdev")
        .arg("throttle,node-name=above,throttle-group=t,file=top")
        .export("above", "")
        .start();
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    for node in ["disk", "top", "above"] {
        qmp.execute("block-dirty-bitmap-add", json!({"node": node, "name": "b"}));
    }
    let mut blk = BlkClient::connect(&server.socket("above"), 1, 16).expect("it serves");
    for (resized, mib) in [("disk", 2), ("top", 3), ("above", 4)] {
        resize(&server, resized, mib * MIB);
        blk.write((mib * MIB - 65536) / 512, &[1; 65536]);
        let nodes = qmp.execute("query-named-block-nodes", json!({"flat": true}));
        for node in nodes.as_array().expect("a list") {
            // The new part counts as written.
            assert_eq!(node["dirty-bitmaps"][0]["count"], (mib - 1) * MIB, "{resized}: {node}");
        }
    }
    drop(blk);
    server.stop();
}
