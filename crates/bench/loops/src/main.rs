//! `bench loops`: compares the event loop with its alternatives in Rust, row by row.
//!
//! Each measurement runs in a child process of this program (`--measure`). So none inherits another's threads, memory or
//! rings, and a panic is reported without ending the run.

mod async_rows;
mod compio;
mod conditions;
mod contenders;
mod executor;
mod glommio;
mod meter;
mod monoio;
mod page;
mod raw;
mod report;
mod ringmill;
mod ringmill_rows;
mod rows;
mod signal;
mod tokio;

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bench::figures::turns;
use bench::host::ram_disk::RamDisk;
use bench::host::{affinity, data_file, machine};
use bench::options::{self, Options, ROUNDS};
use bench::report::Section;

use conditions::Conditions;
use contenders::CONTENDERS;
use report::{Figure, Outcome};
use rows::Row;

const COMMANDS: &[options::Command] = &[options::Command {
    name: "loops",
    about: "the event loop beside tokio, monoio, compio, glommio and raw io_uring (5 minutes: 5 rounds of 0.5 s)",
    options: &[ROUNDS, &["rows", "contenders"]],
    run,
}];

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    bench::exit_code(match arguments.as_slice() {
        [measure, contender, row, conditions @ ..] if measure == "--measure" => {
            let (contender, row) = (contender.to_string_lossy(), row.to_string_lossy());
            Conditions::from_args(conditions.iter().cloned())
                .and_then(|conditions| self::measure(&contender, &row, &conditions))
        }
        _ => options::run(COMMANDS),
    })
}

/// Measures and reports. Fails when a contender could not be measured, not on any figure.
fn run(options: &Options) -> Result<()> {
    let rounds = options.rounds(5)?;
    let rows = options.choose(rows::ROWS.to_vec(), |row| row.name())?;
    let contenders = contenders::chosen(&options.list("contenders"))?;
    let cpus = match *affinity::allowed()? {
        [other, of_loop, ..] => [of_loop, other],
        [only] => [only, only],
        [] => bail!("this process may run on no CPU"),
    };
    let directory = options.directory()?;
    let size = if options.quick() { 64 << 20 } else { 1 << 30 };
    let mut text = machine::describe(&directory);
    let needs_file = rows.iter().any(|row| matches!(row, Row::FileRead(_)));
    let file = match needs_file {
        true => data_file::prepare(&directory, size)?,
        false => PathBuf::new(),
    };
    let needs_device = rows.iter().any(|row| matches!(row, Row::RamRead(_)));
    let ram_disk = match needs_device {
        true => Some(RamDisk::new(if options.quick() { 64 << 20 } else { 256 << 20 })).transpose(),
        false => Ok(None),
    };
    let (ram_disk, rows) = match ram_disk {
        Ok(ram_disk) => (ram_disk, rows),
        Err(error) => {
            text.push(format!("No block device in memory, its rows are left out: {error:#}"));
            let others = |row: &Row| !matches!(row, Row::RamRead(_));
            (None, rows.into_iter().filter(others).collect())
        }
    };
    let conditions = Conditions {
        cpu: cpus[0],
        other_cpu: cpus[1],
        run_time: options.run_time(50, 500),
        file,
        device: ram_disk.as_ref().map(RamDisk::path).unwrap_or_default(),
    };
    text.push(conditions.describe(rounds));
    text.extend(contenders.iter().map(|of| format!("{}: {}", of.name, of.settings)));
    let mut table = report::table(&contenders);
    let mut failures = Vec::new();
    for (i, &row) in rows.iter().enumerate() {
        eprintln!("[{}/{}] {}", i + 1, rows.len(), row.name());
        let mut figures = vec![Figure::default(); contenders.len()];
        for round in 0..rounds {
            for (contender, figure) in turns(&contenders, &mut figures, round) {
                if figure.goes_on() {
                    figure.note(measure_in_child(contender.name, row, &conditions));
                }
            }
        }
        // A peer that hangs is a result; other failures are not.
        for (contender, figure) in contenders.iter().zip(&figures) {
            if let Figure::Failed(why) = figure {
                failures.push(format!("{}, {} failed: {why}", row.name(), contender.name));
            }
        }
        table.row(report::line(row, &contenders, &figures));
    }
    text.extend(failures.iter().cloned());
    let report = Section { heading: String::new(), text, tables: vec![table] };
    report.publish(options.path("json").as_deref())?;
    ensure!(failures.is_empty(), "{} measurements failed", failures.len());
    Ok(())
}

/// Time limit of a child beyond its measurement.
const PATIENCE: Duration = Duration::from_secs(5);

/// A child's output if its contender lacks the row's feature.
const NOTHING: &str = "nothing";

/// Measures in a child process.
fn measure_in_child(contender: &str, row: Row, conditions: &Conditions) -> Result<Outcome> {
    let this = std::env::current_exe().context("finding this program's own path")?;
    let output = Command::new(this)
        .args(["--measure", contender, &row.name()])
        .args(conditions.to_args())
        .env("RUST_BACKTRACE", "0")
        .output()
        .context("starting a child to measure in")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    if output.status.signal() == Some(libc::SIGALRM) && contender != "ringmill" {
        return Ok(Outcome::Stuck);
    }
    ensure!(output.status.success(), "{} ({})", errors.trim(), output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    match text.trim() {
        NOTHING => Ok(Outcome::Nothing),
        figure => figure
            .parse()
            .map(Outcome::Measured)
            .with_context(|| format!("a child said {figure:?}")),
    }
}

/// The child's side: measures once and prints the figure.
fn measure(contender: &str, row: &str, conditions: &Conditions) -> Result<()> {
    let contender = CONTENDERS.iter().find(|known| known.name == contender);
    let contender = contender.with_context(|| "--measure: unknown contender")?;
    let row = rows::ROWS.iter().find(|known| known.name() == row);
    let row = *row.with_context(|| "--measure: unknown row")?;
    affinity::bind_this_thread(conditions.cpu)?;
    // SIGALRM ends this process if the contender hangs.
    nix::unistd::alarm::set(PATIENCE.as_secs() as u32 + conditions.run_time.as_secs() as u32);
    match (contender.measure)(row, conditions)? {
        Some(figure) => println!("{figure}"),
        None => println!("{NOTHING}"),
    }
    Ok(())
}
