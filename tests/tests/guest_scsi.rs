//! A guest whose disks are logical units of virtio-scsi: what Linux detects, and what sg3_utils report, which test
//! against the standards.

use integration::{Guest, Image, Qmp, Scratch, ServerCommand, eventually, pattern};
use serde_json::json;

const MIB: u64 = 1 << 20;

/// Prints what Linux has detected, and uses a file system.
const LINUX: &str = "
    # Linux goes on before it has looked at what there is behind a SCSI controller, and names disks in the order
    # in which it is done with them, which is not that of their LUNs.
    for lun in 0 1; do
        until [ -e /sys/bus/scsi/devices/*:0:0:$lun/block/*/dev ]; do usleep 10000; done
    done
    first=$(ls -d /sys/bus/scsi/devices/*:0:0:0/block/*); first=${first##*/}
    second=$(ls -d /sys/bus/scsi/devices/*:0:0:1/block/*); second=${second##*/}
    ls -d /sys/class/scsi_device/* | wc -l
    cat /sys/block/$first/device/vendor /sys/block/$first/device/model
    for disk in $first $second; do
        echo $(cat /sys/block/$disk/size /sys/block/$disk/ro)
        dd if=/sys/block/$disk/device/vpd_pg80 bs=1 skip=4 2>/dev/null
        echo
    done
    cd /sys/block/$first/queue
    cat logical_block_size physical_block_size rotational write_cache fua
    [ $(cat discard_max_bytes) -ge $((32 << 20)) ]
    [ $(cat write_zeroes_max_bytes) -ge $((32 << 20)) ]
    cat /sys/block/$first/device/scsi_disk/*/provisioning_mode
    cd /

    /bin/mke2fs -q -t ext4 /dev/$first
    mount -t ext4 /dev/$first /mnt
    head -c 24000000 /dev/urandom >/mnt/a
    head -c 8000000 /dev/urandom >/mnt/b
    sync
    rm /mnt/a
    sync
    fstrim -v /mnt >/tmp/trimmed
    md5sum </mnt/b >/tmp/before
    umount /mnt
    echo 'write through' >$(echo /sys/block/$first/device/scsi_disk/*)/cache_type
    cat /sys/block/$first/queue/write_cache
    mount -t ext4 /dev/$first /mnt
    head -c 1000000 /dev/urandom >/mnt/c
    md5sum </mnt/b >/tmp/after
    cmp /tmp/before /tmp/after
    umount /mnt
    e2fsck -fn /dev/$first >/tmp/fsck 2>&1 || { cat /tmp/fsck; exit 1; }
    echo kill && read -r done
    # It asks for the mode again, of the daemon that there is now.
    for disk in $first $second; do
        echo 1 >/sys/block/$disk/device/rescan
        cat /sys/block/$disk/queue/write_cache
    done
    md5sum </dev/$first";

/// One disk ends without a write cache, also after a kill of the daemon that the guest sent the mode to.
#[test]
fn linux_finds_two_disks_and_uses_them() {
    let scratch = Scratch::new();
    let disk = Image::empty(&scratch, "disk.img", 64);
    let other = Image::filled(&scratch, "other.img", 16);
    let before = other.md5();
    let start = || {
        ServerCommand::new(&scratch)
            .iothread("io0")
            .iothread("io1")
            .file("disk", &disk, "discard=unmap")
            .file("other", &other, "discard=unmap")
            .export_scsi("scsi", &["disk", "other"], "num-queues=2,iothread.0=io0,iothread.1=io1")
            .start()
    };
    let server = start();
    let guest = Guest::new().scsi(server.socket("scsi")).queues(2);
    let mut guest = guest.chardev_options("reconnect-ms=10").boot(LINUX);
    guest.expect("kill");
    server.kill();
    let server = start();
    guest.send("done");
    let lines = guest.finish();
    server.stop();
    let sum = format!("{}  -", disk.md5());
    #[rustfmt::skip]
    let expected = [
        "2", "RINGMILL", "VIRTIO DISK     ",
        "131072 0", "scsi-0", "32768 0", "scsi-1",
        "512", "4096", "0", "write back", "1", "unmap",
        "write through", "kill", "write through", "write back", &sum,
    ];
    assert_eq!(lines, expected);
    assert_eq!(other.md5(), before);
    // Space of file `a`, and of what mke2fs has discarded, is deallocated.
    assert!(disk.allocated() < 30 * MIB, "{} bytes are allocated", disk.allocated());
}

/// By default QEMU requests one queue per processor, and fails if the back end has fewer. It warns if the back end has a
/// configuration space.
#[test]
fn each_processor_has_a_queue_where_no_number_is_said() {
    let scratch = Scratch::new();
    let disk = Image::filled(&scratch, "disk.img", 16);
    let server = ServerCommand::new(&scratch)
        .monitor("qmp")
        .iothread("io0")
        .iothread("io1")
        .file("disk", &disk, "")
        .export_scsi("scsi", &["disk"], "iothread.0=io0,iothread.1=io1")
        .start();
    let mut guest = Guest::new().scsi(server.socket("scsi")).unsaid_queues().boot(
        "ls /sys/block/sda/mq | wc -l
        taskset 1 dd if=/dev/sda of=/dev/null bs=64k iflag=direct count=16 2>/dev/null
        taskset 2 dd if=/dev/sda of=/dev/null bs=64k iflag=direct count=16 2>/dev/null
        echo done
        read -r end
        md5sum </dev/sda",
    );
    assert_eq!(guest.line(), "2");
    guest.expect("done");
    let mut qmp = Qmp::connect(&server.socket("qmp"));
    // Requests are counted after the guest has received their answers.
    eventually("two queues with 16 reads each", || {
        let stats = qmp.execute("x-query-export-stats", json!({}));
        let queues = stats[0]["queues"].as_array().expect("queues");
        // Statistics omit queues without requests.
        let mut reads = queues.iter().map(|queue| queue["requests"][0]["done"].as_u64());
        (queues.len() == 2 && reads.all(|done| done >= Some(16))).then_some(())
    });
    assert_eq!(guest.stderr(), "");
    guest.send("end");
    assert_eq!(guest.finish().last(), Some(&format!("{}  -", disk.md5())));
    server.stop();
}

/// Commands that Linux does not send by itself. The programs of sg3_utils fail if sense data or lengths are wrong.
const SG: &str = "
    sg_inq /dev/sda | grep -E 'version=|length=|Vendor|Product|Unit serial' | sed 's/^ *//'
    sg_vpd -p 0xb0 /dev/sda >/dev/null
    sg_vpd -p 0xb1 /dev/sda | grep -i 'rotati'
    sg_vpd -p 0xb2 /dev/sda | grep -E 'LBPU|LBPWS|LBPRZ' | sed 's/^ *//'
    [ $(sg_vpd -p 0x83 /dev/sda | grep -c -i 'designator type') = 2 ]
    [ $(sg_luns /dev/sda | grep -c '^    ') = 1 ]
    sg_readcap -l /dev/sda | grep -E 'lbpme|Logical block length' | sed 's/^ *//'
    sg_modes -p 8 /dev/sda >/dev/null
    sg_modes -6 -p 0x3f /dev/sda >/dev/null
    sg_opcodes -n /dev/sda >/dev/null
    sg_opcodes --opcode=0x42 /dev/sda >/dev/null
    sg_requests /dev/sda >/dev/null
    sg_sync /dev/sda
    sg_verify --lba=0 --count=128 /dev/sda
    sg_unmap --force --lba=$((8 << 11)) --num=$((4 << 11)) /dev/sda
    sg_write_same --16 --unmap --lba=$((16 << 11)) --num=$((4 << 11)) --xferlen=512 /dev/sda
    sg_write_same --10 --lba=$((24 << 11)) --num=2048 --xferlen=512 /dev/sda
    echo -n 0123456789abcdef >/tmp/block
    for i in 1 2 3 4 5; do cat /tmp/block /tmp/block >/tmp/twice; mv /tmp/twice /tmp/block; done
    sg_write_same --10 --in=/tmp/block --lba=$((32 << 11)) --num=2048 --xferlen=512 /dev/sda
    if sg_persist --in --read-keys /dev/sda >/tmp/persist 2>&1; then exit 1; fi
    grep -i 'not supported\\|illegal\\|invalid' /tmp/persist >/dev/null
    dd if=/dev/sda of=/dev/null bs=64k iflag=direct 2>/dev/null &
    sg_reset --device --no-esc /dev/sda
    wait $!
    dd if=/dev/sda of=/dev/null bs=1M count=1 iflag=direct 2>/dev/null";

#[test]
fn commands_are_as_the_standards_have_them() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 64);
    let server = ServerCommand::new(&scratch)
        .file("disk", &image, "discard=unmap")
        .export_scsi("scsi", &["disk"], "")
        .start();
    let lines = Guest::new().scsi(server.socket("scsi")).run(SG);
    server.stop();
    for mib in 0..64 {
        let data = image.read(mib * MIB, MIB as usize);
        if (8..12).contains(&mib) || (16..20).contains(&mib) || mib == 24 {
            assert!(data.iter().all(|&byte| byte == 0), "MiB {mib} is not zero");
            continue;
        }
        if mib == 32 {
            assert!(data.chunks_exact(16).all(|block| block == b"0123456789abcdef"));
            continue;
        }
        for (at, block) in (0..).zip(data.chunks_exact(pattern::BLOCK)) {
            assert_eq!(pattern::generation(mib * (MIB / 4096) + at, block), Ok(0));
        }
    }
    for line in [
        "Vendor identification: RINGMILL",
        "Unit serial number: scsi-0",
        "Unmap command supported (LBPU): 1",
        "Logical block length=512 bytes",
        "Logical block provisioning: lbpme=1, lbprz=0",
    ] {
        assert!(lines.iter().any(|printed| printed == line), "no {line:?} in {lines:#?}");
    }
}

/// The daemon is restarted while the guest writes. The guest waits, receives a unit attention for a reset, and
/// continues.
#[test]
fn the_daemon_is_restarted_under_a_write() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 16);
    let serve = || {
        ServerCommand::new(&scratch)
            .file("disk", &image, "")
            .export_scsi("scsi", &["disk"], "")
            .start()
    };
    let server = serve();
    let guest = Guest::new().scsi(server.socket("scsi")).chardev_options("reconnect-ms=50");
    let mut guest = guest.boot(
        "dd if=/dev/urandom of=/dev/sda bs=64k count=256 oflag=direct 2>/dev/null &
        echo restart
        read -r done
        wait $!
        dd if=/dev/urandom of=/dev/sda bs=64k seek=16 count=16 conv=fsync 2>/dev/null
        md5sum </dev/sda",
    );
    guest.expect("restart");
    server.stop();
    let server = serve();
    guest.send("done");
    let lines = guest.finish();
    server.stop();
    assert_eq!(lines.last(), Some(&format!("{}  -", image.md5())));
}
