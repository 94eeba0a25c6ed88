//! ringmill beside its peers: contenders take turns, row by row.

mod bars;
pub(crate) mod contender;
pub(crate) mod measure;
mod report;
mod result;
pub(crate) mod rows;
pub(crate) mod server;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::host::{affinity, data_file, machine, syscalls};
use crate::report::write_section;
use bars::bars;
use contender::{Contender, Places, Polling};
use measure::{Bench, SocketDirectory};
use report::Report;
use result::{LoadFigures, Outcome};
use rows::{Disk, Extent, Row, Work};

/// What to measure, and where.
#[derive(Debug)]
pub(crate) struct Options {
    /// How many rows.
    pub(crate) extent: Extent,
    /// Only rows whose name contains one of these, if there are any.
    pub(crate) only: Vec<String>,
    /// Names of the contenders; the first is what the others are compared with.
    pub(crate) contenders: Vec<String>,
    /// Where they are found.
    pub(crate) places: Places,
    /// Rounds per row.
    pub(crate) rounds: Option<usize>,
    /// Time that counts, per measurement.
    pub(crate) run_time: Option<Duration>,
    /// Where logs and the data file go.
    pub(crate) directory: PathBuf,
    /// The CPUs to bind client and server to; otherwise the first two.
    pub(crate) client_cpu: Option<usize>,
    /// See [`Self::client_cpu`].
    pub(crate) server_cpu: Option<usize>,
    /// The Markdown file to write the report into.
    pub(crate) markdown: Option<PathBuf>,
}

/// Measures and reports. Fails when a contender could not be measured, not on any figure.
pub(crate) fn run(options: &Options) -> Result<()> {
    let quick = options.extent == Extent::Quick;
    let rounds = options.rounds.unwrap_or(if quick { 1 } else { 3 });
    ensure!(rounds > 0, "--rounds has to be at least 1");
    let rows = chosen_rows(options)?;
    let contenders = find_contenders(options)?;
    let directory = measure::make_directory(&options.directory)?;
    let [client_cpu, server_cpu] = cpus(options.client_cpu, options.server_cpu)?;
    let mut conditions = machine::describe(&directory);
    let size = if quick { 64 << 20 } else { 1 << 30 };
    let needs_file = rows.iter().any(|row| row.disk == Disk::File);
    let bench = Bench {
        data_file: match needs_file {
            true => data_file::prepare(&directory, size)?,
            false => PathBuf::new(),
        },
        directory,
        sockets: SocketDirectory::new()?,
        warm_up: Duration::from_millis(if quick { 200 } else { 500 }),
        run_time: options.run_time.unwrap_or(Duration::from_millis(if quick { 500 } else { 2000 })),
        client_cpu,
        server_cpu,
        count_syscalls: syscalls::can_count(),
    };
    // This thread reads /proc while servers are measured: not on their CPU.
    if let Some(cpu) = client_cpu {
        affinity::bind_this_thread(cpu)?;
    }
    conditions.push(describe_method(&bench, rounds, size));

    let mut results = Vec::new();
    let mut failures = 0;
    for (i, row) in rows.iter().enumerate() {
        eprintln!("[{}/{}] {}", i + 1, rows.len(), row.name);
        let outcomes = measure_row(&bench, row, &contenders, rounds);
        for (contender, outcome) in contenders.iter().zip(&outcomes) {
            if let Outcome::Failed(reason) = outcome {
                failures += 1;
                eprintln!("{}, {}: {reason}", row.name, contender.name);
            }
        }
        results.push((row.clone(), outcomes));
    }

    let position = |name: &str| contenders.iter().position(|contender| contender.name == name);
    let bars = match (position("ringmill"), position("qsd")) {
        (Some(own), Some(base)) => bars(&results, own, base),
        _ => Vec::new(),
    };
    let described = contenders
        .iter()
        .map(|contender| {
            let command = command_to_show(&bench, contender, &rows);
            (contender.name.clone(), contender.version.clone(), command)
        })
        .collect();
    let report = Report { conditions, contenders: described, results, bars };
    print!("{}", report.text());
    if let Some(file) = &options.markdown {
        write_section(file, "bench peers", &report.markdown())?;
    }
    if failures > 0 {
        bail!(
            "{failures} measurements failed; the servers' output is in {}",
            bench.directory.display()
        );
    }
    Ok(())
}

/// All rounds of one row. A contender that fails is left out of the rounds that remain.
fn measure_row(bench: &Bench, row: &Row, contenders: &[Contender], rounds: usize) -> Vec<Outcome> {
    let mut outcomes: Vec<Outcome> = contenders
        .iter()
        .map(|_| match row.work {
            Work::Load(_) => Outcome::Load(LoadFigures::default()),
            Work::Idle(_) => Outcome::Idle(Vec::new()),
        })
        .collect();
    for round in 0..rounds {
        let mut turns: Vec<(&Contender, &mut Outcome)> =
            contenders.iter().zip(&mut outcomes).collect();
        // What drifts during a round (clock speed, the host's other guests) hits each in turn.
        if round % 2 == 1 {
            turns.reverse();
        }
        for (contender, outcome) in turns {
            if let Err(error) = measure_round(bench, row, contender, round, outcome) {
                *outcome = Outcome::Failed(format!("{error:#}"));
            }
        }
    }
    outcomes
}

fn measure_round(
    bench: &Bench,
    row: &Row,
    contender: &Contender,
    round: usize,
    outcome: &mut Outcome,
) -> Result<()> {
    match (&row.work, outcome) {
        (Work::Load(load), Outcome::Load(figures)) => {
            figures.default.push(bench.load(contender, row.disk, load, Polling::Default)?);
            figures.unpolled.push(bench.load(contender, row.disk, load, Polling::Off)?);
            if round == 0 {
                figures.syscalls = bench.syscalls(contender, row.disk, load)?;
            }
        }
        (Work::Idle(exports), Outcome::Idle(samples)) => {
            samples.push(bench.idle(contender, *exports)?);
        }
        // It has failed in an earlier round.
        _ => {}
    }
    Ok(())
}

fn chosen_rows(options: &Options) -> Result<Vec<Row>> {
    let mut rows = rows::rows(options.extent);
    if !options.only.is_empty() {
        rows.retain(|row| options.only.iter().any(|part| row.name.contains(part)));
        if rows.is_empty() {
            let known: Vec<String> =
                rows::rows(options.extent).into_iter().map(|row| row.name).collect();
            bail!("--rows matches none of: {}", known.join("; "));
        }
    }
    Ok(rows)
}

/// The contenders; one that is named twice gets a number, and shows how large the noise is.
fn find_contenders(options: &Options) -> Result<Vec<Contender>> {
    let mut found: Vec<Contender> = Vec::new();
    for name in &options.contenders {
        let mut contender = contender::find(name, &options.places)?;
        let before = options.contenders[..found.len()].iter().filter(|&n| n == name).count();
        if before > 0 {
            contender.name = format!("{name}#{}", before + 1);
        }
        found.push(contender);
    }
    ensure!(!found.is_empty(), "--contenders names none");
    Ok(found)
}

/// The CPUs of client and server: apart where there are two, unbound where there is one.
pub(crate) fn cpus(client: Option<usize>, server: Option<usize>) -> Result<[Option<usize>; 2]> {
    let allowed = affinity::allowed()?;
    let pick = |wanted: Option<usize>, nth: usize| match wanted {
        Some(cpu) if !allowed.contains(&cpu) => bail!("CPU {cpu} is not one of {allowed:?}"),
        Some(cpu) => Ok(Some(cpu)),
        None if allowed.len() < 2 => Ok(None),
        None => Ok(allowed.get(nth).copied()),
    };
    Ok([pick(client, 0)?, pick(server, 1)?])
}

fn describe_method(bench: &Bench, rounds: usize, size: u64) -> String {
    let bound = match (bench.client_cpu, bench.server_cpu) {
        (Some(client), Some(server)) if client != server => {
            format!("client on CPU {client}, server on CPU {server}")
        }
        _ => "client and server share the CPUs, so that figures of both are mixed up".into(),
    };
    let calls = match bench.count_syscalls {
        true => "system calls counted by perf",
        false => {
            "system calls not counted, since perf does not work here (Debian: linux-perf, as root)"
        }
    };
    let debug = if cfg!(debug_assertions) { "; DEBUG BUILD, figures mean nothing" } else { "" };
    format!(
        "Method: {rounds} round(s) of {:?} per server and row; {bound}; file of {} MiB, written with \
         random data; {calls}{debug}",
        bench.run_time,
        size >> 20
    )
}

/// The command of a contender, without what differs from machine to machine.
fn command_to_show(bench: &Bench, contender: &Contender, rows: &[Row]) -> String {
    let disk = rows.iter().map(|row| row.disk).find(|&disk| disk == Disk::File);
    let setup = bench.setup(disk.unwrap_or(Disk::Null), Polling::Off, 1, 1);
    let command = contender.command(&setup);
    // The loader of another tree and its options come before the program proper.
    let program = command.iter().rposition(|word| {
        let path = Path::new(word);
        path.is_absolute() && path.is_file()
    });
    command[program.unwrap_or(0)..]
        .iter()
        .enumerate()
        .map(|(i, word)| match i {
            0 => Path::new(word).file_name().unwrap_or(word).to_string_lossy().into_owned(),
            _ => word
                .to_string_lossy()
                .replace(&*bench.directory.to_string_lossy(), "$DIR")
                .replace(&*bench.sockets.0.to_string_lossy(), "$SOCKETS"),
        })
        .collect::<Vec<_>>()
        .join(" ")
}

/// Builds ringmill beside this program when cargo has started it: `cargo run -p bench` does not,
/// and a stale binary is not what is to be measured.
pub(crate) fn build_ringmill() -> Result<()> {
    let Some(cargo) = std::env::var_os("CARGO") else { return Ok(()) };
    let this = contender::beside_this("ringmill")?;
    let mut command = std::process::Command::new(cargo);
    command.args(["build", "-p", "ringmill"]);
    if this.parent().and_then(Path::file_name).is_some_and(|name| name == "release") {
        command.arg("--release");
    }
    let status = command.status().context("running cargo to build ringmill")?;
    ensure!(status.success(), "building ringmill failed ({status})");
    Ok(())
}
