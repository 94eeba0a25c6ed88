//! The guest's driver lets go of the device and takes it again while requests are in flight.

use integration::{Guest, Image, Scratch, ServerCommand};

const JOB: &str = "
    verify() {
        fio --minimal --name=job --filename=/dev/vda --direct=1 --ioengine=libaio --iodepth=16 \
            --rw=randwrite --bs=16k --size=8m --verify=crc32c --verify_fatal=1 --randseed=7 \"$@\" \
            >/tmp/fio || { cat /tmp/fio; exit 1; }
    }
    requests() { awk '{ print $1 + $5 }' /sys/block/vda/stat; }
    verify --do_verify=1
    device=$(basename $(readlink /sys/block/vda/device))
    for round in 1 2 3 4 5; do
        fio --minimal --name=load --filename=/dev/vda --direct=1 --ioengine=libaio --iodepth=32 \
            --rw=randrw --bs=4k --offset=16m --size=16m --time_based --runtime=60 >/dev/null 2>&1 &
        before=$(requests)
        until [ $(requests) -gt $((before + 200)) ]; do :; done
        echo $device >/sys/bus/virtio/drivers/virtio_blk/unbind
        wait $! && { echo 'fio did not notice'; exit 1; }
        [ ! -e /sys/block/vda ]
        echo $device >/sys/bus/virtio/drivers/virtio_blk/bind
        until [ -b /dev/vda ]; do :; done
        verify --verify_only=1
    done
    verify --offset=16m --do_verify=1
    md5sum </dev/vda";

#[test]
fn the_driver_is_unbound_and_bound_under_load() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 32);
    let server = ServerCommand::new(&scratch)
        .file("disk", &image, "aio=io_uring,cache.direct=on")
        .export("disk", "num-queues=2")
        .start();
    let lines = Guest::new().disk(server.socket("disk")).queues(2).with_fio().run(JOB);
    server.stop();
    assert_eq!(lines, [format!("{}  -", image.md5())]);
}
