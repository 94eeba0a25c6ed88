//! A file system in a guest: made and filled in one boot; in the next one, served by another daemon, every
//! file is as it was and the file system is sound.

use std::process::Command;

use integration::{Guest, Image, Scratch, ServerCommand, tool};

const FILL: &str = "
    /bin/mke2fs -q -t ext4 /dev/vda
    mount -t ext4 /dev/vda /mnt
    for i in 1 2 3 4 5 6 7 8; do
        mkdir /mnt/$i
        dd if=/dev/urandom of=/mnt/$i/large bs=64k count=$((i * 5)) 2>/dev/null
        for j in 1 2 3 4 5 6 7 8; do
            head -c $((i * j * 111)) /dev/urandom >/mnt/$i/small$j
        done
    done
    rm -r /mnt/3
    cd /mnt
    find . -type f -exec md5sum {} + >/tmp/sums
    mv /tmp/sums /mnt/sums
    cd /
    umount /mnt
    e2fsck -fn /dev/vda 2>/dev/null >/tmp/fsck || { cat /tmp/fsck; exit 1; }";

const CHECK: &str = "
    e2fsck -fn /dev/vda 2>/dev/null >/tmp/fsck || { cat /tmp/fsck; exit 1; }
    mount -t ext4 /dev/vda /mnt
    cd /mnt
    md5sum -c sums >/tmp/sums || { cat /tmp/sums; exit 1; }
    wc -l <sums
    cd /
    umount /mnt";

#[test]
fn a_file_system_survives() {
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "disk.img", 64);
    for (job, output) in [(FILL, &[] as &[&str]), (CHECK, &["63"])] {
        let server = ServerCommand::new(&scratch)
            .file("disk", &image, "discard=unmap")
            .export("disk", "num-queues=2")
            .start();
        let lines = Guest::new().disk(server.socket("disk")).queues(2).run(job);
        server.stop();
        assert_eq!(lines, output);
    }
    let fsck = Command::new(tool("e2fsck")).arg("-fn").arg(image.path()).output();
    let fsck = fsck.expect("e2fsck runs");
    assert!(fsck.status.success(), "{fsck:?}");
}
