//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use lexopt::prelude::{Long, Short, Value};

use crate::fuse::bare::Way;
use crate::load::arrivals::{Arrivals, Pace};
use crate::load::offsets::Order;
use crate::load::queue::Op;
use crate::load::{Load, Threads, Wait};
use crate::peers::client::Wanted;
use crate::peers::rows::Extent;
use crate::results::{self, options::Which};
use crate::{flame, guards, peers, polling, scale};

mod run;

pub(crate) use run::RunOptions;
use run::{PEERS, SERVERS, default_directory, list, number, seconds, string};

/// `bench --help`.
pub(crate) const HELP: &str = "\
Measures vhost-user-blk servers, and event loops.

bench peers [OPTIONS]   ringmill beside qemu-storage-daemon, in one run
  --quick               a few short rows, for CI (under a minute)
  --full                the rows with something to reach, and the bare ring (about 55 minutes)
  --rows TEXT,...       only rows whose name contains one of these
  --rounds N            rounds per row (3; with --quick 1)
  --runtime SECONDS     measured time per round (2; with --full 5, with --quick 0.3)
  --contenders NAME,... of qsd, ringmill, pinned (ringmill with pin-memory=on); the first is what
                        others are compared with (qsd,ringmill; with --full and --quick all);
                        qsd,qsd shows the noise
  --client WHICH        sends the load: fio (libblkio engine), or own (with --full and --quick fio
                        where scripts/setup-peers.sh has made it, else own)
  --qsd PATH            qemu-storage-daemon to run
  --qsd-chroot DIR      Debian tree with qemu-storage-daemon (default: the one that
                        scripts/setup-peers.sh makes if there is one, else PATH)
  --ringmill PATH       ringmill to run (default: the one beside this program)
  --dir DIR             for logs and the data file, whose file system is measured
                        (target/bench)
  --client-cpu N        CPU of the client (the first)
  --server-cpu N        CPU of the servers (the second)
  --plots DIR           also draw plots, into this directory
  --json FILE           also write the report into FILE

bench nbd [OPTIONS]     the NBD server beside qemu-nbd and nbdkit, in one run (about 6 minutes)
  --quick               a few short rows, for CI (under a minute)
  --rows TEXT,...       only rows whose name contains one of these
  --rounds N            rounds per row (3; with --quick 1)
  --runtime SECONDS     measured time per round (0.7; with --quick 0.2)
  --contenders NAME,... of ringmill, unpolled (ringmill with poll-max-ns=0), qemu-nbd, nbdkit (all)
  --qsd-chroot DIR      Debian tree with qemu-nbd and nbdkit (default as above, else PATH)
  --ringmill, --dir, --client-cpu, --server-cpu, --json   as above

bench fuse [OPTIONS]    the FUSE export beside qemu-storage-daemon and nbdfuse, and bare loops, in one run (about 6
                        minutes; as root, who may mount)
  --quick               a few short rows, for CI (under a minute)
  --rows TEXT,...       only rows whose name contains one of these
  --rounds N            rounds per row (5; with --quick 1)
  --runtime SECONDS     measured time per round (2; with --quick 0.3)
  --contenders NAME,... of ringmill, unpolled (ringmill with poll-max-ns=0), qsd, nbdfuse, bare (a loop that answers the
                        same messages), bare-uring (the same by FUSE over io_uring) (all that the kernel can)
  --qsd-chroot DIR      Debian tree with qemu-storage-daemon (default as above, else PATH)
  --ringmill, --dir, --client-cpu, --server-cpu, --json   as above

bench neighbours [OPTIONS]   what a stranger that breaks every rule takes from its neighbours
  --quick               short phases, to see that all of it works (under a minute)
  --rows TEXT,...       only rows whose name contains one of these
  --rounds N            rounds per attack (3; with --quick 1)
  --runtime SECONDS     measured time per phase (0.7; with --quick 0.1)
  --ringmill, --dir, --client-cpu, --server-cpu, --json   as above

bench scale [OPTIONS]   many exports in one daemon: what each takes, and what idle ones cost
  --quick               a short run with few exports, to see that all of it works
  --exports N,...       numbers of exports (1,10,100,500; with --quick 1,20)
  --rounds N            rounds per figure (3; with --quick 1)
  --runtime SECONDS     measured time per round and figure (2; with --quick 0.3)
  --contenders NAME,... servers (qsd,ringmill)
  --plots DIR           also draw plots, into this directory
  --qsd, --qsd-chroot, --ringmill, --dir, --client-cpu, --server-cpu, --json   as above

bench upgrade [OPTIONS]   how long a live upgrade makes a guest wait
  --quick               one upgrade per row, to see that all of it works
  --rows TEXT,...       only rows whose name contains one of these
  --rounds N            upgrades per row (50; with --quick 1)
  --plots DIR           also draw the plot, into this directory
  --qsd-chroot, --ringmill, --dir, --json   as above

bench results [OPTIONS]   the published results, each mechanism off and on
  --quick               a short run, to see that all of it works
  --only NAME,...       of wake-ups, ring-flags, batched-signals, polling (all)
  --rounds N            rounds per figure (5; with --quick 1)
  --runtime SECONDS     measured time per round and figure (0.8; with --quick 0.1)
  --dir DIR             for the data file, whose file system is measured (target/bench)
  --json FILE           also write the report into FILE

bench round-trips [OPTIONS]   the time of one read from a polling KVM guest, by device, on a null node
  --quick               one round, to see that all of it works
  --rounds N            rounds per device (5; with --quick 1)
  --json FILE           also write the report into FILE

bench polling [OPTIONS]   polling policies in the daemon, under real loads; fails where the default
                          is beaten by 10% in latency or CPU by one that is not worse in the other
  --quick               a short run, to see that all of it works: fails on no figure
  --only TEXT           loads whose names contain TEXT
  --rounds N            rounds per load (3; with --quick 1)
  --runtime SECONDS     measured time per round (1; with --quick 0.05)
  --dir DIR             for logs and the data file (target/bench)

bench load --socket PATH [OPTIONS]   a load on any vhost-user-blk server
  --rw WHAT             read, write, randread or randwrite (randread)
  --bs BYTES            block size (4096)
  --depth N             requests in flight per queue (1)
  --queues N            virtqueues (1)
  --threads WHICH       one over all queues, or per-queue (one)
  --rate N              requests per second, by the clock (as fast as served)
  --burst N             requests that arrive together, with --rate (1)
  --wait HOW            for completions: signal (sleep until signalled) or poll (signal)
  --warm-up SECONDS     load before anything counts (0.5)
  --runtime SECONDS     measured time (5)
  --cpu N               CPU to bind the client to (none)
  --server-pid PID      also print this process's CPU time per request

bench loops [OPTIONS]   the event loop beside tokio, monoio, compio, glommio and raw io_uring, in
                        one run; needs a build with --features loops
  --quick               short measurements, for CI (half a minute)
  --rows TEXT,...       only rows whose name contains one of these
  --contenders NAME,... only these
  --rounds N            rounds per row (5; with --quick 1)
  --runtime SECONDS     measured time per round (0.5; with --quick 0.05)
  --dir DIR             for the data file (target/bench)
  --device PATH         block device to read from (default: a loop device over tmpfs, root)
  --json FILE           also write the report into FILE

bench guards [OPTIONS]   instructions per request, counted by callgrind, beside what was recorded;
                        fails where a request has become dearer (half a minute)
  --record              record them
  --dir DIR             for a data file and callgrind's output (target/bench)

bench flame [OPTIONS]   a flame graph of the daemon under reads at depth 64, by perf
  --runtime SECONDS     how long it is recorded (10)
  --ringmill PATH       ringmill to run (default: the one beside this program)
  --dir DIR             for the data file, whose file system shows (target/bench)
  --cpus N,M            CPUs of the client and of the server (none)
  --output FILE         the graph (docs/benchmarks/flame-read-64.svg)
";

const COMMANDS: &str = "peers, nbd, fuse, neighbours, scale, upgrade, results, round-trips, polling, load, guards, flame, loops";

/// What to do.
#[derive(Debug)]
pub(crate) enum Command {
    /// Print the help text.
    Help,
    /// Compare servers.
    Peers(Box<peers::Options>),
    /// Compare NBD servers.
    Nbd(Box<RunOptions>),
    /// Compare servers of a file.
    Fuse(Box<RunOptions>),
    /// A child of that: the floor.
    BareFuse {
        /// How messages are exchanged.
        way: Way,
        /// Where to mount.
        mountpoint: PathBuf,
    },
    /// Attackers and their neighbours.
    Neighbours(Box<RunOptions>),
    /// Many exports.
    Scale(Box<scale::Options>),
    /// Measure upgrades.
    Upgrade(Box<RunOptions>),
    /// Reproduce the published results.
    Results(results::options::Options),
    /// Time single requests by device.
    #[cfg(target_arch = "x86_64")]
    RoundTrips(Box<RunOptions>),
    /// Compare polling policies.
    Polling(polling::Options),
    /// Load one server.
    Load(LoadOptions),
    /// Count instructions per request.
    Guards(guards::Options),
    /// Draw a flame graph.
    Flame(flame::Options),
    /// A child of [`Guards`](Self::Guards): serve this many rounds.
    ServeRow {
        /// The row's name.
        row: String,
        /// Number of rounds.
        rounds: u64,
        /// The file for file rows.
        file: PathBuf,
    },
    /// Compare event loops.
    #[cfg(feature = "loops")]
    Loops(crate::loops::Options),
    /// A child of that: measure once.
    #[cfg(feature = "loops")]
    MeasureLoop {
        /// The contender's name.
        contender: String,
        /// The row's name.
        row: String,
        /// The parent's conditions.
        conditions: crate::loops::Conditions,
    },
}

/// `bench load`.
#[derive(Debug)]
pub(crate) struct LoadOptions {
    /// The server's socket.
    pub(crate) socket: PathBuf,
    /// The load.
    pub(crate) load: Load,
    /// Duration before the measurement.
    pub(crate) warm_up: Duration,
    /// Duration of the measurement.
    pub(crate) run_time: Duration,
    /// The server's process.
    pub(crate) server_pid: Option<i32>,
}

/// Reads the command line.
pub(crate) fn parse(mut parser: lexopt::Parser) -> Result<Command> {
    match parser.next()? {
        Some(Value(command)) if command == "peers" => parse_peers(&mut parser),
        Some(Value(command)) if command == "nbd" => parse_nbd(&mut parser),
        Some(Value(command)) if command == "fuse" => parse_fuse(&mut parser),
        Some(Value(command)) if command == "bare-fuse" => parse_bare_fuse(&mut parser),
        Some(Value(command)) if command == "neighbours" => parse_neighbours(&mut parser),
        Some(Value(command)) if command == "scale" => parse_scale(&mut parser),
        Some(Value(command)) if command == "upgrade" => parse_upgrade(&mut parser),
        Some(Value(command)) if command == "results" => parse_results(&mut parser),
        #[cfg(target_arch = "x86_64")]
        Some(Value(command)) if command == "round-trips" => parse_round_trips(&mut parser),
        Some(Value(command)) if command == "polling" => parse_polling(&mut parser),
        Some(Value(command)) if command == "load" => parse_load(&mut parser),
        Some(Value(command)) if command == "guards" => parse_guards(&mut parser),
        Some(Value(command)) if command == "flame" => parse_flame(&mut parser),
        #[cfg(feature = "loops")]
        Some(Value(command)) if command == "loops" => parse_loops(&mut parser),
        #[cfg(not(feature = "loops"))]
        Some(Value(command)) if command == "loops" => {
            bail!("loops: this program was built without the peers; add --features loops")
        }
        Some(Value(command)) => {
            bail!("unknown command {}; known are {COMMANDS}", command.display())
        }
        Some(Short('h') | Long("help")) => Ok(Command::Help),
        Some(argument) => Err(argument.unexpected().into()),
        None => {
            bail!("no command; known are {COMMANDS} (bench --help tells more)")
        }
    }
}

fn parse_peers(parser: &mut lexopt::Parser) -> Result<Command> {
    let (mut full, mut client) = (false, None);
    let run =
        RunOptions::read(parser, &[SERVERS, PEERS, &["rows", "qsd", "plots"]], |name, parser| {
            match name {
                "full" => full = true,
                "client" => {
                    client = Some(match string(parser)?.as_str() {
                        "fio" => Wanted::Fio,
                        "own" => Wanted::Own,
                        other => bail!("--client={other}: known are fio, own"),
                    });
                }
                _ => return Ok(false),
            }
            Ok(true)
        })?;
    let Some(run) = run else { return Ok(Command::Help) };
    let extent = match (run.quick, full) {
        (true, true) => bail!("--quick and --full exclude each other"),
        (true, false) => Extent::Quick,
        (false, true) => Extent::Full,
        (false, false) => Extent::Standard,
    };
    Ok(Command::Peers(Box::new(peers::Options { run, extent, client })))
}

fn parse_nbd(parser: &mut lexopt::Parser) -> Result<Command> {
    let run = RunOptions::read(parser, &[SERVERS, PEERS, &["rows"]], |_, _| Ok(false))?;
    Ok(run.map_or(Command::Help, |run| Command::Nbd(Box::new(run))))
}

fn parse_fuse(parser: &mut lexopt::Parser) -> Result<Command> {
    let run = RunOptions::read(parser, &[SERVERS, PEERS, &["rows"]], |_, _| Ok(false))?;
    Ok(run.map_or(Command::Help, |run| Command::Fuse(Box::new(run))))
}

fn parse_bare_fuse(parser: &mut lexopt::Parser) -> Result<Command> {
    let way = match parser.value()?.to_str() {
        Some("device") => Way::Device,
        Some("io_uring") => Way::IoUring,
        _ => bail!("bare-fuse: device or io_uring, and a mount point"),
    };
    Ok(Command::BareFuse { way, mountpoint: parser.value()?.into() })
}

fn parse_neighbours(parser: &mut lexopt::Parser) -> Result<Command> {
    let run = RunOptions::read(parser, &[SERVERS, &["rows"]], |_, _| Ok(false))?;
    Ok(run.map_or(Command::Help, |run| Command::Neighbours(Box::new(run))))
}

fn parse_scale(parser: &mut lexopt::Parser) -> Result<Command> {
    let mut exports = Vec::new();
    let run = RunOptions::read(parser, &[SERVERS, PEERS, &["qsd", "plots"]], |name, parser| {
        if name != "exports" {
            return Ok(false);
        }
        let numbers = list(&string(parser)?);
        let numbers = numbers.iter().map(|number| number.parse());
        exports = numbers.collect::<Result<_, _>>().context("--exports")?;
        Ok(true)
    })?;
    let Some(mut run) = run else { return Ok(Command::Help) };
    if exports.is_empty() {
        exports = if run.quick { vec![1, 20] } else { vec![1, 10, 100, 500] };
    }
    if run.contenders.is_empty() {
        run.contenders = vec!["qsd".into(), "ringmill".into()];
    }
    Ok(Command::Scale(Box::new(scale::Options { run, exports })))
}

fn parse_upgrade(parser: &mut lexopt::Parser) -> Result<Command> {
    let accepted: &[&[&str]] = &[&["ringmill", "qsd-chroot", "rows", "plots"]];
    let run = RunOptions::read(parser, accepted, |_, _| Ok(false))?;
    Ok(run.map_or(Command::Help, |run| Command::Upgrade(Box::new(run))))
}

fn parse_results(parser: &mut lexopt::Parser) -> Result<Command> {
    let mut which = Which::ALL.to_vec();
    let run = RunOptions::read(parser, &[], |name, parser| {
        if name != "only" {
            return Ok(false);
        }
        let names = list(&string(parser)?);
        which.retain(|which| names.contains(&which.to_string()));
        ensure!(
            which.len() == names.len(),
            "--only={}: known are {}",
            names.join(","),
            Which::ALL.map(|which| which.to_string()).join(", ")
        );
        Ok(true)
    })?;
    Ok(run.map_or(Command::Help, |run| Command::Results(results::options::Options { run, which })))
}

#[cfg(target_arch = "x86_64")]
fn parse_round_trips(parser: &mut lexopt::Parser) -> Result<Command> {
    let run = RunOptions::read(parser, &[], |_, _| Ok(false))?;
    Ok(run.map_or(Command::Help, |run| Command::RoundTrips(Box::new(run))))
}

fn parse_polling(parser: &mut lexopt::Parser) -> Result<Command> {
    let mut options = polling::Options {
        quick: false,
        only: String::new(),
        rounds: None,
        run_time: None,
        directory: default_directory()?,
    };
    while let Some(argument) = parser.next()? {
        match argument {
            Long("quick") => options.quick = true,
            Long("only") => options.only = string(parser)?,
            Long("rounds") => options.rounds = Some(number(parser, "--rounds")?),
            Long("runtime") => options.run_time = Some(seconds(parser, "--runtime")?),
            Long("dir") => options.directory = parser.value()?.into(),
            Short('h') | Long("help") => return Ok(Command::Help),
            argument => return Err(argument.unexpected().into()),
        }
    }
    Ok(Command::Polling(options))
}

fn parse_load(parser: &mut lexopt::Parser) -> Result<Command> {
    let mut load = peers::rows::load();
    let (mut socket, mut server_pid, mut rate, mut burst) = (None, None, None, 1);
    let (mut warm_up, mut run_time) = (Duration::from_millis(500), Duration::from_secs(5));
    while let Some(argument) = parser.next()? {
        match argument {
            Long("socket") => socket = Some(parser.value()?.into()),
            Long("rw") => {
                (load.op, load.order) = match string(parser)?.as_str() {
                    "read" => (Op::Read, Order::Sequential),
                    "write" => (Op::Write, Order::Sequential),
                    "randread" => (Op::Read, Order::Random),
                    "randwrite" => (Op::Write, Order::Random),
                    other => bail!("--rw={other}: known are read, write, randread, randwrite"),
                }
            }
            Long("bs") => load.block_size = number(parser, "--bs")?,
            Long("depth") => load.depth = number(parser, "--depth")?,
            Long("queues") => load.queues = number(parser, "--queues")?,
            Long("threads") => {
                load.threads = match string(parser)?.as_str() {
                    "one" => Threads::One,
                    "per-queue" => Threads::PerQueue,
                    other => bail!("--threads={other}: known are one, per-queue"),
                }
            }
            Long("rate") => rate = Some(number::<f64>(parser, "--rate")?),
            Long("burst") => burst = number(parser, "--burst")?,
            Long("wait") => {
                load.wait = match string(parser)?.as_str() {
                    "signal" => Wait::Signal,
                    "poll" => Wait::Poll,
                    other => bail!("--wait={other}: known are signal, poll"),
                }
            }
            Long("warm-up") => warm_up = seconds(parser, "--warm-up")?,
            Long("runtime") => run_time = seconds(parser, "--runtime")?,
            Long("cpu") => load.cpu = Some(number(parser, "--cpu")?),
            Long("server-pid") => server_pid = Some(number(parser, "--server-pid")?),
            Short('h') | Long("help") => return Ok(Command::Help),
            argument => return Err(argument.unexpected().into()),
        }
    }
    if let Some(per_second) = rate {
        ensure!(per_second > 0.0 && burst > 0, "--rate and --burst have to be more than 0");
        load.arrivals = Arrivals::Paced(Pace { per_second, burst });
    }
    ensure!(
        load.block_size > 0 && load.block_size.is_multiple_of(512),
        "--bs={}: has to be a multiple of 512",
        load.block_size
    );
    ensure!(load.depth > 0 && load.queues > 0, "--depth and --queues have to be more than 0");
    let socket = socket.context("--socket is missing")?;
    Ok(Command::Load(LoadOptions { socket, load, warm_up, run_time, server_pid }))
}

fn parse_guards(parser: &mut lexopt::Parser) -> Result<Command> {
    let mut options = guards::Options { directory: default_directory()?, record: false };
    while let Some(argument) = parser.next()? {
        match argument {
            Long("record") => options.record = true,
            Long("dir") => options.directory = parser.value()?.into(),
            Long("serve") => {
                let row = string(parser)?;
                let rounds = number(parser, "--serve")?;
                return Ok(Command::ServeRow { row, rounds, file: parser.value()?.into() });
            }
            Short('h') | Long("help") => return Ok(Command::Help),
            argument => return Err(argument.unexpected().into()),
        }
    }
    Ok(Command::Guards(options))
}

fn parse_flame(parser: &mut lexopt::Parser) -> Result<Command> {
    let mut options = flame::Options {
        run_time: Duration::from_secs(10),
        directory: default_directory()?,
        output: "docs/benchmarks/flame-read-64.svg".into(),
        ringmill: None,
        cpus: None,
    };
    while let Some(argument) = parser.next()? {
        match argument {
            Long("runtime") => options.run_time = seconds(parser, "--runtime")?,
            Long("ringmill") => options.ringmill = Some(parser.value()?.into()),
            Long("dir") => options.directory = parser.value()?.into(),
            Long("output") => options.output = parser.value()?.into(),
            Long("cpus") => {
                let text = string(parser)?;
                let cpus = text.split_once(',').context("--cpus: not two numbers")?;
                options.cpus = Some([cpus.0.parse()?, cpus.1.parse()?]);
            }
            Short('h') | Long("help") => return Ok(Command::Help),
            argument => return Err(argument.unexpected().into()),
        }
    }
    Ok(Command::Flame(options))
}

#[cfg(feature = "loops")]
fn parse_loops(parser: &mut lexopt::Parser) -> Result<Command> {
    let (mut device, mut measure) = (None, None);
    let run = RunOptions::read(parser, &[&["rows", "contenders"]], |name, parser| {
        match name {
            "device" => device = Some(parser.value()?.into()),
            "measure" => {
                let (contender, row) = (string(parser)?, string(parser)?);
                let conditions = crate::loops::Conditions::from_args(parser.raw_args()?)?;
                measure = Some(Command::MeasureLoop { contender, row, conditions });
            }
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    Ok(match (measure, run) {
        (Some(measure), _) => measure,
        (None, Some(run)) => Command::Loops(crate::loops::Options { run, device }),
        (None, None) => Command::Help,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(arguments: &str) -> Result<Command> {
        parse(lexopt::Parser::from_args(arguments.split_whitespace()))
    }

    #[test]
    fn options_are_read() {
        let Command::Load(options) =
            parsed("load --socket s --rw write --depth 8 --rate 1000 --burst 4").unwrap()
        else {
            panic!("not a load");
        };
        assert_eq!((options.load.op, options.load.order), (Op::Write, Order::Sequential));
        assert_eq!(options.load.arrivals, Arrivals::Paced(Pace { per_second: 1000.0, burst: 4 }));
        let Command::Peers(options) =
            parsed("peers --quick --contenders qsd,qsd --client own").unwrap()
        else {
            panic!("not peers");
        };
        assert_eq!(options.extent, Extent::Quick);
        assert_eq!(options.run.contenders, ["qsd", "qsd"]);
        assert_eq!(options.client, Some(Wanted::Own));
    }

    #[test]
    fn errors_name_what_is_wrong() {
        for (arguments, word) in [
            ("", "no command"),
            ("frobnicate", "frobnicate"),
            ("peers --frobnicate", "--frobnicate"),
            ("peers --client dd", "--client=dd"),
            ("peers --rounds x", "--rounds=x"),
            ("scale --exports 1,x", "--exports"),
            ("results --only polling,f9", "f9"),
            ("neighbours --contenders qsd", "--contenders"),
            ("peers --runtime -1", "--runtime=-1"),
            ("load", "--socket"),
            ("load --socket s --bs 1000", "--bs=1000"),
            ("load --socket s --rw trim", "--rw=trim"),
        ] {
            let error = format!("{:#}", parsed(arguments).unwrap_err());
            assert!(error.contains(word), "{arguments}: {error}");
        }
    }
}
