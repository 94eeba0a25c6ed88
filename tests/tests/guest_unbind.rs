//! The guest unbinds its driver from the device, with requests in flight, and binds it again.

use integration::{Guest, Image, Scratch, ServerCommand};

const JOB: &str = "
    verify --do_verify=1
    device=$(basename $(readlink /sys/block/vda/device))
    for round in 1 2 3; do
        load
        echo $device >/sys/bus/virtio/drivers/virtio_blk/unbind
        wait $load && { echo 'fio did not notice'; exit 1; }
        [ ! -e /sys/block/vda ]
        echo $device >/sys/bus/virtio/drivers/virtio_blk/bind
        until [ -b /dev/vda ]; do sleep 0.05; done
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
    let lines = Guest::new().disk(server.socket("disk")).queues(2).run(JOB);
    server.stop();
    assert_eq!(lines, [format!("{}  -", image.md5())]);
}
