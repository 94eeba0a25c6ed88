//! ringmill beside its peers: contenders take turns, row by row.

mod bars;
pub(crate) mod client;
pub(crate) mod compare;
pub(crate) mod contender;
pub(crate) mod fio;
mod images;
mod limit;
pub(crate) mod measure;
pub(crate) mod method;
mod plots;
mod report;
pub(crate) mod result;
pub(crate) mod rows;
pub(crate) mod server;
pub(crate) mod tree;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::figures::turns;
use crate::host::{affinity, data_file, machine, syscalls};
use crate::options::RunOptions;
use crate::report::write_json;
use client::{Client, Wanted};
use contender::{Contender, Places, Polling};
use fio::Fio;
use limit::{Limits, Readers, measure_echo};
use measure::{Bench, SocketDirectory};
use report::Report;
use result::{LoadFigures, Outcome, RowResult};
use rows::{Contents, Disk, Extent, Row, Work};

/// What to measure, and where.
#[derive(Debug)]
pub(crate) struct Options {
    /// How.
    pub(crate) run: RunOptions,
    /// Which rows.
    pub(crate) extent: Extent,
    /// Who sends the load; by default fio for the full and the quick rows, if it is there.
    pub(crate) client: Option<Wanted>,
}

/// Measures and reports. Fails when a contender could not be measured, not on any figure.
pub(crate) fn run(options: &Options) -> Result<()> {
    let quick = options.extent == Extent::Quick;
    let rounds = options.run.rounds(3);
    let mut names = contender_names(options);
    if names.iter().any(|name| name != "qsd") {
        build_ringmill(&options.run.places)?;
    }
    let pinned = options.run.contenders.is_empty() && names.iter().any(|name| name == "pinned");
    let no_pinned = pinned && !contender::can_pin(&options.run.places)?;
    if no_pinned {
        names.retain(|name| name != "pinned");
    }
    let rows = chosen_rows(options)?;
    let contenders = find_contenders(&names, options)?;
    let tree = options.run.places.tree();
    let client = choose_client(options, Fio::find(&tree)?)?;
    let readers = Readers::find(&tree, &client)?;
    let directory = measure::make_directory(&options.run.directory)?;
    let [client_cpu, server_cpu] = cpus(options.run.client_cpu, options.run.server_cpu)?;
    let mut conditions = machine::describe(&directory);
    let size = if quick { 64 << 20 } else { 1 << 30 };
    let needs_file =
        rows.iter().any(|row| !matches!(row.disk, Disk::Null | Disk::Image(Contents::New, _)));
    let usual = if options.extent == Extent::Full { 5000 } else { 2000 };
    let data_file = match needs_file {
        true => data_file::prepare(&directory, size)?,
        false => PathBuf::new(),
    };
    let bench = Bench {
        images: images::Maker {
            tree: tree.clone(),
            directory: directory.clone(),
            data: data_file.clone(),
        },
        data_file,
        directory,
        sockets: SocketDirectory::new()?,
        warm_up: Duration::from_millis(if quick { 200 } else { 500 }),
        run_time: options.run.run_time(300, usual),
        client_cpu,
        server_cpu,
        client,
        count_syscalls: syscalls::can_count(),
    };
    // This thread reads /proc while servers are measured: not on their CPU.
    if let Some(cpu) = client_cpu {
        affinity::bind_this_thread(cpu)?;
    }
    conditions.push(method::describe(&bench, rounds, size));
    conditions.push(method::describe_client(&bench));
    if no_pinned {
        conditions.push("ringmill pinned: not measured, this ringmill has no pin-memory".into());
    }
    if rows.iter().any(|row| row.limits) {
        conditions.extend(readers.describe());
    }
    let estimate = method::estimate(&bench, &rows, contenders.len(), rounds, readers.count());
    eprintln!("this takes about {:.1} minutes", estimate.as_secs_f64() / 60.0);

    let mut results = Vec::new();
    let mut failures = 0;
    for (i, row) in rows.iter().enumerate() {
        eprintln!("[{}/{}] {}", i + 1, rows.len(), row.name);
        let result = measure_row(&bench, row, &contenders, &readers, rounds);
        for (contender, outcome) in contenders.iter().zip(&result.outcomes) {
            if let Outcome::Failed(reason) = outcome {
                failures += 1;
                eprintln!("{}, {}: {reason}", row.name, contender.name);
            }
        }
        for reason in &result.limits.failures {
            failures += 1;
            eprintln!("{}, {reason}", row.name);
        }
        results.push(result);
    }

    let report = Report {
        extent: options.extent,
        conditions,
        contenders: contenders.iter().map(|c| method::contender(&bench, c, &rows)).collect(),
        jobs: method::jobs(&bench.client, &rows)?,
        results,
    };
    print!("{}", report.text());
    if let Some(directory) = &options.run.plots {
        plots::draw(&report, directory)?;
    }
    if let Some(file) = &options.run.json {
        write_json(file, &[report.section()])?;
    }
    compare::no_failures(failures, &bench.directory)
}

fn contender_names(options: &Options) -> Vec<String> {
    if !options.run.contenders.is_empty() {
        return options.run.contenders.clone();
    }
    let usual: &[&str] = match options.extent {
        Extent::Standard => &["qsd", "ringmill"],
        _ => &["qsd", "ringmill", "pinned"],
    };
    usual.iter().map(|&name| name.into()).collect()
}

fn choose_client(options: &Options, fio: Option<Fio>) -> Result<Client> {
    let usual = match options.extent {
        Extent::Standard => Wanted::Own,
        _ => Wanted::Either,
    };
    Client::choose(options.client.unwrap_or(usual), fio)
}

/// All rounds of one row. A contender that fails is left out of the rounds that remain.
fn measure_row(
    bench: &Bench,
    row: &Row,
    contenders: &[Contender],
    readers: &Readers,
    rounds: usize,
) -> RowResult {
    let mut outcomes: Vec<Outcome> = contenders
        .iter()
        .map(|_| match row.work {
            Work::Load(_) => Outcome::Load(LoadFigures::default()),
            Work::Idle(_) => Outcome::Idle(Vec::new()),
        })
        .collect();
    let mut limits = Limits::default();
    for round in 0..rounds {
        for (contender, outcome) in turns(contenders, &mut outcomes, round) {
            if let Err(error) = measure_round(bench, row, contender, round, outcome) {
                *outcome = Outcome::Failed(format!("{error:#}"));
            }
        }
        if let (true, Work::Load(load)) = (row.limits, &row.work) {
            readers.measure(bench, load, &mut limits);
        }
        if let (true, Work::Load(load)) = (row.has_echo(), &row.work) {
            measure_echo(bench, row.disk, load, &mut limits);
        }
    }
    RowResult { row: row.clone(), outcomes, limits }
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
    rows.retain(|row| options.run.wants(&row.name));
    if rows.is_empty() {
        let known: Vec<String> =
            rows::rows(options.extent).into_iter().map(|row| row.name).collect();
        bail!("--rows matches none of: {}", known.join("; "));
    }
    Ok(rows)
}

/// The contenders; one that is named twice gets a number, and shows how large the noise is.
fn find_contenders(names: &[String], options: &Options) -> Result<Vec<Contender>> {
    let mut found: Vec<Contender> = Vec::new();
    for name in names {
        let mut contender = contender::find(name, &options.run.places)?;
        let before = names[..found.len()].iter().filter(|&n| n == name).count();
        if before > 0 {
            contender.name = format!("{}#{}", contender.name, before + 1);
        }
        found.push(contender);
    }
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

/// Builds ringmill beside this program, unless another one is to be run. Only if cargo has started this program: `cargo run -p
/// bench` does not build ringmill, and an old one would be measured.
pub(crate) fn build_ringmill(places: &Places) -> Result<()> {
    let cargo = std::env::var_os("CARGO").filter(|_| places.ringmill.is_none());
    let Some(cargo) = cargo else { return Ok(()) };
    let this = contender::beside_this("ringmill")?;
    let mut command = std::process::Command::new(cargo);
    command.args(["build", "-p", "ringmill"]);
    // What cargo tells this program of its package would have it build anew what depends on such variables.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    if this.parent().and_then(Path::file_name).is_some_and(|name| name == "release") {
        command.arg("--release");
    }
    let status = command.status().context("running cargo to build ringmill")?;
    ensure!(status.success(), "building ringmill failed ({status})");
    Ok(())
}
