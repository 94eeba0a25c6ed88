//! Load generators and comparisons with peers. See docs/BENCHMARKS.md.

mod bare;
mod echo;
pub mod figures;
mod flame;
mod fuse;
mod goal;
mod guards;
pub mod host;
mod img;
mod jobs;
pub mod load;
mod monitor;
mod nbd;
mod neighbours;
pub mod options;
mod peers;
mod polling;
pub mod report;
mod results;
#[cfg(target_arch = "x86_64")]
mod round_trips;
mod scale;
mod session;
mod upgrade;
mod url;

use std::process::ExitCode;

use anyhow::{Context, Result, ensure};

use options::{Command, Options, PEERS, ROUNDS, SERVERS};

/// The commands. Each says what it measures, how long that takes, and its defaults.
const COMMANDS: &[Command] = &[
    Command {
        name: "peers",
        about: "ringmill beside qemu-storage-daemon (14 minutes: 3 rounds of 2 s; --full 55 minutes: 3 of 5 s)",
        options: &[ROUNDS, SERVERS, PEERS, &["rows", "qsd", "full", "client"]],
        run: peers::run,
    },
    Command {
        name: "nbd",
        about: "the NBD server beside qemu-nbd and nbdkit (6 minutes: 3 rounds of 0.7 s)",
        options: &[ROUNDS, SERVERS, PEERS, &["rows"]],
        run: nbd::run,
    },
    Command {
        name: "fuse",
        about: "the FUSE export beside qemu-storage-daemon, nbdfuse and a bare loop (6 minutes: 5 rounds of 2 s; as root)",
        options: &[ROUNDS, SERVERS, PEERS, &["rows", "qsd"]],
        run: fuse::run,
    },
    Command {
        name: "neighbours",
        about: "what a stranger that breaks every rule takes from its neighbours (10 minutes: 3 rounds of 0.7 s; a server that hangs adds one)",
        options: &[ROUNDS, SERVERS, PEERS, &["rows", "qsd"]],
        run: neighbours::run,
    },
    Command {
        name: "scale",
        about: "many exports in one daemon: what each takes, what idle ones cost (10 minutes: 3 rounds of 2 s)",
        options: &[ROUNDS, SERVERS, PEERS, &["qsd", "exports"]],
        run: scale::run,
    },
    Command {
        name: "upgrade",
        about: "how long a live upgrade makes a guest wait (3 minutes: 50 upgrades per row)",
        options: &[ROUNDS, &["rows", "ringmill", "qsd-chroot"]],
        run: upgrade::run,
    },
    Command {
        name: "jobs",
        about: "backup, mirror, stream and commit beside qemu-storage-daemon's (3 minutes: 5 rounds)",
        options: &[ROUNDS, SERVERS, PEERS, &["rows", "qsd"]],
        run: jobs::run,
    },
    Command {
        name: "img",
        about: "ringmill img convert beside qemu-img convert and nbdcopy (15 minutes: 3 rounds; 25 GB of disk)",
        options: &[&["quick", "rounds", "dir", "json", "ringmill", "rows", "size"], PEERS],
        run: img::run,
    },
    Command {
        name: "url",
        about: "an image on a web server at 0, 10 and 50 ms, beside qemu-storage-daemon, nbdkit and curl (5 minutes: 3 rounds of 2 s)",
        options: &[ROUNDS, SERVERS, PEERS, &["rows", "qsd"]],
        run: url::run,
    },
    Command {
        name: "results",
        about: "wake-ups, ring-flags, batched-signals, polling: each mechanism off and on (15 minutes: 5 rounds of 0.8 s)",
        options: &[ROUNDS, SERVERS, &["rows"]],
        run: results::run,
    },
    #[cfg(target_arch = "x86_64")]
    Command {
        name: "round-trips",
        about: "one read at a time from a polling KVM guest, by device, on a null node (1 minute: 5 rounds)",
        options: &[ROUNDS],
        run: round_trips::run,
    },
    Command {
        name: "polling",
        about: "polling policies under real loads (50 minutes: 3 rounds of 1 s); fails if the default is beaten by 10% in latency \
                or CPU by one that is not worse in the other",
        options: &[ROUNDS, SERVERS, &["rows"]],
        run: polling::run,
    },
    Command {
        name: "guards",
        about: "instructions per request, by callgrind (5 s); fails if a request has become dearer than recorded",
        options: &[&["dir", "record"]],
        run: guards::run,
    },
    Command {
        name: "flame",
        about: "a flame graph of the daemon under reads at depth 64, by perf (10 s)",
        options: &[SERVERS, &["runtime", "dir", "output"]],
        run: flame::run,
    },
    Command {
        name: "loops",
        about: "the event loop beside tokio, monoio, compio, glommio and raw io_uring (5 minutes: 5 rounds of 0.5 s)",
        options: &[ROUNDS, &["rows", "contenders"]],
        run: run_loops,
    },
    Command {
        name: "load",
        about: "a load on any vhost-user-blk server (5 s)",
        options: &[&[
            "socket",
            "rw",
            "bs",
            "depth",
            "queues",
            "threads",
            "rate",
            "burst",
            "wait",
            "warm-up",
            "runtime",
            "cpu",
            "server-pid",
        ]],
        run: load::run,
    },
];

/// Runs the command of the command line.
pub fn main() -> ExitCode {
    exit_code(run())
}

/// Prints an error.
pub fn exit_code(result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    // Children of this program.
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    match arguments.as_slice() {
        [command, mountpoint] if command == "bare-fuse" => {
            return fuse::bare::serve(mountpoint.as_ref());
        }
        [command, program @ ..] if command == "timed" => return host::timed::child(program),
        [command, serve, row, rounds, file] if command == "guards" && serve == "--serve" => {
            let rounds = rounds.to_string_lossy().parse().context("rounds")?;
            return guards::serve(&row.to_string_lossy(), rounds, file.as_ref());
        }
        _ => {}
    }
    options::run(COMMANDS)
}

/// Runs the program of `bench loops`, which has the other runtimes and is no part of the workspace.
fn run_loops(_: &Options) -> Result<()> {
    let mut command = session::cargo();
    command.args(["run", "--release", "--locked", "--manifest-path"]);
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/loops/Cargo.toml"));
    command.arg("--").args(std::env::args_os().skip(1));
    let status = command.status().context("running cargo")?;
    ensure!(status.success(), "loops: {status}");
    Ok(())
}
