//! The daemon gives place to another process, again and again, while a guest writes and reads back with
//! checksums: the guest sees no error, and finds each block as it wrote it.
//!
//! `RINGMILL_UPGRADES` says how often; 20 times when it is not set.

use integration::{Guest, Image, Scratch, Server, ServerCommand};

/// How many requests pass before an upgrade: not the same number each time, so that it comes at any
/// instant.
fn requests_before(upgrade: usize) -> usize {
    [20, 150, 1, 70, 33, 400, 5][upgrade % 7] + upgrade
}

fn upgrades() -> usize {
    let upgrades = std::env::var("RINGMILL_UPGRADES").ok();
    upgrades.map_or(20, |upgrades| upgrades.parse().expect("RINGMILL_UPGRADES is a number"))
}

fn serve(scratch: &Scratch, image: &Image, queues: u32) -> Server {
    ServerCommand::new(scratch)
        .iothread("io0")
        .iothread("io1")
        .file("disk", image, "aio=io_uring,cache.direct=on")
        .export("disk", &format!("num-queues={queues},iothread.0=io0,iothread.1=io1"))
        .start()
}

fn survives(queues: u32, upgrades: usize) {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 32);
    let job = format!(
        "verify --do_verify=1
        checked_load {queues}
        while echo 'how many?' && read -r requests && [ $requests != 0 ]; do
            wait_for_requests $requests
            echo upgrade
        done
        end_checked_load
        verify --verify_only=1
        md5sum </dev/vda
        dmesg | grep -E 'I/O error|vda.*(timeout|reset)' || true"
    );
    let mut server = serve(&scratch, &image, queues);
    let guest = Guest::new().disk(server.socket("disk")).queues(queues).with_fio();
    let mut guest = guest.boot(&job);
    for upgrade in 0..upgrades {
        guest.expect("how many?");
        guest.send(&requests_before(upgrade).to_string());
        guest.expect("upgrade");
        server.upgrade();
    }
    guest.expect("how many?");
    guest.send("0");
    let lines = guest.finish();
    server.stop();
    assert_eq!(lines.last(), Some(&format!("{}  -", image.md5())));
}

#[test]
fn the_daemon_is_upgraded_under_load_on_one_queue() {
    survives(1, upgrades() / 2);
}

#[test]
fn the_daemon_is_upgraded_under_load_on_four_queues() {
    survives(4, upgrades() - upgrades() / 2);
}
