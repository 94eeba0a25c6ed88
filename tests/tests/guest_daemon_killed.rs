//! The daemon is killed with SIGKILL, again and again, while a guest writes and reads back with checksums. What was
//! in flight is done by the next daemon: the guest waits, sees no error, and finds each block as it wrote it.
//!
//! `RINGMILL_KILLS` says how often; 20 times when it is not set.

use integration::{Guest, Image, Scratch, Server, ServerCommand};

/// How many requests pass before a kill: not the same number each time, so that it comes at any instant.
fn requests_before(kill: usize) -> usize {
    [20, 150, 1, 70, 33, 400, 5][kill % 7] + kill
}

fn kills() -> usize {
    let kills = std::env::var("RINGMILL_KILLS").ok();
    kills.map_or(20, |kills| kills.parse().expect("RINGMILL_KILLS is a number"))
}

fn serve(scratch: &Scratch, image: &Image, queues: u32, file: &str) -> Server {
    ServerCommand::new(scratch)
        .iothread("io0")
        .iothread("io1")
        .file("disk", image, file)
        .export("disk", &format!("num-queues={queues},iothread.0=io0,iothread.1=io1"))
        .start()
}

fn survives(queues: u32, file: &str, kills: usize) {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 32);
    let job = format!(
        "verify --do_verify=1
        checked_load {queues}
        while echo 'how many?' && read -r requests && [ $requests != 0 ]; do
            wait_for_requests $requests
            echo kill
        done
        end_checked_load
        verify --verify_only=1
        md5sum </dev/vda
        dmesg | grep -E 'I/O error|vda.*(timeout|reset)' || true"
    );
    let mut server = serve(&scratch, &image, queues, file);
    let guest = Guest::new().disk(server.socket("disk")).queues(queues).with_fio();
    let mut guest = guest.chardev_options("reconnect-ms=10").boot(&job);
    for kill in 0..kills {
        guest.expect("how many?");
        guest.send(&requests_before(kill).to_string());
        guest.expect("kill");
        server.kill();
        server = serve(&scratch, &image, queues, file);
    }
    guest.expect("how many?");
    guest.send("0");
    let lines = guest.finish();
    server.stop();
    assert_eq!(lines.last(), Some(&format!("{}  -", image.md5())));
}

#[test]
fn the_daemon_is_killed_under_load_on_one_queue() {
    survives(1, "aio=io_uring,cache.direct=on", kills() / 2);
}

#[test]
fn the_daemon_is_killed_under_load_on_four_queues() {
    survives(4, "aio=io_uring,cache.direct=on", kills() - kills() / 2);
}
