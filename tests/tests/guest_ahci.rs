//! A vfio-user-ahci export before Linux's AHCI driver. `.ci/nightly` has these: they take QEMU 11 and Debian's generic
//! kernel (`scripts/setup-vfio-user.sh`). The protocol is tested everywhere by `crates/exports/tests/vfio_user/`.

use std::process::Command;

use integration::{Guest, Image, Scratch, Server, ServerCommand, daemon, tool};
use serde_json::json;

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
        .monitor("monitor")
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

/// The second drive, with its own serial number, is on another thread. The daemon is upgraded under a load that is checked.
const UPGRADES: &str = "
    ls /sys/block | grep -c '^sd'
    disk=sdb
    verify --do_verify=1
    disk=sda
    checked_load 4
    echo 'how many?'
    read -r times
    for i in $(seq $times); do
        wait_for_requests 100
        echo upgrade
        read -r upgraded
    done
    end_checked_load
    load=
    verify --do_verify=1
    disk=sdb
    verify --verify_only=1
    dmesg | grep -E 'ata[0-9.]*: (exception|hard resetting|failed command)' && exit 1
    echo done";

/// Upgrades the daemon by its monitor. Returns the milliseconds that guests have waited.
fn upgrade(server: &Server) -> u64 {
    let output = Command::new(daemon()).arg("upgrade").arg(server.socket("monitor")).output();
    let output = output.expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let waited = text.split("waited for ").nth(1).and_then(|text| text.split(' ').next());
    waited.and_then(|ms| ms.parse().ok()).unwrap_or_else(|| panic!("{output:?}"))
}

fn upgrades_lose_nothing(kernel_options: &'static str) {
    const TIMES: usize = 25;
    let scratch = Scratch::new();
    let images = ["disk0.img", "disk1.img"].map(|name| Image::empty(&scratch, name, 64));
    let socket = scratch.path("ahci.sock");
    let export = format!(
        "type=vfio-user-ahci,id=ahci,drives.0=disk0,drives.1=disk1,addr.type=unix,addr.path={},writable=on,serial=S1,\
         iothread.0=io0,iothread.1=io1",
        socket.display()
    );
    let mut server = ServerCommand::new(&scratch)
        .monitor("monitor")
        .args(["--object", "iothread,id=io0", "--object", "iothread,id=io1"])
        .file("disk0", &images[0], "discard=unmap")
        .file("disk1", &images[1], "discard=unmap")
        .args(["--export", &export])
        .start();
    let guest = Guest::new().vfio_user(socket).kernel_options(kernel_options);
    let mut guest = guest.boot(UPGRADES);
    guest.expect("2");
    guest.expect("how many?");
    guest.send(&TIMES.to_string());
    let mut waits = Vec::new();
    for _ in 0..TIMES {
        guest.expect("upgrade");
        server.upgrade_by(|server| waits.push(upgrade(server)));
        guest.send("done");
    }
    guest.expect("done");
    guest.finish();
    server.stop();
    waits.sort_unstable();
    println!("the guest waited for {waits:?} ms");
    assert!(waits.last().is_some_and(|longest| *longest <= 100), "{waits:?}");
}

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn upgrades_under_load_lose_nothing_by_messages() {
    upgrades_lose_nothing("");
}

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn upgrades_under_load_lose_nothing_by_the_interrupt_line() {
    upgrades_lose_nothing(" pci=nomsi");
}

/// Linux resets the link, as for a scan, while the drive has 32 requests that are checked. Then driver and device are taken away.
const RESETS: &str = "
    disk=sda
    path=$(readlink -f /sys/block/sda)
    device=$(basename ${path%%/ata*})
    host=${path##*/host}
    checked_load 4
    for i in 1 2 3 4 5 6 7 8 9 10; do
        echo '- - -' >/sys/class/scsi_host/host${host%%/*}/scan
        wait_for_requests 100
    done
    end_checked_load
    load=
    dmesg | grep -E 'ata[0-9.]*: (exception|failed command)' && exit 1
    verify --do_verify=1
    take_away_under_load $device ahci
    verify --offset=32m --do_verify=1";

fn resets_lose_nothing(kernel_options: &'static str) {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 64);
    let server = server(&scratch, &image);
    let guest = Guest::new().vfio_user(scratch.path("ahci.sock")).kernel_options(kernel_options);
    guest.run(RESETS);
    server.stop();
}

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn resets_at_depth_32_lose_nothing_by_messages() {
    resets_lose_nothing("");
}

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn resets_at_depth_32_lose_nothing_by_the_interrupt_line() {
    resets_lose_nothing(" pci=nomsi");
}

/// The machine is paused and continued, under a load that is checked.
const PAUSES: &str = "
    disk=sda
    checked_load 4
    for i in 1 2 3 4 5 6 7 8 9 10; do
        wait_for_requests 100
        echo pause
        read -r continued
    done
    end_checked_load
    load=
    verify --do_verify=1
    dmesg | grep -E 'ata[0-9.]*: (exception|failed command)' && exit 1
    echo done";

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn a_guest_that_is_paused_goes_on() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 64);
    let mut server = server(&scratch, &image);
    let mut guest = Guest::new().vfio_user(scratch.path("ahci.sock")).boot(PAUSES);
    let mut qmp = guest.qmp();
    for round in 0..10 {
        guest.expect("pause");
        qmp.execute("stop", json!({}));
        // Requests end, and interrupts are sent, while no CPU runs; and another daemon takes over meanwhile.
        if round % 2 == 1 {
            server.upgrade();
        }
        qmp.execute("cont", json!({}));
        guest.send("continued");
    }
    guest.expect("done");
    guest.finish();
    server.stop();
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
