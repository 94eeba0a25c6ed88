//! Load generators and comparisons with peers. See docs/BENCHMARKS.md.

mod bare;
mod echo;
mod figures;
mod flame;
mod fuse;
mod goal;
mod guards;
mod host;
mod load;
#[cfg(feature = "loops")]
mod loops;
mod nbd;
mod neighbours;
mod options;
mod peers;
mod plot;
mod polling;
mod report;
mod results;
#[cfg(target_arch = "x86_64")]
mod round_trips;
mod scale;
mod upgrade;

use std::process::ExitCode;

use anyhow::{Result, ensure};
use nix::unistd::Pid;

use host::process::Usage;
use load::Client;
use options::{Command, LoadOptions};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    match options::parse(lexopt::Parser::from_env())? {
        Command::Help => print!("{}", options::HELP),
        Command::Peers(options) => peers::run(&options)?,
        Command::Nbd(options) => nbd::run(&options)?,
        Command::Fuse(options) => fuse::run(&options)?,
        Command::BareFuse { way, mountpoint } => fuse::bare::serve(way, &mountpoint)?,
        Command::Neighbours(options) => neighbours::run(&options)?,
        Command::Scale(options) => {
            let wanted = options.run.contenders.iter().any(|name| name == "ringmill");
            if wanted {
                peers::build_ringmill(&options.run.places)?;
            }
            scale::run(&options)?;
        }
        Command::Upgrade(options) => upgrade::run(&options)?,
        Command::Results(options) => results::run(&options)?,
        #[cfg(target_arch = "x86_64")]
        Command::RoundTrips(options) => round_trips::run(&options)?,
        Command::Polling(options) => polling::run(&options)?,
        Command::Load(options) => run_load(&options)?,
        Command::Flame(options) => flame::run(&options)?,
        Command::Guards(options) => guards::run(&options)?,
        Command::ServeRow { row, rounds, file } => guards::serve(&row, rounds, &file)?,
        #[cfg(feature = "loops")]
        Command::Loops(options) => loops::run(&options)?,
        #[cfg(feature = "loops")]
        Command::MeasureLoop { contender, row, conditions } => {
            loops::measure(&contender, &row, &conditions)?;
        }
    }
    Ok(())
}

fn run_load(options: &LoadOptions) -> Result<()> {
    let usage = || options.server_pid.map(|pid| Usage::read(Pid::from_raw(pid))).transpose();
    let running = Client::connect(&options.socket, &options.load)?.start()?;
    std::thread::sleep(options.warm_up);
    running.measure(true);
    let before = (std::time::Instant::now(), running.completed(), usage()?);
    std::thread::sleep(options.run_time);
    let after = (std::time::Instant::now(), running.completed(), usage()?);
    running.measure(false);
    let (latencies, _) = running.finish()?;
    let requests = (after.1 - before.1) as f64;
    ensure!(requests > 0.0, "no request was served within {:?}", options.run_time);
    let microseconds = |percentile| latencies.value_at_percentile(percentile) as f64 / 1e3;
    println!(
        "{:.0} IOPS, latency p50 {:.1} us, p99 {:.1} us, p99.9 {:.1} us",
        requests / (after.0 - before.0).as_secs_f64(),
        microseconds(50.0),
        microseconds(99.0),
        microseconds(99.9)
    );
    if let (Some(before), Some(after)) = (before.2, after.2) {
        println!(
            "server: {:.3} CPU-seconds per million requests, {:.3} context switches per request",
            (after.cpu - before.cpu).as_secs_f64() * 1e6 / requests,
            after.switches.saturating_sub(before.switches) as f64 / requests
        );
    }
    Ok(())
}
