//! Many exports in one daemon: what each takes, whether the idle ones cost the busy ones anything, and what
//! a second I/O thread costs.

mod figures;
mod measure;
mod report;

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::host::{affinity, machine};
use crate::options::RunOptions;
use crate::peers::contender::{self, Contender};
use crate::peers::cpus;
use crate::peers::measure::{SocketDirectory, make_directory};
use figures::{DEPTHS, Figures, Rounds, SECOND_THREAD};
use measure::{Bench, Files};

/// What to measure, and where.
#[derive(Debug)]
pub(crate) struct Options {
    /// How.
    pub(crate) run: RunOptions,
    /// Numbers of exports.
    pub(crate) exports: Vec<usize>,
}

/// Descriptors that a client of one queue takes on our side, generously.
const FILES_PER_CLIENT: u64 = 16;

/// Measures and reports. Fails when ringmill could not be measured, not on any figure.
pub(crate) fn run(options: &Options) -> Result<()> {
    let quick = options.run.quick;
    let rounds = options.run.rounds(3);
    let most = *options.exports.iter().max().context("--exports names none")?;
    ensure!(!options.exports.contains(&0), "--exports: there is at least 1");
    let contenders: Vec<Contender> = options
        .run
        .contenders
        .iter()
        .map(|name| contender::find(name, &options.run.places))
        .collect::<Result<_>>()?;
    raise_limit(most as u64 * FILES_PER_CLIENT)?;
    let directory = make_directory(&options.run.directory)?;
    let [client_cpu, server_cpu] = cpus(options.run.client_cpu, options.run.server_cpu)?;
    let conditions = machine::describe(&directory);
    let files = Files::new(&directory, most)?;
    let bench = Bench {
        directory,
        sockets: SocketDirectory::new()?,
        warm_up: Duration::from_millis(if quick { 100 } else { 500 }),
        run_time: options.run.run_time(300, 2000),
        settle: Duration::from_millis(1000),
        client_cpu,
        server_cpu,
    };
    if let Some(cpu) = client_cpu {
        affinity::bind_this_thread(cpu)?;
    }
    let figures = measure(&bench, options, &contenders, rounds)?;
    drop(files);
    let report = report::section(conditions, &bench, rounds, &contenders, &figures);
    report.publish(options.run.json.as_deref())?;
    if let Some(plots) = &options.run.plots {
        std::fs::create_dir_all(plots).with_context(|| format!("making {}", plots.display()))?;
        report::plot(&figures, &contenders).draw(&plots.join("scale-memory.svg"))?;
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
