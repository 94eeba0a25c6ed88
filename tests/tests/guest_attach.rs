//! `ringmill attach` and `detach`: the daemon runs in the guest.

use crate::guest_ublk::run;

/// What jobs have in common.
const COMMON: &str = r#"
mkdir -p /run /var/tmp
records=/run/ringmill-attach

# nothing_left: no device, no daemon's file, and no temporary file. Empty folders go with the next `attach`.
nothing_left() {
    [ ! -e /dev/ublkb0 ] && [ ! -e /dev/ublkc0 ] && [ "$(find $records ! -type d)" = $records/lock ] && [ -z "$(ls /var/tmp)" ]
}

# no_nbd: the same, of the kernel's NBD client.
no_nbd() {
    nothing_left && [ ! -e /sys/block/nbd0/pid ] && [ ! -e /sys/block/nbd1/pid ]
}

# table FILE: writes a table with a partition of 65536 sectors.
table() {
    printf '\000\000\000\000\203\000\000\000\000\010\000\000\000\000\001\000' |
        dd of=$1 bs=1 seek=446 conv=notrunc 2>/dev/null
    printf '\125\252' | dd of=$1 bs=1 seek=510 conv=notrunc 2>/dev/null
}
"#;

/// The kernel's NBD client in the place of ublk.
const NBD: &str = r#"
cd /tmp
insmod /lib/other-modules/nbd.ko
cp /empty.qcow2 nbd.qcow2
[ "$(ringmill attach nbd.qcow2 2>err)" = /dev/nbd0 ]
grep -q 'there is no ublk' err
queue=/sys/block/nbd0/queue
[ "$(cat /sys/block/nbd0/size)" = 131072 ]
[ "$(cat $queue/write_cache)" = 'write back' ]
[ "$(cat $queue/fua)" = 1 ]
[ "$(cat $queue/rotational)" = 0 ]
[ "$(cat $queue/discard_max_bytes)" -gt 0 ]
ringmill list | grep -q '  nbd  */tmp/nbd.qcow2  */dev/nbd0$'
refused 'the kernel has no ublk' ringmill attach raw --as ublk
refused '/tmp/nbd.qcow2 is attached already: /dev/nbd0, by process' ringmill attach nbd.qcow2
/bin/mke2fs -q -F -t ext4 /dev/nbd0
mount -t ext4 /dev/nbd0 /mnt
cp /bin/busybox /mnt/
sync
refused '/dev/nbd0 is mounted on /mnt' ringmill detach /dev/nbd0

# Upgraded, and killed while it is written to. Its users only wait.
ringmill upgrade $records/*.qmp >/dev/null
cmp /bin/busybox /mnt/busybox
dd if=/dev/zero of=/mnt/waits bs=64k count=200 conv=fsync 2>/dev/null &
waits=$!
kill -9 $(cat $records/*.pid)
refused '/dev/nbd0 waits' ringmill detach nbd.qcow2
ringmill list | grep -q '^killed  *nbd  */tmp/nbd.qcow2  */dev/nbd0$'
refused '/dev/nbd0 (writable) waits' ringmill attach nbd.qcow2 --read-only
[ "$(ringmill attach nbd.qcow2)" = /dev/nbd0 ]
wait $waits
echo 3 >/proc/sys/vm/drop_caches
cmp -n 13107200 /mnt/waits /dev/zero
cmp /bin/busybox /mnt/busybox
umount /mnt
ringmill detach nbd.qcow2
no_nbd

# The same after a command has moved the disk to another image.
ringmill attach nbd.qcow2 --sandbox on,paths=/tmp >/dev/null 2>&1
ringmill ctl $records/*.qmp blockdev-snapshot-sync node-name=disk0 snapshot-node-name=over \
    snapshot-file=/tmp/nbd-over.qcow2 format=qcow2 >/dev/null
mount -t ext4 /dev/nbd0 /mnt
cp /bin/busybox /mnt/moved
sync
kill -9 $(cat $records/*.pid)
refused 'Go on with it' ringmill detach nbd.qcow2
[ "$(ringmill attach nbd.qcow2)" = /dev/nbd0 ]
echo 3 >/proc/sys/vm/drop_caches
cmp /bin/busybox /mnt/moved
umount /mnt
ringmill detach nbd-over.qcow2
no_nbd
ringmill check nbd.qcow2 >/dev/null

# Read-only, and beside it a device with its own writes. Partitions are there at once.
[ "$(ringmill attach nbd.qcow2 --read-only --as nbd 2>err)" = /dev/nbd0 ]
[ ! -s err ]
[ "$(cat /sys/block/nbd0/ro)" = 1 ]
[ "$(ringmill attach raw --snapshot 2>/dev/null)" = /dev/nbd1 ]
[ -b /dev/nbd1p1 ]
before=$(md5sum <raw)
dd if=/dev/zero of=/dev/nbd1 bs=1M count=8 conv=fsync 2>/dev/null
[ "$(md5sum <raw)" = "$before" ]
mount -t ext4 -o ro,noload /dev/nbd0 /mnt
cmp /bin/busybox /mnt/busybox
umount /mnt
ringmill detach /dev/nbd0
# A snapshot goes with its daemon.
kill -9 $(cat $records/*raw*.pid)
until_true no_nbd

# In the foreground, and given up after a kill.
ringmill attach -f new.qcow2 >out 2>err &
daemon=$!
until_true grep -qx /dev/nbd0 out
kill $daemon
wait $daemon
no_nbd
ringmill attach raw >/dev/null 2>&1
kill -9 $(cat $records/*.pid)
ringmill detach raw --force
no_nbd
"#;

#[test]
fn an_image_is_attached_mounted_and_detached() {
    let job = r#"
cp /empty.qcow2 /tmp/disk.qcow2
[ "$(ringmill attach /tmp/disk.qcow2)" = /dev/ublkb0 ]
/bin/mke2fs -q -F -t ext4 /dev/ublkb0
mount -t ext4 /dev/ublkb0 /mnt
cp /bin/busybox /mnt/

# Once for writing, whatever the name; nothing is left of the attempt.
refused '/tmp/disk.qcow2 is attached already: /dev/ublkb0, by process' ringmill attach /tmp/disk.qcow2
ln /tmp/disk.qcow2 /tmp/link.qcow2
for mode in --locking=off --read-only --snapshot; do
    refused '/tmp/link.qcow2 is attached already: /dev/ublkb0, by process' ringmill attach /tmp/link.qcow2 $mode
done
[ ! -e /dev/ublkc1 ] && [ -z "$(ls /var/tmp)" ]

# In use.
refused '/dev/ublkb0 is mounted on /mnt' ringmill detach /dev/ublkb0
refused '/dev/ublkb0 is mounted on /mnt' ringmill detach /tmp/disk.qcow2
cmp /bin/busybox /mnt/busybox
ringmill upgrade $records/*.qmp >/dev/null
umount /mnt
exec 9</dev/ublkb0
refused '/dev/ublkb0 is open' ringmill detach /dev/ublkb0
exec 9<&-
cd /tmp
# Two commands at once: one of them detaches.
for n in 1 2; do
    { ringmill detach link.qcow2 && echo detached; } >out$n 2>&1 &
done
wait
[ "$(cat out1 out2 | grep -cx detached)" = 1 ]
[ "$(cat out1 out2 | grep -c 'not attached')" = 1 ]
nothing_left
ringmill check /tmp/disk.qcow2 >/dev/null
refused 'not attached' ringmill detach /dev/ublkb0

# Read-only, with what was written.
mount -t ext4 -o ro,noload $(ringmill attach disk.qcow2 --read-only) /mnt
[ "$(cat /sys/block/ublkb0/ro)" = 1 ]
cmp /bin/busybox /mnt/busybox
refused 'not permitted' dd if=/dev/zero of=/dev/ublkb0 bs=4k count=1
umount /mnt
ringmill detach disk.qcow2

# Snapshots: several, of which none is seen in the image.
before=$(md5sum <disk.qcow2)
[ "$(ringmill attach disk.qcow2 --snapshot)" = /dev/ublkb0 ]
[ "$(ringmill attach disk.qcow2 --snapshot)" = /dev/ublkb1 ]
refused 'disk.qcow2 is attached already: /dev/ublkb0, by process' ringmill attach disk.qcow2
dd if=/dev/zero of=/dev/ublkb0 bs=1M count=8 conv=fsync 2>/dev/null
cmp -n 8388608 /dev/zero /dev/ublkb0
mount -t ext4 /dev/ublkb1 /mnt
cmp /bin/busybox /mnt/busybox
umount /mnt
refused 'Name the device: /dev/ublkb0, /dev/ublkb1' ringmill detach disk.qcow2
for monitor in $records/*.qmp; do
    refused 'cannot be handed over: it has recovery=off' ringmill upgrade $monitor
done
ringmill detach /dev/ublkb0
ringmill detach /dev/ublkb1
nothing_left
[ "$(md5sum <disk.qcow2)" = "$before" ]

# Partitions are there at once.
truncate -s 64M raw
table raw
[ "$(ringmill attach raw --iothreads 2)" = /dev/ublkb0 ]
[ -b /dev/ublkb0p1 ]
[ "$(cat /sys/block/ublkb0/ublkb0p1/size)" = 65536 ]
/bin/mke2fs -q -F -t ext4 /dev/ublkb0p1
mount -t ext4 /dev/ublkb0p1 /mnt
refused '/dev/ublkb0 is mounted on /mnt' ringmill detach raw

# As soon as it is unmounted.
ringmill detach raw --lazy >out
grep -qx '/dev/ublkb0 is mounted on /mnt, and is detached when it is not in use' out
cp /bin/busybox /mnt/
umount /mnt
until_true nothing_left
mount -t ext4 -o ro,noload $(ringmill attach raw --read-only)p1 /mnt
cmp /bin/busybox /mnt/busybox
umount /mnt
ringmill detach raw

# In the foreground, an image that is made.
ringmill attach -f new.qcow2 --size 8M >out 2>err &
daemon=$!
until_true grep -qx /dev/ublkb0 out
[ "$(cat /sys/block/ublkb0/size)" = 16384 ]
kill $daemon
wait $daemon
nothing_left

# A device in use stays, and waits for the same command.
ringmill attach -f new.qcow2 >out 2>err &
daemon=$!
until_true grep -qx /dev/ublkb0 out
exec 9</dev/ublkb0
kill $daemon
if wait $daemon; then exit 1; fi
exec 9<&-
grep -q '/dev/ublkb0 is open, and stays' err
grep -q 'Go on with it: ringmill attach -f new.qcow2' err
[ "$(ringmill attach new.qcow2)" = /dev/ublkb0 ]
ringmill detach new.qcow2
nothing_left

# Without a place for the device's name.
refused '/dev/ublkb0 is attached, and printing that failed' sh -c 'ringmill attach new.qcow2 >/dev/full'
ringmill detach new.qcow2
refused "cannot print the device's name" sh -c 'ringmill attach -f new.qcow2 >/dev/full'
nothing_left

# udev has the last word: the command waits for it.
mkdir -p /run/udev/data
: >/run/udev/control
ringmill attach raw >out &
waiting=$!
until_true test -b /dev/ublkb0p1
# The shell looks for the name at each attempt.
until_true eval 'ls $records/attach-raw-*.pid >/dev/null'
[ ! -s out ]
: >/run/udev/data/b$(cat /sys/block/ublkb0/dev)
[ ! -s out ]
: >/run/udev/data/b$(cat /sys/block/ublkb0/ublkb0p1/dev)
wait $waiting
[ "$(cat out)" = /dev/ublkb0 ]
ringmill detach raw
rm -r /run/udev

# Without an image, without the privilege, without the module.
refused 'no such image' ringmill attach missing
refused 'ublk devices need root' /usr/bin/setpriv --reuid=65534 --clear-groups ringmill attach raw
rmmod ublk_drv
refused 'modprobe ublk_drv' ringmill attach raw
nothing_left
"#;
    run(&[COMMON, job, NBD, "echo all is well\n"].concat());
}

/// A daemon is killed. The same command continues with the device. Its users only wait.
#[test]
fn a_killed_attachment_is_continued() {
    let job = r#"
cp /empty.qcow2 /tmp/disk.qcow2
cd /tmp
device=$(ringmill attach disk.qcow2)
/bin/mke2fs -q -F -t ext4 $device
mount -t ext4 $device /mnt
for round in 1 2 3; do
    cp /bin/busybox /mnt/$round
    sync
    kill -9 $(cat $records/*.pid)
    dd if=/bin/busybox of=/mnt/waits$round bs=64k conv=fsync 2>/dev/null &
    waits=$!
    refused 'waits: its daemon was killed' ringmill detach $device
    refused 'ringmill attach disk.qcow2' ringmill detach $device --lazy
    [ "$(ringmill attach disk.qcow2)" = $device ]
    wait $waits
    cmp /bin/busybox /mnt/$round
    cmp /bin/busybox /mnt/waits$round
done

# The device waits for its image, whatever has the image's name by now, and whatever name the image has.
sync
kill -9 $(cat $records/*.pid)
mv disk.qcow2 old.qcow2
refused 'disk.qcow2 was replaced: /dev/ublkb0 belongs to inode' ringmill attach disk.qcow2 --size 64M
cp old.qcow2 disk.qcow2
for mode in --size=64M --read-only; do
    refused 'disk.qcow2 was replaced: /dev/ublkb0 belongs to inode' ringmill attach disk.qcow2 $mode
done
refused 'ringmill detach /dev/ublkb0' ringmill attach disk.qcow2
refused 'old.qcow2 is attached already: /dev/ublkb0 (writable, as /tmp/disk.qcow2) waits' ringmill attach old.qcow2
mv old.qcow2 disk.qcow2
ln disk.qcow2 link.qcow2
for other in 'link.qcow2 --locking=off' 'disk.qcow2 --read-only' 'link.qcow2 --snapshot'; do
    refused 'Go on with that device: ringmill attach disk.qcow2' ringmill attach $other
done
[ ! -e /dev/ublkc1 ] && [ -z "$(ls /var/tmp)" ]
ln -s disk.qcow2 symbolic.qcow2
[ "$(ringmill attach symbolic.qcow2)" = $device ]
cmp /bin/busybox /mnt/waits3
umount /mnt
ringmill detach $device
nothing_left
ringmill check disk.qcow2 >/dev/null

# A command moves the disk to another image. The next daemon goes on with that image, under either name.
device=$(ringmill attach disk.qcow2 --sandbox on,paths=/tmp)
mount -t ext4 $device /mnt
ringmill ctl $records/*.qmp blockdev-snapshot-sync node-name=disk0 snapshot-node-name=over \
    snapshot-file=/tmp/over.qcow2 format=qcow2 >/dev/null
ringmill list | grep -q "^[0-9].* /tmp/over.qcow2  *$device\$"
for name in disk.qcow2 over.qcow2; do
    cp /bin/busybox /mnt/moved-$name
    sync
    kill -9 $(cat $records/*.pid)
    dd if=/bin/busybox of=/mnt/waits-$name bs=64k conv=fsync 2>/dev/null &
    waits=$!
    # Neither file of the disk may be another one.
    for file in disk.qcow2 over.qcow2; do
        mv $file away
        refused "/tmp/$file was replaced: $device belongs to inode" ringmill attach $name
        cp away $file
        refused "/tmp/$file was replaced: $device belongs to inode" ringmill attach $name
        mv away $file
    done
    ringmill list | grep -q "^killed .* /tmp/over.qcow2  *$device\$"
    [ "$(ringmill attach $name)" = $device ]
    wait $waits
    echo 3 >/proc/sys/vm/drop_caches
    cmp /bin/busybox /mnt/moved-$name
    cmp /bin/busybox /mnt/waits-$name
    ringmill upgrade $records/*.qmp >/dev/null
done
umount /mnt
ringmill detach over.qcow2
nothing_left
mount -t ext4 -o ro,noload $(ringmill attach over.qcow2 --read-only) /mnt
cmp /bin/busybox /mnt/waits-over.qcow2
umount /mnt
ringmill detach over.qcow2
ringmill check over.qcow2 >/dev/null

# Thrown away, whatever has become of the image.
ringmill attach disk.qcow2 >/dev/null
kill -9 $(cat $records/*.pid)
mv disk.qcow2 old.qcow2
refused '/dev/ublkb0 waits' ringmill detach disk.qcow2
ringmill detach disk.qcow2 --force
mv old.qcow2 disk.qcow2
until_true nothing_left

# Stopped by a signal, or without the process that has the privileges.
ringmill attach disk.qcow2 >/dev/null
cp $records/*.json /tmp/
kill -STOP $(cat $records/*.pid)
refused 'is stopped by a signal' ringmill detach disk.qcow2
ringmill detach disk.qcow2 --force
until_true nothing_left
ringmill attach disk.qcow2 >/dev/null
kill -9 $(pidof spawner)
ringmill detach disk.qcow2 --force
until_true nothing_left

# What an 'attach' has left that was killed in the middle.
mv /tmp/*.json $records/
refused 'not attached any more' ringmill detach disk.qcow2
nothing_left

# What was flushed is there.
mount -t ext4 $(ringmill attach disk.qcow2) /mnt
cmp /bin/busybox /mnt/waits3
exec 9</mnt/waits3
ringmill detach disk.qcow2 --force
exec 9<&-
umount /mnt
until_true nothing_left

# A snapshot goes with its daemon.
ringmill attach disk.qcow2 --snapshot >/dev/null
kill -9 $(cat $records/*.pid)
until_true test ! -e /dev/ublkb0
refused 'not attached any more' ringmill detach /dev/ublkb0
nothing_left
echo all is well
"#;
    run(&[COMMON, job].concat());
}
