//! Many exports in one daemon: what each takes, whether the idle ones cost the busy ones anything, and what
//! a second I/O thread costs.

mod figures;
mod measure;
mod report;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::host::{affinity, machine};
use crate::peers::contender::{self, Contender, Places};
use crate::peers::cpus;
use crate::peers::measure::{SocketDirectory, make_directory};
use crate::report::write_section;
use figures::{DEPTHS, Figures, Rounds, SECOND_THREAD};
use measure::{Bench, Files};

/// What to measure, and where.
#[derive(Debug)]
pub(crate) struct Options {
    /// A short run, to see that all of it works.
    pub(crate) quick: bool,
    /// Numbers of exports.
    pub(crate) exports: Vec<usize>,
    /// Names of the servers.
    pub(crate) contenders: Vec<String>,
    /// Where they are found.
    pub(crate) places: Places,
    /// Rounds per figure.
    pub(crate) rounds: Option<usize>,
    /// Time that counts, per measurement.
    pub(crate) run_time: Option<Duration>,
    /// Where logs and files go.
    pub(crate) directory: PathBuf,
    /// The CPUs to bind clients and servers to; otherwise the first two.
    pub(crate) client_cpu: Option<usize>,
    /// See [`Self::client_cpu`].
    pub(crate) server_cpu: Option<usize>,
    /// Where plots go.
    pub(crate) plots: Option<PathBuf>,
    /// The Markdown file to write the report into.
    pub(crate) markdown: Option<PathBuf>,
}

/// Descriptors that a client of one queue takes on our side, generously.
const FILES_PER_CLIENT: u64 = 16;

/// Measures and reports. Fails when ringmill could not be measured, not on any figure.
pub(crate) fn run(options: &Options) -> Result<()> {
    let quick = options.quick;
    let rounds = options.rounds.unwrap_or(if quick { 1 } else { 3 });
    ensure!(rounds > 0, "--rounds has to be at least 1");
    let most = *options.exports.iter().max().context("--exports names none")?;
    ensure!(!options.exports.contains(&0), "--exports: there is at least 1");
    let contenders: Vec<Contender> = options
        .contenders
        .iter()
        .map(|name| contender::find(name, &options.places))
        .collect::<Result<_>>()?;
    raise_limit(most as u64 * FILES_PER_CLIENT)?;
    let directory = make_directory(&options.directory)?;
    let [client_cpu, server_cpu] = cpus(options.client_cpu, options.server_cpu)?;
    let conditions = machine::describe(&directory);
    let files = Files::new(&directory, most)?;
    let bench = Bench {
        directory,
        sockets: SocketDirectory::new()?,
        warm_up: Duration::from_millis(if quick { 100 } else { 500 }),
        run_time: options.run_time.unwrap_or(Duration::from_millis(if quick { 300 } else { 2000 })),
        settle: Duration::from_millis(1000),
        client_cpu,
        server_cpu,
    };
    if let Some(cpu) = client_cpu {
        affinity::bind_this_thread(cpu)?;
    }
    let figures = measure(&bench, options, &contenders, rounds)?;
    drop(files);
    let report = report::Report::new(conditions, &bench, rounds, &contenders, &figures);
    print!("{}", report.text());
    if let Some(plots) = &options.plots {
        report.draw(plots)?;
    }
    if let Some(file) = &options.markdown {
        write_section(file, "bench scale", &report.markdown())?;
    }
    // A peer that fails is a line of the report.
    match figures.failures("ringmill").next() {
        Some((exports, why)) => bail!(
            "ringmill with {exports} exports: {why}; its output is in {}",
            bench.directory.display()
        ),
        None => Ok(()),
    }
}

/// All rounds, the servers taking turns, in flipped order each round.
fn measure(
    bench: &Bench,
    options: &Options,
    contenders: &[Contender],
    rounds: usize,
) -> Result<Figures> {
    let mut figures = Figures::default();
    let mut order: Vec<&Contender> = contenders.iter().collect();
    for round in 1..=rounds {
        for &exports in &options.exports {
            for contender in &order {
                let name = &contender.name;
                eprintln!("[{round}/{rounds}] {exports} exports, {name}");
                let at = figures.at(exports, name);
                if at.failed.is_none()
                    && let Err(error) = measure_round(bench, contender, exports, at)
                {
                    eprintln!("{error:#}");
                    at.failed = Some(format!("{error:#}"));
                }
            }
        }
        // What only ringmill has.
        for contender in contenders.iter().filter(|contender| contender.name == "ringmill") {
            eprintln!("[{round}/{rounds}] one and two I/O threads");
            for ((_, load), rounds) in SECOND_THREAD.iter().zip(&mut figures.threads) {
                for io_threads in if round % 2 == 1 { [1, 2] } else { [2, 1] } {
                    let load = load(io_threads);
                    rounds[io_threads - 1].push(bench.threads(contender, io_threads, &load)?);
                }
            }
        }
        order.reverse();
    }
    Ok(figures)
}

fn measure_round(
    bench: &Bench,
    contender: &Contender,
    exports: usize,
    rounds: &mut Rounds,
) -> Result<()> {
    rounds.idle.push(bench.idle(contender, exports).context("with nothing to do")?);
    for (depth, into) in DEPTHS.into_iter().zip(&mut rounds.one_busy) {
        into.push(bench.one_busy(contender, exports, depth).context("with one busy")?);
    }
    rounds.all_busy.push(bench.all_busy(contender, exports).context("with all busy")?);
    Ok(())
}

/// Every client takes descriptors of this process. The servers inherit the limit, so that it is none
/// for any of them.
fn raise_limit(wanted: u64) -> Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).context("getrlimit")?;
    ensure!(
        hard >= wanted,
        "the clients need {wanted} open files and the hard limit is {hard} (ulimit -Hn): name fewer \
         --exports"
    );
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).context("setrlimit")
}
