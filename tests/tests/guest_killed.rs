//! QEMU is killed with SIGKILL while its guest writes: the next guest finds what the one before had verified.

use integration::{Guest, Image, Scratch, ServerCommand};

const KILLED: &str = "
    verify --do_verify=1
    load
    echo writing
    wait $load";

#[test]
fn a_guest_is_killed_under_load() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 32);
    let server = ServerCommand::new(&scratch)
        .iothread("io0")
        .file("disk", &image, "aio=io_uring,cache.direct=on")
        .export("disk", "num-queues=2,iothread=io0")
        .start();
    let guest = || Guest::new().disk(server.socket("disk")).queues(2);
    let mut killed = guest().boot(KILLED);
    killed.expect("writing");
    killed.kill();
    guest().run("verify --verify_only=1");
    server.stop();
}
