//! EAGAIN and EINTR are transient: every third call and operation of the data path fails with one of them, and no client
//! sees an error.
//!
//! A library that is loaded before libc makes the calls fail (`tests/clients/calls_that_fail.c`). A seccomp filter could
//! only make all calls fail, and does not see the operations of a ring.

use std::fs;

use integration::{BlkClient, Image, Scratch, ServerCommand, pattern, preloaded, request};

/// The disk's first half is written and read, the second discarded and zeroed.
const MIB: u64 = 2;
const BLOCKS: u64 = MIB * 128;

/// Runs requests on an image with `aio`. The failing calls are `named` in the library's report.
fn transient_errors_are_invisible(aio: &str, named: &[&str]) {
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
            // 8 sectors in the second half.
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
    // The library's report at the end of the process.
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
    transient_errors_are_invisible("io_uring", &["enter", "operations"]);
}

#[test]
fn of_a_pool_of_threads() {
    transient_errors_are_invisible("threads", &["threads"]);
}

#[test]
fn of_linux_aio() {
    transient_errors_are_invisible("native", &["submit"]);
}
