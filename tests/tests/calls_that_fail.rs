//! EAGAIN and EINTR are no errors: every third call and operation of the data path fails with one of them, and no
//! client ever hears of it.
//!
//! By a library that is loaded before libc (`tests/clients/calls_that_fail.c`). A filter of system calls could only have
//! each of them fail, and sees nothing of what a ring is given to do.

use std::fs;

use integration::{BlkClient, Image, Scratch, ServerCommand, pattern, preloaded, request};

/// The disk's first half is written and read, the second discarded and zeroed.
const MIB: u64 = 2;
const BLOCKS: u64 = MIB * 128;

/// Has an image carried out by `aio`; what of it fails is `named`.
fn nobody_hears_of_what_fails(aio: &str, named: &[&str]) {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", MIB);
    let server = ServerCommand::new(&scratch)
        .env("LD_PRELOAD", preloaded(&scratch, "calls_that_fail.c"))
        .iothread("io0")
        .file("disk", &image, &format!("aio={aio},cache.direct=on,discard=unmap"))
        .export("disk", "iothread=io0")
        .start();
    let mut client = BlkClient::connect(&server.socket("disk"), 1, 16).expect("a device");
    let ok = |client: &mut BlkClient, kind: u32, data: &[u8]| {
        assert_eq!(client.call(kind, 0, data, 0).status, 0, "request of type {kind}");
    };
    for generation in 1..=2 * BLOCKS {
        let index = generation % BLOCKS;
        client.write(index * 8, &pattern::block(index, generation));
        let found = client.read(index * 8, pattern::BLOCK);
        assert_eq!(pattern::generation(index, &found), Ok(generation));
        if generation.is_multiple_of(8) {
            ok(&mut client, request::FLUSH, &[]);
            // 8 sectors, from the second half.
            let sector = (BLOCKS + index) * 8;
            let range = [sector.to_le_bytes(), 8u64.to_le_bytes()].concat();
            let kinds = [request::DISCARD, request::WRITE_ZEROES];
            ok(&mut client, kinds[(generation / 8 % 2) as usize], &range);
            assert_eq!(client.read(sector, pattern::BLOCK), [0; pattern::BLOCK]);
        }
    }
    drop(client);
    server.stop();
    for index in 0..BLOCKS {
        let found = image.read(index * pattern::BLOCK as u64, pattern::BLOCK);
        assert!(pattern::generation(index, &found).is_ok_and(|found| found > 0), "block {index}");
    }
    // What the library has to say as the process ends.
    let log = fs::read_to_string(scratch.path("daemon.log")).expect("the log");
    let failed = log.lines().rev().find_map(|line| line.strip_prefix("failed: "));
    let counts = failed.expect("the library's line").split(", ");
    let of =
        |name: &str| counts.clone().find_map(|count| count.strip_prefix(name)?.trim().parse().ok());
    for name in named {
        let failed: u64 = of(name).expect("a count");
        assert!(failed >= BLOCKS, "{name}: only {failed} have failed");
    }
}

#[test]
fn of_a_ring() {
    nobody_hears_of_what_fails("io_uring", &["enter", "operations"]);
}

#[test]
fn of_a_pool_of_threads() {
    nobody_hears_of_what_fails("threads", &["threads"]);
}

#[test]
fn of_linux_aio() {
    nobody_hears_of_what_fails("native", &["submit"]);
}
