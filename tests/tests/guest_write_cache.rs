//! The guest switches the disk's write cache off and on (`VIRTIO_BLK_F_CONFIG_WCE`).

use integration::{BlkClient, Guest, Image, Scratch, ServerCommand};

const JOB: &str = "
    cache() { cat /sys/block/vda/cache_type; }
    cache
    echo 'write through' >/sys/block/vda/cache_type
    cache
    dd if=/dev/urandom of=/dev/vda bs=64k count=64 oflag=direct 2>/dev/null
    echo 'write back' >/sys/block/vda/cache_type
    cache
    dd if=/dev/urandom of=/dev/vda bs=64k seek=64 count=64 conv=fsync 2>/dev/null
    echo 'write through' >/sys/block/vda/cache_type
    echo kill && read -r done
    dd if=/dev/urandom of=/dev/vda bs=64k seek=128 count=16 oflag=direct 2>/dev/null
    cache
    md5sum </dev/vda";

/// The daemon is killed after the guest switched the cache off. The guest neither repeats the mode nor flushes.
#[test]
fn the_write_cache_is_switched() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 16);
    let start = || ServerCommand::new(&scratch).file("disk", &image, "").export("disk", "").start();
    let server = start();
    let guest = Guest::new().disk(server.socket("disk")).chardev_options("reconnect-ms=10");
    let mut guest = guest.boot(JOB);
    guest.expect("kill");
    server.kill();
    let server = start();
    guest.send("done");
    let lines = guest.finish();
    // Reads the device's state before any queue runs.
    let next = BlkClient::connect(&server.socket("disk"), 1, 16).expect("a device");
    let config = next.config().expect("a configuration space");
    drop(next);
    server.stop();
    let sum = format!("{}  -", image.md5());
    let modes = ["write back", "write through", "write back", "kill", "write through"];
    assert_eq!(lines, [&modes[..], &[&sum]].concat());
    assert_eq!(config.writeback, 0, "the daemon that was started believes in a cache");
}
