//! Block devices of the host by VDUSE: the daemon runs in the guest.

use std::path::Path;

use integration::Initramfs;

use crate::common::host_guest;

/// Runs a job in a guest with iproute2's vdpa.
fn run(job: &str) {
    let vdpa = |files: &mut Initramfs| files.program("/bin/vdpa", Path::new("/usr/sbin/vdpa"));
    host_guest::run(vdpa, job);
}

#[test]
fn a_disk_is_verified_mounted_resized_and_removed() {
    run(r#"
truncate -s 64M /tmp/raw
raw=driver=file,node-name=disk,filename=/tmp/raw,discard=unmap
storage --blockdev $raw \
    --export type=vduse-blk,id=e,node-name=disk,name=d0,serial=abc,writable=on,num-queues=2,iothread.0=io0,iothread.1=io1
until_true vdpa dev add name d0 mgmtdev vduse
serving
queue=/sys/block/$disk/queue
[ "$(cat /sys/block/$disk/size)" = 131072 ]
[ "$(cat /sys/block/$disk/serial)" = abc ]
[ "$(cat $queue/write_cache)" = 'write back' ]
[ "$(ls /sys/block/$disk/mq)" = "$(printf '0\n1')" ]
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

# Off the bus, the device can be removed.
vdpa dev del d0
[ ! -e /dev/$disk ]
ctl block-export-del id=e
until_true test ! -e /dev/vduse/d0

# Read-only.
ctl block-export-add type=vduse-blk id=r node-name=disk name=r0
vdpa dev add name r0 mgmtdev vduse
until_true test -b /dev/$disk
[ "$(cat /sys/block/$disk/ro)" = 1 ]
refused 'not permitted' dd if=/dev/zero of=/dev/$disk bs=4k count=1
cmp -n 262144 /dev/$disk /dev/zero
vdpa dev del r0
ctl block-export-del id=r

refused "Invalid VDUSE device name '../x'" ctl block-export-add type=vduse-blk id=r node-name=disk name=../x
kill $daemon
wait $daemon
rmmod vduse
refused 'modprobe vduse' ringmill storage-daemon --blockdev $raw --export type=vduse-blk,id=e,node-name=disk,name=d0
echo all is well
"#);
}

/// Kills and ends the daemon, while fio writes and verifies. Each daemon continues with the device.
#[test]
fn a_device_outlives_its_daemons_and_no_request_fails() {
    run(r#"
cp /empty.qcow2 /tmp/disk.qcow2
qcow2=driver=qcow2,node-name=disk,file.driver=file,file.filename=/tmp/disk.qcow2
device=type=vduse-blk,node-name=disk,name=d0,writable=on
queues=num-queues=2,iothread.0=io0,iothread.1=io1
zeroes="--object iothread,id=io0 --object iothread,id=io1 --blockdev null-co,node-name=disk,size=67108864"
# Another user has taken the names of the daemon's folders.
mkdir /dev/shm/ringmill-vduse-0 /dev/shm/ringmill-0
chown 65534 /dev/shm/ringmill-vduse-0 /dev/shm/ringmill-0
storage --blockdev $qcow2 --export $device,$queues,id=e
until_true vdpa dev add name d0 mgmtdev vduse
serving
verify --do_verify=1
refused '/dev/vduse/d0 belongs to another process' ringmill storage-daemon $zeroes --export $device,$queues,id=e

checked_load 2
for round in $(seq $kills); do
    kill -9 $daemon
    wait $daemon || true
    storage --blockdev $qcow2 --export $device,$queues,id=e
    wait_for_requests 100
done
serving
for round in $(seq $upgrades); do
    ringmill upgrade $qmp
    wait_for_requests 100
done

# A daemon that is ended leaves a device that is in use, for a daemon with the same options.
ctl quit
until_true grep -q '/dev/vduse/d0 is on the vDPA bus and stays' /tmp/log
refused 'it has num-queues=2, queue-size=256, logical-block-size=512 and writable=on' \
    ringmill storage-daemon $zeroes --export $device,id=e
record=$(echo /dev/shm/ringmill-vduse-0-*/d0)
mv $record /tmp/record
refused 'there is no record of its requests' ringmill storage-daemon $zeroes --export $device,$queues,id=e
mv /tmp/record $record
storage --blockdev $qcow2 --export $device,$queues,id=e
wait_for_requests 100
end_checked_load
verify --verify_only=1

# The driver leaves while there is no daemon: its reset is the first message of the next one.
serving
kill -9 $daemon
wait $daemon || true
vdpa dev del d0 &
leaving=$!
storage --blockdev $qcow2 --export $device,$queues,id=e
wait $leaving
[ ! -e /dev/$disk ]
until_true test -S $qmp
vdpa dev add name d0 mgmtdev vduse
until_true test -b /dev/$disk
verify --verify_only=1
vdpa dev del d0
ctl quit
until_true test ! -e /dev/vduse/d0
[ ! -e $record ]
grep 'no journals of qcow2 images' /tmp/log && exit 1
echo all is well
"#);
}
