//! A guest with several disks of one daemon, which share an I/O thread.

use integration::{Guest, Image, Scratch, ServerCommand};

#[test]
fn one_disk_is_copied_to_another() {
    let scratch = Scratch::new();
    let names = ["source", "target", "third"];
    let images = names.map(|name| Image::filled(&scratch, name, 32));
    let mut server = ServerCommand::new(&scratch).iothread("io0");
    for (name, image) in names.iter().zip(&images) {
        server = server.file(name, image, "aio=io_uring,cache.direct=on");
        server = server.export(name, "iothread=io0");
    }
    let server = server.start();
    let mut guest = Guest::new();
    for name in names {
        guest = guest.disk(server.socket(name));
    }
    let lines = guest.run(
        "for disk in vda vdb vdc; do echo $(cat /sys/block/$disk/serial); done
        dd if=/dev/urandom of=/dev/vda bs=1M count=16 conv=fsync 2>/dev/null
        dd if=/dev/vda of=/dev/vdb bs=1M iflag=direct oflag=direct 2>/dev/null &
        dd if=/dev/zero of=/dev/vdc bs=1M count=16 oflag=direct 2>/dev/null
        wait $!",
    );
    server.stop();
    assert_eq!(lines, names, "serial numbers");
    assert_eq!(images[0].md5(), images[1].md5());
    assert_eq!(images[2].read(0, 16 << 20), vec![0; 16 << 20]);
}
