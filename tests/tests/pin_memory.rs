//! `pin-memory=on`: the client's memory is registered with io_uring on each I/O thread that serves the client, as long as
//! it is connected. Where that fails, requests work without.

use std::fs;
use std::path::Path;

use integration::{
    BlkClient, Image, Request, Scratch, Segment, Server, ServerCommand, eventually, pattern,
    request,
};
use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::geteuid;
use test_requirements::{Needs, untested};

/// The client's memory for data; queues need more.
const MEMORY_KIB: u64 = 16 << 10;

/// `IORING_OP_*` of reads and writes, ordinary and fixed.
const ORDINARY: [u8; 4] = [1, 2, 22, 23];
const READ_FIXED: u8 = 4;
const WRITE_FIXED: u8 = 5;
const READV_FIXED: u8 = 60;
const WRITEV_FIXED: u8 = 61;

/// The operations that the daemon's rings have received so far.
fn operations(log: &Path) -> Vec<u8> {
    let text = fs::read_to_string(log).expect("the trace log");
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let opcode = |line: &str| {
        let (_, rest) = line.split_once(" opcode ").expect("an opcode");
        rest.split_once(' ').expect("more").0.parse().expect("a number")
    };
    whole.lines().map(opcode).collect()
}

fn eventually_pinned(server: &Server, what: &str, wanted: impl Fn(u64) -> bool) {
    eventually(what, || wanted(server.pinned_kib()).then_some(()));
}

/// Writes and reads on queue `queue`, in one segment or several, and compares.
fn use_disk(client: &mut BlkClient, queue: usize, generation: u64) {
    let blocks: Vec<_> = (0..4).map(|index| pattern::block(index, generation)).collect();
    for pieces in [1, 4] {
        let len = 4 * pattern::BLOCK / pieces;
        let at = |piece: usize| (1 << 20) + (piece * 5 * pattern::BLOCK) as u64;
        let segments = |device_writes| {
            (0..pieces).map(|piece| Segment { at: at(piece), len, device_writes }).collect()
        };
        for (piece, data) in blocks.concat().chunks(len).enumerate() {
            client.put(at(piece), data);
        }
        for (kind, device_writes) in [(request::OUT, false), (request::IN, true)] {
            client.submit(queue, &Request { kind, sector: 0, segments: segments(device_writes) });
            assert_eq!(client.wait(queue).expect("a reply")[0].status, 0);
            if kind == request::OUT {
                // So that a read cannot find the right data in the buffer.
                (0..pieces).for_each(|piece| client.put(at(piece), &vec![0xee; len]));
            }
        }
        let read: Vec<_> = (0..pieces).flat_map(|piece| client.get(at(piece), len)).collect();
        assert!(read == blocks.concat(), "other data than was written");
    }
}

#[test]
fn a_clients_memory_is_pinned_and_used_while_it_is_connected() {
    let (limit, _) = getrlimit(Resource::RLIMIT_MEMLOCK).expect("a limit");
    if !geteuid().is_root() && limit < 4 * (MEMORY_KIB << 10) {
        return untested(Needs::Root, format_args!("this user may pin {limit} bytes of memory"));
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 8);
    let log = scratch.path("trace.log");
    let server = ServerCommand::new(&scratch)
        .iothread("io0")
        .iothread("io1")
        .file("disk", &image, "cache.direct=on,aio=io_uring")
        .export("disk", "num-queues=2,iothread.0=io0,iothread.1=io1,pin-memory=on")
        .arg("--trace")
        .arg(format!("add_sqe,file={}", log.display()))
        .start();
    for connection in 1..=3 {
        let mut client = BlkClient::connect(&server.socket("disk"), 2, 128).expect("a device");
        eventually_pinned(&server, "memory, pinned by two threads", |kib| kib > 2 * MEMORY_KIB);
        // Both I/O threads use the registration after some time.
        let fixed = |opcode: &u8| [READ_FIXED, WRITE_FIXED].contains(opcode);
        for queue in 0..2 {
            eventually("operations on pinned memory", || {
                let before = operations(&log).len();
                use_disk(&mut client, queue, connection * 1000 + 999);
                operations(&log)[before..].iter().any(fixed).then_some(())
            });
        }
        let before = operations(&log).len();
        for generation in 0..10 {
            use_disk(&mut client, 0, connection * 1000 + generation);
            use_disk(&mut client, 1, connection * 1000 + generation);
        }
        let operations = &operations(&log)[before..];
        let count = |opcode| operations.iter().filter(|&&other| other == opcode).count();
        assert_eq!((count(READ_FIXED), count(WRITE_FIXED)), (20, 20));
        // Available since Linux 6.15.
        let vectored = count(READV_FIXED) + count(WRITEV_FIXED);
        let ordinary: usize = ORDINARY.into_iter().map(count).sum();
        assert!([(40, 0), (0, 40)].contains(&(vectored, ordinary)), "{vectored} {ordinary}");
        drop(client);
        eventually_pinned(&server, "nothing pinned any more", |kib| kib == 0);
        eventually("the memory to be unmapped", || (server.guest_mappings() == 0).then_some(()));
    }
    assert!(!server.log().contains("warning"), "{}", server.log());
    server.stop();
    assert_eq!(pattern::generation(3, &image.read(3 * 4096, pattern::BLOCK)), Ok(3009));
}

#[test]
fn nothing_is_pinned_by_default() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 8);
    let server = ServerCommand::new(&scratch)
        .file("disk", &image, "cache.direct=on,aio=io_uring")
        .export("disk", "")
        .start();
    let mut client = BlkClient::connect(&server.socket("disk"), 1, 128).expect("a device");
    use_disk(&mut client, 0, 1);
    assert_eq!(server.pinned_kib(), 0);
    drop(client);
    server.stop();
}

#[test]
fn beyond_the_limit_one_warning_and_requests_work() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 8);
    let server = ServerCommand::new(&scratch)
        .wrapped_by(env!("CARGO_BIN_EXE_limit-memlock"))
        .iothread("io0")
        .iothread("io1")
        .file("disk", &image, "cache.direct=on,aio=io_uring")
        .export("disk", "num-queues=2,iothread.0=io0,iothread.1=io1,pin-memory=on")
        .start();
    let warnings = |wanted| {
        let log = server.log();
        let warnings: Vec<_> = log.lines().filter(|line| line.contains("not pinned")).collect();
        assert!(warnings.len() <= wanted, "{warnings:#?}");
        (warnings.len() == wanted).then(|| warnings.last().map(|line| (*line).to_owned()))
    };
    for connection in 1..=2 {
        let mut client = BlkClient::connect(&server.socket("disk"), 2, 128).expect("a device");
        let warning = eventually("the warning", || warnings(connection)).expect("a warning");
        for word in [
            "export disk",
            "pinning all",
            "os error 12",
            "RLIMIT_MEMLOCK is 2 MiB",
            "LimitMEMLOCK=",
        ] {
            assert!(warning.contains(word), "{warning}");
        }
        use_disk(&mut client, 0, connection as u64);
        use_disk(&mut client, 1, connection as u64);
        drop(client);
        eventually("the memory to be unmapped", || (server.guest_mappings() == 0).then_some(()));
        eventually_pinned(&server, "nothing pinned", |kib| kib == 0);
        assert!(warnings(connection).is_some(), "one for each connection");
    }
    server.stop();
}
