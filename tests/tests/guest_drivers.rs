//! One guest, with a disk for each set of features that differs from what Linux uses by default.

use integration::{Guest, Image, Scratch, ServerCommand};

/// `VIRTIO_F_RING_INDIRECT_DESC`.
const INDIRECT: usize = 28;
/// `VIRTIO_F_RING_EVENT_IDX`.
const EVENT_IDX: usize = 29;
/// `VIRTIO_F_VERSION_1`.
const VERSION_1: usize = 32;

/// The options of QEMU's device, the size of what each of two jobs writes and reads, MiB, and feature bits.
type Driver = (&'static str, u32, &'static [(usize, char)]);

const DRIVERS: [Driver; 4] = [
    ("disable-modern=on,disable-legacy=off", 6, &[(VERSION_1, '0')]),
    ("indirect_desc=off,event_idx=off", 6, &[(INDIRECT, '0'), (EVENT_IDX, '0'), (VERSION_1, '1')]),
    ("queue-size=4", 6, &[(INDIRECT, '1'), (EVENT_IDX, '1')]),
    ("queue-size=1024", 16, &[(INDIRECT, '1'), (EVENT_IDX, '1')]),
];

#[test]
fn legacy_plain_small_and_large_queues() {
    let scratch = Scratch::new();
    let images: Vec<_> = (0..DRIVERS.len())
        .map(|nth| Image::filled(&scratch, &format!("disk{nth}.img"), 32))
        .collect();
    let mut server = ServerCommand::new(&scratch).iothread("io0");
    for (nth, image) in images.iter().enumerate() {
        let id = format!("disk{nth}");
        server = server
            .file(&id, image, "aio=io_uring,cache.direct=on,discard=unmap")
            .export(&id, "num-queues=2,iothread=io0");
    }
    let server = server.start();
    let (mut guest, mut job) = (Guest::new().queues(2), String::new());
    for (nth, ((options, mib, _), name)) in DRIVERS.iter().zip('a'..).enumerate() {
        guest = guest.disk_with(server.socket(&format!("disk{nth}")), options);
        job += &format!(
            "disk=vd{name}
            cat /sys/block/vd{name}/device/features
            verify --bsrange=4k-128k --iodepth=256 --size={mib}m --numjobs=2 --offset_increment=16m \
                --do_verify=1
            /bin/blkdiscard -o $((8 << 20)) -l $((4 << 20)) /dev/vd{name}
            md5sum </dev/vd{name}\n"
        );
    }
    let lines = guest.run(&job);
    server.stop();
    for ((lines, image), (options, _, bits)) in lines.chunks(2).zip(&images).zip(DRIVERS) {
        for &(bit, value) in bits {
            let found = lines[0].chars().nth(bit);
            assert_eq!(found, Some(value), "{options}: feature bit {bit}: {lines:?}");
        }
        assert_eq!(lines[1], format!("{}  -", image.md5()), "{options}");
    }
    assert_eq!(lines.len(), 2 * DRIVERS.len());
}
