//! Many exports in one daemon: what each costs in memory and descriptors, and that all of them together
//! sleep when their front ends do.

use std::thread;
use std::time::Duration;

use integration::{BlkClient, Image, Scratch, Server, ServerCommand, eventually};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

const EXPORTS: usize = 100;

/// What an export may take at most, its node and a connected front end included, KiB of resident
/// memory: far more than it does take, and less than the 256 that are promised.
const MOST_KIB: u64 = 128;

fn node(index: usize) -> String {
    format!("disk{index}")
}

/// A daemon with this many exports of one image.
fn command<'a>(scratch: &'a Scratch, image: &Image, exports: usize) -> ServerCommand<'a> {
    (0..exports).fold(ServerCommand::new(scratch).iothread("io0"), |server, index| {
        server
            .file(&node(index), image, "aio=io_uring,cache.direct=on,locking=off")
            .export(&node(index), "iothread=io0,num-queues=4")
    })
}

/// Connects a front end to each export and has it read a little.
fn connect(server: &Server, exports: usize, queues: usize, size: u16) -> Vec<BlkClient> {
    // The front ends are in this process.
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("a limit");
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).expect("the soft limit may be the hard one");
    let socket = |index| server.socket(&node(index));
    let mut clients: Vec<_> = (0..exports)
        .map(|index| BlkClient::connect(&socket(index), queues, size).expect("the export serves"))
        .collect();
    for client in &mut clients {
        client.read(0, 4096);
    }
    clients
}

#[test]
fn an_export_takes_little_memory() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    for (queues, size) in [(1, 128), (4, 256)] {
        let [few, many] = [1, 1 + EXPORTS].map(|exports| {
            let server = command(&scratch, &image, exports).start();
            let clients = connect(&server, exports, queues, size);
            let kib = server.private_kib();
            drop(clients);
            server.stop();
            kib
        });
        let each = (many - few) / EXPORTS as u64;
        println!("{queues} queues of {size}: {few} KiB for one, {each} KiB for each other");
        assert!(each <= MOST_KIB, "{each} KiB per export with {queues} queues of {size}");
    }
}

#[test]
fn idle_exports_cause_no_wake_ups() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let server = command(&scratch, &image, EXPORTS).start();
    let clients = connect(&server, EXPORTS, 1, 128);
    // What the reads have started comes to its end, such as polling.
    let quiet = |time| {
        let before = server.context_switches();
        thread::sleep(time);
        server.context_switches() == before
    };
    eventually("a quiet second", || quiet(Duration::from_secs(1)).then_some(()));
    let before = server.context_switches();
    thread::sleep(Duration::from_secs(2));
    assert_eq!(server.context_switches(), before, "threads ran with nothing to do");
    drop(clients);
    server.stop();
}

#[test]
fn an_export_takes_few_descriptors_and_gives_them_back() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let server = command(&scratch, &image, EXPORTS).start();
    let alone = server.open_files();
    // Two nodes' worth of image and one socket, beside the daemon's own.
    assert!(alone < EXPORTS * 3 + 50, "{alone} files are open");
    for (queues, least) in [(1, 3), (4, 9)] {
        let clients = connect(&server, EXPORTS, queues, 128);
        let each = (server.open_files() - alone) / EXPORTS;
        // A connection and its memory; a kick, a call and an err for each queue, and rings for the latter two
        // if writing to them may wait.
        assert!((least..=2 + 5 * queues).contains(&each), "{each} files for {queues} queues");
        drop(clients);
        eventually("the descriptors to be given back", || {
            (server.open_files() <= alone).then_some(())
        });
    }
    assert_eq!(server.guest_mappings(), 0);
    server.stop();
}

/// 1024 open files, of which a login shell has a soft limit everywhere, do not do for these.
#[test]
fn the_soft_limit_of_open_files_is_raised_to_the_hard_one() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    let server = command(&scratch, &image, EXPORTS)
        .wrapped_by(env!("CARGO_BIN_EXE_limit-open-files"))
        .start();
    let clients = connect(&server, EXPORTS, 1, 128);
    assert!(server.open_files() > 128);
    drop(clients);
    server.stop();
}

#[test]
fn too_low_a_hard_limit_is_an_error_with_advice() {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", 1);
    // More than the program's hard limit.
    let (status, log) =
        command(&scratch, &image, 700).wrapped_by(env!("CARGO_BIN_EXE_limit-open-files")).run();
    assert_eq!(status.code(), Some(1), "{log}");
    for part in ["Too many open files", "1000 files open", "LimitNOFILE="] {
        assert!(log.contains(part), "{part}: {log}");
    }
}
