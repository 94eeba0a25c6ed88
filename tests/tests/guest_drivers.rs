//! Guests whose drivers use other features of the device than Linux's default.

use integration::{Guest, Image, Scratch, ServerCommand};

/// `mib`: how much each of two jobs writes and reads.
fn works(device_options: &str, mib: u32, feature_bits: &[(usize, char)]) {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 32);
    let server = ServerCommand::new(&scratch)
        .iothread("io0")
        .file("disk", &image, "aio=io_uring,cache.direct=on,discard=unmap")
        .export("disk", "num-queues=2,iothread=io0")
        .start();
    let guest = Guest::new().disk(server.socket("disk")).device_options(device_options);
    let lines = guest.queues(2).with_fio().run(&format!(
        "cat /sys/block/vda/device/features
        verify --bsrange=4k-128k --iodepth=256 --size={mib}m --numjobs=2 --offset_increment=16m \
            --do_verify=1
        /bin/blkdiscard -o $((8 << 20)) -l $((4 << 20)) /dev/vda
        md5sum </dev/vda"
    ));
    server.stop();
    for &(bit, value) in feature_bits {
        assert_eq!(lines[0].chars().nth(bit), Some(value), "feature bit {bit}: {lines:?}");
    }
    assert_eq!(lines[1], format!("{}  -", image.md5()));
}

/// `VIRTIO_F_RING_INDIRECT_DESC`.
const INDIRECT: usize = 28;
/// `VIRTIO_F_RING_EVENT_IDX`.
const EVENT_IDX: usize = 29;
/// `VIRTIO_F_VERSION_1`.
const VERSION_1: usize = 32;

#[test]
fn the_legacy_interface() {
    works("disable-modern=on,disable-legacy=off", 6, &[(VERSION_1, '0')]);
}

#[test]
fn without_indirect_descriptors_and_event_index() {
    let bits = [(INDIRECT, '0'), (EVENT_IDX, '0'), (VERSION_1, '1')];
    works("indirect_desc=off,event_idx=off", 6, &bits);
}

#[test]
fn the_smallest_queue() {
    works("queue-size=4", 6, &[(INDIRECT, '1'), (EVENT_IDX, '1')]);
}

#[test]
fn the_largest_queue() {
    works("queue-size=1024", 16, &[(INDIRECT, '1'), (EVENT_IDX, '1')]);
}
