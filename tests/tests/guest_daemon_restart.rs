//! The daemon is ended and started again while a guest writes, as for an update. The guest waits and continues.

use integration::{Guest, Image, Scratch, Server, ServerCommand};

const JOB: &str = "
    verify --do_verify=1
    load
    for restart in 1 2 3; do
        echo restart
        read -r done
        wait_for_requests 300
    done
    verify --verify_only=1
    kill $load
    wait $load || true
    verify --offset=16m --do_verify=1
    md5sum </dev/vda";

fn serve(scratch: &Scratch, image: &Image) -> Server {
    ServerCommand::new(scratch)
        .iothread("io0")
        .file("disk", image, "aio=io_uring,cache.direct=on")
        .export("disk", "num-queues=2,iothread=io0")
        .start()
}

#[test]
fn the_daemon_is_restarted_under_load() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 32);
    let mut server = serve(&scratch, &image);
    let guest = Guest::new().disk(server.socket("disk")).queues(2);
    let mut guest = guest.chardev_options("reconnect-ms=50").boot(JOB);
    for _ in 1..=3 {
        guest.expect("restart");
        server.stop();
        server = serve(&scratch, &image);
        guest.send("done");
    }
    let lines = guest.finish();
    server.stop();
    assert_eq!(lines.last(), Some(&format!("{}  -", image.md5())));
}
