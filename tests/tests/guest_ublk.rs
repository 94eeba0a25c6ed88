//! Block devices of the host by ublk: the daemon runs in the guest.

use integration::{Initramfs, tool};

use crate::common::host_guest;

/// Runs a job in a guest, where the device is `$disk`.
pub(crate) fn run(job: &str) {
    let programs = |files: &mut Initramfs| {
        // busybox' own lacks options.
        files.program("/usr/bin/setpriv", &tool("setpriv"));
        files.program("/bin/partx", &tool("partx"));
    };
    host_guest::run(programs, &["disk=ublkb0\n", job].concat());
}

#[test]
fn a_disk_is_verified_mounted_resized_and_removed() {
    run(r#"
truncate -s 64M /tmp/raw
raw=driver=file,node-name=disk,filename=/tmp/raw,discard=unmap
storage --blockdev $raw \
    --export type=ublk,id=e,node-name=disk,writable=on,dev-id=0,num-queues=2,iothread.0=io0,iothread.1=io1
serving
queue=/sys/block/$disk/queue
[ "$(cat /sys/block/$disk/size)" = 131072 ]
[ "$(cat $queue/write_cache)" = 'write back' ]
[ "$(cat $queue/fua)" = 1 ]
[ "$(cat $queue/max_sectors_kb)" = 512 ]
[ "$(ls /sys/block/$disk/mq)" = "$(printf '0\n1')" ]
ctl query-block-exports | grep -q "/dev/$disk"
verify --do_verify=1

# A file system; nobody removes its disk.
/bin/mke2fs -q -F -t ext4 /dev/$disk
mount -t ext4 /dev/$disk /mnt
cp /bin/busybox /mnt/
refused "export 'e' still in use" ctl block-export-del id=e
umount /mnt
/bin/e2fsck -fn /dev/$disk >/dev/null 2>&1
mount -t ext4 /dev/$disk /mnt
cmp /bin/busybox /mnt/busybox
umount /mnt

# Discards reach the file, and so do zeroes.
[ "$(stat -c %b /tmp/raw)" -gt 1000 ]
/bin/blkdiscard -f /dev/$disk
[ "$(stat -c %b /tmp/raw)" = 0 ]
dd if=/bin/busybox of=/dev/$disk bs=64k count=4 conv=fsync 2>/dev/null
/bin/blkdiscard -f -z -l 262144 /dev/$disk
cmp -n 262144 /dev/$disk /dev/zero

# The size is that of the node.
ctl block_resize node-name=disk size=134217728
until_true grep -qx 262144 /sys/block/$disk/size

# The device is open without being mounted.
exec 9</dev/$disk
refused "export 'e' still in use" ctl block-export-del id=e
exec 9<&-
ctl block-export-del id=e
until_true test ! -e /dev/$disk

# Read-only; removed although it is open.
ctl block-export-add type=ublk id=r node-name=disk
until_true test -b /dev/$disk
[ "$(cat /sys/block/$disk/ro)" = 1 ]
refused 'not permitted' dd if=/dev/zero of=/dev/$disk bs=4k count=1
exec 9</dev/$disk
ctl block-export-del id=r mode=hard
[ "$(wc -c <&9)" = 0 ]
exec 9<&-
until_true test ! -e /dev/$disk

# A read-only node is not writable.
refused 'Cannot export read-only node as writable' \
    ringmill storage-daemon --blockdev $raw,read-only=on --export type=ublk,id=e,node-name=disk,writable=on
refused 'num-queues must be at most 2' \
    ringmill storage-daemon --blockdev null-co,node-name=disk --export type=ublk,id=e,node-name=disk,num-queues=3

# Without the module, and without the privilege.
kill $daemon
wait $daemon
[ ! -e /dev/ublkb0 ] && [ ! -e /dev/ublkc0 ]
chmod 666 /dev/ublk-control /tmp/raw
mkdir -m 777 /tmp/nobody
for sandbox in on off; do
    refused 'ublk devices need root' /usr/bin/setpriv --reuid=65534 --clear-groups \
        ringmill storage-daemon --sandbox $sandbox --blockdev $raw --export type=ublk,id=e,node-name=disk
done
rmmod ublk_drv
refused 'modprobe ublk_drv' ringmill storage-daemon --blockdev $raw --export type=ublk,id=e,node-name=disk
echo all is well
"#);
}

/// Kills, ends, and replaces the daemon, while fio writes and verifies. Each daemon takes the device over.
#[test]
fn a_device_outlives_its_daemons_and_no_request_fails() {
    run(r#"
cp /empty.qcow2 /tmp/disk.qcow2
qcow2=driver=qcow2,node-name=disk,file.driver=file,file.filename=/tmp/disk.qcow2
device=type=ublk,node-name=disk,writable=on,dev-id=0
queues=num-queues=2,iothread.0=io0,iothread.1=io1
zeroes='--blockdev null-co,node-name=disk,size=67108864'
storage --blockdev $qcow2 --export $device,$queues,id=e
serving
verify --do_verify=1

# The device belongs to another daemon, or to another export.
refused '/dev/ublkb0 belongs to process' ringmill storage-daemon $zeroes --export $device,id=e
refused "ublk device 0 is not that of an export 'other'" \
    ringmill storage-daemon $zeroes --export $device,id=other

checked_load 2
for round in $(seq $kills); do
    kill -9 $daemon
    wait $daemon || true
    storage --blockdev $qcow2 --export $device,$queues,id=e
    wait_for_requests 100
done

# A daemon that is ended leaves a device that is in use. It stays for a daemon with other options.
kill $daemon
wait $daemon
grep -q '/dev/ublkb0 is in use and stays' /tmp/log
refused 'it has num-queues=2 and queue-size=64' \
    ringmill storage-daemon --blockdev $qcow2 --export $device,id=e
refused "'writable' was another" ringmill storage-daemon --blockdev $qcow2 \
    --export type=ublk,node-name=disk,dev-id=0,num-queues=2,id=e
storage --blockdev $qcow2 --export $device,$queues,id=e
wait_for_requests 100

serving
for round in $(seq $upgrades); do
    ringmill upgrade $qmp
    wait_for_requests 100
done
end_checked_load
verify --verify_only=1
ctl quit
until_true test ! -e /dev/ublkc0
echo all is well
"#);
}
