//! The guest switches the disk's write cache off and on (`VIRTIO_BLK_F_CONFIG_WCE`).

use integration::{Guest, Image, Scratch, ServerCommand};

const JOB: &str = "
    cache() { cat /sys/block/vda/cache_type; }
    cache
    echo 'write through' >/sys/block/vda/cache_type
    cache
    dd if=/dev/urandom of=/dev/vda bs=64k count=64 oflag=direct 2>/dev/null
    echo 'write back' >/sys/block/vda/cache_type
    cache
    dd if=/dev/urandom of=/dev/vda bs=64k seek=64 count=64 conv=fsync 2>/dev/null
    md5sum </dev/vda";

#[test]
fn the_write_cache_is_switched() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 16);
    let server = ServerCommand::new(&scratch).file("disk", &image, "").export("disk", "").start();
    let lines = Guest::new().disk(server.socket("disk")).run(JOB);
    server.stop();
    let sum = format!("{}  -", image.md5());
    assert_eq!(lines, ["write back", "write through", "write back", &sum]);
}
