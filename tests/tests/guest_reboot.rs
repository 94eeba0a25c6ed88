//! The guest reboots while requests are in flight: the device is reset, first by the firmware's driver, then
//! by the kernel's, and serves on.

use integration::{Guest, Image, Scratch, ServerCommand};

const JOB: &str = "
    echo 'which boot?'
    read -r boot
    if [ $boot = 1 ]; then
        verify --do_verify=1
        load
        reboot -f
        wait $load
        exit 1
    fi
    verify --verify_only=1
    verify --offset=16m --do_verify=1
    md5sum </dev/vda";

#[test]
fn the_guest_reboots_under_load() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 32);
    let server = ServerCommand::new(&scratch)
        .file("disk", &image, "aio=io_uring,cache.direct=on")
        .export("disk", "num-queues=2")
        .start();
    let guest = Guest::new().disk(server.socket("disk")).queues(2).reboots();
    let mut guest = guest.boot(JOB);
    for boot in 1..=2 {
        guest.expect("which boot?");
        guest.send(&boot.to_string());
    }
    let lines = guest.finish();
    server.stop();
    assert_eq!(lines.last(), Some(&format!("{}  -", image.md5())));
}
