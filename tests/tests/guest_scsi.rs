//! A guest whose disks are logical units of a virtio-scsi device.

use integration::{Guest, Image, Scratch, ServerCommand};

#[test]
fn data_goes_to_the_image_and_back() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 32);
    let server = ServerCommand::new(&scratch)
        .file("disk", &image, "discard=unmap")
        .export_scsi("scsi", &["disk"], "num-queues=2")
        .start();
    let lines = Guest::new().scsi(server.socket("scsi")).queues(2).run(
        "dd if=/dev/urandom of=/dev/sda bs=64k seek=16 count=64 oflag=direct 2>/dev/null
        dd if=/dev/urandom of=/dev/sda bs=4k seek=3000 count=64 conv=fsync 2>/dev/null
        md5sum </dev/sda",
    );
    server.stop();
    assert_eq!(lines, [format!("{}  -", image.md5())]);
}
