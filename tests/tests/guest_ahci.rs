//! A vfio-user-ahci export before Linux's AHCI driver. `.ci/nightly` has these: they take QEMU 11 and Debian's generic
//! kernel (`scripts/setup-vfio-user.sh`). The protocol is tested everywhere by `crates/exports/tests/vfio_user/`.

use std::process::Command;

use integration::{Guest, Image, Scratch, Server, ServerCommand, tool};

/// Files with checksums on a new file system; then checksummed requests of many sizes, and discards.
const JOB: &str = "
    disk=sda
    cat /sys/block/sda/device/model
    /bin/mke2fs -q -t ext4 /dev/sda 48M
    mount -t ext4 /dev/sda /mnt
    for i in 1 2 3 4 5 6 7 8; do
        dd if=/dev/urandom of=/mnt/$i bs=64k count=$((i * 5)) 2>/dev/null
    done
    cd /mnt
    md5sum [1-8] >/tmp/sums
    cd /
    umount /mnt
    /bin/e2fsck -fn /dev/sda >/tmp/fsck 2>&1 || { cat /tmp/fsck; exit 1; }
    mount -t ext4 /dev/sda /mnt
    cd /mnt
    md5sum -c /tmp/sums >/tmp/checked || { cat /tmp/checked; exit 1; }
    cd /
    umount /mnt
    verify --offset=48m --do_verify=1
    /bin/blkdiscard -f -o 58720256 -l 1048576 /dev/sda 2>/dev/null
    awk '/ahci/ && $2 > 100 { print }' /proc/interrupts";

fn server(scratch: &Scratch, image: &Image) -> Server {
    let socket = scratch.path("ahci.sock");
    let export = format!(
        "type=vfio-user-ahci,id=ahci,node-name=disk,addr.type=unix,addr.path={},writable=on,serial=S1",
        socket.display()
    );
    ServerCommand::new(scratch)
        .file("disk", image, "discard=unmap")
        .args(["--export", &export])
        .start()
}

fn linux_uses_it(kernel_options: &'static str, interrupts: &str) {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 64);
    let server = server(&scratch, &image);
    let guest = Guest::new().vfio_user(scratch.path("ahci.sock")).kernel_options(kernel_options);
    let lines = guest.run(JOB);
    server.stop();
    assert_eq!(lines[0].trim(), "ringmill");
    assert!(lines[1].contains(interrupts), "{lines:?}");
    let fsck = Command::new(tool("e2fsck")).arg("-fn").arg(image.path()).output();
    let fsck = fsck.expect("e2fsck runs");
    assert!(fsck.status.success(), "{fsck:?}");
}

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn linux_uses_the_drive_by_messages() {
    linux_uses_it("", "PCI-MSI");
}

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn linux_uses_the_drive_by_the_interrupt_line() {
    linux_uses_it(" pci=nomsi", "fasteoi");
}

const REBOOTS: &str = "
    disk=sda
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
    let server = server(&scratch, &image);
    let guest = Guest::new().vfio_user(scratch.path("ahci.sock")).reboots();
    let mut guest = guest.boot(REBOOTS);
    for boot in 1..=3 {
        guest.expect("which boot?");
        guest.send(&boot.to_string());
    }
    guest.finish();
    server.stop();
}
