//! The daemon, simulated whole.
//!
//! The daemon library, with its production loops, queues, devices, exports and block nodes, runs over a simulated ring,
//! on one thread and in virtual time. Simulated guests check every byte that they read against a model, an operator
//! sends QMP commands, and faults come by the seed. The same seed shows the same failure again.

mod ahci;
mod attacker;
mod chain;
mod client;
mod coverage;
mod daemon;
mod fds;
mod guest;
mod host;
mod image;
mod journals;
mod lasting;
mod listener;
mod lives;
mod machine;
mod mappings;
mod model;
mod nvme;
mod operator;
mod options;
// Judges what power cuts leave of qcow2 images, and shares nothing with the driver.
#[expect(dead_code, reason = "encrypted images and snapshots are for the power-cut test")]
#[path = "../../block/tests/power/oracle.rs"]
mod oracle;
mod plan;
mod random;
mod report;
mod ring;
mod user;
mod vfio;
mod world;

use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::time::Instant;

use event_loop::sync::lock;

use self::options::Options;
use self::plan::Plan;
use self::report::Report;

/// Seeds per process, run one after the other. The end of the process frees the leaks of killed daemons.
const CHUNK: u64 = 8;

/// With fewer seeds, some faults or states may not occur.
const ENOUGH: u64 = 100;

fn main() -> ExitCode {
    let options = match Options::from_args() {
        Ok(Some(options)) => options,
        Ok(None) => {
            print!("{}", options::HELP);
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("sim: {error}");
            return ExitCode::FAILURE;
        }
    };
    match (options.worker, options.seeds) {
        (true, _) => run_here(&options),
        (false, 1) => run_one(&options),
        (false, _) => run_all(&options),
    }
}

/// Runs seeds one after the other.
fn run_here(options: &Options) -> ExitCode {
    for seed in (options.first..).step_by(options.step as usize).take(options.seeds as usize) {
        Report::print(&world::run(seed, &Plan::new(seed, options.requests), options.verbose));
    }
    ExitCode::SUCCESS
}

/// Runs one seed, to be looked at.
fn run_one(options: &Options) -> ExitCode {
    let plan = Plan::new(options.first, options.requests);
    if options.verbose {
        println!("{plan:#?}");
    }
    let outcome = world::run(options.first, &plan, options.verbose);
    let mut report = Report::default();
    report.add(&outcome);
    println!("{report}\ntrace {:016x}", outcome.trace);
    if is_enough(options, &report) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Whether so many requests and commands were answered as are wanted; says so if not.
fn is_enough(options: &Options, report: &Report) -> bool {
    let floors = [
        ("requests", report.requests(), options.at_least, "--at-least"),
        ("QMP commands", report.commands(), options.commands, "--commands-at-least"),
    ];
    floors.iter().fold(true, |enough, (what, answered, wanted, option)| {
        if answered < wanted {
            eprintln!("sim: {answered} {what} were answered, and {wanted} are wanted ({option})");
        }
        enough && answered >= wanted
    })
}

/// Runs seeds in processes of their own, several at a time.
fn run_all(options: &Options) -> ExitCode {
    let begin = Instant::now();
    // How many have been handed out.
    let next = Mutex::new(0);
    let (report, failed) = (Mutex::new(Report::default()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..options.jobs {
            scope.spawn(|| {
                loop {
                    let begun = {
                        let mut next = lock(&next);
                        let begun = *next;
                        *next += CHUNK;
                        begun
                    };
                    if begun >= options.seeds {
                        return;
                    }
                    let first = options.first + begun * options.step;
                    let (lines, good) = run_apart(options, first, CHUNK.min(options.seeds - begun));
                    lock(&report).read(&lines);
                    if !good {
                        lock(&failed).push(first);
                    }
                }
            });
        }
    });
    let (report, failed) = (lock(&report), lock(&failed));
    let took = begin.elapsed().as_secs_f64();
    let rate = report.requests() as f64 / took;
    println!("{report}");
    println!("{took:.1} s, {:.0} requests/s, {:.2e} requests per hour", rate, rate * 3600.0);
    let missing = report.missing(options.is_of_qcow2().then_some(coverage::OF_QCOW2));
    if !failed.is_empty() {
        eprintln!("sim: {} of {} seeds ran to their ends", report.runs(), options.seeds);
        return ExitCode::FAILURE;
    }
    if options.seeds >= ENOUGH && !missing.is_empty() {
        eprintln!("sim: never happened: {}", missing.join("; "));
        return ExitCode::FAILURE;
    }
    if is_enough(options, &report) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs seeds in another process. Returns its report, and whether all seeds passed.
fn run_apart(options: &Options, first: u64, seeds: u64) -> (String, bool) {
    let program = std::env::current_exe().expect("this program");
    let mut command = Command::new(program);
    command.args(["--worker", "--first", &first.to_string(), "--seeds", &seeds.to_string()]);
    command.args(["--step", &options.step.to_string()]);
    if let Some(requests) = options.requests {
        command.args(["--requests", &requests.to_string()]);
    }
    // Keeps the buffers of jobs, 1 MiB each, out of the heap: fresh pages are zero, and most of a buffer is never touched. glibc
    // would move them to the heap after the first one, and clear each as a whole.
    command.envs([("MALLOC_MMAP_THRESHOLD_", "1048576"), ("MALLOC_TRIM_THRESHOLD_", "67108864")]);
    // Errors of the worker appear in this process' standard error.
    let output = command.stderr(Stdio::inherit()).output().expect("a process");
    (String::from_utf8_lossy(&output.stdout).into_owned(), output.status.success())
}
