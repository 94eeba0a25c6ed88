//! A vfio-user-nvme export before Linux's NVMe driver. `.ci/nightly` has these: they take QEMU 11 and Debian's generic
//! kernel (`scripts/setup-vfio-user.sh`). The controller is tested everywhere by `crates/devices/tests/nvme/`.

use std::path::Path;
use std::process::Command;

use integration::{Guest, Image, Qmp, Scratch, Server, ServerCommand, daemon, tool};
use serde_json::json;

fn server(scratch: &Scratch, images: &[&Image]) -> Server {
    server_with(scratch, images, "num-queues=4")
}

fn server_with(scratch: &Scratch, images: &[&Image], options: &str) -> Server {
    let mut command = ServerCommand::new(scratch).monitor("monitor");
    // Queues are on two threads in turn.
    command = command.args(["--object", "iothread,id=io0", "--object", "iothread,id=io1"]);
    let mut namespaces = String::new();
    for (n, image) in images.iter().enumerate() {
        let name = format!("disk{n}");
        namespaces += &format!("namespaces.{n}={name},");
        command = command.file(&name, image, "discard=unmap");
    }
    let socket = scratch.path("nvme.sock");
    let export = format!(
        "type=vfio-user-nvme,id=nvme,{namespaces}addr.type=unix,addr.path={},writable=on,serial=S1,\
         iothread.0=io0,iothread.1=io1,{options}",
        socket.display()
    );
    command.args(["--export", &export]).start()
}

fn guest(scratch: &Scratch) -> Guest {
    Guest::new().vfio_user(scratch.path("nvme.sock")).queues(4)
}

/// Upgrades the daemon by its monitor. Returns the milliseconds that guests have waited.
fn upgrade(monitor: &Path) -> u64 {
    let output = Command::new(daemon()).arg("upgrade").arg(monitor).output().expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let waited = text.split("waited for ").nth(1).and_then(|text| text.split(' ').next());
    waited.and_then(|ms| ms.parse().ok()).unwrap_or_else(|| panic!("{output:?}"))
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
    let stats = qmp.execute("x-query-export-stats", json!({}));
    for queue in 0..4 {
        let queue = &stats[0]["queues"][queue];
        let write = &queue["requests"][1];
        let is_used = write["done"].as_u64().is_some_and(|done| done > 100);
        assert!(write["operation"] == "write" && is_used, "{queue}");
    }
    server.stop();
    let lines: Vec<&str> = lines.iter().map(|line| line.trim()).collect();
    assert_eq!(lines, ["ringmill", "write back", "4", "67108864", "0"]);
    let fsck = Command::new(tool("e2fsck")).arg("-fn").arg(images[0].path()).output();
    let fsck = fsck.expect("e2fsck runs");
    assert!(fsck.status.success(), "{fsck:?}");
}

/// Fewer queues than processors, which share them.
const FEW_QUEUES: &str = "
    disk=nvme0n1
    ls /sys/block/nvme0n1/mq | wc -l
    cat /sys/block/nvme0n1/mq/*/cpu_list | tr -d ' ' | tr '\\n' ' '
    echo
    verify --do_verify=1 --numjobs=4 --offset_increment=8m --cpus_allowed=0-3 --cpus_allowed_policy=split
    checked_load 4 --cpus_allowed=0-3 --cpus_allowed_policy=split
    wait_for_requests 1000
    end_checked_load";

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn linux_shares_one_to_three_queues() {
    for queues in 1..=3 {
        let scratch = Scratch::new();
        let image = Image::empty(&scratch, "disk.img", 64);
        let server = server_with(&scratch, &[&image], &format!("num-queues={queues}"));
        let lines = guest(&scratch).run(FEW_QUEUES);
        let mut qmp = Qmp::connect(&server.socket("monitor"));
        let stats = qmp.execute("x-query-export-stats", json!({}));
        let used = stats[0]["queues"].as_array().expect("a list");
        assert_eq!(used.len(), queues, "{stats}");
        for queue in used {
            let write = &queue["requests"][1];
            let is_used = write["done"].as_u64().is_some_and(|done| done > 100);
            assert!(write["operation"] == "write" && is_used, "{queue}");
        }
        server.stop();
        println!("{queues} queues, and their processors: {}", lines[1]);
        assert_eq!(lines[0].trim(), queues.to_string(), "{lines:?}");
    }
}

/// Resets the controller under a load that is checked, and takes the driver off and on.
///
/// Each queue has one request at a time. After a reset, Linux submits what was under way before it says where its doorbells
/// in memory are, and waits for that: it writes the register for the first doorbell of each queue alone. A second one is lost,
/// and found by a time limit of 30 s. Linux then gives the controller up.
const RESETS: &str = "
    disk=nvme0n1
    checked_load 4 --iodepth=1 --cpus_allowed=0-3 --cpus_allowed_policy=split
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

/// Resets the controller while each queue has many requests.
const DEEP_RESETS: &str = "
    disk=nvme0n1
    checked_load 4 --cpus_allowed=0-3 --cpus_allowed_policy=split
    for i in $(seq 30); do
        echo 1 >/sys/class/nvme/nvme0/reset_controller
        wait_for_requests 100
    done
    end_checked_load
    load=
    verify --do_verify=1
    dmesg | grep -c 'nvme.*timeout' || true";

/// With doorbells in memory, Linux 6.1 may lose some of what it submits before it says where they are: see [`RESETS`].
/// `RINGMILL_DOORBELLS=auto` tries that.
#[test]
#[ignore = "one of those that .ci/nightly has"]
fn trapped_doorbells_lose_nothing_in_resets_at_depth_32() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 64);
    let doorbells = std::env::var("RINGMILL_DOORBELLS").unwrap_or_else(|_| "trapped".into());
    let options = format!("num-queues=4,doorbells={doorbells}");
    let server = server_with(&scratch, &[&image], &options);
    let lines = guest(&scratch).time_limit(600).run(DEEP_RESETS);
    server.stop();
    assert_eq!(lines.last().map(String::as_str), Some("0"), "requests that timed out: {lines:?}");
}

/// Resets controller and PCI function under a load that is checked, as [`RESETS`] does.
const FUNCTION_RESETS: &str = "
    disk=nvme0n1
    device=$(basename $(readlink /sys/class/nvme/nvme0/device))
    cat /sys/bus/pci/devices/$device/reset_method
    checked_load 4 --iodepth=1 --cpus_allowed=0-3 --cpus_allowed_policy=split
    for i in $(seq 15); do
        echo 1 >/sys/class/nvme/nvme0/reset_controller || {
            dmesg | tail -30
            exit 1
        }
        [ $((i % 3)) = 0 ] || wait_for_requests 100
        echo 1 >/sys/bus/pci/devices/$device/reset
        [ -e /sys/block/nvme0n1/stat ] || {
            dmesg | tail -30
            exit 1
        }
        wait_for_requests 100
    done
    end_checked_load
    load=
    verify --do_verify=1";

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn resets_of_the_function_under_load_lose_nothing() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 64);
    let server = server(&scratch, &[&image]);
    let lines = guest(&scratch).run(FUNCTION_RESETS);
    server.stop();
    assert!(lines[0].contains("af_flr"), "{lines:?}");
}

/// Driver and device are taken away while each queue has 32 requests.
const REMOVALS: &str = "
    disk=nvme0n1
    verify --do_verify=1
    take_away_under_load $(basename $(readlink /sys/class/nvme/nvme0/device)) nvme --numjobs=4 --cpus_allowed=0-3 --cpus_allowed_policy=split
    verify --offset=32m --do_verify=1";

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn driver_and_device_go_under_load_at_depth_32() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 64);
    let server = server(&scratch, &[&image]);
    guest(&scratch).run(REMOVALS);
    server.stop();
}

/// The machine is paused and goes on, under a load that is checked.
const PAUSES: &str = "
    disk=nvme0n1
    checked_load 4
    for i in 1 2 3 4 5 6 7 8 9 10; do
        wait_for_requests 100
        echo pause
        read -r continued
    done
    end_checked_load
    load=
    verify --do_verify=1";

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn a_guest_that_is_paused_goes_on() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 64);
    let mut server = server(&scratch, &[&image]);
    let mut guest = guest(&scratch).boot(PAUSES);
    let mut qmp = guest.qmp();
    for round in 0..10 {
        guest.expect("pause");
        qmp.execute("stop", json!({}));
        // Requests end, and interrupts are sent, while no CPU runs; and another daemon takes over meanwhile.
        let mut monitor = Qmp::connect(&server.socket("monitor"));
        integration::eventually("nothing is in flight", || {
            let stats = monitor.execute("x-query-export-stats", json!({}));
            let queues = stats[0]["queues"].as_array().expect("a list");
            queues.iter().all(|queue| queue["in-flight"] == 0).then_some(())
        });
        drop(monitor);
        if round % 2 == 1 {
            server.upgrade();
        }
        qmp.execute("cont", json!({}));
        guest.send("continued");
    }
    guest.finish();
    server.stop();
}

/// nvme-cli of Debian.
const TOOL: &str = "
    nvme list
    nvme id-ctrl /dev/nvme0 | grep -E '^(sn|mn|oacs|sqes|nn) '
    nvme id-ns /dev/nvme0n1 | grep -E '^(nsze|lbaf  0)'
    nvme smart-log /dev/nvme0 | grep -E '^(critical_warning|media_errors|available_spare)'
    nvme error-log /dev/nvme0 | grep -c status_field
    nvme get-feature /dev/nvme0 -f 7
    nvme flush /dev/nvme0n1
    nvme format /dev/nvme0n1 --force 2>&1 && exit 1
    nvme list-ns /dev/nvme0
    disk=nvme0n1
    verify --do_verify=1";

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn nvme_cli_knows_the_controller() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 64);
    let server = server(&scratch, &[&image]);
    let lines = guest(&scratch).run(TOOL);
    server.stop();
    println!("{}", lines.join("\n"));
    for expected in [
        "/dev/nvme0n1",
        "mn        : ringmill",
        "nn        : 1",
        "nsze    : 0x20000",
        "critical_warning",
        "media_errors",
        "Invalid Command Opcode",
        "NVMe Flush: success",
    ] {
        assert!(lines.iter().any(|line| line.contains(expected)), "{expected}: {lines:?}");
    }
}

/// The daemon is upgraded under a load that is checked.
const UPGRADES: &str = "
    disk=nvme0n1
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
    verify --do_verify=1";

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn upgrades_under_load_lose_nothing() {
    const TIMES: usize = 50;
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 64);
    let mut server = server(&scratch, &[&image]);
    let mut guest = guest(&scratch).boot(UPGRADES);
    guest.expect("how many?");
    guest.send(&TIMES.to_string());
    let mut waits = Vec::new();
    for _ in 0..TIMES {
        guest.expect("upgrade");
        server.upgrade_by(|server| waits.push(upgrade(&server.socket("monitor"))));
        guest.send("done");
    }
    guest.finish();
    server.stop();
    waits.sort_unstable();
    println!("the guest waited for {waits:?} ms");
    assert!(waits.last().is_some_and(|longest| *longest <= 100), "{waits:?}");
}

/// Linux rings doorbells in the page that QEMU has mapped. The daemon is upgraded while they are rung, and the controller is
/// reset.
const MAPPED: &str = "
    disk=nvme0n1
    checked_load 4 --iodepth=8 --cpus_allowed=0-3 --cpus_allowed_policy=split
    for i in 1 2 3 4 5; do
        wait_for_requests 100
        echo upgrade
        read -r upgraded
    done
    end_checked_load
    load=
    verify --do_verify=1
    echo 1 >/sys/class/nvme/nvme0/reset_controller
    verify --verify_only=1
    dmesg | grep -c 'nvme.*timeout' || true";

#[test]
#[ignore = "one of those that .ci/nightly has"]
fn linux_rings_mapped_doorbells() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 64);
    let mut server = server_with(&scratch, &[&image], "num-queues=4,doorbells=mapped");
    let mut guest = guest(&scratch).boot(MAPPED);
    for _ in 0..5 {
        guest.expect("upgrade");
        server.upgrade();
        guest.send("done");
    }
    let lines = guest.finish();
    assert_eq!(lines.last().map(String::as_str), Some("0"), "no doorbell was lost: {lines:?}");
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
