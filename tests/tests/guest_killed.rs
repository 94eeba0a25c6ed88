//! QEMU is killed with SIGKILL while its guest writes: the next guest finds what the one before had verified.

use integration::{Guest, Image, Scratch, ServerCommand};

const JOB: &str = "
    echo 'which guest?'
    read -r guest
    if [ $guest = 1 ]; then
        verify --do_verify=1
    else
        verify --verify_only=1
    fi
    [ $guest != last ] || exit 0
    load
    echo writing
    wait $load";

#[test]
fn guests_are_killed_under_load() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 32);
    let server = ServerCommand::new(&scratch)
        .iothread("io0")
        .file("disk", &image, "aio=io_uring,cache.direct=on")
        .export("disk", "num-queues=2,iothread=io0")
        .start();
    for name in ["1", "2", "last"] {
        let guest = Guest::new().disk(server.socket("disk")).queues(2);
        let mut guest = guest.boot(JOB);
        guest.expect("which guest?");
        guest.send(name);
        if name == "last" {
            guest.finish();
        } else {
            guest.expect("writing");
            guest.kill();
        }
    }
    server.stop();
}
