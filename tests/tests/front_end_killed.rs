//! The front end is killed with SIGKILL while it writes, thirty times in a row (`RINGMILL_LONG`: three hundred). No acknowledged write is
//! lost, no block is torn, no write of a dead front end lands later, and the daemon does not grow.

use std::io::Read;
use std::process::{Command, Stdio};

use fastrand::Rng;
use integration::{BlkClient, Image, Scratch, Server, ServerCommand, eventually, pattern};

/// Number of kills after which the daemon's resources are first measured.
const WARM: u64 = 10;
const MIB: u64 = 8;

/// Lets a front end write until it got `acknowledgements`, and kills it. Records acknowledged writes in `written`.
fn write_and_kill(server: &Server, seed: u64, acknowledgements: u64, written: &mut [u64]) {
    let mut writer = Command::new(env!("CARGO_BIN_EXE_pattern-writer"))
        .arg(server.socket("disk"))
        .arg(seed.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the writer can be run");
    let mut output = writer.stdout.take().expect("a pipe");
    let mut records = vec![0; 16 * acknowledgements as usize];
    output.read_exact(&mut records).expect("the writer writes");
    writer.kill().expect("the writer is our child");
    // Writes that it recorded in the pipe were acknowledged too.
    output.read_to_end(&mut records).expect("the rest");
    writer.wait().expect("the writer is our child");
    for record in records.chunks_exact(16) {
        let (index, generation) = record.split_at(8);
        let index = u64::from_ne_bytes(index.try_into().expect("eight bytes"));
        let generation = u64::from_ne_bytes(generation.try_into().expect("eight bytes"));
        written[index as usize] = generation;
    }
}

/// Reads the whole disk. Every block is whole and at least as new as its last acknowledged write. Returns the front end,
/// still connected.
fn verify(server: &Server, written: &mut [u64]) -> BlkClient {
    let mut client = BlkClient::connect(&server.socket("disk"), 1, 64).expect("a device");
    for mib in 0..MIB {
        let data = client.read(mib * 2048, 1 << 20);
        for (index, block) in (mib * 256..).zip(data.chunks_exact(pattern::BLOCK)) {
            let generation = pattern::generation(index, block).expect("a whole block");
            let acknowledged = &mut written[index as usize];
            assert!(
                generation >= *acknowledged,
                "block {index}: generation {acknowledged} was acknowledged, {generation} is read"
            );
            // Older data is wrong from now on, even if this write was not acknowledged.
            *acknowledged = generation;
        }
    }
    client
}

/// Kills `kills` front ends in turn. A thread pool has at most `pool` threads at any time.
fn front_ends_are_killed(
    kills: u64,
    file_options: &str,
    pool: usize,
    wrap: fn(ServerCommand<'_>) -> ServerCommand<'_>,
) {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch, "disk.img", MIB);
    let server = wrap(ServerCommand::new(&scratch))
        .iothread("io0")
        .file("disk", &image, file_options)
        .export("disk", "num-queues=2,iothread=io0")
        .start();
    let mut written = vec![0; (MIB << 20) as usize / pattern::BLOCK];
    let mut random = Rng::with_seed(1);
    let (mut open_files, mut threads, mut mappings, mut memory) = (0, 0, 0, 0);
    for kill in 1..=kills {
        // Sometimes at once, during the connection's setup.
        let acknowledgements = match random.u64(..400) {
            short if short < 40 => 0,
            some => some,
        };
        write_and_kill(&server, kill, acknowledgements, &mut written);
        let client = verify(&server, &mut written);
        // Measured while a front end is connected: the daemon then has all its resources.
        if kill == WARM {
            open_files = server.open_files();
            threads = server.threads();
            mappings = server.guest_mappings();
            memory = server.private_kib();
        }
        if kill == kills {
            eventually("the killed front ends' files to be closed", || {
                (server.open_files() == open_files).then_some(())
            });
            eventually("no more threads", || (server.threads() <= threads + pool).then_some(()));
            assert_eq!(server.guest_mappings(), mappings, "mappings of front ends' memory");
            let now = server.private_kib();
            assert!(now < memory + 1024, "{memory} KiB have become {now}");
        }
        drop(client);
    }
    server.stop();
    for (index, &generation) in (0..).zip(&written) {
        let block = image.read(index * pattern::BLOCK as u64, pattern::BLOCK);
        assert_eq!(pattern::generation(index, &block), Ok(generation));
    }
}

#[test]
fn with_io_uring() {
    let kills = if std::env::var_os("RINGMILL_LONG").is_some() { 300 } else { 30 };
    front_ends_are_killed(kills, "aio=io_uring,cache.direct=on", 0, |server| server);
}

#[test]
fn on_the_thread_pool() {
    front_ends_are_killed(30, "aio=threads", 64, |server| server);
}

#[test]
fn with_epoll() {
    front_ends_are_killed(30, "cache.direct=on", 64, |server| {
        server.wrapped_by(env!("CARGO_BIN_EXE_deny-io-uring"))
    });
}
