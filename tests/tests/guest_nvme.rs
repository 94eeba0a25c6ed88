//! A vfio-user-nvme export before Linux's NVMe driver. `.ci/nightly` has these: they take QEMU 11 and Debian's generic
//! kernel (`scripts/setup-vfio-user.sh`). The controller is tested everywhere by `crates/devices/tests/nvme/`.

use std::process::Command;

use integration::{Guest, Image, Qmp, Scratch, Server, ServerCommand, tool};
use serde_json::json;

fn server(scratch: &Scratch, images: &[&Image]) -> Server {
    let mut command = ServerCommand::new(scratch).monitor("monitor");
    let mut namespaces = String::new();
    for (n, image) in images.iter().enumerate() {
        let name = format!("disk{n}");
        namespaces += &format!("namespaces.{n}={name},");
        command = command.file(&name, image, "discard=unmap");
    }
    let socket = scratch.path("nvme.sock");
    let export = format!(
        "type=vfio-user-nvme,id=nvme,{namespaces}addr.type=unix,addr.path={},writable=on,serial=S1,num-queues=3",
        socket.display()
    );
    command.args(["--export", &export]).start()
}

fn guest(scratch: &Scratch) -> Guest {
    Guest::new().vfio_user(scratch.path("nvme.sock")).queues(4)
}

/// Files with checksums on a new file system; then checksummed requests on all queues at once, discards and zeroes.
const JOB: &str = "
    disk=nvme0n1
    cat /sys/class/nvme/nvme0/model
    cat /sys/block/nvme0n1/queue/write_cache
    ls /sys/block/nvme0n1/mq | wc -l
    /bin/blockdev --getsize64 /dev/nvme0n2
    /bin/mke2fs -q -t ext4 /dev/nvme0n1 48M
    mount -t ext4 /dev/nvme0n1 /mnt
    for i in 1 2 3 4 5 6 7 8; do
        dd if=/dev/urandom of=/mnt/$i bs=64k count=$((i * 5)) 2>/dev/null
    done
    cd /mnt
    md5sum [1-8] >/tmp/sums
    cd /
    umount /mnt
    /bin/e2fsck -fn /dev/nvme0n1 >/tmp/fsck 2>&1 || { cat /tmp/fsck; exit 1; }
    mount -t ext4 /dev/nvme0n1 /mnt
    cd /mnt
    md5sum -c /tmp/sums >/tmp/checked || { cat /tmp/checked; exit 1; }
    cd /
    umount /mnt
    disk=nvme0n2
    verify --do_verify=1 --numjobs=4 --offset_increment=8m --cpus_allowed=0-3 --cpus_allowed_policy=split
    verify --bssplit=512/10:4k/40:64k/30:1m/20 --bs_unaligned=0 --size=32m --do_verify=1
    dd if=/dev/urandom of=/dev/nvme0n2 bs=1M count=4 oflag=direct 2>/dev/null
    /bin/blkdiscard -f -o 0 -l 1048576 /dev/nvme0n2 2>/dev/null
    /bin/blkdiscard -f -z -o 1048576 -l 1048576 /dev/nvme0n2 2>/dev/null
    dd if=/dev/nvme0n2 bs=1M skip=1 count=1 iflag=direct 2>/dev/null | tr -d '\\000' | wc -c";

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn linux_uses_queues_and_namespaces() {
    let scratch = Scratch::new();
    let images = ["disk0.img", "disk1.img"].map(|name| Image::empty(&scratch, name, 64));
    let server = server(&scratch, &[&images[0], &images[1]]);
    let lines = guest(&scratch).run(JOB);
    let mut qmp = Qmp::connect(&server.socket("monitor"));
    let exports = qmp.execute("query-block-exports", json!({}));
    assert_eq!(exports[0]["namespaces"], json!(["disk0", "disk1"]));
    server.stop();
    let lines: Vec<&str> = lines.iter().map(|line| line.trim()).collect();
    assert_eq!(lines, ["ringmill", "write back", "3", "67108864", "0"]);
    let fsck = Command::new(tool("e2fsck")).arg("-fn").arg(images[0].path()).output();
    let fsck = fsck.expect("e2fsck runs");
    assert!(fsck.status.success(), "{fsck:?}");
}

/// Resets the controller under a load that is checked, and takes the driver off and on.
const RESETS: &str = "
    disk=nvme0n1
    checked_load 4
    for i in 1 2 3 4 5; do
        echo 1 >/sys/class/nvme/nvme0/reset_controller
        wait_for_requests 100
    done
    end_checked_load
    load=
    verify --do_verify=1
    device=$(basename $(readlink /sys/class/nvme/nvme0/device))
    for i in 1 2 3; do
        echo $device >/sys/bus/pci/drivers/nvme/unbind
        [ ! -e /dev/nvme0n1 ]
        echo $device >/sys/bus/pci/drivers/nvme/bind
        until [ -b /dev/nvme0n1 ]; do sleep 0.1; done
        verify --verify_only=1
    done
    echo 1 >/sys/bus/pci/devices/$device/remove
    echo 1 >/sys/bus/pci/rescan
    until [ -b /dev/nvme0n1 ]; do sleep 0.1; done
    verify --verify_only=1";

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn resets_under_load_lose_nothing() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 64);
    let server = server(&scratch, &[&image]);
    guest(&scratch).run(RESETS);
    server.stop();
}

const REBOOTS: &str = "
    disk=nvme0n1
    echo 'which boot?'
    read -r boot
    if [ $boot = 1 ]; then
        verify --do_verify=1
    else
        verify --verify_only=1
    fi
    if [ $boot -lt 3 ]; then
        load
        reboot -f
        wait $load
        exit 1
    fi
    verify --offset=32m --do_verify=1";

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn the_guest_reboots_under_load() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 64);
    let server = server(&scratch, &[&image]);
    let mut guest = guest(&scratch).reboots().boot(REBOOTS);
    for boot in 1..=3 {
        guest.expect("which boot?");
        guest.send(&boot.to_string());
    }
    guest.finish();
    server.stop();
}

const RESIZE: &str = "
    /bin/blockdev --getsize64 /dev/nvme0n1
    until [ $(/bin/blockdev --getsize64 /dev/nvme0n1) = 100663296 ]; do sleep 0.1; done
    disk=nvme0n1
    verify --offset=80m --do_verify=1
    echo done";

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn the_guest_is_told_of_another_size() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 64);
    let server = server(&scratch, &[&image]);
    let mut guest = guest(&scratch).boot(RESIZE);
    guest.expect("67108864");
    let mut qmp = Qmp::connect(&server.socket("monitor"));
    qmp.execute("block_resize", json!({"node-name": "disk0", "size": 96 << 20}));
    guest.expect("done");
    guest.finish();
    server.stop();
}
