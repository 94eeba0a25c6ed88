//! Many exports in one daemon: what each takes, whether the idle ones cost the busy ones anything, and what
//! a second I/O thread costs.

mod measure;
mod report;

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::figures::turns;
use crate::load::Load;
use crate::load::arrivals::{Arrivals, Pace};
use crate::options::Options;
use crate::peers::contender::Contender;
use crate::peers::rows;
use crate::session::Session;
use measure::{Bench, Busy, Files, Idle};

/// Descriptors that a client of one queue takes on our side, generously.
const FILES_PER_CLIENT: u64 = 16;

/// The depths at which one export is busy.
const DEPTHS: [usize; 2] = [1, 64];

/// The rounds of one server with one number of exports.
#[derive(Debug, Clone, Default)]
struct Rounds {
    /// When idle.
    idle: Vec<Idle>,
    /// With one busy export, by [`DEPTHS`].
    one_busy: [Vec<Busy>; DEPTHS.len()],
    /// With all exports busy.
    all_busy: Vec<Busy>,
    /// The reason of a failure, after which nothing was measured.
    failed: Option<String>,
}

/// A load for a number of I/O threads, with its name.
type ThreadLoad = (&'static str, fn(usize) -> Load);

/// The loads for one and two I/O threads: the same load for both, spread over two queues; and a queue with a load per
/// thread.
const SECOND_THREAD: [ThreadLoad; 4] = [
    ("the same two queues, depth 64", |_| unpaced(2)),
    ("the same two queues, 400000/s by 16", |_| paced(2, 400_000)),
    ("a queue each, depth 64", unpaced),
    ("a queue each, 200000/s by 16", |threads| paced(threads, threads as u32 * 200_000)),
];

fn unpaced(queues: usize) -> Load {
    Load { queues, depth: 64, ..rows::load() }
}

fn paced(queues: usize, per_second: u32) -> Load {
    let arrivals = Arrivals::Paced(Pace { per_second: per_second.into(), burst: 16 });
    Load { arrivals, ..unpaced(queues) }
}

/// All figures.
#[derive(Debug)]
struct Figures {
    /// The servers.
    servers: Vec<String>,
    /// By number of exports, beginning with the fewest: the rounds of each server.
    by_exports: Vec<(usize, Vec<Rounds>)>,
    /// By [`SECOND_THREAD`]: with one I/O thread, and with two; only of ringmill.
    threads: [[Vec<Busy>; 2]; SECOND_THREAD.len()],
}

/// Measures and reports. Fails when ringmill could not be measured, not on any figure.
pub(crate) fn run(options: &Options) -> Result<()> {
    let mut exports: Vec<usize> = options
        .list("exports")
        .iter()
        .map(|number| number.parse().with_context(|| format!("--exports={number}")))
        .collect::<Result<_>>()?;
    if exports.is_empty() {
        exports = if options.quick() { vec![1, 20] } else { vec![1, 10, 100, 500] };
    }
    exports.sort_unstable();
    ensure!(!exports.contains(&0), "--exports: there is at least 1");
    let most = exports[exports.len() - 1];
    raise_limit(most as u64 * FILES_PER_CLIENT)?;
    let session = Session::new(options, 3, [300, 2000])?;
    let contenders = Contender::all(options, &["qsd", "ringmill"], 0)?;
    let files = Files::new(&session.directory, most)?;
    let bench = Bench { session, settle: Duration::from_millis(1000) };
    let mut figures = Figures {
        servers: contenders.iter().map(|contender| contender.name.clone()).collect(),
        by_exports: exports
            .iter()
            .map(|&n| (n, vec![Rounds::default(); contenders.len()]))
            .collect(),
        threads: Default::default(),
    };
    for round in 0..bench.session.rounds {
        measure(&bench, &contenders, &mut figures, round)?;
    }
    drop(files);
    report::section(&bench, &contenders, &figures).publish(options.path("json").as_deref())?;
    // A peer that fails is a line of the report.
    match figures.failures().find(|(server, ..)| *server == "ringmill") {
        Some((_, exports, why)) => bail!("ringmill with {exports} exports: {why}"),
        None => Ok(()),
    }
}

/// One round, the servers taking turns.
fn measure(
    bench: &Bench,
    contenders: &[Contender],
    figures: &mut Figures,
    round: usize,
) -> Result<()> {
    let rounds = bench.session.rounds;
    for (exports, servers) in &mut figures.by_exports {
        for (contender, at) in turns(contenders, servers, round) {
            eprintln!("[{}/{rounds}] {exports} exports, {}", round + 1, contender.name);
            if at.failed.is_none()
                && let Err(error) = measure_round(bench, contender, *exports, at)
            {
                eprintln!("{error:#}");
                at.failed = Some(format!("{error:#}"));
            }
        }
    }
    // What only ringmill has.
    for contender in contenders.iter().filter(|contender| contender.name == "ringmill") {
        eprintln!("[{}/{rounds}] one and two I/O threads", round + 1);
        for ((_, load), rounds) in SECOND_THREAD.iter().zip(&mut figures.threads) {
            for (io_threads, into) in turns(&[1, 2], rounds, round) {
                into.push(bench.threads(contender, *io_threads, &load(*io_threads))?);
            }
        }
    }
    Ok(())
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

impl Figures {
    /// The failures: server, number of exports, reason.
    fn failures(&self) -> impl Iterator<Item = (&str, usize, &str)> {
        self.lines().filter_map(|(exports, server, rounds)| {
            Some((server, exports, rounds.failed.as_deref()?))
        })
    }

    /// By number of exports, then by server.
    fn lines(&self) -> impl Iterator<Item = (usize, &str, &Rounds)> {
        self.by_exports.iter().flat_map(|(exports, rounds)| {
            let servers = self.servers.iter().map(String::as_str).zip(rounds);
            servers.map(|(server, rounds)| (*exports, server, rounds))
        })
    }

    /// The rounds of a server with the fewest exports.
    fn with_fewest(&self, server: &str) -> Option<(usize, &Rounds)> {
        let (exports, _, rounds) = self.lines().find(|(_, name, _)| *name == server)?;
        Some((exports, rounds))
    }

    /// The cost of each export beyond the smallest run's first one, for a figure of the whole server.
    fn each(
        &self,
        exports: usize,
        server: &str,
        rounds: &Rounds,
        figure: fn(&Idle) -> f64,
    ) -> Option<f64> {
        let (fewest, base) = self.with_fewest(server)?;
        let more = middle(&rounds.idle, figure) - middle(&base.idle, figure);
        (fewest != exports && more.is_finite()).then(|| more / (exports - fewest) as f64)
    }
}

/// The median of a figure; NaN without rounds.
fn middle<T>(rounds: &[T], figure: impl Fn(&T) -> f64) -> f64 {
    crate::figures::median(rounds.iter().map(figure))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::footprint::Footprint;

    #[test]
    fn the_first_export_stands_for_the_daemon_itself() {
        let idle = |anonymous: &[u64]| Rounds {
            idle: anonymous
                .iter()
                .map(|&anonymous| Idle {
                    footprint: Footprint { anonymous, ..Footprint::default() },
                    ..Idle::default()
                })
                .collect(),
            ..Rounds::default()
        };
        let (few, many, none) = (idle(&[1000]), idle(&[1300, 1200, 9999]), idle(&[]));
        let figures = Figures {
            servers: vec!["x".into()],
            by_exports: vec![(1, vec![few.clone()]), (11, vec![many.clone()])],
            threads: Default::default(),
        };
        let kib = |idle: &Idle| idle.footprint.anonymous as f64;
        assert_eq!(figures.each(11, "x", &many, kib), Some(30.0));
        assert_eq!(figures.each(1, "x", &few, kib), None);
        assert_eq!(figures.each(11, "x", &none, kib), None);
        assert_eq!(figures.each(11, "y", &many, kib), None);
    }
}
